"""What a model says of itself: what it cannot do, what it costs, where it comes from; what a user's file lacks."""

import json
import locale
import os
import re

import pytest
from tiny import MODEL, ROOT, load, loaded, model_file, own_task, recipe_file, spt
from typer.testing import CliRunner

from spt.checks import model_contract
from spt.config.job import Job
from spt.config.plugins import find_plugin, listing
from spt.config.recipe import Part
from spt.errors import UsageError
from spt.training.build import build_backbone, build_stage
from spt_cli import app

LENGTH = 1024
MODELS = [row for row in listing("models") if row.source == "spt"]


@pytest.mark.parametrize("row", MODELS, ids=lambda row: row.name)
def test_listed_parameters_are_the_models(row):
    """With default options, for 1,024 steps, two-sided where it can be."""
    try:
        backbone = build_backbone(Part(name=row.name, causal=False), LENGTH)
    except UsageError:
        backbone = build_backbone(Part(name=row.name, causal=True), LENGTH)
    assert row.parameters == sum(p.numel() for p in backbone.parameters())
    assert row.cost and row.paper and row.description


def test_list_models_shows_what_they_say(tmp_path):
    shown = spt("list", "models", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    encoding = locale.getpreferredencoding(False)
    for row in MODELS:
        block = re.search(rf"^{row.name} .*\n(?: .*\n)+", shown.stdout, re.M)[0]
        line, *described = block.splitlines()
        cost, paper = (text.encode(encoding, "replace").decode(encoding) for text in (row.cost, row.paper))  # as shown
        assert f"{row.parameters:,}" in line and line.endswith(cost)
        told = " ".join(" ".join(described).split())
        assert paper in told or paper[-4:] in told, row.name  # behind the description, unless that names it
    rows = json.loads(spt("list", "models", "--json", cwd=tmp_path).stdout)
    assert {row["name"]: row["parameters"] for row in rows} == {row.name: row.parameters for row in MODELS}


def declaring(folder, says):
    """A model file whose backbone declares something."""
    path = folder / "mine.py"
    build = "def build(config):\n    backbone = Backbone(config, lambda: [Map(config.d_model)])\n"
    text = MODEL.replace("FORWARD", "x").replace("EXTRA", "").partition("def build")[0]
    path.write_text(f"from spt.models.base import Unsupported\n{text}{build}    {says}\n    return backbone\n")
    return path


CAUSAL_ONLY = "if not config.causal: raise Unsupported('it only looks back; set model.causal=true')"


def test_a_model_that_is_causal_only(tmp_path):
    found = model_contract.check_contract(find_plugin("models", str(declaring(tmp_path, CAUSAL_ONLY))))
    assert all(check.ok for check in found)
    (said,) = [check for check in found if check.name == "can be built (two-sided)"]
    assert "it only looks back" in said.detail
    assert len(found) == 1 + len(model_contract.PROMISES)
    one = {"name": "./mine.py", "d_model": 16}
    with pytest.raises(UsageError, match=r"mine.py: it only looks back; set model.causal=true"):
        build_stage(Job(loaded(tmp_path, model=one), "pretrain", 0))
    build_stage(Job(loaded(tmp_path, model={**one, "causal": True}), "pretrain", 0))


def test_a_model_that_is_nothing_is_no_model(tmp_path):
    found = model_contract.check_contract(
        find_plugin("models", str(declaring(tmp_path, "raise Unsupported('not today')")))
    )
    assert not all(check.ok for check in found)


def test_a_model_that_sees_padding(tmp_path):
    """Refused where a task pads, accepted where it does not, and not held to what it does not promise."""
    path = declaring(tmp_path, "backbone.ignores_padding = False")
    path.write_text(path.read_text().replace("return x\n", "return x + x.mean(1, keepdim=True)\n"))
    found = {check.name: check for check in model_contract.check_contract(find_plugin("models", str(path)))}
    assert found["never sees padding (two-sided)"].ok and not found["never looks ahead (causal)"].ok
    one = {"name": "./mine.py", "d_model": 16}
    with pytest.raises(UsageError, match=r"cannot leave padding out of account, but .* have 3 to 12 steps"):
        build_stage(Job(own_task(tmp_path, model=one), "finetune", 0))
    build_stage(Job(loaded(tmp_path, model=one), "finetune", 0))


def test_a_model_that_takes_multiples(tmp_path):
    path = declaring(tmp_path, "backbone.length_multiple = 8")
    path.write_text(path.read_text().replace("x = self.map(x)", "assert x.shape[1] % 8 == 0\n        x = self.map(x)"))
    assert all(check.ok for check in model_contract.check_contract(find_plugin("models", str(path))))
    one = {"name": "./mine.py", "d_model": 16}
    with pytest.raises(UsageError, match=r"a multiple of 8, but this task has some of 3 steps"):
        build_stage(Job(own_task(tmp_path, model=one), "finetune", 0))
    build_stage(Job(loaded(tmp_path, model=one), "finetune", 0))


SHARED = "one = Map(config.d_model)\n    return Backbone(config.model_copy(update={'n_layers': 2}), lambda: [one])"
IDENTITY = "def identity(config):\n    return {}['nothing']\n\ndef build(config)"


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("class Config(BackboneConfig):\n    pass", "", "has no class Config that derives from"),
        ("class Config(BackboneConfig):", "class Config:", "has no class Config that derives from"),
        ("def build(config)", "def make(config)", "has no function build"),
        (
            "return Backbone(config, lambda: [Map(config.d_model)])",
            "return Map(16)",
            "build returned Map, not a Backbone",
        ),
        ("lambda: [Map(config.d_model)]", "lambda: Map(16)", "block has to return a list of mixers, not a Map"),
        ("lambda: [Map(config.d_model)]", "lambda: [nn.Linear(16, 16)]", "Linear is not a Mixer"),
        ("def flops", "def operations", "Map does not state its operations"),
        ("def forward", "def run", "Map has no forward"),
        ("def forward(self, x, context)", "def forward(self, x)", "takes 2 positional arguments but 3 were given"),
        ("        super().__init__()\n", "", "before Module.__init__() call"),
        ("return FORWARD", "return x[..., :1]", "Map returned (2, 64, 1) for an input of (2, 64, 16)"),
        ("return FORWARD", "return x, None", "Map returned a tuple, not a tensor"),
        ("return Backbone(config, lambda: [Map(config.d_model)])", SHARED, "are one parameter under two names"),
        ("def build(config)", IDENTITY, "identity fails with KeyError"),
    ],
)
def test_what_a_file_lacks_is_named(tmp_path, old, new, complaint):
    """In one sentence, before anything is trained."""
    path = tmp_path / "mine.py"
    assert old in MODEL
    path.write_text(MODEL.replace(old, new).replace("FORWARD", "x").replace("EXTRA", ""))
    recipe = recipe_file(tmp_path, model={"name": "./mine.py", "d_model": 16})
    done = CliRunner().invoke(app, ["show", str(recipe)])
    assert done.exit_code == 2 and complaint in done.stderr, done.output
    assert "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) <= 3


def test_a_list_in_place_of_a_function_is_named(tmp_path):
    """By the command itself: in this process the type checker would refuse it first."""
    (tmp_path / "mine.py").write_text(MODEL.replace("lambda: [", "[").replace("FORWARD", "x").replace("EXTRA", ""))
    recipe = recipe_file(tmp_path, model={"name": "./mine.py", "d_model": 16})
    done = spt("show", recipe, cwd=tmp_path)
    assert done.returncode == 2 and "block has to be a function" in done.stderr, done.stderr


@pytest.mark.slow
def test_a_model_in_an_installed_package(tmp_path):
    """By its dotted path; a run knows it by its content."""
    package = tmp_path / "site" / "layers_of_mine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    model_file(package).rename(package / "linear.py")
    recipe = recipe_file(tmp_path, model={"name": "layers_of_mine.linear", "d_model": 16})
    where = {"PYTHONPATH": os.pathsep.join([str(package.parent), str(ROOT)])}
    done = spt("compare", recipe, "--smoke", "--seeds", 1, "--cpu", "--json", cwd=tmp_path, env=where)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert row["model"] == "layers_of_mine.linear"


STARTED = """
import logging
from pathlib import Path
from spt.models.base import Backbone, BackboneConfig

class Config(BackboneConfig):
    start: Path | str | None = None

def fetch(config):
    if config.start is None:
        raise ValueError("there is nothing to fetch from")
    Path(config.start).write_text("weights")
    logging.getLogger("spt").info("fetched")

def identity(config):
    return {"weights": Path(config.start).read_text()} if config.start and Path(config.start).exists() else {}

def build(config):
    return Backbone(config, lambda: [Map(config.d_model)])
"""


def test_a_model_that_starts_from_files(tmp_path):
    """`spt data prepare` fetches them; a run is named by what is in them, not by where they lie."""
    (tmp_path / "mine.py").write_text(MODEL.replace("FORWARD", "x").replace("EXTRA", "") + STARTED)
    one = {"name": "./mine.py", "d_model": 16}
    here = recipe_file(tmp_path, model={**one, "start": "./a.bin"})
    before = Job(load(str(here)), "finetune", 0).name
    done = spt("data", "prepare", here, cwd=tmp_path)
    assert done.returncode == 0 and "fetched" in done.stderr, done.stderr
    assert (tmp_path / "a.bin").read_text() == "weights"
    name = Job(load(str(here)), "finetune", 0).name
    assert name != before
    (tmp_path / "b.bin").write_text("weights")
    assert Job(load(str(here), ["model.start=" + str(tmp_path / "b.bin")]), "finetune", 0).name == name
    (tmp_path / "b.bin").write_text("others")
    assert Job(load(str(here), ["model.start=" + str(tmp_path / "b.bin")]), "finetune", 0).name != name
    assert load(str(here), ["model.start=somebody/model"]).recipe.model.options["start"] == "somebody/model"
    none = spt("data", "prepare", recipe_file(tmp_path, model=one), cwd=tmp_path)
    assert none.returncode == 3 and "nothing to fetch from" in none.stderr and "Traceback" not in none.stderr


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise ValueError('boom')", "fails when imported: ValueError: boom"),
        ("def (", "fails when imported: SyntaxError"),
        (None, "there is no module mine_too.linear, though mine_too exists"),
    ],
)
@pytest.mark.slow
def test_a_package_that_cannot_be_imported(tmp_path, source, words):
    package = tmp_path / "mine_too"
    package.mkdir()
    (package / "__init__.py").write_text("")
    if source is not None:
        (package / "linear.py").write_text(source)
    done = spt("check", "model", "mine_too.linear", cwd=tmp_path, env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_model_that_fails_in_training_is_named(tmp_path):
    """With its line, not as a mistake of spt's."""
    failing = "x if len(x) != 8 or not self.training else [][1]"
    model_file(tmp_path, forward=failing)
    recipe = recipe_file(tmp_path, model={"name": "./mine.py", "d_model": 16})
    done = spt("pretrain", recipe, "--cpu", cwd=tmp_path)
    assert done.returncode == 2 and "fails on a batch: IndexError" in done.stderr, done.stderr
    assert re.search(r"mine\.py:\d+ ", done.stderr) and "Traceback" not in done.stderr


@pytest.mark.parametrize("multiple", ["0", "7.5", "'x'"])
def test_a_multiple_that_is_none(tmp_path, multiple):
    declaring(tmp_path, f"backbone.length_multiple = {multiple}")
    with pytest.raises(UsageError, match=f"its length_multiple is {multiple}, not a number of steps"):
        build_stage(Job(loaded(tmp_path, model={"name": "./mine.py", "d_model": 16}), "finetune", 0))


def test_a_feed_forward_layer_where_there_is_no_stack(tmp_path):
    path = tmp_path / "own.py"
    text = MODEL.replace("FORWARD", "x").replace("EXTRA", "").partition("def build")[0]
    own = "class Own(Backbone):\n    def forward(self, x, context):\n        return x\n"
    path.write_text(f"{text}{own}\ndef build(config):\n    return Own(config, lambda: [])\n")
    one = {"name": "./own.py", "d_model": 16, "feed_forward": "switch"}
    with pytest.raises(UsageError, match="feed_forward is a part of residual stacks, which this model is not"):
        build_stage(Job(loaded(tmp_path, model=one), "finetune", 0))


def test_an_edit_within_the_same_second_is_seen(tmp_path):
    """Same size, same time: what Python takes bytecode that it has kept to be good for."""
    path = tmp_path / "mine.py"
    for number in (1, 2):
        path.write_text(MODEL.replace("FORWARD", "x").replace("EXTRA", "") + f"\nNUMBER = {number}\n")
        os.utime(path, (1e9, 1e9))
        assert find_plugin("models", str(path)).module.NUMBER == number
