"""Every packaged recipe trains: all for a step on random rows, twelve a day by the whole command."""

import datetime
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_reference import asked, data_of, stand_in
from tiny import load as load_with_data
from typer.testing import CliRunner

from spt.config.job import Job
from spt.config.load import load, packaged
from spt.config.recipe import Recipe, ResolvedRecipe
from spt.runtime.distributed import Runtime
from spt.runtime.settings import Settings
from spt.studies.schema import read as read_study
from spt.tasks.base import Classes, Reals, Split, TaskData, Tokens
from spt.training.build import build_backbone, build_stage
from spt.training.objectives import Output
from spt.training.optimizer import adamw, set_rates
from spt.training.step import Learner
from spt_cli import app

EVERY = packaged()
ROWS = 4  # of each split, as many as a batch
TODAY = 12  # recipes whose whole command is run
HUGE = ("books/dlr",)  # 309 million parameters: built on the meta device in test_reference.py
PRETRAINED = ("lra/image-pythia", "lra/text-pythia")  # their weights are stood in for


# ------------------------------------------------------------------------------------------------------------ one step


def random_task(recipe: Recipe, length: int) -> TaskData:
    """Random rows of the kind that a recipe's task has."""
    digits = Tokens(17), Output("cross_entropy", False, 1, classes=10), length
    input, output, _ = digits if recipe.task.name == "digits" else asked(recipe)
    classes = output.loss == "cross_entropy"
    target = Classes(output.classes, output.per_step) if classes else Reals(output.size, output.per_step)
    rng, timed = np.random.default_rng(0), recipe.task.name == "pendulum"

    def row() -> np.ndarray:
        if isinstance(input, Tokens):
            return rng.integers(0, input.vocab, length).astype(np.uint8)
        if input.levels is not None:
            return rng.integers(0, input.levels, (length, input.channels)).astype(np.uint8)
        return rng.normal(size=(length, input.channels)).astype(np.float32)

    def answers() -> np.ndarray:
        shape = (ROWS, length) if output.per_step else (ROWS,)
        if isinstance(target, Classes):
            return rng.integers(0, target.count, shape)
        return rng.normal(size=(*shape, target.size)).astype(np.float32)

    def split() -> Split:
        if output.sequences == 2:
            return Split.from_pairs([(row(), row()) for _ in range(ROWS)], answers())
        times = [rng.exponential(1.0, length).astype(np.float32) for _ in range(ROWS)] if timed else None
        made = Split.from_rows([row() for _ in range(ROWS)], answers(), per_step=output.per_step, steps=times)
        return replace(made, text_bytes=made.lengths) if recipe.task.name == "books" else made

    data = TaskData(input, target, split(), split(), split())
    data.check()
    return data


def takes_a_step(job: Job) -> None:
    """Of the rates that the recipe has behind its warm-up; every number stays finite, and weights move."""
    setup, runtime = build_stage(job), Runtime(Settings(quiet=True, cpu=True))
    setup.model.hides_steps(setup.hides)
    learner = Learner(setup, setup.model, adamw(setup.model, setup.train, runtime.device), runtime)
    before = {name: p.detach().clone() for name, p in setup.model.named_parameters()}
    set_rates(learner.optimizer, 0, 4, setup.train, 0)
    rows = np.arange(setup.train.batch_size)
    result = learner._step(rows, learner.micro_batches(rows, 0, len(rows)), 0)
    assert result.outcome().finite and result.weight > 0 and result.operations.total > 0
    after = dict(setup.model.named_parameters())
    assert all(torch.isfinite(p).all() for p in after.values())
    moved = {name.partition(".")[0] for name, p in after.items() if not torch.equal(p, before[name])}
    assert moved >= {"encoder", "backbone"} | ({"head"} & {name.partition(".")[0] for name in before})


@pytest.mark.parametrize("name", EVERY)
def test_a_recipe_is_trained_for_a_step(name, tmp_path, monkeypatch):
    """Each arm's stages, small, on random rows: every option is obeyed, and fits the others."""
    if name in PRETRAINED:
        stand_in(tmp_path, monkeypatch, intermediate_size=64)
    train_small(load(name, smoke=True), monkeypatch)


def train_small(one: ResolvedRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of both stages on random rows."""
    one = replace(one, data="random rows")
    pretrained = one.recipe.model.options.get("checkpoint") is not None
    with torch.device("meta"):
        multiple = 1 if pretrained else build_backbone(one.recipe.model, 2**16).length_multiple
    data = random_task(one.recipe, math.lcm(32, multiple))
    monkeypatch.setattr("spt.training.build.open_stage", lambda recipe, stage: data)
    for job in (Job(one, "pretrain", 0), Job(one, "finetune", 0)):
        takes_a_step(job)


VARIANTS = [
    pytest.param(study, recipe, level, id=f"{study}-{recipe}-{level}")
    for study in ("spt-table-1", "spt-table-2", "s5-table-1")
    for known in [read_study(study).study]
    for recipe in known.recipes
    for level, changes in known.levels(recipe).items()
    if changes
]


@pytest.mark.slow
@pytest.mark.parametrize(("study", "recipe", "level"), VARIANTS)
def test_a_variant_of_a_packaged_study_is_trained_for_a_step(study, recipe, level, tmp_path, monkeypatch):
    """As the recipes are, with what the study changes in them."""
    one = load(recipe, smoke=True, changes=read_study(study).study.changes_of(recipe, level))
    if one.recipe.model.options.get("checkpoint") is not None:
        stand_in(tmp_path, monkeypatch, intermediate_size=64)
    train_small(one, monkeypatch)


# --------------------------------------------------------------------------------------------------- the whole command


def todays(day: int) -> list[str]:
    """Twelve recipes, others the next day; every one within days enough for all."""
    names = list(EVERY)
    return [names[(TODAY * day + k) % len(names)] for k in range(TODAY)]


def test_every_recipe_has_its_turn():
    days = -(-len(EVERY) // TODAY)
    assert len(set(todays(7))) == TODAY
    assert {name for day in range(days) for name in todays(100 + day)} == set(EVERY)


@pytest.mark.slow
@pytest.mark.parametrize("name", todays(datetime.date.today().toordinal()))
def test_the_command_runs_on_a_recipe_in_smoke_size(name, tmp_path, data_dir, monkeypatch):
    """`spt compare NAME --smoke` to its report, after its network was built at full size on rows of its data."""
    monkeypatch.setenv("SPT_DATA_DIR", str(data_of(name, tmp_path, data_dir)))
    if name in PRETRAINED:
        stand_in(tmp_path / "hub", monkeypatch, intermediate_size=64)
    if name not in HUGE:
        one = load_with_data(name, smoke="full")
        for job in (Job(one, "finetune", 0, Job(one, "pretrain", 0)), Job(one, "pretrain", 0)):
            assert build_stage(job).model.parameter_counts()["total"] > 1_000
    arguments = ["compare", name, "--smoke", "--seeds", "1", "--cpu", "--jobs", "1", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    (report,) = (tmp_path / "out").rglob("report.md")
    assert "smoke run" in report.read_text(encoding="utf-8")
