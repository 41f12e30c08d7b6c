"""A task's splits, kept through `datasets` as Arrow files: prepared once under a lock, then opened as memory maps.

    <cache>/tasks/<task>-<hash>/{train,val,test}.arrow, data.json

The hash covers the task's options and source, so an edited task is prepared again. The folder is filled beside and
renamed, so its existence means that it is complete.
"""

from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from spt.config.job import Stage
from spt.config.plugins import Component
from spt.config.recipe import Part, Recipe, ResolvedRecipe
from spt.data.cache import prepared_folder, read_prepared
from spt.data.fingerprints import rows_hash
from spt.data.more_rows import with_more_rows
from spt.data.source import call_hook, class_names, is_indexable, open_part
from spt.errors import DataError
from spt.rng import generator
from spt.tasks.base import WHOLE, Classes, Split, Target, TaskConfig, TaskData, Tokens, has_target


def open_task(part: Part) -> TaskData:
    """The task's data with fingerprints: the subset the recipe asks for, rows not copied.

    max_rows takes the first rows of every split, those with a target before others. A subset is a prefix of one
    permutation of the training split, so subsets are nested (SPT paper, appendix C.1.4); stratified, of one in which
    every class comes as often as in the whole split, early and late. Windows come with all of their recording, and
    recordings are what is counted.
    """
    task = open_part(part)
    config, module = task.config, task.component.module
    data = read_prepared(prepared_folder(task))
    if not data.classes:
        data = replace(data, classes=class_names(task, data.target))
    whole, max_rows = len(data.train), config.max_rows
    if max_rows is not None:
        target = data.target
        data = data.mapped(lambda split: split.take(_first_rows(split, target, max_rows)))
    unit = _units(config, data.train)
    units = int(unit.max(initial=-1)) + 1
    keep = _units_in_use(config, units, len(data.train), task.component)
    if keep < units:
        order = generator(config.subset_seed, "subset").permutation(units)
        if config.stratified:
            order = order[_spread_classes(_classes_of_units(data, unit, task.component)[order])]
        place = np.empty(units, np.int64)
        place[order] = np.arange(units)
        rows = np.argsort(place[unit], kind="stable")
        data = replace(data, train=data.train.take(rows[: int((place[unit] < keep).sum())]))
    coded = isinstance(data.input, Tokens) and data.input.codes is not None
    if coded and len(data.train) < whole and config.subset_vocabulary == "subset" and hasattr(module, "vocabulary"):
        data = replace(data, input=call_hook(task.component, "vocabulary", config, data.train))
    if hasattr(module, "resample") and getattr(config, "resample_each_epoch", True):
        if data.train.cuts is not None:
            raise DataError(f"task {task.component.identity}: rows of pairs cannot be resampled; leave out resample")
        data = replace(data, resample=partial(_resample, task.component, config, data))
    return data


def _first_rows(split: Split, target: Target, count: int) -> NDArray[np.int64]:
    """The first rows with a target, then others; the last of them is replaced where all would have the same target."""
    if split.per_step or not len(split):
        return np.arange(min(count, len(split)))
    known = has_target(split) if target.missing else np.ones(len(split), bool)
    rows = np.sort(np.argsort(~known, kind="stable")[:count])
    targets = np.asarray(split.targets)
    others = np.flatnonzero(known & (targets != targets[rows[:1]]).reshape(len(split), -1).any(axis=1))
    if 1 < len(rows) < len(split) and len(others) and not np.isin(rows, others).any():
        rows[-1] = others[0]
    return rows


def _units(config: TaskConfig, train: Split) -> NDArray[np.int64]:
    """(n,) Which unit of a subset each training row is of: itself, or of a window its recording."""
    if getattr(config, "window", None) is None:
        return np.arange(len(train))
    names = np.array([str(name).rpartition("@")[0] for name in train.ids.tolist()])
    return np.unique(names, return_inverse=True)[1].reshape(-1)


def _units_in_use(config: TaskConfig, units: int, rows: int, component: Component) -> int:
    """How many units a subset has. Raises DataError where there are not as many as are asked for."""
    if config.subset_rows is None or config.max_rows is not None:  # few rows, for show: as many as they are
        return units_of(config.subset_fraction, units)
    if config.subset_rows > units:
        what = "rows" if units == rows else f"recordings, cut into {rows:,} windows; a subset counts recordings"
        raise DataError(
            f"task {component.identity}: subset_rows is {config.subset_rows:,}, but the training split has {units:,} "
            f"{what}"
        )
    return config.subset_rows


def units_of(fraction: float, units: int) -> int:
    """How many that is, at least one: 0.29 of 100 is 29."""
    return max(1, int(fraction * units + 1e-9))


def _classes_of_units(data: TaskData, unit: NDArray[np.int64], component: Component) -> NDArray[np.int64]:
    """(units,) The class of every unit. Raises DataError where there is none."""
    if not isinstance(data.target, Classes) or data.train.per_step:
        raise DataError(f"task {component.identity}: stratified needs one class for every sequence; leave it out")
    classes = np.asarray(data.train.targets)
    of_unit = classes[np.unique(unit, return_index=True)[1]]
    if (of_unit[unit] != classes).any():
        raise DataError(
            f"task {component.identity}: stratified needs one class for every recording, which a subset keeps "
            "whole, and windows of some have several; leave it out"
        )
    return of_unit


def _spread_classes(classes: NDArray[np.int64]) -> NDArray[np.int64]:
    """An order in which every class is spread evenly: the j-th of its n rows comes at about (j + 1/2) / n."""
    order = np.argsort(classes, kind="stable")
    _, first, counts = np.unique(classes[order], return_index=True, return_counts=True)
    rank = np.empty(len(classes))
    rank[order] = (np.arange(len(classes)) - np.repeat(first, counts) + 0.5) / np.repeat(counts, counts)
    return np.argsort(rank, kind="stable")


def _resample(component: Component, config: TaskConfig, data: TaskData, ids: NDArray[np.int64], epoch: int) -> Split:
    """Training rows of a later epoch, as the task makes them, once they are known to be of the kind asked for."""
    rows = call_hook(component, "resample", config, ids, epoch)
    place = f"task {component.identity}: resample"
    if not isinstance(rows, Split):
        raise DataError(f"{place} returned {type(rows).__name__}, not a Split")
    if not np.array_equal(rows.ids, ids):
        raise DataError(f"{place} returned {len(rows)} rows that do not have the {len(ids)} ids asked for")
    if rows.values.dtype != data.train.values.dtype or (rows.steps is None) != (data.train.steps is None):
        raise DataError(f"{place} returned {rows.values.dtype} values, or times, unlike load's")
    try:
        replace(data, train=rows, val=rows, test=rows).check()
    except ValueError as error:
        raise DataError(f"{place}: {str(error).replace('the train split', 'what it returned')}") from error
    if int(rows.extents.max()) > data.length:
        raise DataError(
            f"{place} returned a row of {int(rows.extents.max()):,} steps, but the task's longest has {data.length:,}; "
            "say TaskData(length=…)"
        )
    return rows


def open_stage(recipe: Recipe, stage: Stage) -> TaskData:
    """The data of a stage: the task's, and for pretraining also the rows of `pretrain.data`."""
    data = open_task(recipe.task)
    if stage != "pretrain" or recipe.pretrain.data is None:
        return data
    return with_more_rows(open_part(recipe.task), data, recipe.pretrain.data)


def data_identity(part: Part) -> str:
    """Hash of the rows a task option set gives, inputs and labels: runs on other data have other keys."""
    return rows_hash(open_task(part))


def identify_data(resolved: ResolvedRecipe) -> ResolvedRecipe:
    """The recipe with the identity of its data set, which is prepared if it is not yet. Raises DataError."""
    recipe = resolved.recipe
    more = None if recipe.pretrain.data is None else rows_hash(open_stage(recipe, "pretrain"))
    return replace(resolved, data=data_identity(recipe.task), pretraining_data=more)


def training_fingerprints(part: Part) -> NDArray[np.uint64]:
    """Of the sequences of the task's whole training split, whatever fraction of it is in use.

    A generated task is not made whole for this: a row of it cannot be one of other splits.
    """
    whole = {} if is_indexable(open_part(part)) else {"max_rows": None}
    return open_task(Part(**{**part.model_dump(), **WHOLE, **whole})).train.seen
