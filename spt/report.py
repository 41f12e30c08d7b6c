"""What finished runs say about self-pretraining: SPT minus scratch, seed by seed, with what both arms cost.

Read from run folders alone: their small JSON files, and the predictions on the test split. Every run that was planned
is accounted for: it stands in a pair, or among the failures with its reason. `spt.render` turns a `Report` into text.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from spt import findings
from spt.budgets import Match, Spender, Spent, matches, spent
from spt.curves import Curve, curves
from spt.errors import DataError, UsageError
from spt.findings import Best, Contrast, Level, Pooled
from spt.pairs import PLAN, Cell, Ended, Failure, Pairing, Plan, Record, Trial, everything, look, pairings, read_plan
from spt.precedents import Precedent, precedents
from spt.provenance import Provenance, provenance
from spt.rows import Row, judged, told
from spt.run import Result
from spt.searches import Searched, searched


class RunRecord(Record):
    """A single run, asked for by its folder."""

    name: str
    state: Ended | Literal["done"]
    reason: str
    result: Result | None


class Report(Record):
    rows: tuple[Row, ...] = ()
    levels: tuple[Level, ...] = ()  # rows of a study, side by side
    contrasts: tuple[Contrast, ...] = ()  # between initialisations
    best: tuple[Best, ...] = ()  # share of a total budget
    pooled: tuple[Pooled, ...] = ()  # over tasks
    matches: tuple[Match, ...] = ()  # of total budgets
    searches: tuple[Searched, ...] = ()  # for settings
    spent: tuple[Spent, ...] = ()
    precedents: tuple[Precedent, ...] = ()  # published numbers
    curves: tuple[Curve, ...] = ()  # of learning, run by run
    provenance: Provenance = Provenance()
    runs: tuple[RunRecord, ...] = ()
    unpaired: tuple[Failure, ...] = ()  # unfinished runs that no study mentions
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()  # run folders that were read

    @property
    def failures(self) -> tuple[tuple[str, Failure], ...]:
        """Every failure, with the label of its row or search."""
        rows = [(row.label, failure) for row in self.rows for failure in row.failures]
        trials = [(search.label, failure) for search in self.searches for failure in search.failures]
        return (*rows, *trials, *(("", failure) for failure in self.unpaired))


def read(paths: Sequence[Path]) -> Report:
    """A report over studies, folders full of runs and single runs, in any mixture."""
    studies: dict[Path, tuple[Path, Plan]] = {}
    paired: list[Pairing] = []
    spenders: list[Spender] = []
    runs: dict[str, RunRecord] = {}
    unpaired: dict[str, Failure] = {}
    warnings: list[str] = []

    def add(folder: Path, plan: Plan) -> None:
        if folder.resolve() not in studies:
            studies[folder.resolve()] = (folder, plan)
            paired.extend(pairings(folder, plan))
            trials = [trial for search in plan.searches for trial in search.trials]
            spenders.append(Spender(folder.name, folder.parent, plan.cells, trials))

    for folder in {path.resolve(): _existing(path) for path in paths}.values():
        if (folder / PLAN).is_file():
            add(folder, read_plan(folder))
        elif any((folder / name).is_file() for name in ("result.json", "status.json", "job.json")):
            runs[folder.as_posix()] = _single(folder)
        else:
            found = everything(folder)
            if not found.studies and not found.pairings:
                said = f" ({found.complaints[0]})" if found.complaints else ""
                raise DataError(
                    f"{folder} holds no study and no finished finetuning run{said}; "
                    "name a folder that `spt compare`, `spt study` or `spt finetune` wrote to"
                )
            for one in found.studies:
                add(*one)
            paired += found.pairings
            if found.pairings:
                spenders.append(Spender("", folder, [cell for pair in found.pairings for cell in pair.cells]))
            warnings += found.complaints
            unpaired.update({(folder / failure.run).as_posix(): failure for failure in found.unpaired})
    rows, equal = judged([told(pairing) for pairing in paired])
    balance = matches(rows)
    off = {match.label: match.warnings for match in balance}
    together = findings.findings(rows)
    notes = [f"{folder.name}: {note}" for folder, plan in studies.values() for note in plan.notes]
    tuned = [one for folder, plan in studies.values() for one in searched(folder, plan)]
    return Report(
        rows=tuple(
            one.row.model_copy(update={"warnings": (*one.row.warnings, *off.get(one.row.label, ()))}) for one in rows
        ),
        levels=together.levels,
        contrasts=together.contrasts,
        best=together.best,
        pooled=together.pooled,
        matches=balance,
        searches=tuple(tuned),
        spent=spent(spenders),
        precedents=precedents(rows),
        curves=curves(rows),
        provenance=provenance(rows, list(studies.values()), tuned, len(unpaired)),
        runs=tuple(runs.values()),
        unpaired=tuple(unpaired.values()),
        warnings=(*warnings, *equal),
        notes=(*notes, *together.notes),
        folders=tuple(sorted({path.as_posix() for path in _folders(spenders)} | runs.keys() | unpaired.keys())),
    )


def _existing(folder: Path) -> Path:
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise UsageError(f"{folder} {what}; name a study, a run, or the folder that holds them")
    # `.` does not name its parent, nor does a link the folder that its study's runs lie in.
    return folder.resolve() if folder.is_symlink() or folder.name in ("", "..") else folder


def _folders(spenders: Sequence[Spender]) -> list[Path]:
    """Every run folder that is there."""
    paths = []
    for spender in spenders:
        parts: list[Cell | Trial] = [*spender.cells, *spender.trials]
        paths += [spender.root / name for part in parts for name in (part.parent, part.run) if name]
    return [path for path in paths if path.is_dir()]


def _single(folder: Path) -> RunRecord:
    found = look(folder.parent, folder.name)
    if isinstance(found, Result):
        return RunRecord(name=folder.name, state="done", reason="", result=found)
    if found.state == "unreadable":
        raise DataError(found.reason)
    return RunRecord(name=folder.name, state=found.state, reason=found.reason, result=None)
