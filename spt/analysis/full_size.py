"""The papers' tasks and networks at full size, without data: how large the published data sets are is known.

Networks are built on torch's meta device, which computes nothing.
"""

import json
from typing import NamedTuple

import torch

from spt.config.budget import Duration, example_count, total_steps
from spt.config.plugins import find_plugin
from spt.config.recipe import EncoderConfig, HeadConfig, Part, Recipe, Section
from spt.data.dataset import units_of
from spt.errors import UsageError
from spt.tasks.base import Tokens, Values
from spt.training.build import build_backbone, model_width
from spt.training.network import Encoder, Head, SequenceModel
from spt.training.objectives import Output


class FullTask(NamedTuple):
    """A task at full size, without its data."""

    rows: int  # of the training split in use
    length: int  # of the longest sequence; batches are taken to be as long
    input: Tokens | Values
    output: Output


def full_task(task: Part) -> FullTask:
    """Of a task with the options of a paper's recipe."""
    options, one = task.options, Output("cross_entropy", False, 1)
    match task.name:
        case "images":
            mnist = options["dataset"] == "mnist"
            rows = 60_000 if mnist else 50_000
            found = FullTask(
                rows if options["validation"] == "test" else rows * 9 // 10,
                784 if mnist else 1024,
                Values(1 if options["grey"] else 3, levels=256),
                one._replace(classes=10),
            )
        case "text":
            rows = 25_000 if options["validation"] == "test" else 22_500
            found = FullTask(rows, options["max_length"], Tokens(135), one._replace(classes=2))
        case "listops":
            found = FullTask(options["train_size"], 2048, Tokens(18), one._replace(classes=10))
        case "retrieval":
            found = FullTask(147_086, options["max_length"], Tokens(98), one._replace(classes=2, sequences=2))
        case "pathfinder":
            steps = options["resolution"] ** 2
            found = FullTask(options["train_size"], steps, Values(1, levels=256), one._replace(classes=2))
        case "segmentation":
            rows = options["train_size"] or {"paper": 96_000, "code": 80_000}[options["sizes"]]
            output = one._replace(classes=3, per_step=True)
            found = FullTask(rows, options["resolution"] ** 2, Values(1, levels=256), output)
        case "subtrees":
            output = one._replace(classes=10, per_step=True)
            found = FullTask(options["train_size"], options["max_length"], Tokens(17), output)
        case "speech":
            ten = options["words"] == "ten"
            output = one._replace(classes=10 if ten else 35)
            found = FullTask(24_482 if ten else 84_843, 16_000, Values(1), output)
        case "bidmc":
            found = FullTask(5_564, 4000, Values(2), Output("l2", False, 1))
        case "books":  # budgets are steps, so rows do not count
            output = one._replace(classes=256, per_step=True)
            found = FullTask(100_000, options["chunk"], Tokens(256), output)
        case "pendulum":
            input, output = Values(576, frame=(24, 24)), Output("gaussian", True, 2)
            found = FullTask(options["train_size"], options["kept"], input, output)
        case "skills":
            shape = find_plugin("tasks", "skills").module.Config.model_validate_json(json.dumps(options)).shape
            output = Output("l2", True, shape.size)
            found = FullTask(options["train_size"], shape.steps, Values(shape.channels), output)
        case "mqar" | "induction_heads" | "selective_copying":
            output = one._replace(classes=options["vocab"], per_step=True)
            found = FullTask(options["train_size"], options["length"], Tokens(options["vocab"]), output)
        case "mad":
            mad = find_plugin("tasks", "mad").module.Config.model_validate_json(json.dumps(options))
            output = one._replace(classes=mad.sizes.vocab, per_step=True)
            found = FullTask(mad.sizes.train_size, mad.steps, Tokens(mad.sizes.vocab), output)
        case _:
            raise UsageError(f"how large the data of task {task.name} are is known from the data alone")
    return found._replace(rows=options["subset_rows"] or units_of(options["subset_fraction"], found.rows))


def full_network(full: FullTask, model: Part, encoder: EncoderConfig, head: HeadConfig) -> SequenceModel:
    """The network that is trained on a task, without numbers."""
    width = model_width(model)
    with torch.device("meta"):
        parts = Encoder(full.input, width, encoder), build_backbone(model, full.length), Head(width, full.output, head)
        return SequenceModel(*parts)


def full_budget(recipe: Recipe, section: Section, full: FullTask, model: SequenceModel) -> Duration:
    """How long a section of a recipe trains."""
    train = recipe.train(section)
    batch = model.batch_flops(train.batch_size * full.output.sequences, full.length).total
    steps = total_steps(train, full.rows, batch / train.batch_size)
    return Duration(steps, example_count(steps, full.rows, train.batch_size, train.drop_last) / full.rows)
