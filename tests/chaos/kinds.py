"""The disturbances: each strikes a command at a moment that has been drawn, and says how the command may then end."""

import contextlib
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.chaos.process import Command, send

if TYPE_CHECKING:
    from tests.chaos.case import Case

KILLED = -signal.SIGKILL
PATIENCE = 60.0  # seconds that a command has for ending
ROOM = 1 << 28  # bytes of the file system that a case has to itself


@dataclass(frozen=True)
class Kind:
    name: str
    text: str
    codes: tuple[int, ...]  # with which the disturbed command may end, besides 0
    strike: Callable[["Case", Command, random.Random], Any]
    weight: int = 1
    needs: str = ""  # mount: a file system of its own; children: a command that starts processes
    hooks: dict[str, Any] = field(default_factory=dict)  # for the command, from its beginning


def kill(case: "Case", command: Command, chance: random.Random) -> None:
    """The command alone, whose children have to notice, or all of its processes."""
    send(command.family() if chance.random() < 0.5 else [command.pid], signal.SIGKILL)
    case.resume()


def terminate(case: "Case", command: Command, chance: random.Random) -> None:
    _signal(case, command, chance, signal.SIGTERM)


def interrupt(case: "Case", command: Command, chance: random.Random) -> None:
    """As a terminal does, which sends it to all that run in the foreground; workers have sessions of their own."""
    _signal(case, command, chance, signal.SIGINT)


def _signal(case: "Case", command: Command, chance: random.Random, number: int) -> None:
    group = [pid for pid in command.family() if _session(pid) == command.pid]
    send(group if number == signal.SIGINT or chance.random() < 0.3 else [command.pid], number)
    case.resume()


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def pause(case: "Case", command: Command, chance: random.Random) -> None:
    """Every process is stopped for a while."""
    family = command.family()
    send(family, signal.SIGSTOP)
    time.sleep(chance.uniform(0.1, 1.5))
    send(family, signal.SIGCONT)
    case.resume()


def lose_unsynced_writes(case: "Case", command: Command, chance: random.Random) -> None:
    """All processes are killed; then each file written since the start keeps for certain what was fsynced alone.

    That is a power cut on a journaling file system: names are as at that moment, since renames and removals are kept in
    order, but what was written without fsync may be missing, cut off, or zeros.
    """
    send(command.family(), signal.SIGKILL)
    case.resume()
    command.wait(PATIENCE)
    case.settle()
    synced: dict[int, list[tuple[int, int]]] = {}
    for line in case.lines("synced"):
        inode, size, modified = map(int, line.split())
        synced.setdefault(inode, []).append((size, modified))
    for path in sorted(case.written()):
        status = path.stat()
        known = synced.get(status.st_ino, [])
        if status.st_size == 0 or (status.st_size, status.st_mtime_ns) in known or chance.random() < 0.2:
            continue  # safe, or written back in time
        kept = max((size for size, _ in known if size <= status.st_size), default=0)
        how = chance.choice(["empty", "cut", "zeros"])
        end = kept if how != "cut" else chance.randint(kept, status.st_size)
        with path.open("rb+") as file:
            file.truncate(end)
            if how == "zeros":
                file.truncate(status.st_size)
        case.say(f"{how} {case.name_of(path)}")


def fill_disk(case: "Case", command: Command, chance: random.Random) -> None:
    """The file system has room for a few more pages, until the command has ended."""
    case.limit_room_beyond(4096 * chance.choice([0, 0, 1, 2, 4, 8, 16, 32]))
    case.resume()
    command.wait(PATIENCE)
    send(command.family(), signal.SIGKILL)
    case.limit_room(ROOM)


def limit_files(case: "Case", command: Command, chance: random.Random) -> None:
    """No file may grow beyond a size: every process's RLIMIT_FSIZE."""
    size = chance.choice([8192, 12_000, 20_000])
    for pid in command.family():
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, size))
    case.resume()


def make_read_only(case: "Case", command: Command, chance: random.Random) -> None:
    """The folder of runs, or the whole place, is mounted read-only, until the command has ended."""
    folder = case.runs if chance.random() < 0.8 else case.place
    folder.mkdir(exist_ok=True)
    with case.read_only(folder):
        case.resume()
        command.wait(PATIENCE)
        send(command.family(), signal.SIGKILL)


def let_clock_jump(case: "Case", command: Command, chance: random.Random) -> None:
    """From its start on the wall clock has jumped for this command; a pause besides."""
    pause(case, command, chance)


def damage_file(case: "Case", command: Command, chance: random.Random) -> None:
    """After a kill a file, or a folder, of what was written is removed, emptied, cut off or changed by a byte."""
    send(command.family(), signal.SIGKILL)
    case.resume()
    command.wait(PATIENCE)
    case.settle()
    files = [path for folder in (case.runs, case.cache) for path in folder.rglob("*")]
    files = sorted(path for path in files if path.is_file() or path.parent.name == "checkpoints")
    if not files:
        return
    path = chance.choice(files)
    if path.is_dir():
        how = "remove"
        shutil.rmtree(path)
    else:
        how = chance.choice(["remove", "empty", "cut", "flip"])
        content = bytearray(path.read_bytes())
        place = chance.randrange(len(content)) if content else 0
        if how == "flip" and content:
            content[place] ^= 1 << chance.randrange(8)
        cuts = {"empty": b"", "cut": content[:place], "flip": content}
        path.unlink() if how == "remove" else path.write_bytes(cuts[how])
    case.damaged(path, how)


def start_twice(case: "Case", command: Command, chance: random.Random) -> None:
    """The same command once more at this moment; both go on."""
    case.resume()
    second = case.start(command.words, "second")
    command.wait(PATIENCE)
    case.judge(second, (7, 8))


def kill_child(case: "Case", command: Command, chance: random.Random) -> None:
    """One of the processes that the command has started: a worker, or one of several that train one run."""
    children = [pid for pid in command.family() if pid != command.pid]
    at_work = case.stopped_process()
    send([at_work if at_work in children else chance.choice(children)] if children else [], signal.SIGKILL)
    case.resume()


KINDS = {
    kind.name: kind
    for kind in (
        Kind("SIGKILL", "killed, alone or with all that it started", (KILLED,), kill, 4),
        Kind("SIGTERM", "asked to end", (75,), terminate, 4),
        Kind("SIGINT", "interrupted from the keyboard", (130,), interrupt, 4),
        Kind("SIGSTOP", "stopped for a while, then continued", (), pause, 1),
        Kind("unsynced", "power cut: what was not fsynced is lost", (KILLED,), lose_unsynced_writes, 4),
        Kind("full disk", "no room is left", (7, 8), fill_disk, 3, "mount"),
        Kind("file limit", "no file may grow beyond a size", (7, 8), limit_files, 2),
        Kind("read-only", "the folder cannot be written any more", (7, 8), make_read_only, 3, "mount"),
        Kind("clock", "the wall clock jumps by days", (), let_clock_jump, 2, hooks={"clock": 0}),
        Kind("damage", "a file is removed, emptied, cut off or changed", (KILLED,), damage_file, 4),
        Kind("twice", "the same command at the same time", (7, 8), start_twice, 3),
        Kind("child", "a worker, or one of several processes, is killed", (4, 8), kill_child, 12, "children"),
    )
}
