"""How two runs differ, from their folders alone: recipe, data, code, machine, scores, costs.

Nothing is inferred from two runs. Whether one setting is better than another is for a report over seeds.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError
from rich.console import Group, RenderableType
from rich.text import Text

from spt.analysis.diff import ABSENT, cost_name, cost_text, first_problem, read_json, side_by_side, subtract
from spt.config.job import FORMAT, digest
from spt.config.overrides import flatten
from spt.config.yaml import parse_yaml
from spt.errors import DataError, UsageError, one_line
from spt.report.format import ARM, abbreviate, delta_text, metric_text, ratio_text, score_text
from spt.runs.folder import RunFolder
from spt.runs.plan import PLAN, Record
from spt.runs.result import SCHEMA, Ledger, Result

Value = Any  # of a recipe or an environment: JSON
Which = Literal["both", "a", "b"]
SplitName = Literal["test", "chance", "val"]
SHARED = ("task", "model", "encoder")  # sections of a recipe that every stage uses
STAGE = ("objective", "head", "train")  # sections that each stage has for itself
CODE = ("spt", "commit")


class ValueDiff(Record):
    """A value that differs, or that only one side has."""

    key: str  # dotted
    a: Value = None
    b: Value = None
    there: Which = "both"  # which of them have the key
    concerns: Literal["both", "a", "b", "neither"] = "both"  # whose computation it decides
    place: bool = False  # where files lie: no part of what is computed


class ScoreDiff(Record):
    split: SplitName
    metric: str
    a: float | None
    b: float | None
    change: float | None  # b - a; none between stages, whose scores answer different questions


class CostDiff(Record):
    part: Literal["own", "total"]  # total: pretraining included
    axis: str  # a field of `Ledger`
    a: float | None
    b: float | None
    ratio: float | None  # b : a


class RunHeader(Record):
    """What identifies a run."""

    run: str
    folder: str
    state: str
    reason: str
    stage: Literal["pretrain", "finetune"]
    arm: Literal["", "scratch", "spt"]
    recipe: str
    seed: int | None
    parent: str | None
    key: str | None
    command: str | None

    @property
    def kind(self) -> str:
        return "pretraining" if self.stage == "pretrain" else ARM[self.arm]


class RunDiff(Record):
    sentence: str
    a: RunHeader
    b: RunHeader
    same_key: bool | None  # None where a key is unknown
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    settings: tuple[ValueDiff, ...]  # of the recipes
    stages: tuple[ValueDiff, ...]  # objective, head and training, where the runs take them from different sections
    data: tuple[ValueDiff, ...]
    code: tuple[ValueDiff, ...]
    environment: tuple[ValueDiff, ...]
    training: tuple[ValueDiff, ...]  # best step, stop, selection
    scores: tuple[ScoreDiff, ...]
    costs: tuple[CostDiff, ...]


class RunFiles(NamedTuple):
    """What a run's files hold."""

    header: RunHeader
    job: dict[str, Any]
    recipe: dict[str, Any] | None
    parent_recipe: dict[str, Any] | None  # of the pretraining run, if its folder is beside this one
    result: Result | None
    environment: dict[str, Any]

    @property
    def sections(self) -> dict[str, str]:
        """The dotted section of the recipe that this run uses for each purpose."""
        sections = {part: f"{self.header.stage}.{part}" for part in STAGE}
        if self.header.arm == "scratch" and (self.recipe or {}).get("scratch") is not None:
            sections["train"] = "scratch.train"
        return sections

    def uses(self, key: str) -> bool:
        """Whether a dotted key of the recipe decides this run's outcome."""
        pretraining = ("pretrain",) if self.header.arm == "spt" else ()
        used = (*SHARED, *self.sections.values(), *pretraining, "parent")
        return key.startswith(tuple(f"{name}." for name in used))

    def flat_recipe(self) -> dict[str, Value]:
        """The recipe by dotted keys; pretraining as the run that this one started from had it.

        Under `parent.` stand the shared settings of that run which differ from those of this one.
        """
        recipe = dict(self.recipe or {})
        if self.parent_recipe is None or self.header.arm != "spt":
            return flatten(recipe)
        own, parent = flatten(recipe), flatten(self.parent_recipe)
        differing = {
            f"parent.{key}": parent.get(key)
            for key in dict.fromkeys((*own, *parent))
            if key.startswith(tuple(f"{name}." for name in SHARED)) and not _equal(own.get(key), parent.get(key))
        }
        return flatten(recipe | {"pretrain": self.parent_recipe.get("pretrain")}) | differing

    def is_place(self, key: str) -> bool:
        """Whether the run's key leaves out this option of task or model, because it says where files lie."""
        section, _, option = key.removeprefix("parent.").partition(".")
        known = self.job.get(section)
        return section in ("task", "model") and isinstance(known, dict) and option.partition(".")[0] not in known


def diff_runs(first: Path, second: Path) -> RunDiff:
    """Compare two run folders, finished or not. Raises UsageError if one is not a run, DataError if it is damaged."""
    a, b = _read(first), _read(second)
    same_key = None if a.header.key is None or b.header.key is None else a.header.key == b.header.key
    parts: dict[str, Any] = {
        "settings": tuple(_settings(a, b)),
        "stages": tuple(_stages(a, b)),
        "data": _data(a, b),
        "code": _compare(*({key: run.environment.get(key) for key in CODE} for run in (a, b))),
        "environment": _environment(a, b),
        "training": _training(a, b),
        "scores": _scores(a, b),
        "costs": tuple(_costs(a, b)),
    }
    return RunDiff(
        sentence=_sentence(a, b, same_key, parts),
        a=a.header,
        b=b.header,
        same_key=same_key,
        warnings=tuple(_warnings(a, b, same_key)),
        notes=tuple(_notes(a, b, parts["data"])),
        **parts,
    )


def _read(path: Path) -> RunFiles:
    if not path.is_dir():
        problem = "is a file, not a folder" if path.exists() else "does not exist"
        raise UsageError(f"{path} {problem}; name a run folder")
    path = path if path.name not in ("", "..") else path.resolve()
    if (path / PLAN).is_file():
        raise UsageError(f"{path} is a study, not a run; to compare reports, name two of them")
    job, result, recipe = _json_object(path / "job.json"), _result(path / "result.json"), _yaml(path / "recipe.yaml")
    stage = result.stage if result else job.get("stage", path.name.partition("-")[0])
    if stage not in ("pretrain", "finetune") or not (job or result or recipe or (path / "status.json").is_file()):
        hint = "; it holds runs: name one of them" if any(path.glob("*-*/job.json")) else ""
        raise UsageError(f"{path} is not a run: neither job.json nor result.json describes one{hint}")
    status = RunFolder(path.parent, path.name).status() or {}
    parent = result.parent if result else job.get("parent")
    environment = _json_object(path / "env.json") or (result.environment if result else {})
    named = re.match(rf"{stage}-([0-9a-f]{{12}})(\.|$)", path.name)
    try:
        header = RunHeader(
            run=path.name,
            folder=path.as_posix(),
            state="done" if result else str(status.get("state", "no status")),
            reason=str(status.get("reason") or ""),
            stage=stage,
            arm="" if stage == "pretrain" else "spt" if parent else "scratch",
            recipe=result.recipe if result else str(job.get("recipe", "")),
            seed=result.seed if result else job.get("seed"),
            parent=parent,
            key=result.key if result else named[1] if named else _key(job),
            command=environment.get("command"),
        )
    except ValidationError as error:
        problem = first_problem(error)
        file = "env.json" if problem.startswith("command") else "job.json"
        raise DataError(f"{path / file} was not written by a run: {problem}") from error
    parent_recipe = _yaml(path.parent / f"pretrain-{parent}" / "recipe.yaml") if parent else None
    return RunFiles(header, job, recipe, parent_recipe, result, environment)


def _key(job: Mapping[str, Any]) -> str | None:
    """The key that these settings give; None if the job is missing."""
    return digest({key: value for key, value in job.items() if key != "recipe"}) if "task" in job else None


def _json_object(path: Path) -> dict[str, Any]:
    """Empty if there is no such file."""
    if not path.is_file():
        return {}
    raw = read_json(path, "it may be half written: repair or remove it")
    if not isinstance(raw, dict):
        raise DataError(f"{path} does not hold a JSON object; repair or remove it")
    return raw


def _yaml(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        recipe = parse_yaml(path.read_text(encoding="utf-8"), str(path))
        json.dumps(recipe, allow_nan=False)
    except UsageError as error:
        raise DataError(f"{error}; the run's recipe is damaged") from error
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} is not a recipe ({one_line(error)}); the run's recipe is damaged") from error
    if not isinstance(recipe, dict):
        raise DataError(f"{path} is not a recipe; the run's recipe is damaged")
    return recipe


def _result(path: Path) -> Result | None:
    raw = _json_object(path)
    if not raw:
        return None
    if raw.get("format", SCHEMA) != SCHEMA:
        raise DataError(f"{path} has format {raw['format']} of another version of spt, not {SCHEMA}")
    try:
        return Result.model_validate(raw)
    except ValidationError as error:
        raise DataError(f"{path} is not the result of a run: {first_problem(error)}") from error


def _compare(a: Mapping[str, Value], b: Mapping[str, Value]) -> tuple[ValueDiff, ...]:
    """Keys whose values differ. A list is one value."""

    def which(key: str) -> Which:
        return "both" if key in a and key in b else "a" if key in a else "b"

    return tuple(
        ValueDiff(key=key, a=a.get(key), b=b.get(key), there=which(key))
        for key in dict.fromkeys((*a, *b))
        if which(key) != "both" or not _equal(a[key], b[key])
    )


def _equal(a: Value, b: Value) -> bool:
    """As recipes see it: 1 and 1.0 are one number, 1 and true are not equal."""
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)


def _settings(a: RunFiles, b: RunFiles) -> Iterator[ValueDiff]:
    """Both recipes, key by key; then what recipes call the same and keys do not."""
    if a.recipe is None or b.recipe is None:
        return
    with_task = [run for run in (a, b) if run.job.get("task")]
    for entry in _compare(a.flat_recipe(), b.flat_recipe()):
        users = [name for name, run in (("a", a), ("b", b)) if entry.there in ("both", name) and run.uses(entry.key)]
        concerns = "both" if len(users) == 2 else users[0] if users else "neither"
        place = bool(with_task) and all(run.is_place(entry.key) for run in with_task)
        yield entry.model_copy(update={"concerns": concerns, "place": place})
    jobs, recipes = ([flatten(part) for part in pair] for pair in ((a.job, b.job), (a.recipe, b.recipe)))
    for name, in_job, in_recipe in (
        ("task.name, its content", "task.name", "task.name"),  # a user's own file was edited
        ("model.name, its content", "model.name", "model.name"),
        ("task, version of its data", "data", "task.name"),
    ):
        x, y = (job.get(in_job) for job in jobs)
        if x and y and x != y and recipes[0].get(in_recipe) == recipes[1].get(in_recipe):
            yield ValueDiff(key=name, a=x, b=y)
    if "format" in a.job and "format" in b.job and a.job["format"] != b.job["format"]:
        yield ValueDiff(key="format of keys", a=a.job["format"], b=b.job["format"])


def _stages(a: RunFiles, b: RunFiles) -> Iterator[ValueDiff]:
    """Objective, head and training, where the runs take them from different sections of their recipes."""
    if a.recipe is None or b.recipe is None:
        return
    for part in STAGE:
        if a.sections[part] != b.sections[part]:
            yield from _compare(_section(a, part), _section(b, part))


def _section(run: RunFiles, part: str) -> dict[str, Value]:
    value: Any = run.recipe
    for name in run.sections[part].split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return flatten({part: value})


def _data(a: RunFiles, b: RunFiles) -> tuple[ValueDiff, ...]:
    """Rows and hashes by split; labels too, if both runs were given them."""
    if a.result is None or b.result is None:
        return ()
    labelled = all(any(split.targets for split in result.data.values()) for result in (a.result, b.result))

    def values(result: Result) -> dict[str, Value]:
        flat: dict[str, Value] = {}
        for name, split in result.data.items():
            flat |= {f"{name} rows": split.rows, f"{name} inputs": split.inputs}
            flat |= {f"{name} labels": split.targets} if labelled else {}
        return flat

    return _compare(values(a.result), values(b.result))


def _environment(a: RunFiles, b: RunFiles) -> tuple[ValueDiff, ...]:
    if not a.environment or not b.environment:
        return ()

    def values(run: RunFiles) -> dict[str, Value]:
        flat = flatten({name: value for name, value in run.environment.items() if name not in (*CODE, "command")})
        return {key.removeprefix("packages."): value for key, value in flat.items()}

    return _compare(values(a), values(b))


def _training(a: RunFiles, b: RunFiles) -> tuple[ValueDiff, ...]:
    def values(result: Result) -> dict[str, Value]:
        return {
            "best step": result.best_step,
            "stopped by": result.stop,
            "selected by": f"validation {result.selected_by}",
            "smoke run": result.smoke,
            **{f"parameters, {part}": number for part, number in result.parameters.items()},
            **{f"{split} rows that are also in train": number for split, number in result.repeated.items()},
        }

    return _compare(values(a.result), values(b.result)) if a.result and b.result else ()


def _scores(a: RunFiles, b: RunFiles) -> tuple[ScoreDiff, ...]:
    def values(result: Result | None) -> dict[tuple[SplitName, str], float]:
        if result is None:
            return {}
        scores: dict[tuple[SplitName, str], float] = {}
        scores |= {("test", name): value for name, value in (result.test or {}).items()}
        scores |= {("val", name): value for name, value in result.val.items()}
        return scores if result.chance is None else scores | {("chance", result.metric): result.chance}

    scores_a, scores_b = values(a.result), values(b.result)
    same_stage = a.header.stage == b.header.stage
    diffs = []
    for split, metric in dict.fromkeys((*scores_a, *scores_b)):
        x, y = scores_a.get((split, metric)), scores_b.get((split, metric))
        change = subtract(y, x) if same_stage else None
        diffs.append(ScoreDiff(split=split, metric=metric, a=x, b=y, change=change))
    return tuple(sorted(diffs, key=lambda score: ("test", "chance", "val").index(score.split)))


def _costs(a: RunFiles, b: RunFiles) -> Iterator[CostDiff]:
    if not (a.result or b.result):
        return
    parts: tuple[Literal["own", "total"], ...] = ("own", "total") if a.header.parent or b.header.parent else ("own",)
    for part in parts:
        for axis in (name for name in Ledger.model_fields if name != "operations"):
            x, y = (float(getattr(getattr(run.result, part), axis)) if run.result else None for run in (a, b))
            yield CostDiff(part=part, axis=axis, a=x, b=y, ratio=y / x if x and y is not None else None)


def _sentence(a: RunFiles, b: RunFiles, same_key: bool | None, parts: Mapping[str, Sequence[Any]]) -> str:
    both_finished = a.result is not None and b.result is not None
    clauses = [_computation(a, b, same_key, parts)]
    clauses.append(_data_text(parts["data"]) if both_finished else "data unknown until both runs are finished")
    clauses.append(_code_text(a, b, parts["code"]))
    if parts["environment"]:
        clauses.append(f"environment differs ({abbreviate([entry.key for entry in parts['environment']])})")
    if same_key and both_finished:
        clauses.append("scores differ" if _changed_scores(a, b) else "scores equal")
    for name, run in (("A", a), ("B", b)):
        clauses += [] if run.result else [f"{name} is not finished ({run.header.state})"]
    return "; ".join(clauses)


def _computation(a: RunFiles, b: RunFiles, same_key: bool | None, parts: Mapping[str, Sequence[ValueDiff]]) -> str:
    """What the two runs were to compute."""
    if same_key:
        return "same computation: keys equal"
    same_kind = (a.header.stage, a.header.arm) == (b.header.stage, b.header.arm)
    settings = [entry for entry in parts["settings"] if _is_relevant(entry)]
    text = _settings_text(a, b, settings, same_kind)
    if a.header.seed != b.header.seed:
        text += f", other seed ({a.header.seed}, {b.header.seed})"
    elif not settings and same_kind and a.recipe and b.recipe and a.header.parent != b.header.parent:
        text += ", other pretraining run"
    if same_kind:
        return text
    noun = "stage" if a.header.stage != b.header.stage else "arm"
    if parts["stages"]:
        text += f"; the {noun}s' own settings differ in {_key_list([entry.key for entry in parts['stages']])}"
    return f"different {noun}s, {a.header.kind} and {b.header.kind}; {text}"


def _settings_text(a: RunFiles, b: RunFiles, settings: Sequence[ValueDiff], same_kind: bool) -> str:
    if a.recipe is None or b.recipe is None:
        if not (same_kind and a.result and b.result):
            return "settings unknown: a recipe.yaml is missing"
        same = a.result.settings == b.result.settings
        return "same settings" if same else "settings differ, but a recipe.yaml is missing to show where"
    if not settings:
        return "same settings" if same_kind else "same recipe"
    common = [entry for entry in settings if entry.there == "both"] or settings
    text = f"settings differ in {_key_list([entry.key for entry in common])}"
    one_sided = len(settings) - len(common)
    return text + (
        f", and {one_sided} {'exist' if one_sided > 1 else 'exists'} in only one of them" if one_sided else ""
    )


def _key_list(keys: Sequence[str]) -> str:
    return f"{len(keys)} key{'s' if len(keys) > 1 else ''} ({abbreviate(keys, 2)})"


def _data_text(entries: Sequence[ValueDiff]) -> str:
    if not entries:
        return "data equal"
    splits: dict[str, list[str]] = {}
    for entry in entries:
        split, what = entry.key.split(" ")
        splits.setdefault(split, []).append(what)
    return f"data differ ({abbreviate([f'{split} ' + ' and '.join(what) for split, what in splits.items()])})"


def _code_text(a: RunFiles, b: RunFiles, entries: Sequence[ValueDiff]) -> str:
    if not (a.environment and b.environment):
        return "code unknown"
    if not entries:
        modified = str(a.environment.get("commit") or "").endswith("+")
        return "same commit, but with uncommitted changes" if modified else "code equal"
    changes = ", ".join(f"{entry.key} {value_text(entry.a)} vs {value_text(entry.b)}" for entry in entries)
    return f"code differs ({changes})"


def _changed_scores(a: RunFiles, b: RunFiles) -> list[str]:
    """Scores of the selected checkpoint that differ, by split and metric."""
    scores = (score for score in _scores(a, b) if score.split != "chance")
    return sorted(f"{_split_name(score)} {score.metric}" for score in scores if score.change)


def _warnings(a: RunFiles, b: RunFiles, same_key: bool | None) -> Iterator[str]:
    for name, run in (("A", a), ("B", b)):
        if (key := _key(run.job)) is not None and key != run.header.key:
            other = "its result" if run.result else "the key in its folder's name"
            yield f"job.json of {name} does not match {other}: a file was edited by hand"
    if same_key and (scores := _changed_scores(a, b)):
        yield (
            f"the same computation gave a different score ({abbreviate(scores)}): results were edited, or code, "
            "libraries or device do not reproduce it"
        )


def _notes(a: RunFiles, b: RunFiles, data: Sequence[ValueDiff]) -> Iterator[str]:
    for name, run in (("A", a), ("B", b)):
        for file, content in (("recipe.yaml", run.recipe), ("job.json", run.job), ("env.json", run.environment)):
            if not content:
                yield f"{name} has no {file}: what it would hold is not compared"
        if run.job.get("format", FORMAT) != FORMAT:
            yield f"{name} was written by another version of spt (format {run.job['format']}, not {FORMAT})"
        if run.header.parent and run.recipe is not None and run.parent_recipe is None:
            yield (
                f"pretrain-{run.header.parent}, from which {name} started, is not beside it: its settings are taken "
                f"from the recipe of {name}"
            )
        if run.result:
            yield from (f"{name}: {note}" for note in run.result.notes)
    if a.result and b.result:
        labelled = [any(split.targets for split in result.data.values()) for result in (a.result, b.result)]
        if labelled[0] != labelled[1]:
            yield f"only {'A' if labelled[0] else 'B'} was given labels; inputs are compared"
        if a.header.stage != b.header.stage:
            yield "scores of different stages answer different questions: they are not subtracted"
        elif any(entry.key.startswith(("test ", "val ")) for entry in data):
            yield "validation or test rows differ: scores say little about which run is better"
    for name, run, other_name, other in (("A", a, "B", b), ("B", b, "A", a)):
        if run.header.parent is not None and run.header.parent == other.header.key:
            yield f"{name} started from the weights of {other_name}"
    if a.recipe is not None and b.recipe is not None:
        for part in STAGE:
            if a.sections[part] != b.sections[part]:
                yield f"{part} is {a.sections[part]} in A and {b.sections[part]} in B"


def value_text(value: Value) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def to_json(diff: RunDiff, everything: bool = False) -> dict[str, Any]:
    """What `--json` prints: the same keys of recipes as the tables show."""
    shown = tuple(entry for entry in diff.settings if everything or _is_relevant(entry))
    return diff.model_copy(update={"settings": shown}).model_dump(mode="json")


def _is_relevant(entry: ValueDiff) -> bool:
    return entry.concerns != "neither" and not entry.place


def render(diff: RunDiff, everything: bool = False) -> RenderableType:
    """For `rich.console.Console.print`: the sentence, then tables of what differs, then scores and costs.

    Keys of recipes that decide nothing about either run are shown with `everything`.
    """
    parts: list[RenderableType] = [Text(diff.sentence, style="bold"), Text()]
    parts += [Text(f"WARNING: {warning}", style="bold red") for warning in diff.warnings]
    parts += [Text(note, style="dim") for note in diff.notes]
    parts += [Text()] if diff.warnings or diff.notes else []
    parts += _block("Runs", ("", "A", "B"), _header_lines(diff))
    shown = [entry for entry in diff.settings if everything or _is_relevant(entry)]
    parts += _block("Settings", ("key", "A", "B", ""), [(*_cells(entry), _remark(entry)) for entry in shown])
    if hidden := len(diff.settings) - len(shown):
        keys = "1 more key differs" if hidden == 1 else f"{hidden} more keys differ"
        parts += [Text(f"{keys} that neither run was computed from (--all)", style="dim"), Text()]
    for title, entries in (
        ("Settings of the two stages", diff.stages),
        ("Data", diff.data),
        ("Code", diff.code),
        ("Environment", diff.environment),
        ("Training", diff.training),
    ):
        parts += _block(title, ("key", "A", "B"), [_cells(entry) for entry in entries])
    parts += _block("Scores", ("", "A", "B", "B - A"), [_score_cells(score) for score in diff.scores], numeric=True)
    seconds = {(cost.part, cost.a, cost.b) for cost in diff.costs if cost.axis == "seconds"}
    costs = [  # with one device, its seconds are those of the run
        _cost_cells(cost)
        for cost in diff.costs
        if cost.axis != "device_seconds" or (cost.part, cost.a, cost.b) not in seconds
    ]
    parts += _block("Cost", ("", "A", "B", "B : A"), costs, numeric=True)
    return Group(*parts[:-1])


def _block(
    title: str, header: Sequence[str], lines: Sequence[tuple[str, ...]], numeric: bool = False
) -> list[RenderableType]:
    """A table under its title; nothing without lines."""
    if not lines:
        return []
    return [Text(title, style="bold"), side_by_side(header, lines, header[1:] if numeric else ()), Text()]


def _header_lines(diff: RunDiff) -> list[tuple[str, ...]]:
    facts = [
        {
            "folder": run.folder,
            "state": f"{run.state}: {run.reason}" if run.reason else run.state,
            "stage": f"{run.stage}, {ARM[run.arm]} arm" if run.arm else run.stage,
            "recipe": run.recipe or ABSENT,
            "seed": ABSENT if run.seed is None else str(run.seed),
            "key": run.key or ABSENT,
            "parent": run.parent or ABSENT,
        }
        for run in (diff.a, diff.b)
    ]
    return [
        (name, a, b) for (name, a), b in zip(facts[0].items(), facts[1].values(), strict=True) if {a, b} != {ABSENT}
    ]


def _cells(entry: ValueDiff) -> tuple[str, str, str]:
    a = ABSENT if entry.there == "b" else value_text(entry.a)
    return entry.key, a, ABSENT if entry.there == "a" else value_text(entry.b)


def _remark(entry: ValueDiff) -> str:
    if entry.place:
        return "a path, not part of the key"
    if entry.concerns == "neither":
        return "used by neither"
    return f"used only by {entry.concerns.upper()}" if entry.there == "both" and entry.concerns != "both" else ""


def _split_name(score: ScoreDiff) -> str:
    return "validation" if score.split == "val" else score.split


def _score_cells(score: ScoreDiff) -> tuple[str, str, str, str]:
    metric = score.metric
    values = (score_text(score.a, metric), score_text(score.b, metric), delta_text(score.change, metric))
    return (f"{_split_name(score)} {metric_text(metric)}", *values)


def _cost_cells(cost: CostDiff) -> tuple[str, str, str, str]:
    name = cost_name(cost.axis) + (", with pretraining" if cost.part == "total" else "")
    return name, cost_text(cost.a, cost.axis), cost_text(cost.b, cost.axis), ratio_text(cost.ratio)
