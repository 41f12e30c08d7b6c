"""Commands without the seconds that imports take: a process that has them behind it, and forks for every command.

What runs is `spt_cli.main` in a process of its own, with its own folder, variables, streams and exit code. A command
that needs other variables than the server was started with gets a process from the start (`tiny.spt`).
"""

import atexit
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

FREE = {"COLUMNS", "NO_COLOR", "LINES"}  # besides SPT_…: variables that nothing reads while it is imported


class Server:
    """One a process of pytest's, started when first asked."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = dict(env)
        self.process = subprocess.Popen(
            [sys.executable, __file__], env=self.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        atexit.register(self.process.kill)

    def serves(self, env: Mapping[str, str]) -> bool:
        different = {name for name in {*env, *self.env} if env.get(name) != self.env.get(name)}
        return all(name.startswith("SPT_") or name in FREE for name in different)

    def run(
        self, arguments: Sequence[str], cwd: Path, env: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        assert self.process.stdin and self.process.stdout
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            paths = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (out, err)]
            order = {"arguments": list(arguments), "cwd": str(cwd), "env": dict(env), "streams": paths}
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
            pid = int(self.process.stdout.readline())
            late = threading.Timer(timeout, os.kill, (pid, signal.SIGKILL))
            late.start()
            code = int(self.process.stdout.readline())
            if not late.is_alive():
                raise subprocess.TimeoutExpired(["spt", *arguments], timeout)
            late.cancel()
            texts = [(file.seek(0), file.read())[1] for file in (out, err)]
        return subprocess.CompletedProcess(["spt", *arguments], code, *texts)


def serve() -> None:
    """Fork for every line of standard input; say the process's number, then how it ended."""
    warm()
    gc.collect()
    gc.freeze()
    said = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        order = json.loads(line)
        if (pid := os.fork()) == 0:
            said.close()
            become(order)
        said.write(f"{pid}\n")
        said.flush()
        said.write(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n")
        said.flush()


def warm() -> None:
    """What most commands import."""
    import accelerate  # noqa: F401
    import datasets  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import sklearn.datasets
    import sklearn.ensemble
    import sklearn.linear_model  # noqa: F401
    import torch.distributed.tensor  # noqa: F401
    import transformers  # noqa: F401

    import spt.analysis.resolved
    import spt.execution.run_study
    import spt.models.transformer
    import spt.report.write
    import spt.tasks.digits  # noqa: F401
    import spt_cli  # noqa: F401


def become(order: dict[str, Any]) -> None:
    """The command, in this process, which ends with it."""
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    for number, path in ((0, os.devnull), *enumerate(order["streams"], start=1)):
        os.dup2(os.open(path, os.O_RDWR), number)
    sys.stdin = os.fdopen(0)
    sys.argv = ["spt", *order["arguments"]]
    sys.path[0] = order["cwd"]
    import spt_cli

    run_to_exit(spt_cli.main)


def run_to_exit(main: Callable[[], object], on_error: Callable[[], object] = lambda: None) -> NoReturn:
    """Run a program's main function and end this forked process as Python would end."""
    code: int | str | None = 1
    try:
        main()
        code = 0
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        on_error()
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


if __name__ == "__main__":
    serve()
