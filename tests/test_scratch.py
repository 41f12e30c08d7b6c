"""Temporary folders are gone when their command is, however it ended."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import environment

from spt.runtime.scratch import remove_abandoned, scratch_folder

WAITS = """
import sys, time
from spt.runtime import signals
from spt.runtime.scratch import scratch_folder

signals.install(silent=True)
with scratch_folder("spt-try-") as folder:
    (folder / "rows").write_text("1")
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_ends_with_its_block(temporary):
    with pytest.raises(ValueError, match="x"), scratch_folder() as folder:
        assert folder.parent == temporary.resolve()
        (folder / "rows").write_text("1")
        raise ValueError("x")
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_folder_ends_with_its_process_or_with_the_next(temporary, number):
    (temporary / "spt-mine").mkdir()  # not one of these
    env = environment({"TMPDIR": str(temporary)})
    with subprocess.Popen([sys.executable, "-c", WAITS], env=env, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline().startswith(str(temporary.resolve() / "spt-try-"))
        remove_abandoned()
        assert len(list(temporary.glob("spt-try-*/rows"))) == 1  # it lives
        child.send_signal(number)
        child.wait()
    assert len(list(temporary.iterdir())) == (2 if number == signal.SIGKILL else 1)
    with scratch_folder() as folder:
        assert {path.name for path in temporary.iterdir()} == {"spt-mine", folder.name}


def test_a_folder_that_another_process_took_for_abandoned_is_made_again(temporary, monkeypatch):
    """It came between the lock's file and the lock, had it, and removed the folder: at once, or soon after."""
    from filelock import FileLock, Timeout

    real, taken = FileLock.acquire, []

    def acquire(lock, *given, **more):
        path = Path(lock.lock_file)
        if len(taken) < 2:
            taken.append(path.parent)
            if len(taken) == 1:
                raise Timeout(str(path))
            result = real(lock, *given, **more)
            shutil.rmtree(path.parent)
            return result
        return real(lock, *given, **more)

    monkeypatch.setattr(FileLock, "acquire", acquire)
    with scratch_folder() as folder:
        assert folder.is_dir() and folder not in taken
        assert [*temporary.iterdir()] == [folder]
    assert not [*temporary.iterdir()]


def test_what_only_looks_like_one_is_left_alone(temporary, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / ".owner").write_text("")
    (temporary / "spt-link").symlink_to(elsewhere)
    remove_abandoned()
    assert (elsewhere / ".owner").is_file() and (temporary / "spt-link").is_symlink()
