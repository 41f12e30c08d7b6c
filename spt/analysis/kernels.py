"""The convolution kernels that a finished run learned, beside those it started from (SPT paper, Figure 4).

For every layer that convolves: at each lag the largest |K| over channels, in the layer's own units and without its
skip weight. A lag is a number of steps back or, in a two-sided layer, ahead; the larger of the two values is shown.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from spt.errors import CheckpointError, UsageError
from spt.models.base import Mixer
from spt.runs.folder import RunFolder
from spt.runs.result import Result
from spt.training.checkpoint import load_pretrained
from spt.training.load_run import FinishedRun, load_run
from spt.training.stage import architecture
from spt.training.transfer import selected_tensors

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table

    from spt.report.plotting import Palette, Plot


Network = Literal["initial", "pretrained", "trained"]
WITH_KERNELS = ("dlr", "dss", "h3", "hyena", "liquid_s4", "lru", "mega", "s4", "s4d", "s5", "sgconv", "spade")
REACHES = (0.1, 0.01)  # of the largest value
POINTS = 1024  # of a curve; with more lags, a point is the largest of several
LINES = 32  # for rows of pixels in one panel


class KernelCurve(NamedTuple):
    """The largest |K| over channels, by lag."""

    before: NDArray[np.float64]  # (L,), backwards
    after: NDArray[np.float64] | None  # (L,), forwards; None: causal

    @property
    def largest(self) -> NDArray[np.float64]:
        return self.before if self.after is None else np.maximum(self.before, self.after)


class LayerKernels(NamedTuple):
    """One layer that convolves, before and after training."""

    number: int  # from 1, among those that convolve
    module: str  # its name in the backbone
    curves: Mapping[Network, KernelCurve]


class RunKernels(NamedTuple):
    """All layers of one run."""

    run: FinishedRun
    lags: int
    layers: tuple[LayerKernels, ...]
    notes: tuple[str, ...]


def layer_kernels(path: Path, lags: int | None = None) -> RunKernels:
    """For a finished run of either stage, its first `lags` lags (default: all of its task's longest sequence).

    Initial kernels come from the run's own seed. Those after pretraining are included if the pretraining run is beside
    this one. Raises UsageError for a model that does not convolve, otherwise as `load_run`.
    """
    run = load_run(path)
    setup = run.setup
    length = setup.data.length
    if lags is not None and not 1 <= lags <= length:
        raise UsageError(f"--lags {lags}: this run's sequences have 1 to {length:,} lags")
    lags = lags or length
    trained = curves(setup.model.backbone, lags)
    if not trained:
        raise UsageError(
            f"model {run.job.resolved.recipe.model.name} has no convolution kernel; {', '.join(WITH_KERNELS[:-1])} "
            f"and {WITH_KERNELS[-1]} do, as do layers of your own that define convolution_kernel"
        )
    model = run.untrained()
    by_network: dict[Network, dict[str, KernelCurve]] = {"initial": curves(model.backbone, lags)}
    notes: tuple[str, ...] = ()
    if run.result.parent is not None:
        try:
            moved = selected_tensors(model, run.job.resolved.recipe.finetune.load)
            options, input = architecture(run.job), setup.data.input
            load_pretrained(_parent(run), model, options, input, moved, other_task=True)
            by_network["pretrained"] = curves(model.backbone, lags)
        except CheckpointError as error:
            notes = (f"the kernel after pretraining is not shown: {error}",)
    by_network["trained"] = trained
    layers = (
        LayerKernels(number, module, {network: by_module[module] for network, by_module in by_network.items()})
        for number, module in enumerate(trained, 1)
    )
    return RunKernels(run, lags, tuple(layers), notes)


def _parent(run: FinishedRun) -> Path:
    """The weights of the pretraining run that this one started from, if its folder is beside this one."""
    parent = RunFolder(run.path.parent, f"pretrain-{run.result.parent}")
    if not parent.path.is_dir():
        raise CheckpointError(f"{parent.name} is not beside {run.path.name}")
    return parent.checkpoints / "best"


@torch.no_grad()
def curves(backbone: nn.Module, length: int) -> dict[str, KernelCurve]:
    """By name, every layer that convolves; layers nested in such a layer belong to it."""
    by_name: dict[str, KernelCurve] = {}
    for name, module in backbone.named_modules():
        if not isinstance(module, Mixer) or any(name.startswith(f"{outer}.") for outer in by_name):
            continue
        pieces = [piece.abs().amax(dim=1).double().cpu().numpy() for piece in module.convolution_kernel(length)]
        if not pieces:
            continue
        peaks = np.concatenate(pieces, axis=1)[:, :length]
        peaks = np.pad(peaks, ((0, 0), (0, length - peaks.shape[1])))  # a kernel may be shorter than a sequence
        by_name[name] = KernelCurve(peaks[0], peaks[1] if len(peaks) > 1 else None)
    return by_name


def summary(curve: KernelCurve) -> dict[str, Any]:
    """The largest value, its lag, and the furthest lags with more than a tenth and a hundredth of it."""
    values = curve.largest
    if not np.isfinite(values).all():
        return dict.fromkeys(("peak", "peak_lag", "reach_10_percent", "reach_1_percent"))
    peak = float(values.max())
    tenth, hundredth = (int(np.flatnonzero(values > share * peak).max(initial=0)) for share in REACHES)
    lags = {"peak_lag": int(values.argmax()), "reach_10_percent": tenth, "reach_1_percent": hundredth}
    return {"peak": peak, **lags}


def to_json(kernels: RunKernels, files: Sequence[Path]) -> dict[str, Any]:
    return {
        **kernels.run.about(),
        "lags": kernels.lags,
        "row_width": kernels.run.setup.data.row_width,
        "two_sided": kernels.layers[0].curves["trained"].after is not None,
        "layers": [
            {
                "layer": layer.number,
                "module": layer.module,
                **{name: summary(curve) for name, curve in layer.curves.items()},
            }
            for layer in kernels.layers
        ],
        "notes": list(kernels.notes),
        "files": [str(path) for path in files],
    }


def kernel_table(kernels: RunKernels) -> "Table":
    """For the terminal."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("layer", "kernel"):
        table.add_column(column)
    for column in ("largest |K|", "at lag", "over 10 % to lag", "over 1 % to lag"):
        table.add_column(column, justify="right")
    names = _names(kernels)
    for layer in kernels.layers:
        for network, curve in layer.curves.items():
            numbers = summary(curve)
            if numbers["peak"] is None:
                cells = ["not finite", "", "", ""]
            else:
                lags = (numbers[name] for name in ("peak_lag", "reach_10_percent", "reach_1_percent"))
                cells = [f"{numbers['peak']:.4g}", *(f"{lag:,}" for lag in lags)]
            table.add_row(str(layer.number) if network == "initial" else "", names[network], *cells)
    return table


def kernel_figure(kernels: RunKernels, log: bool = False) -> "Plot":
    """One panel per layer."""
    from spt.report.plotting import Plot

    result, width, spacing = kernels.run.result, kernels.run.setup.data.row_width, _spacing(kernels)
    names = _names(kernels)
    sides = "" if kernels.layers[0].curves["trained"].after is None else " and both directions"
    bins = -(-kernels.lags // POINTS)
    notes = [
        f"The largest |K| over channels{sides} at each lag, layer by layer; {', '.join(names.values())}",
        *([f"each point is the largest of {bins} lags"] if bins > 1 else []),
        *([f"vertical lines every {spacing} lags (a row of pixels: {width})"] if spacing else []),
    ]
    title = f"Convolution kernels of {result.recipe}, seed {result.seed}"
    return Plot("kernels", title, "; ".join(notes) + ".", lambda palette: _draw(kernels, palette, log), _rows(kernels))


def _rows(kernels: RunKernels) -> list[dict[str, Any]]:
    """Every lag of every layer, to float32's seven digits; for a two-sided kernel also both directions separately."""
    rows: list[dict[str, Any]] = []
    for layer in kernels.layers:
        columns: dict[str, NDArray[np.float64]] = {}
        for network, curve in layer.curves.items():
            columns[network] = curve.largest
            if curve.after is not None:
                columns |= {f"{network}_before": curve.before, f"{network}_after": curve.after}
        for lag in range(kernels.lags):
            values = {name: float(f"{column[lag]:.7g}") for name, column in columns.items()}
            rows.append({"layer": layer.number, "lag": lag, **values})
    return rows


def trained_label(result: Result) -> tuple[str, str]:
    """What figures call the run's trained network, and the name of its colour in a palette."""
    if result.stage == "pretrain":
        return "after pretraining", "pretrain"
    return ("after finetuning", "spt") if result.parent else ("trained", "scratch")


def _names(kernels: RunKernels) -> dict[Network, str]:
    names: dict[Network, str] = {"initial": "at the start", "pretrained": "after pretraining"}
    names["trained"] = trained_label(kernels.run.result)[0]
    return {network: names[network] for network in kernels.layers[0].curves}


def _draw(kernels: RunKernels, palette: "Palette", log: bool) -> "Figure":
    from spt.report.plotting import new_figure

    count = len(kernels.layers)
    columns = 2 if count == 4 else min(3, count)
    rows = -(-count // columns)
    figure = new_figure(max(5.0, 3.1 * columns), 0.7 + 2.1 * rows)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    last = getattr(palette, trained_label(kernels.run.result)[1])
    styles: dict[Network, dict[str, Any]] = {
        "initial": {"color": palette.faint, "linestyle": (0, (1.2, 1.2)), "linewidth": 1.3, "zorder": 2},
        "pretrained": {"color": palette.pretrain, "linestyle": (0, (4, 1.5)), "linewidth": 1.2, "zorder": 2.5},
        "trained": {"color": last, "linestyle": "-", "linewidth": 1.2, "zorder": 3},
    }
    names, spacing, top = _names(kernels), _spacing(kernels), 0.0
    for layer, panel in zip(kernels.layers, panels, strict=False):
        panel.set_title(f"layer {layer.number}")
        for network, curve in layer.curves.items():
            lags, values = _thinned(curve.largest)
            top = max(top, float(np.nanmax(np.where(np.isfinite(values), values, 0.0))))
            panel.plot(lags, np.where(values > 0, values, np.nan) if log else values, **styles[network])
        _lag_axis(panel, kernels, palette)
    for panel in panels[count:]:
        panel.set_visible(False)
    for number in range(count):
        if number + columns >= count:  # no panel below it
            panels[number].tick_params(labelbottom=True)
            panels[number].set_xlabel("lag (steps)" if spacing is None else f"lag (steps), a line every {spacing}")
        if number % columns == 0:
            panels[number].set_ylabel("largest |K|")
    if log:
        panels[0].set_yscale("log")
    else:
        panels[0].set_ylim(0.0, 1.05 * top or 1.0)
    handles = [panels[0].lines[number] for number in range(len(names))]
    figure.legend(handles, list(names.values()), loc="outside upper left", ncols=len(names))
    return figure


def _thinned(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Lags and values of at most POINTS points: the largest of neighbouring lags."""
    size = -(-len(values) // POINTS)
    padded = np.pad(values, (0, -len(values) % size), constant_values=0.0)
    return np.arange(0, len(values), size, dtype=np.float64), padded.reshape(-1, size).max(axis=1)


def _lag_axis(panel: "Axes", kernels: RunKernels, palette: "Palette") -> None:
    width, spacing = kernels.run.setup.data.row_width, _spacing(kernels)
    panel.set_xlim(0, kernels.lags)
    if width is None or spacing is None:
        return
    panel.grid(visible=False, axis="x")
    for lag in range(spacing, kernels.lags + 1, spacing):
        panel.axvline(lag, color=palette.grid, linewidth=0.8, zorder=0.5)
    labelled = width * 2 ** max(0, math.ceil(math.log2(kernels.lags / width / 5)))
    panel.set_xticks(range(0, kernels.lags + 1, labelled))


def _spacing(kernels: RunKernels) -> int | None:
    """Lags between vertical lines: one or, to avoid too many lines, several rows of pixels; None: not a picture."""
    width = kernels.run.setup.data.row_width
    if width is None or width >= kernels.lags:
        return None
    return width * 2 ** max(0, math.ceil(math.log2(kernels.lags / width / LINES)))
