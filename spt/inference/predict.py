"""From a model and a file of rows to a file of predictions or of embeddings."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from spt.errors import CheckpointError
from spt.inference.answers import Answering, Pool, answer_columns, pieces, row_columns, scores_of_split
from spt.inference.read import read_file, read_split
from spt.inference.trained_model import TrainedModel
from spt.inference.write import EMBEDDINGS, TABLES, check_out, embeddings_file, table_file
from spt.runtime.distributed import Runtime
from spt.tasks.base import Split
from spt.training.metrics import Sums

SplitName = Literal["train", "val", "test"]


@dataclass(frozen=True)
class Source:
    """Which rows are answered: those of a file or folder, read under these changes, or a split of the run's own."""

    data: Path | None = None
    changes: Sequence[str] = ()
    split: SplitName = "test"


@dataclass
class Summary:
    """What was done, for people and as JSON."""

    run: str
    rows: int  # answered or embedded
    scored: int = 0
    scores: dict[str, float] | None = None
    notes: list[str] = field(default_factory=list)
    out: str | None = None
    recordings: int | None = None  # that embedded windows are of, where the model's answers are scored by recording

    @property
    def amount(self) -> str:
        """Of rows, in words."""
        if self.recordings is None:
            return f"{self.rows:,} rows"
        return f"{self.rows:,} windows of {self.recordings:,} recordings"

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def predict(
    path: Path,
    source: Source,
    out: Path | None,
    runtime: Runtime,
    *,
    overwrite: bool = False,
    trust_code: bool = False,
    calibrated: bool = False,
) -> Summary:
    """Answer rows and write the answers; without a file to write to, as CSV on standard output. `calibrated` applies
    the temperature fitted on validation rows to the probabilities.

    Raises CheckpointError for a pretraining run, UsageError, DataError or OutputError for the rest; nothing is written
    then.
    """
    if out is not None:
        check_out(out, TABLES, overwrite, source.data)
    model = TrainedModel.open(path, trust_code=trust_code)
    if model.target is None:
        raise CheckpointError(
            f"{path} is a pretraining run, which has no task to predict; spt embed shows its features"
        )
    if calibrated:
        model.fitted_temperature()
    answering = Answering(model, runtime)
    if source.data is None:
        return _predict_split(path, source.split, out, answering, calibrated)
    data = read_file(model, source.data, source.changes, labels=True)
    with table_file(out) as table:
        for rows in data.chunks():
            for piece in pieces(rows, model, model.output.per_step):
                table.write(answer_columns(model, piece, answering.answer(piece), data.labelled, calibrated))
    return Summary(
        path.resolve().name,
        answering.rows,
        answering.labelled,
        answering.scores(),
        [*data.notes(), *answering.notes()],
        None if out is None else str(out),
    )


def _predict_split(path: Path, split: SplitName, out: Path | None, answering: Answering, calibrated: bool) -> Summary:
    rows, data = read_split(path, split)
    model, found = answering.model, list[Sums]()
    with table_file(out) as table:
        for piece in pieces(rows, model, model.output.per_step):
            answered = answering.answer(piece)
            assert answered.sums is not None, "a split has labels"
            found.append(answered.sums)
            table.write(answer_columns(model, piece, answered, True, calibrated))
    whole = {name: torch.cat([each[name] for each in found]) for name in found[0]}
    scores = scores_of_split(model, rows, whole)
    if model.computation.together is None:  # else they would be means over batches, which these are not
        scores |= answering.of_all()
    place = None if out is None else str(out)
    return Summary(path.resolve().name, len(rows.whole), answering.labelled, scores, list(data.notes), place)


def embed(
    path: Path,
    source: Source,
    out: Path,
    runtime: Runtime,
    *,
    how: Pool | None = "mean",
    overwrite: bool = False,
    trust_code: bool = False,
) -> Summary:
    """Write the features that the model's head is given, pooled over valid steps or, with `how` None, of each step.

    Raises as `predict`.
    """
    check_out(out, EMBEDDINGS, overwrite, source.data)
    model = TrainedModel.open(path, trust_code=trust_code)
    embedding, notes = Answering(model, runtime), list[str]()
    with embeddings_file(out) as file:

        def write(rows: Split) -> None:
            for piece in pieces(rows, model, how is None):
                file.write(row_columns(piece, how is None) | {"embedding": embedding.embed(piece, how)})

        if source.data is None:
            rows, task = read_split(path, source.split)
            write(rows)
            notes += task.notes
        else:
            data = read_file(model, source.data, source.changes, labels=False)
            for rows in data.chunks():
                write(rows)
            notes += data.notes()
    return Summary(
        path.resolve().name,
        embedding.sequences,
        notes=[*notes, *embedding.notes()],
        out=str(out),
        recordings=embedding.rows if embedding.rows < embedding.sequences else None,
    )
