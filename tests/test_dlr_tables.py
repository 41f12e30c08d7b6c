"""The tables of the DLR paper as packaged studies: every row is a recipe that builds, as large as the paper prints."""

import pytest
import torch
from test_published import TABLES
from test_reference import ROWS, asked

from spt.config.load import resolve
from spt.config.overrides import apply_overrides
from spt.config.yaml import parse_yaml
from spt.studies.schema import read
from spt.training.build import build_backbone, model_width
from spt.training.network import Encoder, Head, SequenceModel

STUDIES = {name: read(f"dlr-table-{name}").study for name in "12346"}
LEVELS = [
    (table, recipe, level) for table, study in STUDIES.items() for recipe in study.recipes for level in study.levels(recipe)
]


def row(table, name, level):
    """The recipe of a row of a study, checked and complete; of no data."""
    raw = parse_yaml(ROWS[name], name)
    for changes in STUDIES[table].changes_of(name, level):
        apply_overrides(raw, dict(changes))
    return resolve(raw, name)[0]


def network(recipe):
    """On the meta device."""
    input, output, length = asked(recipe)
    width = model_width(recipe.model)
    with torch.device("meta"):
        encoder, backbone = Encoder(input, width, recipe.encoder), build_backbone(recipe.model, length)
        return SequenceModel(encoder, backbone, Head(width, output, recipe.finetune.head)), length


@pytest.mark.parametrize(("table", "name", "level"), LEVELS)
def test_a_row_is_a_recipe_that_builds(table, name, level):
    recipe = row(table, name, level)
    model, length = network(recipe)
    assert model.flops(length).total > 0
    assert recipe.train("pretrain").learning_rate == recipe.train("scratch").learning_rate
