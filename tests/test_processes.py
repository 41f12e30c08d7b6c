"""Several processes: the same batches, masks, losses and scores; one writes; a stop or a kill loses nothing."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from tiny import MODEL, RECIPE, ROOT, TASK, changed, environment, spt

from spt.errors import BackendError, Stopped, UsageError
from spt.runs.folder import RunFolder
from spt.runtime import launch
from spt.runtime.signals import CODE_FILE
from spt.training.stage import _record_stop

SMALL = {
    "task": {"name": "./toy.py"},
    "pretrain__train": {"steps": 9, "batch_size": 7, "learning_rate": 0.01, "evaluate_every": 3},
    "finetune__train": {"epochs": 2, "batch_size": 7, "learning_rate": 0.01, "schedule": "cosine", "warmup_steps": 2},
}
QUIET = {"OMP_NUM_THREADS": "1"}  # alike with one process and two


@pytest.fixture
def folder(tmp_path):
    """A task of 40 rows of different lengths, 17 and 19 in validation and test; batches of 7."""
    (tmp_path / "toy.py").write_text(TASK)
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(changed(RECIPE, **SMALL)))
    return tmp_path


def finished(runs: Path) -> dict[str, dict]:
    return {path.parent.name: json.loads(path.read_text()) for path in runs.glob("*/result.json")}


def logged(runs: Path) -> dict[str, list[dict]]:
    return {
        path.parent.name: [json.loads(line) for line in path.read_text().splitlines()]
        for path in runs.glob("*/metrics.jsonl")
    }


def close(a, b, tolerance=1e-4) -> None:
    """Two nested values with the same keys, numbers equal but for rounding."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            close(a[key], b[key], tolerance)
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            close(x, y, tolerance)
    elif isinstance(a, float):
        assert a == pytest.approx(b, rel=tolerance, abs=tolerance)
    else:
        assert a == b


def same_outcome(one: Path, two: Path) -> None:
    """Runs of the same names, with the same course and the same scores, counts exactly."""
    close(logged(one), logged(two))
    a, b = finished(one), finished(two)
    assert a.keys() == b.keys()
    for name in a:
        for key in ("val", "test"):
            close(a[name][key], b[name][key])
        for key in ("steps", "examples", "positions", "flops"):
            assert a[name]["total"][key] == b[name]["total"][key]
        assert a[name]["best_step"] == b[name]["best_step"] and a[name]["data"] == b[name]["data"]


@pytest.mark.parametrize(
    "options", [pytest.param([], marks=pytest.mark.slow), ["--micro-batch", "2"]], ids=["whole", "accumulated"]
)
def test_two_processes_do_what_one_does(folder, options):
    """Odd sizes: 40 rows in batches of 7 (the last has 5), 17 and 19 rows to score, sequences of 3 to 12 steps."""
    done = spt("finetune", "small.yaml", "--out", "one", cwd=folder, env=QUIET)
    assert done.returncode == 0, done.stderr
    done = spt("finetune", "small.yaml", "--out", "two", "--num-processes", 2, *options, cwd=folder, env=QUIET)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("2 processes (gloo, MULTI_CPU) on cpu") == 1
    assert done.stdout.count("finetune small seed 0") == 1  # one of them speaks
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr
    same_outcome(folder / "one", folder / "two")
    (result,) = [r for r in finished(folder / "two").values() if r["stage"] == "finetune"]
    assert result["environment"]["processes"] == 2
    assert result["own"]["device_seconds"] == pytest.approx(2 * result["own"]["seconds"])
    tables = [next((folder / part).glob("finetune-*/predictions.parquet")) for part in ("one", "two")]
    import pyarrow.parquet as pq

    one, two = (pq.read_table(table).to_pydict() for table in tables)
    assert one["id"] == two["id"] and np.allclose(one["margin"], two["margin"], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ({"name": "s4", "d_model": 8, "n_layers": 2, "d_state": 4}, ["--micro-batch", "2"]),
        ({"name": "s5", "d_model": 8, "n_layers": 2, "d_state": 8, "blocks": 2, "norm": "batch"}, []),
        ({"name": "s5", "d_model": 8, "n_layers": 2, "d_state": 8, "blocks": 2, "norm": "batch_padded"}, []),
        ({"name": "transformer", "d_model": 16, "n_layers": 1, "mask_padding": False}, ["--micro-batch", "2"]),
    ],
    ids=["kernels held over micro-batches", "batch norm", "batch norm of padding", "padding that is seen"],
)
def test_what_processes_share_is_that_of_one(folder, model, options):
    """A kernel's gradient is collected over micro-batches and exchanged once; statistics of a batch are those of all,
    although the two shares hold different lengths, padding and, in the last batch, a row that stands for nobody."""
    recipe = yaml.safe_load((folder / "small.yaml").read_text())
    (folder / "ssm.yaml").write_text(yaml.safe_dump({**recipe, "model": model}))
    for name, more in (("one", []), ("two", ["--num-processes", "2", *options])):
        done = spt("finetune", "ssm.yaml", "--out", name, *more, cwd=folder, env=QUIET)
        assert done.returncode == 0, done.stderr
    same_outcome(folder / "one", folder / "two")


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["finetune.freeze=true", "finetune.joint=0.5"])
def test_controls_by_two_processes(folder, setting):
    """No process waits for a gradient that a frozen part, or the other head of a joint loss, does not have."""
    for name, more in (("one", []), ("two", ["--num-processes", "2", "--micro-batch", "2"])):
        done = spt("finetune", "small.yaml", setting, "--out", name, *more, cwd=folder, env=QUIET)
        assert done.returncode == 0, done.stderr
    same_outcome(folder / "one", folder / "two")


@pytest.mark.slow
def test_a_comparison_by_two_processes_is_one_report(folder):
    command = ("compare", "small.yaml", "--seeds", 2, "--json")
    one = spt(*command, "--out", "one", cwd=folder, env=QUIET)
    two = spt(*command, "--out", "two", "--num-processes", 2, cwd=folder, env=QUIET)
    assert two.returncode == 0, two.stderr
    rows = [json.loads(done.stdout)["rows"][0] for done in (one, two)]
    for key in ("scratch", "spt", "delta", "low", "high"):
        assert rows[0][key] == pytest.approx(rows[1][key], abs=1e-6)
    same_outcome(folder / "one", folder / "two")
    again = spt(*command, "--out", "two", cwd=folder, env=QUIET)  # one process finds the runs of two, and is done
    assert json.loads(again.stdout)["rows"][0]["delta"] == rows[1]["delta"] and "weights from" not in again.stderr


def start(*arguments, cwd: Path, env: dict[str, str] | None = None) -> subprocess.Popen:
    command = [sys.executable, "-m", "spt_cli", *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=cwd, env=environment(env), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for(condition, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_stop_is_one_for_all(folder, number, code):
    """Query to stop, both processes finish the same step; one process goes on from there, to the same end."""
    long = ("pretrain", "small.yaml", "pretrain.train.steps=400", "pretrain.train.evaluate_every=100")
    whole = spt(*long, "--out", "whole", cwd=folder, env=QUIET)
    assert whole.returncode == 0
    child = start(*long, "--out", "parts", "--num-processes", 2, "--save-every", 0, cwd=folder, env=QUIET)
    wait_for(lambda: list((folder / "parts").glob("*/checkpoints/step-*")))
    child.send_signal(number)
    _, text = child.communicate(timeout=300)
    assert child.returncode == code, text
    assert text.count("the same command continues from there") == 1 and "Traceback" not in text
    (status,) = (folder / "parts").glob("*/status.json")
    status = json.loads(status.read_text())
    assert (status["state"], status["exit_code"]) == ("stopped", code)
    saved = sorted((folder / "parts").glob("*/checkpoints/step-*"))
    assert saved and not list((folder / "parts").glob("*/checkpoints/.*"))
    resumed = spt(*long, "--out", "parts", cwd=folder, env=QUIET)
    assert resumed.returncode == 0, resumed.stderr
    same_outcome(folder / "whole", folder / "parts")


def ranks(command: subprocess.Popen) -> dict[int, int]:
    """The processes that a command has started, by their number."""
    found = {}
    for pid in Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split():
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        found |= {int(entry[5:]): int(pid) for entry in environ if entry.startswith(b"RANK=")}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_process_killed_from_outside_is_named(folder, tmp_path_factory, number):
    """Also by the run's status; and the temporary files of all of them are gone."""
    temporary = tmp_path_factory.mktemp("temporary")
    long = ("pretrain", "small.yaml", "pretrain.train.steps=100000", "pretrain.train.evaluate_every=50")
    env = {**QUIET, "TMPDIR": str(temporary)}
    child = start(*long, "--num-processes", 2, "--save-every", 0, cwd=folder, env=env)
    wait_for(lambda: list(folder.glob("runs/*/checkpoints/step-*")))
    os.kill(ranks(child)[number], signal.SIGKILL)
    _, text = child.communicate(timeout=300)
    assert child.returncode == 4, text
    assert f"spt: process {number} of 2 was killed (SIGKILL, perhaps because memory ran out); what was saved" in text
    assert text.count("spt: ") == 1 and "Traceback" not in text
    (status,) = folder.glob("runs/*/status.json")
    status = json.loads(status.read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 4)
    assert status["reason"] == f"process {number} of this run was killed"
    assert [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor")] == []


DIES = """
import os, signal
if os.environ.get("RANK") == "1":
    os.kill(os.getpid(), signal.SIGSEGV)
"""


@pytest.mark.slow
def test_a_process_that_dies_under_accelerate_launch_is_named(folder):
    config = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "num_processes": 2, "num_machines": 1}
    config |= {"machine_rank": 0, "fsdp_config": {"fsdp_version": 2}, "mixed_precision": "no", "use_cpu": False}
    (folder / "accelerate.yaml").write_text(yaml.safe_dump(config))
    (folder / "toy.py").write_text(TASK + DIES)
    done = spt("pretrain", "small.yaml", "--accelerate-config", "accelerate.yaml", cwd=folder, env=QUIET)
    assert done.returncode == 4, done.stderr
    assert done.stderr.endswith(
        "spt: process 1 of 2 was killed (SIGSEGV); what was saved is kept and the same command continues\n"
    )
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_an_accelerate_config_that_is_none_is_one_sentence(folder):
    (folder / "rows.csv").write_text("a,b\n1,2\n")
    done = spt("pretrain", "small.yaml", "--accelerate-config", "rows.csv", cwd=folder, env=QUIET)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("spt: accelerate launch cannot use rows.csv: ")


KILLED, TERMINATED, STOPPED = -signal.SIGKILL, -signal.SIGTERM, "stopped after step 3; the same command continues"


@pytest.mark.parametrize(
    ("codes", "left", "received", "outcome"),
    [
        ([(0, 75), (1, KILLED)], f"75\n{STOPPED}", 0, "process 1 of 2 was killed (SIGKILL"),  # the survivor spoke first
        ([(0, 4), (1, KILLED)], "", 0, "process 1 of 2 was killed (SIGKILL"),
        ([(0, 75), (1, 7)], "", 0, "process 1 of 2 was killed (exit code 7)"),
        ([(0, KILLED), (1, 75)], "", signal.SIGTERM, "process 0 of 2 was killed (SIGKILL"),
        ([(0, 75), (1, 75)], f"75\n{STOPPED}", signal.SIGTERM, STOPPED),
        ([(0, 75), (1, 75)], f"75\n{STOPPED}", 0, STOPPED),  # one of them was asked
        ([(0, 130), (1, TERMINATED)], "", signal.SIGINT, "interrupted; the same command continues"),
        ([(0, TERMINATED)], "", signal.SIGTERM, "stopped; the same command continues"),
        ([(0, 5), (1, 5)], "5\nthe loss is nan", 0, 5),
        ([(0, 4), (1, -signal.SIGABRT)], "4\nno memory", 0, 4),  # who lost it was aborted
        ([], "", signal.SIGTERM, 0),  # it came after the last step
    ],
)
def test_what_several_processes_have_come_to(tmp_path, codes, left, received, outcome):
    path = tmp_path / "code"
    if left:
        path.write_text(left)
    if isinstance(outcome, int):
        assert launch._outcome(launch.by_cause(codes), 2, received, path) == outcome
        return
    with pytest.raises((BackendError, Stopped)) as caught:
        launch._outcome(launch.by_cause(codes), 2, received, path)
    assert str(caught.value).startswith(outcome)
    assert isinstance(caught.value, BackendError) == outcome.startswith("process")
    assert caught.value.exit_code == (4 if outcome.startswith("process") else 130 if received == signal.SIGINT else 75)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_partner_that_died_without_a_word_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setenv(CODE_FILE, str(tmp_path / "code"))
    assert launch.dead_process() is None
    (tmp_path / "process-0").write_text(str(os.getpid()))
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as child:
        (tmp_path / "process-1").write_text(str(child.pid))
        assert launch.dead_process() is None
        child.kill()
        wait_for(lambda: launch.dead_process() == 1)  # before anybody has waited for it
    assert launch.dead_process() == 1
    (tmp_path / "code").write_text("75")
    assert launch.dead_process() is None


@pytest.mark.slow
def test_killed_processes_leave_no_lock_and_no_orphans(folder):
    long = ("pretrain", "small.yaml", "pretrain.train.steps=3000", "pretrain.train.evaluate_every=1000")
    child = start(*long, "--out", "runs", "--num-processes", 2, "--save-every", 0, cwd=folder, env=QUIET)
    wait_for(lambda: list((folder / "runs").glob("*/checkpoints/step-*")))
    children = [int(pid) for pid in Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()]
    child.kill()
    child.communicate()
    wait_for(lambda: not any(running(pid) for pid in children))
    done = spt(*long, "pretrain.train.steps=3000", "--resume", "must", "--out", "runs", cwd=folder, env=QUIET)
    assert done.returncode == 2  # the override twice: said before anything is done
    done = spt(*long, "--resume", "must", "--out", "runs", cwd=folder, env=QUIET)
    assert done.returncode == 0, done.stderr


def running(pid: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.slow
def test_more_processes_resume_what_one_began(folder):
    long = ("pretrain", "small.yaml", "pretrain.train.steps=200", "pretrain.train.evaluate_every=50")
    assert spt(*long, "--out", "whole", cwd=folder, env=QUIET).returncode == 0
    child = start(*long, "--out", "parts", "--save-every", 0, cwd=folder, env=QUIET)
    wait_for(lambda: list((folder / "parts").glob("*/checkpoints/step-*")))
    child.kill()
    child.communicate()
    done = spt(*long, "--out", "parts", "--num-processes", 2, "--resume", "must", cwd=folder, env=QUIET)
    assert done.returncode == 0, done.stderr
    same_outcome(folder / "whole", folder / "parts")


@pytest.mark.slow
def test_an_error_is_said_once_with_its_code(folder):
    for wrong, code in (("model.n_heads=3", 2), ("finetune.train.learning_rate=1e30", 5)):
        done = spt("finetune", "small.yaml", wrong, "--scratch", "--num-processes", 2, cwd=folder, env=QUIET)
        assert done.returncode == code, done.stderr
        assert done.stderr.count("spt: ") == 1 and "Traceback" not in done.stderr
    (status,) = folder.glob("runs/finetune-*/status.json")
    assert json.loads(status.read_text())["exit_code"] == 5


def test_the_first_reason_stays(tmp_path):
    """A launcher ends the other processes when one has ended: what that one wrote is not written over."""
    run = RunFolder(tmp_path, "finetune-x")
    run.path.mkdir()
    run.set_status("diverged", "the loss is nan", 5)
    _record_stop(run, Stopped("stopped"), rank=1)
    assert run.status()["exit_code"] == 5
    run.set_status("running")
    _record_stop(run, Stopped("stopped"), rank=0)
    assert (run.status()["state"], run.status()["exit_code"]) == ("stopped", 75)


def test_others_wait_until_the_first_has_left_its_code(tmp_path, monkeypatch):
    code = tmp_path / "code"
    monkeypatch.setenv(CODE_FILE, str(code))
    timer = threading.Timer(1.5, code.write_text, ("5",))
    timer.start()
    launch.wait_for_code(1.0)  # ten seconds at most
    assert code.exists()
    timer.join()


@pytest.mark.slow
def test_two_programs_of_two_processes_do_not_share_a_run(folder):
    long = ("pretrain", "small.yaml", "pretrain.train.steps=100000", "--num-processes", 2, "--save-every", 0)
    first = start(*long, cwd=folder, env=QUIET)
    wait_for(lambda: list(folder.glob("runs/*/checkpoints/step-*")))
    second = spt(*long, cwd=folder, env=QUIET)
    assert second.returncode == 7 and "is being written by another process" in second.stderr
    assert second.stderr.count("spt: ") == 1
    first.terminate()
    first.communicate(timeout=300)
    assert first.returncode == 75


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "slurm", pytest.param("config", marks=pytest.mark.slow)])
def test_launchers_that_are_already_running_are_joined(folder, launcher):
    arguments = ["-m", "spt_cli", "pretrain", "small.yaml", "--num-processes", "2", "--json"]
    env = environment(QUIET)
    if launcher == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    elif launcher == "slurm":  # what srun gives to the two tasks of a step
        step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_JOB_ID": str(os.getpid())}
        step |= {"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}
        tasks = [
            subprocess.Popen(
                [sys.executable, *arguments],
                cwd=folder,
                env={**env, **step, "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for i in range(2)
        ]
        outcomes = [task.communicate(timeout=300) for task in tasks]
        assert [task.returncode for task in tasks] == [0, 0], outcomes
        assert outcomes[1] == ("", "")
        done = subprocess.CompletedProcess([], 0, *outcomes[0])
    else:  # a file that accelerate config writes; it forms one process for CPUs, whatever it says, so two are refused
        config = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "use_cpu": True, "num_processes": 1}
        (folder / "accelerate.yaml").write_text(yaml.safe_dump(config))
        arguments = ["pretrain", "small.yaml", "--accelerate-config", "accelerate.yaml", "--json"]
        done = spt(*arguments, cwd=folder, env=QUIET)
    assert done.returncode == 0, done.stderr
    if launcher != "config":
        assert "2 processes (gloo, MULTI_CPU) on cpu" in done.stderr
    assert json.loads(done.stdout)["environment"]["processes"] == (1 if launcher == "config" else 2)


def test_another_number_than_was_formed_is_refused(folder):
    alone = spt(
        "pretrain",
        "small.yaml",
        "--num-processes",
        3,
        cwd=folder,
        env={**QUIET, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"},
    )
    assert alone.returncode == 2 and "a launcher has formed 2" in alone.stderr
    missing = spt("pretrain", "small.yaml", "--accelerate-config", "none.yaml", cwd=folder)
    assert missing.returncode == 2 and "no accelerate config file none.yaml" in missing.stderr
    with pytest.raises(UsageError, match="this machine alone"):
        launch.check_request(1000, None)


# A model that has no memory in one process alone, in training or in evaluation.
ALONE = """
        import os, torch
        self.calls = getattr(self, "calls", 0) + (self.training == TRAINING)
        if os.environ.get("RANK") == "1" and self.training == TRAINING and self.calls in (2, 3, 4):
            raise torch.OutOfMemoryError("none left")
        x = self.map(x)
"""


def alone(folder: Path, training: bool) -> None:
    text = MODEL.replace("        x = self.map(x)\n", ALONE.replace("TRAINING", str(training)))
    (folder / "mine.py").write_text(text.replace("FORWARD", "x").replace("EXTRA", ""))
    options = {**SMALL, "model": {"name": "./mine.py", "d_model": 16, "n_layers": 1}}
    (folder / "small.yaml").write_text(yaml.safe_dump(changed(RECIPE, **options)))


@pytest.mark.slow
@pytest.mark.parametrize("command", ["pretrain", pytest.param("compare", marks=pytest.mark.slow)])
def test_what_strikes_one_process_is_told_by_it_and_ends_all(folder, command):
    alone(folder, training=True)
    done = spt(command, "small.yaml", "--num-processes", 2, cwd=folder, env=QUIET)
    assert done.returncode == 4, done.stderr
    assert "spt: process 1 has no memory for 4 sequences at once; --micro-batch 2 leaves" in done.stderr
    assert done.stderr.count("spt: ") == 1 and "Traceback" not in done.stderr
    (status,) = folder.glob("runs/pretrain-*/status.json")
    assert json.loads(status.read_text())["exit_code"] == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "how"),
    [
        ("os._exit(7)", "exit code 7"),
        pytest.param("os.kill(os.getpid(), 9)", "SIGKILL, perhaps because memory ran out", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_dies_is_no_orderly_stop(folder, end, how):
    """A scheduler that starts anew what ended with 75 would do so for ever."""
    alone(folder, training=True)
    text = (folder / "mine.py").read_text()
    (folder / "mine.py").write_text(text.replace('raise torch.OutOfMemoryError("none left")', end))
    done = spt("pretrain", "small.yaml", "--num-processes", 2, cwd=folder, env=QUIET)
    assert done.returncode == 4, done.stderr
    assert f"process 1 of 2 was killed ({how})" in done.stderr
    assert done.stderr.count("spt: ") == 1 and "GLHF" not in done.stderr
    (status,) = folder.glob("runs/pretrain-*/status.json")
    assert json.loads(status.read_text())["state"] == "failed"


@pytest.mark.slow
def test_files_of_the_current_folder_are_not_imported(folder):
    (folder / "numpy.py").write_text("raise RuntimeError('not me')\n")
    (folder / "run.py").write_text(f"import sys; sys.path[0] = {str(ROOT)!r}; import spt_cli; spt_cli.main()\n")
    command = [sys.executable, "run.py", "pretrain", "small.yaml", "--num-processes", "2"]
    done = subprocess.run(command, cwd=folder, env=environment(QUIET), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_an_evaluation_that_does_not_fit_one_process_is_cut_alike_by_all(folder):
    alone(folder, training=False)
    assert spt("pretrain", "small.yaml", "--out", "one", cwd=folder, env=QUIET).returncode == 0
    done = spt("pretrain", "small.yaml", "--num-processes", 2, "--out", "two", cwd=folder, env=QUIET)
    assert done.returncode == 0, done.stderr
    same_outcome(folder / "one", folder / "two")


@pytest.mark.slow
def test_a_tracker_outlives_no_group(folder):
    """Two runs, one after the other, each with its tracker."""
    done = spt("finetune", "small.yaml", "--num-processes", 2, "--tracker", "tensorboard", cwd=folder, env=QUIET)
    assert done.returncode == 0, done.stderr
    assert len(list(folder.glob("runs/*/spt/events*"))) >= 2 or len(list(folder.rglob("events.out*"))) >= 2


@pytest.mark.slow
def test_a_launchers_compiler_and_precision_are_not_ours(folder):
    env = {**QUIET, "ACCELERATE_DYNAMO_BACKEND": "EAGER", "ACCELERATE_MIXED_PRECISION": "bf16"}
    assert spt("pretrain", "small.yaml", "--out", "one", cwd=folder, env=QUIET).returncode == 0
    done = spt("pretrain", "small.yaml", "--out", "two", cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    same_outcome(folder / "one", folder / "two")


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"WORLD_SIZE": "two"}, "the variable WORLD_SIZE is 'two', not a number"),
        ({"WORLD_SIZE": "4", "RANK": "0"}, "MASTER_ADDR does not say where they meet"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "localhost"}, "RANK is 2 of WORLD_SIZE 2"),
        ({"SLURM_STEP_NUM_TASKS": "many"}, "SLURM_STEP_NUM_TASKS is 'many'"),
    ],
)
def test_variables_of_no_group_are_told(folder, variables, words):
    done = spt("pretrain", "small.yaml", cwd=folder, env={**QUIET, **variables})
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[03-05,9],login", "gpu03"), ("a1,a2", "a1"), ("single", "single"), ("rack2-[7,9]", "rack2-7")],
)
def test_the_first_host_of_a_slurm_list(nodes, first):
    assert launch.first_host(nodes) == first


def test_slurm_variables_outside_a_step_are_no_group():
    """A batch script sees the job's tasks, but is one process."""
    batch = {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}
    before = dict(batch)
    launch.join_slurm(batch)
    assert batch == before and launch.world_size(batch) == 1
    step = {**batch, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "n[1-2]"}
    launch.join_slurm(step)
    assert (launch.world_size(step), launch.rank(step), step["MASTER_ADDR"], step["LOCAL_WORLD_SIZE"]) == (
        4,
        0,
        "n1",
        "2",
    )
    assert 20000 <= int(step["MASTER_PORT"]) < 40000
    for shard, size in [("auto", 1), ("1/2", 4)]:  # a part for each task, or one part for the group
        alone = {**batch, "SLURM_STEP_NUM_TASKS": "4"}
        launch.join_slurm(alone, ["study", "run", "x.yaml", "--shard", shard])
        assert launch.world_size(alone) == size


def test_importing_the_launcher_needs_no_torch():
    program = "import sys, spt.runtime.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment()).returncode == 0


def test_a_rank_without_a_group_is_a_leftover(folder):
    done = spt("list", "tasks", cwd=folder, env={"RANK": "1", "LOCAL_RANK": "3"})
    assert done.returncode == 0 and "digits" in done.stdout
    variables = {"RANK": "1", "LOCAL_RANK": "3"}
    launch.check_group(variables)
    assert variables == {} and launch.rank({"RANK": "1"}) == 0
    variables = {"WORLD_SIZE": "", "RANK": "", "LOCAL_RANK": ""}  # a template that nobody filled in
    assert not launch.is_launched(variables)
    launch.check_group(variables)
    assert variables == {}


# Accelerate shards on GPUs alone; here it is told that the CPU is one.
SHARDED = """
import os
import torch.distributed
os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": NUMBER, "ACCELERATE_TORCH_DEVICE": "cpu"}
torch.distributed.init_process_group("gloo")
from accelerate.state import DistributedType, PartialState
PartialState._prepare_backend = lambda self, *_: ("gloo", DistributedType.MULTI_GPU)
import spt_cli
spt_cli.main()
"""


def sharded(folder: Path, *arguments: str, version: str = "2") -> subprocess.Popen:
    (folder / "sharded.py").write_text(SHARDED.replace("NUMBER", repr(version)))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*launcher, "sharded.py", *arguments],
        cwd=folder,
        env=environment(QUIET),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_model_in_shards_is_trained_saved_and_resumed_as_a_whole_one(folder):
    """FSDP, version 2, accumulating, in both stages; stopped, and continued from states saved in parts."""
    long = ("small.yaml", "pretrain.train.steps=60", "pretrain.train.evaluate_every=20")
    assert spt("finetune", *long, "--out", "one", cwd=folder, env=QUIET).returncode == 0
    command = ("finetune", *long, "--out", "two", "--micro-batch", "2", "--save-every", "0")
    child = sharded(folder, *command)
    wait_for(lambda: child.poll() is not None or list((folder / "two").glob("*/checkpoints/step-*")))
    child.terminate()
    _, errors = child.communicate(timeout=300)
    assert list((folder / "two").glob("*/status.json")), errors
    (status,) = (folder / "two").glob("*/status.json")
    assert json.loads(status.read_text())["exit_code"] == 75, errors
    whole = spt(*command, cwd=folder, env=QUIET)  # what was saved in parts is not for one process
    assert whole.returncode == 6 and "continue as it was begun" in whole.stderr, whole.stderr
    child = sharded(folder, *command)
    _, errors = child.communicate(timeout=300)
    assert child.returncode == 0, errors
    assert "2 processes (gloo, FSDP) on cpu" in errors
    same_outcome(folder / "one", folder / "two")


@pytest.mark.slow
def test_the_first_version_of_sharding_is_refused(folder):
    child = sharded(folder, "pretrain", "small.yaml", version="1")
    _, errors = child.communicate(timeout=300)
    assert child.returncode and "set fsdp_version: 2" in errors


@pytest.mark.slow
def test_a_reader_that_leaves_does_not_keep_the_other_waiting(folder):
    """`spt compare … | head`: process 0 cannot write its report; process 1, which is through, must not wait."""
    command = [sys.executable, "-m", "spt_cli", "compare", "small.yaml", "--seeds", "2", "--num-processes", "2"]
    assert spt(*command[3:], cwd=folder, env=QUIET).returncode == 0
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = subprocess.Popen(command, cwd=folder, env=environment(QUIET), **pipes)
    assert started.stdout.readline()
    started.stdout.close()
    assert started.wait(timeout=300) == 0
