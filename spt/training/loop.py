"""The training loop, for both stages.

Read `fit` from top to bottom: everything happens in the order in which it stands there.
"""

import copy
import math
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

from torch import nn

from spt.config.budget import steps_per_epoch
from spt.config.recipe import Train
from spt.data.batching import training_rows
from spt.errors import CheckpointError, DivergedError
from spt.runs.folder import RunFolder
from spt.runs.result import Ledger
from spt.runtime.distributed import Runtime, mark_shared
from spt.runtime.memory import peak_memory, reset_peak_memory
from spt.runtime.progress import Bar
from spt.runtime.signals import StopSignals, stop_error
from spt.tasks.base import Split, TaskData
from spt.training.budget import plan_steps
from spt.training.checkpoint import CheckpointMeta, TrainingState, load_weights, prune, resume, save_state, save_weights
from spt.training.evaluate import evaluate, is_better, selection_metric
from spt.training.network import SequenceModel
from spt.training.objectives import Objective, Output, evaluation_draw
from spt.training.optimizer import adamw, reduces_rate, set_rates
from spt.training.step import Learner, Prefetcher


class FitResult(NamedTuple):
    """A finished training; the model holds the selected weights."""

    position: TrainingState
    stop: Literal["budget", "patience"]
    selected_by: str  # the validation metric


def fit(
    model: SequenceModel,
    objective: Objective,
    output: Output,
    data: TaskData,
    train: Train,
    seed: int,
    run: RunFolder,
    runtime: Runtime,
    about: Callable[[int], CheckpointMeta],
    say: Callable[[str], None],
    label: str,
) -> FitResult:
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
    learner = Learner(prepared, model, optimizer, objective, output, data, train, seed, runtime)
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
            StopSignals(alone=runtime.world == 1) as signals,
            Prefetcher(learner, rows, total - position.step) as ahead,
            Bar(label, total, position.step, quiet=settings.quiet or not runtime.main) as bar,
        ):
            while position.step < total and not _out_of_patience(position, train):
                set_rates(optimizer, position.step, total, train, position.reductions)
                done, held = learner.step(ahead, position.step, size, say)
                if not done.finite:
                    raise mark_shared(_diverged("the loss or its gradient", position.step + 1, position))
                now = time.perf_counter()
                position = position.after(done.spent(now - clock, runtime.world), done.loss, done.weight)
                if held < size:  # a resumed run need not find out again
                    size, position = held, position.model_copy(update={"micro_batch": held})
                clock = now

                if position.step % every == 0 or position.step == total:
                    draw = evaluation_draw(train, seed, position.step)
                    found, _ = evaluate(prepared, objective, output, data.val, data, runtime, train, draw, at_once=size)
                    if not math.isfinite(found["loss"]):
                        raise mark_shared(_diverged("the validation loss", position.step, position))
                    improved = is_better(found, position.best, metric)
                    loss = position.training_loss
                    position = position.evaluated(found, improved)
                    if reduces_rate(position.waited, train):
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
                    where = f" after step {position.step:,}; the same command continues from there"
                    raise mark_shared(stop_error(int(stop), where))
        position = position.with_peak(peak_memory(device))
        rest = time.perf_counter() - clock  # of the last evaluation
        position = position.after(Ledger(seconds=rest, device_seconds=rest * runtime.world))
    finally:
        runtime.accelerator.free_memory()
    # Together: process 0 goes on to tidy this folder up.
    runtime.all_ranks(lambda: load_weights(run.checkpoints / f"best-{position.best_step:08d}", model))
    return FitResult(position, "patience" if position.step < total else "budget", metric)


def _keep_best(
    run: RunFolder, runtime: Runtime, prepared: nn.Module, position: TrainingState, about: CheckpointMeta, split: Split
) -> None:
    tensors = runtime.weights(prepared)

    def write() -> None:
        save_weights(run.checkpoints / f"best-{position.step:08d}", tensors, about, split.seen)
        prune(run, position)

    runtime.on_main(write)


def _diverged(what: str, step: int, position: TrainingState) -> DivergedError:
    kept = f"; the weights of step {position.best_step:,} are kept" if position.best_step else ""
    return DivergedError(
        f"{what} is not finite at step {step:,}; a smaller learning_rate, more warm-up or clipping may help{kept}"
    )


def _continue(run: RunFolder, runtime: Runtime, say: Callable[[str], None]) -> TrainingState:
    """Where to start: after the newest usable checkpoint, or at the beginning."""
    mode = runtime.settings.resume
    position = resume(run, runtime, say) if mode != "never" else None
    if position is None and mode == "must":
        raise CheckpointError(
            f"{run.path} has no checkpoint to resume from; use --resume auto to start at the beginning"
        )
    position = position or TrainingState()
    runtime.on_main(lambda: run.forget_metrics_after(position.step))
    return position


def _out_of_patience(position: TrainingState, train: Train) -> bool:
    return train.patience is not None and position.waited >= train.patience


def _log(
    run: RunFolder,
    runtime: Runtime,
    position: TrainingState,
    loss: float,
    learning_rate: float,
    found: dict[str, float],
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

    runtime.on_main(write)
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
    learner = Learner(prepared, model, optimizer, objective, output, data, train, 0, runtime)
    size, found = learner.most(TrainingState()), []
    rows = training_rows(len(data.train), train.batch_size, 0, 0, train.drop_last)
    try:
        with Prefetcher(learner, rows, steps) as ahead, runtime.kernels():
            for step in range(steps):
                began = time.perf_counter()
                set_rates(optimizer, step, steps, train, 0)
                _, size = learner.step(ahead, step, size, lambda text: None)
                found.append(time.perf_counter() - began)
    finally:
        runtime.accelerator.free_memory()
    return found
