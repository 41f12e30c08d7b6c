"""Arrays computed by the published implementations: reading them, and holding ours against them."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
DTYPES = {"float64": torch.float64, "float32": torch.float32}
# What a case is given: parameters, buffers, inputs and cotangents. All else is a result and has to be met.
GIVEN = re.compile(
    r"(param0?|buffer|stats)\..*|u|g|x|q|k|v|g_kernel|gq|gk|gv|state0|h0|mask|integration_timesteps|l_kernel"
)

Found = Tensor | tuple[Tensor, Tensor]  # ours; or ours and theirs, where only a function of both can be compared
Adapter = Callable[["Case"], Mapping[str, Found]]


class Case:
    """One case of one file, its arrays in one precision, on one device."""

    def __init__(self, file: str, name: str, dtype: torch.dtype, device: str = "cpu") -> None:
        self.file, self.name, self.dtype, self.device = file, name, dtype, device
        entry = index()["files"][file]["cases"][name]
        self.config: dict[str, Any] = entry["config"]
        self.names = list(entry["arrays"])

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def __repr__(self) -> str:
        return f"{self.file}: {self.name}"

    def array(self, name: str) -> Tensor:
        """In this case's precision, complex arrays complex, whole numbers as they are."""
        tensor = torch.from_numpy(np.array(arrays(self.file)[f"{self.name}/{name}"])).to(self.device)
        if tensor.is_complex():
            return tensor.to(torch.complex64 if self.dtype == torch.float32 else torch.complex128)
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def raw(self, prefix: str = "param.") -> dict[str, Tensor]:
        """Fresh leaves with gradients, by the names behind the prefix."""
        found = {name: self.array(name) for name in self.names if name.startswith(prefix)}
        return {name.removeprefix(prefix): tensor.requires_grad_() for name, tensor in found.items()}

    @property
    def results(self) -> list[str]:
        return [name for name in self.names if not GIVEN.fullmatch(name)]


def gradients(total: Tensor, leaves: Mapping[str, Tensor], prefix: str = "grad.") -> dict[str, Found]:
    """Of a scalar with respect to named leaves; zeros where it does not depend on one."""
    found = torch.autograd.grad(total, list(leaves.values()), retain_graph=True, allow_unused=True)
    return {
        f"{prefix}{name}": torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), found, strict=True)
    }


def deviation(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, relative to the largest entry of theirs."""
    assert ours.shape == theirs.shape, f"shape {tuple(ours.shape)}, not {tuple(theirs.shape)}"
    wide = torch.complex128 if theirs.is_complex() else torch.float64
    ours, theirs = ours.detach().to(wide), theirs.detach().to(wide)
    largest = float(theirs.abs().max()) if theirs.numel() else 0.0
    return float((ours - theirs).abs().max()) / (largest or 1.0) if theirs.numel() else 0.0


def folder() -> Path:
    return Path(os.environ.get("SPT_GOLDEN") or ROOT.parent / "shared" / "golden")


@cache
def index() -> dict[str, Any]:
    """The index of the folder; no files where there is no folder."""
    path = folder() / "index.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"files": {}}


@cache
def arrays(file: str) -> Mapping[str, np.ndarray]:
    return np.load(folder() / file)


def all_cases() -> Iterator[tuple[str, str]]:
    for file, entry in index()["files"].items():
        for name in entry["cases"]:
            yield file, name
