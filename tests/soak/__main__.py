"""Thousands of tiny runs in one study, and reports of tens of thousands of run folders: does anything grow?

    python -m tests.soak runs --count 5000 --out FOLDER [--jobs 2]
    python -m tests.soak report --count 20000 --out FOLDER [--recipes 8]

`runs` trains, and samples the command from outside while it works: memory, open files, threads, temporary files, and
the time of a run. `report` makes finished studies up, of ever more runs, and has a process of its own report each, as a
study and as loose folders. Both go on where they were stopped, write their numbers as CSV and as a PNG, and end with a
line that says how they grow.
"""

import argparse
import signal
import sys
from pathlib import Path

from tests.soak import reports, training


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run in (("runs", training.soak), ("report", reports.soak)):
        command = commands.add_parser(name)
        command.set_defaults(run=run)
        command.add_argument("--count", type=int, required=True, help="run folders")
        command.add_argument("--out", type=Path, required=True, help="where the folders and the figures go")
        command.add_argument("--recipes", type=int, default=2 if name == "runs" else 8)
        if name == "runs":
            command.add_argument("--jobs", type=int, default=1)
            command.add_argument("--every", type=float, default=2.0, help="seconds between two samples")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))  # the command that is sampled ends too
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
