"""Finished studies of any size, made up of a few runs that were really trained.

What is made up has the names, seeds and keys that training would give, and the scores, curves, answers and weights of a
run that was trained.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from spt import api
from spt.config.job import Job, digest
from spt.execution.queue import with_ancestors
from spt.execution.run_study import make_plan
from spt.runs.plan import PLAN
from spt.runtime.settings import Settings

TRAINED = 10  # pairs that are really trained
LINKED = ("env.json", "status.json", "metrics.jsonl", "predictions.parquet")

Part = tuple[str, bool]  # of a pair: stage, and whether it starts from another run
Pair = dict[Part, Path]


def recipe_files(folder: Path, count: int) -> list[Path]:
    """Recipes that train for six steps on 24 digits; a learning rate tells them apart."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number in range(count):
        train = {"steps": 6, "batch_size": 8, "evaluate_every": 3, "learning_rate": 0.01 + number / 100_000}
        recipe = {
            "task": {"name": "digits", "max_rows": 24},
            "model": {"name": "transformer", "d_model": 16, "n_layers": 1, "n_heads": 2, "d_ff": 16},
            "pretrain": {"objective": {"name": "masked", "ratio": 0.5}, "train": train},
            "finetune": {"train": dict(train)},  # YAML would abbreviate the same one by an alias
        }
        paths.append(folder / f"soak-{number:04}.yaml")
        paths[-1].write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return paths


def plan_comparison(recipes: Sequence[Path], seeds: int, root: Path) -> api.PlannedStudy:
    study = {"kind": "compare", "recipes": [str(path) for path in recipes]}
    return api.plan_study(study, seeds=seeds, out=root, settings=Settings(quiet=True, cpu=True))


def trained_pairs(recipe: Path, root: Path) -> list[Pair]:
    """Folders of runs that are really trained; finished ones are taken as they are."""
    study = plan_comparison([recipe], TRAINED, root)
    study.run()
    pairs: list[Pair] = [{} for _ in range(TRAINED)]
    for job in study.grid.jobs:
        for run in with_ancestors(job):
            pairs[run.seed][_part(run)] = root / run.name
    return pairs


def finish_study(study: api.PlannedStudy, trained: Sequence[Pair]) -> Path:
    """The study's folder, with those of its runs made up that are missing."""
    root = study.folder.parent
    for job in study.grid.jobs:
        first = with_ancestors(job)[0]
        pair = trained[int(first.key, 16) % TRAINED]
        for run in with_ancestors(job):
            if not (root / run.name / "result.json").exists():
                _make_run(root / run.name, run, pair[_part(run)])
    write_plan(study)
    return study.folder


def write_plan(study: api.PlannedStudy) -> None:
    study.folder.mkdir(parents=True, exist_ok=True)
    (study.folder / PLAN).write_text(make_plan(study.grid).model_dump_json(indent=2), encoding="utf-8")


def _part(job: Job) -> Part:
    return job.stage, job.parent is not None


def _make_run(folder: Path, job: Job, like: Path) -> None:
    """A run's folder with everything that a run like this one left, under its own name."""
    shutil.rmtree(folder, ignore_errors=True)
    best, its = folder / "checkpoints" / "best", like / "checkpoints" / "best"
    best.mkdir(parents=True)
    for name in LINKED:
        if (like / name).exists():
            os.link(like / name, folder / name)
    for path in its.iterdir():
        if path.suffix != ".json":
            os.link(path, best / path.name)
    _write_json(best / "about.json", {**_read_json(its / "about.json"), "key": job.key})
    digests = {**_read_json(its / "manifest.json"), "about.json": _sha256(best / "about.json")}
    _write_json(best / "manifest.json", digests)
    identity = {"seed": job.seed, "parent": job.parent_key, "recipe": job.resolved.name}
    _write_json(folder / "job.json", {**job.settings(), **identity})
    (folder / "recipe.yaml").write_text(job.resolved.to_yaml(), encoding="utf-8")
    own = {**identity, "key": job.key, "settings": digest(job.settings())}
    _write_json(folder / "result.json", {**_read_json(like / "result.json"), **own})


def _read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
