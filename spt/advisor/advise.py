"""`spt try`: read the data, plan within the budget, write the recipes, run both arms, answer.

Test rows are scored by the engine, at the end of each run and by the baselines; nothing before looks at them but the
check that they are not among the training rows.
"""

import hashlib
import json
import logging
import os
import re
import shlex
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from spt.advisor import arrays
from spt.advisor.answer import Answer, answer
from spt.advisor.backbones import Candidate, choose, width
from spt.advisor.budget import Plan, Shape, Timing, budget_text, parse_budget, plan
from spt.advisor.classes import ClassOptions
from spt.advisor.columns import LONGEST, ColumnRoles, Decisions, decide
from spt.advisor.recipes import STUDY, Template, recipe_text, study_text
from spt.advisor.recordings import label_windows, shortened
from spt.advisor.table import read_table
from spt.config.job import Job
from spt.config.load import complete_part, load
from spt.config.recipe import LOWER_IS_BETTER, Part
from spt.data.dataset import identify_data, open_task
from spt.data.source import data_dir
from spt.data.summary import summarise
from spt.errors import DataError, OutputError, UsageError, did_you_mean
from spt.execution.estimate import MeasuredCosts
from spt.execution.run_study import ExecutionTarget, run_study
from spt.report.collect import Report, read_report
from spt.report.format import time_text
from spt.report.stats import FEWEST
from spt.report.write import write_report
from spt.runs.files import parse_json, sync, write_json, write_text, writing
from spt.runtime.distributed import Runtime
from spt.runtime.launch import usable_cores
from spt.runtime.scratch import scratch_folder
from spt.runtime.settings import Settings
from spt.runtime.signals import cleanup
from spt.studies import matching, schema
from spt.studies.grid import expand
from spt.tasks.base import Classes, TaskData, Tokens, class_counts
from spt.tasks.own.options import HUB_NAME
from spt.tasks.own.parsing import MissingValueError
from spt.training.build import StageSetup, build_stage
from spt.training.loop import time_steps
from spt.training.threads import needs_one_thread, stage_threads

logger = logging.getLogger(__name__)

RECORD = "try.json"
UNBALANCED = 0.75  # share of the commoner of two classes from which accuracy says little
TOLD = re.compile("were drawn|^values are missing")  # notes whose content a decision tells
WARM, TIMED = 2, 4  # steps of a measurement
LONG_STEP = 0.3  # seconds
FEW_ROWS, FEW_UNITS = 300, 60  # sequences, and groups, below which one split says too little
FOLDS = 5
WORKERS_FROM = 60.0  # seconds of work from which it pays to start processes


@dataclass(frozen=True)
class Request:
    """What was asked."""

    data: str
    given: ColumnRoles = field(default_factory=ColumnRoles)
    budget: str = "30m"
    jobs: int | Literal["auto"] = "auto"
    out: Path | None = None
    settings: Settings = field(default_factory=Settings)
    metric: str | None = None  # what is compared; None: the usual one
    splits: int | None = None  # None: as the rows and the budget suggest
    transforms: Mapping[str, Any] = field(default_factory=dict)  # windows, patches, …: options of the task
    unlabelled: Path | None = None  # more rows, for pretraining
    classes: ClassOptions = field(default_factory=ClassOptions)
    answered: tuple[str, ...] = ()  # the roles that were answered on the terminal, which the same command leaves out

    @property
    def folder(self) -> Path:
        if self.out is not None:
            return self.out
        stem = re.sub(r"[^\w.-]+", "-", Path(self.data.rstrip("/")).stem or "data")
        return Path(f"{stem}-try")

    @property
    def asked(self) -> dict[str, Any]:
        """What the plan follows from."""
        where = self.data if not os.path.exists(self.data) else str(Path(self.data).resolve())
        return {
            "data": where,
            "budget": parse_budget(self.budget),
            "metric": self.metric,
            "splits": self.splits,
            **{key: [*value] if isinstance(value, tuple) else value for key, value in asdict(self.given).items()},
            **self.transforms,
            **dict.fromkeys(("positive", "class-weights", "balanced-sampling")),
            **self.classes.given,
            "unlabelled": None if self.unlabelled is None else str(self.unlabelled.resolve()),
        }


@dataclass(frozen=True)
class Advice:
    """What is to be done, before it is."""

    decisions: tuple[str, ...]  # a line each
    findings: tuple[str, ...]
    plan: Plan
    timings: tuple[Timing, ...]
    jobs: int
    needed: float  # seconds that three seeds of these models take
    spent: float  # on reading and timing
    files: Mapping[str, str]  # name -> text


@dataclass(frozen=True)
class Outcome:
    answer: Answer
    report: Report
    study: Path
    seconds: float
    failed: int


def advise(request: Request, tell: Callable[[str], None]) -> Advice:
    """Read, decide, time and plan; writes nothing that stays. `tell` is given a line at a time."""
    began = time.monotonic()
    seconds = parse_budget(request.budget)
    if request.metric is not None and request.metric not in LOWER_IS_BETTER:
        raise UsageError(f"--metric {request.metric}: unknown metric{did_you_mean(request.metric, LOWER_IS_BETTER)}")
    _check_folder(request)
    if (known := _record(request)) is not None:
        for line in known.decisions:
            tell(line)
        tell(f"{request.folder} holds this plan already; it goes on")
        return known
    runtime = Runtime(replace(request.settings, quiet=True))
    with scratch_folder("spt-try-") as scratch:
        where, table = _locate(request.data, scratch)
        decisions = decide(read_table(table), request.given)
        request.classes.check_label(decisions.classes is None, bool(decisions.options.get("per_step")))
        for line in decisions.lines:
            tell(line)
        decisions = _with_gaps(where, decisions, tell)
        found = _lay_out(request, where, decisions, Limits(), scratch, runtime, tell)
        made = _planned(found, request, seconds - (time.monotonic() - began))
        smaller = Limits(32, 512 if decisions.kind == "text" else 2048)
        poor = made is None or len(made.models) < 3 or made.seeds < FEWEST
        if poor and found.changes(smaller) and time.monotonic() - began < seconds / 2:
            tell(f"size: at most {smaller.length:,} steps and width {smaller.width}, since the budget is short")
            found = _lay_out(request, where, decisions, smaller, scratch, runtime, tell)
            made = _planned(found, request, seconds - (time.monotonic() - began))
        made = made or _planned(found, request, seconds - (time.monotonic() - began), must=True)
        assert made is not None
        found, made = _over_splits(found, made, request, decisions, seconds - (time.monotonic() - began), tell)
        advice = _advice(request, found, made, time.monotonic() - began)
    for line in plan_lines(advice, request):
        tell(line)
    return advice


class Limits(NamedTuple):
    """Of what is tried."""

    width: int = 64
    length: int = LONGEST


@dataclass(frozen=True)
class Layout:
    """The data, and the models at their sizes with their times."""

    template: Template
    part: Part
    findings: tuple[str, ...]
    sized: tuple[tuple[Candidate, dict[str, int]], ...]
    timings: tuple[Timing, ...]
    validation: int  # batches
    test: int
    at_once: int  # runs

    def changes(self, limits: Limits) -> bool:
        widest = max(int(candidate.options["d_model"]) for candidate, _ in self.sized)
        return limits.width < widest or limits.length < self.template.length

    @property
    def shape(self) -> Shape:
        template = self.template
        return Shape(template.steps_per_epoch, self.validation, self.test, template.evaluations)


def _lay_out(
    request: Request,
    where: dict[str, Any],
    decisions: Decisions,
    limits: Limits,
    scratch: Path,
    runtime: Runtime,
    tell: Callable[[str], None],
) -> Layout:
    part, data, options, cut = _open(where, decisions, request.transforms, limits.length)
    request.classes.check_names(data)
    findings = (*_check(part, data, decisions), *_better_metric(request, data))
    for line in (*cut, *findings):
        tell(line)
    name = request.data if "hub" in where else Path(request.data.rstrip("/")).name
    template = Template(
        name,
        {**decisions.options, **options},
        where,
        (*decisions.lines, *cut),
        rows=len(data.train),
        labelled=len(data.labelled().train),
        validation=len(data.val),
        length=data.length,
        tokens=part.options["tokens"] or ("characters" if decisions.kind == "text" else None),
        real=decisions.classes is None,
        epochs=1.0,
        metric=request.metric,
        unlabelled=request.unlabelled,
        classes=request.classes,
    )
    template = template.with_epochs(template.most_epochs)
    sized = _sized(template, data, limits.width, scratch, runtime, tell)
    timings, small = _timed(sized, scratch, runtime, tell)
    at_once: int | str = request.jobs
    if at_once == "auto":
        at_once = usable_cores() if small and runtime.device.type == "cpu" else 1
    validation, test = (-(-len(split) // template.batch_size) for split in (data.val, data.test))
    return Layout(template, part, findings, tuple(sized), tuple(timings), validation, test, int(at_once))


def _planned(found: Layout, request: Request, seconds: float, must: bool = False, splits: int = 1) -> Plan | None:
    """What fits into the seconds that are left; None, or with `must` a UsageError, where nothing does."""
    if seconds <= 0:
        raise UsageError(
            f"--budget {request.budget} was used up by reading and timing alone; give several times as much"
        )
    try:
        jobs = found.at_once if seconds >= WORKERS_FROM else 1
        least, most = found.template.least_epochs, found.template.most_epochs
        made = plan(found.timings, seconds, found.shape, least=least, most=most, jobs=jobs, splits=splits)
        if made.jobs > 1 and made.work < WORKERS_FROM:
            made = plan(found.timings, seconds, found.shape, least=least, most=most, splits=splits)
        return made
    except UsageError:
        if must:
            raise
        return None


def _over_splits(
    found: Layout, made: Plan, request: Request, decisions: Decisions, seconds: float, tell: Callable[[str], None]
) -> tuple[Layout, Plan]:
    """The plan with folds instead of seeds on one split: so many as were asked for, or where there are few rows and
    the budget has as many seeds. Raises UsageError where folds that were asked for cannot be drawn."""
    few = decisions.sequences < FEW_ROWS or decisions.units < FEW_UNITS
    splits = request.splits or (FOLDS if few and made.seeds >= FOLDS else 1)
    if splits == 1:
        return found, made
    try:
        for fold in range(splits):
            open_task(Part(**{**found.part.model_dump(), "folds": splits, "fold": fold}))
    except DataError as error:
        if request.splits is None:
            return found, made
        raise UsageError(f"--splits {splits}: {error}") from None
    planned = _planned(found, request, seconds, must=request.splits is not None, splits=splits)
    if planned is None:
        return found, made
    what = "rows" if decisions.sequences < FEW_ROWS else "groups"
    why = "as asked for" if request.splits else f"since there are few {what}"
    line = f"splits: {splits} folds, {why}; each is the test split once, and intervals are for other splits, too"
    tell(line)
    return replace(found, template=replace(found.template, lines=(*found.template.lines, line))), planned


def _advice(request: Request, found: Layout, made: Plan, spent: float) -> Advice:
    kept = [(candidate, changes) for candidate, changes in found.sized if candidate.name in made.models]
    times = [timing for timing in found.timings if timing.name in made.models]
    least = made.splits if made.splits > 1 else FEWEST
    needed = least * sum(timing.seconds(made.epochs, found.shape) for timing in times) / made.jobs
    template = found.template.with_epochs(made.epochs)
    folder = _final(request, template)
    files = {f"{each.name}.yaml": recipe_text(template, each, changes, folder) for each, changes in kept}
    files[STUDY] = study_text(template, [each.name for each, _ in kept], made.seeds, made.splits)
    return Advice(template.lines, found.findings, made, found.timings, made.jobs, 1.3 * needed + spent, spent, files)


def plan_lines(advice: Advice, request: Request) -> list[str]:
    made = advice.plan
    lines = [
        f"plan: {len(made.models)} {'model' if len(made.models) == 1 else 'models'} ({', '.join(made.models)}), both "
        f"arms, {f'{made.splits} splits, ' if made.splits > 1 else ''}{made.seeds} "
        f"{'seed' if made.seeds == 1 else 'seeds'}, {made.epochs:g} epochs in each arm: "
        f"{made.runs} runs, about {time_text(made.seconds)} of {request.budget}"
        + (f", {advice.jobs} at once" if advice.jobs > 1 else "")
    ]
    if made.dropped:
        lines.append(f"left out for the budget: {', '.join(made.dropped)}")
    if made.splits == 2:
        lines.append("warning: fewer than three splits decide nothing; --splits 5 has five")
    elif made.repeats < FEWEST:
        lines.append(f"warning: fewer than three seeds decide nothing; --budget {budget_text(advice.needed)} has three")
    return lines


def carry_out(advice: Advice, request: Request, tell: Callable[[str], None]) -> Outcome:
    """Write the files if they are not there, make the runs that are missing until the budget ends, and answer."""
    began = time.monotonic()
    _write(advice, request)
    folder = request.folder
    runtime = Runtime(request.settings)
    root = folder / "runs"
    grid = expand(schema.read(str(folder / STUDY)).study, False, MeasuredCosts(root, runtime))
    deadline = began + max(1.0, parse_budget(request.budget) - advice.spent)
    study, failed = run_study(grid, root, ExecutionTarget(advice.jobs, deadline=deadline), runtime)
    report = read_report([study])
    write_report(report, study)
    said = answer(report, study, folder, advice.plan.repeats, budget_text(advice.needed))
    seconds = time.monotonic() - began + advice.spent
    tell(f"time: {time_text(seconds)} of {request.budget}; {time_text(advice.plan.seconds)} were planned for the runs")
    return Outcome(said, report, study, seconds, failed)


# ------------------------------------------------------------------------------------------------------------- the data


def _locate(data: str, scratch: Path) -> tuple[dict[str, Any], Path]:
    """Where the rows are, as options of the task; and what is read for the columns."""
    path = Path(data).expanduser()
    if not data:
        raise UsageError("DATA is empty; name a file, a folder, an array or a data set on the hub")
    if path.exists():
        if path.suffix.lower() not in arrays.ENDINGS:
            return {"path": _only_table(path.resolve())}, path.resolve()
        target = scratch / "data.parquet"
        arrays.convert(path, target)
        return {"path": target}, target
    if not re.fullmatch(HUB_NAME, data) or path.suffix or (path.parent.exists() and path.parent != Path(".")):
        raise DataError(f"no file or folder {data}")
    copy = data_dir().resolve() / "hub" / data.replace("/", "--")
    if not copy.is_dir():
        raise DataError(
            f"there is no file or folder {data}, and no copy of such a data set on the hub in {copy.parent}: get it "
            f"with `spt data prepare custom hub={data} text_column=… label_column=…`"
        )
    return {"hub": data}, copy


def _only_table(path: Path) -> Path:
    from spt.advisor.table import single_table

    return single_table(path) or path


def _with_gaps(where: Mapping[str, Any], decisions: Decisions, tell: Callable[[str], None]) -> Decisions:
    """With missing: hidden, where values are missing."""
    windows = {"window": decisions.longest or LONGEST} if "label_at" in decisions.options else {}  # which it needs
    try:
        open_task(_part(where, {**decisions.options, **windows}))
    except DataError as error:
        if not isinstance(error.__cause__, MissingValueError):
            raise
    else:
        return decisions
    options = {**decisions.options, "missing": "hidden"}
    data = open_task(_part(where, {**options, **windows}))
    shares = next((note for note in data.notes if note.startswith("values are missing")), None)
    line = f"missing: {shares or 'static features are missing in some rows, and shown as such'} (missing: hidden)"
    tell(line)
    return replace(decisions, options=options, lines=(*decisions.lines, line))


def _part(where: Mapping[str, Any], options: Mapping[str, Any]) -> Part:
    values = {"name": "custom", **{key: str(value) for key, value in where.items()}, **options}
    return complete_part("tasks", "the data", values)


def _open(
    where: Mapping[str, Any], decisions: Decisions, given: Mapping[str, Any], most: int
) -> tuple[Part, TaskData, dict[str, Any], tuple[str, ...]]:
    """The task, its rows, what was added to its options, and a note where long sequences are made shorter."""
    added, lines, values = {**given}, tuple[str, ...](), decisions.kind != "text"
    in_time = "label_at" in decisions.options
    if in_time:  # without windows there is nothing to open
        more, lines = label_windows(decisions.options, given, decisions.label_period, most)
        added |= more
        if "window" not in added:
            length, interval = max(most + 1, decisions.longest), _interval(given, decisions)
            more, further = shortened(
                decisions.options, given, length=length, interval=interval, recordings=0, most=most, values=True
            )
            added, lines = {**added, **more}, (*lines, *further)
    if "window" in added and "score" not in added and not {"label_at", "per_step"} & decisions.options.keys():
        added["score"] = "recording"
        lines = ("score: the mean answer of each recording's windows (score: window in the recipes is possible)",)
    opened = {key: value for key, value in added.items() if key != "stride" or "window" in added}  # else it waits
    part = _part(where, {**decisions.options, **opened})
    data = open_task(part)
    length, interval, n = data.length, data.interval, len(data.train)
    more, further = shortened(
        decisions.options, added, length=length, interval=interval, recordings=n, most=most, values=values
    )
    if more:
        added, lines = {**added, **more}, (*lines, *further)
    if "stride" in added and "window" not in added:
        raise UsageError(
            f"--stride {added['stride']}: sequences of up to {length:,} steps are not cut into windows here; add "
            "--window, or leave --stride out"
        )
    if more:
        part = _part(where, {**decisions.options, **added})
        data = open_task(part)
    sources = data.train.sources
    if in_time and sources is not None and len(set(sources.tolist())) == len(data.train):
        lines = (
            *lines,
            "labels: no recording is longer than a window, so each has one label; --window STEPS cuts them",
        )
    return part, data, added, lines


def _interval(given: Mapping[str, Any], decisions: Decisions) -> float:
    """Seconds from step to step, as far as options say."""
    rate = given.get("rate", decisions.options.get("rate"))
    return 1.0 if rate is None else 1 / float(rate)


def _check(part: Part, data: TaskData, decisions: Decisions) -> tuple[str, ...]:
    """Findings of `spt data check`; raises DataError for what makes a comparison senseless."""
    summary = summarise(part, scored=False)
    rows = summary["rows"]
    lengths = summary["lengths"]["train"]
    lines = [
        f"rows: {rows['train']:,} train, {rows['val']:,} validation, {rows['test']:,} test{_scored_text(data)}; "
        f"{lengths['min']:,} to {lengths['max']:,} steps of {_input_text(data)}"
    ]
    values = summary.get("values", {}).get("train")
    if values and values["min"] == values["max"]:
        raise DataError(
            f"the input is {values['min']:g} at every step of every training row; there is nothing to learn"
        )
    if lengths["max"] == 1:
        raise DataError("every sequence has one step; a sequence model has nothing to do with these data")
    if decisions.classes is not None and not data.target.per_step and isinstance(data.target, Classes):
        counts = summary["targets"]["train"]
        if sum(count > 0 for count in counts) < 2:
            raise DataError("all training rows have one class; there is nothing to learn")
    repeated = {name: count for name, count in summary["duplicates"].items() if count}
    if 2 * (also := repeated.get("test also in train", 0)) > rows["test"]:
        raise DataError(
            f"{also:,} of {rows['test']:,} test rows have a training row's input; test rows must be new ones"
        )
    if repeated:
        said = ", ".join(f"{name} {count:,}" for name, count in repeated.items())
        lines.append(f"warning: inputs that occur twice: {said}")
    lines += [f"warning: {finding}" for finding in summary["findings"] if "not used" not in finding]
    return (*lines, *(f"note: {note}" for note in summary["notes"] if not TOLD.search(note)))


def _better_metric(request: Request, data: TaskData) -> tuple[str, ...]:
    """Where always naming one class has a high accuracy, which metric says more."""
    if request.metric is not None or not isinstance(data.target, Classes) or data.target.count != 2:
        return ()
    counts = class_counts(data.train, 2)
    if counts.max() < UNBALANCED * counts.sum():
        return ()
    common = int(counts.argmax())
    name = repr(data.classes[common]) if data.classes else f"class {common}"
    return (
        f"note: {counts.max() / counts.sum():.0%} of the training answers are {name}, so accuracy says little of the "
        "other class; --metric auroc judges the order of probabilities, --metric balanced_accuracy or mcc the answers",
    )


def _scored_text(data: TaskData) -> str:
    """How many recordings stand behind windows whose answers are averaged: a score is of as many answers."""
    if data.test.recordings is None or data.test.per_step:
        return ""
    val, test = len(data.val.whole), len(data.test.whole)
    return f" (windows; {val:,} recordings are scored in validation, {test:,} in test)"


def _input_text(data: TaskData) -> str:
    if isinstance(data.input, Tokens):
        return f"tokens, {data.input.vocab:,} different ones"
    return "one value" if data.input.channels == 1 else f"{data.input.channels} values"


# --------------------------------------------------------------------------------------------------- models, and times


def _sized(
    template: Template, data: TaskData, widest: int, folder: Path, runtime: Runtime, tell: Callable[[str], None]
) -> list[tuple[Candidate, dict[str, int]]]:
    """The backbones, each at the width where it has as many parameters as the first."""
    candidates = choose(template.tokens is not None, data.length, min(widest, width(template.rows)))
    study = schema.Models(recipes=("first", "others"), match="parameters")
    costs = MeasuredCosts(folder, runtime)
    sized: list[tuple[Candidate, dict[str, int]]] = []
    first: matching.Candidate | None = None
    for candidate in candidates:
        path = folder / f"{candidate.name}.yaml"
        write_text(path, recipe_text(template, candidate, {}, folder))
        one = matching.Candidate(candidate.name, identify_data(load(str(path))))
        first = first or one
        try:
            changes = {} if one is first else dict(matching.equal_changes(study, one, first, costs, None))
        except UsageError as error:
            tell(f"left out: {str(error).partition(';')[0]}")
            continue
        write_text(path, recipe_text(template, candidate, changes, folder))
        sized.append((candidate, changes))
    return sized


def _timed(
    sized: list[tuple[Candidate, dict[str, int]]], folder: Path, runtime: Runtime, tell: Callable[[str], None]
) -> tuple[list[Timing], bool]:
    """Seconds of a step of each stage of each model, on training rows; and whether one thread is enough for all."""
    timings, small = [], True
    for candidate, _ in sized:
        resolved = identify_data(load(str(folder / f"{candidate.name}.yaml")))
        seconds, parameters = [], 0
        for stage in ("pretrain", "finetune"):
            setup = build_stage(Job(resolved, stage, 0))
            small = small and needs_one_thread(setup)
            parameters = setup.model.parameter_counts()["total"]
            with stage_threads(setup, runtime):
                seconds.append(_step_seconds(setup, runtime))
        timing = Timing(candidate.name, seconds[0], seconds[1], candidate.control, parameters)
        timings.append(timing)
        tell(
            f"timed: {candidate.name}, {parameters:,} parameters, {_time(timing.pretraining)} a step of "
            f"pretraining, {_time(timing.finetuning)} of finetuning"
        )
    return timings, small


def _time(seconds: float) -> str:
    return time_text(seconds) if seconds >= 0.9995 else f"{1000 * seconds:.3g} ms"


def _step_seconds(setup: StageSetup, runtime: Runtime) -> float:
    """Median of a few steps; of long ones the second."""
    first = time_steps(setup, runtime, 2)[1]
    return first if first > LONG_STEP else statistics.median(time_steps(setup, runtime, WARM + TIMED)[WARM:])


# -------------------------------------------------------------------------------------------------------------- files


def _final(request: Request, template: Template) -> Path:
    """Where recipes will lie, so that their paths are right there; arrays lie beside them."""
    path = template.where.get("path")
    converted = path is not None and Path(path).name == "data.parquet" and "spt-try-" in str(path)
    return Path(path).parent if converted and path is not None else request.folder.resolve()


def _check_folder(request: Request) -> None:
    """Raise where the folder holds something else, or cannot be written."""
    folder = request.folder
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder} is a file, not a folder; name another with --out")
    if folder.is_dir() and not (folder / RECORD).is_file() and any(folder.iterdir()):
        raise OutputError(f"{folder} holds other files; name another folder with --out")
    parent = folder if folder.is_dir() else folder.parent
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise OutputError(f"cannot write {folder}: permission denied; name another folder with --out")


def _record(request: Request) -> Advice | None:
    """The plan that the folder holds, if it is one of this request. Raises UsageError for another, and for edited
    files, OutputError for what cannot be read."""
    path = request.folder / RECORD
    if not path.is_file():
        return None
    again = f"spt study run {_quoted(request.folder / STUDY)} --out {_quoted(request.folder / 'runs')}"
    try:
        record = parse_json(path.read_text(encoding="utf-8"))
        asked, files = record["asked"], record["files"]
        made = {
            **record["plan"],
            "models": tuple(record["plan"]["models"]),
            "dropped": tuple(record["plan"]["dropped"]),
        }
        timings = tuple(Timing(**each) for each in record["timings"])
        advice = Advice(
            tuple(record["decisions"]),
            tuple(record["findings"]),
            Plan(**made),
            timings,
            int(record["jobs"]),
            float(record["needed"]),
            0.0,
            {},
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OutputError(f"{path} cannot be read ({type(error).__name__}); move {request.folder} away") from None
    now = {**dict.fromkeys(asked), **request.asked}
    now |= {key: asked.get(key) for key in record.get("answered", ()) if not now.get(key)}
    changed = [key for key, value in now.items() if (asked.get(key) or None) != (value or None)]
    if changed:
        options = ", ".join("DATA" if key == "data" else f"--{key}" for key in changed)
        raise UsageError(
            f"{request.folder} was written with another {options}; name another folder with --out, or go on with what "
            f"is there: {again}"
        )
    for name, digest in files.items():
        file = request.folder / name
        if not file.is_file() or _digest(file.read_bytes()) != digest:
            raise UsageError(
                f"{file} was changed since spt wrote it, and is left as it is; run it with {again}, or name another "
                "folder with --out"
            )
    return advice


def _write(advice: Advice, request: Request) -> None:
    """The folder with its files, whole or not at all; one that is there stays as it is."""
    folder = request.folder
    if (folder / RECORD).is_file():
        return
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    with cleanup(lambda _: shutil.rmtree(beside, ignore_errors=True)):
        try:
            for name, text in advice.files.items():
                write_text(beside / name, text)
            if Path(request.data).suffix.lower() in arrays.ENDINGS:
                arrays.convert(Path(request.data).expanduser(), beside / "data.parquet")
            record = {
                "asked": request.asked,
                "answered": list(request.answered),
                "decisions": list(advice.decisions),
                "findings": list(advice.findings),
                "plan": asdict(advice.plan),
                "timings": [asdict(timing) for timing in advice.timings],
                "jobs": advice.jobs,
                "needed": advice.needed,
                "files": {name: _digest(text.encode()) for name, text in advice.files.items()},
            }
            write_json(beside / RECORD, json.loads(json.dumps(record)))
            with writing(folder):
                sync(beside)
                beside.chmod(0o755)
                if folder.is_dir():
                    folder.rmdir()  # empty, as was seen
                beside.rename(folder)
        finally:
            shutil.rmtree(beside, ignore_errors=True)


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
