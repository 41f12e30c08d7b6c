"""What a command must not do whatever it reads, noticed by an audit hook: Python calls it before it happens."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {  # events that change a file system, and which of their arguments are paths; then the folder's descriptor
    **dict.fromkeys(("os.mkdir", "os.chmod", "os.remove", "os.rmdir"), ((0,), None)),
    **dict.fromkeys(("os.truncate", "os.chown", "os.utime", "os.setxattr", "shutil.rmtree"), ((0,), None)),
    **dict.fromkeys(("os.rename", "os.link"), ((0, 1), None)),
    "os.symlink": ((1,), None),
}
RELATIVE = {"os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"}  # to a folder whose descriptor is the last argument
NETWORK = {"socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr", "socket.sendto", "urllib.Request"}
PROGRAMS = {"os.system", "os.exec", "os.posix_spawn", "os.spawn"}
HARMLESS = {"git", "uname", "lscpu"}  # programs that describe the machine


class Forbidden(BaseException):
    """So that no handler of ordinary errors hides it."""


class Guard:
    """An audit hook: it writes what is forbidden to a descriptor, and prevents it."""

    def __init__(self, case: Path, writable: Sequence[Path], report: int) -> None:
        self.case = str(case)
        self.writable = tuple(str(path) for path in writable)
        self.report = report
        self.active = False

    def install(self) -> None:
        sys.addaudithook(self)
        self.active = True

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.active:
            return
        self.active = False
        try:
            try:
                found = self.judge(event, args)
            except Exception as error:  # else it would pass for an error of the command's
                found = f"the guard fails: {error!r}"
            if found is not None:
                os.write(self.report, f"{found}\n".encode(errors="backslashreplace"))
        finally:
            self.active = True
        if found is not None:
            raise Forbidden(found)

    def judge(self, event: str, args: tuple[Any, ...]) -> str | None:
        if event == "open":
            path, mode, flags = args
            writes = (isinstance(flags, int) and flags & WRITING) or (isinstance(mode, str) and set(mode) & set("wax+"))
            return self.outside("writes", path) if writes and not isinstance(path, int) else None
        if event in CHANGES:
            for index in CHANGES[event][0]:
                if not isinstance(args[index], int) and (found := self.outside(event, args[index], args)):
                    return found
        if event == "pickle.find_class":
            return f"unpickles {args[0]}.{args[1]}"
        if event == "socket.connect":
            return f"connects to {args[1]!r}" if isinstance(args[1], tuple) else None
        if event in NETWORK:
            return f"asks the network: {event} {args[:2]!r}"
        if event == "subprocess.Popen":
            return None if os.path.basename(os.fsdecode(args[0])) in HARMLESS else f"starts {args[0]!r}"
        if event in PROGRAMS:
            return f"starts a program: {event} {args[:2]!r}"
        if event == "exec":
            name = getattr(args[0], "co_filename", "")
            return f"runs {name}" if name.startswith(self.case) else None
        return None

    def outside(self, what: str, path: Any, args: tuple[Any, ...] = ()) -> str | None:
        name = os.fsdecode(path)
        folder = args[-1] if args and what in RELATIVE and isinstance(args[-1], int) else -1
        if not os.path.isabs(name) and folder > 2:
            name = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)
        whole = os.path.join(os.path.realpath(os.path.dirname(name) or "."), os.path.basename(name))
        inside = any(whole == folder or whole.startswith(folder + os.sep) for folder in self.writable)
        return None if inside or whole.startswith(("/dev/", "/proc/")) else f"{what} outside its folders: {whole}"


def plant(kind: str) -> None:
    """A fault in a reader that commands use, which the checks have to find; `stop`: a signal between two steps."""
    if kind == "stop":
        return stop_training()
    import json
    import pathlib
    import pickle
    import socket

    class Global:
        def __reduce__(self) -> tuple[Any, ...]:
            return (dict, ())

    content = pickle.dumps(Global())

    def fault() -> None:
        if kind == "raise":
            raise ZeroDivisionError("planted")
        if kind == "unpickle":
            pickle.loads(content)
        elif kind == "write":
            pathlib.Path(__file__).with_name("planted").write_text("")
        elif kind == "connect":
            socket.create_connection(("127.0.0.1", 9), timeout=1)
        elif kind == "hang":
            while True:
                pass

    real_text, real_bytes, real_loads = pathlib.Path.read_text, pathlib.Path.read_bytes, json.loads

    def patched(real: Any) -> Any:
        def read(*args: Any, **options: Any) -> Any:
            fault()
            return real(*args, **options)

        return read

    pathlib.Path.read_text = patched(real_text)  # type: ignore[method-assign]
    pathlib.Path.read_bytes = patched(real_bytes)  # type: ignore[method-assign]
    json.loads = patched(real_loads)


def stop_training() -> None:
    """SIGTERM when the second checkpoint of a training has been written."""
    import signal

    import spt.training.loop as module

    real, saved = module.save_state, list[int]()

    def save_state(run: Any, runtime: Any, state: Any) -> None:
        real(run, runtime, state)
        saved.append(state.step)
        if len(saved) == 2:
            signal.raise_signal(signal.SIGTERM)

    module.save_state = save_state
