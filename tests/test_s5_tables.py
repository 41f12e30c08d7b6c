"""The study files of the S5 paper's tables: sizes, and what rows differ in; tests/test_reference.py builds them all."""

from functools import cache

import pytest

from spt.config.load import load
from spt.config.yaml import parse_yaml
from spt.report.published_numbers import published_pair, published_pairs
from spt.studies.schema import packaged, validate

STUDIES = {name: validate(parse_yaml(text, name), name) for name, text in packaged().items() if name.startswith("s5-")}


@cache
def row(name, recipe, level):
    """The recipe of a row."""
    return load(recipe, changes=STUDIES[name].changes_of(recipe, level)).recipe


def sizes(name, recipe, level):
    model = row(name, recipe, level).model
    return tuple(model.options[key] for key in ("d_model", "n_layers", "d_state"))


S4 = {
    "lra/listops-s5": (128, 8), "lra/text-s5": (256, 6), "lra/retrieval-s5": (256, 6),
    "lra/image-s5": (512, 6), "lra/pathfinder-s5": (256, 6), "lra/pathx-s5": (256, 6),
}  # fmt: skip


@pytest.mark.parametrize("recipe", S4)
def test_constrained_networks_have_the_sizes_of_s4(recipe):
    width, layers = S4[recipe]
    for level in ("S4", "S4D", "S5 P = N"):
        assert sizes("s5-table-4", recipe, level) == (width, layers, 64)
    assert sizes("s5-table-4", recipe, "S5 P = H") == (width, layers, width)
    for level in ("P = N, one time scale", "P = N"):
        assert sizes("s5-table-5", recipe, level) == (width, layers, 64)
    own = [
        sizes("s5-table-4", recipe, "S5"),
        *(sizes("s5-table-5", recipe, each) for each in ("own P", "own P, one block")),
    ]
    own += [sizes("s5-table-7", recipe, level) for level in STUDIES["s5-table-7"].levels(recipe)]
    options = load(recipe).recipe.model.options
    assert set(own) == {(options["d_model"], options["n_layers"], options["d_state"])}


def test_rows_differ_in_what_their_tables_are_about():
    def options(name, level, recipe="lra/text-s5"):
        return row(name, recipe, level).model.options

    assert [options("s5-table-5", each)["shared_dt"] for each in ("P = N, one time scale", "P = N")] == [True, False]
    assert options("s5-table-5", "own P, one block")["blocks"] == 1 < options("s5-table-5", "own P")["blocks"]
    found = {
        (options("s5-table-6", level)["parameterisation"], options("s5-table-6", level)["state_matrix"])
        for level in STUDIES["s5-table-6"].levels("lra/text-s5")
    }
    assert len(found) == 6 and ("discrete", "hippo_n") in found
    times = {level: row("s5-table-3", "pendulum/s5", level) for level in ("S5", "S5-drop", "S5-append")}
    assert [one.task.options["times"] for one in times.values()] == ["steps", "drop", "steps"]
    assert [one.encoder.step_times for one in times.values()] == ["model", "model", "append"]
    assert len(STUDIES["s5-table-3"].seed_list) == 20


def test_every_row_of_a_table_has_its_published_pair():
    """By the study's own names; the numbers that the text says are those of table 1 are."""
    metrics = {"s5-table-3": "mse", "s5-table-4": "relative_throughput"}
    for name in ("s5-table-3", "s5-table-4", "s5-table-5", "s5-table-6", "s5-table-7"):
        for recipe in STUDIES[name].recipes:
            metric = metrics.get(name, "accuracy")
            own, *_ = published_pairs(recipe)
            for level in STUDIES[name].levels(recipe):
                if level == "own P, one block":  # in no table
                    continue
                found = published_pair(recipe, {"variant": level}, metric)
                assert found and found.study == name and found.scratch.table == name[-1], (recipe, level)
                same = name != "s5-table-4" and level in ("S5", "own P", "continuous, HiPPO-N", "HiPPO-N")
                assert found.scratch.printed == (own.scratch.printed if same else "not known")
