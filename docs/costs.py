"""What the packaged recipes and studies cost at full size, found without their data: docs/measurements/operations.json.

A recipe says how its data are made or which published data set they are, so the number of training rows and the length
of a sequence are known; networks are built on torch's meta device, which computes nothing. `make docs` renews the file,
and the page of recipes turns its operations into hours.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from spt.analysis.full_size import FullTask, full_network, full_task
from spt.config.budget import total_steps
from spt.config.load import complete_part, load, packaged
from spt.config.recipe import EncoderConfig, HeadConfig, Part, Recipe, ResolvedRecipe, Section
from spt.report.published_numbers import all_pairs
from spt.report.published_settings import (
    PARAMETERS,
    StudyRow,
    load_published_settings,
    published_row_values,
    published_settings,
    published_values,
    settings_tree,
)
from spt.runs.plan import Factor, factors_text
from spt.studies import schema
from spt.studies.costs import Estimate
from spt.studies.grid import GridRow, expand
from spt.training.network import SequenceModel

FILE = Path(__file__).resolve().parent / "measurements" / "operations.json"
SECTIONS: tuple[Section, ...] = ("scratch", "pretrain", "finetune")
SETTINGS = "published_settings.yaml"
PAPERS = ("spt-", "dlr-", "s5-")  # studies named after a table or figure


class PublishedSizes:
    """A `CostModel` that opens no data: what a study needs to know of them to name its rows."""

    def identify_data(self, recipe: ResolvedRecipe) -> ResolvedRecipe:
        return replace(recipe, data="not read")

    def open_task(self, recipe: ResolvedRecipe) -> Any:
        full = full_task(recipe.recipe.task)
        train = _Rows(full.rows, full.output.sequences)
        data = SimpleNamespace(train=train, length=full.length, resample=None)
        data.labelled = lambda: data  # every row of a benchmark has a target
        return data

    def estimate(self, job: Any) -> Estimate:
        raise NotImplementedError("a study of a paper is matched on epochs, examples or nothing")

    def seconds_per_step(self, job: Any) -> float:
        raise NotImplementedError("a study of a paper is not matched on time")


class _Rows(NamedTuple):
    n: int
    sequences: int

    def __len__(self) -> int:
        return self.n


@cache
def _network(recipe: str) -> tuple[SequenceModel, FullTask]:
    """The network that is trained on a task, without numbers; given the parts of a recipe that say which."""
    parts = json.loads(recipe)
    task, model = Part.model_validate(parts["task"]), Part.model_validate(parts["model"])
    full = full_task(task)
    head, encoder = HeadConfig.model_validate(parts["head"]), EncoderConfig.model_validate(parts["encoder"])
    return full_network(full, _stand_in(model) if model.name == "hf" else model, encoder, head), full


def _stand_in(model: Part) -> Part:
    """For a Hugging Face model, which may need files or numbers to be built: a Transformer of its width and depth."""
    options = {name: model.options[name] for name in ("d_model", "n_layers", "causal")}
    sizes = model.options.get("options") or {}
    options |= {"n_heads": sizes.get("num_attention_heads", 8)}
    options |= {"d_ff": sizes.get("intermediate_size", 4 * options["d_model"])}
    return complete_part("models", "a stand-in", {"name": "transformer", **options})


def network(recipe: Recipe) -> tuple[SequenceModel, FullTask]:
    parts = {name: getattr(recipe, name).model_dump(mode="json") for name in ("task", "model", "encoder")}
    return _network(json.dumps(parts | {"head": recipe.finetune.head.model_dump(mode="json")}))


def stage_operations(recipe: Recipe, section: Section) -> tuple[int, float]:
    """Optimiser steps of a training, and all its operations, forward and backward.

    Pretraining counts with the head of the task: its own has as many operations as the encoder, or fewer.
    """
    model, full = network(recipe)
    train = recipe.train(section)
    batch = model.batch_flops(train.batch_size * full.output.sequences, full.length).total
    steps = total_steps(train, full.rows, batch / train.batch_size)
    return steps, steps * batch


def operations(recipe: Recipe, pretraining: Recipe | None = None) -> dict[str, Any]:
    """Of a row: what its two arms compute."""
    model, _ = network(recipe)
    found: dict[str, Any] = {"model": recipe.model.name, "layers": recipe.model.options["n_layers"]}
    found["parameters"] = model.parameter_counts()["total"]
    for section in SECTIONS:
        steps, flops = stage_operations(pretraining or recipe if section == "pretrain" else recipe, section)
        found[section] = [steps, float(f"{flops:.4g}")]
    return found


def departures(recipe: str, resolved: Recipe, study: str = "", level: Collection[Factor] = ()) -> list[str]:
    """The words for the settings in which a recipe, or a row of a study, is not the published run, each once.

    In a row, what its own source says stands above what is published for the recipe; and where the study changes a
    setting, it is not the recipe's.
    """
    entry, tree = published_settings(recipe), settings_tree(resolved)
    rows = [row for row in load_published_settings().studies.get(study, ()) if _speaks_of(row, recipe, level)]
    own = [value for row in rows for value in published_row_values(row, tree)]
    told = {value.place for value in own}
    words = [value.words for value in own if value.departs]
    words += [word for row in rows for word in row.further]
    if entry:
        before = settings_tree(load(recipe).recipe)
        same = {place for place, value in tree.items() if before.get(place) == value} - told
        values = published_values(entry, before)
        words += [value.words for value in values if value.departs and value.place in same]
        words += [*entry.further, *([entry.departs[PARAMETERS]] if PARAMETERS in entry.departs else [])]
    return list(dict.fromkeys(word for word in words if word))


def _speaks_of(row: StudyRow, recipe: str, level: Collection[Factor]) -> bool:
    return recipe in row.recipes and (not row.levels or any(str(one) in map(str, level) for one in row.levels))


def study_operations(name: str) -> list[dict[str, Any]]:
    """Of every row of a packaged study."""
    return [row_operations(name, row) for row in expand(schema.read(name).study, False, PublishedSizes()).rows]


def row_operations(study: str, row: GridRow) -> dict[str, Any]:
    recipe, pretraining = row.resolved, row.pretraining.recipe if row.pretraining else None
    level = {"recipe": recipe.name, "level": factors_text(row.factors)}
    departs = {"departs": departures(recipe.name, recipe.recipe, study, row.factors.values())}
    return level | operations(recipe.recipe, pretraining) | departs


def recipe_operations(name: str) -> dict[str, Any]:
    recipe = load(name).recipe
    return operations(recipe) | {"departs": departures(name, recipe)}


def text_hash(text: str) -> str:
    """Of a YAML file, whatever its lines of comment say."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def files() -> dict[str, str]:
    """The recipes and studies that papers publish numbers for, and the published settings: name -> hash of the text."""
    recipes, studies = packaged(), schema.packaged()
    named = {pair.recipe for pair in all_pairs()}
    hashes = {name: text_hash(text) for name, text in recipes.items() if name in named}
    hashes |= {f"studies/{name}": text_hash(text) for name, text in studies.items() if name.startswith(PAPERS)}
    hashes[SETTINGS] = text_hash(resources.files("spt.report").joinpath(SETTINGS).read_text(encoding="utf-8"))
    return hashes


def all_operations() -> dict[str, Any]:
    """What the file holds."""
    found: dict[str, Any] = {"files": files(), "recipes": {}, "studies": {}}
    for name in found["files"]:
        if name.startswith("studies/"):
            study = name.removeprefix("studies/")
            found["studies"][study] = study_operations(study)
        elif name != SETTINGS:
            found["recipes"][name] = recipe_operations(name)
    return found


def to_text(found: Mapping[str, Any]) -> str:
    """JSON with a line for each recipe and each row, so that a change is seen."""

    def lines(rows: Mapping[str, Any], indent: str) -> str:
        return ",\n".join(f"{indent}{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())

    studies = ",\n".join(
        f"  {json.dumps(name)}: [\n" + ",\n".join(f"   {json.dumps(row)}" for row in rows) + "\n  ]"
        for name, rows in found["studies"].items()
    )
    parts = {"files": lines(found["files"], "  "), "recipes": lines(found["recipes"], "  "), "studies": studies}
    return "{\n" + ",\n".join(f' "{name}": {{\n{text}\n }}' for name, text in parts.items()) + "\n}\n"
