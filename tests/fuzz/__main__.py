"""python -m tests.fuzz --target T [--target T2 …] --count N [--seed S] [--state FOLDER] [--case K] [--plant]

Runs commands on inputs that are changed at random: recipes, overrides, studies, runs, data, checkpoints, reports (all
of them without --target). Each has to end with a result or with one sentence and a documented exit code; without a
traceback, in time, without unpickling, starting programs, asking the network or writing elsewhere; and what it writes
and prints must be harmless where it is read. A case is addressed by target, seed and number.

The last line is `N cases, K failures`; the exit code is 0 only if K is 0. With --state the same command goes on where
it was ended, and what a failure was made of lies in FOLDER/failures. --case K repeats one case and shows what was said.
--plant puts faults into a reader: the program has to find them.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from tests.fuzz import judge, mutations, process, targets  # noqa: E402

FAULTS = ("raise", "unpickle", "write", "connect")


def main(words: list[str] | None = None) -> int:
    options = arguments(words)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        state = (options.state or Path(folder)).resolve()
        process.prepare(state / "home")
        from hypothesis.configuration import set_hypothesis_home_dir

        set_hypothesis_home_dir(state / "home/hypothesis")
        outcomes = [each for target in options.target or targets.TARGETS for each in campaign(options, state, target)]
    return summary(outcomes)


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--target", action="append", choices=targets.TARGETS, help="what is changed (repeat)")
    parser.add_argument("--count", type=int, default=20, help="cases of each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, help="folder of outcomes; the same command goes on with it")
    parser.add_argument("--case", type=int, help="one case alone")
    parser.add_argument("--limit", type=float, default=60, help="seconds a command may take")
    parser.add_argument("--plant", action="store_true", help="faults that have to be found")
    return parser.parse_args(words)


def campaign(options: argparse.Namespace, state: Path, target: str) -> list[dict[str, Any]]:
    base = state / "bases" / target
    if not (base / "made").exists():
        shutil.rmtree(base, ignore_errors=True)
        targets.TARGETS[target].base(base)
        (base / "made").touch()
    if options.case is not None:
        outcome = run_case(options, state, target, options.case)
        say(json.dumps(outcome, indent=2))
        return [outcome]
    path = state / f"{target}-{options.seed}{'-plant' if options.plant else ''}.jsonl"
    outcomes = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    with path.open("a", encoding="utf-8") as file:
        for number in range(len(outcomes), options.count):
            outcomes.append(run_case(options, state, target, number))
            file.write(json.dumps(outcomes[-1]) + "\n")
            file.flush()
            if outcomes[-1]["problems"]:
                say(f"{target} {number}: {outcomes[-1]['commands'][-1][:100]}: {'; '.join(outcomes[-1]['problems'])}")
    return outcomes[: options.count]


def run_case(options: argparse.Namespace, state: Path, target: str, number: int) -> dict[str, Any]:
    """Change the base's files as this number says, run commands on them, and judge how they end."""
    chance = random.Random(f"{target} {options.seed} {number}")
    case = state / f"case-{target}-{options.seed}"
    shutil.rmtree(case, ignore_errors=True)
    mutations.copy_tree(state / "bases" / target / "work", case / "work")
    steps = targets.TARGETS[target].change(chance, case / "work")
    fault = FAULTS[number % len(FAULTS)] if options.plant else None
    outcome: dict[str, Any] = {"target": target, "seed": options.seed, "number": number, "problems": []}
    outcome |= {"commands": [], "codes": [], "seconds": 0.0}
    for step in steps:
        kept = (*process.PRIVATE, *step.writes)
        before = process.snapshot(case / "work", kept)
        inputs = case / "inputs"
        shutil.rmtree(inputs, ignore_errors=True)
        mutations.copy_tree(case / "work", inputs)
        ended = process.run(step, case, options.limit, fault)
        after = process.snapshot(case / "work", kept)
        changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        written = [path for name in step.writes for path in (case / "work" / name).rglob("*") if path.is_file()]
        problems = judge.problems_of(ended, changed, written)
        outcome["commands"].append(" ".join(step.arguments))
        outcome["codes"].append(ended.code)
        outcome["seconds"] = round(outcome["seconds"] + ended.seconds, 2)
        outcome["problems"] += problems
        if options.case is not None:
            say(f"$ spt {' '.join(map(repr, step.arguments))}\n{ended.out[-3000:]}{ended.err[-3000:]}{ended.trace}")
        if problems:
            keep(state, outcome, step, ended, inputs)
            break
    return outcome


def keep(state: Path, outcome: dict[str, Any], step: process.Step, ended: process.Ended, inputs: Path) -> None:
    """What a failure was made of, for repeating it by hand."""
    folder = state / "failures" / f"{outcome['target']}-{outcome['seed']}-{outcome['number']}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    record = {**outcome, "arguments": step.arguments, "ended": ended._asdict()}
    (folder / "case.json").write_text(json.dumps(record, indent=2))
    shutil.move(inputs, folder / "work")


def summary(outcomes: list[dict[str, Any]]) -> int:
    kinds = Counter(problem for outcome in outcomes for problem in outcome["problems"])
    for problem, times in kinds.most_common():
        say(f"{times:6} {problem}")
    for target in targets.TARGETS:
        mine = [outcome for outcome in outcomes if outcome["target"] == target]
        codes = Counter(code for outcome in mine for code in outcome["codes"])
        if mine:
            shown = ", ".join(f"{code}: {times}" for code, times in sorted(codes.items(), key=str))
            seconds = sum(outcome["seconds"] for outcome in mine)
            failed = sum(bool(outcome["problems"]) for outcome in mine)
            say(f"{target:12} {len(mine):6} cases, {failed} failures, {seconds:.0f} s; exit codes {shown}")
    failures = sum(bool(outcome["problems"]) for outcome in outcomes)
    say(f"{len(outcomes)} cases, {failures} failures")
    return 1 if failures else 0


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
