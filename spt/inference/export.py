"""`spt export`: a finished run as a folder that answers without the run, its data and its recipe."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from spt.config.load import path_options
from spt.config.plugins import is_path
from spt.config.recipe import Part
from spt.errors import OutputError, SptError, UsageError
from spt.inference.card import model_card
from spt.inference.exported import (
    CARD,
    CHECKPOINT,
    CODE,
    PROGRAM,
    WEIGHTS,
    checksum,
    config_of,
    open_exported,
    tensors_of,
)
from spt.inference.trained_model import CONFIG, TrainedModel
from spt.runs.files import sync, write_text, writing
from spt.runs.folder import RunFolder
from spt.runtime.distributed import Runtime
from spt.runtime.settings import Settings
from spt.runtime.signals import cleanup
from spt.tasks.base import Split, Tokens
from spt.training.checkpoint import save_tensors

if TYPE_CHECKING:
    from spt.inference.program import Program


def export(path: Path, out: Path, program: bool = False) -> dict[str, Any]:
    """Write a finished run's model to a folder that does not exist yet; returns what it holds.

    Whether it loads back, and answers as the run does, is checked before the folder gets its name. Raises UsageError,
    DataError, CheckpointError or OutputError.
    """
    if os.path.lexists(out):
        raise OutputError(f"{out} exists already; nothing is overwritten: name another folder with --out")
    if (path / CONFIG).is_file():
        raise UsageError(f"{path} is an exported folder already; copy it, or name the run that it came from")
    model = TrainedModel.open(path)
    made = None
    if program:
        from spt.inference.program import make_program

        made = make_program(model)
    added = {"seeds": _scores_of_seeds(path.resolve(), model), "program": made.about() if made else None}
    return write_model(replace(model, about={**model.about, **added}), out, made)


def write_model(
    model: TrainedModel, out: Path, made: "Program | None" = None, texts: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """Write a trained model, its program if one was made, and further `texts` by file name to a folder that does not
    exist yet. Errors as of `export`."""
    if os.path.lexists(out):
        raise OutputError(f"{out} exists already; nothing is overwritten: name another folder")
    model = replace(model, about={"seeds": {}, "program": None, **model.about})
    beside = out.with_name(f".{out.name}.{os.getpid()}.tmp")

    def remove(_: object = None) -> None:
        shutil.rmtree(beside, ignore_errors=True)

    with writing(out), cleanup(remove):
        try:
            beside.mkdir(parents=True)
            _fill(beside, model)
            _check_answers(model, beside)
            if made is not None:
                from spt.inference.program import save_program

                save_program(model, made, beside / PROGRAM)
            for name, text in texts.items():
                write_text(beside / name, text)
            write_text(beside / CARD, model_card(model, out.name))
            files = {file.name: file.stat().st_size for file in sorted(beside.rglob("*")) if file.is_file()}
            sync(beside)
            beside.rename(out)
        finally:
            remove()
    return {"folder": str(out), "run": model.about["run"], "files": files, "program": model.about["program"]}


def _fill(folder: Path, model: TrainedModel) -> None:
    part, files = model.architecture.model, [WEIGHTS]
    save_tensors(tensors_of(model), folder / WEIGHTS, {"format": "pt"})
    if is_path(part.name):
        shutil.copyfile(part.name, folder / CODE)
        part, files = Part(name=CODE, **part.options), [*files, CODE]
    if part.options.get("checkpoint") is not None:
        part = _with_own_sizes(part, model, folder)
    places = {} if is_path(part.name) else path_options("models", {"name": part.name, **part.options})
    if others := sorted(set(places) - {"checkpoint"}):
        raise UsageError(f"model {part.name} reads a file of its own (option {others[0]}), which cannot be exported")
    config = config_of(model, part, {name: checksum(folder / name) for name in files})
    write_text(folder / CONFIG, config.to_text())


def _with_own_sizes(part: Part, model: TrainedModel, folder: Path) -> Part:
    """A model that took its sizes from a checkpoint takes them from the exported folder, and its weights with them."""
    sizes: Any = getattr(model.network.backbone, "model", None)
    if not hasattr(sizes, "config"):
        raise UsageError(f"model {part.name} was built from a checkpoint, which cannot be exported")
    sizes.config.save_pretrained(folder / CHECKPOINT)
    return Part(
        name=part.name, **{**part.options, "checkpoint": f"./{CHECKPOINT}", "revision": None, "pretrained": False}
    )


def _scores_of_seeds(path: Path, model: TrainedModel) -> dict[str, float]:
    """The test scores of the finished runs beside this one that differ from it in their seed alone."""
    own = RunFolder(path.parent, path.name).result()
    assert own is not None, "it was opened"
    scores: dict[int, float] = {}
    for file in path.parent.glob(f"{own.stage}-*/result.json"):
        if "." in file.parent.name:  # moved aside, when it was made again
            continue
        try:
            result = RunFolder(path.parent, file.parent.name).result()
        except SptError:
            continue
        if result is None or result.test is None or result.settings != own.settings or result.smoke != own.smoke:
            continue
        if (result.parent is None) == (own.parent is None):
            scores[result.seed] = result.test[result.metric]
    return {str(seed): scores[seed] for seed in sorted(scores)}


# --------------------------------------------------------------------------------------------------------------- checks


def random_rows(model: TrainedModel, length: int, rows: int = 2, seed: int = 0) -> Split:
    """Random rows of this many steps, as the model is shown them."""
    rng = np.random.default_rng(seed)
    total = rows * length * model.sequences
    values: NDArray[Any]
    if isinstance(model.input, Tokens):
        codes = model.input.codes
        values = rng.integers(0, model.input.vocab, total)
        values = values if codes is None else np.maximum(np.asarray(codes), 0)[values]
    elif model.input.levels is not None:
        values = rng.integers(0, model.input.levels, (total, model.input.channels))
    else:
        values = (rng.normal(size=(total, model.input.channels)) * model.input.std + model.input.mean).astype(
            np.float32
        )
        if model.input.missing:
            values[rng.random(values.shape) < 0.2] = np.nan
    static = rng.normal(size=(rows, model.input.static)).astype(np.float32) if model.input.static else None
    stops = np.cumsum(np.full(rows, length * model.sequences))
    cuts = np.full(rows, length) if model.sequences == 2 else None
    steps = rng.uniform(0.5, 2, total).astype(np.float32) if model.timed else None
    starts, ids = stops - length * model.sequences, np.arange(rows)
    return Split(values, starts, stops, None, ids, cuts=cuts, steps=steps, static=static)


def trial_lengths(model: TrainedModel) -> list[int]:
    """The longest length that the network was built for, and about half of it, as far as the model takes them."""
    unit = model.network.backbone.length_multiple
    longest = max(model.length // unit, 1) * unit
    return list(dict.fromkeys([longest, max(longest // 2 // unit, 1) * unit]))


def outputs_of(model: TrainedModel, rows: Split, runtime: Runtime) -> torch.Tensor:
    """The network's outputs for rows of one length, in their order."""
    parts = list(model.outputs(rows, runtime=runtime))
    order = np.argsort(np.concatenate([part.rows for part in parts]))
    return torch.cat([part.values for part in parts])[torch.from_numpy(order)]


def _check_answers(model: TrainedModel, folder: Path) -> None:
    """The folder loads back, and its answers are those of the run, to the last bit."""
    again, runtime = open_exported(folder, trust_code=True), Runtime(Settings(quiet=True))
    for length in trial_lengths(model):
        rows = random_rows(model, length)
        if not torch.equal(outputs_of(model, rows, runtime), outputs_of(again, rows, runtime)):
            raise UsageError(
                f"model {model.architecture.model.name} cannot be exported: built again from its options and weights "
                "it answers otherwise, so it keeps something that is neither; a buffer of the module would be saved"
            )
