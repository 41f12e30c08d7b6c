"""The training loop, for both stages.

Read `fit` from top to bottom: everything happens in the order in which it stands there.
"""

import copy
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import nn

from spt.config.budget import steps_per_epoch
from spt.config.recipe import Train
from spt.data.batching import rows_by_kind, training_rows
from spt.errors import CheckpointError, DivergedError
from spt.runs.folder import RunFolder, TrainingEnd
from spt.runs.result import Ledger, Stop
from spt.runtime.distributed import Runtime, mark_shared
from spt.runtime.memory import peak_memory, reset_peak_memory
from spt.runtime.progress import Bar
from spt.runtime.signals import StopSignals, stop_error
from spt.tasks.base import Split
from spt.training.budget import plan_steps
from spt.training.build import StageSetup
from spt.training.checkpoint import CheckpointMeta, TrainingState, load_weights, prune, resume, save_state, save_weights
from spt.training.evaluate import evaluate, is_better, selection_metric
from spt.training.metrics import NothingScored, default_metric
from spt.training.objectives import evaluation_draw
from spt.training.optimizer import adamw, reduces_rate, set_rates
from spt.training.step import Learner, Prefetcher, StepResult

logger = logging.getLogger(__name__)


class FitResult(NamedTuple):
    """A finished training; the model holds the selected weights."""

    state: TrainingState
    stop: Stop
    selected_by: str  # the validation metric


def fit(
    setup: StageSetup, run: RunFolder, runtime: Runtime, meta: Callable[[int], CheckpointMeta], label: str
) -> FitResult:
    """Train on the training split, select on validation; continue where `run` has a checkpoint. All processes run
    this. `meta(step)` describes the weights of a step."""
    model, data, train, seed = setup.model, setup.data, setup.train, setup.job.seed
    device, split, settings = runtime.device, data.train, runtime.settings
    total = plan_steps(setup)
    every = train.evaluate_every or steps_per_epoch(len(split), train.batch_size, train.drop_last)
    metric = selection_metric(train, setup.output)
    asked = {metric, default_metric(setup.output)}

    model.hides_steps(setup.hides)
    trained = copy.deepcopy(model) if runtime.shards else model  # sharding takes a model apart for good
    trained.to(device).backbone.recompute = settings.recompute
    if settings.compile:
        runtime.compile(trained.backbone)
    prepared, optimizer = runtime.prepare(trained, adamw(trained, train, device), train.max_grad_norm)
    learner = Learner(setup, prepared, optimizer, runtime)
    try:
        state = _continue(run, runtime)
        size = learner.find_micro_batch(state, total)
        if size < learner.largest_micro_batch(state):
            state = state.model_copy(update={"micro_batch": size})
        kinds = rows_by_kind(split, data.target) if train.sampling == "balanced" else None
        rows = training_rows(len(split), train.batch_size, seed, state.step, train.drop_last, kinds)
        reset_peak_memory(device)
        last, timed = runtime.on_main(lambda: _last_step(run, train, total))
        limit = (train.max_hours or 0.0) * 3600 if timed else math.inf
        clock, saved = time.perf_counter(), time.monotonic()
        already, unread = state.ledger.examples, deque[StepResult]()
        with (
            StopSignals(alone=runtime.world == 1) as signals,
            Prefetcher(learner, rows, total - state.step) as prefetcher,
            Bar(
                label,
                total,
                state.step,
                quiet=settings.quiet or not runtime.main,
                most=limit - state.ledger.seconds,
            ) as bar,
        ):
            while state.step < last and not _out_of_patience(state, train):
                set_rates(optimizer, state.step, total, train, state.reductions)
                result, micro_batch = learner.step(prefetcher, state.step, size)
                unread.append(result)
                now = time.perf_counter()
                state = state.after(result.spent(now - clock, runtime.world))
                if micro_batch < size:  # a resumed run need not find out again
                    size, state = micro_batch, state.model_copy(update={"micro_batch": micro_batch})
                clock = now
                evaluates = state.step % every == 0 or state.step == last
                state = _read(unread, state, later=1 if learner.reads_later and not evaluates else 0)

                if evaluates:
                    draw = evaluation_draw(train, seed, state.step)
                    try:
                        scores, _ = evaluate(prepared, setup, data.val, runtime, draw, at_once=size, asked=asked)
                    except NothingScored:  # a draw may hide nothing of a small split; the first was seen to hide some
                        if train.validation_masks == "fixed":
                            raise
                        draw = evaluation_draw(train, seed, 0)
                        scores, _ = evaluate(prepared, setup, data.val, runtime, draw, at_once=size, asked=asked)
                    if not math.isfinite(scores["loss"]):
                        raise mark_shared(_diverged("the validation loss", state.step, state))
                    improved = is_better(scores, state.best, metric)
                    training = state.training_scores
                    state = state.evaluated(scores, improved)
                    if reduces_rate(state.waited, train):
                        state = state.model_copy(update={"reductions": state.reductions + 1})
                    if improved:
                        _keep_best(run, runtime, prepared, state, meta(state.step), split)
                    _log(run, runtime, state, training, optimizer.param_groups[0]["lr"], scores)
                    bar.note(f"train loss {training['loss']:.4g}  val {metric} {scores[metric]:.4g}")
                bar.update(state.step, state.ledger.examples - already)
                # All processes stop, or save, after the same step: process 0's clock, and anybody's signal, count.
                late = runtime.main and time.monotonic() - saved >= settings.save_every
                over = runtime.main and state.ledger.seconds >= limit
                stop, due, up = runtime.highest([float(signals.received), float(late), float(over)])
                if up or stop or due:  # nothing is written before the steps until now are known to be right
                    state = _read(unread, state)
                if up and state.step + 1 < last and not _out_of_patience(state, train):
                    last, limit = state.step + 1, math.inf  # so that it is evaluated as any last step
                    runtime.on_main(partial(_record_time_limit, run, train, last, total))
                if stop or (due and state.step < last):
                    now = time.perf_counter()  # an evaluation before this is not made again
                    state = state.after(Ledger(seconds=now - clock, device_seconds=(now - clock) * runtime.world))
                    clock = now
                    save_state(run, runtime, state.with_peak(peak_memory(device)))
                    saved = time.monotonic()
                if stop:
                    where = f" after step {state.step:,}; the same command continues from there"
                    raise mark_shared(stop_error(int(stop), where))
        state = state.with_peak(peak_memory(device))
        rest = time.perf_counter() - clock  # of the last evaluation
        state = state.after(Ledger(seconds=rest, device_seconds=rest * runtime.world))
    finally:
        runtime.accelerator.free_memory()
    # Together: process 0 goes on to tidy this folder up.
    runtime.all_ranks(lambda: load_weights(run.checkpoints / f"best-{state.best_step:08d}", model))
    stop_reason: Stop = "budget" if state.step >= total else "time" if state.step >= last else "patience"
    if train.max_hours is not None:
        runtime.on_main(lambda: run.record_end(TrainingEnd(state.step, stop_reason)))
    return FitResult(state, stop_reason, metric)


def _keep_best(
    run: RunFolder, runtime: Runtime, prepared: nn.Module, state: TrainingState, meta: CheckpointMeta, split: Split
) -> None:
    tensors = runtime.weights(prepared)

    def write() -> None:
        run.check()
        save_weights(run.checkpoints / f"best-{state.step:08d}", tensors, meta, split.seen)
        prune(run, state)

    runtime.on_main(write)


def _read(unread: deque[StepResult], state: TrainingState, later: int = 0) -> TrainingState:
    """With the losses of these steps, but for the last ones that may be read `later`. Raises DivergedError."""
    while len(unread) > later:
        result = unread.popleft()
        outcome = result.outcome()
        if not outcome.finite:
            raise mark_shared(_diverged("the loss or its gradient", result.step, state))
        state = state.with_sums(**result.since(outcome))
    return state


def _diverged(what: str, step: int, state: TrainingState) -> DivergedError:
    kept = f"; the weights of step {state.best_step:,} are kept" if state.best_step else ""
    return DivergedError(
        f"{what} is not finite at step {step:,}; a smaller learning_rate, more warm-up or clipping may help{kept}"
    )


def _continue(run: RunFolder, runtime: Runtime) -> TrainingState:
    """Where to start: after the newest usable checkpoint, or at the beginning."""
    mode, begun = runtime.settings.resume, any(run.checkpoints.glob("step-*"))
    state = resume(run, runtime) if mode != "never" else None
    if state is None and mode == "must" and begun:  # without any, the stage has been asked already
        raise CheckpointError(
            f"{run.path} has no checkpoint to resume from; use --resume auto to start at the beginning"
        )
    state = state or TrainingState()
    runtime.on_main(lambda: run.forget_metrics_after(state.step))
    return state


def _last_step(run: RunFolder, train: Train, total: int) -> tuple[int, bool]:
    """The last step, and whether the clock may yet name an earlier one: not where this run, or one that it repeats,
    has recorded how it ended. Its weights are those of that step, however fast this machine is."""
    if train.max_hours is None:
        return total, False
    end = run.recorded_end()
    if end is None:
        return total, True
    return (min(end.step, total) if end.stop == "time" else total), False


def _record_time_limit(run: RunFolder, train: Train, last: int, total: int) -> None:
    run.record_end(TrainingEnd(last, "time"))
    logger.info(
        f"{run.name}: {train.max_hours:g} hours of training are over, so step {last:,} of {total:,} is the last"
    )


def _out_of_patience(state: TrainingState, train: Train) -> bool:
    return train.patience is not None and state.waited >= train.patience


def _log(
    run: RunFolder,
    runtime: Runtime,
    state: TrainingState,
    training_scores: dict[str, float],
    learning_rate: float,
    scores: dict[str, float],
) -> None:
    training = {
        **training_scores,
        "learning_rate": learning_rate,
        "examples": state.ledger.examples,
        "flops": state.ledger.flops,
    }

    def write() -> None:
        run.log("train", state.step, **training)
        run.log("val", state.step, **scores)

    runtime.on_main(write)
    runtime.track("train", state.step, training)
    runtime.track("val", state.step, scores)


def time_steps(setup: StageSetup, runtime: Runtime, steps: int) -> list[float]:
    """Seconds of each of this number of optimiser steps, as `fit` makes them, on the job's own batches; nothing is
    kept."""
    model, data, train = setup.model, setup.data, setup.train
    model.hides_steps(setup.hides)
    model.to(runtime.device).backbone.recompute = runtime.settings.recompute
    if runtime.settings.compile:
        runtime.compile(model.backbone)
    prepared, optimizer = runtime.prepare(model, adamw(model, train, runtime.device), train.max_grad_norm)
    learner = Learner(setup, prepared, optimizer, runtime)
    size, seconds = learner.largest_micro_batch(TrainingState()), []
    rows = training_rows(len(data.train), train.batch_size, 0, 0, train.drop_last)
    try:
        with Prefetcher(learner, rows, steps) as prefetcher, runtime.kernels(), runtime.products(train.precision):
            for step in range(steps):
                began = time.perf_counter()
                set_rates(optimizer, step, steps, train, 0)
                result, size = learner.step(prefetcher, step, size)
                result.outcome()  # which waits for the device
                seconds.append(time.perf_counter() - began)
    finally:
        runtime.accelerator.free_memory()
    return seconds
