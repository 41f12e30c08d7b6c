"""What a stage's budget comes to for a network: optimiser steps, and operations of an example."""

from spt.config.budget import expected_longest, total_steps
from spt.config.recipe import Train
from spt.models.ops.counts import Counts
from spt.tasks.base import TaskData
from spt.training.network import SequenceModel


def plan_steps(model: SequenceModel, data: TaskData, train: Train) -> int:
    """Optimiser steps of a stage; a FLOP budget is converted at the mean length."""
    return total_steps(train, len(data.train), mean_flops(model, data, train).total)


def mean_flops(model: SequenceModel, data: TaskData, train: Train) -> Counts:
    """Operations an example of a full batch, padded to its longest as batches are."""
    length = max(1, round(expected_longest(data.train.extents, train.batch_size)))
    return model.batch_flops(data.train.sequences * train.batch_size, length) / train.batch_size
