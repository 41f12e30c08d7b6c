"""How far the attention of a finished run reaches, head by head, beside its initial network and uniform attention.

The distance of a head is the mean over queries of sum_k a_qk |q - k|, in steps; its entropy that of a query's weights,
in nats. Queries on padding are left out.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spt.analysis.kernels import trained_label
from spt.data.batching import collate
from spt.errors import UsageError
from spt.models.base import AttentionWeights, Context, Mixer
from spt.training.load_run import FinishedRun, check_has_rows, load_run
from spt.training.network import SequenceModel
from spt.training.objectives import evaluation_draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

    from spt.report.plotting import Palette, Plot


WITH_ATTENTION = ("dlr_attention", "spade", "transformer")
WITHIN_STEPS = (1, 8, 64)  # steps


# Means over queries: distance in steps, entropy in nats, shares of the attention at most so many steps away.
STATISTICS = ("distance", "entropy", *(f"within_{steps}" for steps in WITHIN_STEPS))
Statistics = dict[str, float]
Network = Literal["initial", "trained", "uniform"]  # uniform attention weighs all visible keys equally


class HeadDistances(NamedTuple):
    """One head of one layer."""

    layer: int  # from 1, among those with attention
    head: int  # from 1
    module: str  # the layer's name in the network
    statistics: Mapping[Network, Statistics]


class AttentionDistances(NamedTuple):
    """All heads of one run."""

    run: FinishedRun
    split: str
    rows: int
    heads: tuple[HeadDistances, ...]


def attention_distances(
    path: Path, rows: int = 64, split: Literal["train", "val", "test"] = "test"
) -> AttentionDistances:
    """For a finished run of either stage, on the first rows of a split.

    The network sees them as in evaluation, with the hidden steps of a masked objective, but one row at a time. Raises
    UsageError for a model without softmax attention of ours, otherwise as `load_run`.
    """
    run = load_run(path)
    setup = run.setup
    check_has_rows(run.path.name, setup.data, split)
    rows = min(rows, len(setup.data.splits[split]))
    trained = _Sums.of(setup.model, run, split, rows)
    if not trained:
        raise UsageError(
            f"model {run.job.resolved.recipe.model.name} has no softmax attention to show; "
            f"{', '.join(WITH_ATTENTION[:-1])} and {WITH_ATTENTION[-1]} do"
        )
    initial = _Sums.of(run.untrained(), run, split, rows)
    heads: list[HeadDistances] = []
    for layer, (module, sums) in enumerate(trained.items(), 1):
        *by_head, uniform = sums.means()
        for head, (before, after) in enumerate(zip(initial[module].means(), by_head, strict=False), 1):
            statistics: dict[Network, Statistics] = {"initial": before, "trained": after, "uniform": uniform}
            heads.append(HeadDistances(layer, head, module, statistics))
    return AttentionDistances(run, split, rows, tuple(heads))


class _Sums:
    """Sums over a layer's queries of every statistic, for each head and, last, for uniform attention."""

    def __init__(self) -> None:
        self.queries = 0
        self.values: NDArray[np.float64] = np.zeros(())  # (H + 1, len(STATISTICS)) as soon as a pass was added

    def means(self) -> list[Statistics]:
        return [dict(zip(STATISTICS, row, strict=True)) for row in (self.values / self.queries).tolist()]

    def add(self, attention: AttentionWeights, valid: Tensor) -> None:
        """`valid` (B, L) excludes queries on padding; queries that may attend to nothing are excluded too."""
        R, M = attention.visible.shape[-2:]
        device = attention.weights.device
        query = torch.arange(attention.first_query, attention.first_query + R, device=device)
        key = torch.arange(attention.first_key, attention.first_key + M, device=device)
        away = (key - query[:, None]).abs()
        counted = valid[:, attention.first_query : attention.first_query + R] & attention.visible.any(-1)[:, 0]
        near = [away <= steps for steps in WITHIN_STEPS]
        weights = attention.weights
        heads = [(weights * away).sum(-1), torch.special.entr(weights).sum(-1), *((weights * n).sum(-1) for n in near)]
        by_head = torch.stack([torch.einsum("bhr,br->h", part.double(), counted.double()) for part in heads], dim=-1)
        visible = attention.visible[:, 0].double()  # (B or 1, R, M)
        count = visible.sum(-1).clamp_min(1.0)
        even = [(visible * away).sum(-1) / count, count.log(), *((visible * n).sum(-1) / count for n in near)]
        uniform = [float((part * counted).sum()) for part in even]
        self.values = self.values + np.vstack([by_head.cpu().numpy(), uniform])
        self.queries += int(counted.sum())

    @staticmethod
    def of(model: SequenceModel, run: FinishedRun, split: str, rows: int) -> dict[str, "_Sums"]:
        """By name, every layer with softmax attention that the model calls."""
        data = run.setup.data
        draw = evaluation_draw(run.job.train, run.job.seed, run.result.best_step)
        with torch.no_grad(), recorded_attention(model) as sums:
            for row in range(rows):
                batch = collate(data.splits[split], np.array([row]), data.input, data.target)
                inputs, _ = run.setup.make_inputs(batch, draw)
                model(inputs)
                if not sums:
                    break
        return sums


@contextmanager
def recorded_attention(model: torch.nn.Module) -> Iterator[dict[str, _Sums]]:
    """Within the context, forward passes add their attention to the sums of each layer, in the model's order."""
    sums: dict[str, _Sums] = {}

    def record(name: str, module: Mixer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        x, context = (*args, *kwargs.values())[:2]
        assert isinstance(context, Context)
        for attention in module.attention_weights(x, context):
            sums.setdefault(name, _Sums()).add(attention, context.valid)

    handles = [
        module.register_forward_pre_hook(
            lambda mixer, args, kwargs, name=name: record(name, mixer, args, kwargs),
            with_kwargs=True,
        )
        for name, module in model.named_modules()
        if isinstance(module, Mixer) and type(module).attention_weights is not Mixer.attention_weights
    ]
    try:
        yield sums
    finally:
        for handle in handles:
            handle.remove()


def to_json(distances: AttentionDistances, files: Sequence[Path]) -> dict[str, Any]:
    def finite(numbers: Statistics) -> dict[str, float | None]:
        return {name: value if math.isfinite(value) else None for name, value in numbers.items()}

    return {
        **distances.run.about(),
        "split": distances.split,
        "rows": distances.rows,
        "heads": [
            {
                "layer": head.layer,
                "head": head.head,
                "module": head.module,
                **{network: finite(numbers) for network, numbers in head.statistics.items()},
            }
            for head in distances.heads
        ],
        "files": [str(path) for path in files],
    }


def attention_table(distances: AttentionDistances) -> "Table":
    """For the terminal: distance and entropy after and before training, and the trained shares of near steps."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("layer")
    table.add_column("head")
    shares = [f"% to {steps}" for steps in WITHIN_STEPS]  # short, to stay within 80 columns
    for column in ("distance", "start", "uniform", "entropy", "start", *shares):
        table.add_column(column, justify="right")
    for head in distances.heads:
        trained, initial, uniform = (head.statistics[name] for name in ("trained", "initial", "uniform"))
        table.add_row(
            str(head.layer) if head.head == 1 else "",
            str(head.head),
            *(f"{numbers['distance']:.1f}" for numbers in (trained, initial, uniform)),
            *(f"{numbers['entropy']:.2f}" for numbers in (trained, initial)),
            *(f"{100 * trained[f'within_{steps}']:.1f}" for steps in WITHIN_STEPS),
        )
    return table


def attention_figure(distances: AttentionDistances) -> "Plot":
    """One dot per head, layer by layer."""
    from spt.report.plotting import Plot

    result = distances.run.result
    caption = (
        f"Mean attention distance of every head, in steps, on {distances.rows:,} {distances.split} rows: filled "
        f"{trained_label(result)[0]}, hollow at the start; dashes: uniform attention over all that a head can see."
    )
    data = [
        {"layer": head.layer, "head": head.head}
        | {f"{network}_{name}": x for network, numbers in head.statistics.items() for name, x in numbers.items()}
        for head in distances.heads
    ]
    title = f"Attention distance of {result.recipe}, seed {result.seed}"
    return Plot("attention", title, caption, lambda palette: _draw(distances, palette), data)


def _draw(distances: AttentionDistances, palette: "Palette") -> "Figure":
    from spt.report.plotting import new_figure

    layers = distances.heads[-1].layer
    label, color = trained_label(distances.run.result)
    figure = new_figure(min(11.0, max(5.0, 1.6 + 0.9 * layers)), 3.6)
    panel = figure.subplots()
    for layer in range(1, layers + 1):
        heads = [head.statistics for head in distances.heads if head.layer == layer]
        places = layer + 0.6 * ((np.arange(len(heads)) + 0.5) / len(heads) - 0.5)
        before, after, uniform = ([head[name]["distance"] for head in heads] for name in get_args(Network))
        (dashes,) = panel.plot(
            [layer - 0.36, layer + 0.36], [uniform[0]] * 2, color=palette.faint, linestyle=(0, (4, 2)), linewidth=1.2
        )
        panel.vlines(places, before, after, color=palette.faint, linewidth=0.8, zorder=1.5)
        (hollow,) = panel.plot(places, before, "o", color=palette.faint, markerfacecolor=palette.paper, zorder=2)
        (filled,) = panel.plot(places, after, "o", color=getattr(palette, color), zorder=3)
    panel.grid(visible=False, axis="x")
    panel.set_xticks(range(1, layers + 1))
    panel.set_xlim(0.5, layers + 0.5)
    panel.set_ylim(bottom=0.0)
    panel.set_xlabel("layer")
    panel.set_ylabel("mean attention distance (steps)")
    names = ["at the start", label, "uniform"]
    figure.legend([hollow, filled, dashes], names, loc="outside upper left", ncols=3)
    return figure
