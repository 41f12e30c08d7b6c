"""The numbers that the papers print (`published.yaml`), looked up by recipe to stand beside ours.

Needs no torch, but for `changed`, which resolves recipes.
"""

import json
import math
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from spt.config.load import packaged, path_options, resolve
from spt.config.overrides import flatten
from spt.config.recipe import LOWER_IS_BETTER, Recipe
from spt.config.yaml import parse_yaml
from spt.errors import SptError, UsageError
from spt.runs.plan import ArmName, Factor

Missing = Literal["chance", "infeasible", "chance or infeasible", "not reported", "diverged"]
WORDS = {"scratch", "spt", "masked", "causal", "quoted"}  # how a row was trained
Objective = Literal["masked", "causal"]
Names = Annotated[tuple[str, ...], BeforeValidator(lambda given: given.split() if isinstance(given, str) else given)]


class _Part(BaseModel):
    # Not strict: the file is read as text throughout, so that 88.00 stays what is printed.
    model_config = ConfigDict(frozen=True, extra="forbid")


class Measure(_Part):
    """A published unit, and what it is among our metrics."""

    unit: str
    metric: str
    factor: float = Field(gt=0)  # published * factor is in the metric's own units
    higher_is_better: bool

    @model_validator(mode="after")
    def _one_of_ours(self) -> "Measure":
        if LOWER_IS_BETTER.get(self.metric) == self.higher_is_better:
            raise ValueError(f"{self.metric}: higher_is_better is not ours")
        return self


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
    columns: tuple[str, ...] = ()  # all, where there is none
    text: str
    own: bool = False  # not quoted, as the rest of the row is
    quoted: bool = False  # quoted, as the rest of the row is not


class Doubt(_Part):
    """A cell that may be misprinted, or that does not follow from the others."""

    row: str
    column: str
    printed: str
    recomputed: str | None = None  # of an average
    text: str


class PublishedTable(_Part):
    """A table as it is printed: what it holds at a row and a column, and which recipes that belongs to."""

    page: int | None = None  # None where the text has no pages
    section: str
    shows: str
    measure: str
    measures: dict[str, str] = {}  # of the columns that have another one
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
        return set(next(one[1] for one in self.rows if one[0] == row).split())

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> "PublishedTable":
        if wrong := [row[0] for row in self.rows if len(row) != 2 + len(self.columns)]:
            raise ValueError(f"rows with too few or too many cells: {wrong}")
        names = [row[0] for row in self.rows]
        if len(set(names)) < len(names) or len(set(self.columns)) < len(self.columns):
            raise ValueError("a row or a column stands twice")
        for row in self.rows:
            words = set(row[1].split())
            if words - WORDS or len(words & set(get_args(ArmName))) != 1:
                raise ValueError(f"{row[0]}: trained {row[1]!r}")
            for value in row[2:]:
                number(value)
        asked = set(chain(self.measures, *(note.columns for note in self.notes)))
        if self.average:
            asked |= {self.average.column, *self.average.of}
        if unknown := asked - set(self.columns):
            raise ValueError(f"no columns of this table: {sorted(unknown)}")
        if unknown := set(chain(*(note.rows for note in self.notes))) - set(names):
            raise ValueError(f"no rows of this table: {sorted(unknown)}")
        for doubt in self.doubts:
            if self.cells.get((doubt.row, doubt.column)) != doubt.printed:
                raise ValueError(f"doubt of {doubt.row}, {doubt.column}: {doubt.printed} is not printed there")
        for pair in self.pairs:
            self._check(pair)
        return self

    def _check(self, pair: Pair) -> None:
        if (pair.column is None) == (pair.scratch is None):
            raise ValueError(f"pair {pair}: a row from scratch or a column")
        for row, column, arm in _places(pair):
            if (row, column) not in self.cells:
                raise ValueError(f"pair {pair}: no cell {row}, {column}")
            if arm not in self.trained(row):
                raise ValueError(f"pair {pair}: {row} was not trained as {arm}")


class Paper(_Part):
    name: str
    authors: str
    title: str
    venue: str | None = None
    arxiv: str
    version: str | None = None  # of arXiv; None where the text that was read has none
    read: str  # in which form
    remark: str = ""  # on each of its numbers
    tables: dict[str, PublishedTable]


class PublishedCell(NamedTuple):
    """One printed number, and where it stands."""

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
    quoted: bool  # the paper has it from elsewhere
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
    """A pair of published numbers that a recipe has, and at which level of what a study varies."""

    recipe: str
    factors: Mapping[str, str]
    settings: str  # how the published run differs from the recipe; empty: not
    scratch: PublishedCell | None
    spt: PublishedCell | None

    @property
    def metric(self) -> str:
        return next(cell.metric for cell in (self.scratch, self.spt) if cell)


class PublishedNumbers(_Part):
    measures: dict[str, Measure]
    papers: dict[str, Paper]

    @model_validator(mode="after")
    def _measures_are_known(self) -> "PublishedNumbers":
        tables = [table for paper in self.papers.values() for table in paper.tables.values()]
        if unknown := {one for table in tables for one in (table.measure, *table.measures.values())} - set(
            self.measures
        ):
            raise ValueError(f"unknown measures: {sorted(unknown)}")
        return self

    def cells(self) -> Iterator[PublishedCell]:
        """Every cell of every table."""
        for key, paper in self.papers.items():
            for name, table in paper.tables.items():
                for row, column in table.cells:
                    yield self._cell(key, name, row, column)

    def told(self) -> Iterator[PublishedPair]:
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
        notes = [one for one in table.notes if row in one.rows and column in (one.columns or table.columns)]
        value = number(printed)
        return PublishedCell(
            paper=paper,
            table=name,
            page=table.page,
            row=row,
            column=column,
            arm="spt" if "spt" in trained else "scratch",
            objective=next((one for one in get_args(Objective) if one in trained), None),
            printed=printed,
            unit=measure.unit,
            metric=measure.metric,
            higher_is_better=measure.higher_is_better,
            # Rounded, so that 75.04 % is 0.7504 and not the number next to it.
            value=None if value is None else float(f"{value * measure.factor:.12g}"),
            missing=printed if value is None else None,
            quoted=("quoted" in trained or any(one.quoted for one in notes)) and not any(one.own for one in notes),
            note="; ".join(filter(None, (*(one.text for one in notes), self.papers[paper].remark))),
            doubt="; ".join(one.text for one in table.doubts if (one.row, one.column) == (row, column)),
        )


def _places(pair: Pair) -> Iterator[tuple[str, str, ArmName]]:
    """(row, column, arm) of every cell that a pair names."""
    for place in pair.recipes:
        if pair.column:
            yield place, pair.column, "scratch"
        if pair.scratch:
            yield pair.scratch, place, "scratch"
        if pair.spt:
            yield pair.spt, place, "spt"


def number(printed: str) -> float | None:
    """A cell's number; None where it says why there is none. Raises ValueError for anything else."""
    return None if printed in get_args(Missing) else float(printed)


@cache
def load_published() -> PublishedNumbers:
    """The packaged file."""
    text = files("spt.report").joinpath("published.yaml").read_text(encoding="utf-8")
    # BaseLoader makes nothing but text, lists and mappings: 88.00 stays as printed.
    return PublishedNumbers.model_validate(yaml.load(text, yaml.BaseLoader))


def cells(recipe: str) -> list[PublishedPair]:
    """Everything published that belongs to a recipe: its own numbers, then levels of studies, then other settings."""
    return list(_by_recipe().get(recipe, ()))


@cache
def _by_recipe() -> dict[str, list[PublishedPair]]:
    found: dict[str, list[PublishedPair]] = {}
    for told in sorted(load_published().told(), key=lambda told: (bool(told.settings), bool(told.factors))):
        found.setdefault(told.recipe, []).append(told)
    return found


def published_arms(recipe: str, factors: Mapping[str, Factor], metric: str) -> PublishedArms | None:
    """The published numbers of a row of a report, in the same metric; None where there are none."""
    level = {name: value for name, value in factors.items() if (name, value) != ("fraction", 1)}  # 1: the recipe itself
    for told in cells(recipe):
        if not told.settings and told.metric == metric and _same(told.factors, level):
            return PublishedArms(told.scratch, told.spt)
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

    Both are completed by this version, so that defaults written by another one do not count; nor do places of files.
    What cannot be compared is one sentence that says so.
    """
    if recipe not in packaged():
        return [f"{recipe} is no packaged recipe, so its settings were not compared"]
    file = run / "recipe.yaml"
    try:
        return list(_apart(file.read_text(encoding="utf-8"), recipe))
    except FileNotFoundError:
        why = "of some runs there is no recipe.yaml"
    except OSError as error:
        why = f"{file} cannot be read ({error.strerror})"
    except (SptError, UnicodeDecodeError) as error:
        why = " ".join(str(error).split())
    return [f"settings were not compared with those of {recipe}: {why}"]


@lru_cache(maxsize=256)  # the runs of an arm have the same text
def _apart(text: str, recipe: str) -> tuple[str, ...]:
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
    """Dotted key -> value of a whole recipe, the baseline's training written out, without places of files."""
    raw = parse_yaml(text, source)
    if not isinstance(raw, dict) or not all(isinstance(key, str) for key in raw):
        raise UsageError(f"{source} is not a recipe")
    found: Recipe = resolve(raw, source)[0]
    tree = found.model_dump(mode="json")
    tree["scratch"] = {"train": found.train("scratch").model_dump(mode="json")}
    for part, kind in (("task", "tasks"), ("model", "models")):
        for key in path_options(kind, tree[part]):  # type: ignore[arg-type]
            del tree[part][key]
    return flatten(tree)


def _shown(settings: Mapping[str, Any], key: str) -> str:
    return json.dumps(settings[key], ensure_ascii=False).strip('"') if key in settings else "no such option"
