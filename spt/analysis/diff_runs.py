"""How two runs differ, from their folders alone: recipe, data, code, machine, scores, costs.

Nothing is inferred from two runs. Whether one setting is better than another is for a report over seeds.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError
from rich.console import Group, RenderableType
from rich.text import Text

from spt.analysis.diff import (
    ABSENT,
    Change,
    NumberChange,
    Value,
    compare,
    compare_numbers,
    cost_cells,
    read_json,
    side_by_side,
    value_text,
    warning_lines,
)
from spt.config.job import FORMAT, digest
from spt.config.overrides import flatten
from spt.config.validation import validation_messages
from spt.config.yaml import parse_yaml
from spt.errors import DataError, UsageError, one_line
from spt.report.format import ARM, abbreviate, delta_text, metric_text, score_text
from spt.runs.folder import RunFolder
from spt.runs.plan import PLAN, Record
from spt.runs.result import SCHEMA, Result

SHARED = ("task", "model", "encoder")  # sections of a recipe that every stage uses
STAGE = ("objective", "head", "train")  # sections that each stage has for itself
SPLITS = {"test": "test", "chance": "chance", "val": "validation"}  # of scores, as displayed
TITLES = {
    "stages": "Settings of the two stages",
    "data": "Data",
    "code": "Code",
    "environment": "Environment",
    "training": "Training",
}


class Run(Record):
    """What identifies a run, and what its files hold."""

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
    job: dict[str, Any] = Field(exclude=True)
    settings: dict[str, Any] = Field(exclude=True)  # the resolved recipe; empty: unknown
    parent_settings: dict[str, Any] = Field(exclude=True)  # of the pretraining run, if its folder is beside this one
    result: Result | None = Field(exclude=True)
    environment: dict[str, Any] = Field(exclude=True)

    @property
    def kind(self) -> str:
        return "pretraining" if self.stage == "pretrain" else ARM[self.arm]

    @property
    def labelled(self) -> bool:
        return self.result is not None and any(split.targets for split in self.result.data.values())

    @property
    def sections(self) -> dict[str, str]:
        """The dotted section of the recipe that this run uses for each purpose."""
        sections = {part: f"{self.stage}.{part}" for part in STAGE}
        if self.arm == "scratch" and self.settings.get("scratch") is not None:
            sections["train"] = "scratch.train"
        return sections

    def uses(self, key: str) -> bool:
        """Whether a dotted key of the recipe decides this run's outcome."""
        pretraining = ("pretrain",) if self.arm == "spt" else ()
        used = (*SHARED, *self.sections.values(), *pretraining, "parent")
        return key.startswith(tuple(f"{name}." for name in used))

    def flat_settings(self) -> dict[str, Value]:
        """The recipe by dotted keys; pretraining as the run that this one started from had it.

        Under `parent.` stand the shared settings of that run which differ from those of this one.
        """
        settings, parent = self.settings, self.parent_settings
        if not parent or self.arm != "spt":
            return flatten(settings)
        own_shared, shared = (flatten({name: recipe.get(name) for name in SHARED}) for recipe in (settings, parent))
        differing = {f"parent.{change.key}": change.b for change in compare(own_shared, shared)}
        return flatten(settings | {"pretrain": parent.get("pretrain")}) | differing

    def is_place(self, key: str) -> bool:
        """Whether the run's key leaves out this option of task or model, because it says where files lie."""
        section, _, option = key.removeprefix("parent.").partition(".")
        known = self.job.get(section)
        return section in ("task", "model") and isinstance(known, dict) and option.partition(".")[0] not in known

    def values(self, stage_parts: Sequence[str], with_labels: bool) -> dict[str, dict[str, Value]]:
        """What is compared beside the recipes, by section; sections of which nothing is known are left out.

        Section `stages`: what this run uses for some of STAGE, by dotted keys that begin with the purpose.
        """
        sections: dict[str, dict[str, Value]] = {"stages": {}}
        for part in stage_parts:
            used = f"{self.sections[part]}."
            settings = {key: value for key, value in flatten(self.settings).items() if key.startswith(used)}
            sections["stages"] |= {f"{part}.{key.removeprefix(used)}": value for key, value in settings.items()}
        if self.environment:
            flat = flatten({name: value for name, value in self.environment.items() if name != "command"})
            sections["code"] = {name: flat.pop(name, None) for name in ("spt", "commit")}
            sections["environment"] = {key.removeprefix("packages."): value for key, value in flat.items()}
        if result := self.result:
            fields = {"rows": "rows", "inputs": "inputs"} | ({"labels": "targets"} if with_labels else {})
            sections["data"] = {
                f"{split} {name}": getattr(record, field)
                for split, record in result.data.items()
                for name, field in fields.items()
            }
            sections["training"] = {
                "best step": result.best_step,
                "stopped by": result.stop,
                "selected by": f"validation {result.selected_by}",
                "smoke run": result.smoke,
                **{f"parameters, {part}": number for part, number in result.parameters.items()},
                **{f"{split} rows that are also in train": number for split, number in result.repeated.items()},
            }
            chance = {} if result.chance is None else {result.metric: result.chance}
            scores = {"test": result.test or {}, "chance": chance, "val": result.val}
            sections["scores"] = {f"{split}.{name}": x for split, part in scores.items() for name, x in part.items()}
            sections["costs"] = {
                f"{part}.{axis}": float(amount)
                for part, ledger in (("own", result.own), ("total", result.total))
                for axis, amount in ledger
                if axis != "operations"
            }
        return sections


class Setting(Change):
    """A key of the recipes."""

    concerns: Literal["both", "a", "b", "neither"] = "both"  # whose computation it decides
    place: bool = False  # where files lie: no part of what is computed

    @property
    def relevant(self) -> bool:
        return self.concerns != "neither" and not self.place


class RunDiff(Record):
    sentence: str = ""
    a: Run
    b: Run
    same_key: bool | None  # None where a key is unknown
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    settings: tuple[Setting, ...]  # of the recipes
    hidden: int  # further settings that differ, but decide nothing about either run
    stages: tuple[Change, ...]  # objective, head and training, where the runs take them from different sections
    data: tuple[Change, ...]
    code: tuple[Change, ...]
    environment: tuple[Change, ...]
    training: tuple[Change, ...]  # best step, stop, selection
    scores: tuple[NumberChange, ...]  # by split and metric
    costs: tuple[NumberChange, ...]  # by part, own or total (pretraining included), and field of `Ledger`

    @property
    def runs(self) -> tuple[tuple[str, Run], tuple[str, Run]]:
        return ("A", self.a), ("B", self.b)

    @property
    def changed_scores(self) -> list[str]:
        """Scores of the selected checkpoint that differ, by split and metric."""
        split_metric = (score.key.partition(".")[::2] for score in self.scores if score.change)
        return sorted(f"{SPLITS[split]} {metric}" for split, metric in split_metric if split != "chance")


def diff_runs(first: Path, second: Path, everything: bool = False) -> RunDiff:
    """Compare two run folders, finished or not. Raises UsageError if one is not a run, DataError if it is damaged.

    With `everything`, settings include those that decide nothing about either run.
    """
    a, b = _read(first), _read(second)
    settings = tuple(_settings(a, b))
    shown = settings if everything else tuple(setting for setting in settings if setting.relevant)
    x, y = (run.values(_other_sections(a, b), a.labelled and b.labelled) for run in (a, b))
    changes: dict[str, Any] = {name: compare(x[name], y[name]) if name in x and name in y else () for name in TITLES}
    scores, costs = (compare_numbers(x.get(name, {}), y.get(name, {})) for name in ("scores", "costs"))
    if a.stage != b.stage:  # their scores answer different questions
        scores = tuple(score.model_copy(update={"change": None, "ratio": None}) for score in scores)
    diff = RunDiff(
        a=a,
        b=b,
        same_key=None if a.key is None or b.key is None else a.key == b.key,
        settings=shown,
        hidden=len(settings) - len(shown),
        scores=tuple(sorted(scores, key=lambda score: list(SPLITS).index(score.key.partition(".")[0]))),
        costs=tuple(cost for cost in costs if a.parent or b.parent or cost.key.startswith("own.")),
        **changes,
    )
    texts = {"sentence": _sentence(diff), "warnings": tuple(_warnings(diff)), "notes": tuple(_notes(diff))}
    return diff.model_copy(update=texts)


def _other_sections(a: Run, b: Run) -> list[str]:
    """Purposes for which the runs use different sections of their recipes."""
    return [part for part in STAGE if a.settings and b.settings and a.sections[part] != b.sections[part]]


def _read(path: Path) -> Run:
    if not path.is_dir():
        problem = "is a file, not a folder" if path.exists() else "does not exist"
        raise UsageError(f"{path} {problem}; name a run folder")
    path = path if path.name not in ("", "..") else path.resolve()
    if (path / PLAN).is_file():
        raise UsageError(f"{path} is a study, not a run; to compare reports, name two of them")
    job, result, settings = _json_object(path / "job.json"), _result(path / "result.json"), _yaml(path / "recipe.yaml")
    facts = dict(result) if result else job
    stage, parent = facts.get("stage", path.name.partition("-")[0]), facts.get("parent")
    if stage not in ("pretrain", "finetune") or not (facts or settings or (path / "status.json").is_file()):
        hint = "; it holds runs: name one of them" if any(path.glob("*-*/job.json")) else ""
        raise UsageError(f"{path} is not a run: neither job.json nor result.json describes one{hint}")
    status = RunFolder(path.parent, path.name).status() or {}
    environment = _json_object(path / "env.json") or (result.environment if result else {})
    name = re.match(rf"{stage}-([0-9a-f]{{12}})(\.|$)", path.name)
    try:
        return Run(
            run=path.name,
            folder=path.as_posix(),
            state="done" if result else str(status.get("state", "no status")),
            reason=str(status.get("reason") or ""),
            stage=stage,
            arm="" if stage == "pretrain" else "spt" if parent else "scratch",
            recipe=str(facts.get("recipe", "")),
            seed=facts.get("seed"),
            parent=parent,
            key=result.key if result else name[1] if name else _key(job),
            command=environment.get("command"),
            job=job,
            settings=settings,
            parent_settings=_yaml(path.parent / f"pretrain-{parent}" / "recipe.yaml") if parent else {},
            result=result,
            environment=environment,
        )
    except ValidationError as error:
        field = error.errors()[0]["loc"][0]
        files = {"command": "env.json", "environment": "env.json", "settings": "recipe.yaml"}
        file = files.get(str(field), f"../pretrain-{parent}/recipe.yaml" if field == "parent_settings" else "job.json")
        problem = validation_messages(Run, error)[0]
        raise DataError(f"{path / file} was not written by a run: {problem}") from error


def _key(job: Mapping[str, Any]) -> str | None:
    """The key that these settings give; None if the job is missing."""
    return digest({key: value for key, value in job.items() if key != "recipe"}) if "task" in job else None


def _json_object(path: Path) -> dict[str, Any]:
    """Empty if there is no such file."""
    raw = read_json(path, "it may be half written: repair or remove it") if path.is_file() else {}
    if not isinstance(raw, dict):
        raise DataError(f"{path} does not hold a JSON object; repair or remove it")
    return raw


def _yaml(path: Path) -> dict[str, Any]:
    """Empty if there is no such file."""
    try:
        recipe = parse_yaml(path.read_text(encoding="utf-8"), str(path)) if path.is_file() else {}
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
        raise DataError(f"{path} is not the result of a run: {validation_messages(Result, error)[0]}") from error


def _settings(a: Run, b: Run) -> Iterator[Setting]:
    """Both recipes, key by key; then what recipes call the same and keys do not."""
    if not (a.settings and b.settings):
        return
    with_task = [run for run in (a, b) if run.job.get("task")]
    for change in compare(a.flat_settings(), b.flat_settings()):
        users = [name for name, run in (("a", a), ("b", b)) if change.there in ("both", name) and run.uses(change.key)]
        concerns = "both" if len(users) == 2 else users[0] if users else "neither"
        place = bool(with_task) and all(run.is_place(change.key) for run in with_task)
        yield Setting.model_validate({**dict(change), "concerns": concerns, "place": place})
    jobs, recipes = ([flatten(part) for part in pair] for pair in ((a.job, b.job), (a.settings, b.settings)))
    for name, in_job, in_recipe in (
        ("task.name, its content", "task.name", "task.name"),  # a user's own file was edited
        ("model.name, its content", "model.name", "model.name"),
        ("task, version of its data", "data", "task.name"),
        ("format of keys", "format", None),
    ):
        x, y = (job.get(in_job) for job in jobs)
        if x and y and x != y and (in_recipe is None or recipes[0].get(in_recipe) == recipes[1].get(in_recipe)):
            yield Setting(key=name, a=x, b=y)


def _sentence(diff: RunDiff) -> str:
    both_finished = diff.a.result is not None and diff.b.result is not None
    clauses = ["same computation: keys equal" if diff.same_key else _computation(diff)]
    clauses.append(_data_text(diff.data) if both_finished else "data unknown until both runs are finished")
    clauses.append(_code_text(diff))
    if diff.environment:
        clauses.append(f"environment differs ({abbreviate([change.key for change in diff.environment])})")
    if diff.same_key and both_finished:
        clauses.append("scores differ" if diff.changed_scores else "scores equal")
    clauses += [f"{name} is not finished ({run.state})" for name, run in diff.runs if not run.result]
    return "; ".join(clauses)


def _computation(diff: RunDiff) -> str:
    """What the two runs were to compute."""
    a, b = diff.a, diff.b
    settings = [setting for setting in diff.settings if setting.relevant]
    text = _settings_text(a, b, settings)
    if a.seed != b.seed:
        text += f", other seed ({a.seed}, {b.seed})"
    elif not settings and a.kind == b.kind and a.settings and b.settings and a.parent != b.parent:
        text += ", other pretraining run"
    if a.kind == b.kind:
        return text
    noun = "arm" if a.stage == b.stage else "stage"
    if diff.stages:
        text += f"; the {noun}s' own settings differ in {_key_list(diff.stages)}"
    return f"different {noun}s, {a.kind} and {b.kind}; {text}"


def _settings_text(a: Run, b: Run, settings: Sequence[Setting]) -> str:
    if not (a.settings and b.settings):
        if not (a.kind == b.kind and a.result and b.result):
            return "settings unknown: a recipe.yaml is missing"
        same = a.result.settings == b.result.settings
        return "same settings" if same else "settings differ, but a recipe.yaml is missing to show where"
    if not settings:
        return "same settings" if a.kind == b.kind else "same recipe"
    common = [setting for setting in settings if setting.there == "both"] or settings
    one_sided = len(settings) - len(common)
    rest = f", and {one_sided} {'exist' if one_sided > 1 else 'exists'} in only one of them" if one_sided else ""
    return f"settings differ in {_key_list(common)}{rest}"


def _key_list(changes: Sequence[Change]) -> str:
    return f"{len(changes)} key{'s' if len(changes) > 1 else ''} ({abbreviate([change.key for change in changes], 2)})"


def _data_text(changes: Sequence[Change]) -> str:
    if not changes:
        return "data equal"
    splits: dict[str, list[str]] = {}
    for change in changes:
        split, what = change.key.split(" ")
        splits.setdefault(split, []).append(what)
    return f"data differ ({abbreviate([f'{split} ' + ' and '.join(what) for split, what in splits.items()])})"


def _code_text(diff: RunDiff) -> str:
    if not (diff.a.environment and diff.b.environment):
        return "code unknown"
    if not diff.code:
        modified = str(diff.a.environment.get("commit") or "").endswith("+")
        return "same commit, but with uncommitted changes" if modified else "code equal"
    versions = ", ".join(f"{change.key} {value_text(change.a)} vs {value_text(change.b)}" for change in diff.code)
    return f"code differs ({versions})"


def _warnings(diff: RunDiff) -> Iterator[str]:
    for name, run in diff.runs:
        if (key := _key(run.job)) is not None and key != run.key:
            other = "its result" if run.result else "the key in its folder's name"
            yield f"job.json of {name} does not match {other}: a file was edited by hand"
    if diff.same_key and diff.changed_scores:
        yield (
            f"the same computation gave a different score ({abbreviate(diff.changed_scores)}): results were edited, "
            "or code, libraries or device do not reproduce it"
        )


def _notes(diff: RunDiff) -> Iterator[str]:
    a, b = diff.a, diff.b
    for name, run in diff.runs:
        for file, content in (("recipe.yaml", run.settings), ("job.json", run.job), ("env.json", run.environment)):
            if not content:
                yield f"{name} has no {file}: what it would hold is not compared"
        if run.job.get("format", FORMAT) != FORMAT:
            yield f"{name} was written by another version of spt (format {run.job['format']}, not {FORMAT})"
        if run.parent and run.settings and not run.parent_settings:
            yield (
                f"pretrain-{run.parent}, from which {name} started, is not beside it: its settings are taken from the "
                f"recipe of {name}"
            )
        if run.result:
            yield from (f"{name}: {note}" for note in run.result.notes)
    if a.result and b.result:
        if a.labelled != b.labelled:
            yield f"only {'A' if a.labelled else 'B'} was given labels; inputs are compared"
        if a.stage != b.stage:
            yield "scores of different stages answer different questions: they are not subtracted"
        elif any(change.key.startswith(("test ", "val ")) for change in diff.data):
            yield "validation or test rows differ: scores say little about which run is better"
    for (name, run), (other_name, other) in (diff.runs, diff.runs[::-1]):
        if run.parent is not None and run.parent == other.key:
            yield f"{name} started from the weights of {other_name}"
    for part in _other_sections(a, b):
        yield f"{part} is {a.sections[part]} in A and {b.sections[part]} in B"


def render(diff: RunDiff) -> RenderableType:
    """For `rich.console.Console.print`: the sentence, then tables of what differs, then scores and costs."""
    parts: list[RenderableType] = [Text(diff.sentence, style="bold"), Text()]
    parts += [*warning_lines(diff.warnings), *(Text(note, style="dim") for note in diff.notes)]
    parts += [Text()] if diff.warnings or diff.notes else []
    parts += _table("Runs", ("", "A", "B"), _identity(diff))
    parts += _table("Settings", ("key", "A", "B", ""), [(*_cells(change), _remark(change)) for change in diff.settings])
    if diff.hidden:
        keys = "1 more key differs" if diff.hidden == 1 else f"{diff.hidden} more keys differ"
        parts += [Text(f"{keys} that neither run was computed from (--all)", style="dim"), Text()]
    for name, title in TITLES.items():
        parts += _table(title, ("key", "A", "B"), map(_cells, getattr(diff, name)))
    parts += _table("Scores", ("", "A", "B", "B - A"), map(_score_cells, diff.scores))
    amounts = {cost.key: (cost.a, cost.b) for cost in diff.costs}
    costs = [  # with one device, its seconds are those of the run
        cost_cells("{}, with pretraining" if cost.key.startswith("total.") else "{}", cost)
        for cost in diff.costs
        if "device_" not in cost.key or amounts[cost.key] != amounts[cost.key.replace("device_", "")]
    ]
    parts += _table("Cost", ("", "A", "B", "B : A"), costs)
    return Group(*parts[:-1])


def _table(title: str, header: Sequence[str], lines: Iterable[Sequence[str]]) -> list[RenderableType]:
    """A table under its title; nothing without lines."""
    lines = list(lines)
    return [Text(title, style="bold"), side_by_side(header, lines), Text()] if lines else []


def _identity(diff: RunDiff) -> Iterator[tuple[str, str, str]]:
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
    return ((name, a, facts[1][name]) for name, a in facts[0].items() if {a, facts[1][name]} != {ABSENT})


def _cells(change: Change) -> tuple[str, str, str]:
    a = ABSENT if change.there == "b" else value_text(change.a)
    return change.key, a, ABSENT if change.there == "a" else value_text(change.b)


def _remark(setting: Setting) -> str:
    if setting.place:
        return "a path, not part of the key"
    if setting.concerns == "neither":
        return "used by neither"
    return f"used only by {setting.concerns.upper()}" if setting.there == "both" and setting.concerns != "both" else ""


def _score_cells(score: NumberChange) -> tuple[str, str, str, str]:
    split, _, metric = score.key.partition(".")
    values = (score_text(score.a, metric), score_text(score.b, metric), delta_text(score.change, metric))
    return (f"{SPLITS[split]} {metric_text(metric)}", *values)
