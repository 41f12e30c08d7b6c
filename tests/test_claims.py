"""Whose a run is: locks and claims, among processes that live, die, are stopped or are on other machines."""

import contextlib
import errno
import os
import shutil
import signal
import time
from collections.abc import Iterator
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import pytest
from records import finish

from spt.errors import OutputError, RunInUse, RunTakenOver
from spt.runs import claim, folder
from spt.runs.claim import Claim, Claims, is_silent
from spt.runs.folder import RunFolder
from spt.training.stage import finished_result

LEASE = 0.6


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(folder, "POLL", 0.02)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    (tmp_path / "finetune-0").mkdir()
    return RunFolder(tmp_path, "finetune-0")


class Holder(NamedTuple):
    process: BaseProcess
    pipe: Connection

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def write(self) -> str:
        """Have it write and end; returns what it says."""
        self.pipe.send("go")
        answer = self.pipe.recv()
        self.process.join(30)
        return answer


@contextlib.contextmanager
def holder(root: Path, machine: str = claim.machine(), name: str = "finetune-0") -> Iterator[Holder]:
    """Another process that has the run until it is asked to write, on this machine or as if on another."""
    ours, theirs = Pipe()
    process = get_context("fork").Process(target=hold, args=(root, machine, name, theirs))
    process.start()
    try:
        assert ours.recv() == "held"
        yield Holder(process, ours)
    finally:
        process.kill()
        process.join()
        for end in (ours, theirs, process):
            end.close()


def hold(root: Path, machine: str, name: str, scheduler: Connection) -> None:
    claim.machine = folder.machine = lambda: machine
    run = RunFolder(root, name)
    with run.locked(lease=LEASE):
        scheduler.send("held")
        scheduler.recv()
        try:
            run.set_status("running")
            scheduler.send("wrote")
        except RunTakenOver as error:
            scheduler.send(str(error))


def elsewhere(monkeypatch, locks: bool = True) -> None:
    """As if this process were on a machine that does not see the locks of the others, or on one without locks."""
    for module in (claim, folder):
        monkeypatch.setattr(module, "machine", lambda: "elsewhere")
    monkeypatch.setattr(claim.SystemLock, "acquire", lambda self: locks or None)


def test_a_run_is_had_by_one_and_given_back(run):
    other = RunFolder(run.path.parent, run.name)
    for _ in range(3):
        with run.locked():
            assert other.held() and not other.is_available()
            with pytest.raises(RunInUse, match=f"written by another process \\({os.getpid()} on "), other.locked():
                pass
        assert not other.held() and other.is_available()


def test_a_killed_holder_on_this_machine_is_replaced_at_once(run):
    with holder(run.path.parent) as other:
        other.process.kill()
        other.process.join()
        begin = time.monotonic()
        assert run.is_available() and not run.held()
        with run.locked():
            assert time.monotonic() - begin < LEASE / 2


def test_a_folder_that_is_moved_away_while_it_is_read_has_no_status(run, monkeypatch):
    run.set_status("running")
    assert (run.status() or {})["state"] == "running"

    def gone(path, **_):
        raise FileNotFoundError(path)

    monkeypatch.setattr("pathlib.Path.read_text", gone)
    assert run.status() is None


def test_a_stopped_holder_is_replaced_after_its_lease_and_writes_nothing_when_it_wakes(run):
    with holder(run.path.parent) as other:
        other.signal(signal.SIGSTOP)
        begin = time.monotonic()
        with run.locked(wait=lambda: None):
            assert time.monotonic() - begin > LEASE
            other.signal(signal.SIGCONT)
            said = other.write()
            assert f"taken over by another process ({os.getpid()} on " in said and "nothing more is written" in said
            assert run.status() is None
            run.check()
            assert RunFolder(run.path.parent, run.name).held()
        assert RunFolder(run.path.parent, run.name).is_available()


@pytest.mark.parametrize("locks", [True, False])
def test_a_holder_on_another_machine_keeps_its_run_while_it_lives(run, monkeypatch, locks):
    with holder(run.path.parent, "there") as other:
        elsewhere(monkeypatch, locks)
        end = time.monotonic() + 2 * LEASE
        while time.monotonic() < end:
            assert not run.is_available() and run.held()
            time.sleep(0.02)
        with pytest.raises(RunInUse), run.locked():
            pass
        assert other.write() == "wrote"
        assert run.is_available()


@pytest.mark.parametrize("locks", [True, False])
def test_a_holder_killed_on_another_machine_is_replaced_after_its_lease(run, monkeypatch, locks):
    with holder(run.path.parent, "there") as other:
        elsewhere(monkeypatch, locks)
        other.process.kill()
        other.process.join()
        begin = time.monotonic()
        assert not run.is_available()
        with run.locked():  # without waiting for one that lives
            assert LEASE < time.monotonic() - begin < 10 * LEASE
            run.set_status("running")


def test_of_many_that_take_over_one_does(tmp_path):
    claims = Claims(tmp_path / "run.claim")
    assert Claim(claims, 1, LEASE, locked=False).take()
    rivals = [Claim(claims, 2, LEASE, locked=False) for _ in range(8)]
    taken = [rival.take() for rival in rivals]
    assert taken == [True, *[False] * 7]
    assert rivals[0].taken_by() is None and rivals[3].taken_by() is not None
    rivals[0].release()
    assert claims.newest().free and not list(tmp_path.glob(".*"))


def test_a_file_system_without_links(tmp_path, monkeypatch):
    def no_link(*_):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", no_link)
    test_of_many_that_take_over_one_does(tmp_path)


def test_a_gap_between_two_looks_says_little(tmp_path, monkeypatch):
    """Who was stopped himself, or waited for the file system, must not take others for dead."""
    claims, now = Claims(tmp_path / "run.claim"), [0.0]
    monkeypatch.setattr(claim.time, "monotonic", lambda: now[0])
    (tmp_path / "run.claim-1").write_bytes(b"{}")
    holder = claims.newest()
    silent = []
    for moment in (0, 1000, 2000, 3000, 4000, 5000, 6000):
        now[0] = float(moment)
        silent.append(is_silent(claims, holder))
    assert silent == [*[False] * 6, True]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"lease": 1e300, "token": 3}',
        b'{"lease": "x"}',
        b"\xff" * 600,
        b"[" * 100_000,
        b'{"pid": 1e400}',
    ],
)
def test_a_claim_that_cannot_be_read_expires_too(run, monkeypatch, content):
    (run.path.parent / ".locks").mkdir()
    (run.path.parent / ".locks/finetune-0.claim-1").write_bytes(content)
    elsewhere(monkeypatch)
    now = [0.0]
    monkeypatch.setattr(claim.time, "monotonic", lambda: now[0])
    assert not run.is_available()
    for _ in range(7):
        now[0] += 10
        available = run.is_available()
    assert available


def test_deleted_claims_are_made_again(run):
    with run.locked():
        for path in (run.path.parent / ".locks").iterdir():
            path.unlink()
        run.set_status("running")
        assert RunFolder(run.path.parent, run.name).held()


def test_a_deleted_folder_of_claims_is_made_again(run):
    with run.locked():
        shutil.rmtree(run.path.parent / ".locks")
        run.set_status("running")
        assert RunFolder(run.path.parent, run.name).held()


def test_a_file_in_the_place_of_that_folder_is_named_and_ends_all(run):
    """What happens before a run begins, and while it is had."""
    place = run.path.parent / ".locks"
    with run.locked():
        shutil.rmtree(place)
        place.touch()
        with pytest.raises(OutputError, match=r"cannot write \S*\.locks: a "):
            run.set_status("running")
    for _ in range(2):
        with pytest.raises(OutputError, match=r"cannot write \S*\.locks: a file of this name") as refused, run.locked():
            pass
        assert refused.value.hopeless
    place.unlink()
    with run.locked():
        run.set_status("running")


@pytest.mark.parametrize(
    "error", [NotImplementedError(), OSError(errno.ENOLCK, "no locks"), OSError(errno.ENOTSUP, "no")]
)
def test_no_locks_are_noticed(run, monkeypatch, error):
    def acquire(*_, **__):
        raise error

    monkeypatch.setattr("filelock.FileLock.acquire", acquire)
    with run.locked():
        other = RunFolder(run.path.parent, run.name)
        assert other.held() and not other.is_available()
        run.set_status("running")
    assert run.is_available()


def test_a_file_that_stands_for_a_lock_is_none(run, monkeypatch):
    """It would outlive a killed process."""

    def flock(*_):
        raise OSError(errno.ENOSYS, "no flock here")

    monkeypatch.setattr("fcntl.flock", flock)
    with run.locked():
        assert not RunFolder(run.path.parent, run.name).is_available()
    assert run.is_available() and not run._lock.path.exists()


def test_a_claim_that_cannot_be_made_leaves_no_lock(run, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "no space")

    other = RunFolder(run.path.parent, run.name)
    monkeypatch.setattr(Claims, "take", full)
    with pytest.raises(OutputError, match="the disk is full"), run.locked():
        pass
    monkeypatch.undo()
    with other.locked():
        pass


def test_what_a_process_is_about_to_tidy_is_left_to_it(tmp_path: Path) -> None:
    """Its result is there, its status not yet: a temporary file is the status it is writing."""
    finish(tmp_path, "scratch", 0, 0.7, "finetune-0")
    run = RunFolder(tmp_path, "finetune-0")
    writing = run.path / ".status.json.1.tmp"
    with holder(tmp_path) as other:
        run.set_status("running")
        writing.write_text("{")
        assert finished_result(run) is not None
        assert writing.exists() and (run.status() or {})["state"] == "running"
        other.process.kill()
        other.process.join()
    assert finished_result(run) is not None
    assert not writing.exists() and (run.status() or {})["state"] == "done"
