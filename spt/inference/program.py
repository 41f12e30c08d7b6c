"""The network as a torch.export program: a graph that other software than spt runs.

It takes the rows as the network is shown them, `x`, tokens (B, L) or normalised values (B, L, C), NaN where one is
missing, and `valid` (B, L), which steps are not padding; after pretraining, or if every step has an answer, it answers
every step. How far its outputs may be from ours, and which sizes of batches and lengths it takes, is found by trying.
"""

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from spt.data.batching import collate
from spt.errors import UsageError, one_line
from spt.models.base import Context
from spt.models.ops import backends
from spt.tasks.base import Classes
from spt.training.network import SequenceModel
from spt.training.objectives import Inputs

if TYPE_CHECKING:
    from spt.inference.trained_model import TrainedModel

TOLERANCE = 1e-4  # of the largest output: sums of a graph may be in another order


class Sizes(NamedTuple):
    """What may vary from call to call."""

    batch: bool
    length: bool

    def __str__(self) -> str:
        return {(True, True): "any batch, any length", (True, False): "any batch, one length"}.get(
            self, "one batch size, one length"
        )


class Program(NamedTuple):
    """A program that answers as the network does, and for which inputs it does so."""

    exported: torch.export.ExportedProgram
    sizes: Sizes
    rows: int  # sequences of a batch, where it takes one number alone
    length: int  # steps, where it takes one number alone; else at most so many
    padded: bool  # may rows be padded?

    def about(self) -> dict[str, Any]:
        """For config.json and the card."""
        batch = "any" if self.sizes.batch else self.rows
        length = f"2 to {self.length}" if self.sizes.length else self.length
        return {"batch": batch, "length": length, "padding": self.padded}


class _Whole(nn.Module):
    """The network with plain tensors as its inputs."""

    def __init__(self, network: SequenceModel, padded: bool) -> None:
        super().__init__()
        self.network, self.padded = copy.deepcopy(network).requires_grad_(False), padded  # it is not trained

    def forward(self, x: Tensor, valid: Tensor, steps: Tensor | None = None) -> Tensor:
        answer: Tensor = self.network(Inputs(x, None, Context(valid, self.padded, steps)))
        return answer


def make_program(model: "TrainedModel") -> Program:
    """The most general program of the model that answers as it does. Raises UsageError where there is none."""
    if model.computation.precision == "bf16":
        raise UsageError(
            "this model computes products in bfloat16, which a program would not; export it without --program"
        )
    if model.input.static:
        raise UsageError(
            "this model takes static features, which a program of sequences does not; export it without --program"
        )
    reason = ""
    every = (Sizes(True, True), Sizes(True, False), Sizes(False, False))
    for padded in (True, False) if model.network.backbone.ignores_padding else (False,):
        for sizes in every:
            try:
                return _trial(model, sizes, padded)
            except Exception as error:  # torch.export and what it calls raise anything
                reason = one_line(error)
    raise UsageError(
        f"model {model.architecture.model.name} has no program: torch.export cannot trace it ({reason}); export it "
        "without --program"
    )


def save_program(model: "TrainedModel", program: Program, path: Path) -> None:
    """Write it, and see that it answers as it did when it is read again."""
    with _quiet():
        torch.export.save(program.exported, path)
        _compare(model, torch.export.load(path).module(), program)


def _trial(model: "TrainedModel", sizes: Sizes, padded: bool) -> Program:
    from spt.inference.export import trial_lengths

    rows, length = 2 * model.sequences if not sizes.batch else 3 * model.sequences, trial_lengths(model)[0]
    program = _Whole(model.network, padded)
    example = _inputs(model, rows // model.sequences, length)
    with _quiet(), torch.no_grad(), backends.use("torch", "kernels"), backends.use("math", "attention"):
        exported = torch.export.export(program, example, dynamic_shapes=_dynamic(model, sizes, length, example))
    made = Program(exported, sizes, rows, length, padded)
    with _quiet():
        _compare(model, exported.module(), made)
    return made


def _dynamic(model: "TrainedModel", sizes: Sizes, length: int, example: tuple[Tensor, ...]) -> Any:
    unit = model.network.backbone.length_multiple
    dims: dict[int, Any] = {}
    if sizes.batch:  # of pairs, an even number of sequences
        pairs = torch.export.Dim("batch", min=1)
        dims[0] = 2 * pairs if model.sequences == 2 else pairs
    if sizes.length:
        some = torch.export.Dim("length", min=2, max=max(length, 3))
        dims[1] = some if unit == 1 else unit * torch.export.Dim("length", min=1, max=max(length // unit, 2))
    return tuple(dict(dims) for _ in example) if dims else None


def _inputs(model: "TrainedModel", rows: int, length: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Of a batch of random rows of one length."""
    from spt.inference.export import random_rows

    batch = collate(random_rows(model, length, rows, seed), np.arange(rows), model.input, Classes(2))
    times = () if batch.context.steps is None else (batch.context.steps,)
    return (batch.x, batch.context.valid, *times)


def _compare(model: "TrainedModel", program: nn.Module, made: Program) -> None:
    """On random rows of two lengths: the program's outputs are the network's. Raises ValueError."""
    from spt.inference.export import trial_lengths

    lengths = trial_lengths(model) if made.sizes.length else [made.length]
    counts = (1, 5) if made.sizes.batch else (made.rows // model.sequences,)
    network = _Whole(model.network, made.padded)
    with torch.no_grad():
        for length in lengths:
            for count in counts:
                inputs = _inputs(model, count, length, seed=count)
                for case in _cases(inputs, made.padded):
                    if (off := _difference(network(*case), program(*case), case[1])) > TOLERANCE:
                        raise ValueError(f"its outputs differ from the network's by {off:.1g} at {length} steps")


def _cases(inputs: tuple[Tensor, ...], padded: bool) -> Iterator[tuple[Tensor, ...]]:
    """The batch and, where rows may be padded, the same with padding in its second half."""
    yield inputs
    if padded:
        x, valid, *times = inputs
        valid = valid.clone()
        valid[:, max(1, valid.shape[1] // 2) :] = False
        yield (x.masked_fill(~valid if x.ndim == 2 else ~valid[..., None], 0), valid, *times)


def _difference(ours: Tensor, theirs: Tensor, valid: Tensor) -> float:
    """The largest, relative to the largest output; what stands on padding is nobody's."""
    if ours.shape != theirs.shape:
        raise ValueError(f"its outputs have the shape {tuple(theirs.shape)}, not {tuple(ours.shape)}")
    if ours.ndim == 3:
        ours, theirs = ours[valid], theirs[valid]
    if not theirs.isfinite().all():
        return float("inf")
    return float((ours - theirs).abs().max() / ours.abs().max().clamp_min(1e-6))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torch.export's own notes, warnings and printed graphs: what matters is whether outputs are equal."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
