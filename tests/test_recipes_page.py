"""docs/recipes.md: every cell of every table has a command or a reason, and costs are those of the recipes."""

import json
import re
from pathlib import Path

import pytest
import yaml
from costs import (
    FILE,
    PAPERS,
    PublishedSizes,
    all_operations,
    departures,
    files,
    network,
    operations,
    recipe_operations,
    study_operations,
    to_text,
)
from recipes_page import (
    CPU,
    GPU,
    Run,
    coverage,
    duration,
    ours,
    printed,
    recipes_page,
    row_operations,
    seconds,
)
from test_reference import resolved

from spt.config.load import packaged
from spt.report.published_numbers import all_pairs, load_published, table_cells
from spt.report.published_settings import PublishedSettings
from spt.report.results import read_results
from spt.studies import schema
from spt.studies.costs import CostModel

ROOT = Path(__file__).resolve().parent.parent
TABLES = [(key, name) for key, paper in load_published()["papers"].items() for name in paper["tables"]]
SAMPLE = ("lra/listops-transformer", "lra/retrieval-transformer", "skills/reverse-dlr", "images/scifar-s5", "books/dlr")


# ------------------------------------------------------------------------------------------------------------ the page


def test_the_page_of_recipes_is_the_one_that_is_made():
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert page == recipes_page(), "run make docs"


def test_what_is_stored_stands_beside_its_cell(monkeypatch):
    (stored,) = (result for result in read_results() if (result.paper, result.row) == ("dlr", "DLR-R"))
    cell, run = stored.published_cell, Run("skills/shift-long-dlr", "DLR-R 2^8", "dlr-table-2")
    assert ours(cell, run) == "0.1311" and ours(cell, run._replace(recipe="another")) == ""
    monkeypatch.setattr("recipes_page.results_of", lambda _: [stored.model_copy(update={"planned": 5})])
    assert ours(cell, run) == "0.1311 (1 of 5 runs)"


def test_the_page_has_every_recipe_and_every_footnote():
    page = recipes_page()
    runs = set(re.findall(r"`(?:spt compare )?([a-z]+/[\w-]+)`", page))
    assert {pair.recipe for pair in all_pairs() if not pair.settings} <= runs
    assert set(re.findall(r"\[\^(\d+)\](?!:)", page)) == set(re.findall(r"^\[\^(\d+)\]:", page, re.M))
    assert re.search(r"\| Pathfinder \| 76\.64 \|  \| 94\.16 \|  \| `[\w ]*lra/pathfinder-transformer`", page)


@pytest.mark.parametrize(("paper", "name"), TABLES)
def test_every_printed_cell_has_a_command_or_a_reason(paper, name):
    """One of them, never both."""
    table = coverage(paper, name)
    commands = {(cell.row, cell.column) for line in table.lines for cell in line.cells}
    commands |= {(cell.row, cell.column) for _, cells in table.others for cell in cells}
    averages = {(cell.row, cell.column) for cell, _ in table.averages}
    reasons = {(one.cell.row, one.cell.column) for one in table.without}
    cells = {place for place, cell in table_cells(paper, name).items() if printed(cell)}
    assert cells <= commands | averages | reasons
    assert not commands & averages and not commands & reasons and not averages & reasons
    assert all(one.why for one in table.without)
    assert table.covered + len(reasons) + sum(not whole for _, whole in table.averages) == table.printed


def test_what_is_said_to_be_without_a_command_has_none():
    """A reason in the file that a recipe has made untrue."""
    for paper, name in TABLES:
        given = load_published()["papers"][paper]["tables"][name].get("without", ())
        said = {(row, entry["why"]) for entry in given for row in entry["rows"]}
        assert said <= {(one.cell.row, one.why) for one in coverage(paper, name).without}, (paper, name)


def test_a_tables_cells_are_counted():
    table = coverage("spt", "3")
    assert (table.printed, table.covered, table.without) == (24, 24, [])
    assert (
        "| SPT, Table 3 | Speech Commands (35 words), sequential CIFAR-10, BIDMC | 24 | 24 | 0 |  |" in recipes_page()
    )
    quoting = coverage("s5", "1")
    assert quoting.printed == 28 and quoting.covered < 28
    assert "no recipe here; the paper quotes it from elsewhere" in {one.why for one in quoting.without}


def test_a_level_of_a_study_is_run_by_the_study():
    runs = {line.run for line in coverage("spt", "9").lines}
    assert Run("lra/image-transformer", "size 10M", "spt-table-9") in runs
    assert all(run.command == "spt study run spt-table-9" for run in runs)


def test_a_cell_that_a_paper_prints_twice_has_one_run():
    """DLR's Table 6 repeats columns of Table 1."""
    first = {(cell.row, cell.column, line.run) for line in coverage("dlr", "1").lines for cell in line.cells}
    places = {place[:2] for place in first}
    again = {(cell.row, cell.column, line.run) for line in coverage("dlr", "6").lines for cell in line.cells}
    both = {place for place in again if place[:2] in places}
    assert any(place[:2] == ("REVERSE", "DLR 6 layers 2^9") for place in both) and both <= first


def test_cells_of_one_run_share_a_line_in_the_order_of_their_columns():
    (line,) = [line for line in recipes_page().splitlines() if line.startswith("| DLR | 256 F1, 256 accuracy |")]
    assert line.split(" | ")[2] == "94.0, 96.3" and "segmentation-256-dlr" in line


def test_every_packaged_study_of_a_paper_is_named():
    assert all(f"{name}`" in recipes_page() for name in schema.packaged() if name.startswith(PAPERS))


def test_a_table_says_what_its_numbers_are():
    page = recipes_page()
    assert "### SPT, Table 2\n\nLong Range Arena, rotary" in page and "(p. 5, section 3.2); accuracy in %." in page
    assert "BIDMC HR, BIDMC RR, BIDMC SpO2: R²." in page


def test_what_commands_of_the_file_name_exists():
    """Of figures, and of cells that are not a run's score."""
    papers = load_published()["papers"].values()
    commands = [one for paper in papers for figure in paper.get("figures", {}).values() for one in figure["commands"]]
    commands += [
        one["run"] for paper in papers for table in paper["tables"].values() for one in table.get("commands", ())
    ]
    assert len(commands) > 10 and all(command.startswith("spt ") for command in commands)
    words = {word for command in commands for word in command.split()[2:]}
    assert {word for word in words if "/" in word} <= set(packaged())
    assert {word for word in words if re.search("-(table|figure)-", word)} <= set(schema.packaged())


# --------------------------------------------------------------------------------------------------------------- costs


def test_operations_are_those_of_the_recipes_and_studies_as_they_are():
    assert json.loads(FILE.read_text(encoding="utf-8"))["files"] == files(), "run make docs"


@pytest.mark.parametrize("name", SAMPLE)
def test_operations_of_a_recipe(name):
    assert row_operations(Run(name)) == recipe_operations(name), "run make docs"


def test_operations_of_a_study():
    found = json.loads(FILE.read_text(encoding="utf-8"))["studies"]["spt-table-8"]
    assert found == study_operations("spt-table-8"), "run make docs"
    row = next(row for row in found if row["level"] == "share 0.2")
    total = yaml.safe_load(schema.packaged()["spt-table-8"])["total"][row["recipe"]]
    assert row["scratch"][0] == pytest.approx(row["finetune"][0] / 0.8) and total == 150


@pytest.mark.slow
def test_all_operations():
    assert FILE.read_text(encoding="utf-8") == to_text(all_operations()), "run make docs"


def test_departures_are_told_in_the_words_of_the_settings(monkeypatch):
    """Of a recipe: where it is not as published, and no place that is. Of a study's row: its own source first."""
    name, recipe = "lra/image-dlr", resolved("lra/image-dlr")
    rate, size = recipe.finetune.train.learning_rate, recipe.finetune.train.batch_size
    values = {"finetune.train.learning_rate": rate, "finetune.train.batch_size": size + 1, "model.dropout": 0.9}
    entry = {
        "published": [{"source": "DLR, Table 1", "values": values}],
        "departs": {"finetune.train.learning_rate": "rate", "*.batch_size": "batches", "model.dropout": "dropout"},
        "further": ["selection"],
    }
    row = {
        "recipes": [name], "levels": ["random"], "source": "SPT, Table 5", "values": {"model.dropout": 0.8},
        "departs": {"model.dropout": "dropout of its own"},
    }  # fmt: skip
    whole = {"conventions": {}, "recipes": {name: entry}, "studies": {"spt-table-7": [row]}}
    settings = PublishedSettings.model_validate(whole)
    for module in ("costs", "spt.report.published_settings"):
        monkeypatch.setattr(f"{module}.load_published_settings", lambda: settings)
    assert departures(name, recipe) == ["batches", "dropout", "selection"]
    assert departures(name, recipe, "spt-table-7", ["structured"]) == ["batches", "dropout", "selection"]
    random = departures(name, recipe, "spt-table-7", ["random"])
    assert random == ["dropout of its own", "batches", "selection"]
    train = recipe.finetune.train.model_copy(update={"batch_size": size + 1})
    changed = recipe.model_copy(update={"finetune": recipe.finetune.model_copy(update={"train": train})})
    assert departures(name, changed, "spt-table-7", ["random"]) == ["dropout of its own", "selection"]
    assert departures("quickstart", recipe) == []


def test_what_a_study_asks_of_data_is_known_without_them():
    sizes = PublishedSizes()
    assert isinstance(sizes, CostModel)


def test_steps_and_operations_of_a_stage_follow_from_the_budget():
    """ListOps: 96,000 rows. Retrieval: 147,086 pairs, in both stages."""
    recipe = resolved("lra/listops-transformer")
    found = operations(recipe)
    batch, epochs = recipe.finetune.train.batch_size, recipe.finetune.train.epochs
    assert found["finetune"][0] == -(-96_000 // batch) * epochs and found["scratch"][1] > 0
    steps, flops = found["finetune"]
    per_parameter = flops / (steps * batch * 2048 * found["parameters"])
    pairs = resolved("lra/retrieval-transformer")
    epoch = -(-147_086 // pairs.pretrain.train.batch_size)
    assert operations(pairs)["pretrain"][0] == epoch * pairs.pretrain.train.epochs
    steps, flops = operations(pairs)["pretrain"]
    texts = 2 * pairs.pretrain.train.batch_size
    assert flops / steps == pytest.approx(texts * network(pairs)[0].flops(4000).total, rel=1e-3)
    assert 6 < per_parameter < 20  # a pass of each weight forward, two backward, and attention


def test_seconds_are_operations_by_a_rate_but_no_layer_is_free():
    row = {"model": "transformer", "layers": 4, "scratch": [1000, 1000 * 3e12], "pretrain": [1000, 1000 * 3e9]}
    assert seconds(GPU, row, "scratch") == pytest.approx(1000 * 3e12 / GPU.attention)
    assert seconds(GPU, row, "pretrain") == pytest.approx(1000 * 4 * GPU.layer)
    assert seconds(CPU, row | {"model": "s4"}, "scratch") == pytest.approx(1000 * 3e12 / CPU.other)


@pytest.mark.parametrize(
    ("amount", "text"),
    [(1, "1 min"), (3540, "59 min"), (3600, "1.0 h"), (36_000, "10 h"), (86_400 * 2.5, "2.5 d"), (3.2e9, "101 y")],
)
def test_durations(amount, text):
    assert duration(amount) == text
