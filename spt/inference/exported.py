"""An exported folder: what it holds, and how it becomes a network again.

model.safetensors   the selected weights
config.json         all else that answers need; `format` says how it is to be read
README.md           the model card, for people
model.py            a copy of the user's own model file, where the model is one
checkpoint/         the sizes of a model from the Hugging Face hub, where the model is one
program.pt2         the network as a torch.export program, where that was asked for
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from torch import Tensor

from spt import __version__
from spt.config.load import path_options
from spt.config.plugins import is_path, listing
from spt.config.recipe import Part
from spt.config.validation import validation_messages
from spt.data.cache import from_spec
from spt.errors import CheckpointError, SptError, UsageError, one_line
from spt.inference.trained_model import CONFIG, TrainedModel
from spt.runs.files import finite
from spt.tasks.base import Target, Tokens, Values, describe
from spt.training.build import Architecture, build_network
from spt.training.objectives import Output
from spt.training.outputs import Computation

FORMAT = 1  # of config.json; raised when a field changes its meaning
WEIGHTS, CODE, CHECKPOINT, CARD, PROGRAM = "model.safetensors", "model.py", "checkpoint", "README.md", "program.pt2"


class ExportedConfig(BaseModel):
    """config.json: all of a trained model except its weights."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    spt: str = __version__  # which wrote it
    files: dict[str, str]  # SHA-256 of the weights, and of the model's code where it is the user's
    architecture: Architecture
    input: dict[str, Any]
    target: dict[str, Any] | None
    output: Output
    classes: tuple[str, ...]
    words: tuple[str, ...]
    reading: dict[str, Any]
    task: dict[str, Any]
    length: int = Field(ge=1)
    interval: float = Field(gt=0)
    sequences: Literal[1, 2]
    timed: bool
    computation: Computation
    about: dict[str, Any]
    temperature: float | None = Field(None, gt=0)

    def to_text(self) -> str:
        values = self.model_dump(mode="json")
        values["output"] = self.output._asdict()
        return json.dumps(finite(values), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def config_of(model: TrainedModel, part: Part, files: Mapping[str, str]) -> ExportedConfig:
    """What config.json says about a model whose part of the recipe is written as `part`."""
    return ExportedConfig(
        files=dict(files),
        architecture=model.architecture.model_copy(update={"model": part}),
        input=describe(model.input),
        target=None if model.target is None else describe(model.target),
        output=model.output,
        classes=model.classes,
        words=model.words,
        reading=model.reading,
        task=model.task,
        length=model.length,
        interval=model.interval,
        sequences=2 if model.sequences == 2 else 1,
        timed=model.timed,
        computation=model.computation,
        about=model.about,
        temperature=model.temperature,
    )


def open_exported(folder: Path, trust_code: bool) -> TrainedModel:
    """The model in an exported folder. Raises CheckpointError if it is damaged or of another version, UsageError for
    code that is not trusted."""
    config = _read_config(folder / CONFIG)
    try:
        input, target = from_spec(config.input), None if config.target is None else from_spec(config.target)
        kinds = isinstance(input, Tokens | Values) and isinstance(target, Target | None)
        if not kinds:
            raise ValueError(f"{config.input.get('kind')} is no input, or {config.target} is no target")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / CONFIG} is damaged: {one_line(error)}") from error
    for name, expected in config.files.items():
        if Path(name).name != name or checksum(folder / name) != expected:
            raise CheckpointError(f"{folder / name} is damaged: it is not the file that was exported; export it again")
    architecture = _anchored(config.architecture, folder, config.files, trust_code)
    try:
        network = build_network(architecture, input, config.output, config.length).eval()
    except (SptError, ValueError, TypeError, KeyError, RuntimeError) as error:  # options that do not go together
        why = str(error) if isinstance(error, SptError) else one_line(error)
        raise CheckpointError(f"the network that {folder / CONFIG} describes cannot be built: {why}") from error
    try:
        network.load_state_dict(safetensors.torch.load_file(folder / WEIGHTS), strict=True)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder / WEIGHTS} cannot be read: {one_line(error)}") from error
    except RuntimeError as error:
        raise CheckpointError(
            f"{folder / WEIGHTS} does not fit the network that {CONFIG} describes: {one_line(error)}"
        ) from error
    kept = {name: getattr(config, name) for name in ("output", "classes", "words", "reading", "task", "length")}
    kept |= {name: getattr(config, name) for name in ("interval", "sequences", "timed", "computation", "about")}
    kept["temperature"] = config.temperature
    return TrainedModel(network=network, architecture=architecture, input=input, target=target, **kept)


def _read_config(path: Path) -> ExportedConfig:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # a UnicodeDecodeError is a ValueError
        raise CheckpointError(f"{path} is damaged: it is not JSON ({one_line(error)})") from error
    if not isinstance(values, dict) or "format" not in values or "architecture" not in values:
        raise CheckpointError(f"{path} is not one that `spt export` writes; name an exported folder, or a run's")
    if values["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has format {values['format']!r} of spt {values.get('spt')}, this version ({__version__}) reads "
            f"{FORMAT}; install that version, or export the run again"
        )
    try:
        config = ExportedConfig.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise CheckpointError(f"{path} is damaged: {validation_messages(ExportedConfig, error)[0]}") from error
    if WEIGHTS not in config.files:
        raise CheckpointError(f"{path} is damaged: it does not name {WEIGHTS}")
    return config


def _anchored(architecture: Architecture, folder: Path, files: Mapping[str, str], trust_code: bool) -> Architecture:
    """The architecture with the files that lie in the folder. Code that is not spt's is only used where it is trusted,
    and of files only the copy that was exported."""
    part, ours = architecture.model, {row.name for row in listing("models") if row.source == "spt"}
    if is_path(part.name) and (part.name != CODE or CODE not in files):
        raise CheckpointError(f"{folder / CONFIG} is damaged: its model {part.name} is no file of this folder")
    if part.name not in ours and not trust_code:
        what = f"the file {folder / CODE}" if part.name == CODE else f"the plug-in {part.name}"
        raise UsageError(
            f"the network is code of its author's, {what}, which would run; if you trust it, say trust_code=True "
            "(commands: --trust-code)"
        )
    name = str((folder / CODE).resolve()) if part.name == CODE else part.name
    places = path_options("models", {"name": name, **part.options}) if part.name in ours else set()
    inside = {key: str((folder / CHECKPOINT).resolve()) for key in places}
    return architecture.model_copy(update={"model": Part(name=name, **{**part.options, **inside})})


def tensors_of(model: TrainedModel) -> dict[str, Tensor]:
    """The weights that answers need: without a second head that only training asks."""
    state = model.network.state_dict()
    return {name: values.cpu().contiguous() for name, values in state.items() if not name.startswith("denoiser.")}


def checksum(path: Path) -> str:
    """SHA-256 of a file. Raises CheckpointError where it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        what = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        raise CheckpointError(f"{path} {what}") from error
