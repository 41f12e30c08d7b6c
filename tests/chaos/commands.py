"""The commands that are disturbed, on a recipe so small that each takes a second or two once imports are done."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import yaml

TRAIN = {"batch_size": 8, "learning_rate": 0.01, "evaluate_every": 3}
RECIPE = {
    "task": {"name": "digits", "max_rows": 24},
    "model": {"name": "transformer", "d_model": 16, "n_layers": 1, "n_heads": 2, "d_ff": 16, "dropout": 0.1},
    "pretrain": {"objective": {"name": "masked", "ratio": 0.5}, "train": {"steps": 8, **TRAIN}},
    "finetune": {"train": {"epochs": 3, "schedule": "plateau", "plateau_patience": 1, **TRAIN}},
}
STUDY = {"kind": "data", "recipes": ["small.yaml"], "fractions": [0.5, 1.0], "seeds": [0], "runtime": None}
SAVING = ("--save-every", "0")  # a checkpoint after every step


class Scenario(NamedTuple):
    """Commands that follow one another, and what is the same however they are carried out."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    weight: int  # how often it is drawn
    same_as: str = ""  # whose undisturbed day this one is held against, if not its own
    cold: bool = False  # a process from the start, imports included, in place of a fork that has them behind it
    exact: bool = True  # bit for bit; else within rounding

    @property
    def has_children(self) -> bool:
        return self.commands[0][-2:] == WORKERS or "--num-processes" in self.commands[0]


ALONE = ("--jobs", "1")  # networks this small are trained by workers, unless told otherwise
WORKERS = ("--jobs", "2")
COMPARE = ("compare", "small.yaml", "--seeds", "2")
GRID = ("study", "run", "study.yaml")
WORK = ("study", "work", "study.yaml", "--lease", "5")
TUNE = ("study", "tune", "small.yaml", "--seeds", "1", "--space", "learning_rate=0.001,0.01")
STAGES = (("pretrain", "small.yaml"), ("finetune", "small.yaml"))

SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("compare", ((*COMPARE, *ALONE),), 20),
        Scenario("compare, cold", ((*COMPARE, *ALONE),), 3, same_as="compare", cold=True),
        Scenario("compare, 2 jobs", ((*COMPARE, *WORKERS),), 5, same_as="compare"),
        Scenario("compare, 2 processes", ((*COMPARE, "--num-processes", "2"),), 3, exact=False),
        Scenario("study run", ((*GRID, *ALONE),), 10),
        Scenario("study run, 2 jobs", ((*GRID, *WORKERS),), 3, same_as="study run"),
        Scenario("study work", (WORK,), 5, same_as="study run"),
        Scenario("study tune", ((*TUNE, *ALONE),), 8),
        Scenario("pretrain, finetune", STAGES, 44),
        Scenario("pretrain, finetune, cold", STAGES, 4, same_as="pretrain, finetune", cold=True),
    )
}


def write_inputs(folder: Path) -> None:
    """The recipe and the study's file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "small.yaml").write_text(yaml.safe_dump(RECIPE))
    (folder / "study.yaml").write_text(yaml.safe_dump({key: value for key, value in STUDY.items() if value}))


def around(base: Mapping[str, str], place: Path, paths: str) -> dict[str, str]:
    """The variables of a command in this place."""
    ours = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    folders = {"SPT_RUNS_DIR": "runs", "SPT_CACHE_DIR": "cache", "TMPDIR": "tmp"}
    left_out = ("PYTEST_CURRENT_TEST", "SPT_JOBS", "SPT_DEBUG", "WORLD_SIZE", "RANK")
    kept = {name: value for name, value in base.items() if name not in left_out}
    return {**kept, **ours, **{name: str(place / folder) for name, folder in folders.items()}}
