"""The commands of studies, as a user gives them, in this process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tiny import RECIPE, ROOT, changed, environment, recipe_file, spt
from typer.testing import CliRunner

from spt.errors import visible
from spt_cli import app


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPT_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setattr(os, "fsync", lambda _: None)
    recipe_file(tmp_path)


def call(*arguments, code=0):
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == code, (done.stdout, done.stderr, done.exception)
    return done


def planned(*arguments):
    """What `--dry-run --json` tells of a study."""
    return json.loads(call("study", *arguments, "--dry-run", "--json").stdout)


def test_a_dry_run_names_every_run_and_runs_nothing(tmp_path):
    found = planned("compute", "tiny.yaml", "--shares", "0,0.5", "--seeds", "2")
    assert found["kind"] == "compute" and not (tmp_path / "runs").exists()
    assert [run["stage"] for run in found["runs"]] == ["pretrain", "finetune", "finetune"] * 2
    assert {run["state"] for run in found["runs"]} == {"missing"}
    steps = {stage: [r["steps"] for r in found["runs"] if r["stage"] == stage] for stage in ("pretrain", "finetune")}
    assert steps == {"pretrain": [6, 6], "finetune": [6, 12, 6, 12]}
    assert all(run["flops"] > 0 and run["seconds"] is None for run in found["runs"])
    assert found["left"]["runs"] == 6 and found["left"]["steps"] == 48
    command = ("study", "compute", "tiny.yaml", "--shares", "0,0.5", "--seeds", "2", "--dry-run")
    shown = call(*command).stdout
    assert "left: 6 of 6 runs" in shown and shown.count("seeds 0 to 1") == 3 and "seed 1" not in shown
    every = call(*command, "--full").stdout
    assert "seed 1 scratch" in every and "seeds 0" not in every


def test_a_dry_run_knows_what_is_done(tmp_path):
    call("study", "data", "tiny.yaml", "--fractions", "1", "--seeds", "1")
    found = planned("data", "tiny.yaml", "--fractions", "1", "--seeds", "2")
    assert [run["state"] for run in found["runs"]] == ["done"] * 3 + ["missing"] * 3
    assert all(run["seconds"] > 0 for run in found["runs"]), "judged by the runs that are done"
    assert found["left"]["runs"] == 3


@pytest.mark.slow
def test_a_study_is_saved_and_run_from_its_file(tmp_path):
    call(
        "study",
        "objective",
        "tiny.yaml",
        "--ratios",
        "0.3,0.6",
        "--spans",
        "1,4",
        "--seeds",
        "1",
        "--save",
        "mine.yaml",
    )
    saved = yaml.safe_load((tmp_path / "mine.yaml").read_text())
    assert saved["kind"] == "objective" and saved["recipes"] == ["tiny.yaml"] and saved["seeds"] == [0]
    assert saved["objectives"] == [
        {"name": "masked", "ratio": ratio, "span": span} for ratio in (0.3, 0.6) for span in (1, 4)
    ]
    assert not (tmp_path / "runs").exists()
    assert "exists" in call("study", "init", "tiny.yaml", "--save", "mine.yaml", code=2).stderr
    refused = call("study", "init", "tiny.yaml", "--save", "small.yaml", "--smoke", code=2)
    assert (
        "leave out --smoke, and give it to spt study run" in refused.stderr and not (tmp_path / "small.yaml").exists()
    )
    done = call("study", "run", "mine.yaml", "--smoke", "--json")
    rows = json.loads(done.stdout)["rows"]
    assert [row["factors"]["objective"] for row in rows] == [
        f"masked ratio={ratio} span={span}" for ratio in (0.3, 0.6) for span in (1, 4)
    ]
    (folder,) = (tmp_path / "runs").glob("objective-*")
    told = json.loads(call("study", "status", folder, "--json").stdout)["studies"]
    assert [(one["done"], one["all"]) for one in told] == [(9, 9)]  # one baseline, four of each stage
    assert "9 of 9 runs done" in call("study", "status", tmp_path / "runs").stdout
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("result.json")}
    call("study", "run", folder, "--out", "elsewhere")  # by its folder: where it lies, and as a smoke run again
    assert not (tmp_path / "elsewhere").exists()
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("result.json")}


def test_every_kind_has_its_command(tmp_path):
    assert len(planned("compare", "tiny.yaml", "--seeds", "1")["runs"]) == 3
    sizes = planned("size", "tiny.yaml", "--size", "S:d_model=8", "--size", "M:d_model=16,d_ff=8", "--seeds", "1")
    assert [row["factors"] for row in sizes["rows"]] == [{"size": "S"}, {"size": "M"}]
    assert sizes["rows"][0]["parameters"] < sizes["rows"][1]["parameters"]
    assert len(planned("init", "tiny.yaml", "--initialisations", "random", "--seeds", "1")["runs"]) == 3
    rows = planned("reach", "tiny.yaml", "--reaches", "16,4,full", "--seeds", "1")["rows"]
    assert [row["factors"] for row in rows] == [{"reach": 4}, {"reach": 16}, {"reach": "full"}]
    options = ("--space", "learning_rate=1e-3..1e-1", "--space", "batch_size=4,8", "--trials", "3")
    tune = planned("tune", "tiny.yaml", *options, "--trial-seeds", "7,", "--seeds", "2")
    assert len(tune["runs"]) == 7 and tune["later"] == 4 and {run["seed"] for run in tune["runs"]} == {7}
    assert len(planned("tune", "tiny.yaml", "--seeds", "1")["runs"]) == 1 + 3 + 3, "the default space"
    own = ("--space", "pretrain.batch_size=4", "--space", "batch_size=4,8")
    both = planned("tune", "tiny.yaml", "--space", "spt-paper", *own)["runs"]
    assert len(both) == 3 + 3 * 6 + 6, "values of one's own stand above the packaged ones"
    parts = [planned("tune", "tiny.yaml", *options, "--shard", f"{i}/2")["runs"] for i in (1, 2)]
    assert len(parts[0]) + len(parts[1]) == 7 and parts[0] and parts[1]
    changed_recipe = planned("compare", "tiny.yaml", "model.d_model=8", "--seeds", "1")
    assert changed_recipe["rows"][0]["parameters"] < sizes["rows"][1]["parameters"]


@pytest.mark.parametrize("task", [0, 1])
def test_the_tasks_of_a_step_make_a_part_each(task, tmp_path, monkeypatch):
    command = ("compare", "tiny.yaml", "--seeds", "2")
    part = planned(*command, "--shard", f"{task + 1}/2")["runs"]
    for name, value in {"SLURM_NTASKS": 2, "SLURM_STEP_NUM_TASKS": 2, "SLURM_PROCID": task, "SLURM_JOB_ID": 7}.items():
        monkeypatch.setenv(name, str(value))
    arguments = ["study", *command, "--shard", "auto", "--dry-run", "--json"]
    program = [sys.executable, str(ROOT / "spt_cli.py"), *arguments]
    done = subprocess.run(program, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout)["runs"] == part and part


@pytest.mark.slow
def test_models_of_equal_size_are_found_once(tmp_path):
    """Query for again, by its folder or by the same command, the study has the same runs."""
    recipe_file(tmp_path, model__d_ff=64).rename(tmp_path / "wide.yaml")
    recipe_file(tmp_path)
    command = ("models", "tiny.yaml", "wide.yaml", "--seeds", "1")
    found = planned(*command)
    tiny, wide = found["rows"]
    assert tiny["changes"] == {} and wide["changes"]["d_ff"] == 4 * wide["changes"]["d_model"]
    assert abs(wide["parameters"] / tiny["parameters"] - 1) < 0.05 and wide["flops_per_example"] > 0
    assert f"d_model {wide['changes']['d_model']}, d_ff" in call("study", *command, "--dry-run").stdout
    call("study", *command)
    (folder,) = (tmp_path / "runs").glob("models-*")
    assert folder.name == found["study"]
    assert yaml.safe_load((folder / "study.yaml").read_text())["scaled"][str(tmp_path / "wide.yaml")] == wide["changes"]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("result.json")}
    assert len(before) == 6
    call("study", "run", folder)
    call("study", *command)
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("result.json")}
    assert len(list((tmp_path / "runs").glob("models-*"))) == 1
    assert "6 of 6 runs done" in call("study", "status").stdout


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (("compute",), 2, "Missing argument"),
        (("models", "tiny.yaml"), 2, "name at least two"),
        (("compute", "tiny.yaml", "--shares", "a,b"), 2, "--shares a,b: numbers"),
        (("compute", "tiny.yaml", "--shares", "2"), 2, "shares"),
        (("compute", "nosuch"), 2, "unknown recipe"),
        (("data", "tiny.yaml", "--fractions", "0"), 2, "fractions"),
        (("size", "tiny.yaml", "--size", "S"), 2, "NAME:option=value"),
        (("size", "tiny.yaml", "--size", "S:d_modl=8"), 2, "did you mean d_model"),
        (("size", "tiny.yaml", "--size", "S:d_model=8, d_model=16"), 2, "is given twice"),
        (
            ("variants", "tiny.yaml", "--variant", "A", "--variant", "B:model.d_modl=8"),
            2,
            "tiny.yaml, level 'B': model.d_modl: unknown key",
        ),
        (("variants", "tiny.yaml", "--variant", "a\tb"), 2, r"a variant is called 'a\tb'"),
        (
            ("reach", "tiny.yaml", "--reaches", "4,all"),
            2,
            "--reaches 4,all: whole numbers with commas between them are expected, such as 1,4",
        ),
        (("reach", "quickstart-s5"), 2, "quickstart-s5: s5 cannot be cut to a reach; models that can are transformer,"),
        (("objective", "tiny.yaml"), 2, "no objective is named"),
        (("objective", "tiny.yaml", "--objective", "masked:rato=0.5"), 2, "did you mean ratio"),
        (("objective", "tiny.yaml", "--objective", "mask"), 2, "is unknown"),
        (("tune", "tiny.yaml", "--space", "lr=1"), 2, "did you mean learning_rate"),
        (("tune", "tiny.yaml", "--space", "learning_rate=-1"), 2, "learning_rate"),
        (("tune", "tiny.yaml", "--space", "spt-papr"), 2, "known: default, spt-paper"),
        (("tune", "tiny.yaml", "--space", "batch_size=8", "--space", "batch_size=4"), 2, "each name once"),
        (("tune", "tiny.yaml", "--protocol", "time"), 2, "--protocol"),
        (("run", "nosuch"), 2, "unknown study"),
        (("run", ""), 2, "unknown study ''"),
        (("compute", "tiny.yaml", "--shares", ""), 2, "--shares"),
        (("compare", "tiny.yaml", "./tiny.yaml"), 2, "is listed twice"),
        (("compare", "tiny.yaml", "--shard", "²/2"), 2, "--shard"),
        (("compare", "tiny.yaml", "--shard", ""), 2, "--shard"),
        (("compare", "tiny.yaml", "--shard", "1/1000000"), 2, "--shard"),
        (("run", "nosuch.yaml"), 2, "no study file"),
        (("run", "tiny.yaml"), 2, "is not a study: no kind"),
        (("status", "nosuch"), 2, "no folder"),
        (("status", "."), 3, "holds no study"),
        (("compare", "tiny.yaml", "--shard", "3/2"), 2, "--shard 3/2"),
        (("compare", "tiny.yaml", "--jobs", "2", "--slurm", "time=60"), 2, "contradict"),
        (("compare", "tiny.yaml", "--slurm", "tim=60"), 2, "did you mean time"),
        (("compare", "tiny.yaml", "--seeds", "0"), 2, "--seeds"),
    ],
)
def test_wrong_studies_are_refused_in_a_sentence(arguments, code, complaint, tmp_path):
    done = call("study", *arguments, code=code)
    assert complaint in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("how", [["--dry-run"], []])
def test_a_variant_that_cannot_be_built_is_named(how, tmp_path):
    variants = ["--variant", "A", "--variant", "B:model.max_length=3"]
    done = call("study", "variants", "tiny.yaml", *variants, *how, code=2)
    assert done.stderr.startswith("spt: tiny variant B: model.max_length is 3, but this task has sequences of 64 steps")
    assert not (tmp_path / "runs").exists()


def test_values_of_variants_may_be_lists(tmp_path):
    values = "A:pretrain.train.schedule=steps,pretrain.train.milestones=[0.25,0.5],model={name: dss, d_model: 8}"
    call("study", "variants", "tiny.yaml", "--variant", values, "--save", "mine.yaml")
    assert yaml.safe_load((tmp_path / "mine.yaml").read_text())["variants"]["A"] == {
        "pretrain.train.schedule": "steps",
        "pretrain.train.milestones": [0.25, 0.5],
        "model": {"name": "dss", "d_model": 8},
    }


def test_a_study_goes_on_where_it_lies(tmp_path):
    call("study", "init", "tiny.yaml", "--seeds", "1", "--smoke")
    (folder,) = (tmp_path / "runs").glob("init-*")
    done = call("study", "run", folder, "--out", "elsewhere")
    assert f"note: the study goes on where it lies, in {tmp_path / 'runs'}, not in elsewhere" in done.stderr
    assert not (tmp_path / "elsewhere").exists()


def test_a_study_that_is_damaged_or_in_part(tmp_path):
    call("study", "init", "tiny.yaml", "--seeds", "1", "--smoke")
    (folder,) = (tmp_path / "runs").glob("init-*")
    (folder / "study.json").write_text("{")
    assert "is not a study" in call("study", "status", folder, code=3).stderr
    call("study", "init", "tiny.yaml", "--seeds", "1", "--smoke")
    assert json.loads((folder / "study.json").read_text())["kind"] == "init"
    (folder / "study.json").unlink()
    call("study", "run", folder, "--smoke")  # a folder with a study's file is as good as that file
    assert json.loads((folder / "study.json").read_text())["kind"] == "init"
    (folder / "study.yaml").unlink()
    assert "holds no study.yaml" in call("study", "run", folder, code=2).stderr


def test_listing_and_showing_studies():
    names = [row["name"] for row in json.loads(call("study", "list", "--json").stdout)]
    assert {"models-quickstart", "spt-figure-3", "spt-table-7", "spt-table-8", "spt-table-9"} <= set(names)
    for name in names:
        shown = yaml.safe_load(call("study", "show", name).stdout)
        assert shown["recipes"] and shown["kind"]
    assert "did you mean spt-table-8" in call("study", "show", "spt-table8", code=2).stderr


@pytest.mark.skipif(sys.getfilesystemencoding() != "utf-8", reason="this locale has no such names")
def test_a_shown_study_reads_back_and_does_nothing_to_a_terminal(tmp_path):
    name = "tïny\u202e.yaml"
    (tmp_path / "s.yaml").write_text(yaml.safe_dump({"kind": "compare", "recipes": [name, "tïny.yaml"]}), "utf-8")
    shown = call("study", "show", "s.yaml").stdout
    read = [Path(recipe).name for recipe in yaml.safe_load(shown)["recipes"]]
    assert visible(shown) == shown and read == [name, "tïny.yaml"]


def test_a_name_that_the_locale_cannot_have_is_told(tmp_path):
    (tmp_path / "s.yaml").write_text(yaml.safe_dump({"kind": "compare", "recipes": ["tïny.yaml"]}), "utf-8")
    ascii_alone = {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = spt("study", "show", "s.yaml", cwd=tmp_path, env=ascii_alone)
    assert done.returncode == 2 and "not in this locale's encoding, ascii; set PYTHONUTF8=1" in done.stderr, done.stderr


def test_one_failed_run_does_not_stop_a_study(tmp_path):
    recipe = changed(RECIPE, finetune__train__max_grad_norm=None)
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(recipe))
    search = ("study", "tune", "bad.yaml", "--space", "learning_rate=0.01,1e38", "--seeds", "1", "--json")
    found = json.loads(call(*search).stdout)  # a diverged setting uses up its trial
    assert found["rows"][0]["n"] == 1
    assert {failure["state"] for failure in found["failures"]} == {"diverged"} and len(found["failures"]) == 2
    done = call("study", "compare", "bad.yaml", "finetune.train.learning_rate=1e38", "--seeds", "1", "--json", code=8)
    assert "2 of the runs failed" in done.stderr and len(json.loads(done.stdout)["failures"]) == 2


def test_json_is_one_value_whatever_a_model_prints(tmp_path):
    model = (
        "from torch import nn\nfrom spt.models.base import Backbone, BackboneConfig, Mixer\n\n\n"
        "class Config(BackboneConfig):\n    pass\n\n\n"
        "class Loud(Mixer):\n    def __init__(self, config):\n        super().__init__()\n"
        "        self.map = nn.Linear(config.d_model, config.d_model)\n\n"
        "    def forward(self, x, context):\n        print('NOISE')\n        return self.map(x)\n\n"
        "    def flops(self, length):\n        return 1.0 * length\n\n\n"
        "def build(config):\n    return Backbone(config, lambda: [Loud(config)])\n"
    )
    (tmp_path / "loud.py").write_text(model)
    done = spt("compare", "quickstart", "model.name=./loud.py", "--smoke", "--seeds", "1", "--json", cwd=tmp_path)
    assert done.returncode == 0 and "NOISE" in done.stderr, done.stderr
    assert len(json.loads(done.stdout)["rows"]) == 1


def test_a_dry_run_has_whole_names_at_80_columns(tmp_path):
    names = ["quickstart", "quickstart-linear_transformer"]
    done = spt("study", "run", "models-digits", *names, "--dry-run", cwd=tmp_path, env={"COLUMNS": "80"})
    assert done.returncode == 0 and "…" not in done.stdout, done.stdout + done.stderr
    assert all(any(line.startswith(f"{name} ") for line in done.stdout.splitlines()) for name in names)
    assert "total" not in done.stdout, "which models do not have"


def test_the_runs_of_one_arm(tmp_path):
    asked = ("compare", "quickstart", "--smoke", "--seeds", "2", "--dry-run", "--json", "--out", tmp_path)
    both, scratch, spt = (
        json.loads(call(*asked, *more).stdout) for more in ((), ("--arm", "scratch"), ("--arm", "spt"))
    )
    assert {run["stage"] for run in scratch["runs"]} == {"finetune"} and len(scratch["runs"]) == 2
    names = [{run["run"] for run in each["runs"]} for each in (both, scratch, spt)]
    assert names[0] == names[1] | names[2] and not names[1] & names[2]
    assert both["study"] == scratch["study"] == spt["study"]
    assert "this study has spt, scratch" in call(*asked, "--arm", "frozen", code=2).stderr
    search = ("study", "tune", "quickstart-dlr", "--space", "learning_rate=0.003,0.01", "--dry-run", "--out", tmp_path)
    assert "a search tries its settings in both arms" in call(*search, "--arm", "scratch", code=2).stderr
