"""A trained network with everything that it takes to answer new rows, opened from a run or an exported folder.

n examples, L steps of a sequence, C channels, D width, K numbers of an answer.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spt import __version__
from spt.config.job import Job
from spt.config.load import path_options
from spt.config.recipe import Train
from spt.data.source import open_part, reading
from spt.errors import DataError, UsageError
from spt.inference.rows import to_split
from spt.inference.streaming import Stream
from spt.runs.result import Result
from spt.runtime.distributed import Runtime
from spt.runtime.settings import Settings
from spt.tasks.base import Classes, Labels, Split, Target, TaskConfig, Tokens, Values
from spt.tasks.own.transforms import TransformOptions, plan, transform_rows
from spt.training.build import Architecture, lengthened
from spt.training.load_run import load_run
from spt.training.losses import answers
from spt.training.network import SequenceModel, pool
from spt.training.objectives import Output
from spt.training.outputs import BatchOutputs, Computation, network_outputs
from spt.training.recordings import averaged

CONFIG = "config.json"  # of an exported folder
FLOAT32 = Computation(precision="fp32", together=None, one_thread=True)
PREPARED = "spt.tasks.own.prepared"  # the task of rows that an estimator has handed over


@dataclass(frozen=True)
class TrainedModel:
    """A trained network that answers new rows."""

    network: SequenceModel  # in evaluation mode, with the selected weights
    architecture: Architecture
    input: Tokens | Values  # how rows are shown to it, from training: vocabulary, mean and deviation
    target: Target | None  # None after pretraining
    output: Output
    length: int  # longest sequence in training, in steps
    classes: tuple[str, ...] = ()  # what each class is called; () of numbers, and where the task does not say
    words: tuple[str, ...] = ()  # the word of each token, where tokens are words; () otherwise
    reading: dict[str, Any] = field(default_factory=dict)  # the hook `reading` of its task; {}: files are not read
    task: dict[str, Any] = field(default_factory=dict)  # its name and options, without where files lie
    interval: float = 1.0  # time between steps
    sequences: int = 1  # sequences in an example: 2 where examples are pairs
    timed: bool = False  # have rows times between their steps?
    computation: Computation = FLOAT32
    about: dict[str, Any] = field(default_factory=dict)  # which run it comes from, its scores
    temperature: float | None = None  # divides logits for calibrated probabilities; None: none was fitted

    @classmethod
    def open(cls, path: str | Path, *, trust_code: bool = False) -> "TrainedModel":
        """Open the folder of a finished run, whose data are prepared if needed, or an exported folder.

        `trust_code` lets the model file in an exported folder run. Raises UsageError, DataError or CheckpointError.
        """
        path = Path(path)
        if not path.is_dir():
            raise UsageError(f"no folder {path}; name a finished run's, or an exported one")
        if (path / CONFIG).is_file():
            from spt.inference.exported import open_exported

            return open_exported(path, trust_code)
        if not any((path / name).exists() for name in ("status.json", "result.json", "job.json")):
            raise UsageError(f"{path} is neither the folder of a run nor one that `spt export` has written")
        return _from_run(path)

    # ------------------------------------------------------------------------------------------------- whole splits

    def outputs(self, rows: Split, *, features: bool = False, runtime: Runtime | None = None) -> Iterator[BatchOutputs]:
        """Its answers to all rows, batch by batch, computed as in evaluation (see `network_outputs`); or the features
        that its head is given. Rows longer than those of training are accepted if its weights allow it."""
        longest, network = int(rows.extents.max(initial=0)), self.network
        if longest > self.length:
            network = lengthened(network, self.architecture.model, self.length, longest)
        runtime = runtime or Runtime(Settings(quiet=True))
        return network_outputs(network, rows, self.input, self.computation, runtime, features=features)

    def answers(self, part: BatchOutputs) -> Tensor:
        """(b, S) or (b, L, S) The most likely classes, as numbers, or numbers in the targets' units."""
        return answers(self.output, part.values)

    # ----------------------------------------------------------------------------------------------- rows in memory

    def predict(self, rows: Any, *, static: Any = None, runtime: Runtime | None = None) -> Any:
        """(n,) The label of each row (its class's number if the task has no labels), or (n, K) numbers, or 1 and 0 for
        each of K labels; if every step has an answer, a list of such arrays, one per row.

        Rows are sequences, each (L,) tokens or (L, C) values; texts, for a model of texts; pairs of these, for a model
        of pairs; or a Split. `static` is what stands beside each, for a model that takes it: a data frame, a dict of
        columns, or rows of cells in the columns' order.
        """
        self._check_answers()
        return self._by_row(self.split(rows, static), self._named, runtime)

    def predict_proba(
        self, rows: Any, *, static: Any = None, calibrated: bool = False, runtime: Runtime | None = None
    ) -> Any:
        """(n, classes) The probability of each class, or of each label; if every step has an answer, a list of such
        arrays.

        `calibrated` applies the temperature fitted on validation rows. Raises UsageError if none was fitted.
        """
        self._check_answers()
        if not isinstance(self.target, Classes | Labels):
            raise UsageError("this model predicts numbers, which have no probabilities; call predict")
        temperature = self.fitted_temperature() if calibrated else 1.0
        split = self.split(rows, static)
        if isinstance(self.target, Labels):
            return self._by_row(split, lambda logits: (logits / temperature).sigmoid().numpy(), runtime)
        return self._by_row(split, lambda logits: (logits / temperature).softmax(-1).numpy(), runtime)

    def fitted_temperature(self) -> float:
        """The number that logits are divided by for calibrated probabilities."""
        if self.temperature is None:
            raise UsageError(
                "this model has no temperature: it predicts no classes, or was trained before spt fitted any; run its "
                "recipe again, or leave calibrated out"
            )
        return self.temperature

    def logits(self, rows: Any, *, static: Any = None, runtime: Runtime | None = None) -> Any:
        """(n, K) The head's output for each row; if every step has an answer, a list of (L, K) arrays."""
        return self._by_row(self.split(rows, static), lambda logits: logits.numpy(), runtime)

    def embed(self, rows: Any, *, static: Any = None, per_step: bool = False, runtime: Runtime | None = None) -> Any:
        """(n, D) The features that the head is given, pooled as in the head (their mean, if it does not pool); for
        pairs, (n, 2 D). With `per_step`, a list of (L, D) arrays, one per row: for a pair, the steps of the second
        sequence follow those of the first."""
        split = self.split(rows, static)
        if per_step:
            return self._features_of_steps(split, runtime)
        embedded = np.zeros((len(split), self.sequences * self.architecture.model.options["d_model"]), np.float32)
        for part in self.outputs(split, features=True, runtime=runtime):
            pooled = self.pooled(part)
            embedded[part.rows] = torch.cat(pooled.chunk(self.sequences), dim=-1).numpy()
        if split.recordings is None:
            return embedded
        _, which, counts = np.unique(split.recordings, return_inverse=True, return_counts=True)
        total = np.zeros((len(counts), embedded.shape[1]), np.float64)
        np.add.at(total, which.reshape(-1), embedded)
        return (total / counts[:, None]).astype(np.float32)

    def pooled(self, part: BatchOutputs) -> Tensor:
        """(B, D) The features of each sequence as one vector."""
        how = self.network.head.pool or ("last" if self.network.head.only_last else "mean")
        return pool(part.values, part.context, how)

    def stream(self, batch: int | None = None, static: Any = None) -> Stream:
        """Its recurrent form, for steps that arrive one by one: of one sequence, or of `batch` sequences side by side;
        `static` is what stands beside each, as in predict, for a model that takes it.

            stream = model.stream()
            for step in signal:
                answer = stream(step)

        Raises UsageError if the model has none.
        """
        return Stream(self, batch, static)

    def split(self, rows: Any, static: Any = None) -> Split:
        """Rows in memory as a split without labels. Raises DataError for rows unlike those of training."""
        if not isinstance(rows, Split):
            try:
                return transform_rows(self.transforms, to_split(rows, self, static), self.reading.get("rate"))
            except ValueError as error:
                raise DataError(str(error)) from error
        width = 0 if rows.static is None else rows.static.shape[1]
        if width != self.input.static:
            raise DataError(f"the rows have {width} static features, but the model takes {self.input.static}")
        return rows

    @cached_property
    def transforms(self) -> TransformOptions:
        """The transforms that recordings went through before training, and that new ones go through."""
        names = TransformOptions.model_fields.keys() - TaskConfig.model_fields.keys()
        options = {name: value for name, value in self.task.items() if name in names} if self._own_data else {}
        return TransformOptions.model_validate_json(json.dumps(options))

    @property
    def _own_data(self) -> bool:
        """Is its task one that reads the user's own data, whose options are known here?"""
        return bool(self.reading) or self.task.get("name") == PREPARED

    @property
    def channels_read(self) -> int:
        """Channels of a step before the `transforms`."""
        shown = self.input.channels if isinstance(self.input, Values) else 1
        return shown // plan(self.transforms, None, known=False).channels(1)

    def _check_answers(self) -> None:
        if self.target is None:
            raise UsageError(
                "this model comes from pretraining, which has no task to predict; call embed, or open a finetuning run"
            )

    def _named(self, logits: Tensor) -> NDArray[Any]:
        found = answers(self.output, logits).numpy()
        if not isinstance(self.target, Classes):
            return found
        return np.asarray(self.classes)[found[..., 0]] if self.classes else found[..., 0]

    def _by_row(self, split: Split, shape: Any, runtime: Runtime | None) -> Any:
        if split.recordings is not None:
            return np.array(shape(self._of_recordings(split, split.recordings, runtime)))
        found: list[Any] = [None] * len(split)
        for part in self.outputs(split, runtime=runtime):
            values = shape(part.values)
            for i, row in enumerate(part.rows.tolist()):
                found[row] = values[i][part.context.valid[i].numpy()] if self.output.per_step else values[i]
        return found if self.output.per_step else np.array(found)

    def _of_recordings(self, split: Split, recordings: NDArray[np.int64], runtime: Runtime | None) -> Tensor:
        """(m, K) Logits of rows, of the mean answer to their windows."""
        if self.output.per_step:
            raise UsageError(
                "this model answers every step of windows, which may overlap; give it windows, as a Split, or a file "
                "to "
                "spt predict"
            )
        logits = torch.zeros(len(split), self.output.width)
        for part in self.outputs(split, runtime=runtime):
            logits[torch.from_numpy(part.rows)] = part.values
        return averaged(self.output, logits, recordings)

    def _features_of_steps(self, split: Split, runtime: Runtime | None) -> list[NDArray[np.float32]]:
        found: list[Any] = [None] * len(split)
        for part in self.outputs(split, features=True, runtime=runtime):
            rows = len(part.rows)
            for i, row in enumerate(part.rows.tolist()):
                each = [part.values[k][part.context.valid[k]] for k in range(i, len(part.values), rows)]
                found[row] = torch.cat(each).numpy()
        return found


# ------------------------------------------------------------------------------------------------------------ of a run


def _from_run(path: Path) -> TrainedModel:
    run = load_run(path)
    job, data, setup = run.job, run.data, run.setup
    recipe, task = job.resolved.recipe, open_part(job.resolved.recipe.task)
    read = reading(task, data.input)
    labelled = setup.objective.labelled
    return TrainedModel(
        network=run.network,
        architecture=Architecture(
            model=recipe.model, encoder=recipe.encoder, head=job.settings_stage.head, seed=job.seed
        ),
        input=data.input,
        target=data.target if labelled else None,
        output=setup.output,
        classes=tuple(read.get("classes", ())) or data.classes if labelled else (),
        words=tuple(read.get("words", ())),
        reading=read,
        task=_without_places(job),
        length=data.length,
        interval=data.interval,
        sequences=data.train.sequences,
        timed=data.train.steps is not None,
        computation=Computation.of_stage(setup),
        about=_about(run.path, run.result, job),
        temperature=run.result.calibration.temperature if run.result.calibration else None,
    )


def _without_places(job: Job) -> dict[str, Any]:
    """The task's part of the recipe; of paths on this machine, the names alone."""
    part = job.resolved.recipe.task
    values: dict[str, Any] = {"name": part.name, **part.model_dump(mode="json", exclude={"name"})}
    places = {"name", *path_options("tasks", values)}
    return {key: Path(value).name if key in places and value else value for key, value in values.items()}


def _about(path: Path, result: Result, job: Job) -> dict[str, Any]:
    """Which run this is, and how it was trained, as a reader may want to know it without the run's folder."""
    arm = {"arm": "scratch" if result.parent is None else "spt"} if result.stage == "finetune" else {}
    return {
        "run": path.name,
        "recipe": result.recipe,
        "task": result.task,
        "model": result.model,
        "stage": result.stage,
        **arm,
        "seed": result.seed,
        "parent": result.parent,
        "smoke": result.smoke,
        "metric": result.metric,
        "selected_by": result.selected_by,
        "best_step": result.best_step,
        "val": result.val,
        "test": result.test,
        "rows": {name: record.rows for name, record in result.data.items()},
        "parameters": result.parameters,
        "training": _stages(result, job),
        "notes": list(result.notes),
        "spt": __version__,
    }


def _stages(result: Result, job: Job) -> list[dict[str, Any]]:
    """Each stage's settings and what it took; of the pretraining, as far as the run that followed it knows."""
    recipe, own = job.resolved.recipe, result.own
    before = result.total.steps - own.steps, result.total.examples - own.examples
    stages: list[tuple[str, str, Train, tuple[int, int]]] = []
    if result.stage == "pretrain" or result.parent is not None:
        spent = (own.steps, own.examples) if result.stage == "pretrain" else before
        stages.append(("pretrain", recipe.pretrain.objective.name, recipe.pretrain.train, spent))
    if result.stage == "finetune":
        stages.append(("finetune", recipe.finetune.objective.name, job.train, (own.steps, own.examples)))
    shown = ("batch_size", "learning_rate", "weight_decay", "precision")
    return [
        {"stage": stage, "objective": objective, "steps": steps, "examples": examples}
        | {name: getattr(train, name) for name in shown}
        for stage, objective, train, (steps, examples) in stages
    ]
