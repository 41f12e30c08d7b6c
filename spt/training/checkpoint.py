"""Checkpoints: exact resuming, the best weights, and the strict move of weights from one stage to the next.

    checkpoints/step-00000400/   Accelerate's state, position.json          to resume from; the last two are kept
    checkpoints/best-00000350/   model.safetensors, about.json, rows.npy    what validation picked so far
    checkpoints/best/            the same for a finished run

Each folder is filled beside, ends with checksums in manifest.json, and is renamed; a damaged one is passed over.
"""

import contextlib
import errno
import hashlib
import json
import logging
import os
import pickle
import re
import secrets
import shutil
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError
from torch import Tensor

from spt.config.recipe import MOVED
from spt.errors import CheckpointError, one_line
from spt.runs.files import output_error, sync, write_json, writing
from spt.runs.folder import RunFolder
from spt.runs.result import Ledger, SplitRecord, check_scores
from spt.runtime.distributed import Runtime
from spt.tasks.base import Tokens, Values, describe
from spt.tasks.files import read_npy
from spt.training.network import SequenceModel
from spt.training.transfer import unlike

logger = logging.getLogger(__name__)

UNREADABLE = (
    *(RuntimeError, ValueError, KeyError, EOFError, OSError, SafetensorError, pickle.UnpicklingError),
    *(AttributeError, TypeError),  # of contents that are readable, and something else than a state
)
KEEP = 2  # resumable checkpoints
WEIGHTS = "model.safetensors"
MANIFEST = "manifest.json"
_PROCESS = secrets.token_hex(4)  # beside its number, which a process on another machine may have too


class TrainingState(BaseModel):
    """Where a training stands; with Accelerate's state, all that resuming needs."""

    model_config = ConfigDict(frozen=True)

    step: int = 0
    best_step: int = 0
    best: dict[str, float] = {}  # validation metrics at best_step
    waited: int = 0  # evaluations since then
    reductions: int = 0  # of the learning rate, by schedule plateau
    micro_batch: int | None = None  # sequences at once that memory was found to hold; None: no limit was met
    run: str = ""  # whose it is, by the folder's name; empty where a state is older
    shards: str = ""  # FSDP or DEEPSPEED when the state was saved in parts, which only the same kind can read
    ledger: Ledger = Ledger()
    loss: float = 0.0  # sum of weight times training loss since the last evaluation
    weight: float = 0.0
    answers: float = 0.0  # of classes, on training batches since the last evaluation
    right: float = 0.0

    @property
    def training_loss(self) -> float:
        return self.loss / max(self.weight, 1.0)

    @property
    def training_scores(self) -> dict[str, float]:
        """Means over the training batches since the last evaluation, as the network was at each of them."""
        accuracy = {"accuracy": self.right / self.answers} if self.answers else {}
        return {"loss": self.training_loss, **accuracy}

    def after(self, spent: Ledger, **since: float) -> "TrainingState":
        """Further by what was spent; `since` are added to the sums since the last evaluation."""
        further = {"step": self.step + spent.steps, "ledger": self.ledger + spent}
        return self.model_copy(update=further).with_sums(**since)

    def with_sums(self, **since: float) -> "TrainingState":
        """With these added to the sums since the last evaluation."""
        return self.model_copy(update={name: getattr(self, name) + amount for name, amount in since.items()})

    def evaluated(self, scores: dict[str, float], improved: bool) -> "TrainingState":
        best = {"best": scores, "best_step": self.step, "waited": 0} if improved else {"waited": self.waited + 1}
        return self.model_copy(update={**best, **dict.fromkeys(("loss", "weight", "answers", "right"), 0.0)})

    def with_peak(self, peak_bytes: int) -> "TrainingState":
        return self.model_copy(update={"ledger": self.ledger + Ledger(peak_bytes=peak_bytes)})


class CheckpointMeta(BaseModel):
    """What a stage's weights are: enough to refuse a use that would make no sense."""

    model_config = ConfigDict(frozen=True)

    key: str
    stage: str
    step: int
    model: dict[str, Any]  # the recipe's model part, every option
    input: dict[str, Any]  # Tokens or Values
    data: dict[str, SplitRecord]

    @property
    def run(self) -> str:
        """The name of the folder of the run whose weights these are."""
        return f"{self.stage}-{self.key}"


class TensorMatch(NamedTuple):
    """One line of the table that a transfer prints."""

    part: str
    tensors: int
    parameters: int
    outcome: str


def save_state(run: RunFolder, runtime: Runtime, state: TrainingState) -> None:
    """Everything needed to continue exactly here. All processes have to come."""
    folder = run.checkpoints / f"step-{state.step:08d}"
    beside = runtime.on_main(lambda: _beside(folder))
    shards = runtime.accelerator.distributed_type.name if runtime.shards else ""

    def begin() -> None:
        with _disk(folder):
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)

    def save() -> None:
        with _disk(folder):
            runtime.accelerator.save_state(str(beside), safe_serialization=True)

    def settle() -> None:
        run.check()
        with _disk(folder):
            run.sync_metrics()  # resuming goes on behind their lines
            write_json(
                beside / "position.json",
                state.model_copy(update={"run": run.name, "shards": shards}).model_dump(mode="json"),
            )
            _settle(beside, folder)
        for old in _steps(run.checkpoints, "step")[:-KEEP]:
            shutil.rmtree(old, ignore_errors=True)
        prune(run, state)

    try:
        runtime.on_main(begin)
        runtime.all_ranks(save)
        runtime.on_main(settle)
    finally:
        if runtime.main:
            shutil.rmtree(beside, ignore_errors=True)


def prune(run: RunFolder, state: TrainingState) -> None:
    """Drop the best weights that neither this state nor a resumable one refers to."""
    run.check()
    needed = {state.best_step}
    for folder in _steps(run.checkpoints, "step"):
        with contextlib.suppress(OSError, ValueError):
            needed.add(_position(folder).best_step)
    for folder in _steps(run.checkpoints, "best"):
        if int(folder.name.partition("-")[2]) not in needed:
            shutil.rmtree(folder, ignore_errors=True)


def resume(run: RunFolder, runtime: Runtime) -> TrainingState | None:
    """Load the newest intact state into what Accelerate has prepared; None when there is none."""
    newest = runtime.on_main(lambda: _newest(run))
    if newest is None:
        return None
    folder, state = newest
    shards = runtime.accelerator.distributed_type.name if runtime.shards else ""
    if state.shards != shards:
        raise CheckpointError(
            f"{folder} was saved by processes of kind {state.shards or 'whole models'} and cannot be read by "
            f"{shards or 'whole models'}; continue as it was begun, or start over with --resume never"
        )

    def load() -> None:
        try:
            runtime.accelerator.load_state(str(folder))
        except UNREADABLE as error:
            raise CheckpointError(
                f"{folder} cannot be loaded ({one_line(error)}); --resume never starts over and keeps it"
            ) from error

    runtime.all_ranks(load)
    return state


def _newest(run: RunFolder) -> tuple[Path, TrainingState] | None:
    _sweep(run)
    for folder in reversed(_steps(run.checkpoints, "step")):
        problem = verify(folder)
        if problem is None:
            try:
                state = _position(folder)
                best = run.checkpoints / f"best-{state.best_step:08d}"
                problem = None if state.best_step == 0 else verify(best)
                if problem is None:
                    _check_owner(folder, state.run, run.name)
                    if state.best_step:
                        _check_owner(best, _meta(best).run, run.name)
                    return folder, state
                problem = f"{best.name}: {problem}"
            except (OSError, ValueError):
                problem = "position.json is damaged"
        logger.warning(f"{folder} cannot be used ({problem}); trying the one before, or starting at the beginning")
    return None


def _check_owner(folder: Path, owner: str, run: str) -> None:
    if owner and owner != run:
        raise CheckpointError(
            f"{folder} belongs to another run, {owner}; move {folder.parent} away, then {run} begins without it"
        )


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """As a safetensors file. What the system refuses, a full disk say, is an OSError."""
    try:
        safetensors.torch.save_file(dict(tensors), path, metadata=metadata)
    except SafetensorError as error:
        if (found := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error


def save_weights(folder: Path, tensors: Mapping[str, Tensor], meta: CheckpointMeta, rows: NDArray[np.uint64]) -> None:
    """A stage's weights, and what they were trained on (`rows`: fingerprints of the training inputs)."""

    def fill(beside: Path) -> None:
        save_tensors(tensors, beside / WEIGHTS)
        np.save(beside / "rows.npy", np.sort(rows))
        write_json(beside / "about.json", meta.model_dump(mode="json"))

    _place(folder, fill)


def load_weights(folder: Path, model: SequenceModel) -> None:
    """All of the weights, strictly."""
    model.load_state_dict(_tensors(folder), strict=True)


def publish(run: RunFolder, best_step: int) -> None:
    """Give the selected weights their plain name; what resuming needs stays until the result is written."""
    run.check()
    best = run.checkpoints / "best"
    _place(best, lambda beside: shutil.copytree(run.checkpoints / f"best-{best_step:08d}", beside, dirs_exist_ok=True))


def clean(run: RunFolder) -> None:
    """Drop what was only for resuming."""
    run.check()
    _sweep(run)
    for kind in ("step", "best"):
        for folder in _steps(run.checkpoints, kind):
            shutil.rmtree(folder, ignore_errors=True)


def _sweep(run: RunFolder) -> None:
    """Drop what processes killed while they wrote have left; whoever holds the run's lock may."""
    for left in [*run.checkpoints.glob(".*.tmp"), *run.path.glob(".*.tmp")]:
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def read_meta(folder: Path, run: str | None = None) -> tuple[CheckpointMeta, NDArray[np.uint64]]:
    """What these weights are, and the fingerprints of the rows they were trained on. Raises CheckpointError, also for
    those of another run than this one, named STAGE-KEY."""
    problem = verify(folder)
    if problem is not None:
        raise CheckpointError(f"the checkpoint {folder} cannot be used: {problem}")
    try:
        meta = _meta(folder)
        with (folder / "rows.npy").open("rb") as file:
            rows = read_npy(file, "rows.npy")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the checkpoint {folder} cannot be used: {one_line(error)}") from error
    if run is not None and meta.run != run:
        raise CheckpointError(f"the checkpoint {folder} belongs to another run, {meta.run}, not to {run}")
    return meta, rows


def _meta(folder: Path) -> CheckpointMeta:
    return CheckpointMeta.model_validate_json((folder / "about.json").read_text(encoding="utf-8"))


def load_pretrained(
    folder: Path,
    model: SequenceModel,
    part: dict[str, Any],
    input: Tokens | Values,
    moved: Container[str] | None = None,
    *,
    other_task: bool = False,
) -> list[TensorMatch]:
    """Copy encoder and backbone, strictly, from a pretraining run's weights; the head stays as it is, and so does what
    is not among the tensors `moved`, if they are given.

    Raises CheckpointError, with the differences, unless model options and input are the same; of another task's input,
    which has a mean and a spread of its own, the kind and the size.
    """
    meta, _ = read_meta(folder)
    if meta.stage != "pretrain":
        raise CheckpointError(f"{folder} comes from a {meta.stage} run; finetuning starts from a pretraining run")
    ours = json.loads(json.dumps(part))
    names = sorted(key for key in ours.keys() | meta.model.keys() if key != "max_length")
    differences = [
        f"{key} {meta.model.get(key)!r} there, {ours.get(key)!r} here"
        for key in names
        if meta.model.get(key) != ours.get(key)
    ]
    if differences:
        raise CheckpointError(f"{folder} holds another architecture: {'; '.join(differences)}")
    if unlike(meta.input, spec(input)) if other_task else meta.input != spec(input):
        raise CheckpointError(f"{folder} was made for {_unlike(meta.input, spec(input))}")
    tensors = _tensors(folder)
    table, own = [], model.state_dict()
    for name in model.parts:
        theirs = {key for key in tensors if key.startswith(f"{name}.")}
        mine = {key for key in own if key.startswith(f"{name}.")}
        size = sum(own[key].numel() for key in mine)
        if name not in MOVED:
            table.append(TensorMatch(name, len(mine), size, "new"))
            continue
        shapes = [key for key in theirs & mine if tensors[key].shape != own[key].shape]
        if theirs != mine or shapes:
            wrong = sorted(theirs ^ mine) + shapes
            raise CheckpointError(
                f"{folder} does not fit this model: {', '.join(wrong[:5])}{' …' if len(wrong) > 5 else ''}"
            )
        copied = {key for key in mine if moved is None or key in moved}
        with torch.no_grad():
            for key in copied:
                own[key].copy_(tensors[key])
        for keys, outcome in ((copied, "copied"), (mine - copied, "new")):
            if keys:
                table.append(TensorMatch(name, len(keys), sum(own[key].numel() for key in keys), outcome))
    return table


def spec(input: Tokens | Values) -> dict[str, Any]:
    """An input's description as JSON has it."""
    description: dict[str, Any] = json.loads(json.dumps(describe(input)))
    return description


def _unlike(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    """How two inputs differ, as text: a vocabulary may have thousands of entries."""
    if theirs.get("codes") and ours.get("codes"):
        missing = len(set(ours["codes"]) - set(theirs["codes"]))
        return (
            f"another vocabulary: {theirs['vocab']:,} tokens there, {ours['vocab']:,} here, {missing:,} of them "
            "unknown there; pretrain on the same rows as are finetuned on"
        )
    return f"another input: {_short(theirs)} there, {_short(ours)} here"


def _short(input: dict[str, Any]) -> str:
    shown = {key: value for key, value in input.items() if key not in ("kind", "codes", "unknown")}
    return f"{input.get('kind')} {', '.join(f'{key} {value}' for key, value in shown.items())}"


def verify(folder: Path) -> str | None:
    """Why a checkpoint cannot be trusted, or None: every file must have the checksum it was written with. Of hidden
    files, which file systems and desktops add, those that are not listed are left out."""
    path = folder / MANIFEST
    if not folder.is_dir():
        return "it is not there"
    if path.exists() and not path.is_file():
        return f"{MANIFEST} is not a file"
    try:
        sums = json.loads(path.read_text(encoding="utf-8"))
        files = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()} - {MANIFEST}
        if missing := sorted(sums.keys() - files):
            return f"{missing[0]} is missing"
        if unlisted := sorted(name for name in files - sums.keys() if not Path(name).name.startswith(".")):
            return f"{MANIFEST} does not list {unlisted[0]}"
        for name, checksum in sums.items():
            if _checksum(folder / name) != checksum:
                return f"{name} is damaged"
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        gone = getattr(error, "filename", None)
        return f"{Path(gone).name} is missing" if gone else f"{MANIFEST} is damaged"
    return None


def _beside(folder: Path) -> Path:
    """Another name for every process: one that has lost the run may still be writing."""
    return folder.with_name(f".{folder.name}.{os.getpid()}-{_PROCESS}.tmp")


def _place(folder: Path, fill: Callable[[Path], object]) -> None:
    """Fill a folder beside its place, add checksums, rename it into place."""
    beside = _beside(folder)
    with _disk(folder):
        shutil.rmtree(beside, ignore_errors=True)
        try:
            beside.mkdir(parents=True)
            fill(beside)
            _settle(beside, folder)
        finally:
            shutil.rmtree(beside, ignore_errors=True)


def _settle(beside: Path, folder: Path) -> None:
    files = [path for path in beside.rglob("*") if path.is_file() and path.name != MANIFEST]
    names = sorted(path.relative_to(beside).as_posix() for path in files)
    sync(beside)
    write_json(beside / MANIFEST, {name: _checksum(beside / name) for name in names})
    if folder.exists():
        shutil.rmtree(folder)
    beside.rename(folder)


_FULL = ("No space left", "inline_container", "iostream")  # in torch's words for a write that failed


@contextlib.contextmanager
def _disk(folder: Path) -> Iterator[None]:
    """torch and safetensors report a full disk in their own ways."""
    try:
        with writing(folder):
            yield
    except (RuntimeError, SafetensorError) as error:
        text = str(error)
        if isinstance(error, RuntimeError) and not any(sign in text for sign in _FULL):
            raise
        # Their libraries do not say why a write failed: a file much smaller than the free space met another limit.
        size = sum(path.stat().st_size for path in _beside(folder).rglob("*") if path.is_file())
        limited = "No space left" not in text and _free(folder) > 2 * size + (1 << 20)
        number = errno.EFBIG if limited else errno.ENOSPC
        raise output_error(folder, OSError(number, text)) from error


def _free(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder.parent).free
    except OSError:
        return 0


def _steps(checkpoints: Path, kind: str) -> list[Path]:
    names = re.compile(rf"{kind}-[0-9]{{8,}}")  # a copy that somebody made beside is none
    found = [path for path in checkpoints.glob(f"{kind}-*") if names.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.partition("-")[2]))  # of nine digits behind those of eight


def _position(folder: Path) -> TrainingState:
    state = TrainingState.model_validate_json((folder / "position.json").read_text(encoding="utf-8"))
    if folder.name != f"step-{state.step:08d}":
        raise ValueError(f"position.json is of step {state.step}")
    check_scores(state.best)
    return state


def _tensors(folder: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the checkpoint {folder} cannot be read: {error}") from error


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
