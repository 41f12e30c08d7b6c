"""What is different between two runs, from their folders alone: recipe, data, code, machine, scores, costs.

Nothing is inferred: two runs are two runs. Whether one setting is better than another is for a report over seeds.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from spt.config.job import FORMAT, digest
from spt.config.overrides import flatten
from spt.config.yaml import parse_yaml
from spt.errors import DataError, UsageError, one_line
from spt.report.format import (
    ARM,
    abbreviate,
    count_text,
    delta_text,
    flops_text,
    metric_text,
    ratio_text,
    score_text,
    time_text,
)
from spt.runs.files import parse_json
from spt.runs.folder import RunFolder
from spt.runs.plan import PLAN, Record
from spt.runs.result import SCHEMA, Ledger, Result

Value = Any  # of a recipe or an environment: JSON
ABSENT = "-"
SHARED = ("task", "model", "encoder")  # sections of a recipe that every stage uses
STAGE = ("objective", "head", "train")  # what each stage has of its own
CODE = ("spt", "commit")


class ValueDiff(Record):
    """A value that is not the same, or not in both."""

    key: str  # dotted
    a: Value = None
    b: Value = None
    there: Literal["both", "a", "b"] = "both"  # which of them have the key
    concerns: Literal["both", "a", "b", "neither"] = "both"  # which of the computations it decides
    place: bool = False  # where files lie: no part of what is computed


class ScoreDiff(Record):
    split: Literal["val", "test", "chance"]
    metric: str
    a: float | None
    b: float | None
    change: float | None  # b - a


class CostDiff(Record):
    part: Literal["own", "total"]  # total: pretraining included
    axis: str  # a field of `Ledger`
    a: float | None
    b: float | None
    ratio: float | None  # b : a


class RunHeader(Record):
    """A run by itself."""

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


class RunDiff(Record):
    sentence: str
    a: RunHeader
    b: RunHeader
    same_key: bool | None  # None where a key is not known
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    settings: tuple[ValueDiff, ...]  # of the recipes
    stages: tuple[ValueDiff, ...]  # what the two use of their recipes for the same purpose, where these sections differ
    data: tuple[ValueDiff, ...]
    code: tuple[ValueDiff, ...]
    environment: tuple[ValueDiff, ...]
    training: tuple[ValueDiff, ...]  # best step, stop, selection
    scores: tuple[ScoreDiff, ...]
    costs: tuple[CostDiff, ...]


class RunFiles(NamedTuple):
    """What a run's files hold."""

    about: RunHeader
    job: dict[str, Any]
    recipe: dict[str, Any] | None
    parent: dict[str, Any] | None  # recipe of the pretraining run, where that lies beside
    result: Result | None
    environment: dict[str, Any]

    @property
    def sections(self) -> dict[str, str]:
        """The dotted section of the recipe that this run uses for each purpose."""
        stage, scratch = self.about.stage, (self.recipe or {}).get("scratch") is not None
        found = {part: f"{stage}.{part}" for part in STAGE}
        return found | ({"train": "scratch.train"} if self.about.arm == "scratch" and scratch else {})

    @property
    def used(self) -> tuple[str, ...]:
        """Every section of the recipe that decides the outcome, as beginnings of dotted keys."""
        before = ("pretrain",) if self.about.arm == "spt" else ()
        return tuple(f"{name}." for name in (*SHARED, *self.sections.values(), *before))


def diff_runs(first: Path, second: Path) -> RunDiff:
    """Compare two run folders, finished or not. Raises UsageError or DataError for what is no run, or damaged."""
    a, b = _read(first), _read(second)
    recipes = _recipes(a, b)
    same_key = None if a.about.key is None or b.about.key is None else a.about.key == b.about.key
    settings = () if recipes is None else recipes
    parts = {
        "settings": settings,
        "stages": _stages(a, b),
        "data": _data(a, b),
        "code": _mapped(*({key: one.environment.get(key) for key in CODE} for one in (a, b))),
        "environment": _environment(a, b),
        "training": _training(a, b),
        "scores": _scores(a, b),
        "costs": _costs(a, b),
    }
    return RunDiff(
        sentence=_sentence(a, b, same_key, recipes is not None, parts),
        a=a.about,
        b=b.about,
        same_key=same_key,
        warnings=tuple(_warnings(a, b, same_key)),
        notes=tuple(_notes(a, b)),
        **parts,
    )


def _read(path: Path) -> RunFiles:
    if not path.is_dir():
        raise UsageError(
            f"{path} {'is a file, not a folder' if path.exists() else 'does not exist'}; name a run folder"
        )
    path = path if path.name not in ("", "..") else path.resolve()
    if (path / PLAN).is_file():
        raise UsageError(f"{path} is a study, not a run; to compare reports, name two of them")
    job, result = _json(path / "job.json"), _result(path)
    recipe = _yaml(path / "recipe.yaml")
    stage = result.stage if result else job.get("stage", path.name.partition("-")[0])
    if stage not in ("pretrain", "finetune") or not (job or result or recipe or (path / "status.json").is_file()):
        inside = "; it holds runs: name one of them" if any(path.glob("*-*/job.json")) else ""
        raise UsageError(f"{path} is no run: neither job.json nor result.json says what was run{inside}")
    status = RunFolder(path.parent, path.name).status() or {}
    parent = result.parent if result else job.get("parent")
    environment = _json(path / "env.json") or (result.environment if result else {})
    named = re.match(rf"{stage}-([0-9a-f]{{12}})(\.|$)", path.name)
    about = _about(
        path,
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
    before = _yaml(path.parent / f"pretrain-{parent}" / "recipe.yaml") if parent else None
    return RunFiles(about, job, recipe, before, result, environment)


def _about(path: Path, **fields: Any) -> RunHeader:
    try:
        return RunHeader(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        file = path / ("env.json" if name == "command" else "job.json")
        raise DataError(f"{file} is not what a run writes: {name}: {first['msg']}") from error


def _key(job: Mapping[str, Any]) -> str | None:
    """The key that these settings give; None of files that are not there."""
    return digest({key: value for key, value in job.items() if key != "recipe"}) if "task" in job else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({one_line(error)}); the run's folder is damaged") from error


def _json(path: Path) -> dict[str, Any]:
    """An object of JSON; empty where there is no such file."""
    text = _text(path)
    if text is None:
        return {}
    try:
        found = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is no JSON, perhaps half written ({one_line(error)}); repair or remove it") from error
    if not isinstance(found, dict):
        raise DataError(f"{path} holds no JSON object; repair or remove it")
    return found


def _yaml(path: Path) -> dict[str, Any] | None:
    text = _text(path)
    if text is None:
        return None
    try:
        found = parse_yaml(text, str(path))
    except UsageError as error:
        raise DataError(f"{error}; the run's recipe is damaged") from error
    if not isinstance(found, dict):
        raise DataError(f"{path} holds no recipe; the run's recipe is damaged")
    try:
        json.dumps(found, allow_nan=False)
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} holds what no recipe does ({one_line(error)}); the run's recipe is damaged") from error
    return found


def _result(path: Path) -> Result | None:
    raw = _json(path / "result.json")
    if not raw:
        return None
    if raw.get("format", SCHEMA) != SCHEMA:
        raise DataError(f"{path / 'result.json'} has the form {raw['format']} of another version of spt, not {SCHEMA}")
    try:
        return Result.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise DataError(f"{path / 'result.json'} is not the result of a run: {place}: {first['msg']}") from error


def _mapped(a: Mapping[str, Value], b: Mapping[str, Value]) -> tuple[ValueDiff, ...]:
    """Keys whose values are not the same. A list is one value."""
    return tuple(
        ValueDiff(
            key=key, a=a.get(key), b=b.get(key), there="both" if key in a and key in b else "a" if key in a else "b"
        )
        for key in dict.fromkeys((*a, *b))
        if key not in a or key not in b or not _same(a[key], b[key])
    )


def _same(a: Value, b: Value) -> bool:
    """As recipes see it: 1 and 1.0 are one number, 1 and true are not the same."""
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)


def _recipes(a: RunFiles, b: RunFiles) -> tuple[ValueDiff, ...] | None:
    """Both recipes, key by key; None where one of them has left none."""
    if a.recipe is None or b.recipe is None:
        return None
    entries = []
    for entry in _mapped(_whole(a), _whole(b)):
        who = [name for name, one in (("a", a), ("b", b)) if entry.there in ("both", name) and _concerns(one, entry)]
        concerns = "both" if len(who) == 2 else who[0] if who else "neither"
        place = all(_is_place(one, entry.key) for one in (a, b) if one.job.get("task"))
        place = place and any(one.job.get("task") for one in (a, b))
        entries.append(entry.model_copy(update={"concerns": concerns, "place": place}))
    return (*entries, *_contents(a, b))


def _whole(one: RunFiles) -> dict[str, Value]:
    """A run's recipe, flat. Its pretraining is that of the run it started from; `parent.` is what else that had."""
    recipe = dict(one.recipe or {})
    if one.parent is None or one.about.arm != "spt":
        return flatten(recipe)
    mine, theirs = flatten(recipe), flatten(one.parent)
    others = {
        f"parent.{key}": theirs.get(key)
        for key in dict.fromkeys((*mine, *theirs))
        if key.startswith(tuple(f"{name}." for name in SHARED)) and not _same(mine.get(key), theirs.get(key))
    }
    return flatten(recipe | {"pretrain": one.parent.get("pretrain")}) | others


def _concerns(one: RunFiles, entry: ValueDiff) -> bool:
    return entry.key.startswith((*one.used, "parent."))


def _is_place(one: RunFiles, key: str) -> bool:
    """Whether an option of task or model is left out of the run's key: it says where files lie."""
    section, _, option = key.removeprefix("parent.").partition(".")
    known = one.job.get(section)
    return section in ("task", "model") and isinstance(known, dict) and option.partition(".")[0] not in known


def _contents(a: RunFiles, b: RunFiles) -> list[ValueDiff]:
    """What recipes call the same and keys do not: a user's own file that was changed, data that were."""
    found = []
    for key in ("task", "model"):
        mine, theirs = (_inside(one.job.get(key), "name") for one in (a, b))
        named = [_inside((one.recipe or {}).get(key), "name") for one in (a, b)]
        if mine and theirs and mine != theirs and named[0] == named[1]:
            found.append(ValueDiff(key=f"{key}.name, its content", a=mine, b=theirs))
    mine, theirs = a.job.get("data"), b.job.get("data")
    task = flatten(a.recipe or {}).get("task.name"), flatten(b.recipe or {}).get("task.name")
    if mine and theirs and mine != theirs and task[0] == task[1]:
        found.append(ValueDiff(key="task, version of its data", a=mine, b=theirs))
    if "format" in a.job and "format" in b.job and a.job["format"] != b.job["format"]:
        found.append(ValueDiff(key="format of keys", a=a.job["format"], b=b.job["format"]))
    return found


def _inside(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _stages(a: RunFiles, b: RunFiles) -> tuple[ValueDiff, ...]:
    """Objective, head and training that the runs used, where they took them from different sections."""
    if a.recipe is None or b.recipe is None:
        return ()
    entries: list[ValueDiff] = []
    for part in STAGE:
        if a.sections[part] != b.sections[part]:
            entries += _mapped(*(_section(one, part) for one in (a, b)))
    return tuple(entries)


def _section(one: RunFiles, part: str) -> dict[str, Value]:
    value: Any = one.recipe
    for name in one.sections[part].split("."):
        value = _inside(value, name)
    return flatten({part: value})


def _data(a: RunFiles, b: RunFiles) -> tuple[ValueDiff, ...]:
    """Rows and hashes by split. Labels are compared where both runs were given them."""
    if a.result is None or b.result is None:
        return ()
    flat: tuple[dict[str, Value], dict[str, Value]] = ({}, {})
    labels = [any(split.targets for split in one.data.values()) for one in (a.result, b.result)]
    for one, values in zip((a.result, b.result), flat, strict=True):
        for name, split in one.data.items():
            values |= {f"{name} rows": split.rows, f"{name} inputs": split.inputs}
            values |= {f"{name} labels": split.targets} if all(labels) else {}
    return _mapped(*flat)


def _environment(a: RunFiles, b: RunFiles) -> tuple[ValueDiff, ...]:
    if not a.environment or not b.environment:
        return ()
    left = {*CODE, "command"}
    flat = (flatten({k: v for k, v in one.environment.items() if k not in left}) for one in (a, b))
    return _mapped(*({key.removeprefix("packages."): value for key, value in one.items()} for one in flat))


def _training(a: RunFiles, b: RunFiles) -> tuple[ValueDiff, ...]:
    values: list[dict[str, Value]] = []
    for one in (a.result, b.result):
        values.append(
            {}
            if one is None
            else {
                "best step": one.best_step,
                "stopped by": one.stop,
                "selected by": f"validation {one.selected_by}",
                "smoke run": one.smoke,
                **{f"parameters, {part}": number for part, number in one.parameters.items()},
                **{f"{split} rows that are also in train": number for split, number in one.repeated.items()},
            }
        )
    return _mapped(*values) if a.result and b.result else ()


def _scores(a: RunFiles, b: RunFiles) -> tuple[ScoreDiff, ...]:
    def of(one: Result | None) -> dict[tuple[Literal["val", "test", "chance"], str], float]:
        if one is None:
            return {}
        found: dict[tuple[Literal["val", "test", "chance"], str], float] = {}
        found |= {("test", name): value for name, value in (one.test or {}).items()}
        found |= {("val", name): value for name, value in one.val.items()}
        return found if one.chance is None else found | {("chance", one.metric): one.chance}

    mine, theirs = of(a.result), of(b.result)
    keys = sorted(dict.fromkeys((*mine, *theirs)), key=lambda key: ("test", "chance", "val").index(key[0]))
    return tuple(
        ScoreDiff(
            split=key[0], metric=key[1], a=(x := mine.get(key)), b=(y := theirs.get(key)), change=_change(a, b, x, y)
        )
        for key in keys
    )


def _change(a: RunFiles, b: RunFiles, x: float | None, y: float | None) -> float | None:
    """b - a; none between stages, whose scores answer different questions."""
    return None if x is None or y is None or a.about.stage != b.about.stage else y - x


def _costs(a: RunFiles, b: RunFiles) -> tuple[CostDiff, ...]:
    results = (a.result, b.result)
    parts: tuple[Literal["own", "total"], ...] = ("own", "total") if a.about.parent or b.about.parent else ("own",)
    found = []
    for part in parts if any(results) else ():
        for axis in (name for name in Ledger.model_fields if name != "operations"):
            x, y = (None if one is None else float(getattr(getattr(one, part), axis)) for one in results)
            found.append(CostDiff(part=part, axis=axis, a=x, b=y, ratio=y / x if x and y is not None else None))
    return tuple(found)


def _sentence(
    a: RunFiles, b: RunFiles, same_key: bool | None, recipes: bool, parts: Mapping[str, Sequence[Any]]
) -> str:
    both_done = a.result is not None and b.result is not None
    told = [_computation(a, b, same_key, recipes, parts)]
    told.append(_data_text(parts["data"]) if both_done else "data are known of finished runs only")
    told.append(_code_text(a, b, parts["code"]))
    changed = [entry.key for entry in parts["environment"]]
    told += [f"environment differs ({abbreviate(changed)})"] if changed else []
    if same_key and both_done:
        told.append("scores differ" if _rescored(a, b) else "scores equal")
    told += [f"{name} is not finished ({one.about.state})" for name, one in (("A", a), ("B", b)) if not one.result]
    return "; ".join(told)


def _computation(
    a: RunFiles, b: RunFiles, same_key: bool | None, recipes: bool, parts: Mapping[str, Sequence[ValueDiff]]
) -> str:
    """What was asked of the two runs."""
    if same_key:
        return "same computation: keys equal"
    entries = [one for one in parts["settings"] if _concerned(one)]
    seeds = "" if a.about.seed == b.about.seed else f" ({a.about.seed}, {b.about.seed})"
    alike = (a.about.stage, a.about.arm) == (b.about.stage, b.about.arm)
    if not recipes:
        if alike and a.result and b.result:
            same = a.result.settings == b.result.settings
            known = "same settings" if same else "settings differ, in keys that only a recipe.yaml would tell"
        else:
            known = "settings not known: a recipe.yaml is missing"
    elif not entries:
        known = "same settings" if alike else "same recipe"
    else:
        common = [one for one in entries if one.there == "both"] or entries
        known = f"settings differ in {len(common)} key{'s' if len(common) > 1 else ''}"
        known += f" ({abbreviate([entry.key for entry in common], 2)})"
        if alone := len(entries) - len(common):
            known += f", and {alone} {'are' if alone > 1 else 'is'} there in one of them alone"
    if seeds:
        known += f", other seed{seeds}"
    elif not entries and alike and recipes and a.about.parent != b.about.parent:
        known += ", other pretraining run"
    if alike:
        return known
    if apart := [entry.key for entry in parts["stages"]]:
        whose = "the stages' own" if a.about.stage != b.about.stage else "the arms' own"
        known += (
            f"; {whose} settings differ in {len(apart)} key{'s' if len(apart) > 1 else ''} ({abbreviate(apart, 2)})"
        )
    if a.about.stage != b.about.stage:
        return f"different stages, {_kind(a.about)} and {_kind(b.about)}; {known}"
    return f"different arms, {_kind(a.about)} and {_kind(b.about)}; {known}"


def _kind(about: RunHeader) -> str:
    return "pretraining" if about.stage == "pretrain" else ARM[about.arm]


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
        return "code not known"
    if not entries:
        unsure = str(a.environment.get("commit") or "").endswith("+")
        return "same commit, but with changes that no commit holds" if unsure else "code equal"
    said = ", ".join(f"{entry.key} {value_text(entry.a)} vs {value_text(entry.b)}" for entry in entries)
    return f"code differs ({said})"


def _rescored(a: RunFiles, b: RunFiles) -> list[str]:
    """Scores of the selected checkpoint that are not the same, by split and metric."""
    if a.result is None or b.result is None:
        return []
    pairs = (("test", a.result.test or {}, b.result.test or {}), ("validation", a.result.val, b.result.val))
    return [
        f"{split} {name}"
        for split, mine, theirs in pairs
        for name in mine.keys() & theirs.keys()
        if mine[name] != theirs[name]
    ]


def _warnings(a: RunFiles, b: RunFiles, same_key: bool | None) -> Iterable[str]:
    for name, one in (("A", a), ("B", b)):
        if (key := _key(one.job)) is not None and key != one.about.key:
            made = "result was computed from" if one.result else "folder is named by"
            yield f"job.json of {name} is not what its {made}: a file was changed by hand"
    if same_key and (scores := sorted(_rescored(a, b))):
        yield (
            f"the same computation gave another score ({abbreviate(scores)}): results were edited, or code, libraries "
            "or device do not reproduce it"
        )


def _notes(a: RunFiles, b: RunFiles) -> Iterable[str]:
    for name, one in (("A", a), ("B", b)):
        for part, there in (("recipe.yaml", one.recipe), ("job.json", one.job), ("env.json", one.environment)):
            if not there:
                yield f"{name} has no {part}: what it would tell is not compared"
        if one.job.get("format", FORMAT) != FORMAT:
            yield f"{name} is of another version of spt (format {one.job['format']}, not {FORMAT})"
        if one.about.parent and one.recipe is not None and one.parent is None:
            yield (
                f"pretrain-{one.about.parent}, from which {name} started, is not beside it: its settings are taken "
                f"from the recipe of {name}"
            )
        if one.result:
            yield from (f"{name}: {note}" for note in one.result.notes)
    if a.result and b.result:
        labels = [any(split.targets for split in one.data.values()) for one in (a.result, b.result)]
        if labels[0] != labels[1]:
            yield f"labels were given to {'A' if labels[0] else 'B'} alone; inputs are compared"
        if a.about.stage != b.about.stage:
            yield "scores of different stages answer different questions: no difference is formed"
        elif any(entry.key.startswith(("test ", "val ")) for entry in _data(a, b)):
            yield "validation or test rows are not the same: scores say little about which run is better"
    for name, one, other, whose in (("A", a, b, "B"), ("B", b, a, "A")):
        if one.about.parent is not None and one.about.parent == other.about.key:
            yield f"{name} started from the weights of {whose}"
    if a.recipe is not None and b.recipe is not None:
        for part in STAGE:
            if a.sections[part] != b.sections[part]:
                yield f"{part} is {a.sections[part]} in A and {b.sections[part]} in B"


def value_text(value: Value) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def to_json(found: RunDiff, everything: bool = False) -> dict[str, Any]:
    """What `--json` prints: the same keys of recipes that people are shown."""
    kept = tuple(one for one in found.settings if everything or _concerned(one))
    return found.model_copy(update={"settings": kept}).model_dump(mode="json")


def _concerned(entry: ValueDiff) -> bool:
    return entry.concerns != "neither" and not entry.place


def render(found: RunDiff, everything: bool = False) -> RenderableType:
    """For `rich.console.Console.print`: the sentence, then tables of what differs, then scores and costs.

    Keys of recipes that decide nothing of either run are shown with `everything`.
    """
    parts: list[RenderableType] = [Text(found.sentence, style="bold"), Text()]
    parts += [Text(f"WARNING: {said}", style="bold red") for said in found.warnings]
    parts += [Text(note, style="dim") for note in found.notes]
    parts += [Text()] if found.warnings or found.notes else []
    parts += _block("Runs", _about_lines(found), ("", "A", "B"))
    shown = [one for one in found.settings if everything or _concerned(one)]
    parts += _block("Settings", [(*_cells(one), _remark(one)) for one in shown], ("key", "A", "B", ""))
    hidden = len(found.settings) - len(shown)
    if hidden:
        which = "1 more key differs" if hidden == 1 else f"{hidden} more keys differ"
        parts += [Text(f"{which} that neither run was computed from (--all)", style="dim"), Text()]
    for title, entries in (
        ("Training of the two", found.stages),
        ("Data", found.data),
        ("Code", found.code),
        ("Environment", found.environment),
        ("How training went", found.training),
    ):
        parts += _block(title, [_cells(entry) for entry in entries], ("key", "A", "B"))
    parts += _block("Scores", [_score_cells(one) for one in found.scores], ("", "A", "B", "B - A"), 1)
    parts += _block("Cost", [_cost_cells(one) for one in _few_costs(found.costs)], ("", "A", "B", "B : A"), 1)
    return Group(*parts[:-1])


def _block(
    title: str, lines: Sequence[tuple[str, ...]], header: tuple[str, ...], words: int = 9
) -> list[RenderableType]:
    """A table with its title, where it has lines."""
    if not lines:
        return []
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 2, 0, 0))
    for number, name in enumerate(header):
        table.add_column(Text(name), justify="left" if number < words else "right", overflow="fold")
    for line in lines:
        table.add_row(*map(Text, line))
    return [Text(title, style="bold"), table, Text()]


def _about_lines(found: RunDiff) -> list[tuple[str, ...]]:
    facts = []
    for about in (found.a, found.b):
        facts.append(
            {
                "folder": about.folder,
                "state": f"{about.state}: {about.reason}" if about.reason else about.state,
                "stage": f"{about.stage}, {ARM[about.arm]} arm" if about.arm else about.stage,
                "recipe": about.recipe or ABSENT,
                "seed": ABSENT if about.seed is None else str(about.seed),
                "key": about.key or ABSENT,
                "parent": about.parent or ABSENT,
            }
        )
    return [(name, facts[0][name], facts[1][name]) for name in facts[0] if {f[name] for f in facts} != {ABSENT}]


def _cells(entry: ValueDiff) -> tuple[str, str, str]:
    a = ABSENT if entry.there == "b" else value_text(entry.a)
    return entry.key, a, ABSENT if entry.there == "a" else value_text(entry.b)


def _remark(entry: ValueDiff) -> str:
    if entry.place:
        return "a path, no part of the key"
    if entry.concerns == "neither" or entry.there == "both":
        return {"both": "", "a": "used by A alone", "b": "used by B alone", "neither": "used by neither"}[
            entry.concerns
        ]
    return ""


def _score_cells(score: ScoreDiff) -> tuple[str, str, str, str]:
    split = "validation" if score.split == "val" else score.split
    metric = score.metric
    values = (score_text(score.a, metric), score_text(score.b, metric), delta_text(score.change, metric))
    return (f"{split} {metric_text(metric)}", *values)


def _few_costs(costs: Sequence[CostDiff]) -> list[CostDiff]:
    """Without device seconds, where every run had one device."""
    seconds = {(one.part, one.a, one.b) for one in costs if one.axis == "seconds"}
    return [one for one in costs if one.axis != "device_seconds" or (one.part, one.a, one.b) not in seconds]


def _cost_cells(cost: CostDiff) -> tuple[str, str, str, str]:
    name = cost.axis.replace("_", " ").replace("flops", "FLOPs").replace("peak bytes", "peak memory")
    name += ", with pretraining" if cost.part == "total" else ""

    def text(value: float | None) -> str:
        if value is None:
            return ABSENT
        if cost.axis == "flops":
            return flops_text(value)
        if cost.axis.endswith("seconds"):
            return time_text(value)
        return f"{value / 2**20:,.0f} MiB" if cost.axis == "peak_bytes" else count_text(value)

    return name, text(cost.a), text(cost.b), ratio_text(cost.ratio)
