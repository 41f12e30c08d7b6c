"""What the papers print: the file is true to itself, to the recipes and to their headers."""

import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Literal

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator
from test_reference import ROWS, asked, header, resolved
from tiny import changed as altered

from spt.config.load import load as load_recipe
from spt.config.load import packaged
from spt.config.recipe import LOWER_IS_BETTER
from spt.config.yaml import parse_yaml
from spt.report import published_numbers
from spt.report.published_numbers import (
    PublishedPair,
    all_cells,
    all_pairs,
    load_published,
    published_average,
    published_pair,
    published_pairs,
)
from spt.studies.schema import read as read_study
from spt.training.metrics import default_metric

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "spt" / "report" / "published.yaml"
OF_NETWORKS = {"parameters": True, "relative_time": True, "relative_throughput": False}  # lower is better
NUMBER = re.compile(r"(?<![\w.,/])(?:\d+\.\d+|\.\d+|\d+)(?:e-\d+)?(?!\w|[.,]\d)")


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Measure(Part):
    """A published unit, and which of our metrics it corresponds to."""

    unit: str
    metric: str
    factor: float = Field(gt=0)  # published * factor is in the metric's own units
    higher_is_better: bool


class Average(Part):
    """A column that is the mean of others. Chance, of two classes, counts as 50."""

    column: str
    of: tuple[str, ...]
    chance: float = 50


class Pair(Part):
    """Rows that are the two arms of recipes, by column; or one column, trained from scratch, with recipes by row."""

    scratch: str | None = None
    spt: str | None = None
    column: str | None = None
    columns: tuple[str, ...] = ()
    recipes: dict[str, str]
    factors: dict[str, str] = {}  # what a study varies, at this level
    by: str | None = None  # the factor whose level is the column
    settings: str = ""  # how the published run differs from the recipe; empty: it is the recipe's own
    study: str = ""  # the packaged study whose row it is


class Note(Part):
    rows: tuple[str, ...]
    columns: tuple[str, ...] = ()  # empty: all
    text: str
    own: Literal["true"] | None = None  # not quoted, unlike the rest of the row
    quoted: Literal["true"] | None = None  # quoted, unlike the rest of the row


class Doubt(Part):
    """A cell that may be misprinted, or that does not follow from the others."""

    row: str
    column: str
    printed: str
    recomputed: str | None = None  # of an average
    text: str


class Selection(Part):
    """Cells of some rows, in all columns or in some."""

    rows: tuple[str, ...]
    columns: tuple[str, ...] | None = None


class Command(Selection):
    run: str


class Without(Selection):
    why: str


class Figure(Part):
    """A figure with results, and the commands that draw it or the reason why none does."""

    page: int | None = None
    section: str
    shows: str
    commands: tuple[str, ...] = ()
    drawn: str = ""
    why: str = ""

    @model_validator(mode="after")
    def _commands_or_reason(self):
        if bool(self.commands) == bool(self.why):
            raise ValueError(f"{self.shows}: commands or why not")
        return self


class Table(Part):
    """A table as it is printed, and which recipes its cells belong to."""

    page: int | None = None  # None where the text has no pages
    section: str
    shows: str
    measure: str
    measures: dict[str, str] = {}  # of columns with a different measure
    seeds: int = Field(1, ge=1)  # runs that each number is the mean of
    columns: tuple[str, ...]
    average: Average | None = None
    rows: tuple[tuple[str, ...], ...]
    pairs: tuple[Pair, ...] = ()
    commands: tuple[Command, ...] = ()
    without: tuple[Without, ...] = ()
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


class Paper(Part):
    name: str
    authors: str
    title: str
    venue: str | None = None
    arxiv: str
    version: str | None = None  # of arXiv; None where the text read has none
    read: str  # the form in which it was read
    remark: str = ""  # on each of its numbers
    tables: dict[str, Table]
    figures: dict[str, Figure] = {}


class PublishedFile(Part):
    """What `published.yaml` may hold."""

    measures: dict[str, Measure]
    papers: dict[str, Paper]


PUBLISHED = PublishedFile.model_validate(load_published())
TABLES = {(key, name): table for key, paper in PUBLISHED.papers.items() for name, table in paper.tables.items()}
PAIRS = list(all_pairs())


def raw():
    return yaml.load(FILE.read_text(encoding="utf-8"), yaml.BaseLoader)


def check(published):
    """Raise ValueError where the file contradicts itself or our metrics."""
    for measure in published.measures.values():
        if (LOWER_IS_BETTER | OF_NETWORKS)[measure.metric] == measure.higher_is_better:
            raise ValueError(f"{measure.metric}: higher_is_better is not ours")
    tables = [table for paper in published.papers.values() for table in paper.tables.values()]
    named = {name for table in tables for name in (table.measure, *table.measures.values())}
    if unknown := named - set(published.measures):
        raise ValueError(f"unknown measures: {sorted(unknown)}")
    for table in tables:
        check_table(table)


def check_table(table):
    if wrong := [row[0] for row in table.rows if len(row) != 2 + len(table.columns)]:
        raise ValueError(f"rows with too few or too many cells: {wrong}")
    names = [row[0] for row in table.rows]
    if len(set(names)) < len(names) or len(set(table.columns)) < len(table.columns):
        raise ValueError("a row or a column is listed twice")
    for name, trained, *values in table.rows:
        words = set(trained.split())
        if words - {"scratch", "spt", "masked", "causal", "quoted"} or len(words & {"scratch", "spt"}) != 1:
            raise ValueError(f"{name}: trained {trained!r}")
        for value in values:
            published_numbers.number(value)
    selections = (*table.commands, *table.without)
    columns = set(table.measures).union(*(note.columns for note in table.notes))
    columns |= {column for each in selections for column in each.columns or ()}
    if table.average:
        columns |= {table.average.column, *table.average.of}
    if unknown := columns - set(table.columns):
        raise ValueError(f"no columns of this table: {sorted(unknown)}")
    if unknown := {row for each in (*table.notes, *selections) for row in each.rows} - set(names):
        raise ValueError(f"no rows of this table: {sorted(unknown)}")
    for doubt in table.doubts:
        if table.cells.get((doubt.row, doubt.column)) != doubt.printed:
            raise ValueError(f"doubt of {doubt.row}, {doubt.column}: {doubt.printed} is not printed there")
    for pair in table.pairs:
        columns = pair.columns or (pair.column,) * (pair.column is not None)
        if bool(columns) == (pair.scratch is not None):
            raise ValueError(f"pair {pair}: a row from scratch or a column")
        for place in pair.recipes:
            cells = [(place, column, "scratch") for column in columns] or [(pair.scratch, place, "scratch")]
            cells += [(pair.spt, place, "spt")] if pair.spt else []
            for row, column, arm in cells:
                if (row, column) not in table.cells:
                    raise ValueError(f"pair {pair}: no cell {row}, {column}")
                if arm not in table.trained(row):
                    raise ValueError(f"pair {pair}: {row} was not trained as {arm}")


# ------------------------------------------------------------------------------------------------------------ the file


def test_no_key_is_repeated():
    whole = parse_yaml(FILE.read_text(encoding="utf-8"), "published.yaml")
    assert whole["papers"].keys() == PUBLISHED.papers.keys()


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("pairs__0__scratch", "Transformr", "no cell"),
        ("pairs__0__spt", "Performer", "was not trained as spt"),
        ("columns", ["ListOps", "Text"], "too few or too many cells"),
        ("measure", "speed", "unknown measures"),
        ("rows__0__2", "36,37", "could not convert"),
        ("rows__0__1", "quickly", "trained 'quickly'"),
        ("rows__1__0", "Transformer", "listed twice"),
        ("doubts__0__printed", "53.60", "is not printed there"),
        ("average__column", "Mean", "no columns of this table"),
        ("pages", "4", "Extra inputs"),
    ],
)
def test_mistakes_in_the_file_are_refused(place, value, words):
    whole = raw()
    *path, last = place.split("__")
    node = whole["papers"]["spt"]["tables"]["1"]
    for step in path:
        node = node[int(step)] if isinstance(node, list) else node[step]
    node[int(last) if isinstance(node, list) else last] = value
    with pytest.raises(ValueError, match=words):
        check(PublishedFile.model_validate(whole))


def test_a_measure_points_the_way_of_its_metric():
    with pytest.raises(ValueError, match="higher_is_better"):
        check(PublishedFile.model_validate(altered(raw(), measures__accuracy__higher_is_better="false")))


def test_the_file_is_consistent():
    check(PUBLISHED)


def averages():
    for (paper, name), table in TABLES.items():
        for row, *_ in table.rows if table.average else ():
            yield pytest.param(paper, name, row, id=f"{paper}-{name}-{row}")


@pytest.mark.parametrize(("paper", "name", "row"), averages())
def test_an_average_recomputes_or_is_doubted(paper, name, row):
    table = TABLES[paper, name]
    average, chance = table.average, Decimal(str(table.average.chance))
    values = [table.cells[row, column] for column in average.of]
    mean = sum(chance if published_numbers.number(value) is None else Decimal(value) for value in values) / len(values)
    printed = Decimal(table.cells[row, average.column])
    doubts = [one for one in table.doubts if (one.row, one.column) == (row, average.column)]
    if abs(mean - printed) > Decimal("0.005"):
        assert doubts, f"{printed} is printed, the mean is {mean}"
    assert all(abs(Decimal(one.recomputed) - mean) <= Decimal("0.005") for one in doubts)


def test_these_averages_do_not_recompute():
    wrong = {(name, one.row) for (paper, name), table in TABLES.items() for one in table.doubts if one.recomputed
             and one.recomputed != one.printed and paper == "spt"}  # fmt: skip
    assert wrong == {
        ("1", "BigBird"), ("2", "S4 + Masked SPT"), ("2", "Pythia 70M (Rand Init)"), ("7", "S4 + Rand Init + SPT"),
        ("7", "DLR + Rand Init + SPT"), ("7", "DLR + SPT"),
    }  # fmt: skip


def test_numbers_that_stand_in_two_tables_are_equal():
    at = {(cell.paper, cell.table, cell.row, cell.column): cell.printed for cell in all_cells()}
    for column in ("ListOps", "Text", "Image", "PathX"):
        assert at["spt", "2", "S4", column] == at["spt", "7", "S4", column]
        assert at["spt", "2", "S4 + Masked SPT", column] == at["spt", "7", "S4 + SPT", column]
    for (paper, table, row, column), printed in at.items():
        if (paper, table) == ("dlr", "6") and (same := at.get(("dlr", "1", row, column))):
            assert printed == same, (row, column)
    assert {at["spt", "9", "Transformer+Rotary", size] for size in ("100K", "300K")} == {"68.51"}


# ---------------------------------------------------------------------------------------------------------- the recipes


UNPUBLISHED = {"lra/image-s4-repository", "lra/text-s4-repository"}  # networks of which no paper has a number


def test_every_recipe_of_a_paper_has_numbers_and_no_other():
    assert {told.recipe for told in PAIRS} == set(ROWS)
    assert {told.recipe for told in PAIRS if not told.settings and not told.factors} == set(ROWS) - UNPUBLISHED


def test_no_level_of_a_recipe_has_two_answers():
    levels = [(one.recipe, tuple(one.factors.items()), one.metric) for one in PAIRS if not one.settings]
    assert len(set(levels)) == len(levels)


@pytest.mark.parametrize("name", [name for name in ROWS if "pythia" not in name])  # those read their weights
def test_the_metric_is_one_that_the_task_gives(name):
    recipe = resolved(name)
    _, output, _ = asked(recipe)
    chosen = recipe.finetune.objective.options["metric"]
    compared = default_metric(output) if chosen == "auto" else chosen
    found = {told.metric for told in published_pairs(name)} - set(OF_NETWORKS)
    if recipe.task.name == "books":
        assert found == {"loss"}  # of T5's tokens: no bits per byte follow from it
    else:
        assert compared in found and found <= {compared, "accuracy_macro"}


def source(name):
    """What a header says of its numbers: not of its commands, settings, sections and sizes."""
    told = re.sub(r".*?\bSource\b", "", header(name), count=1)
    told = re.split(r"\bOurs\b|\bConventions of\b", told)[0]
    told = re.sub(r"(?:section|appendix) [\w.]+|Tables? [\d, and]+|[\d.]+ [MK] parameters|\b20\d\d\b", "", told)
    return re.sub(r"(?<=\d),(?=\d{3})", "", told)  # 4,096


@pytest.mark.parametrize("name", ROWS)
def test_a_header_has_the_numbers_of_the_file_and_no_other(name):
    found = NUMBER.findall(source(name))
    told = {float(number) for number in found}
    tables = {(cell.paper, cell.table) for one in published_pairs(name) for cell in one.cells}
    known = {float(cell.printed) for cell in all_cells() if (cell.paper, cell.table) in tables and not cell.missing}
    assert {float(number) for number in found if "." in number} <= known
    own = [cell for one in published_pairs(name) if not one.settings and not one.factors for cell in one.cells]
    for cell in own:
        assert cell.missing or published_numbers.number(cell.printed) in told, f"{cell.printed} is not in the header"
    assert [cell for cell in own if not cell.missing] or "infeasible" in source(name) or name in UNPUBLISHED


def test_a_header_says_which_number_is_whose():
    """Where it names SPT and scratch in the same words."""
    checked = 0
    for name in sorted(set(ROWS) - UNPUBLISHED):
        found = re.search(r"Published (?:accuracy|R²): SPT ([\d.]+\d)[,;] from scratch ([\d.]+\d)", header(name))
        own = next(told for told in published_pairs(name) if not told.settings and not told.factors)
        if found:
            assert (own.spt.printed, own.scratch.printed) == (found[1], found[2]), name
            checked += 1
        elif "pretrained" in header(name) or "SPT none" in header(name):
            assert own.spt is None or own.spt.missing, name
    assert checked >= 30


@pytest.mark.parametrize("name", ["spt-table-7", "spt-table-8", "spt-table-9"])
def test_every_level_of_a_packaged_study_has_its_published_pair(name):
    """By the study's own names for what it varies."""
    study = yaml.safe_load((ROOT / "recipes" / "studies" / f"{name}.yaml").read_text(encoding="utf-8"))
    for recipe in study["recipes"]:
        levels = (
            [{"initialisation": level} for level in study.get("initialisations", [])]
            + [{"share": share} for share in study.get("shares", []) if share]
            + [{"size": size} for size in study.get("sizes", {}).get(recipe, {})]
        )
        assert levels
        for level in levels:
            found = published_pair(recipe, level, "accuracy")
            assert found and found.scratch and found.spt and found.spt.table == name[-1], (recipe, level)


@pytest.mark.parametrize("name", ["spt-table-1", "spt-table-2", "spt-table-3"])
def test_every_variant_of_a_packaged_study_has_its_published_pair(name):
    study = read_study(name).study
    for recipe in study.recipes:
        for level in study.levels(recipe):
            metric = published_pairs(recipe)[0].metric
            found = published_pair(recipe, {"variant": level}, metric)
            assert found and found.scratch and found.study == name, (recipe, level)
            assert found.scratch.table == name[-1], (recipe, level)


# ---------------------------------------------------------------------------------------------------------- looking up


@pytest.mark.parametrize(
    ("recipe", "factors", "metric", "scratch", "spt", "table", "page"),
    [
        ("lra/image-transformer", {}, "accuracy", 0.7504, 0.8604, "2", 5),
        ("lra/image-transformer", {"fraction": 1.0}, "accuracy", 0.7504, 0.8604, "2", 5),
        ("lra/image-transformer", {"share": 0.2}, "accuracy", 0.7504, 0.8445, "8", 18),
        ("lra/text-s4", {"share": 0.6}, "accuracy", 0.8751, 0.8887, "8", 18),
        ("lra/image-s4", {"size": "1M"}, "accuracy", 0.8481, 0.8867, "9", 19),
        ("lra/image-dlr", {"initialisation": "random"}, "accuracy", 0.5670, 0.8183, "7", 17),
        ("lra/image-dlr", {"initialisation": "structured"}, "accuracy", 0.7983, 0.8712, "7", 17),
        ("reference/text-transformer-causal", {}, "accuracy", 0.6427, 0.8881, "1", 4),
        ("bidmc/rr-transformer", {}, "r2", 0.981, 0.956, "3", 9),
        ("speech/sc35-s4-causal", {}, "accuracy", 0.9360, 0.9509, "3", 9),
        ("skills/reverse-attention", {}, "r2", 0.28, None, "1", None),
        ("skills/segmentation-256-dlr", {}, "f1_macro", 0.94, None, "3", None),
        ("skills/segmentation-256-dlr", {}, "accuracy_macro", 0.963, None, "3", None),
        ("books/dlr", {}, "loss", 2.86, None, "5", None),
        ("lra/pathx-s5", {}, "accuracy", 0.9858, None, "1", None),
        ("pendulum/s5", {}, "mse", 0.00341, None, "3", None),
    ],
)
def test_what_stands_beside_a_row(recipe, factors, metric, scratch, spt, table, page):
    found = published_pair(recipe, factors, metric)
    assert found.scratch.value == scratch and (found.spt.value if found.spt else None) == spt
    where = f"Table {table}" + (f", p. {page}" if page else "")
    assert found.scratch.source.partition(", ")[2] == where and found.scratch.arm == "scratch"
    assert found.spt is None or found.spt.arm == "spt"


@pytest.mark.parametrize(
    ("recipe", "factors", "metric"),
    [
        ("quickstart", {}, "accuracy"),
        ("my/own", {}, "accuracy"),
        ("lra/image-transformer", {}, "mse"),
        ("lra/image-transformer", {"share": 0.3}, "accuracy"),
        ("lra/image-transformer", {"share": "0.2x"}, "accuracy"),
        ("lra/image-transformer", {"size": 1}, "accuracy"),
        ("lra/image-transformer", {"size": "2M"}, "accuracy"),
        ("lra/image-transformer", {"fraction": 0.1}, "accuracy"),
        ("lra/image-transformer", {"share": 0.2, "size": "1M"}, "accuracy"),
        ("books/dlr", {}, "bits_per_byte"),
    ],
)
def test_nothing_is_published_for_another_recipe_level_or_metric(recipe, factors, metric):
    assert published_pair(recipe, factors, metric) is None


def test_a_cell_says_where_it_is_from_and_what_is_doubtful():
    pair = published_pair("lra/image-s4", {}, "accuracy")
    assert pair.scratch.quoted and not pair.spt.quoted
    assert pair.spt.source == "SPT, Table 2, p. 5" and pair.spt.printed == "89.36"
    retrained = published_pair("lra/image-s4", {"share": 0.4}, "accuracy").scratch
    assert not retrained.quoted and "88.65" in retrained.doubt
    assert published_pair("lra/image-transformer", {"size": "300K"}, "accuracy").scratch.doubt
    assert published_pair("lra/pathx256-s4", {}, "accuracy").scratch.quoted is False
    assert published_pair("bidmc/hr-s4", {}, "r2").scratch.quoted is False
    nothing = published_pair("lra/pathx256-transformer", {}, "accuracy").scratch
    assert nothing.value is None and nothing.missing == "infeasible"
    assert published_pair("lra/text-s5", {}, "accuracy").scratch.note == "as others quote it"
    assert published_pair("lra/text-s5", {}, "accuracy").scratch.printed == "89.31"


def test_a_recipes_own_numbers_come_first_and_other_settings_last():
    for name in ROWS:
        kinds = [2 if one.settings else 1 if one.factors else 0 for one in published_pairs(name)]
        assert kinds == sorted(kinds) and (kinds[0] == 0 or name.endswith("-repository")), name
    found = published_pairs("lra/listops-dlr")
    assert found[0].factors == {} and found[-1].factors == {"variant": "DLR"}
    assert found[-1].scratch.printed == "60.5" and found[-1].study == "dlr-table-4"


def test_a_published_average_is_of_its_own_tasks_one_row_each():
    rows = [
        (f"lra/{task}-s4", {}) for task in ("listops", "text", "retrieval", "image", "pathfinder", "pathx256", "pathx")
    ]
    found, chosen = published_average(rows, "accuracy")
    assert (found.scratch.printed, found.spt.printed, chosen) == ("86.09", "86.75", [0, 1, 2, 3, 4, 6])
    assert published_average(rows[:6], "accuracy") is None and published_average(rows, "loss") is None
    assert published_average([*rows, ("lra/image-s4", {})], "accuracy") is None  # which of the two is not known
    assert published_average([*rows[:6], ("lra/pathx-s4", {"share": 0.2})], "accuracy") is None
    four = [(f"lra/{task}-dlr", {"initialisation": "random"}) for task in ("listops", "text", "image", "pathx")]
    assert published_average(four, "accuracy")[0].spt.printed == "80.47"


# ------------------------------------------------------------------------------------------------------ what was run


def own(recipe):
    """As if a paper had printed a number for this recipe, as it stands."""
    return PublishedPair(recipe, {}, "", "", None, None)


def run_with(tmp_path, text):
    (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
    return published_numbers.changed(tmp_path, own("quickstart"))


def test_an_unchanged_run_has_no_changed_settings(tmp_path):
    assert run_with(tmp_path, load_recipe("quickstart").to_yaml()) == []
    assert run_with(tmp_path, packaged()["quickstart"]) == []  # as an older version may have left out defaults


def test_changed_settings_are_listed_in_order_with_both_values(tmp_path):
    overrides = ["pretrain.train.learning_rate=0.5", "model.d_model=64", "model.causal=true", "task.max_rows=50"]
    found = run_with(tmp_path, load_recipe("quickstart", overrides).to_yaml())
    assert [line.partition(" ")[0] for line in found] == [
        "model.causal", "model.d_model", "pretrain.train.learning_rate", "task.max_rows",
    ]  # fmt: skip
    assert found[0] == "model.causal (true, recipe false)" and found[3] == "task.max_rows (50, recipe null)"
    assert found[1].startswith("model.d_model (64, recipe ")


def test_a_row_of_a_packaged_study_is_held_against_that_row(tmp_path):
    pair = PublishedPair("lra/image-transformer", {"size": "100K"}, "", "spt-table-9", None, None)
    changes = pair.changes[-1]
    assert changes["model.d_model"] == 64
    overrides = [f"{place}={json.dumps(value)}" for place, value in changes.items()]
    (tmp_path / "recipe.yaml").write_text(load_recipe(pair.recipe, overrides).to_yaml(), encoding="utf-8")
    assert published_numbers.changed(tmp_path, pair) == []
    found = published_numbers.changed(tmp_path, own(pair.recipe))
    assert "model.d_model (64, recipe 256)" in found
    (tmp_path / "recipe.yaml").write_text(load_recipe(pair.recipe).to_yaml(), encoding="utf-8")
    assert "model.d_model (256, study 64)" in published_numbers.changed(tmp_path, pair)


def test_what_a_level_governs_itself_is_no_difference(tmp_path):
    changed_budget = ["pretrain.train.epochs=30", "finetune.train.learning_rate=0.5"]
    (tmp_path / "recipe.yaml").write_text(load_recipe("quickstart", changed_budget).to_yaml(), encoding="utf-8")
    pair = PublishedPair("quickstart", {"share": "0.2"}, "", "", None, None)
    found = [line.partition(" ")[0] for line in published_numbers.changed(tmp_path, pair)]
    assert "finetune.train.learning_rate" in found and not any("epochs" in line for line in found)


def test_the_baselines_own_settings_count_once_they_differ(tmp_path):
    one = yaml.safe_load(load_recipe("quickstart").to_yaml())
    one["scratch"] = None if one["scratch"] else {"train": one["finetune"]["train"]}
    found = run_with(tmp_path, yaml.safe_dump(one, sort_keys=False))
    assert all(line.startswith("scratch.train.") for line in found)
    same = load_recipe("quickstart").recipe
    assert bool(found) == (same.train("scratch") != same.train("finetune"))


def test_another_model_differs_in_its_options_too(tmp_path):
    found = run_with(tmp_path, load_recipe("quickstart-dlr").to_yaml())
    assert any(line.startswith("model.name (dlr, recipe transformer") for line in found)
    assert any("no such option" in line for line in found)


@pytest.mark.parametrize("text", [None, "", "a: [1", "- a\n", "modle: {name: x}\n", "1: 2\n"])
def test_what_cannot_be_compared_is_said_in_a_sentence(tmp_path, text):
    found = [published_numbers.changed(tmp_path, own("quickstart"))] if text is None else [run_with(tmp_path, text)]
    assert len(found[0]) == 1 and found[0][0].startswith("settings were not compared with those of quickstart: ")
    assert "\n" not in found[0][0] and "Errno" not in found[0][0]
    assert published_numbers.changed(tmp_path / "another", own("quickstart")) == [
        "settings were not compared with those of quickstart: some runs have no recipe.yaml"
    ]


def test_a_recipe_is_resolved_once_for_all_runs_that_have_its_text(tmp_path, monkeypatch):
    text = load_recipe("quickstart", ["model.d_model=48"]).to_yaml()
    found = run_with(tmp_path, text)
    monkeypatch.setattr(published_numbers, "resolve", None)
    assert run_with(tmp_path, text) == found


def test_bytes_and_unknown_recipes_are_said_in_a_sentence(tmp_path):
    (tmp_path / "recipe.yaml").write_bytes(b"\xff\xfe")
    assert published_numbers.changed(tmp_path, own("quickstart"))[0].startswith("settings were not compared")
    assert published_numbers.changed(tmp_path, own("mine")) == [
        "mine is not a packaged recipe, so its settings were not compared"
    ]
