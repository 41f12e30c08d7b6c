"""Studies: their files, what each kind lays out, and the choice that tuning makes."""

import itertools
import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tiny import RECIPE, load, model_file, own_task, recipe_file

from spt.config.budget import example_count
from spt.config.job import Job
from spt.config.plugins import find_plugin
from spt.config.recipe import Part
from spt.data.dataset import _units_in_use, open_task
from spt.errors import DataError, OutputError, RecipeError, UsageError
from spt.execution.estimate import MeasuredCosts
from spt.execution.queue import RunRequest, attempt_run
from spt.execution.run_study import ExecutionTarget, check_recipes_build, make_plan, run_study, study_folder
from spt.runs.folder import RunFolder
from spt.runs.plan import StudyPlan, read_plan, run_names
from spt.runtime.distributed import Runtime
from spt.runtime.settings import Settings
from spt.studies import selection
from spt.studies.grid import expand
from spt.studies.schema import (
    KINDS,
    Range,
    StudySource,
    from_mapping,
    packaged,
    part_of,
    read,
    to_yaml,
    validate,
    with_absolute_paths,
)
from spt.studies.space import _draw, _multiple, settings
from spt.studies.status import run_state, study_status
from spt.tasks.base import TaskConfig, Tokens
from spt.training.budget import plan_steps
from spt.training.build import build_stage
from spt.training.stage import run_stage


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def runtime():
    return Runtime(Settings(quiet=True, cpu=True))


@pytest.fixture
def meter(tmp_path, runtime):
    return MeasuredCosts(tmp_path / "runs", runtime)


EPOCHS = {"epochs": 2, "batch_size": 8, "learning_rate": 0.01}


def laid(tmp_path, meter, kind, smoke=False, recipe=None, **options):
    path = recipe_file(tmp_path, **(recipe or {}))
    return expand(validate({"kind": kind, "recipes": [str(path)], "seeds": 2, **options}, "here"), smoke, meter)


def by_epochs(**changes):
    return {"pretrain__train": {**EPOCHS, "epochs": 3}, "finetune__train": EPOCHS, **changes}


# Files

EXAMPLES = {
    "compare": {},
    "models": {
        "recipes": ["quickstart", "quickstart-dlr"],
        "match": "flops",
        "scale": "depth",
        "scaled": {"quickstart": {}, "quickstart-dlr": {"n_layers": 4}},
    },
    "variants": {
        "recipes": ["quickstart", "quickstart-dlr"],
        "variants": {"own": {}, "DSS": {"model": {"name": "dss", "d_model": 8}, "finetune.train.steps": 4}},
        "where": [
            {"recipes": ["quickstart"], "levels": ["DSS"], "set": {"model.d_model": 16}},
            {"recipes": None, "levels": None, "set": {"task.max_rows": 64}},
        ],
    },
    "compute": {"shares": [0, 0.25], "match": "flops", "total": 1e9},
    "data": {"fractions": [0.1, 1], "stratified": True, "pretrain_on": "all", "hold": "epochs"},
    "size": {"sizes": {"small": {"d_model": 8}}},
    "init": {"initialisations": ["structured", "random"]},
    "reach": {"reaches": [4, 16, "full"]},
    "objective": {"objectives": [{"name": "masked", "ratio": 0.5, "span": 4}, {"name": "next"}]},
    "tune": {"space": {"learning_rate": [0.1, 0.01], "batch_size": [4, 8]}, "trial_seeds": [3]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_study_is_what_its_file_says(kind, tmp_path):
    study = validate({"kind": kind, "recipes": ["quickstart"], "set": {"model.d_model": 16}, **EXAMPLES[kind]}, "here")
    path = tmp_path / "study.yaml"
    path.write_text(to_yaml(study, tmp_path))
    assert read(str(path)).study == study
    assert read(str(tmp_path)).study == study  # by its folder
    for name, value in EXAMPLES[kind].items():
        assert yaml.safe_load(path.read_text())[name] == value


def test_a_section_in_a_studys_set_changes_what_it_names(tmp_path):
    """An objective is another one, of which the former one's options are no part."""
    path = tmp_path / "study.yaml"
    path.write_text(
        "kind: compare\nrecipes: [quickstart]\n"
        "set: {finetune.train: {learning_rate: 0.5}, pretrain.objective: {name: next, loss: l1}}\n"
    )
    assert read(str(path)).study.set == {
        "finetune.train.learning_rate": 0.5,
        "pretrain.objective": {"name": "next", "loss": "l1"},
    }


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        ({"kind": "computer"}, "did you mean compute"),
        ({"kind": ["compute"]}, "is unknown"),
        ({}, "no kind is given; known: compare"),
        ([], "is not a study"),
        ({"kind": "compute"}, "recipes: missing"),
        ({"kind": "compute", "recipes": []}, "recipes"),
        ({"kind": "compute", "recipes": ["a", "a"]}, "listed twice"),
        ({"kind": "compute", "recipes": ["a"], "shares": [0.2, 1]}, r"shares must be different numbers in \[0, 1\)"),
        ({"kind": "compute", "recipes": ["a"], "shares": [0]}, "above 0"),
        ({"kind": "compute", "recipes": ["a"], "match": "steps"}, "match"),
        ({"kind": "compute", "recipes": ["a"], "total": {"b": 3}}, "total"),
        ({"kind": "compute", "recipes": ["a"], "total": -1}, "total must be above 0"),
        ({"kind": "data", "recipes": ["a"], "fractions": [0.1, 0.1]}, "fractions"),
        ({"kind": "data", "recipes": ["a"], "fraction": [0.1]}, "unknown key; did you mean fractions"),
        ({"kind": "size", "recipes": ["a"], "sizes": {}}, "sizes"),
        ({"kind": "size", "recipes": ["a"], "sizes": {"x": 3}}, "sizes.x"),
        ({"kind": "size", "recipes": ["a"], "sizes": {"x": {}}}, "size x must be a mapping"),
        ({"kind": "size", "recipes": ["a"], "sizes": {"a": {"x": 3}}}, "size x must be a mapping"),
        ({"kind": "size", "recipes": ["a", "b"], "sizes": {"a": {"x": {"d_model": 8}}}}, "not for b"),
        ({"kind": "variants", "recipes": ["a"], "variants": {}}, "variants"),
        ({"kind": "variants", "recipes": ["a"], "variants": {"a": {}}}, "a has no variant"),
        ({"kind": "variants", "recipes": ["a"], "variants": {"a": {"x": 1}}}, "variant x must be a mapping"),
        (
            {"kind": "variants", "recipes": ["a", "b"], "variants": {"a": {"x": {}}}},
            "variants are given by recipe, but",
        ),
        ({"kind": "variants", "recipes": ["a"], "variants": {"x": {}}, "scale": "depth"}, "nothing is scaled while"),
        ({"kind": "models", "recipes": ["a", "b"], "match": "none", "scale": "depth"}, "say what is made equal"),
        (
            {"kind": "variants", "recipes": ["a", "b"], "match": "flops", "variants": {"x": {}}}
            | {"scaled": {"a": {"x": {}}}},
            "scaled's variants are given by recipe, but not for b",
        ),
        ({"kind": "compare", "recipes": ["a"], "where": [{"set": {}}]}, "where.0.set: empty"),
        ({"kind": "compare", "recipes": ["a"], "where": [{"set": {"x": 1}}] * 2}, r"the rule where\.1 is listed"),
        (
            {"kind": "init", "recipes": ["a"], "where": [{"set": {"model.initialisation": "random"}}]},
            r"where\.0\.set: model\.initialisation would change .*, which this study varies",
        ),
        ({"kind": "init", "recipes": ["a"], "where": [{"set": {"model": {"name": "s4"}}}]}, "model would change"),
        (
            {
                "kind": "objective",
                "recipes": ["a"],
                "objectives": [{"name": "masked", "ratio": 0.5}],
                "where": [{"set": {"pretrain.objective.loss": "mse", "pretrain.objective.ratio": 0.1}}],
            },
            r"pretrain\.objective\.ratio would change",
        ),
        ({"kind": "variants", "recipes": ["a"], "variants": {" ": {}}}, "a variant is called ' '; a name is one line"),
        ({"kind": "variants", "recipes": ["a"], "variants": {"a": {"x\ny": {}}}}, r"'x\\ny'; a name is one line"),
        ({"kind": "size", "recipes": ["a"], "sizes": {"x" * 201: {"d_model": 1}}}, "xxx.* of at most 200 letters"),
        ({"kind": "compare", "recipes": ["a"], "where": [{"recipes": ["b"], "set": {"x": 1}}]}, "b is not one of the"),
        ({"kind": "compare", "recipes": ["a"], "where": [{"levels": ["b"], "set": {"x": 1}}]}, "only the levels of"),
        ({"kind": "init", "recipes": ["a"], "where": [{"levels": ["b"], "set": {"x": 1}}]}, "'b' is no level of"),
        (
            {"kind": "size", "recipes": ["a"], "sizes": {"a": {"x": 3}}, "where": [{"levels": ["x"], "set": {"x": 1}}]},
            "'x' is no level|only the levels|size x must be",
        ),
        ({"kind": "init", "recipes": ["a"], "initialisations": ["hippo"]}, "initialisations"),
        ({"kind": "reach", "recipes": ["a"], "reaches": []}, "reaches: empty"),
        ({"kind": "reach", "recipes": ["a"], "reaches": [4, 4]}, "reaches: 4 is listed twice"),
        ({"kind": "reach", "recipes": ["a"], "reaches": [0, 4]}, "different whole numbers from 1, or full"),
        ({"kind": "reach", "recipes": ["a"], "reaches": ["all"]}, "reaches"),
        ({"kind": "reach", "recipes": ["a"], "where": [{"set": {"model.reach": 2}}]}, "model.reach would change"),
        ({"kind": "objective", "recipes": ["a"], "objectives": [{"ratio": 0.5}]}, "needs a name"),
        ({"kind": "tune", "recipes": ["a"], "space": {"lr": [1]}}, "did you mean learning_rate"),
        ({"kind": "tune", "recipes": ["a"], "space": {"pretrain.lerning_rate": [1]}}, r"mean pretrain\.learning_rate"),
        ({"kind": "tune", "recipes": ["a"], "space": {"learning_rate": []}}, "different values"),
        ({"kind": "tune", "recipes": ["a"], "space": {"learning_rate": {"low": 0, "high": 1}}}, "low 0 must lie below"),
        ({"kind": "tune", "recipes": ["a"], "space": {"learning_rate": {"low": 1e-4, "high": 1}}}, "number of trials"),
        ({"kind": "tune", "recipes": ["a"], "space": {"epochs": [1, 2]}}, "not a tunable setting"),
        ({"kind": "compare", "recipes": ["a"], "seeds": 0}, "seeds"),
        (
            {"kind": "compare", "recipes": ["a"], "seeds": "x"},
            '^here: seeds: input should be a valid integer or a valid array, not "x"$',
        ),
        ({"kind": "compare", "recipes": ["a"], "seeds": [1, 1]}, "seeds"),
    ],
)
def test_a_wrong_study_is_refused(raw, complaint):
    with pytest.raises(UsageError, match=complaint):
        validate(raw, "here")


def test_a_study_of_the_full_reach_alone_is_refused_but_may_be_a_part():
    raw = {"kind": "reach", "recipes": ["quickstart"]}
    with pytest.raises(UsageError, match="reaches has full alone, which compares nothing"):
        from_mapping({**raw, "reaches": ["full"]}, "here")
    part = part_of(from_mapping({**raw, "reaches": [4]}, "here"), levels=["full"])
    assert [*part.study.levels("quickstart")] == ["full"]


def test_levels_that_look_like_numbers_are_named_by_rules_too(tmp_path):
    text = "kind: variants\nrecipes: [quickstart]\nvariants: {1: {}, 0.5: {}, true: {}, yes: {}}\n"
    (tmp_path / "mine.yaml").write_text(text + "where: [{levels: [0.50, 1, true, yes], set: {model.d_model: 8}}]\n")
    study = read(str(tmp_path / "mine.yaml")).study
    assert study.where[0].levels == ("0.5", "1", "true", "yes")
    assert all(study.rules("quickstart", level) for level in study.levels("quickstart"))


def test_an_unknown_level_is_told_with_those_that_there_are():
    study = {"kind": "variants", "recipes": ["a"], "variants": {name: {} for name in "zyxw"}}
    with pytest.raises(RecipeError, match="'A' is no level of these recipes; known: z, y, x, w"):
        validate({**study, "where": [{"levels": ["A"], "set": {"x": 1}}]}, "here")
    with pytest.raises(RecipeError) as caught:
        validate({**study, "where": [{"recipes": [3], "set": {"x": 1}}]}, "here")
    assert caught.value.problems == ("where.0.recipes.0: input should be a valid string, not 3",)


def test_every_mistake_is_told_at_once():
    with pytest.raises(RecipeError) as caught:
        validate({"kind": "compute", "recipes": ["a"], "match": "hours", "share": 1}, "x.yaml")
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize("name", packaged())
def test_packaged_studies_name_recipes_that_exist(name):
    from spt.config.load import packaged as recipes

    assert set(read(name).study.recipes) <= set(recipes())
    assert not set(packaged()) & {one.rpartition("/")[2] for one in recipes()}


def test_recipes_are_found_from_the_studys_own_folder(tmp_path, monkeypatch):
    (tmp_path / "deep").mkdir()
    recipe_file(tmp_path)
    study = {"kind": "size", "recipes": ["../tiny.yaml"], "sizes": {"../tiny.yaml": {"S": {"d_model": 8}}}}
    (tmp_path / "deep" / "mine.yaml").write_text(yaml.safe_dump(study))
    monkeypatch.chdir("/")
    found = read(str(tmp_path / "deep" / "mine.yaml")).study
    assert found.recipes == (str(tmp_path / "tiny.yaml"),)
    assert found.levels(found.recipes[0]) == {"S": {"model.d_model": 8}}
    assert yaml.safe_load(to_yaml(found, tmp_path / "deep"))["recipes"] == ["../tiny.yaml"]


@pytest.mark.parametrize("by_recipe", [False, True])
def test_everything_that_a_study_names_is_found_from_its_folder(by_recipe, tmp_path, monkeypatch):
    recipe_file(tmp_path)
    variants = {"mine": {"model": {"name": "./mine.py", "d_model": 8}}, "also": {"model.name": "mine.py"}}
    where = [{"recipes": ["tiny.yaml"], "set": {"task.name": "./task.py"}}]
    study = {"kind": "variants", "recipes": ["tiny.yaml"], "where": where}
    study["variants"] = {"tiny.yaml": variants} if by_recipe else variants
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(study))
    monkeypatch.chdir("/")
    found = read(str(tmp_path / "mine.yaml")).study
    recipe, model = found.recipes[0], str(tmp_path / "mine.py")
    assert found.levels(recipe) == {
        "mine": {"model": {"name": model, "d_model": 8}}, "also": {"model.name": model}
    }  # fmt: skip
    assert found.rules(recipe) == ({"task.name": str(tmp_path / "task.py")},)
    assert yaml.safe_load(to_yaml(found, tmp_path))["where"][0]["recipes"] == ["tiny.yaml"]


def test_data_that_a_study_names_are_found_from_its_folder(tmp_path, monkeypatch):
    task = {"name": "custom", "path": "a.csv", "text_column": "a.csv", "label_column": "y"}
    recipe_file(tmp_path, task=task)
    study = {
        "kind": "variants",
        "recipes": ["tiny.yaml"],
        "set": {"task.path": "b.csv", "task.text_column": "b.csv"},
        "variants": {"mine": {"task.path": "~/c.csv"}, "whole": {"task": {**task, "path": "d.csv"}}},
        "where": [{"set": {"task.path": "../e.csv", "model.norm": "rms"}}],
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(study))
    monkeypatch.chdir("/")
    found = read(str(tmp_path / "mine.yaml")).study
    assert found.set == {"task.path": str(tmp_path / "b.csv"), "task.text_column": "b.csv"}
    assert found.variants["mine"] == {"task.path": str(Path.home() / "c.csv")}
    assert found.variants["whole"]["task"]["path"] == str(tmp_path / "d.csv")
    assert found.where[0].set == {"task.path": f"{tmp_path}/../e.csv", "model.norm": "rms"}


def whole_table():
    raw = {
        "kind": "variants",
        "recipes": ["quickstart", "quickstart-dlr", "quickstart-s5"],
        "variants": {"A": {}, "B": {"model.n_layers": 1}},
        "where": [
            {"recipes": ["quickstart", "quickstart-dlr"], "set": {"task.max_rows": 64}},
            {"recipes": ["quickstart-dlr"], "levels": ["B"], "set": {"task.max_rows": 32}},
        ],
        "seeds": [4],
    }
    return StudySource("table", validate(raw, "table"))


def test_a_part_of_a_study_has_the_same_rows():
    whole = whole_table().study
    part = part_of(whole_table(), ["quickstart-dlr", "quickstart-s5"], ["B"]).study
    assert part.recipes == ("quickstart-dlr", "quickstart-s5") and part.seed_list == (4,)
    for name in part.recipes:
        assert list(part.levels(name)) == ["B"] and part.changes_of(name, "B") == whole.changes_of(name, "B")
    assert part_of(whole_table(), ["quickstart"]).study.where == (
        whole.where[0].model_copy(update={"recipes": ("quickstart",)}),
    )
    assert part_of(whole_table()).study == whole


@pytest.mark.parametrize("name", packaged())
def test_every_packaged_study_has_parts(name):
    study = read(name).study
    part = part_of(read(name), study.recipes[-1:] if study.kind != "models" else study.recipes[:2]).study
    for recipe in part.recipes:
        for level in [None, *study.levels(recipe)]:
            assert part.changes_of(recipe, level) == study.changes_of(recipe, level)
    level = next(iter(study.levels(study.recipes[0])), None)
    if level is not None:
        kept = list(part_of(read(name), levels=[level]).study.levels(study.recipes[0]))
        assert kept == ([level, "full"] if study.kind == "reach" else [level]), "a reach is held against the whole"


@pytest.mark.parametrize(
    ("recipes", "levels", "complaint"),
    [
        (["quickstart-dl"], [], "quickstart-dl is no recipe of table; did you mean quickstart-dlr"),
        ([], ["C"], "'C' is no level of table; known: A, B"),
        (["quickstart"], ["A", "b"], "'b' is no level of table"),
    ],
)
def test_parts_that_a_study_does_not_have(recipes, levels, complaint):
    with pytest.raises(UsageError, match=complaint):
        part_of(whole_table(), recipes, levels)
    with pytest.raises(UsageError, match="levels have no names to choose by"):
        part_of(read("spt-table-8"), levels=["0.2"])


# Compute


def cost(job, axis, meter):
    """What a job's own stage comes to on this axis, from its data and network."""
    setup = build_stage(job)
    steps, n = plan_steps(setup), len(setup.data.train)
    examples = example_count(steps, n, job.train.batch_size)
    if axis == "epochs":
        return examples / n
    return {"examples": examples, "flops": meter.estimate(job).flops, "time": steps * meter.seconds_per_step(job)}[axis]


@pytest.mark.parametrize("axis", ["epochs", "examples", "flops", "time"])
def test_shares_of_a_budget_add_up_to_it(axis, tmp_path, meter, monkeypatch):
    monkeypatch.setattr(MeasuredCosts, "seconds_per_step", lambda self, job: 0.03 if job.stage == "pretrain" else 0.01)
    recipe = {"pretrain__train": {**EPOCHS, "epochs": 40}, "finetune__train": {**EPOCHS, "epochs": 60}}
    layout = laid(tmp_path, meter, "compute", recipe=recipe, match=axis, shares=[0, 0.2, 0.6])
    assert [row.factors["share"] for row in layout.rows] == [0.2, 0.6]
    whole = {cell.job.name: cost(cell.job, axis, meter) for cell in layout.cells if cell.arm == "scratch"}
    assert len(whole) == 2, "one baseline a seed, shared by all shares"
    for cell in layout.cells:
        total = layout.rows[cell.row].total
        assert total.axis == axis
        if cell.arm == "spt":
            before, after = cost(cell.job.parent, axis, meter), cost(cell.job, axis, meter)
            assert before + after == pytest.approx(total.amount, rel=0.02)
            assert before / (before + after) == pytest.approx(layout.rows[cell.row].factors["share"], abs=0.02)
        else:
            assert whole[cell.job.name] == pytest.approx(total.amount, rel=0.02)


def test_the_total_of_a_recipe_is_that_of_its_two_stages(tmp_path, meter):
    layout = laid(tmp_path, meter, "compute", recipe=by_epochs(), shares=[0.5])
    (row,) = layout.rows
    assert (row.total.axis, row.total.amount) == ("epochs", 5)
    recipe = row.resolved.recipe
    assert (recipe.pretrain.train.epochs, recipe.finetune.train.epochs, recipe.scratch.train.epochs) == (2.5, 2.5, 5)


def test_budgets_that_do_not_add_up_are_refused(tmp_path, meter):
    with pytest.raises(UsageError, match=r"given in steps, finetuning's in epochs.*--match"):
        laid(tmp_path, meter, "compute", recipe={"finetune__train": EPOCHS})
    with pytest.raises(UsageError, match="not given in epochs"):
        laid(tmp_path, meter, "compute", match="epochs")
    assert laid(tmp_path, meter, "compute").rows[0].total.amount == 2 * 6 * 8  # steps count as examples


def test_the_finetuning_is_measured_as_itself(tmp_path, meter):
    """Not as the baseline, which may have a batch of its own."""
    scratch = {"steps": 60, "batch_size": 4, "learning_rate": 0.01}
    with_own = laid(tmp_path, meter, "compute", recipe={"scratch__train": scratch}, match="flops", shares=[0.5])
    assert with_own.rows[0].total == laid(tmp_path, meter, "compute", match="flops", shares=[0.5]).rows[0].total


def test_a_step_is_measured_once(tmp_path, runtime, messages):
    """The same budgets are found again, or a continued study would not find its runs."""
    job = Job(load(str(recipe_file(tmp_path))), "pretrain", 0)
    first = MeasuredCosts(tmp_path / "runs", runtime).seconds_per_step(job)
    again = MeasuredCosts(tmp_path / "runs", runtime)
    assert 0 < first == again.seconds_per_step(replace(job, seed=1)) and len(messages) == 1
    other = Job(load(str(recipe_file(tmp_path)), ["model.d_model=32"]), "pretrain", 0)
    again.seconds_per_step(other)
    assert len(messages) == 2, "of another network it is another time"


# Data


def test_subsets_are_nested_and_the_same_in_both_stages(tmp_path, meter):
    layout = laid(tmp_path, meter, "data", recipe={"task": {"name": "digits"}}, fractions=[0.02, 0.1, 1])
    seen = []
    for cell in layout.cells:
        if cell.arm != "spt" or cell.job.seed:
            continue
        mine, before = (open_task(job.resolved.recipe.task).train for job in (cell.job, cell.job.parent))
        assert np.array_equal(mine.ids, before.ids)
        seen.append(set(mine.ids.tolist()))
    assert seen[0] < seen[1] < seen[2]
    assert [len(ids) for ids in seen] == [int(f * len(seen[2])) for f in (0.02, 0.1, 1)]
    for cell in layout.cells:  # as many updates on every subset
        assert {job.train.steps for job in (cell.job, cell.job.parent) if job} == {6}


@given(st.lists(st.integers(0, 3), min_size=5, max_size=200), st.floats(0.05, 1))
def test_stratified_prefixes_have_every_class_in_its_share(classes, fraction):
    from spt.data.dataset import _spread_classes

    classes = np.asarray(classes)
    order = _spread_classes(classes)
    assert sorted(order) == list(range(len(classes)))
    keep = max(1, int(fraction * len(classes)))
    for kind in range(4):
        share = (classes == kind).sum() * keep / len(classes)
        assert abs((classes[order[:keep]] == kind).sum() - share) <= 2


def test_stratified_subsets_are_those_of_the_task(tmp_path):
    part = Part(name="digits", subset_fraction=0.1, stratified=True)
    some, more = open_task(part).train, open_task(Part(name="digits", subset_fraction=0.2, stratified=True)).train
    assert set(some.ids) < set(more.ids)
    counts = np.bincount(some.targets, minlength=10)
    assert counts.max() - counts.min() <= 2
    with pytest.raises(Exception, match="stratified needs one class"):
        build_stage(Job(own_task(tmp_path, task={"name": "./toy.py", "target": "reals", "subset_fraction": 0.5,
                                          "stratified": True}), "finetune", 0))  # fmt: skip


def test_pretraining_on_all_inputs(tmp_path, meter):
    layout = laid(
        tmp_path, meter, "data", recipe={"task": {"name": "digits"}}, fractions=[0.05, 0.1], pretrain_on="all"
    )
    parents = {cell.job.parent.name for cell in layout.cells if cell.arm == "spt"}
    assert len(parents) == 2, "one for each seed, shared by all fractions"
    assert {row.factors["pretrained on"] for row in layout.rows} == {"all inputs"}
    for cell in layout.cells:
        if cell.arm == "spt":
            assert cell.job.parent.resolved.recipe.task.options["subset_fraction"] == 1
            assert cell.job.resolved.recipe.task.options["subset_fraction"] < 1
            assert cell.job.parent.train.steps == 6


def test_a_learning_curve_over_labels(tmp_path, meter):
    """Numbers of rows: one pretraining a seed on all inputs, whose tokens every finetuning knows, whatever its rows."""
    lines = [f"{'ab'[i % 2] * (1 + i % 5)}{chr(99 + i)},{i % 2}" for i in range(20)]  # a letter of its own in every row
    for name, part in (("train", lines), ("val", lines[:4]), ("test", lines[4:8])):
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{name}.csv").write_text("\n".join(["text,label", *part]))
    task = {"name": "custom", "path": "texts", "text_column": "text", "label_column": "label"}
    small = {
        "task": task,
        "finetune__train": {**EPOCHS, "batch_size": 2},
        "pretrain__train": {**EPOCHS, "batch_size": 2},
    }
    options = {"rows": [8, 4], "pretrain_on": "all", "stratified": True}
    layout = laid(tmp_path, meter, "data", recipe=small, **options)
    assert [dict(row.factors) for row in layout.rows] == [
        {"rows": 4, "pretrained on": "all inputs"},
        {"rows": 8, "pretrained on": "all inputs"},
    ]
    assert len({cell.job.parent.name for cell in layout.cells if cell.arm == "spt"}) == 2, "one a seed"
    for cell in layout.cells:
        data = open_task(cell.job.resolved.recipe.task)
        assert len(data.train) == [4, 8][cell.row] and data.input.vocab == 23
        assert np.bincount(data.train.targets).tolist() == [len(data.train) // 2] * 2
        assert cell.job.train.steps == 20, "as many updates as on all rows"
    with pytest.raises(Exception, match="subset_rows is 21, but the training split has 20 rows"):
        laid(tmp_path, meter, "data", recipe=small, rows=[21])
    few = open_task(Part(**{**task, "path": str(tmp_path / "texts"), "subset_rows": 4}))
    assert few.input.vocab < 23, "alone, a subset has the tokens of its own rows"


@pytest.mark.parametrize("score", ["window", "recording"])
def test_a_subset_of_windows_is_of_whole_recordings(tmp_path, score):
    lines = [{"id": f"a@{i}", "x": list(range(i, i + 12 + 4 * (i % 3))), "y": "pq"[i % 4 == 0]} for i in range(32)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    task = {"name": "custom", "path": str(tmp_path / "rows.jsonl"), "list_column": "x", "id_column": "id"}
    task |= {"label_column": "y", "window": 4, "stride": 2, "score": score, "stratified": True}
    task |= {"validation_fraction": 0.25, "test_fraction": 0.25}

    def recordings(**size):
        """How many windows each has, the rows, and the share of recordings of class 1."""
        train = open_task(Part(**task, **size)).train
        _, first, windows = np.unique(
            [name.rpartition("@")[0] for name in train.ids], return_index=True, return_counts=True
        )
        names = [train.ids[i].rpartition("@")[0] for i in first]
        return dict(zip(names, windows.tolist(), strict=True)), train, float(train.take(first).targets.mean())

    whole, _, usual = recordings()
    assert set(whole.values()) == {5, 7, 9}
    few, train, share = recordings(subset_rows=8)
    assert len(few) == 8 and few.items() < whole.items() and len(train) == sum(few.values()) > 8
    assert abs(share - usual) < 1 / 8, "stratified by recording"
    more, *_ = recordings(subset_fraction=0.75)
    assert len(more) == int(0.75 * len(whole)) and few.items() < more.items(), "nested"
    for name in few:
        at = [i for i, each in enumerate(train.ids) if each.rpartition("@")[0] == name]
        assert at == list(range(at[0], at[-1] + 1)), "the windows of a recording stand together"
    assert recordings(subset_rows=8, subset_seed=7)[0] != few
    assert len(recordings(subset_fraction=1e-9)[0]) == 1 and recordings(subset_rows=len(whole))[0] == whole
    assert len(recordings(subset_rows=8, max_rows=3)[1]) == 3, "of few rows, for show, as many as there are"
    total = sum(whole.values())
    said = f"{len(whole)} recordings, cut into {total} windows"
    with pytest.raises(DataError, match=said):
        recordings(subset_rows=len(whole) + 1)


def test_recordings_of_several_classes_are_not_stratified(tmp_path):
    lines = [{"x": list(range(i, i + 8)), "y": ["pq"[i % 2], "p"]} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    task = {"name": "custom", "path": str(tmp_path / "rows.jsonl"), "list_column": "x", "label_column": "y"}
    task |= {"window": 4, "label_at": "last"} | {"validation_fraction": 0.25, "test_fraction": 0.25}
    half = {**task, "subset_fraction": 0.5}
    assert len(open_task(Part(**half)).train) == 2 * (len(open_task(Part(**task)).train) // 4)
    with pytest.raises(DataError, match="one class for every recording"):
        open_task(Part(**half, stratified=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": [0, 4]}, "rows must be different whole numbers"),
        ({"rows": [4, 4]}, "rows must be different whole numbers"),
        ({"rows": [4], "fractions": [0.5]}, "fractions and rows are both given"),
        ({"fractions": []}, "fractions must be different"),
        ({"fractions": [0.5, 0.5]}, "fractions must be different"),
    ],
)
def test_sizes_of_subsets_that_make_no_study(tmp_path, meter, options, message):
    with pytest.raises(RecipeError, match=message):
        laid(tmp_path, meter, "data", **options)


def test_a_subset_in_use_is_given_once(tmp_path):
    with pytest.raises(RecipeError, match="subset_fraction and subset_rows are both given"):
        load(str(recipe_file(tmp_path, task={"name": "digits", "subset_fraction": 0.5, "subset_rows": 5})))


def test_recipes_of_one_name_are_told_apart(tmp_path, meter):
    """The name is the file's, without its folder."""
    paths = []
    for place, width in (("a", 8), ("b", 16)):
        (tmp_path / place).mkdir()
        paths.append(str(recipe_file(tmp_path / place, task={"name": "digits"}, model__d_model=width)))
    raw = {"kind": "data", "recipes": paths, "seeds": 1, "fractions": [0.1], "pretrain_on": "all"}
    for cell in expand(validate(raw, "here"), False, meter).cells:
        if cell.job.parent:
            widths = {job.resolved.recipe.model.options["d_model"] for job in (cell.job, cell.job.parent)}
            assert len(widths) == 1


def test_a_vocabulary_of_the_rows_in_use_does_not_fit_all_inputs(tmp_path, meter, monkeypatch):
    laid(tmp_path, meter, "data", fractions=[0.4], pretrain_on="all")

    inputs, opened = map(Tokens, itertools.count(17)), MeasuredCosts.open_task

    def open_task(self, recipe):
        return replace(opened(self, recipe), input=next(inputs))

    monkeypatch.setattr(MeasuredCosts, "open_task", open_task)
    with pytest.raises(UsageError, match="use --pretrain-on subset"):
        laid(tmp_path, meter, "data", fractions=[0.4], pretrain_on="all")


def test_passes_can_be_held_instead_of_updates(tmp_path, meter):
    recipe = {"task": {"name": "digits"}, "finetune__train": {"steps": 50, "batch_size": 8, "learning_rate": 0.01}}
    layout = laid(tmp_path, meter, "data", recipe=recipe, fractions=[0.1], hold="epochs")
    (row,) = layout.rows
    n = len(open_task(Part(name="digits")).train)
    assert row.resolved.recipe.finetune.train.epochs == pytest.approx(50 / -(-n // 8))


def test_a_small_subset_is_evaluated_as_often_as_the_whole(tmp_path, meter):
    layout = laid(tmp_path, meter, "data", recipe=by_epochs(task={"name": "digits"}), fractions=[0.1])
    epoch = -(-len(open_task(Part(name="digits")).train) // 8)
    assert layout.rows[0].resolved.recipe.finetune.train.evaluate_every == epoch


def test_a_limit_comes_before_a_fraction(tmp_path, meter):
    layout = laid(tmp_path, meter, "data", fractions=[0.4, 1], hold="epochs")
    rows = [set(open_task(row.resolved.recipe.task).train.ids.tolist()) for row in layout.rows]
    assert [len(ids) for ids in rows] == [9, 24] and rows[0] < rows[1]


def test_a_recipe_on_a_number_of_rows_is_no_fraction_of_them(tmp_path, meter):
    recipe = by_epochs(task={"name": "digits", "subset_rows": 100})
    layout = laid(tmp_path, meter, "data", recipe=recipe, fractions=[0.25, 1])
    n = len(open_task(Part(name="digits")).train)
    assert [len(open_task(row.resolved.recipe.task).train) for row in layout.rows] == [n // 4, n]
    same = laid(tmp_path, meter, "data", recipe=recipe, rows=[50, 100]).rows[1].resolved.recipe
    assert same.task.options["subset_rows"] == 100 and same.finetune.train.epochs == EPOCHS["epochs"]


def test_all_labels_and_all_inputs_are_the_recipe_as_it_stands(tmp_path, meter):
    """Pretraining on all inputs is then its own: not another run with a budget in steps."""
    recipe = by_epochs(task={"name": "digits"})
    study = {"recipe": recipe, "fractions": [0.1, 1], "pretrain_on": "all"}
    part, whole = laid(tmp_path, meter, "data", **study).rows
    assert part.pretraining is not None and whole.pretraining is None
    jobs = {cell.job.name for cell in laid(tmp_path, meter, "data", **study).cells if cell.row == 1}
    assert jobs == {cell.job.name for cell in laid(tmp_path, meter, "compare", recipe=recipe).cells}
    subset = by_epochs(task={"name": "digits", "subset_fraction": 0.1})
    (row,) = laid(tmp_path, meter, "data", recipe=subset, fractions=[0.1], pretrain_on="all").rows
    assert row.pretraining.recipe.task.options["subset_fraction"] == 1, "all inputs are more than the recipe's"


@pytest.mark.parametrize("n", [100, 65])
def test_steps_are_worth_the_examples_they_show(tmp_path, meter, n):
    """The last batch of an epoch is smaller than the others."""
    train = {"steps": 1000, "batch_size": 64, "learning_rate": 0.01}
    recipe = {"task": {"name": "digits", "subset_rows": n}, "pretrain__train": {**train}, "finetune__train": train}
    layout = laid(tmp_path, meter, "compute", recipe=recipe, shares=[0, 0.5])
    assert layout.rows[0].total.amount == 2 * 500 * n
    for trial in laid(tmp_path, meter, "tune", recipe=recipe, space={"batch_size": [64, 32]}).searches[0].trials:
        assert trial.job.train.examples == 500 * n
        assert trial.row or meter.estimate(trial.job).steps == 1000, "the recipe's own batch: its own steps"


def test_rows_that_are_made_anew_have_no_fractions(tmp_path, meter):
    recipe = {"task": {"name": "skills", "skill": "reverse", "length": 16}}
    with pytest.raises(UsageError, match=r"new rows in every epoch.*task\.resample_each_epoch=false"):
        laid(tmp_path, meter, "data", recipe=recipe, fractions=[0.5])


def test_a_subset_smaller_than_a_batch_is_refused(tmp_path, meter):
    with pytest.raises(UsageError, match=r"fraction 0.005 is 5 training rows.*leave it out"):
        laid(tmp_path, meter, "data", recipe={"task": {"name": "digits"}}, fractions=[0.005, 1])


# Sizes, initial parameters, objectives


def test_sizes_initialisations_and_objectives(tmp_path, meter):
    layout = laid(tmp_path, meter, "size", sizes={"S": {"d_model": 8}, "M": {"model.d_model": 32, "d_ff": 8}})
    assert [row.factors for row in layout.rows] == [{"size": "S"}, {"size": "M"}]
    assert [row.resolved.recipe.model.options["d_model"] for row in layout.rows] == [8, 32]
    assert meter.estimate(layout.cells[0].job).parameters < meter.estimate(layout.cells[-1].job).parameters
    layout = laid(tmp_path, meter, "init")
    assert [row.resolved.recipe.model.options["initialisation"] for row in layout.rows] == ["structured", "random"]
    layout = laid(tmp_path, meter, "objective", **EXAMPLES["objective"])
    first, second = (row.resolved.recipe for row in layout.rows)
    assert (first.pretrain.objective.options["ratio"], first.pretrain.objective.options["span"]) == (0.5, 4)
    assert first.model.options["causal"] is False
    assert second.pretrain.objective.name == "next" and second.model.options["causal"] is True
    assert any("causal in both arms" in note for note in layout.notes)
    layout = laid(tmp_path, meter, "objective", objectives=[{"name": "masked", "span": 4}])
    assert layout.rows[0].resolved.recipe.pretrain.objective.options["ratio"] == 0.5, "the recipe's"
    assert layout.rows[0].factors == {"objective": "masked ratio=0.5 span=4"}
    with pytest.raises(UsageError, match="span is 100, but this task's sequences have at most 64 steps"):
        build_stage(
            laid(tmp_path, meter, "objective", objectives=[{"name": "masked", "span": 100}]).cells[0].job.parent
        )


def test_a_reach_cuts_both_stages_of_both_arms(tmp_path, meter):
    """The same parameters at every reach; the whole is the recipe itself, whose runs are those of other studies."""
    rule = [{"levels": ["16"], "set": {"finetune.train.learning_rate": 0.5}}]
    grid = laid(tmp_path, meter, "reach", reaches=[16, 4, 63], where=rule)
    assert [row.factors for row in grid.rows] == [{"reach": 4}, {"reach": 16}, {"reach": "full"}]
    assert [row.resolved.recipe.finetune.train.learning_rate == 0.5 for row in grid.rows] == [False, True, False]
    layers = grid.rows[0].resolved.recipe.model.options["n_layers"]
    seen = [(row.seen.layer, row.seen.network) for row in grid.rows]
    assert seen == [(4, 4 * layers), (16, min(63, 16 * layers)), (63, 63)]
    for cell in grid.cells:
        reach = grid.rows[cell.row].factors["reach"]
        for job in filter(None, (cell.job, cell.job.parent)):
            assert job.resolved.recipe.model.options["reach"] == (None if reach == "full" else reach)
    assert len({meter.estimate(cell.job).parameters for cell in grid.cells}) == 1
    whole = {cell.job.name for cell in grid.cells if cell.row == 2}
    assert whole == {cell.job.name for cell in laid(tmp_path, meter, "compare").cells}
    assert any("a layer sees 63 steps as it is, so a reach of 63 cuts nothing and is left out" in n for n in grid.notes)
    plan = make_plan(grid)
    assert [row.seen for row in plan.rows] == [row.seen for row in grid.rows]


@pytest.mark.parametrize(
    ("model", "reaches", "complaint"),
    [
        ({"name": "lru", "d_model": 8}, [4], r"lru cannot be cut to a reach; models that can are transformer, .*, tcn"),
        ({"name": "dss", "d_model": 8}, [63, 64], r"sees 63 steps as it is, so a reach of 63 and 64 .*name smaller"),
        ({"name": "dss", "d_model": 8, "max_kernel_length": 9}, [9, 20], r"sees 9 steps as it is, so a reach of 9 and"),
        ({"name": "tcn", "d_model": 8, "n_layers": 3}, [1], r"level '1': .*two convolutions see at least 2 steps"),
    ],
)
def test_what_cannot_be_cut_is_refused(model, reaches, complaint, tmp_path, meter):
    with pytest.raises((UsageError, RecipeError), match=complaint):
        laid(tmp_path, meter, "reach", recipe={"model": model}, reaches=reaches)


def test_a_smoke_run_may_be_too_short_for_a_cut(tmp_path, meter):
    grid = laid(tmp_path, meter, "reach", smoke=True, reaches=[1000])
    assert [row.factors for row in grid.rows] == [{"reach": "full"}] and "is left out" in grid.notes[-1]


def test_variants_and_what_holds_for_some_rows(tmp_path, meter):
    """In this order: the study's changes, the level's own, the rules; a mapping replaces a section, a rule its part."""
    dss = {"name": "dss", "d_model": 8, "n_layers": 1}
    grid = laid(
        tmp_path, meter, "variants",
        set={"model.n_layers": 3, "finetune.train.batch_size": 5},
        variants={"own": {}, "DSS": {"model": dss, "finetune.train.batch_size": 6}, "wide": {"model.d_model": 24}},
        where=[
            {"levels": ["DSS", "wide"], "set": {"finetune.train.batch_size": 7}},
            {"levels": ["DSS"], "set": {"model.d_state": 12, "finetune.train.epochs": 2}},
        ],
    )  # fmt: skip
    own, other, wide = (row.resolved for row in grid.rows)
    assert [row.factors for row in grid.rows] == [{"variant": name} for name in ("own", "DSS", "wide")]
    assert [each.recipe.finetune.train.batch_size for each in (own, other, wide)] == [5, 7, 7]
    assert own.recipe.model.options["n_layers"] == wide.recipe.model.options["n_layers"] == 3
    assert wide.recipe.model.options["d_model"] == 24 and wide.recipe.model.name == own.recipe.model.name
    given = {key: other.recipe.model.options[key] for key in ("d_model", "n_layers", "d_state")}
    assert other.recipe.model.name == "dss" and given == {"d_model": 8, "n_layers": 1, "d_state": 12}
    assert (other.recipe.finetune.train.epochs, other.recipe.finetune.train.steps) == (2, None), "one budget"
    assert other.origins["model.d_state"] == "study" and own.origins["model.n_layers"] == "command line"
    places = [list(changes) for changes in grid.study.changes_of(grid.study.recipes[0], "DSS")]
    assert places == [
        ["model.n_layers", "finetune.train.batch_size"], ["model", "finetune.train.batch_size"],
        ["finetune.train.batch_size"], ["model.d_state", "finetune.train.epochs"],
    ]  # fmt: skip
    large = {"model": {"name": "dss", "d_model": 512}}
    small = laid(tmp_path, meter, "variants", smoke=True, variants={"large": large}).rows[0].resolved
    assert small.recipe.model.name == "dss" and small.recipe.model.options["d_model"] < 64, (
        "a smoke run of a paper's table is small"
    )


def test_a_rule_without_levels_holds_in_every_kind(tmp_path, meter):
    rule = [{"set": {"finetune.train.weight_decay": 0.25}}]
    for kind, options in (("compare", {}), ("data", {"fractions": [0.5, 1]}), ("compute", {"shares": [0.5]}),
                          ("init", {}), ("size", {"sizes": {"S": {"d_model": 8}}})):  # fmt: skip
        for row in laid(tmp_path, meter, kind, where=rule, recipe=by_epochs(), **options).rows:
            assert row.resolved.recipe.finetune.train.weight_decay == 0.25, kind


def test_a_rule_for_one_initialisation(tmp_path, meter):
    rule = [{"levels": ["random"], "set": {"finetune.train.learning_rate": 0.5}}]
    rows = laid(
        tmp_path, meter, "init", where=rule, recipe={"model": {"name": "dss", "d_model": 8, "n_layers": 1}}
    ).rows
    structured, random = (row.resolved.recipe.finetune.train.learning_rate for row in rows)
    assert random == 0.5 != structured


def test_spans_hide_the_ratio_they_promise():
    from spt.rng import Draw
    from spt.training.objectives import Masked

    rows = np.arange(2000)
    for span in (1, 3, 10):
        hidden = Masked(ratio=0.3, span=span).hidden(Draw(0, "test", 0), rows, 200)
        assert hidden.shape == (2000, 200)
        assert hidden.mean() == pytest.approx(0.3, abs=0.01)
        assert hidden[:, 0].mean() == pytest.approx(0.3, abs=0.04) and hidden[:, -1].mean() == pytest.approx(
            0.3, abs=0.04
        )
        shorter = Masked(ratio=0.3, span=span).hidden(Draw(0, "test", 0), rows, 50)
        assert np.array_equal(shorter, hidden[:, :50])
        changes = [np.flatnonzero(np.diff(row.astype(int))) for row in hidden]
        lengths = [b - a for row, at in zip(hidden, changes, strict=True) for a, b in itertools.pairwise(at) if row[b]]
        assert min(lengths) == span, "no whole span is shorter"


# Tuning


def tried(study):
    return list(itertools.islice(settings(study, study.space, "spt"), study.trials))


def test_a_grid_and_a_random_list(tmp_path):
    grid = validate({"kind": "tune", "recipes": ["a"], **EXAMPLES["tune"]}, "here")
    assert tried(grid) == [{"learning_rate": rate, "batch_size": size} for rate in (0.1, 0.01) for size in (4, 8)]
    space = {"learning_rate": {"low": 1e-4, "high": 1e-1}, "batch_size": [4, 8], "warmup_steps": {"low": 1, "high": 9}}
    random = validate({"kind": "tune", "recipes": ["a"], "space": space, "trials": 40}, "here")
    drawn = tried(random)
    assert drawn == tried(random) and len({json.dumps(one) for one in drawn}) == 40
    assert drawn != tried(random.model_copy(update={"search_seed": 1}))
    rates = [math.log10(one["learning_rate"]) for one in drawn]
    assert -4 <= min(rates) < -3.2 and -1.8 < max(rates) <= -1
    assert all(type(one["warmup_steps"]) is int and one["batch_size"] in (4, 8) for one in drawn)
    few = validate({"kind": "tune", "recipes": ["a"], "space": {"batch_size": [4, 8]}, "trials": 9}, "here")
    assert len(tried(few)) == 2, "no setting is tried twice"
    space = {"batch_size": {"low": 1, "high": 3, "scale": "linear"}}
    narrow = validate({"kind": "tune", "recipes": ["a"], "space": space, "trials": 9}, "here")
    assert sorted(one["batch_size"] for one in tried(narrow)) == [1, 2, 3], "there are no others"


def test_both_arms_try_the_same(tmp_path, meter):
    layout = laid(tmp_path, meter, "tune", space={"learning_rate": [0.1, 0.01], "batch_size": [4, 8]})
    (search,) = layout.searches
    arms = {arm: [t for t in search.trials if t.arm == arm] for arm in ("scratch", "spt")}
    assert [t.row for t in arms["scratch"]] == [t.row for t in arms["spt"]] == [0, 1, 2, 3]
    for one, other in zip(arms["scratch"], arms["spt"], strict=True):
        assert one.job.train == other.job.train
        assert one.job.train.examples == 6 * 8, "a larger batch is no longer training"
        assert one.job.train.evaluate_every * one.job.train.batch_size == 3 * 8, "nor fewer evaluations"
        assert one.job.parent is None and other.job.parent.train == arms["spt"][0].job.parent.train
    assert layout.cells == ()


def test_a_baseline_with_settings_of_its_own_is_tuned_too(tmp_path, meter):
    scratch = {"steps": 12, "batch_size": 8, "learning_rate": 0.5, "weight_decay": 0.3}
    layout = laid(tmp_path, meter, "tune", recipe={"scratch__train": scratch}, space={"learning_rate": [0.1, 0.01]})
    for trial in layout.searches[0].trials:
        assert trial.job.train.learning_rate == (0.1, 0.01)[trial.row]
        assert trial.job.train.weight_decay == (0.3 if trial.arm == "scratch" else 0.0)


@pytest.mark.slow
def test_the_choice_is_made_on_validation_alone(tmp_path, meter, runtime):
    """The best validation score wins in each arm, whatever the test scores are."""
    root = tmp_path / "runs"
    layout = laid(tmp_path, meter, "tune", space={"learning_rate": [1e-6, 0.03, 0.01]}, seeds=[5, 6])
    folder, failed = run_study(layout, root, ExecutionTarget(), runtime)
    plan = read_plan(folder)
    (search,) = plan.searches
    assert failed == 0 and folder == study_folder(layout, root)
    for arm in ("scratch", "spt"):
        results = {t.number: RunFolder(root, t.run).result() for t in search.trials if t.arm == arm}
        best = max(results, key=lambda n: (results[n].val["accuracy"], -results[n].val["loss"], -n))
        assert search.chosen[arm] == best
        for cell in plan.cells:
            if cell.arm == arm:
                job = yaml.safe_load((root / cell.run / "job.json").read_text())
                assert job["train"]["learning_rate"] == search.settings[arm][best]["learning_rate"]
                assert job["seed"] in (5, 6)
    assert study_status(folder)["studies"][0]["done"] == len(run_names(plan))
    before = {path: path.stat().st_mtime_ns for path in root.rglob("result.json")}
    assert run_study(layout, root, ExecutionTarget(), runtime) == (folder, 0)
    assert before == {path: path.stat().st_mtime_ns for path in root.rglob("result.json")}
    # A better test score changes nothing; a better validation score does.
    loser = next(t for t in search.trials if t.arm == "spt" and t.number != search.chosen["spt"])
    result = RunFolder(root, loser.run).result()
    RunFolder(root, loser.run).finish(result.model_copy(update={"test": {**result.test, "accuracy": 1.0}}))
    assert selection.select_settings(root, search)["spt"] == search.chosen["spt"]
    RunFolder(root, loser.run).finish(result.model_copy(update={"val": {**result.val, "accuracy": 1.0}}))
    assert selection.select_settings(root, search)["spt"] == loser.number


def test_nothing_is_chosen_before_all_have_had_their_try(tmp_path, meter, runtime, messages):
    root = tmp_path / "runs"
    layout = laid(tmp_path, meter, "tune", space={"learning_rate": [0.03, 0.01]}, seeds=1)
    folder, _ = run_study(layout, root, ExecutionTarget(part=(1, 2)), runtime)
    assert any("nothing is chosen yet" in text and "are not finished" in text for text in messages)
    assert read_plan(folder).cells == ()
    again, _ = run_study(layout, root, ExecutionTarget(part=(2, 2)), runtime)
    assert again == folder
    assert run_study(layout, root, ExecutionTarget(), runtime) == (folder, 0)
    assert len(read_plan(folder).cells) == 2


def test_a_diverged_setting_loses_and_counts_as_tried(tmp_path, meter, runtime):
    root = tmp_path / "runs"
    recipe = {"finetune__train__max_grad_norm": None}
    layout = laid(tmp_path, meter, "tune", recipe=recipe, space={"learning_rate": [0.01, 1e38]}, seeds=1)
    folder, failed = run_study(layout, root, ExecutionTarget(), runtime)
    assert failed == 0, "it used up its trial"
    (search,) = read_plan(folder).searches
    assert search.chosen == {"scratch": 0, "spt": 0}
    assert [one.failed for one in selection.scored_settings(root, search, "spt")] == [0, 1]


# Conducting


def test_a_plan_is_what_was_written(tmp_path, meter, runtime):
    root = tmp_path / "runs"
    layout = laid(tmp_path, meter, "compute", recipe=by_epochs(), shares=[0.4])
    folder, failed = run_study(layout, root, ExecutionTarget(), runtime)
    found = read_plan(folder)
    assert failed == 0 and found.kind == "compute" and found.rows[0].total.amount == 5
    planned = make_plan(layout)
    assert found.cells == planned.cells and found.rows == planned.rows
    assert StudyPlan.model_validate_json((folder / "study.json").read_text()) == found
    assert read(str(folder)).study == with_absolute_paths(layout.study, tmp_path)
    assert all(run_state(root, name) == "done" for name in run_names(found))


def test_kinds_share_their_runs(tmp_path, meter, runtime):
    """The baseline of one study is not trained again for another."""
    root = tmp_path / "runs"
    run_study(laid(tmp_path, meter, "compare", seeds=1), root, ExecutionTarget(), runtime)
    names = {path.name for path in root.glob("finetune-*")}
    run_study(
        laid(tmp_path, meter, "init", initialisations=["structured"], seeds=1),
        root,
        ExecutionTarget(),
        runtime,
    )
    run_study(laid(tmp_path, meter, "data", fractions=[1], seeds=1), root, ExecutionTarget(), runtime)
    assert {path.name for path in root.glob("finetune-*")} == names
    assert {path.parent.name.partition("-")[0] for path in root.glob("*/study.json")} == {"compare", "init", "data"}


def test_a_pretraining_that_nothing_waits_for_is_not_missed(tmp_path, meter, runtime):
    root = tmp_path / "runs"
    folder, _ = run_study(laid(tmp_path, meter, "compare", seeds=1), root, ExecutionTarget(), runtime)
    shutil.rmtree(next(root.glob("pretrain-*")))
    (told,) = study_status(folder)["studies"]
    assert (told["done"], told["all"], told["missing"]) == (2, 2, 0)


def test_a_result_of_another_run_is_not_taken(tmp_path, meter, runtime):
    root = tmp_path / "runs"
    layout = laid(tmp_path, meter, "compare", seeds=1)
    run_study(layout, root, ExecutionTarget(), runtime)
    spt, scratch = (next(c.job.name for c in layout.cells if c.arm == arm) for arm in ("spt", "scratch"))
    shutil.copy(root / spt / "result.json", root / scratch / "result.json")
    with pytest.raises(OutputError, match="the result of another run"):
        RunFolder(root, scratch).result()
    assert run_state(root, scratch) == "failed"


def test_states_of_runs(tmp_path, meter, runtime):
    root = tmp_path / "runs"
    layout = laid(tmp_path, meter, "compare")
    job = layout.cells[0].job
    assert run_state(root, job.name) == "missing"
    run = RunFolder(root, job.name)
    with run.locked():
        run.create("task: digits\n", {}, {})
        run.set_status("running")
        assert run_state(root, job.name) == "running"
    assert run_state(root, job.name) == "stopped", "nobody holds it: it was killed"
    run.set_status("diverged", "nan", 5)
    assert run_state(root, job.name) == "diverged"
    run_stage(layout.cells[1].job, root, runtime)
    assert run_state(root, layout.cells[1].job.name) == "done"


@pytest.mark.slow
def test_all_anew_is_each_run_once(tmp_path, meter):
    """A final run may be one of the trials, and shares their pretraining: neither is made twice."""
    root = tmp_path / "runs"
    layout = laid(tmp_path, meter, "tune", space={"learning_rate": [0.03, 0.01]}, seeds=1)
    run_study(layout, root, ExecutionTarget(), Runtime(Settings(quiet=True, cpu=True)))
    names = {path.parent.name for path in root.glob("*/result.json")}
    run_study(layout, root, ExecutionTarget(), Runtime(Settings(quiet=True, cpu=True, resume="never")))
    assert {path.parent.name for path in root.glob("*/result.json")} == names | {f"{name}.old1" for name in names}


def test_of_an_arm_that_is_asked_for_alone_no_other_is_built(tmp_path, meter, monkeypatch):
    root = tmp_path / "runs"
    layout = laid(tmp_path, meter, "compare", seeds=1)
    run_study(layout, root, ExecutionTarget(arm="scratch"), Runtime(Settings(quiet=True, cpu=True)))
    built = []
    monkeypatch.setattr("spt.execution.run_study.build_stage", lambda job: built.append(job))
    assert check_recipes_build(layout, root, Runtime(Settings(quiet=True, cpu=True)), "scratch") == {} and not built


def test_starting_over_leaves_other_arms_and_parts_alone(tmp_path, meter):
    """`--resume never` for one arm, or one shard, repeats its runs and moves no others aside."""
    root, again = tmp_path / "runs", Settings(quiet=True, cpu=True, resume="never")
    layout = laid(tmp_path, meter, "compare", seeds=2)
    run_study(layout, root, ExecutionTarget(), Runtime(Settings(quiet=True, cpu=True)))
    scratch = {cell.job.name for cell in layout.cells if cell.arm == "scratch"}

    def old():
        return {path.name.removesuffix(".old1") for path in root.glob("*.old1")}

    run_study(layout, root, ExecutionTarget(arm="scratch"), Runtime(again))
    assert old() == scratch
    for part in (1, 2):
        run_study(layout, root, ExecutionTarget(part=(part, 2)), Runtime(again))
    every = {run.name for cell in layout.cells for run in (cell.job, cell.job.parent) if run is not None}
    assert old() == every and all((root / name / "result.json").exists() for name in every)
    assert {path.name for path in root.glob("*.old2")} == {f"{name}.old2" for name in scratch}, (
        "each was made once more"
    )


def test_a_range_of_whole_numbers_from_zero_has_zero():
    rng = np.random.default_rng(0)
    drawn = [_draw(Range(low=0, high=2, scale="linear"), "warmup_steps", rng) for _ in range(200)]
    assert {*drawn} == {0, 1, 2}
    assert [_multiple(own, 0.25) for own in (8, 1, 0)] == [2, 1, 0]


def test_a_fraction_is_not_rounded_down_by_a_last_bit():
    component = find_plugin("tasks", "digits")
    for percent in range(1, 101):
        assert _units_in_use(TaskConfig(subset_fraction=percent / 100), 100, 100, component) == percent


def test_a_section_in_set_is_read_as_it_was_written(tmp_path):
    """An option that has keys is replaced whole, as on the command line; a section is one change for each key."""
    recipe_file(tmp_path)
    changes = {"finetune.objective.class_weights": {"rare": 5}, "model": {"d_model": 8}, "pretrain.data": "more.csv"}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"kind": "compare", "recipes": ["tiny.yaml"], "set": changes}))
    found = read(str(tmp_path / "mine.yaml")).study.set
    assert found["finetune.objective.class_weights"] == {"rare": 5} and found["model.d_model"] == 8
    assert found["pretrain.data"] == str(tmp_path / "more.csv"), "beside the study, wherever it is run"


def test_a_model_that_ends_the_program_fails_alone(tmp_path):
    model_file(tmp_path, forward="__import__('sys').exit(3)")
    one = load(str(recipe_file(tmp_path, {**RECIPE, "model": {"name": "./mine.py", "d_model": 16, "n_layers": 1}})))
    request = RunRequest(Job(one, "finetune", 0), "")
    told = attempt_run(request, tmp_path / "runs", Runtime(Settings(quiet=True, cpu=True)))
    assert told is not None and "called sys.exit(3)" in told
