"""One run on several nodes: agents of torchrun that meet over the network, and srun's tasks; one process's outcome."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_processes import QUIET, SHARDED, folder, same_outcome
from test_slurm import cluster, two_nodes
from tiny import environment, spt

from spt.runtime import launch

__all__ = ["cluster", "folder", "two_nodes"]  # fixtures

Node = tuple[str, list[str], dict[str, str]]  # address, beginning of a command there, variables


@pytest.fixture
def agents() -> list[Node]:
    """Two that share this machine's network."""
    return [("127.0.0.1", [], {})] * 2


@pytest.fixture
def namespaces() -> Iterator[list[Node]]:
    """Two networks with a cable between them: no process of one can reach the other's loopback."""
    names = [f"spt{os.getpid()}{end}" for end in "ab"]
    addresses = ["10.213.77.1", "10.213.77.2"]
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    ip(f"link add {names[0]} type veth peer name {names[1]}")
    try:
        for name, address in zip(names, addresses, strict=True):
            ip(f"netns add {name}")
            ip(f"link set {name} netns {name}")
            for words in ("link set lo up", f"addr add {address}/24 dev {name}", f"link set {name} up"):
                ip(f"-n {name} {words}")
        yield [
            (address, ["ip", "netns", "exec", name], {"GLOO_SOCKET_IFNAME": name})
            for name, address in zip(names, addresses, strict=True)
        ]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            subprocess.run(["ip", "link", "del", name], capture_output=True)


def ip(words: str) -> None:
    done = subprocess.run(["ip", *words.split()], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no network namespaces here: {done.stderr.strip()}")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


def torchrun(nodes: list[Node], folder: Path, *program: str) -> list[str]:
    """A program by one process on each node; returns what each has said."""
    endpoint = f"{nodes[0][0]}:{free_port()}"
    running = []
    for i, (address, prefix, variables) in enumerate(nodes):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(nodes)), "--nproc-per-node", "1"]
        launcher += ["--rdzv-backend", "c10d", "--rdzv-id", "spt", "--rdzv-endpoint", endpoint]
        launcher += ["--rdzv-conf", f"is_host={int(i == 0)}", "--local-addr", address]
        process = subprocess.Popen(
            [*prefix, *launcher, *program],
            cwd=folder,
            env=environment({**QUIET, **variables}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        running.append(process)
    try:
        outputs = [process.communicate(timeout=300)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * len(nodes), "\n".join(outputs)
    return outputs


@pytest.mark.slow
@pytest.mark.parametrize("network", ["agents", "namespaces"])
def test_two_nodes_do_what_one_process_does(folder, network, request):
    nodes = request.getfixturevalue(network)
    assert spt("finetune", "small.yaml", "--out", "one", cwd=folder, env=QUIET).returncode == 0
    outputs = torchrun(nodes, folder, "-m", "spt_cli", "finetune", "small.yaml", "--out", "two")
    assert sum("2 processes (gloo, MULTI_CPU) on cpu" in output for output in outputs) == 1  # one of them speaks
    same_outcome(folder / "one", folder / "two")


@pytest.mark.slow
def test_what_two_nodes_have_trained_in_shards_is_a_model_like_any_other(folder, agents):
    """FSDP, version 2: one process finetunes what two nodes have pretrained, as if it had done so itself."""
    (folder / "sharded.py").write_text(SHARDED.replace("NUMBER", repr("2")))
    assert spt("finetune", "small.yaml", "--out", "one", cwd=folder, env=QUIET).returncode == 0
    outputs = torchrun(agents, folder, "sharded.py", "pretrain", "small.yaml", "--out", "two")
    assert any("2 processes (gloo, FSDP) on cpu" in output for output in outputs), outputs
    done = spt("finetune", "small.yaml", "--out", "two", cwd=folder, env=QUIET)
    assert done.returncode == 0, done.stderr
    same_outcome(folder / "one", folder / "two")


@pytest.mark.slurm
def test_a_step_of_srun_on_two_nodes_is_one_run(folder, two_nodes):
    assert spt("finetune", "small.yaml", "--out", "one", cwd=folder, env=QUIET).returncode == 0
    command = ["srun", "--nodes=2", "--ntasks=2", "--cpus-per-task=1", sys.executable, "-m", "spt_cli"]
    done = subprocess.run(
        [*command, "finetune", "small.yaml", "--out", "two"],
        cwd=folder,
        env=environment(QUIET),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("2 processes (gloo, MULTI_CPU) on cpu") == 1
    same_outcome(folder / "one", folder / "two")


def test_a_node_whose_name_only_slurm_knows_is_met_at_its_address(monkeypatch):
    def answer(command: list[str], **_: object) -> "subprocess.CompletedProcess[str]":
        assert command[:4] == ["scontrol", "-o", "show", "node"]
        known = command[4] == "n3.invalid"
        return subprocess.CompletedProcess(command, 0, "NodeName=n3 NodeAddr=10.0.0.3 NodeHostName=x" if known else "")

    monkeypatch.setattr(subprocess, "run", answer)
    step = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_JOB_ID": "7"}
    for nodes, address in (("n3.invalid", "10.0.0.3"), ("n4.invalid", "n4.invalid"), ("localhost", "localhost")):
        joined = {**step, "SLURM_STEP_NODELIST": nodes}
        launch.join_slurm(joined)
        assert joined["MASTER_ADDR"] == address
