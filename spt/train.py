"""The training loop, for both stages.

Read `fit` from top to bottom: everything happens in the order in which it stands there.
"""

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from spt.batch import NOBODY, by_length, collate, pieces, share, steps_per_epoch, training_rows
from spt.checkpoint import About, Position, load_weights, prune, resume, save_state, save_weights
from spt.compute import expected_longest, peak_memory, reset_peak_memory, total_steps
from spt.errors import BackendError, CheckpointError, DivergedError
from spt.evaluate import better, evaluate, selection_metric
from spt.losses import weighted_sum
from spt.models.longconv import kernels_held
from spt.models.ops.counts import Counts
from spt.network import SequenceModel
from spt.objectives import Inputs, Objective, Output, Targets, evaluation_draw
from spt.optim import adamw, reduces, set_rates
from spt.progress import Bar
from spt.recipe import Train
from spt.run import Ledger, Run
from spt.runtime import Runtime, StopSignals, free_memory, known_to_all, out_of_memory, stopped
from spt.seeding import Draw, stream
from spt.tasks.base import Split, TaskData


class Fitted(NamedTuple):
    """A finished training; the model holds the selected weights."""

    position: Position
    stop: Literal["budget", "patience"]
    selected_by: str  # the validation metric


def fit(
    model: SequenceModel,
    objective: Objective,
    output: Output,
    data: TaskData,
    train: Train,
    seed: int,
    run: Run,
    runtime: Runtime,
    about: Callable[[int], About],
    say: Callable[[str], None],
    label: str,
) -> Fitted:
    """Train on data.train, select on data.val; continue where `run` has a checkpoint. All processes run this."""
    device, split, settings = runtime.device, data.train, runtime.settings
    total = plan_steps(model, data, train)
    every = train.evaluate_every or steps_per_epoch(len(split), train.batch_size, train.drop_last)
    metric = selection_metric(train, output)

    model.encoder.hidden.requires_grad_(objective.hides)  # data parallelism cannot wait for a gradient that never comes
    trained = copy.deepcopy(model) if runtime.shards else model  # sharding takes a model apart for good
    trained.to(device).backbone.recompute = settings.recompute
    if settings.compile:
        runtime.compile(trained.backbone, say)
    prepared, optimizer = runtime.prepare(trained, adamw(trained, train, device), train.max_grad_norm)
    learner = _Learner(prepared, model, optimizer, objective, output, data, train, seed, runtime)
    try:
        position = _continue(run, runtime, say)
        size = learner.fitting(position, total, say)
        if size < learner.most(position):
            position = position.model_copy(update={"micro_batch": size})
        rows = training_rows(len(split), train.batch_size, seed, position.step, train.drop_last)
        reset_peak_memory(device)
        clock, saved = time.perf_counter(), time.monotonic()
        already = position.ledger.examples
        with (
            _Ahead(learner, rows, total - position.step) as ahead,
            Bar(label, total, position.step, quiet=settings.quiet or not runtime.main) as bar,
            StopSignals(alone=runtime.world == 1) as signals,
        ):
            while position.step < total and not _out_of_patience(position, train):
                set_rates(optimizer, position.step, total, train, position.reductions)
                done, held = learner.step(ahead, position.step, size, say)
                if not done.finite:
                    raise known_to_all(_diverged("the loss or its gradient", position.step + 1, position))
                now = time.perf_counter()
                position = position.after(done.spent(now - clock, runtime.world), done.loss, done.weight)
                if held < size:  # a resumed run need not find out again
                    size, position = held, position.model_copy(update={"micro_batch": held})
                clock = now

                if position.step % every == 0 or position.step == total:
                    draw = evaluation_draw(train, seed, position.step)
                    found, _ = evaluate(prepared, objective, output, data.val, data, runtime, train, draw, at_once=size)
                    if not math.isfinite(found["loss"]):
                        raise known_to_all(_diverged("the validation loss", position.step, position))
                    improved = better(found, position.best, metric)
                    loss = position.training_loss
                    position = position.evaluated(found, improved)
                    if reduces(position.waited, train):
                        position = position.model_copy(update={"reductions": position.reductions + 1})
                    if improved:
                        _keep_best(run, runtime, prepared, position, about(position.step), split)
                    _log(run, runtime, position, loss, optimizer.param_groups[0]["lr"], found)
                    bar.note(f"train loss {loss:.4g}  val {metric} {found[metric]:.4g}")
                bar.update(position.step, position.ledger.examples - already)
                # All processes stop, or save, after the same step: process 0's clock, and anybody's signal, count.
                late = runtime.main and time.monotonic() - saved >= settings.save_every
                stop, due = runtime.highest([float(signals.received), float(late)])
                if stop or (due and position.step < total):
                    save_state(run, runtime, position.with_peak(peak_memory(device)))
                    saved = time.monotonic()
                if stop:
                    raise known_to_all(stopped(int(stop), position.step))
        position = position.with_peak(peak_memory(device))
        rest = time.perf_counter() - clock  # of the last evaluation
        position = position.after(Ledger(seconds=rest, device_seconds=rest * runtime.world))
    finally:
        runtime.accelerator.free_memory()
    # Together: process 0 goes on to tidy this folder up.
    runtime.together(lambda: load_weights(run.checkpoints / f"best-{position.best_step:08d}", model))
    return Fitted(position, "patience" if position.step < total else "budget", metric)


def _keep_best(run: Run, runtime: Runtime, prepared: nn.Module, position: Position, about: About, split: Split) -> None:
    tensors = runtime.weights(prepared)

    def write() -> None:
        save_weights(run.checkpoints / f"best-{position.step:08d}", tensors, about, split.seen)
        prune(run, position)

    runtime.once(write)


def _diverged(what: str, step: int, position: Position) -> DivergedError:
    kept = f"; the weights of step {position.best_step:,} are kept" if position.best_step else ""
    return DivergedError(
        f"{what} is not finite at step {step:,}; a smaller learning_rate, more warm-up or clipping may help{kept}"
    )


class _Done(NamedTuple):
    """One optimiser step, summed over processes."""

    loss: float  # sum of weight times loss
    weight: float
    examples: int
    positions: int
    operations: Counts
    finite: bool

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


Posed = tuple[Inputs, Targets]


class _Ahead:
    """The batches of the steps to come, the next one made by a thread while the device works on the present one."""

    def __init__(self, learner: "_Learner", rows: Iterator[tuple[int, NDArray[np.int64]]], left: int) -> None:
        self.learner, self.rows, self.left = learner, rows, left
        self.pool = ThreadPoolExecutor(1)
        self.waiting: tuple[int, NDArray[np.int64], int, Future[list[Posed]]] | None = None

    def __enter__(self) -> "_Ahead":
        return self

    def __exit__(self, *raised: object) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)

    def take(self, size: int) -> tuple[int, NDArray[np.int64], list[Posed]]:
        """Epoch, rows of the global batch, and this process's part of it in pieces of at most `size`."""
        if self.waiting is None:
            self._begin(size)
        assert self.waiting is not None
        epoch, rows, cut, made = self.waiting
        found = made.result() if cut == size else self.learner.posed(rows, epoch, size)
        self.waiting = None
        if self.left:
            self._begin(size)
        return epoch, rows, found

    def _begin(self, size: int) -> None:
        epoch, rows = next(self.rows)
        self.left -= 1
        self.waiting = epoch, rows, size, self.pool.submit(self.learner.posed, rows, epoch, size)


class _Learner(NamedTuple):
    """What does optimiser steps."""

    prepared: nn.Module
    model: SequenceModel  # the same, as it was built
    optimizer: Any
    objective: Objective
    output: Output
    data: TaskData
    train: Train
    seed: int
    runtime: Runtime

    def most(self, position: Position) -> int:
        """Sequences that a process takes at once: its whole share, or what the user said or a resumed run found."""
        share_size = -(-min(self.train.batch_size, len(self.data.train)) // self.runtime.world)
        return min(self.runtime.settings.micro_batch_size or share_size, position.micro_batch or share_size, share_size)

    def fitting(self, position: Position, total: int, say: Callable[[str], None]) -> int:
        """As many of these as memory holds, as far as that has to be known before training.

        On several GPUs the largest micro-batch is tried first: a process that met the limit later, alone, could not
        tell the others, which would wait for its gradients.
        """
        runtime, size = self.runtime, self.most(position)
        tried = runtime.world > 1 and runtime.device.type == "cuda" and not runtime.steps_in_backward
        longest = by_length(np.arange(len(self.data.train)), self.data.train.extents)
        while tried and position.step < total:
            failed = 0.0
            try:
                # Sharded gradients are exchanged here too: what is kept back would be added to the first step.
                with runtime.accumulating(self.prepared, last=runtime.shards):
                    self._backward(self._pose(longest[:size], 0), 1.0)
            except Exception as error:
                if not out_of_memory(error):
                    raise
                failed = 1.0
            self._forget()
            (failed,) = runtime.highest([failed])
            if not failed:
                break
            size = _halved(size, self.train, say)
        return size

    def step(self, ahead: _Ahead, step: int, size: int, say: Callable[[str], None]) -> tuple["_Done", int]:
        """One optimiser step, in smaller pieces when memory does not hold `size` sequences; and how many it held."""
        epoch, rows, posed = ahead.take(size)
        while True:
            try:
                return self._step(rows, posed, step), size
            except Exception as error:
                if not out_of_memory(error):
                    raise
                if self.runtime.world > 1:
                    raise BackendError(
                        f"process {self.runtime.rank} has no memory for {size} sequences at once; "
                        f"--micro-batch {max(1, size // 2)} leaves the batch size as it is"
                    ) from error
            # Outside the except clause, whose error still holds the activations. Nothing has been updated yet, and
            # all chance is addressed, so the step begins anew as if nothing had been.
            self._forget()
            size = _halved(size, self.train, say)
            posed = self.posed(rows, epoch, size)

    def _step(self, rows: NDArray[np.int64], posed: list[Posed], step: int) -> "_Done":
        """Forward, backward, clip, update on one global batch; no update when something is not finite."""
        runtime, train, split = self.runtime, self.train, self.data.train
        torch.manual_seed(stream(self.seed, "dropout", step, runtime.rank) & (2**63 - 1))
        weighed = self.objective.weighed([targets for _, targets in posed], runtime.total)
        posed = [(inputs, targets) for (inputs, _), targets in zip(posed, weighed, strict=True)]
        # The loss is the weighted mean over the global batch, so the weights of all its parts are summed up first.
        (weight,) = runtime.total([sum(float(targets.weight.sum()) for _, targets in posed)])
        loss_sum = torch.zeros((), device=runtime.device)
        with self._held_kernels(posed) as last:
            for i, question in enumerate(posed):
                ending = i == len(posed) - 1
                if ending:
                    last()
                with runtime.accumulating(self.prepared, last=ending):
                    # Data parallelism averages over processes what here is a part of a sum.
                    loss_sum += self._backward(question, runtime.world / max(weight, 1.0))
        (loss_total,) = runtime.total([float(loss_sum)])
        norm = runtime.accelerator.clip_grad_norm_(self.prepared.parameters(), train.max_grad_norm or math.inf)
        finite = math.isfinite(loss_total) and (norm is None or math.isfinite(float(norm)))
        if finite:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        # Padding is computed too: the cost is that of the longest row of the global batch, however it was cut.
        operations = self.model.batch_flops(split.sequences * len(rows), int(split.extents[rows].max()))
        return _Done(loss_total, weight, len(rows), int(split.lengths[rows].sum()), operations, finite)

    def _held_kernels(self, posed: list[Posed]) -> contextlib.AbstractContextManager[Callable[[], None]]:
        """What depends on the parameters alone is computed once a step, where more than one pass would need it.

        Not where a process has its parameters only within the forward pass.
        """
        again = len(posed) > 1 or self.runtime.settings.recompute
        if not again or self.runtime.shards:
            return contextlib.nullcontext(lambda: None)
        return kernels_held(self.prepared, max(inputs.x.shape[1] for inputs, _ in posed))

    def posed(self, rows: NDArray[np.int64], epoch: int, size: int) -> list[Posed]:
        """This process's part of a global batch, in pieces of at most `size` examples."""
        runtime = self.runtime
        mine = share(by_length(rows, self.data.train.extents), runtime.rank, runtime.world)
        return [runtime.pinned(self._pose(part, epoch)) for part in pieces(mine, size)]

    def _pose(self, rows: NDArray[np.int64], epoch: int) -> Posed:
        data = self.data
        if epoch and data.fresh is not None:
            ids = data.train.ids[np.where(rows == NOBODY, 0, rows)]
            fresh = data.fresh(ids, epoch)
            here = np.where(rows == NOBODY, NOBODY, np.arange(len(rows)))
            split = fresh if self.objective.labelled else fresh.unlabelled()
            batch = collate(split, here, data.input, data.target)._replace(rows=torch.from_numpy(rows))
        else:
            batch = collate(data.train, rows, data.input, data.target)
        return self.objective.pose(batch, Draw(self.seed, "corruption", epoch))

    def _backward(self, question: Posed, scale: float) -> Tensor:
        """Add to the gradients; returns the loss, summed."""
        inputs, targets = self.runtime.send(question)
        self.prepared.train()
        with self.runtime.autocast(self.train.precision):
            logits = self.prepared(inputs)
        loss = weighted_sum(self.output, logits, targets)
        self.runtime.accelerator.backward(loss * scale)
        return loss.detach()

    def _forget(self) -> None:
        """Gradients of a step that is not made, and the memory it took."""
        self.runtime.forget_accumulation()
        self.optimizer.zero_grad(set_to_none=True)
        free_memory()


def _halved(size: int, train: Train, say: Callable[[str], None]) -> int:
    if size == 1:
        raise BackendError(
            "there is no memory for a single sequence; --gradient-checkpointing needs less, as do a smaller model "
            "and shorter sequences"
        )
    size = (size + 1) // 2
    say(f"out of memory: continuing with {size} sequences at once; the batch size stays {train.batch_size}")
    return size


def plan_steps(model: SequenceModel, data: TaskData, train: Train) -> int:
    """Optimiser steps of a stage; a FLOP budget is converted at the mean length."""
    return total_steps(train, len(data.train), mean_flops(model, data, train).total)


def mean_flops(model: SequenceModel, data: TaskData, train: Train) -> Counts:
    """Operations an example of a full batch, padded to its longest as batches are."""
    length = max(1, round(expected_longest(data.train.extents, train.batch_size)))
    return model.batch_flops(data.train.sequences * train.batch_size, length) / train.batch_size


def _continue(run: Run, runtime: Runtime, say: Callable[[str], None]) -> Position:
    """Where to start: after the newest usable checkpoint, or at the beginning."""
    mode = runtime.settings.resume
    position = resume(run, runtime, say) if mode != "never" else None
    if position is None and mode == "must":
        raise CheckpointError(
            f"{run.path} has no checkpoint to resume from; use --resume auto to start at the beginning"
        )
    position = position or Position()
    runtime.once(lambda: run.forget_metrics_after(position.step))
    return position


def _out_of_patience(position: Position, train: Train) -> bool:
    return train.patience is not None and position.waited >= train.patience


def _log(
    run: Run, runtime: Runtime, position: Position, loss: float, learning_rate: float, found: dict[str, float]
) -> None:
    training = {
        "loss": loss,
        "learning_rate": learning_rate,
        "examples": position.ledger.examples,
        "flops": position.ledger.flops,
    }

    def write() -> None:
        run.log("train", position.step, **training)
        run.log("val", position.step, **found)

    runtime.once(write)
    runtime.track("train", position.step, training)
    runtime.track("val", position.step, found)


def time_steps(
    model: SequenceModel,
    objective: Objective,
    output: Output,
    data: TaskData,
    train: Train,
    runtime: Runtime,
    steps: int,
) -> list[float]:
    """Seconds of each of so many optimiser steps, as `fit` makes them, on the job's own batches; nothing is kept."""
    model.encoder.hidden.requires_grad_(objective.hides)
    model.to(runtime.device).backbone.recompute = runtime.settings.recompute
    if runtime.settings.compile:
        runtime.compile(model.backbone, lambda text: None)
    prepared, optimizer = runtime.prepare(model, adamw(model, train, runtime.device), train.max_grad_norm)
    learner = _Learner(prepared, model, optimizer, objective, output, data, train, 0, runtime)
    size, found = learner.most(Position()), []
    rows = training_rows(len(data.train), train.batch_size, 0, 0, train.drop_last)
    try:
        with _Ahead(learner, rows, steps) as ahead, runtime.kernels():
            for step in range(steps):
                began = time.perf_counter()
                set_rates(optimizer, step, steps, train, 0)
                _, size = learner.step(ahead, step, size, lambda text: None)
                found.append(time.perf_counter() - began)
    finally:
        runtime.accelerator.free_memory()
    return found
