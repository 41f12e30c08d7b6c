"""python docs/mixing_figures.py [MODEL …]

Draws docs/figures/mixing/MODEL.png for models (all of ours): which steps an untrained block mixes. A pixel is the
size of the derivative of one step's output by one step's input, |dy_t / dx_s| over all features, for one block of
width 16 on 64 random steps: t downwards, s to the right, two-sided on the left, causal on the right, on a logarithmic
scale of three decades, from the largest value off the diagonal down. A test draws some of them again.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from matplotlib import colormaps
from numpy.typing import NDArray
from PIL import Image

from spt.checks.model_contract import tiny
from spt.config.plugins import find_plugin, listing
from spt.errors import SptError
from spt.models.base import Context
from spt.training.seeding import seeded

FOLDER = Path(__file__).resolve().parent / "figures" / "mixing"
LENGTH, WIDTH, SCALE, GAP, DECADES = 64, 16, 3, 12, 3
NUDGE = 1e-2  # of central differences: errors lie below the scale's three decades
OPTIONS = {"hf": {"architecture": "gpt_neox"}}  # what a model cannot do without


def derivatives(name: str, causal: bool) -> NDArray[np.float64] | None:
    """|dy_t / dx_s|, (LENGTH, LENGTH), of one untrained block; None where the model has no such direction."""
    try:
        block = tiny(find_plugin("models", name), causal, d_model=WIDTH, n_layers=1, **OPTIONS.get(name, {}))
    except (SptError, ValueError):
        return None
    with seeded(0, "mixing"):
        stream = torch.randn(1, LENGTH, WIDTH)
    moved = NUDGE * torch.eye(LENGTH * WIDTH).view(-1, LENGTH, WIDTH)  # one number of one step at a time
    context = Context(torch.ones(len(moved), LENGTH, dtype=torch.bool), padded=False)
    with torch.no_grad():
        slopes = (block(stream + moved, context) - block(stream - moved, context)).double() / (2 * NUDGE)
    by_input = slopes.view(LENGTH, WIDTH, LENGTH, WIDTH).square().sum(dim=(1, 3)).sqrt()
    return by_input.T.numpy()


def picture(name: str) -> Image.Image:
    panels = []
    for causal in (False, True):
        sizes = derivatives(name, causal)
        side = LENGTH * SCALE
        panel = np.zeros((side, side, 4), dtype=np.uint8)
        if sizes is not None:
            off = sizes[~np.eye(LENGTH, dtype=bool)].max() or 1.0
            decades = np.log10(np.maximum(sizes / off, 10.0**-DECADES))
            shade = np.clip(1 + decades / DECADES, 0, 1)
            pixels = (colormaps["viridis"](shade) * 255).round().astype(np.uint8)
            panel = pixels.repeat(SCALE, axis=0).repeat(SCALE, axis=1)
        panels += [panel, np.zeros((side, GAP, 4), dtype=np.uint8)]
    return Image.fromarray(np.concatenate(panels[:-1], axis=1))


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for model in sys.argv[1:] or [row.name for row in listing("models") if row.source == "spt"]:
        picture(model).quantize(64).save(FOLDER / f"{model}.png", optimize=True)
        sys.stdout.write(f"wrote {FOLDER / model}.png\n")
