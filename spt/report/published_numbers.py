"""The numbers printed in the papers (`published.yaml`), looked up by recipe to compare with ours.

Needs no torch, except for `changed`, which resolves recipes. The tests check that the file is consistent.
"""

import json
import math
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from spt.config.load import packaged, path_options, resolve
from spt.config.overrides import flatten
from spt.config.recipe import Recipe
from spt.config.yaml import parse_yaml
from spt.errors import SptError, UsageError
from spt.runs.plan import ArmName, Factor

Missing = Literal["chance", "infeasible", "chance or infeasible", "not reported", "diverged"]
Objective = Literal["masked", "causal"]
Names = Annotated[tuple[str, ...], BeforeValidator(lambda given: given.split() if isinstance(given, str) else given)]


class _Part(BaseModel):
    # Not strict: the whole file is read as text, so that 88.00 stays as printed.
    model_config = ConfigDict(frozen=True, extra="forbid")


class Measure(_Part):
    """A published unit, and which of our metrics it corresponds to."""

    unit: str
    metric: str
    factor: float = Field(gt=0)  # published * factor is in the metric's own units
    higher_is_better: bool


class Average(_Part):
    """A column that is the mean of others. Chance, of two classes, counts as 50."""

    column: str
    of: tuple[str, ...]
    chance: float = 50


class Pair(_Part):
    """Rows that are the two arms of recipes, by column; or one column, trained from scratch, with recipes by row."""

    scratch: str | None = None
    spt: str | None = None
    column: str | None = None
    recipes: dict[str, Names]
    factors: dict[str, str] = {}  # what a study varies, at this level
    by: str | None = None  # the factor whose level is the column
    settings: str = ""  # how the published run differs from the recipe; empty: it is the recipe's own


class Note(_Part):
    rows: tuple[str, ...]
    columns: tuple[str, ...] = ()  # empty: all
    text: str
    own: bool = False  # not quoted, unlike the rest of the row
    quoted: bool = False  # quoted, unlike the rest of the row


class Doubt(_Part):
    """A cell that may be misprinted, or that does not follow from the others."""

    row: str
    column: str
    printed: str
    recomputed: str | None = None  # of an average
    text: str


class PublishedTable(_Part):
    """A table as it is printed, and which recipes its cells belong to."""

    page: int | None = None  # None where the text has no pages
    section: str
    shows: str
    measure: str
    measures: dict[str, str] = {}  # of columns with a different measure
    columns: tuple[str, ...]
    average: Average | None = None
    rows: tuple[tuple[str, ...], ...]
    pairs: tuple[Pair, ...] = ()
    notes: tuple[Note, ...] = ()
    doubts: tuple[Doubt, ...] = ()

    @property
    def cells(self) -> dict[tuple[str, str], str]:
        """(row, column) -> what is printed."""
        return {
            (row[0], column): value for row in self.rows for column, value in zip(self.columns, row[2:], strict=True)
        }

    def trained(self, row: str) -> set[str]:
        return set(next(line[1] for line in self.rows if line[0] == row).split())


class Paper(_Part):
    name: str
    authors: str
    title: str
    venue: str | None = None
    arxiv: str
    version: str | None = None  # of arXiv; None where the text read has none
    read: str  # the form in which it was read
    remark: str = ""  # on each of its numbers
    tables: dict[str, PublishedTable]


class PublishedCell(NamedTuple):
    """One printed number, and where it is printed."""

    paper: str  # key
    table: str
    page: int | None
    row: str
    column: str
    arm: ArmName
    objective: Objective | None
    printed: str
    unit: str
    metric: str
    higher_is_better: bool
    value: float | None  # in the metric's own units
    missing: str | None  # why there is no value
    quoted: bool  # taken by the paper from elsewhere
    note: str
    doubt: str

    @property
    def source(self) -> str:
        return f"{load_published().papers[self.paper].name}, Table {self.table}" + (
            f", p. {self.page}" if self.page else ""
        )


class PublishedArms(NamedTuple):
    """The published numbers of both arms of a row of a report."""

    scratch: PublishedCell | None
    spt: PublishedCell | None


class PublishedPair(NamedTuple):
    """The published numbers of a recipe, and at which level of what a study varies."""

    recipe: str
    factors: Mapping[str, str]
    settings: str  # how the published run differs from the recipe; empty: it does not
    scratch: PublishedCell | None
    spt: PublishedCell | None

    @property
    def metric(self) -> str:
        return next(cell.metric for cell in (self.scratch, self.spt) if cell)


class PublishedNumbers(_Part):
    measures: dict[str, Measure]
    papers: dict[str, Paper]

    def cells(self) -> Iterator[PublishedCell]:
        """Every cell of every table."""
        for key, paper in self.papers.items():
            for name, table in paper.tables.items():
                for row, column in table.cells:
                    yield self._cell(key, name, row, column)

    def pairs(self) -> Iterator[PublishedPair]:
        """Every pair of numbers that belongs to a recipe."""
        for key, paper in self.papers.items():
            for name, table in paper.tables.items():
                for pair in table.pairs:
                    yield from self._pair(key, name, pair)

    def _pair(self, paper: str, table: str, pair: Pair) -> Iterator[PublishedPair]:
        for place, recipes in pair.recipes.items():
            column = pair.column or place
            rows = (place, None) if pair.column else (pair.scratch, pair.spt)
            scratch, spt = (self._cell(paper, table, row, column) if row else None for row in rows)
            factors = {**pair.factors, pair.by: column} if pair.by else pair.factors
            for recipe in recipes:
                yield PublishedPair(recipe, factors, pair.settings, scratch, spt)

    def _cell(self, paper: str, name: str, row: str, column: str) -> PublishedCell:
        table = self.papers[paper].tables[name]
        measure = self.measures[table.measures.get(column, table.measure)]
        trained, printed = table.trained(row), table.cells[row, column]
        notes = [note for note in table.notes if row in note.rows and column in (note.columns or table.columns)]
        value = number(printed)
        return PublishedCell(
            paper=paper,
            table=name,
            page=table.page,
            row=row,
            column=column,
            arm="spt" if "spt" in trained else "scratch",
            objective=next((name for name in get_args(Objective) if name in trained), None),
            printed=printed,
            unit=measure.unit,
            metric=measure.metric,
            higher_is_better=measure.higher_is_better,
            # Rounded, so that 75.04 % is 0.7504 and not the number next to it.
            value=None if value is None else float(f"{value * measure.factor:.12g}"),
            missing=printed if value is None else None,
            quoted=("quoted" in trained or any(note.quoted for note in notes)) and not any(note.own for note in notes),
            note="; ".join(filter(None, (*(note.text for note in notes), self.papers[paper].remark))),
            doubt="; ".join(doubt.text for doubt in table.doubts if (doubt.row, doubt.column) == (row, column)),
        )


def number(printed: str) -> float | None:
    """A cell's number; None where it gives the reason for having none. Raises ValueError for anything else."""
    return None if printed in get_args(Missing) else float(printed)


@cache
def load_published() -> PublishedNumbers:
    """The packaged file."""
    text = files("spt.report").joinpath("published.yaml").read_text(encoding="utf-8")
    # BaseLoader yields only text, lists and mappings: 88.00 stays as printed.
    return PublishedNumbers.model_validate(yaml.load(text, yaml.BaseLoader))


def cells(recipe: str) -> list[PublishedPair]:
    """Everything published that belongs to a recipe: its own numbers, then levels of studies, then other settings."""
    return list(_by_recipe().get(recipe, ()))


@cache
def _by_recipe() -> dict[str, list[PublishedPair]]:
    by_recipe: dict[str, list[PublishedPair]] = {}
    for pair in sorted(load_published().pairs(), key=lambda pair: (bool(pair.settings), bool(pair.factors))):
        by_recipe.setdefault(pair.recipe, []).append(pair)
    return by_recipe


def published_arms(recipe: str, factors: Mapping[str, Factor], metric: str) -> PublishedArms | None:
    """The published numbers of a row of a report, in the same metric; None where there are none."""
    level = {name: value for name, value in factors.items() if (name, value) != ("fraction", 1)}  # 1: the recipe itself
    for pair in cells(recipe):
        if not pair.settings and pair.metric == metric and _same(pair.factors, level):
            return PublishedArms(pair.scratch, pair.spt)
    return None


def _same(published: Mapping[str, str], level: Mapping[str, Factor]) -> bool:
    if published.keys() != level.keys():
        return False
    return all(_equal(text, level[name]) for name, text in published.items())


def _equal(text: str, value: Factor) -> bool:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return math.isclose(float(text), value)
        except ValueError:
            return False
    return text == value


def changed(run: Path, recipe: str) -> list[str]:
    """The settings in which a run differs from the packaged recipe, sorted: "model.d_model (64, recipe 256)".

    Both are completed by this version of spt, so that the defaults of another version do not count; nor do file paths.
    Where they cannot be compared, the list is one sentence that says why.
    """
    if recipe not in packaged():
        return [f"{recipe} is not a packaged recipe, so its settings were not compared"]
    file = run / "recipe.yaml"
    try:
        return list(_differences(file.read_text(encoding="utf-8"), recipe))
    except FileNotFoundError:
        why = "some runs have no recipe.yaml"
    except OSError as error:
        why = f"{file} cannot be read ({error.strerror})"
    except (SptError, UnicodeDecodeError) as error:
        why = " ".join(str(error).split())
    return [f"settings were not compared with those of {recipe}: {why}"]


@lru_cache(maxsize=256)  # the runs of an arm have the same text
def _differences(text: str, recipe: str) -> tuple[str, ...]:
    ours, theirs = _settings(text, "a run's recipe.yaml"), _of_packaged(recipe)
    return tuple(
        f"{key} ({_shown(ours, key)}, recipe {_shown(theirs, key)})"
        for key in sorted(ours.keys() | theirs.keys())
        if ours.get(key) != theirs.get(key)
    )


@cache
def _of_packaged(recipe: str) -> dict[str, Any]:
    return _settings(packaged()[recipe], recipe)


def _settings(text: str, source: str) -> dict[str, Any]:
    """Dotted key -> value of a whole recipe, the baseline's training written out, without file paths."""
    raw = parse_yaml(text, source)
    if not isinstance(raw, dict) or not all(isinstance(key, str) for key in raw):
        raise UsageError(f"{source} is not a recipe")
    recipe: Recipe = resolve(raw, source)[0]
    tree = recipe.model_dump(mode="json")
    tree["scratch"] = {"train": recipe.train("scratch").model_dump(mode="json")}
    for part, kind in (("task", "tasks"), ("model", "models")):
        for key in path_options(kind, tree[part]):  # type: ignore[arg-type]
            del tree[part][key]
    return flatten(tree)


def _shown(settings: Mapping[str, Any], key: str) -> str:
    return json.dumps(settings[key], ensure_ascii=False).strip('"') if key in settings else "no such option"
