"""The settings of the published runs (`published_settings.yaml`), and where a recipe departs from them.

Needs no torch: whoever compares brings the resolved recipe. The tests hold the file against the recipes.
"""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from spt.config.overrides import flatten
from spt.config.recipe import Recipe
from spt.config.yaml import parse_yaml

PADDED = ("listops", "retrieval", "text")  # tasks whose rows differ in length
PARAMETERS = "parameters"  # under departs: a number of parameters that is not the published one


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Source(_Part):
    source: str = Field(min_length=3)  # with table and page, or the file of a repository
    values: dict[str, Any]  # place, which may be a pattern -> value


class Convention(Source):
    """What a code base does everywhere."""

    departs: dict[str, str] = {}  # place -> words of the headers of recipes that do otherwise


class RecipeSettings(_Part):
    conventions: tuple[str, ...] = ()
    parameters: str | None = Field(None, pattern=r"^[\d.]+ [MK]$")  # digits as printed
    published: tuple[Source, ...] = ()
    unpublished: tuple[str, ...] = ()  # places, or patterns
    departs: dict[str, str] = {}  # place, or a pattern -> words of the header
    further: tuple[str, ...] = ()  # words of the header for a departure that is no option


class StudyRow(_Part):
    """Published settings of some rows of a packaged study."""

    recipes: tuple[str, ...] = Field(min_length=1)
    levels: tuple[str, ...] = ()  # names of variants, sizes or initialisations; none: all of them
    source: str = Field(min_length=3)
    values: dict[str, Any]
    departs: dict[str, str] = {}  # place -> words of the study file's comment
    further: tuple[str, ...] = ()


class PublishedSettings(_Part):
    """What `published_settings.yaml` may hold."""

    conventions: dict[str, Convention]
    recipes: dict[str, RecipeSettings]
    studies: dict[str, tuple[StudyRow, ...]]


class PublishedValue(NamedTuple):
    """A published value of a recipe beside the recipe's own."""

    place: str
    published: Any
    ours: Any
    source: str
    words: str | None  # that tell of a departure; None where none is admitted

    @property
    def departs(self) -> bool:
        return not _same(self.published, self.ours)


@cache
def load_published_settings() -> PublishedSettings:
    text = files("spt.report").joinpath("published_settings.yaml").read_text(encoding="utf-8")
    return PublishedSettings.model_validate(parse_yaml(text, "published_settings.yaml"))


def published_settings(recipe: str) -> RecipeSettings | None:
    """The entry of a packaged recipe."""
    return load_published_settings().recipes.get(recipe)


def settings_tree(recipe: Recipe) -> dict[str, Any]:
    """Dotted place -> value of a whole recipe, the baseline's training written out."""
    tree = recipe.model_dump(mode="json")
    tree["scratch"] = {"train": recipe.train("scratch").model_dump(mode="json")}
    return flatten(tree)


def matching(pattern: str, places: Mapping[str, Any]) -> list[str]:
    """The places that a place or pattern stands for; its leading "*." is every section that has them."""
    return [place for place in places if fnmatchcase(place, pattern)]


def published_values(entry: RecipeSettings, tree: Mapping[str, Any]) -> list[PublishedValue]:
    """Every published value of a recipe, beside its own; first what its code base does everywhere."""
    conventions = [load_published_settings().conventions[name] for name in entry.conventions]
    values = {
        place: PublishedValue(place, value, tree[place], each.source, _words(place, entry.departs, each.departs))
        for each in conventions
        for place, value in _places(each.values, tree)
        if _matters(place, tree)
    }
    for source in entry.published:
        for place, value in _places(source.values, tree):
            words = _words(place, entry.departs)
            values[place] = PublishedValue(place, value, tree[place], source.source, words)
    return list(values.values())


def published_row_values(row: StudyRow, tree: Mapping[str, Any]) -> list[PublishedValue]:
    """The same of one row of a study, whose resolved recipe is given."""
    places = _places(row.values, tree)
    return [PublishedValue(place, v, tree[place], row.source, _words(place, row.departs)) for place, v in places]


def _places(values: Mapping[str, Any], tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for pattern, value in values.items():
        for place in matching(pattern, tree):
            yield place, value


def _matters(place: str, tree: Mapping[str, Any]) -> bool:
    """Has a convention any effect in this recipe?"""
    section, _, last = place.rpartition(".")
    if last == "weight_decay_on":
        return bool(tree[f"{section}.weight_decay"])
    if last == "validation_masks":
        return place.startswith("pretrain.") and tree["pretrain.objective.name"] != "next"
    if last == "mask_padding":
        return tree["task.name"] in PADDED
    return True


def _words(place: str, *departs: Mapping[str, str]) -> str | None:
    """The words for a place: those of its own name before those of a pattern."""
    for each in departs:
        if place in each:
            return each[place]
        for pattern, words in each.items():
            if fnmatchcase(place, pattern):
                return words
    return None


def _same(published: Any, ours: Any) -> bool:
    numbers = (int, float)
    if isinstance(published, numbers) and isinstance(ours, numbers):
        return isinstance(published, bool) == isinstance(ours, bool) and float(published) == float(ours)
    if isinstance(published, str) and isinstance(ours, list):
        return [published] == ours  # positions: rotary
    return bool(published == ours)
