"""`accelerate launch` as `--accelerate-config` starts it, in a process of its own.

What went wrong is left in a file instead of a traceback. One process takes the place of this one, so that signals reach
it; several are started by torchrun, whose temporary folder lies beside the file, to be removed with it.
"""

from spt.runtime import signals

if __name__ == "__main__":
    signals.install(silent=True)  # before the imports, which take a moment

import logging
import os
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import NoReturn

from spt.errors import one_line
from spt.runtime.launch import Failure, by_cause


def main() -> None:
    folder = Path(os.environ[signals.CODE_FILE]).parent
    tempfile.tempdir = str(folder)  # of this process alone
    # Quiet: its words about a process that ended with 75 or 130 would bury our one sentence.
    for name in ("torch.distributed.elastic", "torch.distributed.run", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    from accelerate.commands import launch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    def become(args: Namespace) -> NoReturn:
        command, environ = launch.prepare_simple_launcher_cmd_env(args)
        os.execvpe(command[0], command, environ)

    launch.simple_launcher = become
    try:
        launch.main()
    except ChildFailedError as error:
        failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)  # with those it has ended itself
        codes = by_cause((number, failure.exitcode) for number, failure in failures)
        Failure(codes, max(len(codes), sum(1 for _ in folder.glob("process-*")))).write(folder)
        sys.exit(1)
    except SignalException as error:
        sys.exit(signals.stop_error(error.sigval).exit_code)
    except Exception as error:  # of its configuration, of a launcher
        Failure(error=one_line(error)).write(folder)
        sys.exit(1)


if __name__ == "__main__":
    main()
