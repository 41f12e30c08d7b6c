"""The tables of the DLR paper as packaged studies: every printed number has its row, every row its number and size."""

from functools import cache

import pytest
from test_published import PUBLISHED, TABLES
from test_reference import whole_network

from spt.config.load import load
from spt.report.published_numbers import all_cells, all_pairs, published_pair
from spt.report.published_settings import load_published_settings
from spt.studies.schema import read

STUDIES = {name: read(f"dlr-table-{name}").study for name in "123456"}
SILENCED = "SGCONV 2^14, alpha 1e-5"  # as the paper has it: in no table
ROWS_OF = {(table, recipe): study.levels(recipe) for table, study in STUDIES.items() for recipe in study.recipes}
LEVELS = [(table, recipe, level) for (table, recipe), levels in ROWS_OF.items() for level in levels]


@cache
def row(table, name, level):
    """The recipe of a row of a study; of no data."""
    return load(name, changes=STUDIES[table].changes_of(name, level)).recipe


def printed(table, row, column):
    """A published number of parameters, and what one more in its last digit is."""
    shown = TABLES["dlr", f"{table}, parameters"]
    text = shown.cells[row, column]
    measure = PUBLISHED.measures[shown.measures.get(column, shown.measure)]
    return float(text) * measure.factor, 10.0 ** -len(text.partition(".")[2]) * measure.factor


def parameters(recipe):
    """Without the hidden vector, in whose place the published code has nothing."""
    model = whole_network(recipe)
    return model.parameter_counts()["total"] - model.encoder.hidden.numel()


def is_printed(count, table, row, column):
    """Rounded, or cut off: the paper has 2.2M for 2.27 million."""
    number, unit = printed(table, row, column)
    return -unit / 2 <= count - number < unit


@pytest.mark.parametrize("table", ["1", "6"])
@pytest.mark.parametrize("name", ["skills/cumsum-dlr", "skills/reverse-dlr"])
def test_networks_of_atomic_tasks_are_as_large_as_printed(table, name):
    """Of tasks with one output; eight of Shift and 32 of MIPS are a few more."""
    for level in TABLES["dlr", f"{table}, parameters"].columns:
        if name in STUDIES[table].recipes:
            assert is_printed(parameters(row(table, name, level)), table, "parameters", level), level


@pytest.mark.parametrize("level", STUDIES["2"].levels("skills/shift-long-dlr"))
def test_networks_of_long_shifts_are_as_large_as_printed(level):
    kind, _, length = level.rpartition(" ")
    if kind.startswith("SGCONV"):
        if length != "2^18":  # of other lengths it has other sizes
            return
        assert parameters(row("2", "skills/shift-long-dlr", level)) == pytest.approx(920e3, rel=2e-3)
    else:
        assert is_printed(parameters(row("2", "skills/shift-long-dlr", level)), "2", kind, "parameters")


@pytest.mark.parametrize("level", STUDIES["5"].levels("books/dlr"))
def test_language_models_are_as_large_as_printed_but_for_embeddings_and_biases(level):
    model = whole_network(row("5", "books/dlr", level))
    embeddings = 32_100 * 128 + 2 * 128 * 384  # tied, and the maps from and to the width of the blocks
    number, _ = printed("5", level.rpartition(", ")[0], "parameters")
    assert model.parameter_counts()["backbone"] + embeddings == pytest.approx(number, rel=7e-3)


@pytest.mark.parametrize(("table", "name", "level"), LEVELS)
def test_both_arms_of_a_row_train_alike(table, name, level):
    recipe = row(table, name, level)
    arms = [recipe.train(section).model_dump(exclude={"validation_masks"}) for section in ("pretrain", "scratch")]
    assert arms[0] == arms[1]


def test_lengths_and_batches_of_mips_are_those_of_its_own():
    for level in STUDIES["1"].levels("skills/mips-dlr"):
        train = row("1", "skills/mips-dlr", level).train("finetune")
        assert (train.steps, train.batch_size) == (172_800, 4), level
    attention = (
        row("1", "skills/mips-dlr", "ATTENTION 1 layer 2^12"),
        row("1", "skills/sort-dlr", "ATTENTION 1 layer 2^12"),
    )
    assert [one.train("scratch").learning_rate for one in attention] == [1e-4, 1e-3]


def test_every_row_with_settings_of_its_own_is_held_against_published_ones():
    published = load_published_settings().studies.items()
    held = {
        (study[-1], name, level)
        for study, rows in published
        for each in rows
        for name in each.recipes
        for level in each.levels
    }
    own = {(table, name, level) for table, name, level in LEVELS if ROWS_OF[table, name][level]}
    assert {row for row in own - held if "mips" not in row[1]} == {("2", "skills/shift-long-dlr", SILENCED)}


LINKED = [told for told in all_pairs() if told.cells[0].paper == "dlr"]


@pytest.mark.parametrize(("table", "name", "level"), LEVELS)
def test_a_row_has_its_published_number(table, name, level):
    metric = row(table, name, level).finetune.objective.options["metric"]
    metric = {"auto": "loss" if name == "books/dlr" else "accuracy"}.get(metric, metric)
    found = published_pair(name, {"variant": level}, metric)
    assert (found is None) == (level == SILENCED)
    same = table == "6" and "FF" not in level  # columns that table 1 has too
    assert found is None or found.study == f"dlr-table-{'1' if same else table}"


def test_every_number_of_the_tables_belongs_to_a_row():
    """But those that the paper quotes, and losses on the training split."""
    linked = {(cell.table, cell.row, cell.column) for told in LINKED if told.study for cell in told.cells}
    linked |= {("6" + table[1:], task, column) for table, task, column in linked if table in ("1", "1, time")}
    linked |= {("6, time", "SHIFT", column) for table, _, column in linked if table == "1, time"}
    cells = [cell for cell in all_cells() if cell.paper == "dlr" and cell.metric != "parameters" and not cell.quoted]
    missing = {(cell.table, cell.row, cell.column) for cell in cells if cell.value is not None} - linked
    assert {column for _, _, column in missing} == {"post-norm train", "pre-norm train"}


def test_what_is_linked_is_a_level_of_the_study():
    for told in LINKED:
        if told.study:
            assert told.factors["variant"] in STUDIES[told.study[-1]].levels(told.recipe), told
