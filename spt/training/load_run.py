"""A finished run, opened again: its recipe, its data, and its network with the weights that validation selected."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spt.config.job import Job, PretrainedWeights
from spt.config.load import load_recorded
from spt.data.dataset import identify_data
from spt.data.fingerprints import split_record
from spt.errors import CheckpointError, DataError, UsageError, one_line
from spt.runs.folder import RunFolder
from spt.runs.result import Result
from spt.tasks.base import TaskData
from spt.training.build import StageSetup, build_stage
from spt.training.checkpoint import load_weights, read_meta
from spt.training.network import SequenceModel
from spt.training.stage import architecture


@dataclass(frozen=True)
class FinishedRun:
    """A finished run. Its job names the parent by key alone: nothing of it is needed to look at the run itself."""

    path: Path  # resolved
    result: Result
    job: Job
    setup: StageSetup  # in evaluation mode, with the selected weights

    @property
    def weights(self) -> Path:
        """The folder of the selected weights."""
        return self.path / "checkpoints" / "best"

    @property
    def network(self) -> SequenceModel:
        """In evaluation mode, with the selected weights."""
        return self.setup.model

    @property
    def data(self) -> TaskData:
        return self.setup.data

    def about(self) -> dict[str, Any]:
        """Which run this is, for what a command prints as JSON."""
        result = self.result
        names = {"stage": result.stage, "task": result.task, "model": result.model, "seed": result.seed}
        return {"run": self.path.name, **names}

    def untrained(self) -> SequenceModel:
        """The network as it was before any training, of the run's own seed; in evaluation mode."""
        model = build_stage(self.job).model
        model.eval()
        return model


def load_run(path: Path) -> FinishedRun:
    """A finished run of either stage, its data checked against those that it was trained on.

    Raises UsageError where there is no such folder, CheckpointError where it is no finished run or its weights are
    damaged, gone or of another model, and DataError where its recipe is damaged or its data are missing or other than
    they were.
    """
    path, result, job = read_finished_run(path)
    weights = path / "checkpoints" / "best"
    meta, _ = read_meta(weights, f"{result.stage}-{result.key}")  # damage is reported before the data are read
    setup = build_stage(job)
    if {name: split_record(split) for name, split in setup.data.splits.items()} != result.data:
        raise DataError(
            f"the task's data are not those that {path.name} was trained on: files or code have changed since; what "
            "its weights know of inputs and classes is not known any more"
        )
    options = architecture(job)
    if any(options.get(name) != value for name, value in meta.model.items()):
        raise CheckpointError(f"{weights} holds another architecture than {path.name}/recipe.yaml names now")
    try:
        load_weights(weights, setup.model)
    except RuntimeError as error:  # the code of the model has changed since
        raise CheckpointError(f"{weights} does not fit this model any more: {one_line(error)}") from error
    setup.model.eval()
    return FinishedRun(path, result, job, setup)


def read_finished_run(path: Path) -> tuple[Path, Result, Job]:
    """A finished run's resolved folder, its result, and the job that its recipe describes; loads no data.

    Raises as `open_run`.
    """
    path = path.resolve()
    if not path.is_dir():
        raise UsageError(f"no run folder {path}")
    run = RunFolder(path.parent, path.name)
    result = run.result()
    if result is None:
        state = (run.status() or {}).get("state", "not a run")
        raise CheckpointError(f"{path} is not finished ({state}); a finished run is expected")
    parent = None if result.parent is None else PretrainedWeights(path, result.parent)
    try:
        resolved = identify_data(load_recorded(path))
    except UsageError as error:  # the file is damaged, or names what is not there any more: not what the user asked
        raise DataError(f"the recipe that {path.name} was run with cannot be used: {error}") from error
    return path, result, Job(resolved, result.stage, result.seed, parent)


def check_has_rows(run: str, data: TaskData, split: str, others: Sequence[str] = ("val", "train")) -> None:
    """Raise UsageError if the split is empty, as the test split of an estimator's run is; `others` can be asked for."""
    if not len(data.splits[split]):
        there = " or ".join(name for name in others if name != split and len(data.splits[name]))
        raise UsageError(f"{run} has no {split} rows" + (f"; name another with --split {there}" if there else ""))
