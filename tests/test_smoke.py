"""`--smoke`: small networks and short sequences with every option kept; `--smoke-full`: the recipe's own sizes."""

import json

import numpy as np
import pytest
import torch
from tiny import load as load_data
from tiny import recipe_file

from spt.api import compare, plan_study, run_study
from spt.config.job import Job
from spt.config.load import load, packaged
from spt.config.overrides import flatten
from spt.config.plugins import find_plugin
from spt.config.recipe import BUDGETS
from spt.data.dataset import open_task
from spt.errors import DataError, UsageError
from spt.models.options import SMOKE_SIZES
from spt.runs.plan import read_plan
from spt.runtime.settings import Settings
from spt.studies.schema import part_of, read
from spt.training.build import build_backbone, build_stage

TRAINING = {*BUDGETS, "batch_size", "evaluate_every", "warmup_steps", "warmup_fraction", "patience"}
ROWS = {"task.max_rows", "task.subset_fraction"}
FIXED = ("lra/image-pythia", "lra/text-pythia")  # checkpoints


def values(name, smoke):
    return flatten(load(name, smoke=smoke).recipe.model_dump(mode="json"))


@pytest.mark.parametrize("name", packaged())
def test_sizes_shrink_and_every_other_option_stays(name):
    small, full, real = (values(name, smoke) for smoke in (True, "full", False))
    task = find_plugin("tasks", real["task.name"]).module.Config
    options = {key.removeprefix("task."): real[key] for key in real if key.startswith("task.") and key != "task.name"}
    lengths = {f"task.{key}": size for key, size in task.model_validate_json(json.dumps(options)).smoke_sizes().items()}
    sizes = lengths | {f"model.{key}": size for key, size in SMOKE_SIZES.items()}
    own = find_plugin("models", real["model.name"]).configure(dict(load(name).recipe.model.options)).smoke_sizes()
    sizes |= {f"model.{key}": size for key, size in own.items()}
    assert {key for key in real if small[key] != full[key]} <= set(sizes)
    assert all(key in ROWS or key.rpartition(".")[2] in TRAINING for key in real if full[key] != real[key])
    fixed = {f"model.{key}" for key in SMOKE_SIZES} if name in FIXED else set()
    fixed |= {"model.d_model"} if real["pretrain.head.identity"] else set()
    fixed |= {"model.n_experts"} if real["model.feed_forward"] != "switch" else set()  # without effect
    for key, size in sizes.items():
        if key in fixed or small.get(key) is None:
            assert small.get(key) == real.get(key)
        else:
            assert small[key] <= 2 * size


@pytest.mark.parametrize("name", [name for name in packaged() if name not in FIXED])
def test_the_network_is_small(name):
    recipe = load(name, smoke=True).recipe
    with torch.device("meta"):
        backbone = build_backbone(recipe.model, 1024)
    parameters = sum(parameter.numel() for parameter in backbone.parameters())
    bound = 3_000_000 if recipe.pretrain.head.identity else 300_000  # d_model 512: as many as there are scores
    assert parameters < (9 * bound if recipe.model.name == "hf" else bound)


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("lra/listops-s4", 128),
        ("lra/pathx-s4", 1024),
        ("lra/pathx256-transformer", 1024),
        ("skills/segmentation-256-dlr", 128**2),
        ("skills/select-dlr", 128),
        ("skills/shift-long-dlr", 64),
        ("skills/subtrees-dlr", 128),
        ("pendulum/s5", 20),
    ],
)
def test_sequences_are_short(name, bound, tmp_path, monkeypatch):
    monkeypatch.setenv("SPT_DATA_DIR", str(tmp_path))
    data = open_task(load(name, smoke=True).recipe.task)
    assert data.length <= bound and {len(split) for split in data.splits.values()} == {16}


def test_a_size_that_other_options_forbid_is_the_next_that_they_allow():
    options = load("lra/text-s5", ["model.blocks=12"], smoke=True).recipe.model.options
    assert options["d_state"] == 24  # twelve blocks of pairs
    options = load("lra/listops-s4", ["model.n_ssm=5", "model.d_model=255"], smoke=True).recipe.model.options
    assert (options["n_ssm"], options["d_model"]) == (5, 255)  # as they were asked for
    options = load("lra/image-transformer", ["model.n_heads=64"], smoke=True).recipe.model.options
    assert options["d_model"] == 128  # heads of two features, as rotary positions need


def test_values_of_the_command_line_stay():
    found = load("lra/image-s4", ["model.d_model=96", "task.size=16"], smoke=True)
    assert found.recipe.model.options["d_model"] == 96 and found.recipe.task.options["size"] == 16
    origins = {key: found.origins[f"model.{key}"] for key in ("d_model", "n_layers", "prenorm", "norm_eps")}
    assert origins == {"d_model": "command line", "n_layers": "smoke", "prenorm": "recipe", "norm_eps": "default"}
    assert set(found.origins) == set(flatten(found.recipe.model_dump(mode="json")))


MODEL = '''
"""Nothing but a residual stack."""
from spt.models.base import Backbone, BackboneConfig

class Config(BackboneConfig):
    d_state: int = 512

    def smoke_sizes(self):
        return SIZES

def build(config):
    return Backbone(config, lambda: [])
'''


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ("super().smoke_sizes()", {"d_model": 32, "n_layers": 2, "d_state": 512}),
        ('{**super().smoke_sizes(), "d_state": 8}', {"d_model": 32, "n_layers": 2, "d_state": 8}),
        ("{}", {"d_model": 256, "n_layers": 3, "d_state": 512}),
    ],
)
def test_a_model_of_ones_own_has_the_common_sizes_or_says_its_own(tmp_path, sizes, expected):
    (tmp_path / "mine.py").write_text(MODEL.replace("SIZES", sizes))
    model = {"name": "./mine.py", "d_model": 256, "n_layers": 3}
    path = recipe_file(tmp_path, model=model)
    assert expected.items() <= load(str(path), smoke=True).recipe.model.options.items()


def test_a_span_longer_than_the_sequences_of_smoke_is_theirs(tmp_path):
    pretrain = {"objective": {"name": "masked", "ratio": 0.5, "span": 100}}
    task = {"name": "skills", "skill": "shift", "length": 512}
    path = str(recipe_file(tmp_path, task=task, pretrain__objective=pretrain["objective"]))
    setup = build_stage(Job(load_data(path, smoke=True), "pretrain", 0))
    assert setup.objective.span == setup.data.length < 100
    assert build_stage(Job(load_data(path, smoke="full"), "pretrain", 0)).objective.span == 100


def test_layers_that_are_named_are_kept(tmp_path):
    changes = {"model__n_layers": 4, "finetune__load": ["encoder", "backbone.mixers.7"]}
    one = load_data(str(recipe_file(tmp_path, **changes)), smoke=True)
    assert one.recipe.model.options["n_layers"] == 4
    build_stage(Job(one, "finetune", 0, Job(one, "pretrain", 0)))


@pytest.mark.parametrize("target", ["classes", "real"])
@pytest.mark.parametrize("unlabelled", [0, 140])
def test_first_rows_have_targets_and_not_all_the_same(target, unlabelled, tmp_path):
    """Files sorted by their labels, or with labels at the end alone."""
    rows = [f"{i} 1 2,{'' if i < unlabelled else 4 * (i >= 190)}" for i in range(200)]
    for name in ("train", "val", "test"):
        (tmp_path / "d").mkdir(exist_ok=True)
        (tmp_path / "d" / f"{name}.csv").write_text("\n".join(["x,y", *rows]))
    task = {"name": "custom", "path": "d", "list_column": "x", "label_column": "y", "target": target}
    objective = {"name": "supervised", "scale": "standard"} if target == "real" else {"name": "supervised"}
    changes = {"task": {**task, "missing_labels": "ignore"}, "finetune__objective": objective}
    one = load_data(str(recipe_file(tmp_path, **changes)), smoke=True)
    setup = build_stage(Job(one, "finetune", 0))
    first = setup.data.train
    assert len(first) == 16 and first.values[first.starts, 0].tolist() == [*range(unlabelled, unlabelled + 15), 190]
    assert len(np.unique(first.targets)) == 2


def test_no_row_with_a_target_is_a_sentence(tmp_path):
    rows = ["x,y", *(f"{i} 1 2,{'' if i < 140 else i % 2}" for i in range(200))]
    for name in ("train", "val", "test"):
        (tmp_path / "d").mkdir(exist_ok=True)
        (tmp_path / "d" / f"{name}.csv").write_text("\n".join(rows))
    task = {"name": "custom", "path": "d", "list_column": "x", "label_column": "y", "missing_labels": "ignore"}
    one = load_data(str(recipe_file(tmp_path, task={**task, "subset_rows": 1, "subset_seed": 1})))
    with pytest.raises(DataError, match="none of the 1 training rows in use has a target"):
        build_stage(Job(one, "finetune", 0))


def test_sizes_that_cannot_be_had_are_a_sentence(tmp_path):
    (tmp_path / "mine.py").write_text(MODEL.replace("SIZES", '{"d_modl": 8}'))
    path = str(recipe_file(tmp_path, model={"name": "./mine.py"}))
    with pytest.raises(UsageError, match=r"smoke_sizes fails with .*d_modl.*; use --smoke-full"):
        load(path, smoke=True)
    assert load(path, smoke="full").smoke == "full"


@pytest.mark.slow
def test_a_study_keeps_its_size_of_smoke(tmp_path):
    model = {"name": "transformer", "d_model": 48, "n_layers": 1, "n_heads": 2}
    recipe, settings = recipe_file(tmp_path, model=model), Settings(cpu=True, quiet=True)
    runs = {}
    for size in (True, "full"):
        out = tmp_path / str(size)
        study = compare(recipe, seeds=[0], smoke=size, out=out, settings=settings)
        assert all(row.smoke is True for row in study.report.rows) and read_plan(study.path).smoke == size
        results = [json.loads(path.read_text()) for path in out.glob("*/result.json")]
        assert len(results) == 3 and all(result["smoke"] is True for result in results)
        runs[size] = {path.parent.name for path in out.glob("*/result.json")}
        assert run_study(study.path, settings=settings).path.resolve() == study.path.resolve()
        part = part_of(read(str(study.path)), [recipe.name])  # by its file's name alone
        assert part.folder == study.path.resolve()
        planned = plan_study(part, settings=settings)
        assert planned.folder.parent == study.path.parent.resolve() and {
            row.resolved.smoke for row in planned.grid.rows
        } == {size}
        assert {path.parent.name for path in out.glob("*/result.json")} == runs[size]
    assert not runs[True] & runs["full"]
