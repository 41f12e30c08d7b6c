"""How processes come together, and what they say when some do not come."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from test_nodes import free_port
from test_processes import QUIET, folder
from tiny import environment

from spt.errors import BackendError, UsageError
from spt.runtime import rendezvous

__all__ = ["folder"]  # a fixture


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The first of two processes, which do not wait long."""
    variables = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(rendezvous, "LIMIT", 0.5)
    monkeypatch.setattr(rendezvous, "NOTICE", 0.1)
    return variables


@pytest.mark.parametrize(
    ("rank", "complaint"),
    [("0", r"process 1 of 2 did not come to 127\.0\.0\.1:"), ("1", r"process 0 does not answer at 127\.0\.0\.1:")],
)
def test_who_does_not_come_is_named(group, monkeypatch, messages, rank, complaint):
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(BackendError, match=f"{complaint}.* within . s; start all of them"), rendezvous.rendezvous():
        pass
    assert [text.endswith("yet; waiting up to 0 s") for text in messages] == [True]


def test_a_port_that_another_program_has_is_named(group):
    with socket.socket() as other:
        other.bind(("127.0.0.1", int(group["MASTER_PORT"])))
        other.listen()
        with (
            pytest.raises(BackendError, match=r"process 0 of 2 cannot meet the others.*MASTER_PORT"),
            rendezvous.rendezvous(),
        ):
            pass


@pytest.mark.parametrize("port", ["many", "0", "65536"])
def test_a_port_that_is_none(group, monkeypatch, port):
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(UsageError, match=f"MASTER_PORT is '{port}'"), rendezvous.rendezvous():
        pass


@pytest.mark.parametrize(
    ("rank", "number", "code"), [(0, signal.SIGINT, 130), pytest.param(1, signal.SIGTERM, 75, marks=pytest.mark.slow)]
)
def test_a_process_that_waits_for_others_answers_signals(folder: Path, rank: int, number: int, code: int) -> None:
    """It waits where torch would, in the middle of a command."""
    group = {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    program = "import spt_cli, spt.runtime.rendezvous as m; m.NOTICE = 0.2; spt_cli.main()"
    waiting = subprocess.Popen(
        [sys.executable, "-c", program, "finetune", "small.yaml", "--scratch", "--cpu"],
        cwd=folder,
        env=environment({**QUIET, **group, "MASTER_PORT": str(free_port())}),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        if rank == 0:
            assert waiting.stderr is not None and "did not come" in waiting.stderr.readline()
        else:  # which says nothing: that is for process 0
            with pytest.raises(subprocess.TimeoutExpired):
                waiting.communicate(timeout=20)
        os.kill(waiting.pid, number)
        said = waiting.communicate(timeout=20)[1]
    finally:
        waiting.kill()
    assert waiting.returncode == code and "Traceback" not in said and "frame" not in said
