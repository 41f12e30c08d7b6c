"""Checkpoints: finding, checking, fetching and loading them. Weights are read from safetensors only."""

import contextlib
import functools
import hashlib
import inspect
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError, safe_open
from transformers import AutoModel

from spt.models.hf.config import NOT_OF_EMBEDDINGS, Config, last_line, transformers_config
from spt.models.hf.sizes import Settings

logger = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"  # lists the files, where there are several
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack")


def fetch(config: Config) -> None:
    """Download the configuration and, if needed, the weights of a checkpoint on the hub.

    Raises ValueError if that fails.
    """
    if config.checkpoint is None or config.is_folder:
        return
    folder = _folder(config)
    here = folder is not None and (folder / "config.json").is_file()
    if folder is not None and here and not (config.pretrained and _missing_weights(folder)):
        return
    name, weights = str(config.checkpoint), [WEIGHTS, INDEX, "model-*-of-*.safetensors"]
    logger.info(f"fetching {name} from the Hugging Face hub")
    try:
        patterns = ["config.json", *(weights if config.pretrained else [])]
        snapshot = snapshot_download(name, revision=config.revision, allow_patterns=patterns)
    except GatedRepoError:
        raise ValueError(f"{name} is gated: ask for access on its page, then log in with: hf auth login") from None
    except RevisionNotFoundError:
        raise ValueError(f"{name} has no revision {config.revision}") from None
    except RepositoryNotFoundError:
        raise ValueError(f"the hub has no model {name}, or it is private: then log in with: hf auth login") from None
    except (LocalEntryNotFoundError, ConnectionError):  # the second: HF_HUB_OFFLINE
        raise ValueError(f"{name} cannot be fetched: the Hugging Face hub cannot be reached") from None
    except Exception as error:  # its client raises many other types
        raise ValueError(f"{name} cannot be fetched: {last_line(error)}") from error
    _check(config, Path(snapshot))


def identity(config: Config) -> dict[str, Any]:
    """What identifies the weights: the commit of a model on the hub, or the hashes of a folder's files. {} if none."""
    folder = None if config.checkpoint is None else _folder(config)
    if folder is None or not (folder / "config.json").is_file():
        return {}
    if not config.is_folder:
        return {"commit": folder.name}
    try:
        files = [folder / name for name in ("config.json", *(_weight_files(folder) if config.pretrained else []))]
    except ValueError:  # reported when the model is built
        return {}
    return {path.name: _hash(path, path.stat().st_mtime_ns, path.stat().st_size) for path in files if path.is_file()}


def load(config: Config) -> tuple[Any, list[str]]:
    """The model of transformers, in float32, and the names of the weights that its checkpoint lacks."""
    assert config.max_length is not None, "filled in from the task"
    if config.checkpoint is None:
        folder, architecture, stored = None, str(config.architecture), None
    else:
        folder = _check(config, _folder(config))
        stored = _read_json(folder / "config.json")
        architecture = str(stored.pop("model_type", None))
    settings = transformers_config(config, architecture, config.max_length, stored)
    settings.auto_map = {}  # code that a checkpoint names is not run
    common = {"dtype": torch.float32, "trust_remote_code": False}
    try:
        with _offline():
            if folder is None or not config.pretrained or torch.get_default_device().type == "meta":
                model, loading = AutoModel.from_config(settings, **common), {}
            else:
                with torch.device("cpu"):  # torch lists what makes tensors at the first use of a device, and within
                    torch.empty(0)  # from_pretrained linspace is another function, so would be missing for good
                model, loading = AutoModel.from_pretrained(
                    folder,
                    config=settings,
                    use_safetensors=True,
                    local_files_only=True,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # reported below
                    **common,
                )
    except Exception as error:
        if isinstance(error, MemoryError) or re.search("alloc|memory", str(error)):  # torch raises a RuntimeError
            raise
        raise ValueError(f"{config.label} cannot be built by transformers: {last_line(error)}") from error
    if loading.get("mismatched_keys"):
        raise ValueError(f"{config.label} has weights of other sizes than its config.json or options say")
    inputs = inspect.signature(model.forward).parameters
    if "inputs_embeds" not in inputs or {"pixel_values", "input_features", "decoder_input_ids"} & inputs.keys():
        raise ValueError(f"{config.label} {NOT_OF_EMBEDDINGS}")
    return model.train(), sorted(loading.get("missing_keys", ()))


def _folder(config: Config) -> Path | None:
    """The folder of a checkpoint, which need not exist; None for a model on the hub that has not been fetched."""
    name = str(config.checkpoint)
    if config.is_folder:
        return Path(name).expanduser()
    try:
        file = try_to_load_from_cache(name, "config.json", revision=config.revision)
    except HFValidationError:
        return None
    return Path(file).parent if isinstance(file, str) else None


def _weight_files(folder: Path) -> list[str]:
    """The files that hold the weights, which need not exist."""
    if (folder / WEIGHTS).is_file() or not (folder / INDEX).is_file():
        return [WEIGHTS]
    parts = _read_json(folder / INDEX).get("weight_map")
    return sorted({str(name) for name in parts.values()}) if isinstance(parts, dict) else [WEIGHTS]


def _missing_weights(folder: Path) -> list[str]:
    return [name for name in _weight_files(folder) if not (folder / name).is_file()]


def _check(config: Config, folder: Path | None) -> Path:
    """The folder, if the checkpoint can be loaded from it. Otherwise raises ValueError."""
    checkpoint, fetchable = f"the checkpoint {config.checkpoint}", not config.is_folder
    advice = "get it with: spt data prepare RECIPE" if fetchable else "set pretrained: false to use only its sizes"
    if folder is None or (fetchable and not (folder / "config.json").is_file()):
        raise ValueError(f"{checkpoint} is not on this machine; {advice}")
    if not folder.is_dir():
        raise ValueError(f"{checkpoint} is not a folder")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{checkpoint} has no config.json; save_pretrained of transformers writes one")
    if (folder / "adapter_config.json").exists():
        raise ValueError(f"{checkpoint} is an adapter; merge it into its model and save that")
    if not config.pretrained:
        return folder
    missing = _missing_weights(folder)
    if missing == [WEIGHTS] and any(any(folder.glob(pattern)) for pattern in PICKLED):
        raise ValueError(
            f"{checkpoint} has its weights in a format that can contain programs, which is never opened; save them as "
            "safetensors"
        )
    if missing:
        raise ValueError(f"{checkpoint} lacks {missing[0]}; {advice}")
    for name in _weight_files(folder):
        try:
            with safe_open(folder / name, framework="pt") as file:
                file.keys()
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{folder / name} cannot be read: {last_line(error)}") from error
    return folder


def _read_json(path: Path) -> Settings:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {last_line(error)}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} was not written by transformers: it holds no settings")
    return content


@functools.cache
def _hash(path: Path, modified: int, size: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Inside the context, the hub cannot be reached: some models would fetch programs for a GPU from there."""
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
