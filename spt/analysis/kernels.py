"""The convolution kernels that a finished run has learned, against those that it started from (SPT paper, Figure 4).

Of every layer that convolves: at each lag the largest |K| of all channels, in the layer's own units and without its
skip weight. A lag is a number of steps, back or, two-sided, ahead; of both directions the larger value is shown.
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
from spt.training.checkpoint import load_pretrained
from spt.training.load_run import FinishedRun, load_run
from spt.training.stage import architecture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table

    from spt.report.plotting import Palette, Plot


Network = Literal["initial", "pretrained", "trained"]
NETWORKS: tuple[Network, ...] = ("initial", "pretrained", "trained")
WITH_KERNELS = ("dlr", "dss", "lru", "mega", "s4", "s4d", "s5", "sgconv", "spade")
REACHES = (0.1, 0.01)  # of the largest value
POINTS = 1024  # of a curve; where there are more lags, a point is the largest of several
LINES = 32  # for rows of pixels in one panel


class KernelCurve(NamedTuple):
    """The largest |K| of all channels, by lag."""

    before: NDArray[np.float64]  # (L,), of the step so many before
    after: NDArray[np.float64] | None  # (L,), of the step so many after; None: causal

    @property
    def largest(self) -> NDArray[np.float64]:
        return self.before if self.after is None else np.maximum(self.before, self.after)


class LayerKernels(NamedTuple):
    """One layer that convolves, before and after training."""

    number: int  # from 1, among those that convolve
    module: str  # its name in the backbone
    curves: Mapping[Network, KernelCurve]


class RunKernels(NamedTuple):
    """Those of one run."""

    opened: FinishedRun
    lags: int
    layers: tuple[LayerKernels, ...]
    notes: tuple[str, ...]

    @property
    def networks(self) -> tuple[Network, ...]:
        return tuple(name for name in NETWORKS if name in self.layers[0].curves)


def layer_kernels(path: Path, lags: int | None = None) -> RunKernels:
    """Of a finished run of either stage, for its first `lags` lags (default: all of its task's longest sequence).

    The initial ones are of the run's own seed; a run that started from a pretraining run beside it has that one's too.
    Raises UsageError for a model that does not convolve, else as `open_run`.
    """
    opened = load_run(path)
    bound = opened.bound
    length = bound.data.length
    if lags is not None and not 1 <= lags <= length:
        raise UsageError(f"--lags {lags}: this run's sequences have 1 to {length:,} lags")
    lags = lags or length
    trained = curves(bound.model.backbone, lags)
    if not trained:
        raise UsageError(
            f"model {opened.job.loaded.recipe.model.name} has no convolution kernel; {', '.join(WITH_KERNELS[:-1])} "
            f"and {WITH_KERNELS[-1]} have, and so have layers of your own that state theirs"
        )
    model = opened.untrained()
    found: dict[Network, dict[str, KernelCurve]] = {"initial": curves(model.backbone, lags)}
    notes: tuple[str, ...] = ()
    if opened.result.parent is not None:
        try:
            load_pretrained(_parent(opened), model, architecture(opened.job), bound.data.input)
            found["pretrained"] = curves(model.backbone, lags)
        except CheckpointError as error:
            notes = (f"the kernel after pretraining is not shown: {error}",)
    found["trained"] = trained
    layers = (
        LayerKernels(number, module, {network: of[module] for network, of in found.items()})
        for number, module in enumerate(trained, 1)
    )
    return RunKernels(opened, lags, tuple(layers), notes)


def _parent(opened: FinishedRun) -> Path:
    """The weights of the pretraining run that this one started from, if it lies beside."""
    run = RunFolder(opened.path.parent, f"pretrain-{opened.result.parent}")
    if not run.path.is_dir():
        raise CheckpointError(f"{run.name} is not beside {opened.path.name}")
    return run.checkpoints / "best"


@torch.no_grad()
def curves(backbone: nn.Module, length: int) -> dict[str, KernelCurve]:
    """Of every layer that convolves, by its name in the backbone; those within such a layer are its own affair."""
    found: dict[str, KernelCurve] = {}
    for name, module in backbone.named_modules():
        if not isinstance(module, Mixer) or any(name.startswith(f"{outer}.") for outer in found):
            continue
        pieces = [piece.abs().amax(dim=1).double().cpu().numpy() for piece in module.convolution_kernel(length)]
        if not pieces:
            continue
        peaks = np.concatenate(pieces, axis=1)[:, :length]
        peaks = np.pad(peaks, ((0, 0), (0, length - peaks.shape[1])))  # a kernel may be shorter than a sequence
        found[name] = KernelCurve(peaks[0], peaks[1] if len(peaks) > 1 else None)
    return found


def summary(curve: KernelCurve) -> dict[str, Any]:
    """The largest value, its lag, and the furthest lags with more than a tenth and a hundredth of it."""
    values = curve.largest
    if not np.isfinite(values).all():
        return {"peak": None, "peak_lag": None, "reach_10_percent": None, "reach_1_percent": None}
    peak = float(values.max())
    tenth, hundredth = (int(np.flatnonzero(values > share * peak).max(initial=0)) for share in REACHES)
    return {
        "peak": peak,
        "peak_lag": int(values.argmax()),
        "reach_10_percent": tenth,
        "reach_1_percent": hundredth,
    }


def to_json(found: RunKernels, files: Sequence[Path]) -> dict[str, Any]:
    return {
        **found.opened.about(),
        "lags": found.lags,
        "row_width": found.opened.bound.data.row_width,
        "two_sided": found.layers[0].curves["trained"].after is not None,
        "layers": [
            {
                "layer": layer.number,
                "module": layer.module,
                **{name: summary(curve) for name, curve in layer.curves.items()},
            }
            for layer in found.layers
        ],
        "notes": list(found.notes),
        "files": [str(path) for path in files],
    }


def kernel_table(found: RunKernels) -> "Table":
    """For the terminal."""
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("layer", "kernel"):
        shown.add_column(column)
    for column in ("largest |K|", "at lag", "over 10 % to lag", "over 1 % to lag"):
        shown.add_column(column, justify="right")
    names = _names(found)
    for layer in found.layers:
        for network, curve in layer.curves.items():
            told = summary(curve)
            if told["peak"] is None:
                cells = ["not finite", "", "", ""]
            else:
                lags = (told[name] for name in ("peak_lag", "reach_10_percent", "reach_1_percent"))
                cells = [f"{told['peak']:.4g}", *(f"{lag:,}" for lag in lags)]
            shown.add_row(str(layer.number) if network == "initial" else "", names[network], *cells)
    return shown


def kernel_figure(found: RunKernels, log: bool = False) -> "Plot":
    """One panel a layer."""
    from spt.report.plotting import Plot

    result, width, spacing = found.opened.result, found.opened.bound.data.row_width, _spacing(found)
    names = _names(found)
    sides = "" if found.layers[0].curves["trained"].after is None else " and both directions"
    bins = -(-found.lags // POINTS)
    notes = [
        f"The largest |K| of all channels{sides} at each lag, layer by layer; {', '.join(names.values())}",
        *([f"each point is the largest of {bins} lags"] if bins > 1 else []),
        *([f"vertical lines stand every {spacing} lags, a row of pixels being {width}"] if spacing else []),
    ]
    title = f"Convolution kernels of {result.recipe}, seed {result.seed}"
    return Plot("kernels", title, "; ".join(notes) + ".", lambda palette: _draw(found, palette, log), _rows(found))


def _rows(found: RunKernels) -> list[dict[str, Any]]:
    """Every lag of every layer, to float32's seven digits; of a two-sided kernel both directions apart, too."""
    rows: list[dict[str, Any]] = []
    for layer in found.layers:
        columns: dict[str, NDArray[np.float64]] = {}
        for network, curve in layer.curves.items():
            columns[network] = curve.largest
            if curve.after is not None:
                columns |= {f"{network}_before": curve.before, f"{network}_after": curve.after}
        cells = zip(*(column.tolist() for column in columns.values()), strict=True)
        for lag, values in enumerate(cells):
            told = (float(f"{value:.7g}") for value in values)
            rows.append({"layer": layer.number, "lag": lag, **dict(zip(columns, told, strict=True))})
    return rows


def _names(found: RunKernels) -> dict[Network, str]:
    result = found.opened.result
    last = "after pretraining" if result.stage == "pretrain" else "after finetuning" if result.parent else "trained"
    names: dict[Network, str] = {"initial": "at the start", "pretrained": "after pretraining", "trained": last}
    return {network: names[network] for network in found.networks}


def _draw(found: RunKernels, palette: "Palette", log: bool) -> "Figure":
    from spt.report.plotting import new_figure

    count = len(found.layers)
    columns = 2 if count == 4 else min(3, count)
    rows = -(-count // columns)
    made = new_figure(max(5.0, 3.1 * columns), 0.7 + 2.1 * rows)
    panels = made.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    result = found.opened.result
    last = palette.pretrain if result.stage == "pretrain" else palette.spt if result.parent else palette.scratch
    looks: dict[Network, dict[str, Any]] = {
        "initial": {"color": palette.faint, "linestyle": (0, (1.2, 1.2)), "linewidth": 1.3, "zorder": 2},
        "pretrained": {"color": palette.pretrain, "linestyle": (0, (4, 1.5)), "linewidth": 1.2, "zorder": 2.5},
        "trained": {"color": last, "linestyle": "-", "linewidth": 1.2, "zorder": 3},
    }
    names, spacing, top = _names(found), _spacing(found), 0.0
    for layer, panel in zip(found.layers, panels, strict=False):
        panel.set_title(f"layer {layer.number}")
        for network, curve in layer.curves.items():
            lags, values = _thinned(curve.largest)
            top = max(top, float(np.nanmax(np.where(np.isfinite(values), values, 0.0))))
            panel.plot(lags, np.where(values > 0, values, np.nan) if log else values, **looks[network])
        _lag_axis(panel, found, palette)
    for panel in panels[count:]:
        panel.set_visible(False)
    for number in range(count):
        if number + columns >= count:  # nothing stands below it
            panels[number].tick_params(labelbottom=True)
            panels[number].set_xlabel("lag (steps)" if spacing is None else f"lag (steps), a line every {spacing}")
        if number % columns == 0:
            panels[number].set_ylabel("largest |K|")
    if log:
        panels[0].set_yscale("log")
    else:
        panels[0].set_ylim(0.0, 1.05 * top or 1.0)
    handles = [panels[0].lines[number] for number in range(len(names))]
    made.legend(handles, list(names.values()), loc="outside upper left", ncols=len(names))
    return made


def _thinned(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Lags and values of at most POINTS points: of neighbouring lags the largest."""
    size = -(-len(values) // POINTS)
    padded = np.pad(values, (0, -len(values) % size), constant_values=0.0)
    return np.arange(0, len(values), size, dtype=np.float64), padded.reshape(-1, size).max(axis=1)


def _lag_axis(panel: "Axes", found: RunKernels, palette: "Palette") -> None:
    width, spacing = found.opened.bound.data.row_width, _spacing(found)
    panel.set_xlim(0, found.lags)
    if width is None or spacing is None:
        return
    panel.grid(visible=False, axis="x")
    for lag in range(spacing, found.lags + 1, spacing):
        panel.axvline(lag, color=palette.grid, linewidth=0.8, zorder=0.5)
    labelled = width * 2 ** max(0, math.ceil(math.log2(found.lags / width / 5)))
    panel.set_xticks(range(0, found.lags + 1, labelled))


def _spacing(found: RunKernels) -> int | None:
    """Lags between vertical lines: a row of pixels, or where that were too many lines several; None: no pictures."""
    width = found.opened.bound.data.row_width
    if width is None or width >= found.lags:
        return None
    return width * 2 ** max(0, math.ceil(math.log2(found.lags / width / LINES)))
