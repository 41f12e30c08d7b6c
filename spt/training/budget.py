"""What a stage's budget comes to for a network: optimiser steps, and operations of an example."""

from typing import TYPE_CHECKING

from spt.config.budget import expected_longest, total_steps
from spt.models.ops.counts import Counts

if TYPE_CHECKING:
    from spt.training.build import StageSetup


def plan_steps(setup: "StageSetup") -> int:
    """Optimiser steps of a stage; a FLOP budget is converted at the mean length."""
    return total_steps(setup.train, len(setup.data.train), mean_flops(setup).total)


def mean_flops(setup: "StageSetup") -> Counts:
    """Operations an example of a full batch, padded to its longest as batches are, with as many steps scored as can be
    expected."""
    split, size = setup.data.train, setup.train.batch_size
    length = max(1, round(expected_longest(split.extents, size)))
    gaps = setup.model.encoder.missing is not None
    scored = size * setup.objective.scored_steps(split, gaps) if setup.output.per_step else None
    counts = setup.model.batch_flops(split.sequences * size, length, scored)
    if (joint := setup.joint) is not None:
        counts += setup.model.denoising_flops(
            split.sequences * size, length, size * joint.objective.scored_steps(joint.data.train, gaps)
        )
    return counts / size
