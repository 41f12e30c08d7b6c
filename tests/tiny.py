"""Small things that many tests need."""

import hashlib
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from warm import Server

from spt.config import load as recipes
from spt.config.job import Job
from spt.config.recipe import ResolvedRecipe, Train
from spt.data.dataset import identify_data
from spt.models.base import Backbone
from spt.runs.result import Result
from spt.runtime.distributed import Runtime
from spt.runtime.settings import Settings
from spt.training.optimizer import optimizer_groups
from spt.training.stage import run_stage


def load(source: str, overrides: Sequence[str] = (), *, smoke: bool = False) -> ResolvedRecipe:
    """A recipe with the identity of its data set, as jobs need it."""
    return identify_data(recipes.load(source, overrides, smoke=smoke))


ROOT = Path(__file__).resolve().parent.parent

RECIPE: dict[str, Any] = {
    "task": {"name": "digits", "max_rows": 24},
    "model": {"name": "transformer", "d_model": 16, "n_layers": 1, "n_heads": 2, "d_ff": 16},
    "pretrain": {
        "objective": {"name": "masked", "ratio": 0.5},
        "train": {"steps": 6, "batch_size": 8, "learning_rate": 0.01, "evaluate_every": 3},
    },
    "finetune": {"train": {"steps": 6, "batch_size": 8, "learning_rate": 0.01, "evaluate_every": 3}},
}

# A task of 40 rows, sequences of 3 to 12 steps, one class or two real targets: the length parity, or length and mean.
TASK = '''
"""Random sequences of different lengths."""
import numpy as np
from spt.tasks.base import Classes, Reals, Split, TaskConfig, TaskData, Tokens, Values

class Config(TaskConfig):
    kind: str = "tokens"
    target: str = "class"
    shift: int = 0

def load(config, raw):
    rng = np.random.default_rng(config.shift)
    def split(n):
        lengths = rng.integers(3, 13, n)
        if config.kind == "tokens":
            rows = [rng.integers(0, 9, length).astype(np.uint8) for length in lengths]
        elif config.kind == "bytes":
            rows = [rng.integers(0, 256, (length, 2)).astype(np.uint8) for length in lengths]
        else:
            rows = [rng.normal(size=(length, 2)).astype(np.float32) for length in lengths]
        if config.target == "class":
            targets = np.asarray([row.sum() > 4.5 * len(row) for row in rows], np.int64)
        else:
            targets = np.stack([lengths / 10, [float(row.mean()) for row in rows]], axis=1)
        return Split.from_rows(rows, targets)
    inputs = {"tokens": Tokens(9), "bytes": Values(2, (127.5, 127.5), (73.0, 73.0), levels=256)}
    return TaskData(inputs.get(config.kind, Values(2)), Classes(2) if config.target == "class" else Reals(2),
                    split(40), split(17), split(19))
'''


# A model of one linear map a layer: FORWARD is what it returns, EXTRA stands in its class body.
MODEL = """
import torch
from torch import nn
from spt.models.base import Backbone, BackboneConfig, Mixer, ParamGroup

class Config(BackboneConfig):
    pass

class Map(Mixer):
    def __init__(self, d):
        super().__init__()
        self.map = nn.Linear(d, d)
    def forward(self, x, context):
        x = self.map(x)
        return FORWARD
    def flops(self, length):
        return 2.0 * length * self.map.weight.numel()
    EXTRA

def build(config):
    return Backbone(config, lambda: [Map(config.d_model)])
"""


def model_file(folder: Path, forward: str = "x", extra: str = "") -> Path:
    path = folder / "mine.py"
    path.write_text(MODEL.replace("FORWARD", forward).replace("EXTRA", extra))
    return path


def changed(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A deep copy with `a__b=value` put at a.b."""
    copy: dict[str, Any] = yaml.safe_load(yaml.safe_dump(base))
    for key, value in changes.items():
        *path, last = key.split("__")
        node = copy
        for step in path:
            node = node.setdefault(step, {})
        node[last] = deepcopy(value)  # another change may reach into it
    return copy


def recipe_file(folder: Path, base: dict[str, Any] | None = None, **changes: Any) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(changed(RECIPE if base is None else base, **changes)))
    return path


def loaded(folder: Path, **changes: Any) -> ResolvedRecipe:
    return load(str(recipe_file(folder, **changes)))


def own_task(folder: Path, **changes: Any) -> ResolvedRecipe:
    """A recipe over TASK; changes may override `task__kind` and the rest."""
    (folder / "toy.py").write_text(TASK)
    return loaded(folder, **{"task": {"name": "./toy.py"}, **changes})


def held_to_table(backbone: Backbone, table: dict[str, tuple[float, float]]) -> None:
    """Rate and decay of every parameter, by patterns of names, at a recipe's 0.01 and 0.05; no pattern is idle."""
    train, seen = Train(steps=1, batch_size=1, learning_rate=0.01, weight_decay=0.05), set()
    for group in optimizer_groups(backbone, train):
        for parameter in group.names:
            own = re.sub(r"^mixers\.\d+\.", "", parameter)
            pattern = next(pattern for pattern in table if re.fullmatch(pattern, own))
            found = (group.learning_rate, group.weight_decay)
            assert all(math.isclose(a, b) for a, b in zip(found, table[pattern], strict=True)), (parameter, found)
            seen.add(pattern)
    assert seen == set(table), "a line of the table that no parameter meets"


def spt_job(one: ResolvedRecipe, seed: int = 0) -> Job:
    return Job(one, "finetune", seed, Job(one, "pretrain", seed))


def run(job: Job, root: Path, **settings: Any) -> Result:
    return run_stage(job, root, Runtime(Settings(quiet=True, cpu=True, **settings)))


def spt(
    *arguments: str | Path, cwd: Path, env: dict[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """The real command in a process of its own; forked from one that has imported what it needs, where that will do."""
    words, around = list(map(str, arguments)), environment(env)
    if not options and server().serves(around):
        return server().run(words, cwd, around, timeout=300)
    command = [sys.executable, "-m", "spt_cli", *words]
    return subprocess.run(command, cwd=cwd, env=around, capture_output=True, text=True, timeout=300, **options)


@cache
def server() -> Server:
    return Server(environment())


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """Of a process elsewhere that imports this checkout."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = ("SPT_RUNS_DIR", "PYTEST_CURRENT_TEST")  # the test's: with the second no server would outlive it
    kept = {name: value for name, value in os.environ.items() if name not in own}
    return {**kept, "PYTHONPATH": path, "COLUMNS": "120", **(extra or {})}


def weights(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors")


def reseal(checkpoint: Path) -> None:
    """Have the manifest say that changed files are as they should be."""
    files = [path for path in checkpoint.rglob("*") if path.is_file() and path.name != "manifest.json"]
    sums = {path.relative_to(checkpoint).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    (checkpoint / "manifest.json").write_text(json.dumps(sums))
