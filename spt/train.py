"""The training loop, for both stages, and exact evaluation.

Read `fit` from top to bottom: everything happens in the order in which it stands there.
"""

import contextlib
import math
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from spt.batch import NOBODY, collate, pieces, share, steps_per_epoch, training_rows
from spt.checkpoint import About, Position, load_weights, prune, resume, save_state, save_weights
from spt.compute import TRAINING, peak_memory, reset_peak_memory, total_steps
from spt.errors import CheckpointError, DivergedError
from spt.losses import LOWER_IS_BETTER, default_metric, metrics, sums, weighted_sum
from spt.network import SequenceModel
from spt.objectives import Objective, Output
from spt.optim import adamw, set_rates
from spt.progress import Bar
from spt.recipe import Train
from spt.run import Ledger, Run
from spt.runtime import Runtime, StopSignals
from spt.seeding import Draw, stream
from spt.tasks.base import Split, TaskData

EVALUATION_POSITIONS = 1 << 15  # sequences times steps in memory at once when no gradient is kept


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
    """Train on data.train, select on data.val; continue where `run` has a checkpoint."""
    device, split = runtime.device, data.train
    total = plan_steps(model, data, train)
    every = train.evaluate_every or steps_per_epoch(len(split), train.batch_size)
    metric = selection_metric(train, output)

    model.encoder.hidden.requires_grad_(objective.hides)  # data parallelism cannot wait for a gradient that never comes
    optimizer = adamw(model.to(device), train, device)
    torch.manual_seed(stream(seed, "dropout", runtime.rank) & (2**63 - 1))
    prepared, optimizer = runtime.accelerator.prepare(model, optimizer)
    try:
        position = _continue(run, runtime, say)
        stepper = training_rows(len(split), train.batch_size, seed, position.step)
        reset_peak_memory(device)
        clock, saved = time.perf_counter(), time.monotonic()
        already = position.ledger.examples
        with (
            Bar(label, total, position.step, quiet=runtime.settings.quiet or not runtime.main) as bar,
            StopSignals() as signals,
        ):
            while position.step < total and not _out_of_patience(position, train):
                epoch, rows = next(stepper)
                set_rates(optimizer, position.step, total, train)
                draw = Draw(seed, "corruption", epoch)
                done = _step(prepared, model, optimizer, objective, output, data, rows, draw, train, runtime)
                if not done.finite:
                    raise _diverged("the loss or its gradient", position.step + 1, position)
                now = time.perf_counter()
                position = position.after(done.spent(now - clock, runtime.world), done.loss, done.weight)
                clock = now

                if position.step % every == 0 or position.step == total:
                    found, _ = evaluate(prepared, objective, output, data.val, data, runtime, train.precision)
                    if not math.isfinite(found["loss"]):
                        raise _diverged("the validation loss", position.step, position)
                    improved = better(found, position.best, metric)
                    loss = position.training_loss
                    position = position.evaluated(found, improved)
                    if improved and runtime.main:
                        folder = run.checkpoints / f"best-{position.step:08d}"
                        save_weights(folder, model, about(position.step), split.fingerprints)
                        prune(run, position)
                    _log(run, runtime, position, loss, optimizer.param_groups[0]["lr"], found)
                    bar.note(f"train loss {loss:.4g}  val {metric} {found[metric]:.4g}")
                bar.update(position.step, position.ledger.examples - already)
                if signals.received is not None:
                    save_state(run, runtime, position.with_peak(peak_memory(device)))
                    raise signals.error(position.step)
                if time.monotonic() - saved >= runtime.settings.save_every and position.step < total:
                    save_state(run, runtime, position.with_peak(peak_memory(device)))
                    saved = time.monotonic()
        position = position.with_peak(peak_memory(device))
        rest = time.perf_counter() - clock  # of the last evaluation
        position = position.after(Ledger(seconds=rest, device_seconds=rest * runtime.world))
    finally:
        runtime.accelerator.free_memory()
    load_weights(run.checkpoints / f"best-{position.best_step:08d}", model)
    return Fitted(position, "patience" if position.step < total else "budget", metric)


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
    flops: float
    finite: bool

    def spent(self, seconds: float, world: int) -> Ledger:
        return Ledger(
            steps=1,
            examples=self.examples,
            positions=self.positions,
            flops=self.flops,
            seconds=seconds,
            device_seconds=seconds * world,
        )


def _step(
    prepared: nn.Module,
    model: SequenceModel,
    optimizer: Any,
    objective: Objective,
    output: Output,
    data: TaskData,
    rows: NDArray[np.int64],
    draw: Draw,
    train: Train,
    runtime: Runtime,
) -> _Done:
    """Forward, backward, clip, update on one global batch; no update when something is not finite."""
    parts = pieces(share(rows, runtime.rank, runtime.world), runtime.settings.micro_batch_size or len(rows))
    posed = [objective.pose(collate(data.train, part, data.input, data.target), draw) for part in parts]
    # The loss is the weighted mean over the global batch, so the weights of all its parts are summed up first.
    (weight,) = runtime.total([sum(float(targets.weight.sum()) for _, targets in posed)])
    prepared.train()
    loss_sum = torch.zeros((), device=runtime.device)
    for i, question in enumerate(posed):
        inputs, targets = runtime.send(question)
        waits = i < len(posed) - 1  # gradients are exchanged with the last part only
        with runtime.accelerator.no_sync(prepared) if waits else contextlib.nullcontext():
            with runtime.autocast(train.precision):
                logits = prepared(inputs)
            loss = weighted_sum(output, logits, targets)
            # Data parallelism averages over processes what here is a part of a sum.
            runtime.accelerator.backward(loss * (runtime.world / max(weight, 1.0)))
        loss_sum += loss.detach()
    (loss_total,) = runtime.total([float(loss_sum)])
    norm = runtime.accelerator.clip_grad_norm_(prepared.parameters(), train.max_grad_norm or math.inf)
    finite = math.isfinite(loss_total) and (norm is None or math.isfinite(float(norm)))
    if finite:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    # Padding is computed too: the cost is that of the longest row of the global batch, however it was cut.
    lengths = data.train.lengths[rows]
    flops = TRAINING * len(rows) * model.flops(int(lengths.max()))
    return _Done(loss_total, weight, len(rows), int(lengths.sum()), flops, finite)


def plan_steps(model: SequenceModel, data: TaskData, train: Train) -> int:
    """Optimiser steps of a stage; a FLOP budget is converted at the mean length."""
    mean = max(1, round(float(data.train.lengths.mean())))
    return total_steps(train, len(data.train), model.flops(mean))


def selection_metric(train: Train, output: Output) -> str:
    return default_metric(output) if train.select == "auto" else train.select


def better(found: dict[str, float], best: dict[str, float], metric: str) -> bool:
    """By the metric; ties by the loss. Anything beats nothing."""
    sign = 1.0 if LOWER_IS_BETTER[metric] else -1.0
    return not best or (sign * found[metric], found["loss"]) < (sign * best[metric], best["loss"])


class Predictions(NamedTuple):
    """The answer to every example of a split, in the split's order."""

    values: NDArray[Any]  # (n,) classes or (n, S) reals
    margin: NDArray[np.float64] | None  # (n,) score of the best class minus that of the second


@torch.no_grad()
def evaluate(
    model: nn.Module,
    objective: Objective,
    output: Output,
    split: Split,
    data: TaskData,
    runtime: Runtime,
    precision: str,
    *,
    predict: bool = False,
) -> tuple[dict[str, float], Predictions | None]:
    """Exact metrics over all rows: gathered by example, whatever the batches and processes were. Masks are fixed."""
    model.eval()
    size = max(1, EVALUATION_POSITIONS // int(split.lengths.max()))
    draw = Draw(0, "evaluation", 0)
    rows = np.argsort(split.lengths, kind="stable")  # neighbours of like length: little padding
    gathered: list[dict[str, Tensor]] = []
    for group in pieces(rows, size * runtime.world):
        part = share(group, runtime.rank, runtime.world)
        batch = collate(split, part, data.input, data.target)
        inputs, targets = runtime.send(objective.pose(batch, draw))
        with runtime.autocast(precision):
            logits = model(inputs)
        found = sums(output, logits, targets) | {"index": batch.rows}
        if predict:
            found["logits"] = logits.float()
        gathered.append({name: runtime.gather(tensor).cpu() for name, tensor in found.items()})
    whole = {name: torch.cat([found[name] for found in gathered]) for name in gathered[0]}
    order = torch.argsort(whole["index"], stable=True)
    whole = {name: tensor[order] for name, tensor in whole.items()}
    kept = whole["index"] != NOBODY
    whole = {name: tensor[kept] for name, tensor in whole.items()}
    assert torch.equal(whole.pop("index"), torch.arange(len(split))), "every example is counted once"
    logits = whole.pop("logits", torch.empty(0))
    scores = metrics(output, {name: tensor.sum(0) for name, tensor in whole.items()})
    return scores, _predictions(output, logits) if predict else None


def _predictions(output: Output, logits: Tensor) -> Predictions:
    if output.loss != "cross_entropy":
        return Predictions(logits.numpy(), None)
    best = logits.topk(2, dim=-1).values.double()
    # argmax, as in the accuracy: on a tie, topk may name the other class.
    return Predictions(logits.argmax(-1).numpy(), (best[:, 0] - best[:, 1]).numpy())


def _continue(run: Run, runtime: Runtime, say: Callable[[str], None]) -> Position:
    """Where to start: after the newest usable checkpoint, or at the beginning."""
    mode = runtime.settings.resume
    position = resume(run, runtime, say) if mode != "never" else None
    if position is None and mode == "must":
        raise CheckpointError(
            f"{run.path} has no checkpoint to resume from; use --resume auto to start at the beginning"
        )
    position = position or Position()
    if runtime.main:
        run.forget_metrics_after(position.step)
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
    if runtime.main:
        run.log("train", position.step, **training)
        run.log("val", position.step, **found)
    runtime.track("train", position.step, training)
    runtime.track("val", position.step, found)
