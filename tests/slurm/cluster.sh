#!/bin/sh
# A Slurm cluster on this machine, for the tests marked slurm; all its state lies in one folder. Each of its nodes, one
# or as many as are asked for, is a slurmd of its own that has all cores.
#
#   apt-get install slurm-wlm munge
#   sh tests/slurm/cluster.sh start /tmp/slurm 2
#   SLURM_CONF=/tmp/slurm/slurm.conf OMP_NUM_THREADS=1 python -m pytest -m slurm tests/test_slurm.py
#   sh tests/slurm/cluster.sh stop /tmp/slurm
#
# Run as root: slurmd starts jobs for other users.
set -eu

usage() {
    echo "usage: sh cluster.sh start DIR [NODES] | stop DIR" >&2
    exit 2
}
[ $# -eq 2 ] || [ $# -eq 3 ] || usage
nodes=${3:-1}
mkdir -p "$2"
dir=$(cd "$2" && pwd)
export SLURM_CONF="$dir/slurm.conf"

stop() {
    for file in "$dir"/slurmd-*.pid "$dir/slurmctld.pid" "$dir/munged.pid"; do
        [ -f "$file" ] || continue
        pid=$(cat "$file")
        name=$(basename "$file" .pid)
        # Not another process that has got this number since.
        if [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "${name%%-*}" ]; then
            kill "$pid"
            for _ in $(seq 50); do
                kill -0 "$pid" 2>/dev/null || break
                sleep 0.2
            done
            kill -9 "$pid" 2>/dev/null || true
        fi
        rm -f "$file"
    done
}

start() {
    for program in munged slurmctld slurmd sbatch; do
        command -v "$program" >/dev/null || {
            echo "there is no $program; apt-get install slurm-wlm munge" >&2
            exit 1
        }
    done
    host=$(hostname -s)
    cpus=$(getconf _NPROCESSORS_ONLN)
    memory=$(awk '/^MemTotal/ {print int($2 / 1024 * 0.8 / '"$nodes"')}' /proc/meminfo)
    mkdir -p "$dir/state" "$dir/spool" "$dir/munge"
    chmod 700 "$dir/munge"
    dd if=/dev/urandom of="$dir/munge/key" bs=128 count=1 2>/dev/null
    chmod 400 "$dir/munge/key"
    munged --force --key-file="$dir/munge/key" --socket="$dir/munge/socket" --pid-file="$dir/munged.pid" \
        --log-file="$dir/munge/log" --seed-file="$dir/munge/seed"
    # A job that is queued again waits until its credential has expired: soon, here.
    cat >"$SLURM_CONF" <<CONF
ClusterName=one
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge/socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=1
MinJobAge=60
KillWait=30
MailProg=/bin/true
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd-%n.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd-%n.log
SlurmctldPort=16817
SlurmdTimeout=20
SlurmdParameters=config_overrides
$(for number in $(seq "$nodes"); do
        echo "NodeName=node$number NodeHostname=$host NodeAddr=127.0.0.1 Port=$((16817 + number)) CPUs=$cpus" \
            "RealMemory=$memory State=UNKNOWN"
    done)
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
    slurmctld -c
    for number in $(seq "$nodes"); do
        mkdir -p "$dir/spool/node$number"
        slurmd -c -N "node$number"
    done
    for _ in $(seq 60); do
        if [ "$(sinfo -h -N -o %T 2>/dev/null | grep -c -e idle -e mixed -e allocated)" -eq "$nodes" ]; then
            sinfo
            return
        fi
        sleep 0.5
    done
    echo "the nodes did not come up; see $dir/*.log" >&2
    stop
    exit 1
}

case "$1" in
start) start ;;
stop) stop ;;
*) usage ;;
esac
