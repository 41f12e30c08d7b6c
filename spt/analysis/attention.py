"""How far the attention of a finished run looks, head by head, against its initial network and uniform attention.

The distance of a head is the mean over queries of sum_k a_qk |q - k|, in steps; its entropy that of a query's weights,
in nats. Queries on padding are left out.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spt.data.batching import collate
from spt.errors import UsageError
from spt.models.base import AttentionWeights, Context, Mixer
from spt.training.load_run import FinishedRun, load_run
from spt.training.network import SequenceModel
from spt.training.objectives import evaluation_draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

    from spt.report.plotting import Palette, Plot


WITH_ATTENTION = ("dlr_attention", "spade", "transformer")
WITHIN = (1, 8, 64)  # steps


class HeadStatistics(NamedTuple):
    """Means over queries."""

    distance: float  # steps
    entropy: float  # nats
    within: tuple[float, ...]  # share of the attention at most WITHIN steps away

    def told(self) -> dict[str, float]:
        shares = {f"within_{steps}": share for steps, share in zip(WITHIN, self.within, strict=True)}
        return {"distance": self.distance, "entropy": self.entropy, **shares}


class HeadDistances(NamedTuple):
    """One head of one layer, and what it would be if it looked at everything it may look at alike."""

    layer: int  # from 1, among those that attend
    head: int  # from 1
    module: str  # of the layer, in the network
    initial: HeadStatistics
    trained: HeadStatistics
    uniform: HeadStatistics


class AttentionDistances(NamedTuple):
    """Those of one run."""

    opened: FinishedRun
    split: str
    rows: int
    heads: tuple[HeadDistances, ...]


def attention_distances(
    path: Path, rows: int = 64, split: Literal["train", "val", "test"] = "test"
) -> AttentionDistances:
    """Of a finished run of either stage, on the first rows of a split, shown as the run's evaluation shows them: one
    at a time, and with the hidden steps of a masked objective.

    Raises UsageError for a model without softmax attention of ours, else as `open_run`.
    """
    opened = load_run(path)
    bound = opened.bound
    rows = min(rows, len(bound.data.splits[split]))
    trained = _Sums.of(bound.model, opened, split, rows)
    if not trained:
        raise UsageError(
            f"model {opened.job.loaded.recipe.model.name} has no softmax attention that can be shown; "
            f"{', '.join(WITH_ATTENTION[:-1])} and {WITH_ATTENTION[-1]} have"
        )
    initial = _Sums.of(opened.untrained(), opened, split, rows)
    heads = [
        HeadDistances(layer, head + 1, module, *numbers)
        for layer, (module, sums) in enumerate(trained.items(), 1)
        for head, numbers in enumerate(
            zip(initial[module].numbers(), sums.numbers(), [sums.uniform_numbers()] * sums.heads, strict=True)
        )
    ]
    return AttentionDistances(opened, split, rows, tuple(heads))


class _Sums:
    """Of one layer, over queries: distance, entropy and the shares of each head, and of uniform attention."""

    def __init__(self) -> None:
        self.queries = 0
        self.own: NDArray[np.float64] | None = None  # (H, 2 + len(WITHIN))
        self.uniform = np.zeros(2 + len(WITHIN))

    @property
    def heads(self) -> int:
        return 0 if self.own is None else len(self.own)

    def numbers(self) -> list[HeadStatistics]:
        assert self.own is not None, "a layer that was called"
        return [_numbers(row / self.queries) for row in self.own]

    def uniform_numbers(self) -> HeadStatistics:
        return _numbers(self.uniform / self.queries)

    def add(self, seen: AttentionWeights, valid: Tensor) -> None:
        """`valid` (B, L): which queries are no padding; those that may look at nothing are left out too."""
        R, M = seen.visible.shape[-2:]
        device = seen.weights.device
        query = torch.arange(seen.first_query, seen.first_query + R, device=device)
        key = torch.arange(seen.first_key, seen.first_key + M, device=device)
        away = (key - query[:, None]).abs()
        counted = valid[:, seen.first_query : seen.first_query + R] & seen.visible.any(-1)[:, 0]  # (B, R)
        near = [(away <= steps) for steps in WITHIN]
        weights = seen.weights
        own = [(weights * away).sum(-1), torch.special.entr(weights).sum(-1), *((weights * n).sum(-1) for n in near)]
        sums = torch.stack([torch.einsum("bhr,br->h", part.double(), counted.double()) for part in own], dim=-1)
        self.own = sums.cpu().numpy() + (0.0 if self.own is None else self.own)
        visible = seen.visible[:, 0].double()  # (B or 1, R, M)
        count = visible.sum(-1).clamp_min(1.0)
        even = [(visible * away).sum(-1) / count, count.log(), *((visible * n).sum(-1) / count for n in near)]
        self.uniform += np.array([float((part * counted).sum()) for part in even])
        self.queries += int(counted.sum())

    @staticmethod
    def of(model: SequenceModel, opened: FinishedRun, split: str, rows: int) -> dict[str, "_Sums"]:
        """Every layer with softmax attention that the model calls, by its name."""
        bound, job = opened.bound, opened.job
        data = bound.data
        draw = evaluation_draw(job.train, job.seed, opened.result.best_step)
        with torch.no_grad(), recorded_attention(model) as found:
            for row in range(rows):
                batch = collate(data.splits[split], np.array([row]), data.input, data.target)
                inputs, _ = bound.objective.make_inputs(batch, draw)
                model(inputs)
                if not found:
                    break
        return found


@contextmanager
def recorded_attention(model: torch.nn.Module) -> Iterator[dict[str, _Sums]]:
    """Within, what the attention of a forward pass weighs is added up, layer by layer, in the model's order."""
    found: dict[str, _Sums] = {}

    def look(name: str, module: Mixer, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        x, context = (*given, *named.values())[:2]
        assert isinstance(context, Context)
        for seen in module.attention_weights(x, context):
            found.setdefault(name, _Sums()).add(seen, context.valid)

    handles = [
        module.register_forward_pre_hook(
            lambda mixer, given, named, name=name: look(name, mixer, given, named),
            with_kwargs=True,
        )
        for name, module in model.named_modules()
        if isinstance(module, Mixer) and type(module).attention_weights is not Mixer.attention_weights
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _numbers(row: NDArray[np.float64]) -> HeadStatistics:
    return HeadStatistics(float(row[0]), float(row[1]), tuple(float(share) for share in row[2:]))


def to_json(found: AttentionDistances, files: Sequence[Path]) -> dict[str, Any]:
    return {
        **found.opened.about(),
        "split": found.split,
        "rows": found.rows,
        "heads": [
            {
                "layer": head.layer,
                "head": head.head,
                "module": head.module,
                **{name: _finite(getattr(head, name).told()) for name in ("initial", "trained", "uniform")},
            }
            for head in found.heads
        ],
        "files": [str(path) for path in files],
    }


def attention_table(found: AttentionDistances) -> "Table":
    """For the terminal: distance and entropy after and before, and the trained heads' shares of near steps."""
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("layer")
    shown.add_column("head")
    shares = [f"% to {steps}" for steps in WITHIN]  # the table keeps within 80 columns
    for column in ("distance", "start", "uniform", "entropy", "start", *shares):
        shown.add_column(column, justify="right")
    for head in found.heads:
        of = (head.trained, head.initial, head.uniform)
        shown.add_row(
            str(head.layer) if head.head == 1 else "",
            str(head.head),
            *(f"{numbers.distance:.1f}" for numbers in of),
            *(f"{numbers.entropy:.2f}" for numbers in of[:2]),
            *(f"{100 * share:.1f}" for share in head.trained.within),
        )
    return shown


def attention_figure(found: AttentionDistances) -> "Plot":
    """A dot a head, layer by layer."""
    from spt.report.plotting import Plot

    result = found.opened.result
    caption = (
        f"Mean attention distance of every head, in steps, on {found.rows:,} {found.split} rows: filled "
        f"{_last(found)}, hollow at the start; the dashes are uniform attention over what a head may look at."
    )
    data = [
        {
            "layer": head.layer,
            "head": head.head,
            **{
                f"{network}_{name}": value
                for network in ("initial", "trained", "uniform")
                for name, value in getattr(head, network).told().items()
            },
        }
        for head in found.heads
    ]
    title = f"Attention distance of {result.recipe}, seed {result.seed}"
    return Plot("attention", title, caption, lambda palette: _draw(found, palette), data)


def _last(found: AttentionDistances) -> str:
    result = found.opened.result
    return "after pretraining" if result.stage == "pretrain" else "after finetuning" if result.parent else "trained"


def _draw(found: AttentionDistances, palette: "Palette") -> "Figure":
    from spt.report.plotting import new_figure

    result, layers = found.opened.result, found.heads[-1].layer
    color = palette.pretrain if result.stage == "pretrain" else palette.spt if result.parent else palette.scratch
    made = new_figure(min(11.0, max(5.0, 1.6 + 0.9 * layers)), 3.6)
    panel = made.subplots()
    for layer in range(1, layers + 1):
        heads = [head for head in found.heads if head.layer == layer]
        places = layer + 0.6 * ((np.arange(len(heads)) + 0.5) / len(heads) - 0.5)
        before = [head.initial.distance for head in heads]
        after = [head.trained.distance for head in heads]
        (dashes,) = panel.plot(
            [layer - 0.36, layer + 0.36],
            [heads[0].uniform.distance] * 2,
            color=palette.faint,
            linestyle=(0, (4, 2)),
            linewidth=1.2,
        )
        panel.vlines(places, before, after, color=palette.faint, linewidth=0.8, zorder=1.5)
        (hollow,) = panel.plot(places, before, "o", color=palette.faint, markerfacecolor=palette.paper, zorder=2)
        (filled,) = panel.plot(places, after, "o", color=color, zorder=3)
    panel.grid(visible=False, axis="x")
    panel.set_xticks(range(1, layers + 1))
    panel.set_xlim(0.5, layers + 0.5)
    panel.set_ylim(bottom=0.0)
    panel.set_xlabel("layer")
    panel.set_ylabel("mean attention distance (steps)")
    names = ["at the start", _last(found), "uniform"]
    made.legend([hollow, filled, dashes], names, loc="outside upper left", ncols=3)
    return made


def _finite(numbers: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}
