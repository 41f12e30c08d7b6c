"""The numbers printed in the papers (`published.yaml`), looked up by recipe to compare with ours.

Needs no torch, except for `changed`, which resolves recipes. The tests check that the file is consistent.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from spt.config.load import packaged, path_options, resolve
from spt.config.overrides import apply_overrides
from spt.config.recipe import BUDGETS, Recipe
from spt.config.yaml import is_file_name, parse_yaml
from spt.errors import SptError, UsageError
from spt.report.published_settings import settings_tree
from spt.runs.plan import ArmName, Factor
from spt.studies.schema import Changes
from spt.studies.schema import packaged as packaged_studies
from spt.studies.schema import validate as validate_study

# Instead of a number; all but the last are printed.
MISSING = ("chance", "infeasible", "chance or infeasible", "not reported", "diverged", "not known")


class PublishedCell(NamedTuple):
    """One printed number, and where it is printed."""

    paper: str  # key
    table: str
    source: str
    row: str
    column: str
    arm: ArmName
    printed: str
    unit: str
    metric: str
    value: float | None  # in the metric's own units
    missing: str | None  # why there is no value
    quoted: bool  # taken by the paper from elsewhere
    note: str
    doubt: str
    seeds: int  # runs whose mean it is


class PublishedPair(NamedTuple):
    """The published numbers of a recipe, and at which level of what a study varies."""

    recipe: str
    factors: Mapping[str, str]
    settings: str  # how the published run differs from the recipe; empty: it does not
    study: str  # the packaged study whose row it is; empty: the recipe alone
    scratch: PublishedCell | None
    spt: PublishedCell | None

    @property
    def cells(self) -> tuple[PublishedCell, ...]:
        return tuple(cell for cell in (self.scratch, self.spt) if cell)

    @property
    def metric(self) -> str:
        return self.cells[0].metric

    @property
    def changes(self) -> tuple[Changes, ...]:
        """What the study's row changes in the recipe, so far as its file says it."""
        if not self.study:
            return ()
        study = validate_study(parse_yaml(packaged_studies()[self.study], self.study), self.study)
        level = next((value for value in self.factors.values() if value in study.levels(self.recipe)), None)
        return study.changes_of(self.recipe, level)


@cache
def load_published() -> dict[str, Any]:
    """The packaged file: all its values are text, so that 88.00 stays as printed."""
    loaded = yaml.load(files("spt.report").joinpath("published.yaml").read_text(encoding="utf-8"), yaml.BaseLoader)
    assert isinstance(loaded, dict)
    return loaded


def number(printed: str) -> float | None:
    """A cell's number; None where it gives the reason for having none. Raises ValueError for anything else."""
    return None if printed in MISSING else float(printed)


@cache
def table_cells(paper: str, name: str) -> dict[tuple[str, str], PublishedCell]:
    """(row, column) -> what one table of a paper prints there."""
    measures, printing = load_published()["measures"], load_published()["papers"][paper]
    table = printing["tables"][name]
    cells = {}
    for row, trained, *values in table["rows"]:
        for column, printed in zip(table["columns"], values, strict=True):
            measure = measures[table.get("measures", {}).get(column, table["measure"])]
            notes = [
                note
                for note in table.get("notes", ())
                if row in note["rows"] and column in note.get("columns", table["columns"])
            ]
            doubts = [each for each in table.get("doubts", ()) if (each["row"], each["column"]) == (row, column)]
            value = number(printed)
            cells[row, column] = PublishedCell(
                paper=paper,
                table=name,
                source=f"{printing['name']}, Table {name}" + (f", p. {table['page']}" if "page" in table else ""),
                row=row,
                column=column,
                arm="spt" if "spt" in trained.split() else "scratch",
                printed=printed,
                unit=measure["unit"],
                metric=measure["metric"],
                # Rounded, so that 75.04 % is 0.7504 and not the number next to it.
                value=None if value is None else float(f"{value * float(measure['factor']):.12g}"),
                missing=printed if value is None else None,
                quoted=("quoted" in trained.split() or any("quoted" in note for note in notes))
                and not any("own" in note for note in notes),
                note="; ".join([*(note["text"] for note in notes), *filter(None, [printing.get("remark")])]),
                doubt="; ".join(doubt["text"] for doubt in doubts),
                seeds=int(table.get("seeds", 1)),
            )
    return cells


def all_cells() -> list[PublishedCell]:
    papers = load_published()["papers"].items()
    return [cell for key, paper in papers for name in paper["tables"] for cell in table_cells(key, name).values()]


def all_pairs() -> Iterator[PublishedPair]:
    """Every pair of numbers that belongs to a recipe."""
    for key, paper in load_published()["papers"].items():
        for name, table in paper["tables"].items():
            for pair in table.get("pairs", ()):
                given = pair.get("columns") or ([pair["column"]] if "column" in pair else [])  # recipes by row then
                for place, recipes in pair["recipes"].items():
                    for column in given or [place]:
                        rows = (place, None) if given else (pair["scratch"], pair.get("spt"))
                        scratch, spt = (table_cells(key, name)[row, column] if row else None for row in rows)
                        factors = pair.get("factors", {}) | ({pair["by"]: column} if "by" in pair else {})
                        settings, study = pair.get("settings", ""), pair.get("study", "")
                        for recipe in recipes.split():
                            yield PublishedPair(recipe, factors, settings, study, scratch, spt)


@cache
def _by_recipe() -> dict[str, list[PublishedPair]]:
    by_recipe: dict[str, list[PublishedPair]] = {}
    for pair in sorted(all_pairs(), key=lambda pair: (bool(pair.settings), bool(pair.factors))):
        by_recipe.setdefault(pair.recipe, []).append(pair)
    return by_recipe


def published_pairs(recipe: str) -> list[PublishedPair]:
    """Everything published that belongs to a recipe: its own numbers, then levels of studies, then other settings."""
    return list(_by_recipe().get(recipe, ()))


def published_pair(recipe: str, factors: Mapping[str, Factor], metric: str) -> PublishedPair | None:
    """The published numbers of a row of a report, in the same metric; None where there are none."""
    level = {name: value for name, value in factors.items() if (name, value) != ("fraction", 1)}  # 1: the recipe itself
    for pair in published_pairs(recipe):
        if not pair.settings and pair.metric == metric and _is_level(pair.factors, level):
            return pair
    return None


def published_average(
    rows: Sequence[tuple[str, Mapping[str, Factor]]], metric: str
) -> tuple[PublishedPair, list[int]] | None:
    """The average that a table prints over tasks which are all among these rows of a report, and which rows those are.

    A row is (recipe, factors).
    """
    for (paper, name, scratch, spt), columns in _rows_of_averages().items():
        average = load_published()["papers"][paper]["tables"][name]["average"]
        found = [[i for i, row in enumerate(rows) if _has(columns.get(column, ()), *row)] for column in average["of"]]
        if all(len(each) == 1 for each in found):
            cells = table_cells(paper, name)
            first, second = (cells[row, average["column"]] if row else None for row in (scratch, spt))
            if first and first.metric == metric:
                return PublishedPair("", {}, "", "", first, second), sorted(index for (index,) in found)
    return None


def _has(pairs: Sequence[PublishedPair], recipe: str, factors: Mapping[str, Factor]) -> bool:
    level = {name: value for name, value in factors.items() if (name, value) != ("fraction", 1)}
    return any(pair.recipe == recipe and _is_level(pair.factors, level) for pair in pairs)


@cache
def _rows_of_averages() -> dict[tuple[str, str, str, str], dict[str, list[PublishedPair]]]:
    """(paper, table, row from scratch, row of SPT or "") -> the pairs that an average is of, by column."""
    found: dict[tuple[str, str, str, str], dict[str, list[PublishedPair]]] = {}
    for pair in all_pairs():
        cell = pair.scratch or pair.spt
        if cell is None or pair.settings or pair.scratch is None:
            continue
        table = load_published()["papers"][cell.paper]["tables"][cell.table]
        if cell.column in table.get("average", {}).get("of", ()):
            key = (cell.paper, cell.table, pair.scratch.row, pair.spt.row if pair.spt else "")
            found.setdefault(key, {}).setdefault(cell.column, []).append(pair)
    return found


def _is_level(published: Mapping[str, str], level: Mapping[str, Factor]) -> bool:
    return published.keys() == level.keys() and all(_equal(text, level[name]) for name, text in published.items())


def _equal(text: str, value: Factor) -> bool:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return math.isclose(float(text), value)
        except ValueError:
            return False
    return text == value


# What a level governs itself: budgets by share, and the rows in use with a budget that means the same for them.
_OF_LEVEL: dict[str, tuple[str, ...]] = {"share": BUDGETS, "fraction": (*BUDGETS, "subset_fraction", "evaluate_every")}


def changed(run: Path, pair: PublishedPair) -> list[str]:
    """The settings in which a run differs from what was published, sorted: "model.d_model (64, recipe 256)".

    That is the packaged recipe with the changes of the study's row. Both are completed by this version of spt, so that
    the defaults of another version do not count; nor do file paths. Where they cannot be compared, the list is one
    sentence that says why.
    """
    recipe = pair.recipe
    if recipe not in packaged():
        return [f"{recipe} is not a packaged recipe, so its settings were not compared"]
    file = run / "recipe.yaml"
    try:
        ours = _settings(file.read_text(encoding="utf-8"), "a run's recipe.yaml")
        theirs = _settings(packaged()[recipe], recipe, json.dumps(pair.changes))
    except FileNotFoundError:
        why = "some runs have no recipe.yaml"
    except OSError as error:
        why = f"{file} cannot be read ({error.strerror})"
    except (SptError, UnicodeDecodeError) as error:
        why = " ".join(str(error).split())
    else:
        governed = {option for factor in pair.factors for option in _OF_LEVEL.get(factor, ())}
        return [
            f"{key} ({_shown(ours, key)}, {'study' if pair.study else 'recipe'} {_shown(theirs, key)})"
            for key in sorted(ours.keys() | theirs.keys())
            if ours.get(key) != theirs.get(key) and key.rpartition(".")[2] not in governed
        ]
    return [f"settings were not compared with those of {recipe}: {why}"]


def own_settings(run: Path) -> dict[str, Any]:
    """All settings of a run, by dotted key, with the names of files in place of their paths; none where its recipe
    cannot be read."""
    try:
        return _settings((run / "recipe.yaml").read_text(encoding="utf-8"), "a run's recipe.yaml", names=True)
    except (OSError, SptError, UnicodeDecodeError):
        return {}


@lru_cache(maxsize=256)  # the runs of an arm have the same text
def _settings(text: str, source: str, changes: str = "[]", names: bool = False) -> dict[str, Any]:
    """Dotted key -> value of a whole recipe with these changes, the baseline's training written out, without file
    paths, or with these files' `names`."""
    raw = parse_yaml(text, source)
    if not isinstance(raw, dict) or not all(isinstance(key, str) for key in raw):
        raise UsageError(f"{source} is not a recipe")
    for more in json.loads(changes):
        apply_overrides(raw, more)
    recipe: Recipe = resolve(raw, source)[0]
    tree = settings_tree(recipe)
    paths = [("task", path_options("tasks", recipe.task.model_dump(mode="json")))]
    paths.append(("model", path_options("models", recipe.model.model_dump(mode="json"))))
    for part, options in paths:
        for option in options:
            path = tree.pop(f"{part}.{option}")
            if names and path is not None:
                tree[f"{part}.{option}"] = Path(path).name
    if names:  # of a model, task or objective of one's own in a file, and of further inputs
        files = {key: value for key, value in tree.items() if isinstance(value, str) and _may_be_file(key, value)}
        tree |= {key: Path(value).name for key, value in files.items()}
    return tree


def _may_be_file(key: str, value: str) -> bool:
    return key == "pretrain.data" or (key.rpartition(".")[2] == "name" and is_file_name(Path(value)))


def _shown(settings: Mapping[str, Any], key: str) -> str:
    return json.dumps(settings[key], ensure_ascii=False).strip('"') if key in settings else "no such option"
