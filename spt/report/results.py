"""Results that were really obtained: one JSON file for each cell of a table, kept in `results/` and shown beside what
the papers print.

A file holds every run that was started for its cell, the failed ones too, with the settings in which it departs from
the packaged recipe. Needs no torch, except for `collect_results`, which resolves recipes.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from spt.config.job import digest
from spt.config.load import packaged
from spt.config.recipe import BUDGETS
from spt.config.validation import validation_messages
from spt.errors import DataError, OutputError, UsageError, one_line
from spt.report import stats
from spt.report.arms import Comparison, compare_arms
from spt.report.format import score_interval_text, score_text, slug
from spt.report.published_numbers import (
    PublishedCell,
    PublishedPair,
    changed,
    own_settings,
    published_pair,
    table_cells,
)
from spt.runs.baseline import BaselineResult, baseline_outcome
from spt.runs.files import parse_json, write_json, writing
from spt.runs.folder import RunFolder
from spt.runs.index import Failure, all_runs, comparisons_of
from spt.runs.plan import ARMS, PLAN, ArmName, Factor, Place, PlannedCell, arm_text, factors_text, read_plan
from spt.runs.result import Result

Name = Annotated[str, Field(min_length=1, max_length=200)]
SHORTER = (*BUDGETS, "subset_fraction")  # with less of these a run is no longer the one that was published
LONGEST = 180  # letters of a file's name
OF_SPLIT = ("task.split_seed", "task.folds", "task.fold")  # what a study sets to make its splits of the data
LIMITS = ("subset_rows", "max_rows", "patience")  # nor with a lower one of these, where null is none


class Stored(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class StoredRun(Stored):
    """One run of a cell. `score` is its test score, or None where it has none: `state` says why."""

    seed: Annotated[int, Field(ge=0)]
    split: str | None = None
    run: Annotated[str, Field(pattern=r"^finetune-\w+$")]
    state: Literal["done", "failed", "diverged"] = "done"
    score: float | None
    test_share: Annotated[float, Field(ge=0, lt=1)] | None = None  # of the rows, that a split tests
    out_of_time: bool = False  # a stage ended at max_hours
    steps: Annotated[int, Field(ge=0)]  # of both stages
    device_seconds: Annotated[float, Field(ge=0)]
    spt: str
    commit: str | None
    torch: str
    machine: str
    date: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")]
    departures: tuple[str, ...] = ()  # "finetune.train.epochs (10, recipe 100)"

    @model_validator(mode="after")
    def _score_if_done(self) -> "StoredRun":
        if (self.state == "done") == (self.score is None):
            raise ValueError(f"seed {self.seed}: a run has a score if it is done, and else none")
        if self.state == "done" and (self.split is None) != (self.test_share is None):
            raise ValueError(f"seed {self.seed}: a run on a split has the share of the rows that it tests")
        return self

    @property
    def shortened(self) -> bool:
        """Was it given less to train on, or less time, than what was published?"""
        return self.out_of_time or any(map(_gives_less, self.departures))


def _gives_less(departure: str) -> bool:
    """Whether a departure shortens a run; a budget or a share that was replaced by another kind is taken to."""
    key, _, values = departure.partition(" ")
    name = key.rpartition(".")[2]
    if name not in (*SHORTER, *LIMITS):
        return False
    given, _, planned = values.strip("()").partition(", ")  # "recipe 100" or "study 100"
    no_limit = "inf" if name in LIMITS else ""
    try:
        return float(given.replace("null", no_limit)) < float(planned.rpartition(" ")[2].replace("null", no_limit))
    except ValueError:  # null
        return True


class StoredResult(Stored):
    """The runs of one cell: of a table in a paper, or, without `paper`, of a study of our own."""

    format: Literal[1] = 1
    paper: str | None = None  # key in published.yaml
    table: Name  # its number; without a paper, the name of the study
    row: Name
    column: Name
    metric: Name
    arm: ArmName
    recipe: Name
    factors: dict[str, Factor] = {}
    planned: Annotated[int, Field(ge=1)]  # runs: the seeds of the paper, or of the study
    remarks: tuple[str, ...] = ()
    baselines: dict[Name, float] = {}  # answers without a network on the same data: mean score over their seeds
    runs: Annotated[tuple[StoredRun, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _consistent(self) -> "StoredResult":
        places = [(run.seed, run.split) for run in self.runs]
        if len(set(places)) < len(places):
            raise ValueError("a seed is there twice")
        cell = self.published_cell
        if self.paper is not None and cell is None:
            raise ValueError(
                f"published.yaml has no cell {self.row}, {self.column} in table {self.table} of {self.paper}"
            )
        if cell is not None and (cell.metric, cell.arm) != (self.metric, self.arm):
            raise ValueError(f"the cell's metric is {cell.metric} of {cell.arm}, not {self.metric} of {self.arm}")
        return self

    @property
    def name(self) -> str:
        """Of its file: a slug, and what tells it from others where that loses letters, or is cut."""
        whole = "-".join((self.paper or "own", self.table, self.row, self.column, self.arm))
        short = slug(whole)
        if whole.isascii() and len(short) <= LONGEST:
            return short
        return f"{short[:LONGEST].strip('-')}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"

    @property
    def place(self) -> tuple[str | None, str, str, str, str]:
        return self.paper, self.table, self.row, self.column, self.arm

    @property
    def published_cell(self) -> PublishedCell | None:
        if self.paper is None:
            return None
        try:
            return table_cells(self.paper, self.table).get((self.row, self.column))
        except KeyError:
            return None

    @property
    def source(self) -> str:
        cell = self.published_cell
        return cell.source if cell else self.table

    @property
    def published(self) -> float | None:
        cell = self.published_cell
        return cell.value if cell else None

    @property
    def scores(self) -> list[float]:
        return [run.score for run in self.runs if run.score is not None]

    @property
    def mean(self) -> stats.Paired | None:
        """Of the scores with its 95 % t interval: over seeds, or over splits with the mean of each, whose tests share
        training rows."""
        done = [run for run in self.runs if run.score is not None]
        if not done:
            return None
        shares = [run.test_share or 0.0 for run in done]
        sample, share = stats.by_split([run.split for run in done], self.scores, shares)
        return stats.paired(sample, test_share=share)

    @property
    def complete(self) -> bool:
        """All planned runs are done and none was shortened: only then is it a reproduction."""
        return len(self.scores) >= self.planned and not any(run.shortened for run in self.runs)

    @property
    def departures(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(text for run in self.runs for text in run.departures))

    def summary(self) -> dict[str, Any]:
        """A row of `spt results --json`. `ours` is the mean over the runs that are done, `low` and `high` the ends of
        its 95 % t interval; None where there are fewer than two."""
        mean = self.mean
        return {
            "source": self.source,
            "table": self.table,
            "row": self.row,
            "column": self.column,
            "metric": self.metric,
            "arm": self.arm,
            "recipe": self.recipe,
            "published": self.published,
            "ours": mean and mean.mean,
            "low": mean and mean.low,
            "high": mean and mean.high,
            "n": len(self.scores),
            "planned": self.planned,
            "complete": self.complete,
            "failed": len(self.runs) - len(self.scores),
            "shortened": any(run.shortened for run in self.runs),
            "departures": list(self.departures),
            "baselines": self.baselines,
            "hours": sum(run.device_seconds for run in self.runs) / 3600,
        }

    def sentence(self) -> str:
        """For a remark beside a published number."""
        found = self.summary()
        if not found["n"]:
            return f"{arm_text(self.arm)}: none of {len(self.runs)} runs with spt came to an end"
        score = score_text(found["ours"], self.metric)
        if found["low"] is not None:
            score += f" ({score_interval_text(found['low'], found['high'], self.metric)})"
        state = "" if self.complete else ", not complete"
        return f"{arm_text(self.arm)}: obtained with spt {score}, {len(self.scores)} of {self.planned} runs{state}"


def read_results(folder: Path | None = None) -> list[StoredResult]:
    """The results that come with spt, or those of a folder, sorted by name.

    Raises DataError for a file that is none, or that does not have the name that its contents give it.
    """
    if folder is not None and not folder.is_dir():
        raise UsageError(f"there is no folder {folder} of results; spt results --add RUNS makes one")
    if folder is None:
        return list(_packaged())
    return _read_all(folder.iterdir())


@cache
def _packaged() -> tuple[StoredResult, ...]:
    return tuple(_read_all(files("spt.results").iterdir()))


def _read_all(paths: Iterable[Traversable]) -> list[StoredResult]:
    return [_read(path) for path in sorted(paths, key=lambda path: path.name) if path.name.endswith(".json")]


def _read(path: Traversable) -> StoredResult:
    try:
        result = StoredResult.model_validate(parse_json(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        message = validation_messages(StoredResult, error)[0]
        raise DataError(f"{path} is no stored result: {message}") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a stored result: {one_line(error)}") from None
    if path.name != f"{result.name}.json":
        raise DataError(f"{path} holds {result.name}; rename it to {result.name}.json")
    return result


def results_of(cell: PublishedCell) -> list[StoredResult]:
    """What comes with spt for a published cell."""
    place = (cell.paper, cell.table, cell.row, cell.column)
    return [result for result in _packaged() if (result.paper, result.table, result.row, result.column) == place]


def collect_results(folder: Path, table: str | None = None) -> list[StoredResult]:
    """The results of a study's folder, or of all studies and runs in a folder: of every cell that a paper prints, or
    with the name of a table of your own, of both arms of every row.

    Runs that have not ended are left out. Raises DataError where nothing is there to be taken.
    """
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}; name a study's folder, or the folder of runs")
    if (folder / PLAN).is_file():
        paired = comparisons_of(folder, read_plan(folder))
    else:
        contents = all_runs(folder)
        studies = [each for study in contents.studies for each in comparisons_of(*study)]
        paired = [*studies, *contents.pairings]
    comparisons = [compare_arms(runs) for runs in paired if not runs.smoke]
    found = [result for comparison in comparisons for result in _results(comparison, table)]
    if not found:
        which = "" if table else " that belongs to a cell of a paper's table (--table NAME keeps it as your own)"
        smoke = "; smoke runs are not taken" if any(runs.smoke for runs in paired) else ""
        raise DataError(f"{folder} holds no finished run{which}{smoke}")
    merged: dict[str, StoredResult] = {}
    for result in found:
        known = merged.get(result.name)
        if known is not None and known.place == result.place and {*known.departures} != {*result.departures}:
            ours, theirs = (", ".join(each.departures) or "the recipe's" for each in (known, result))
            raise UsageError(
                f"{folder} holds {arm_text(result.arm)} runs of {result.row} with two settings ({ours}; {theirs}); "
                "name the folder of one study, and each with a --table of its own"
            )
        merged[result.name] = result if known is None else merge(known, result)
    return list(merged.values())


def _results(comparison: Comparison, table: str | None) -> list[StoredResult]:
    row = comparison.row
    if not row.metric:  # no run of it has a result, and so nothing says how it would be scored
        return []
    shared = {"metric": row.metric, "recipe": row.recipe, "factors": row.factors}
    pair = None if table else published_pair(row.recipe, row.factors, row.metric)
    reference = pair or PublishedPair(row.recipe, dict.fromkeys(row.factors, ""), "", "", None, None)  # else the recipe
    results = []
    for arm in ARMS:
        cell = pair and (pair.scratch if arm == "scratch" else pair.spt)
        if (cell is None and table is None) or not (runs := _stored_runs(comparison, arm)):
            continue
        place: dict[str, Any]
        if cell is not None:
            place = {"paper": cell.paper, "table": cell.table, "row": cell.row, "column": cell.column}
            place |= {"planned": cell.seeds, "remarks": tuple(filter(None, [cell.note, cell.doubt]))}
        else:
            column = ", ".join(filter(None, [row.task, factors_text(row.factors)]))
            place = {"table": table, "row": row.recipe, "column": column, "planned": row.planned}
        place["baselines"] = _baselines(comparison)
        folders = {cell.run: _folder(comparison, cell) for cell in comparison.runs.cells}
        departures = [_departures(folders[run.run], reference, arm, run.split) for run in runs]
        runs = [run.model_copy(update={"departures": each}) for run, each in zip(runs, departures, strict=True)]
        try:
            results.append(StoredResult(**place, **shared, arm=arm, runs=tuple(runs)))
        except ValidationError as error:
            message = validation_messages(StoredResult, error)[0]
            raise UsageError(f"the results of {row.label or row.recipe} cannot be stored: {message}") from None
    return results


def _baselines(comparison: Comparison) -> dict[str, float]:
    """Name -> mean test score of each baseline of the row that has one."""
    scores: dict[str, list[float]] = {}
    for planned in comparison.runs.baselines:
        outcome = baseline_outcome(comparison.runs.root, planned.run)
        if isinstance(outcome, BaselineResult) and comparison.row.metric in outcome.test:
            scores.setdefault(planned.name, []).append(outcome.test[comparison.row.metric])
    return {name: fmean(each) for name, each in scores.items()}


def _departures(run: Path, reference: PublishedPair, arm: ArmName, split: str | None) -> tuple[str, ...]:
    """What was changed; of a recipe that is not packaged, by which hash of all settings two are told apart. Those that
    make a split of the data are not part of it: a result holds all splits."""
    found = _of_arm(changed(run, reference), arm)
    if reference.recipe in packaged():
        return found
    settings = own_settings(run)
    mine = {key: settings[key] for key in _of_arm(settings, arm) if split is None or key not in OF_SPLIT}
    return tuple(f"{text} (they are {digest(mine)})" for text in found)


def _of_arm(departures: Iterable[str], arm: ArmName) -> tuple[str, ...]:
    """Those that bear on the runs of this arm: of a baseline neither pretraining nor the other arm's training."""
    foreign = ("pretrain.", "finetune.train.") if arm == "scratch" else ("scratch.",)
    return tuple(text for text in departures if not text.startswith(foreign))


def _stored_runs(comparison: Comparison, arm: ArmName) -> list[StoredRun]:
    """The runs of an arm that have ended, whether well or not: one whose result cannot be used has failed."""
    runs = []
    for cell in comparison.runs.cells:
        outcome = comparison.outcomes.get((Place(cell.seed, cell.split), cell.arm))
        if cell.arm != arm or outcome is None:
            continue
        if isinstance(outcome, Failure) and outcome.state in ("missing", "running", "stopped"):
            continue
        shared = {"seed": cell.seed, "split": cell.split, "run": cell.run, **_environment(_folder(comparison, cell))}
        if isinstance(outcome, Result):
            total = outcome.total
            cost = {"steps": total.steps, "device_seconds": round(total.device_seconds, 1)}
            share = None if cell.split is None else outcome.test_share
            late = "time" in (outcome.stop, outcome.parent_stop)
            score = (outcome.test or {})[comparison.row.metric]
            runs.append(StoredRun(**shared, **cost, score=score, test_share=share, out_of_time=late))
        else:
            state = "diverged" if outcome.state == "diverged" else "failed"
            runs.append(StoredRun(**shared, steps=0, device_seconds=0, score=None, state=state))
    return runs


def _folder(comparison: Comparison, cell: PlannedCell) -> Path:
    """A run's folder; of one that never began since its pretraining failed, the pretraining's."""
    folder = comparison.runs.root / cell.run
    return comparison.runs.root / cell.parent if cell.parent and not folder.is_dir() else folder


def _environment(folder: Path) -> dict[str, Any]:
    """Versions, machine and date of a run, from its folder."""
    path = folder / "env.json"
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
        machine = f"{found['cpu']}, {found['cores']} cores" if found["device"] == "cpu" else str(found["device"])
        ended = (RunFolder(folder.parent, folder.name).status() or {}).get("time") or path.stat().st_mtime
        date = datetime.fromtimestamp(ended, UTC).strftime("%Y-%m-%d")
        return {
            "spt": found["spt"],
            "commit": found["commit"],
            "torch": found["packages"]["torch"],
            "machine": machine,
            "date": date,
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OutputError(
            f"{path} does not say where the run was made ({one_line(error)}); its result cannot be taken"
        ) from None


def merge(old: StoredResult, new: StoredResult) -> StoredResult:
    """Both results of one cell as one; of a seed that both have, the new run counts, unless it failed and the
    old one did not.

    Raises UsageError where they are not: of another cell, metric or recipe, or with other settings.
    """
    scored = {(run.seed, run.split) for run in old.runs if run.score is not None}
    taken = [run for run in new.runs if run.score is not None or (run.seed, run.split) not in scored]
    again = {(run.seed, run.split) for run in taken}
    staying = [run for run in old.runs if (run.seed, run.split) not in again]
    if old.place != new.place:
        ours, theirs = ("; ".join(filter(None, result.place)) for result in (new, old))
        raise UsageError(
            f"{new.name}.json is of another cell ({theirs}) than these runs ({ours}); choose another --table"
        )
    for name in ("metric", "recipe", "factors"):
        if getattr(old, name) != getattr(new, name):
            raise UsageError(
                f"{new.name}.json has the {name} {getattr(old, name)}, and these runs {getattr(new, name)}: keep them "
                "under another --table, or remove the file"
            )
    if other := next((run for run in old.runs if set(run.departures) != set(new.runs[0].departures)), None):
        ours, theirs = (", ".join(run.departures) or "the recipe's" for run in (new.runs[0], other))
        raise UsageError(
            f"{new.name}.json has seed {other.seed} with other settings ({theirs}) than these runs ({ours}): keep them "
            "under another --table, or remove the file"
        )
    ordered = sorted([*staying, *taken], key=lambda run: (run.split or "", run.seed))
    update = {"runs": tuple(ordered), "planned": max(old.planned, new.planned)}
    return new.model_copy(update=update | {"baselines": old.baselines | new.baselines})


def add_results(folder: Path, to: Path, table: str | None = None) -> list[StoredResult]:
    """Take the results of finished runs into a folder of results; returns those cells as they are now."""
    collected = [(to / f"{result.name}.json", result) for result in collect_results(folder, table)]
    merged = [(path, merge(_read(path), result) if path.exists() else result) for path, result in collected]
    with writing(to):
        to.mkdir(parents=True, exist_ok=True)
    for path, result in merged:
        write_json(path, result.model_dump(mode="json"))
    return [result for _, result in merged]


def select_results(results: Sequence[StoredResult], words: Sequence[str]) -> list[StoredResult]:
    """Those of the source that the words name; else those with all words in their source, row, column or recipe."""
    lowered = [word.lower() for word in words]

    def text(result: StoredResult) -> str:
        return re.sub(r"\s+", " ", f"{result.source} {result.row} {result.column} {result.recipe}").lower()

    exact = " ".join(lowered)
    if named := [result for result in results if result.source.lower() == exact]:
        return named
    return [result for result in results if all(word in text(result) for word in lowered)]
