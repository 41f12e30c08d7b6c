"""The settings that papers and code print: every recipe has them, or its header tells where it departs."""

import re
from fnmatch import fnmatchcase
from functools import cache

import pytest
from pydantic import ValidationError
from test_reference import ROWS, header, resolved

from spt.config.load import load
from spt.config.recipe import BUDGETS
from spt.report.published_settings import (
    PARAMETERS,
    PublishedSettings,
    RecipeSettings,
    load_published_settings,
    matching,
    published_row_values,
    published_values,
    settings_tree,
)
from spt.studies import schema as studies

FILE = load_published_settings()
SIZES = ("d_model", "n_layers", "d_state", "n_heads", "d_ff")
OF_TRAINING = ("batch_size", "learning_rate", "weight_decay", "schedule")


def tree(name):
    return settings_tree(resolved(name))


def required(values):
    """The places that a recipe has to account for."""
    yield from (f"model.{size}" for size in SIZES if values.get(f"model.{size}") is not None)
    yield from (place for place in ("finetune.head.pool", "pretrain.objective.ratio") if place in values)
    for section in ("pretrain", "finetune", "scratch"):
        train = f"{section}.train"
        yield from (f"{train}.{name}" for name in OF_TRAINING)
        yield next(f"{train}.{name}" for name in BUDGETS if values[f"{train}.{name}"] is not None)
        fraction = values[f"{train}.warmup_fraction"] is not None
        yield f"{train}.{'warmup_fraction' if fraction else 'warmup_steps'}"


def problems(entry, values, told):
    """What is wrong with a recipe's entry, given the resolved recipe and its header."""
    compared = published_values(entry, values)
    for source in entry.published:
        yield from (f"{place} is no place of the recipe" for place in source.values if not matching(place, values))
    given = [place for source in entry.published for pattern in source.values for place in matching(pattern, values)]
    yield from (f"{place} is given twice" for place in sorted({place for place in given if given.count(place) > 1}))
    for each in compared:
        if each.departs and each.words is None:
            yield f"{each.place} is {each.ours}, published {each.published} ({each.source})"
        if each.departs and each.words and not stands(each.words, told):
            yield f"{each.place} departs, but the header lacks the words {each.words!r}"
    for place in entry.departs:
        if place != PARAMETERS and not any(each.departs for each in compared if fnmatchcase(each.place, place)):
            yield f"{place} stands under departs, but no published value of it differs"
    if PARAMETERS in entry.departs and not (entry.parameters and stands(entry.departs[PARAMETERS], told)):
        yield f"parameters: none are given, or the header lacks the words {entry.departs[PARAMETERS]!r}"
    yield from (f"the header lacks the words {words!r}" for words in entry.further if not stands(words, told))
    known = {each.place for each in compared}
    for place in required(values):
        if place not in known and not any(fnmatchcase(place, pattern) for pattern in entry.unpublished):
            yield f"{place} is neither published nor unpublished"
    for pattern in entry.unpublished:
        if not set(matching(pattern, values)) - known:
            yield f"{pattern} is unpublished, but is published, or is no place of the recipe"


def stands(words, told):
    return re.sub(r"\s+", " ", words).lower() in re.sub(r"\s+", " ", told).lower()


# ---------------------------------------------------------------------------------------------------------- the file


@pytest.mark.parametrize(
    "entry",
    [{"conventons": []}, {"parameters": 3.57e6}, {"parameters": "3.57"}, {"published": [{"values": {}}]}],
)
def test_mistakes_in_the_file_are_refused(entry):
    with pytest.raises(ValidationError):
        PublishedSettings.model_validate({"conventions": {}, "recipes": {"lra/image-s4": entry}, "studies": {}})


def test_every_convention_is_known_and_says_where_recipes_depart():
    used = {name for entry in FILE.recipes.values() for name in entry.conventions}
    assert used <= set(FILE.conventions)
    for name, convention in FILE.conventions.items():
        assert set(convention.departs) <= set(convention.values), name


def test_every_recipe_of_a_paper_has_its_settings():
    assert set(FILE.recipes) == set(ROWS)


# ------------------------------------------------------------------------------------------------------- the recipes


@pytest.mark.parametrize("name", FILE.recipes)
def test_a_recipe_has_the_published_settings_or_tells_where_it_departs(name):
    assert list(problems(FILE.recipes[name], tree(name), header(name))) == []


EXAMPLE = "reference/image-transformer-masked"


def altered(**update):
    entry = FILE.recipes[EXAMPLE].model_dump()
    return RecipeSettings.model_validate({**entry, **update})


def one(place, value):
    return (*FILE.recipes[EXAMPLE].model_dump()["published"], {"source": "a paper", "values": {place: value}})


@pytest.mark.parametrize(
    ("update", "told"),
    [
        ({"published": one("model.dropout", 0.1)}, "model.dropout is 0.0, published 0.1"),
        ({"published": one("model.n_ssm", 2)}, "model.n_ssm is no place"),
        ({"published": one("model.d_model", 64)}, "model.d_model is given twice"),
        ({"published": one("model.dropout", 0.1), "departs": {"model.dropout": "dropped"}}, "lacks the words"),
        ({"departs": {"model.d_model": "size"}}, "no published value of it differs"),
        ({"unpublished": ()}, "scratch.train.learning_rate is neither"),
        ({"unpublished": ("scratch.train.*", "model.d_model")}, "model.d_model is unpublished, but"),
        ({"unpublished": ("scratch.train.*", "model.n_ssm")}, "or is no place"),
        ({"further": ("another dice",)}, "lacks the words 'another dice'"),
        ({"departs": {"parameters": "fewer"}}, "parameters"),
    ],
)
def test_a_wrong_entry_is_told(update, told):
    found = list(problems(altered(**update), tree(EXAMPLE), header(EXAMPLE)))
    assert any(told in each for each in found), found


def test_a_convention_counts_where_it_has_an_effect():
    masked, nexts = (
        {each.place for each in published_values(FILE.recipes[EXAMPLE], tree(f"reference/image-transformer-{kind}"))}
        for kind in ("masked", "causal")
    )
    assert masked - nexts == {"pretrain.train.validation_masks", "pretrain.objective.ratio"}
    assert "model.tied_projections" in nexts and "model.mask_padding" not in nexts  # no row of Image is padded
    assert "finetune.train.weight_decay_on" not in nexts  # nothing decays


def test_a_departure_from_a_convention_has_its_words():
    entry = RecipeSettings(conventions=("spt-code",))
    found = {each.place: each for each in published_values(entry, tree("lra/text-transformer")) if each.departs}
    assert found["scratch.train.max_grad_norm"].words == "clipping"
    assert found["model.mask_padding"].published is False and found["model.mask_padding"].ours is True
    assert found.keys() >= {"model.tied_projections", "finetune.train.weight_decay_on"}
    assert "pretrain.train.betas" not in found


# ------------------------------------------------------------------------------------------------------- the studies

STUDY_ROWS = [(study, row) for study, rows in FILE.studies.items() for row in rows]


@cache
def packaged_study(name):
    return studies.read(name).study


@cache
def row_tree(study, recipe, level):
    changes = packaged_study(study).changes_of(recipe, level)
    return settings_tree(load(recipe, changes=changes).recipe)


def row_problems(study, row):
    """What is wrong with the settings of some rows of a study, by its file."""
    text = studies.packaged()[study]
    told = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    for words in (*row.departs.values(), *row.further):
        if not stands(words, told):
            yield f"the study's comment lacks the words {words!r}"
    known = packaged_study(study)
    for recipe in row.recipes:
        if recipe not in known.recipes:
            yield f"{recipe} is no recipe of the study"
            continue
        levels = row.levels or tuple(known.levels(recipe)) or (None,)
        if unknown := [level for level in levels if level is not None and level not in known.levels(recipe)]:
            yield f"{recipe} has no level {unknown[0]}"
            continue
        for level in levels:
            values = row_tree(study, recipe, level)
            compared = published_row_values(row, values)
            yield from (f"{place} is no place of {recipe}" for place in row.values if not matching(place, values))
            for each in compared:
                if each.departs and each.words is None:
                    yield f"{recipe}, {level}: {each.place} is {each.ours}, published {each.published}"
            for place in row.departs:
                if not any(each.departs for each in compared if fnmatchcase(each.place, place)):
                    yield f"{recipe}, {level}: {place} stands under departs, but no published value of it differs"


@pytest.mark.parametrize(("study", "row"), STUDY_ROWS, ids=lambda each: each if isinstance(each, str) else each.source)
def test_a_row_of_a_study_has_the_published_settings_or_tells_where_it_departs(study, row):
    assert list(row_problems(study, row)) == []


@pytest.mark.parametrize(
    ("update", "told"),
    [
        ({"values": {"model.initialisation": "structured"}}, "model.initialisation is random, published structured"),
        ({"values": {"model.colour": 1}}, "model.colour is no place"),
        ({"levels": ("randon",)}, "has no level randon"),
        ({"recipes": ("quickstart",)}, "quickstart is no recipe of the study"),
        ({"departs": {"model.initialisation": "five seeds"}}, "no published value of it differs"),
        ({"further": ("another dice",)}, "lacks the words 'another dice'"),
    ],
)
def test_a_wrong_row_is_told(update, told):
    row = FILE.studies["spt-table-7"][0].model_copy(update={"levels": ("random",), "values": {}, **update})
    found = list(row_problems("spt-table-7", row))
    assert any(told in each for each in found), found
