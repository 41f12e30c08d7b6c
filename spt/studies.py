"""From recipes to the cells of a study. A study is a function that returns cells; no torch here."""

from collections.abc import Sequence

from spt.plan import Cell, Job
from spt.recipe import Loaded


def compare(recipes: Sequence[Loaded], seeds: Sequence[int]) -> list[Cell]:
    """For every recipe and seed, one SPT and one scratch finetuning, seed by seed so that pairs fill up early."""
    cells = []
    for i, loaded in enumerate(recipes):
        for seed in seeds:
            spt = Job(loaded, "finetune", seed, parent=Job(loaded, "pretrain", seed))
            cells += [Cell("spt", i, spt), Cell("scratch", i, Job(loaded, "finetune", seed))]
    return cells
