"""A stop is orderly whenever it comes: while libraries are imported, between two runs, or after the last step."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from tiny import RECIPE, TASK, changed, environment

from spt.runtime import signals

CODES = {signal.SIGTERM: 75, signal.SIGINT: 130}
SENTENCES = {
    signal.SIGTERM: "spt: stopped; the same command continues\n",
    signal.SIGINT: "spt: interrupted; the same command continues\n",
}
names = ["SIGTERM", "SIGINT"]
both_signals = pytest.mark.parametrize("number", CODES, ids=names)

# A command that gets a signal at the moment at which it imports a module.
DURING_IMPORT = """
import signal, sys
module, number = sys.argv.pop(1), int(sys.argv.pop(1))

def hook(event, arguments):
    global module
    if event == "import" and arguments[0] == module:
        module = None
        signal.raise_signal(number)

sys.addaudithook(hook)
import spt_cli
spt_cli.main()
"""

# A command that gets a signal as it calls a function, whose module is imported first.
DURING_CALL = """
import importlib, signal, sys
place, number = sys.argv.pop(1), int(sys.argv.pop(1))
module, _, name = place.partition(":")
owner = importlib.import_module(module)
*path, name = name.split(".")
for part in path:
    owner = getattr(owner, part)
function = getattr(owner, name)

def signalled(*arguments, **options):
    signal.raise_signal(number)
    return function(*arguments, **options)

setattr(owner, name, signalled)
import spt_cli
spt_cli.main()
"""

# A command that says when a signal is its own to answer; until then it is Python's.
READY = """
from spt.runtime import signals
signals.install()
print("ready", flush=True)
import spt_cli
spt_cli.main()
"""


# The command as it is installed, with a signal before it can answer one.
EARLY = """
import signal, sys
number = int(sys.argv.pop(1))

def hook(event, arguments):
    if event == "import" and arguments[0] == "spt.runtime.signals":
        signal.raise_signal(number)

sys.addaudithook(hook)
from spt.__main__ import main
main()
"""

# A command that is slow to end after a first signal, and gets a Ctrl-C meanwhile.
ENDING = """
import signal, sys
from spt.runtime import signals
signals.install()
with signals.cleanup(lambda _: (print("cleaning up", flush=True), signal.raise_signal(signal.SIGINT), print("no"))):
    signal.raise_signal(int(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("signals")
    (folder / "toy.py").write_text(TASK)
    (folder / "small.yaml").write_text(yaml.safe_dump(changed(RECIPE, task={"name": "./toy.py"})))
    return folder


def spt(program: str, *arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    env = environment({"OMP_NUM_THREADS": "1"})
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, preexec_fn=hear, timeout=300)


def hear() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the background jobs of a shell ignore it


def state(runs: Path) -> dict:
    (status,) = runs.glob("*/status.json")
    return json.loads(status.read_text())


@both_signals
@pytest.mark.parametrize(
    "module",
    ["numpy._array_api_info", *(pytest.param(n, marks=pytest.mark.slow) for n in ("numpy._utils", "torch", "pyarrow"))],
)
def test_a_signal_during_an_import_ends_the_command_at_once(folder, number, module):
    """The first that doctor imports is torch, which swallows exceptions while it imports numpy for itself."""
    command = ("show", "quickstart") if module == "pyarrow" else ("doctor",)
    done = spt(DURING_IMPORT, module, number, *command, folder=folder)
    assert (done.returncode, done.stderr, done.stdout) == (CODES[number], SENTENCES[number], "")


@both_signals
def test_a_signal_before_any_can_be_answered_waits(folder, number):
    done = spt(EARLY, number, "doctor", folder=folder)
    assert (done.returncode, done.stderr, done.stdout) == (CODES[number], SENTENCES[number], "")


@both_signals
def test_a_second_ctrl_c_ends_what_is_ending(folder, number):
    done = spt(ENDING, number, folder=folder)
    assert (done.returncode, done.stderr, done.stdout) == (130, SENTENCES[signal.SIGINT], "cleaning up\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)], ids=names)
@pytest.mark.parametrize(
    ("place", "recorded"),
    [
        pytest.param("spt.training.stage:build_stage", None, marks=pytest.mark.slow),
        ("spt.training.stage:fit", "stopped"),
        pytest.param("spt.training.stage:_write_predictions", "stopped", marks=pytest.mark.slow),
    ],
    ids=["before the run", "before its first step", "after its last step"],
)
def test_a_signal_while_nothing_trains_leaves_a_run_that_can_go_on(folder, tmp_path, number, place, recorded):
    command = ("finetune", "small.yaml", "--scratch", "--out", tmp_path)
    done = spt(DURING_CALL, place, number, *command, folder=folder)
    assert (done.returncode, done.stdout) == (CODES[number], "")
    assert done.stderr.endswith(SENTENCES[number]) and "Traceback" not in done.stderr
    if recorded is None:
        assert not list(tmp_path.glob("*/status.json"))
    else:
        assert (state(tmp_path)["state"], state(tmp_path)["exit_code"]) == (recorded, CODES[number])
    assert spt("import spt_cli; spt_cli.main()", *command, folder=folder).returncode == 0
    assert state(tmp_path)["state"] == "done"


@pytest.mark.slow
@both_signals
@pytest.mark.parametrize("milliseconds", range(0, 1600, 160))
def test_a_signal_at_any_moment_of_the_start_is_answered(folder, tmp_path, number, milliseconds):
    """While libraries are imported, data opened, the first run built, or on a quick machine trained."""
    command = [sys.executable, "-c", READY, "compare", "small.yaml", "pretrain.train.steps=1000000"]
    command += ["--seeds", "2", "--out", str(tmp_path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    env = environment({"OMP_NUM_THREADS": "1"})
    with subprocess.Popen(command, cwd=folder, env=env, preexec_fn=hear, **pipes) as started:
        assert started.stdout.readline() == "ready\n"
        time.sleep(milliseconds / 1000)
        started.send_signal(number)
        output, errors = started.communicate(timeout=300)
    sentence = SENTENCES[number].partition(";")[0]
    assert (started.returncode, output) == (CODES[number], ""), errors
    assert errors.splitlines()[-1].startswith(sentence) and "Traceback" not in errors
    for path in tmp_path.glob("*/status.json"):
        assert json.loads(path.read_text())["state"] in ("stopped", "done")


POOL = """
import os, time
from pathlib import Path
from spt.runtime import signals
from spt.tasks.parallel import map_chunks

def make(first, last):
    Path(f"{first}.tmp").write_text(str(os.getpid()))
    Path(f"{first}.tmp").rename(f"{first}.pid")
    time.sleep(600)

if __name__ == "__main__":
    signals.install()
    list(map_chunks(make, 2, 1, "rows", "processes"))
"""


@pytest.mark.parametrize(
    ("variables", "speaks"),
    [
        ({}, True),
        ({"RANK": "0"}, True),
        ({"RANK": "1"}, False),
        ({"SLURM_PROCID": "1"}, True),  # a batch script, or a step of one task of its own
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, False),
        ({"SPT_EXIT_CODE_FILE": "code"}, False),
    ],
)
def test_one_of_several_processes_tells_of_the_signal(monkeypatch, variables, speaks):
    for name in ("RANK", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SPT_EXIT_CODE_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert signals._speaks() is speaks


@both_signals
def test_a_pool_ends_with_the_command(tmp_path, number):
    (tmp_path / "pool.py").write_text(POOL)
    env = environment({"OMP_NUM_THREADS": "1", "SPT_WORKERS": "2"})
    pipes = {"stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "pool.py"]
    with subprocess.Popen(command, cwd=tmp_path, env=env, start_new_session=True, preexec_fn=hear, **pipes) as started:
        while len(list(tmp_path.glob("*.pid"))) < 2:
            assert started.poll() is None
            time.sleep(0.02)
        os.killpg(started.pid, number)  # as a terminal does
        _, errors = started.communicate(timeout=300)  # until all have closed it
    assert (started.returncode, errors) == (CODES[number], SENTENCES[number])
