"""Exact evaluation: every example counted once, whatever the batches and processes were; and what is better."""

import contextlib
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from spt.config.recipe import LOWER_IS_BETTER, Train
from spt.data.batching import NOBODY, by_length, collate, packed, pieces, share
from spt.data.metrics import confusion_matrix
from spt.errors import BackendError, DivergedError
from spt.models.base import sees_padding
from spt.models.longconv import cached_kernels
from spt.rng import Draw
from spt.runtime.distributed import Runtime, mark_shared
from spt.runtime.memory import free_memory, out_of_memory
from spt.runtime.prefetch import prefetched
from spt.tasks.base import Split
from spt.training.build import StageSetup
from spt.training.losses import among_all, answers
from spt.training.metrics import (
    MOST_SCORES,
    ScoredAnswers,
    Sums,
    answer_scores,
    batch_means,
    confusion_counts,
    default_metric,
    metrics,
    of_all,
    of_known,
    scores_of_steps,
    sums_of_scores,
    text_scores,
    unasked,
)
from spt.training.objectives import Inputs, Output, Targets, of_whole_split
from spt.training.recordings import of_recordings, target_parts

EVALUATION_POSITIONS = 1 << 15  # sequences times steps in memory at once when no gradient is kept


class Predictions(NamedTuple):
    """The answer to every example of a split, in the split's order; where every step has one, how right they are."""

    values: NDArray[Any] | None  # (n,) classes or (n, S) reals; None: answers of steps, which are not kept
    margin: NDArray[np.float64] | None  # (n,) score of the best class minus that of the second
    scores: dict[str, NDArray[np.float64]]  # (n,) of answers of steps: how many, and right ones or squared errors
    scored: ScoredAnswers | None = (
        None  # all scored answers; None of steps where they are too many, or of a language model
    )
    confusion: NDArray[np.int64] | None = None  # (C, C) answers by true class and by the one said, where kept
    sums: Sums | None = None  # (n, ...) what other metrics need of each example
    notes: tuple[str, ...] = ()  # what a reader must know of the scores


class PaddedRows(NamedTuple):
    """Rows that are answered at once."""

    rows: NDArray[np.int64]
    length: int  # steps to pad them to; 0: as many as the longest has


def shared_padding(setup: StageSetup) -> int | None:
    """So many rows, in the split's order, share their padding: where means are of batches, as published, and where a
    network sees padding, since its answers must not depend on what fits into memory; None: any may."""
    train = setup.train
    return train.batch_size if train.metric_average == "per_batch" or sees_padding(setup.model) else None


def batches(split: Split, positions: int, least: int, together: int | None) -> list[PaddedRows]:
    """As many rows as have at most `positions` steps, but `least`, the longest first; or, of each `together` that share
    their padding, as many as if all were as long as the split's longest."""
    rows, extents = np.arange(len(split)), split.extents
    if together is None:
        return [
            PaddedRows(part, 0)
            for part in packed(by_length(rows, extents), split.sequences * extents, positions, least)
        ]
    most = max(1, least, positions // (split.sequences * int(extents.max(initial=1))))
    return [
        PaddedRows(part, int(extents[shared].max()))
        for shared in pieces(rows, together)
        for part in pieces(shared, most)
    ]


def evaluate(
    model: nn.Module,
    setup: StageSetup,
    split: Split,
    runtime: Runtime,
    draw: Draw,
    *,
    at_once: int,
    predict: bool = False,
    asked: Collection[str] = (),
) -> tuple[dict[str, float], Predictions | None]:
    """Exact metrics of the setup's model, as Accelerate wraps it, over all rows of a split: gathered by example,
    whatever the batches and processes were. Of those that need all answers at once the ones that are `asked` for, or
    with `predict` all. Of windows whose answers are averaged, the metrics are of recordings.

    `at_once` sequences are known to fit into memory with their gradients. Where the loss is not finite, raises
    DivergedError with `predict`, and returns no other metrics without.
    """
    data, output, train = setup.data, setup.output, setup.train
    asked = {*asked, default_metric(output)} if predict else {*asked}
    world, whole_split = runtime.world, of_whole_split(output) & (of_whole_split(output) if predict else asked)
    counted = bool(whole_split) and output.per_step and output.macro  # where C x C counts say enough
    padded = bool(whole_split) and output.per_step and scores_of_steps(output, split) <= MOST_SCORES

    def answer(groups: Sequence[PaddedRows]) -> dict[str, Tensor]:
        """What metrics and predictions need of this process's rows, and which rows they are."""
        model.eval()
        # Filled in place: a small tensor kept from each batch would break up the memory that the next one needs whole.
        kept: dict[str, Tensor] = {}
        done, total = 0, sum(-(-len(group.rows) // world) for group in groups)
        with contextlib.closing(prefetched(question, groups)) as questions:
            for rows, (inputs, targets) in questions:
                shown, asked_of = runtime.send((inputs, targets))
                with runtime.autocast(train.precision):
                    logits = model(shown, asked_of.scored)
                scores = answer_scores(output, logits, asked_of)
                logits = logits.float() if padded or not output.per_step else logits.new_empty(0)  # nobody asks
                scores, logits = runtime.fetch((scores, logits))()  # the batch's only wait for the device
                totals = sums_of_scores(output, scores, targets)
                if output.per_step:  # of an example: both sequences of a pair together
                    totals = {name: tensor.unflatten(0, (sequences, -1)).sum(0) for name, tensor in totals.items()}
                entries = totals | {"index": rows}
                if not output.per_step:
                    entries["logits"] = logits
                if split.recordings is not None and not output.per_step:
                    entries |= target_parts(targets)
                if padded:
                    entries |= _padded(logits, targets, int(split.extents.max()))
                if counted:
                    confusion = kept.setdefault("confusion", torch.zeros(1, output.classes, output.classes).double())
                    confusion += confusion_counts(output, scores, targets)
                for name, tensor in entries.items():
                    if name not in kept:
                        kept[name] = torch.empty((total, *tensor.shape[1:]), dtype=tensor.dtype)
                    kept[name][done : done + len(rows)] = tensor
                done += len(rows)
        return kept

    def question(group: PaddedRows) -> tuple[Tensor, tuple[Inputs, Targets]]:
        """This process's rows of a batch, and what they are asked."""
        part = share(group.rows, runtime.rank, world)  # all processes take as many batches
        batch = collate(split, part, data.input, data.target, group.length)
        return batch.rows, runtime.pinned(setup.make_inputs(batch, draw))

    sequences, extents = split.sequences, split.extents
    positions, least = min(EVALUATION_POSITIONS, len(split) * sequences * int(extents.max())), at_once
    together = shared_padding(setup)
    while True:
        groups = batches(split, positions * world, least * world, together)
        failed = 0.0
        cache = contextlib.nullcontext() if runtime.shards else cached_kernels(model, int(extents.max()))
        try:
            with torch.no_grad(), cache:
                entries = answer(groups)
        except Exception as error:
            if not out_of_memory(error):
                raise
            if runtime.shards or all(len(group.rows) <= world for group in groups):  # no process has more than one
                raise BackendError(
                    f"there is no memory to evaluate {'a batch' if runtime.shards else 'one sequence'}; use a smaller "
                    "model or shorter sequences"
                ) from error
            failed = 1.0
        (failed,) = runtime.highest([failed])  # which rows are whose depends on how they are cut: all cut alike
        if not failed:
            break
        positions, least = max(1, positions // 2), max(1, least // 2)
        free_memory()
    whole = {name: runtime.gather(tensor).cpu() for name, tensor in entries.items()}
    counts = whole.pop("confusion", None)
    order = torch.argsort(whole["index"], stable=True)
    whole = {name: tensor[order] for name, tensor in whole.items()}
    kept = whole["index"] != NOBODY
    whole = {name: tensor[kept] for name, tensor in whole.items()}
    assert torch.equal(whole.pop("index"), torch.arange(len(split))), "every example is counted once"
    logits = whole.pop("logits", torch.empty(0))
    if split.recordings is not None and not output.per_step:
        logits, whole, _ = of_recordings(output, logits, whole, split.recordings)
    scored, confusion = None, None if counts is None else counts.sum(0).long().numpy()
    if padded:
        scored = _scored_steps(output, *(whole.pop(f"step_{name}") for name in ("logits", "truth", "known")))
    elif whole_split and not output.per_step:
        scored = _scored_rows(split.whole, logits)
        confusion = _confusion(output, scored)
    if train.metric_average == "per_batch":
        scores = batch_means(output, whole, train.batch_size)
    else:
        scores = metrics(output, {name: tensor.sum(0) for name, tensor in whole.items()})
    if not math.isfinite(scores["loss"]):  # other metrics refuse such answers
        if predict:
            raise mark_shared(
                DivergedError(
                    f"the loss on the {len(split):,} rows to be scored is not finite, though it was in validation; "
                    "extreme values in these rows, or too large weights (a smaller learning_rate, clipping), may be why"
                )
            )
        return scores, None
    if output.text:
        assert split.text_bytes is not None
        scores |= text_scores(scores["loss"], int(whole["weight"].sum()), int(split.text_bytes.sum()))
    if train.metric_average == "per_batch":  # the others are exact, and stand for themselves
        whole_split &= asked
    if predict:  # what was not asked for is told where it takes no time
        whole_split &= asked | unasked(output, 0 if scored is None else scored.logits.numel())
    found = of_all(output, whole_split, scored, confusion)
    if not predict:
        return scores | found.scores, None
    predictions = _predictions(output, logits, whole)
    return scores | found.scores, predictions._replace(
        scored=scored, confusion=confusion, sums=whole, notes=found.notes
    )


def _padded(logits: Tensor, targets: Targets, length: int) -> dict[str, Tensor]:
    """The answers of all steps, their truth and whether they are scored, as long as the longest row of the split."""
    truth = targets.values
    if targets.known is not None:
        truth = truth.float().masked_fill(~targets.known, math.nan)
    entries = {
        "step_logits": among_all(logits, targets),
        "step_truth": truth,
        "step_known": targets.weight > 0,
    }
    return {
        name: torch.cat([each, each.new_zeros(len(each), length - each.shape[1], *each.shape[2:])], dim=1)
        for name, each in entries.items()
    }


def _scored_steps(output: Output, logits: Tensor, truth: Tensor, known: Tensor) -> ScoredAnswers:
    truths = truth[known].numpy()
    rows = np.nonzero(known.numpy())[0]
    return ScoredAnswers(
        truths[:, 0] if output.loss == "cross_entropy" else truths.astype(np.float64), logits[known], rows
    )


def _scored_rows(split: Split, logits: Tensor) -> ScoredAnswers:
    truth = np.asarray(split.targets)
    return of_known(ScoredAnswers(truth, logits, np.arange(len(split))))


def _confusion(output: Output, scored: ScoredAnswers) -> NDArray[np.int64] | None:
    if not output.macro:
        return None
    return confusion_matrix(scored.truth, answers(output, scored.logits)[:, 0].numpy(), output.classes)


def _predictions(output: Output, logits: Tensor, whole: dict[str, Tensor]) -> Predictions:
    if output.per_step:
        columns = {"steps": "weight", "right": "right", "squared_error": "squared"}
        scores = {name: whole[key].numpy() for name, key in columns.items() if key in whole}
        return Predictions(None, None, {name: a if a.ndim == 1 else a.mean(1) for name, a in scores.items()})
    values = answers(output, logits)
    if output.loss != "cross_entropy":
        return Predictions(values.numpy(), None, {})
    best = logits.topk(2, dim=-1).values.double()
    # As in the accuracy: on a tie, topk may name another class.
    return Predictions(values[:, 0].numpy(), (best[:, 0] - best[:, 1]).numpy(), {})


def selection_metric(train: Train, output: Output) -> str:
    return default_metric(output) if train.select_by == "auto" else train.select_by


def is_better(scores: dict[str, float], best: dict[str, float], metric: str) -> bool:
    """By the metric; ties by the loss. Anything beats nothing, and what is no number nothing else."""

    def place(found: dict[str, float]) -> tuple[float, float]:
        value = found.get(metric, math.nan)
        value = value if LOWER_IS_BETTER[metric] else -value
        return (math.inf if math.isnan(value) else value), found["loss"]

    return not best or place(scores) < place(best)
