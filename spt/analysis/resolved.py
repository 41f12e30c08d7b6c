"""What a recipe would do, without doing it: values and their origins, parameters, steps, operations, memory."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._pytree import tree_map_only

from spt.analysis.full_size import full_budget, full_network, full_task
from spt.config.budget import Duration, compare_budgets, example_count
from spt.config.job import Job
from spt.config.overrides import flatten
from spt.config.recipe import ResolvedRecipe, Section
from spt.data.batching import collate
from spt.data.fingerprints import overlap
from spt.errors import UsageError, displayable, one_line
from spt.report.published_settings import published_settings
from spt.rng import Draw
from spt.training.budget import mean_flops, plan_steps
from spt.training.build import StageSetup, build_stage
from spt.training.evaluate import selection_metric
from spt.training.losses import weighted_sum
from spt.training.network import SequenceModel, published_count
from spt.training.optimizer import optimizer_groups, warmup_steps
from spt.training.step import MicroBatch
from spt.training.threads import thread_count

BRIEFLY = ("objective", "steps", "examples", "epochs", "training FLOPs", "parameters", "memory, estimated")  # lines
RUN_FLOPS = 2e10  # a forward pass of so many operations takes less time than importing what avoids it


def resolve_overview(resolved: ResolvedRecipe, micro_batch: int | None = None) -> dict[str, Any]:
    """Everything `spt show` shows, as plain data."""
    pretrain = Job(resolved, "pretrain", 0)
    jobs = {
        "pretrain": pretrain,
        "finetune": Job(resolved, "finetune", 0, pretrain),
        "scratch": Job(resolved, "finetune", 0),
    }
    setup = {name: build_stage(job) for name, job in jobs.items()}
    data = setup["finetune"].data
    stages = {name: _stage(name, setup[name], micro_batch) for name in jobs}
    budgets = (Duration(stages[name]["steps"], stages[name]["epochs"]) for name in SECTIONS)
    return {
        "recipe": resolved.name,
        "values": _values(resolved),
        "data": {
            "rows": {name: len(split) for name, split in data.splits.items()},
            "length": data.length,
            "examples": "pairs of sequences" if data.train.sequences == 2 else "sequences",
            "input": str(data.input),
            "target": str(data.target),
            "rows that also stand in train": overlap(data),
        },
        "parameters": setup["finetune"].model.parameter_counts(),
        "published parameters": _published_parameters(resolved, setup["finetune"].model),
        "stages": list(stages.values()),
        "budgets": compare_budgets(*budgets),
        "runs": {name: job.name for name, job in jobs.items()},
    }


def overview_without_data(resolved: ResolvedRecipe) -> dict[str, Any]:
    """What is known of a paper's recipe where its data are not prepared, in the same form; of its stages nothing."""
    recipe, changed = resolved.recipe, [key for key in _changed(resolved) if key.startswith("task.")]
    if published_settings(resolved.name) is None or changed:
        raise UsageError(
            f"{resolved.name}: --no-data is for the papers' recipes on their own tasks, whose sizes are known"
            + (f"; {changed[0]} is changed" if changed else "")
        )
    full = full_task(recipe.task)
    model = full_network(full, recipe.model, recipe.encoder, recipe.finetune.head)
    return {
        "recipe": resolved.name,
        "values": _values(resolved),
        "data": None,
        "parameters": model.parameter_counts(),
        "published parameters": _published_parameters(resolved, model),
        "stages": [],
        "budgets": compare_budgets(*(full_budget(recipe, name, full, model) for name in SECTIONS)),
        "runs": {},
    }


SECTIONS: tuple[Section, ...] = ("scratch", "pretrain", "finetune")


def _values(resolved: ResolvedRecipe) -> list[dict[str, Any]]:
    values = flatten(resolved.recipe.model_dump(mode="json"))
    return [{"key": k, "value": v, "origin": resolved.origins.get(k, "default")} for k, v in values.items()]


def _changed(resolved: ResolvedRecipe) -> list[str]:
    """What is not as in the recipe's file."""
    return [key for key, origin in resolved.origins.items() if origin not in ("recipe", "default")]


def _published_parameters(resolved: ResolvedRecipe, model: SequenceModel) -> dict[str, Any] | None:
    """Those of a packaged recipe's published network, and ours to hold against them: the published code has no vector
    of hidden steps. None where they are not known, or where the network is not the recipe's own."""
    published = published_settings(resolved.name)
    network = ("task.", "model.", "encoder.", "finetune.head.", "finetune.objective.")
    if published is None or published.parameters is None or any(key.startswith(network) for key in _changed(resolved)):
        return None
    return {"printed": published.parameters, "ours": published_count(model)}


def _stage(name: str, setup: StageSetup, micro_batch: int | None) -> dict[str, Any]:
    model, train, data = setup.model, setup.job.train, setup.data
    steps = plan_steps(setup)
    examples = example_count(steps, len(data.train), train.batch_size, train.drop_last)
    operations = mean_flops(setup)
    micro = min(micro_batch or train.batch_size, train.batch_size, len(data.train))
    model.hides_steps(setup.hides)
    weights = sum(p.numel() * (4 if p.requires_grad else 1) * 4 for p in model.parameters())  # AdamW has three more
    try:
        activations = _saved_bytes(setup, micro)
    except Exception as error:
        name = setup.job.resolved.recipe.model.name
        raise UsageError(
            f"model {name} fails on a batch: {one_line(error)}; spt check model {name} may say more"
        ) from error
    return {
        "stage": name,
        "objective": setup.output.loss + (" a step" if setup.output.per_step else " a sequence"),
        "selects by": selection_metric(train, setup.output),
        "steps": steps,
        "warm-up steps": warmup_steps(steps, train),
        "examples": examples,
        "epochs": round(examples / len(data.train), 2),
        "training FLOPs": operations.total * examples,
        "forward FLOPs an example": operations.forward,
        "backward FLOPs an example": operations.backward,
        "CPU threads": thread_count(setup),
        "FLOPs by kind": (operations * examples).by_pass(),
        "parameters": model.parameter_counts(),
        "groups": [
            {
                "parameters": group.size,
                "tensors": len(group.names),
                "learning rate": group.learning_rate,
                "weight decay": group.weight_decay,
                "of": _kinds(group.names),
            }
            for group in optimizer_groups(model, train)
        ],
        "memory estimate": {
            "weights, AdamW": weights,
            "activations": activations,
            "total": weights + activations,
            "sequences at once": micro,
        },
    }


def _saved_bytes(setup: StageSetup, size: int) -> int:
    """Bytes that one micro-batch saves for the backward pass. What grows with the number of sequences grows linearly,
    so that two and three of them tell; larger networks are counted on tensors that have shapes but no storage."""
    longest = np.argsort(-setup.data.train.extents, kind="stable")[:size]
    two, three = longest[[0, -1]], longest[[0, size // 2, -1]]  # as much padding as the whole
    if 5 * setup.model.flops(setup.data.length).forward > RUN_FLOPS:
        return max(_saved_by_fakes(setup, batch) for batch in _batches(setup, longest))
    if size <= 3:
        return max(_saved(setup, batch) for batch in _batches(setup, longest))
    pairs = zip(_batches(setup, two), _batches(setup, three), strict=True)
    both = [(_saved(setup, fewer), _saved(setup, more)) for fewer, more in pairs]
    return max(fewer + (more - fewer) * (size - 2) for fewer, more in both)


def _batches(setup: StageSetup, rows: NDArray[np.int64]) -> list[MicroBatch]:
    """What passes through the network one after the other; a joint loss has a pass of its own."""
    data, draw = setup.data, Draw(0, "show", 0)
    asked = [MicroBatch(*setup.make_inputs(collate(data.train, rows, data.input, data.target), draw))]
    if setup.joint is not None:
        asked.append(MicroBatch(*setup.joint.make_inputs(rows, draw), denoising=True))
    return asked


def _saved_by_fakes(setup: StageSetup, batch: MicroBatch) -> int:
    from torch._subclasses.fake_tensor import FakeTensorMode  # in the function: its first use takes two seconds

    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # the exception is reported instead
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        tensors = {**dict(setup.model.named_parameters()), **dict(setup.model.named_buffers())}
        fakes = {name: mode.from_tensor(tensor) for name, tensor in tensors.items()}
        return _saved(setup, tree_map_only(torch.Tensor, mode.from_tensor, batch), fakes)


def _saved(setup: StageSetup, batch: MicroBatch, fakes: Mapping[str, torch.Tensor] | None = None) -> int:
    """Bytes of storage that the loss of a batch keeps, without the weights, for which `fakes` may stand."""
    inputs, targets, denoising = batch
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage.nbytes()
        kept.append(tensor)  # freed, its place could be taken by another
        return tensor

    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16, enabled=setup.job.train.precision == "bf16"):
            logits = torch.func.functional_call(setup.model, dict(fakes or {}), (inputs, targets.scored, denoising))
        weighted_sum(setup.output_of(denoising), logits, targets)
    weights = fakes.values() if fakes else [*setup.model.parameters(), *setup.model.buffers()]
    known = {tensor.untyped_storage()._cdata for tensor in weights}
    return sum(size for key, size in saved.items() if key not in known)


def _kinds(names: Sequence[str]) -> list[str]:
    """Parameter names without block numbers: kernel.W stands for that of every mixer, norms.bias for all norms."""
    return list(dict.fromkeys(re.sub(r"^backbone\.(mixers\.\d+\.)?|\.\d+(?=\.)", "", name) for name in names))


def render(overview: dict[str, Any], everything: bool = False) -> Any:
    """The same for a terminal: one screen, without the values that are defaults, or all of it."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    def table(title: str, *columns: str) -> Table:
        empty = Table(
            title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim"
        )
        for column in columns:
            text = column in ("", "key", "value", "origin", "stage", "of")
            empty.add_column(column, justify="left" if text else "right")
        return empty

    if everything:
        values = table(f"recipe {overview['recipe']}", "key", "value", "origin")
        for row in overview["values"]:
            origin = Text(row["origin"], style="dim" if row["origin"] == "default" else "")
            values.add_row(row["key"], _value_text(row["value"]), origin)
    else:
        values = table(f"recipe {overview['recipe']}", "", "")
        values.show_header = False
        for section, texts in _given(overview["values"]).items():
            values.add_row(section, Text("  ".join(texts)))
    network = f"\nparameters  {overview['parameters']['total']:,} of the finetuned network"
    if published := overview["published parameters"]:
        network += f"; {published['ours']:,} without the vector of hidden steps, the published {published['printed']}"
    budgets = Text(f"{network}\nbudgets     {overview['budgets']}")
    data = overview["data"]
    rest = [] if everything else [Text(f"\n{_left_out(overview)} (--all)", style="dim")]
    if data is None:
        return Group(values, budgets, *rest)
    rows = ", ".join(f"{name} {count:,}" for name, count in data["rows"].items())
    of = f"{data['examples']} of up to {data['length']:,} steps"
    data_text = Text(f"\ndata  {rows} {of}; {data['input']} -> {data['target']}\n")
    repeated = {name: count for name, count in data["rows that also stand in train"].items() if count}
    if repeated:
        data_text.append(f"      rows that are also in train: {repeated}\n")

    stages = table("stages", "", *(stage["stage"] for stage in overview["stages"]))
    kinds = list(dict.fromkeys(kind for stage in overview["stages"] for kind in stage["FLOPs by kind"]))
    columns = [_stage_cells(stage, kinds) for stage in overview["stages"]]
    for name in max(columns, key=len):  # a joint loss has a head of its own in one stage
        if everything or name in BRIEFLY:
            stages.add_row(name, *(cells.get(name, "") for cells in columns))
    if not everything:
        return Group(values, data_text, stages, budgets, *rest)

    optimiser = table("\noptimiser groups", "stage", "numbers", "tensors", "rate", "decay", "of")
    for stage in overview["stages"]:
        for group in stage["groups"]:
            *numbers, kinds = group.values()
            optimiser.add_row(stage["stage"], *(_number(value) for value in numbers), ", ".join(kinds))
    runs = Text("\nruns  " + ", ".join(f"{name} {run}" for name, run in overview["runs"].items()) + " (seed 0)")
    return Group(values, data_text, stages, budgets, optimiser, runs)


def _value_text(value: Any) -> str:
    return displayable(json.dumps(value).strip('"'))


def _given(values: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """What is not a default, by section, as it is written on the command line; where it is not the recipe's own, with
    its origin. Of scratch, what differs from finetune."""
    sections: dict[str, list[str]] = {}
    finetune = {row["key"].partition(".")[2]: row["value"] for row in values if row["key"].startswith("finetune.")}
    for row in values:
        section, _, key = row["key"].partition(".")
        if section == "scratch" and row["value"] == finetune.get(key, object()):
            continue
        if row["origin"] != "default":
            origin = "" if row["origin"] == "recipe" else f" ({row['origin']})"
            sections.setdefault(section, []).append(f"{key}={_value_text(row['value'])}{origin}")
    if "scratch" in sections:
        sections["scratch"].insert(0, "as finetune, but")
    return sections


def _left_out(overview: dict[str, Any]) -> str:
    defaults = sum(row["origin"] == "default" for row in overview["values"])
    return f"left out: {defaults} defaults" + (", operations by kind, optimiser groups" if overview["stages"] else "")


def _stage_cells(stage: dict[str, Any], kinds: Sequence[str]) -> dict[str, str]:
    """A stage's column, by the name of the line; `kinds` of operations that any stage has."""

    def passes(kind: str) -> str:
        flops = stage["FLOPs by kind"].get(kind)
        return "" if flops is None else f"{flops['forward']:.2g} + {flops['backward']:.2g}"

    def part(name: str, total: str) -> str:
        return total if name == "total" else f"  {name}"

    memory = dict(stage["memory estimate"])
    at_once = memory.pop("sequences at once")
    keys = ("objective", "selects by", "steps", "warm-up steps", "examples", "epochs", "CPU threads")
    return {
        **{key: _number(stage[key]) for key in keys},
        "training FLOPs": f"{stage['training FLOPs']:.3g}",
        **{f"  {kind}, forward + backward": passes(kind) for kind in kinds},
        **{part(name, "parameters"): _number(count) for name, count in stage["parameters"].items()},
        **{part(name, "memory, estimated"): f"{size / 2**20:,.1f} MiB" for name, size in memory.items()},
        "  sequences at once": str(at_once),
    }


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)
