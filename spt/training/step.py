"""One optimiser step: micro-batches, gradients, accumulation, memory."""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

from spt.config.recipe import Train
from spt.data.batching import NOBODY, by_length, collate, pieces, share
from spt.errors import BackendError
from spt.models.base import learns_from_padding
from spt.models.longconv import cached_kernels
from spt.models.ops.counts import Counts
from spt.rng import Draw, stream
from spt.runs.result import Ledger
from spt.runtime.distributed import Runtime
from spt.runtime.memory import free_memory, out_of_memory
from spt.runtime.prefetch import prefetched
from spt.tasks.base import TaskData
from spt.training.build import StageSetup
from spt.training.checkpoint import TrainingState
from spt.training.losses import right_answers, weighted_sum
from spt.training.network import batch_statistics, statistics_kept
from spt.training.objectives import Inputs, Targets
from spt.training.seeding import seed_step

logger = logging.getLogger(__name__)


class Outcome(NamedTuple):
    """What only the device can tell of a step, summed over processes."""

    loss: float  # sum of weight times loss
    right: float  # answers of classes
    finite: bool  # was the loss, and its gradient? Otherwise the weights are what they were


class StepResult(NamedTuple):
    """One optimiser step, summed over processes."""

    step: int  # the number it has, from 1
    weight: float
    examples: int
    positions: int
    operations: Counts
    answers: float  # of classes, that are counted as right or wrong; 0 where none are
    outcome: Callable[[], Outcome]  # waits for the device

    def since(self, outcome: Outcome) -> dict[str, float]:
        """What is summed up between evaluations."""
        return {"loss": outcome.loss, "weight": self.weight, "answers": self.answers, "right": outcome.right}

    def spent(self, seconds: float, world: int) -> Ledger:
        return Ledger(
            steps=1,
            examples=self.examples,
            positions=self.positions,
            flops=self.operations.total,
            operations=self.operations.by_kind(),
            seconds=seconds,
            device_seconds=seconds * world,
        )


class MicroBatch(NamedTuple):
    """What passes through the network at once; `denoising`: what it is asked is the second question of a joint loss."""

    inputs: Inputs
    targets: Targets
    denoising: bool = False


class Question(NamedTuple):
    """The micro-batches of one global batch that are asked the same."""

    micro_batches: list[MicroBatch]
    share: float  # of its mean loss in the whole
    weight: float  # of all its answers, over processes
    scored: float  # answers that weigh anything


class Prefetcher:
    """The batches of the steps to come, the next one made by a thread while the device works on the present one."""

    def __init__(self, learner: "Learner", rows: Iterator[tuple[int, NDArray[np.int64]]], left: int) -> None:
        self.learner, self.size = learner, 0
        self.batches = prefetched(self._cut, ((*each, self.size) for each in islice(rows, left)))

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, *raised: object) -> None:
        self.batches.close()

    def take(self, size: int) -> tuple[int, NDArray[np.int64], list[MicroBatch]]:
        """Epoch, rows of the global batch, and this process's part of it in pieces of at most `size`."""
        self.size = size  # of the batch that the thread begins with now, too
        epoch, rows, cut_to, micro_batches = next(self.batches)
        return epoch, rows, micro_batches if cut_to == size else self.learner.micro_batches(rows, epoch, size)

    def _cut(self, batch: tuple[int, NDArray[np.int64], int]) -> tuple[int, NDArray[np.int64], int, list[MicroBatch]]:
        epoch, rows, size = batch
        return epoch, rows, size, self.learner.micro_batches(rows, epoch, size)


@dataclass(frozen=True)
class Learner:
    """What does optimiser steps."""

    setup: StageSetup
    prepared: nn.Module  # the setup's network, as Accelerate wraps it
    optimizer: Any
    runtime: Runtime

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.prepared.parameters())

    @property
    def data(self) -> TaskData:
        return self.setup.data

    @property
    def train(self) -> Train:
        return self.setup.train

    def largest_micro_batch(self, state: TrainingState) -> int:
        """Sequences that a process takes at once: its whole share, or what the user said or a resumed run found."""
        share_size = -(-min(self.train.batch_size, len(self.data.train)) // self.runtime.world)
        return min(self.runtime.settings.micro_batch_size or share_size, state.micro_batch or share_size, share_size)

    def find_micro_batch(self, state: TrainingState, total: int) -> int:
        """Sequences that a process takes at once, as far as what memory holds has to be known before training.

        On several GPUs the largest micro-batch is tried first: a process that met the limit later, alone, could not
        tell the others, which would wait for its gradients.
        """
        runtime, size = self.runtime, self.largest_micro_batch(state)
        tried = runtime.world > 1 and runtime.device.type == "cuda" and not runtime.steps_in_backward
        longest = by_length(np.arange(len(self.data.train)), self.data.train.extents)
        while tried and state.step < total:
            failed = 0.0
            try:
                # Sharded gradients are exchanged here too: what is kept back would be added to the first step.
                with statistics_kept(self.prepared):
                    for micro_batch in self._make_inputs(longest[:size], 0):
                        with runtime.accumulating(self.prepared, last=runtime.shards):
                            self._backward(micro_batch, 1.0)
            except Exception as error:
                if not out_of_memory(error):
                    raise
                failed = 1.0
            self._forget()
            (failed,) = runtime.highest([failed])
            if not failed:
                break
            size = _halve_micro_batch(size, self.train)
        return size

    def step(self, prefetcher: Prefetcher, step: int, size: int) -> tuple["StepResult", int]:
        """One optimiser step, in smaller pieces when memory does not hold `size` sequences; and how many it held."""
        epoch, rows, micro_batches = prefetcher.take(size)
        before = [statistics.clone() for statistics in self._statistics]
        while True:
            try:
                return self._step(rows, micro_batches, step), size
            except Exception as error:
                if not out_of_memory(error):
                    raise
                if self.runtime.world > 1:
                    raise BackendError(
                        f"process {self.runtime.rank} has no memory for {size} sequences at once; "
                        f"--micro-batch {max(1, size // 2)} leaves the batch size as it is"
                    ) from error
            # Outside the except clause, whose error still holds the activations. No parameter has been updated yet, and
            # all chance is addressed, so the step starts over as if nothing had happened.
            self._forget()
            for statistics, kept in zip(self._statistics, before, strict=True):
                statistics.copy_(kept)
            size = _halve_micro_batch(size, self.train)
            micro_batches = self.micro_batches(rows, epoch, size)

    def _step(self, rows: NDArray[np.int64], micro_batches: list[MicroBatch], step: int) -> "StepResult":
        """Forward, backward, clip, update on one global batch; no update when something is not finite. What the loss
        was is not waited for where that can be read later."""
        runtime, split = self.runtime, self.data.train
        seed_step(stream(self.setup.job.seed, "dropout", step, runtime.rank) & (2**63 - 1), runtime.device)
        questions = self._questions(micro_batches)
        sums = [torch.zeros(2, device=runtime.device) for _ in questions]  # loss, right answers
        with self._kernel_cache(micro_batches) as last:
            for question, summed in zip(questions, sums, strict=True):
                for micro_batch in question.micro_batches:
                    final = micro_batch is questions[-1].micro_batches[-1]
                    if final:
                        last()
                    with runtime.accumulating(self.prepared, last=final):
                        # Data parallelism averages over processes what here is a part of a sum.
                        scale = question.share * runtime.world / max(question.weight, 1.0)
                        summed += self._backward(micro_batch, scale)
        read = self._update(torch.stack(sums))
        self.optimizer.zero_grad(set_to_none=True)
        # Padding is computed too: the cost is that of the longest row of the global batch, however it was cut.
        count, length = split.sequences * len(rows), int(split.extents[rows].max())
        operations = self.setup.model.batch_flops(count, length, questions[0].scored)
        for question in questions[1:]:
            operations += self.setup.model.denoising_flops(count, length, question.scored)
        positions, answers = int(split.lengths[rows].sum()), questions[0].scored if self._counts_right else 0.0
        weight, asked = questions[0].weight, [question._replace(micro_batches=[]) for question in questions]
        outcome = partial(_outcome, asked, read)
        return StepResult(step + 1, weight, len(rows), positions, operations, answers, outcome)

    @property
    def reads_later(self) -> bool:
        """May the outcome of a step be read after the next has begun? Not where processes have to agree on it, nor
        where the optimiser cannot leave the weights alone by what the device has found."""
        alone = self.runtime.world == 1 and not self.runtime.shards
        return self.runtime.queues and alone and bool(self.optimizer.param_groups[0]["fused"])

    def _update(self, sums: Float[Tensor, "Q 2"]) -> Callable[[], tuple[list[float], bool]]:
        """Clip the gradients and update the weights, if everything is finite. Gives what waits for the sums, over
        processes, and whether it was."""
        runtime, limit = self.runtime, self.train.max_grad_norm or math.inf
        if self.reads_later:
            norm = runtime.clip(self.parameters, limit)
            assert norm is not None
            finite = sums[:, 0].isfinite().all() & norm.isfinite()
            self.optimizer.found_inf = 1.0 - finite.float()  # torch's fused update does nothing where this is 1
            self.optimizer.step()
            copies = runtime.fetch((sums, finite))

            def read() -> tuple[list[float], bool]:
                sums, finite = copies()
                return sums.flatten().tolist(), bool(finite)

            return read
        totals = runtime.total(sums.flatten().tolist())
        norm = runtime.clip(self.parameters, limit)
        known = all(map(math.isfinite, totals[::2])) and (norm is None or math.isfinite(float(norm)))
        if known:
            self.optimizer.step()
        return lambda: (totals, known)

    @property
    def _counts_right(self) -> bool:
        """Are answers to the task itself right or wrong?"""
        output = self.setup.output
        of_classes = output.loss in ("cross_entropy", "binary_cross_entropy")
        return self.setup.objective.labelled and of_classes and not output.text

    def _questions(self, micro_batches: list[MicroBatch]) -> list[Question]:
        """What the global batch is asked: by the objective and, if there is a joint loss, by that one.

        Each loss is a weighted mean over the global batch, so the weights of all its parts are summed up first. Ones
        that are not zero are counted too, since only those steps are answered.
        """
        setup, total = self.setup, self.runtime.total
        own = [micro_batch for micro_batch in micro_batches if not micro_batch.denoising]
        weighed = setup.objective.weighed(setup.output, [micro_batch.targets for micro_batch in own], total)
        own = [each._replace(targets=self.runtime.pinned(targets)) for each, targets in zip(own, weighed, strict=True)]
        asked = [(own, 1.0)]
        if setup.joint is not None:
            others = [micro_batch for micro_batch in micro_batches if micro_batch.denoising]
            asked.append((others, setup.joint.weight))
        own_weights = [number for parts, _ in asked for number in _weight(parts)]
        weights = total(own_weights)  # of all questions, in one exchange
        pairs = zip(weights[::2], weights[1::2], strict=True)
        return [Question(parts, share, *pair) for (parts, share), pair in zip(asked, pairs, strict=True)]

    def _kernel_cache(self, batches: list[MicroBatch]) -> contextlib.AbstractContextManager[Callable[[], None]]:
        """What depends on the parameters alone is computed once a step, where more than one pass would need it.

        Not where a process has its parameters only within the forward pass.
        """
        again = len(batches) > 1 or self.runtime.settings.recompute
        if not again or self.runtime.shards:
            return contextlib.nullcontext(lambda: None)
        return cached_kernels(self.prepared, max(batch.inputs.x.shape[1] for batch in batches))

    def micro_batches(self, rows: NDArray[np.int64], epoch: int, size: int) -> list[MicroBatch]:
        """This process's part of a global batch, in pieces of at most `size` examples; once for each question."""
        runtime = self.runtime
        mine = share(by_length(rows, self.data.train.extents), runtime.rank, runtime.world)
        least = int(self.data.train.extents[rows].max()) if self._padded_as_one else 0
        by_piece = [self._make_inputs(part, epoch, least) for part in pieces(mine, size)]
        return [runtime.pinned(micro_batch) for asked in zip(*by_piece, strict=True) for micro_batch in asked]

    @cached_property
    def _statistics(self) -> list[Tensor]:
        """The running ones of batch norms, which a forward pass updates."""
        return [*batch_statistics(self.prepared).values()]

    @cached_property
    def _padded_as_one(self) -> bool:
        """Is the padding of the global batch the same however it is cut?"""
        return learns_from_padding(self.setup.model)

    def _make_inputs(self, rows: NDArray[np.int64], epoch: int, least: int = 0) -> list[MicroBatch]:
        """What these rows are asked: by the objective, and by the joint loss if there is one."""
        setup, data, resampled = self.setup, self.data, None
        draw = Draw(setup.job.seed, "corruption", epoch)
        if epoch and data.resample is not None:
            ids = data.train.ids[np.where(rows == NOBODY, 0, rows)]
            resampled = data.resample(ids, epoch)
            here = np.where(rows == NOBODY, NOBODY, np.arange(len(rows)))
            split = resampled if setup.objective.labelled else resampled.unlabelled()
            batch = collate(split, here, data.input, data.target, least)._replace(rows=torch.from_numpy(rows))
        else:
            batch = collate(data.train, rows, data.input, data.target, least)
        asked = [MicroBatch(*setup.make_inputs(batch, draw))]
        if setup.joint is not None:
            asked.append(MicroBatch(*setup.joint.make_inputs(rows, draw, resampled, least), denoising=True))
        return asked

    def _backward(self, micro_batch: MicroBatch, scale: float) -> Float[Tensor, "2"]:
        """Add to the gradients; returns the loss, summed, and how many answers are right, if that is counted."""
        inputs, targets, denoising = self.runtime.send(micro_batch)
        if not self.prepared.training:
            self.prepared.train()
        # Batch norms remember what an evaluation will show them: inputs of which nothing is hidden.
        with statistics_kept(self.prepared) if denoising else contextlib.nullcontext():
            with self.runtime.autocast(self.train.precision):
                logits = self.prepared(inputs, targets.scored, denoising)
            loss = weighted_sum(self.setup.output_of(denoising), logits, targets)
            self.runtime.backward(loss * scale)
            right = torch.zeros_like(loss)
            if self._counts_right and not denoising:
                with torch.no_grad():
                    right = right_answers(self.setup.output, logits, targets)
        return torch.stack([loss.detach(), right])

    def _forget(self) -> None:
        """Gradients of a step that is not made, and the memory it took."""
        self.runtime.forget_accumulation()
        self.optimizer.zero_grad(set_to_none=True)
        free_memory()


def _outcome(questions: list[Question], read: Callable[[], tuple[list[float], bool]]) -> Outcome:
    """The loss of all questions, weighted as the first, from the sums of each."""
    (own, right, *others), finite = read()
    weight = questions[0].weight
    added = (
        weight * question.share * total / max(question.weight, 1.0)
        for question, total in zip(questions[1:], others[::2], strict=True)
    )
    return Outcome(own + sum(added), right, finite)


def _weight(micro_batches: list[MicroBatch]) -> list[float]:
    """The sum of the answers' weights, and the number of those that weigh anything."""
    weights = [micro_batch.targets.weight for micro_batch in micro_batches]
    return [sum(float(f(w)) for w in weights) for f in (torch.sum, torch.count_nonzero)]


def _halve_micro_batch(size: int, train: Train) -> int:
    if size == 1:
        raise BackendError(
            "there is no memory for a single sequence; --gradient-checkpointing needs less, as do a smaller model "
            "and shorter sequences"
        )
    size = (size + 1) // 2
    logger.warning(f"out of memory: continuing with {size} sequences at once; the batch size stays {train.batch_size}")
    return size
