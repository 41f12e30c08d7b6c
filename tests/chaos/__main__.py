"""python -m tests.chaos --count N --seed S [--state FOLDER] [--plant]

Disturbs tiny commands N times (tests/chaos/kinds.py has the table), lets each finish, and holds weights, courses,
scores, predictions and reports against those of an undisturbed day. The last line is `N disturbances, K differences`;
the exit code is 0 only if K is 0. With --state the same command goes on where it was ended.

--plant drops the optimizer's state at every resume: the program has to find that. --case K repeats one case and shows
what was done; --scenario NAME draws from one scenario alone (tests/chaos/commands.py).
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from tests.chaos import case, process
from tests.chaos.commands import SCENARIOS

INSIDE = "CHAOS_MOUNTS"  # set in the process that has a mount table of its own


def main() -> int:
    options = arguments()
    if INSIDE not in os.environ:
        mounts = case.can_mount()
        enter = ["unshare", "--mount", "--propagation", "private"] if mounts else []
        command = [*enter, sys.executable, "-m", "tests.chaos", *sys.argv[1:]]
        os.execvpe(command[0], command, {**os.environ, INSIDE: "1" if mounts else "0"})
    mounts = os.environ[INSIDE] == "1"
    if not mounts:
        say("no file system can be mounted here: kinds that need one are left out")
    process.prepare()
    # Not a TemporaryDirectory, which forks of this process would remove when they end.
    state = (options.state or Path(tempfile.mkdtemp(prefix="chaos-"))).resolve()
    try:
        state.mkdir(parents=True, exist_ok=True)
        return campaign(options, state, mounts)
    finally:
        if options.state is None:
            shutil.rmtree(state, ignore_errors=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__, allow_abbrev=False)
    parser.add_argument("--count", type=int, default=20, help="disturbances")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, help="folder of outcomes; the same command goes on with it")
    parser.add_argument("--plant", action="store_true", help="a fault that has to be found")
    parser.add_argument("--case", type=int, help="one case alone")
    parser.add_argument("--scenario", choices=list(SCENARIOS), help="one scenario alone")
    return parser.parse_args()


def campaign(options: argparse.Namespace, state: Path, mounts: bool) -> int:
    run = partial(case.run_case, state, options.seed, mounts=mounts, plant=options.plant, only=options.scenario)
    if options.case is not None:
        outcome = run(options.case)
        say(json.dumps(outcome, indent=2))
        return summary([outcome])
    named = ["seed", options.seed, *(["plant"] if options.plant else []), *filter(None, [options.scenario])]
    path = state / f"{'-'.join(map(str, named))}.jsonl"
    outcomes: list[dict[str, Any]] = [json.loads(line) for line in read_lines(path)]
    while sum(len(outcome["kinds"]) for outcome in outcomes) < options.count:
        number = len(outcomes) + 1
        outcome = run(number)
        outcomes.append(outcome)
        with path.open("a") as file:
            file.write(json.dumps(outcome) + "\n")
        mark = "DIFFERENT" if outcome["problems"] else "same"
        kinds = ", ".join(outcome["kinds"]) or "nothing struck"
        say(f"{number:4d} {outcome['seconds']:5.1f} s  {outcome['scenario']}: {kinds}: {mark}")
        for problem in outcome["problems"]:
            say(f"       {problem}")
    return summary(outcomes)


def read_lines(path: Path) -> list[str]:
    """Whole lines: one that a kill has cut off is left out, and its case made again."""
    text = path.read_text() if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    return whole.splitlines()


def summary(outcomes: list[dict[str, Any]]) -> int:
    kinds = Counter(kind for outcome in outcomes for kind in outcome["kinds"])
    different = Counter(kind for outcome in outcomes if outcome["problems"] for kind in outcome["kinds"][-1:])
    for kind, number in sorted(kinds.items()):
        say(f"{kind:<12} {number:5d}  differences {different[kind]}")
    wrong = sum(bool(outcome["problems"]) for outcome in outcomes)
    say(f"{sum(kinds.values())} disturbances, {wrong} differences")
    return 1 if wrong else 0


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
