"""The command as a user has it: real processes, standard output, exit codes, what is left behind."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
from tiny import RECIPE, TASK, changed, environment, load, recipe_file, spt
from typer.testing import CliRunner

from spt.config.job import Job
from spt.runs.folder import RunFolder
from spt.runs.result import Result
from spt.training.build import build_stage
from spt_cli import app


def call(*arguments, code=0):
    """In this process, for what needs no process of its own."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


@pytest.mark.parametrize(
    "command", ["", "pretrain", "finetune", "compare", "report", "show", "recipes", "list", "env", "doctor", "try"]
)
def test_help(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    output = call(*command.split(), "--help").stdout
    assert "Usage" in output and "Traceback" not in output
    assert max(map(len, output.splitlines())) <= 80


def test_help_is_not_broken_where_its_docstring_is(monkeypatch):
    monkeypatch.setenv("COLUMNS", "220")
    assert "says what came of it. The recipes are kept, to run and to edit." in call("try", "--help").stdout


@pytest.mark.parametrize(
    "arguments", [("--help",), ("list", "models"), ("list", "tasks"), ("recipes", "list"), ("report", "--help")]
)
def test_quick_commands_import_nothing_heavy(arguments, tmp_path):
    program = (
        "import sys, spt_cli\n"
        f"sys.argv = ['spt', *{arguments!r}]\n"
        "try:\n    spt_cli.main()\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
        "heavy = {'torch', 'transformers', 'datasets', 'accelerate', 'scipy.stats', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_listings_as_json():
    for arguments in (("list", "models"), ("list", "tasks"), ("recipes", "list")):
        rows = json.loads(call(*arguments, "--json").stdout)
        assert rows and all(row["name"] and row["description"] for row in rows)
    assert "transformer" in {row["name"] for row in json.loads(call("list", "models", "--json").stdout)}
    assert "quickstart" in {row["name"] for row in json.loads(call("recipes", "list", "--json").stdout)}


def test_recipes_are_listed_by_folder_one_line_each():
    names = {row["name"] for row in json.loads(call("recipes", "list", "--json").stdout)}
    lines = call("recipes", "list").stdout.splitlines()
    assert {line.split()[0] for line in lines if line.split()[:1] and line.split()[0] in names} == names
    headings = [line for line in lines if line and line.split()[0] not in names]
    assert headings[0] == "To begin with" and any(line.startswith("lra: Long Range Arena") for line in headings)
    assert len(lines) == len(names) + 2 * len(headings) - 1  # a blank line before each heading but the first
    place = lines.index(next(line for line in lines if line.startswith("lra/image-dlr ")))
    assert next(line for line in reversed(lines[:place]) if line in headings).startswith("lra:")


def test_some_recipes_are_listed_by_words_of_name_or_description():
    some = [row["name"] for row in json.loads(call("recipes", "list", "PathX", "spt", "--json").stdout)]
    assert "lra/pathx-dlr" in some and not any(name.startswith("bidmc") for name in some)
    assert "no recipe has 'pathx' and 'zebra'" in call("recipes", "list", "pathx", "zebra", code=2).stderr


def test_recipes_show_copy_schema(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = call("recipes", "show", "quickstart").stdout
    assert "task:" in text and text.startswith("#")
    call("recipes", "copy", "quickstart")
    assert (tmp_path / "quickstart.yaml").read_text() == text
    assert "exists" in call("recipes", "copy", "quickstart", code=2).stderr
    call("recipes", "copy", "quickstart", tmp_path / "mine.yaml")
    assert json.loads(call("recipes", "schema").stdout)["properties"]["task"]
    assert "no/such" in call("recipes", "copy", "quickstart", tmp_path / "no/such/folder.yaml", code=7).stderr


def test_what_networks_need_is_all_that_is_imported(tmp_path):
    """Torch's compiler, pandas and datasets take a second or two each: of every start, of every worker."""
    spt("data", "prepare", "digits", cwd=tmp_path)
    script = (
        "import sys, spt_cli\n"
        "for command in sys.argv[1:]:\n"
        "    sys.argv = ['spt', *command.split()]\n"
        "    try: spt_cli.main()\n"
        "    except SystemExit as end: assert not end.code, end.code\n"
        "    heavy = {'torch._dynamo', 'pandas', 'datasets', 'transformers', 'sklearn', 'scipy.stats'}\n"
        "    print('IMPORTED', *sorted(heavy & set(sys.modules)))\n"
    )
    recipe = recipe_file(tmp_path)
    command = [sys.executable, "-c", script, f"show {recipe}", f"finetune {recipe} --scratch"]
    done = subprocess.run(command, cwd=tmp_path, env=environment({}), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("IMPORTED")] == [
        "IMPORTED",
        "IMPORTED pandas scipy.stats sklearn",  # the last two for metrics of the test split
    ]


@pytest.mark.parametrize("model", [{}, {"name": "s4", "n_heads": None, "d_ff": None}], ids=["transformer", "s4"])
def test_memory_is_that_of_the_whole_batch(tmp_path, monkeypatch, model):
    """Two and three sequences tell what is saved for all of them, as do tensors without values."""
    from spt.analysis import resolved

    options = {key: value for key, value in (RECIPE["model"] | model).items() if value is not None}
    recipe = load(str(recipe_file(tmp_path, RECIPE | {"model": options})))
    setup = build_stage(Job(recipe, "finetune", 0))
    found = [resolved._saved_bytes(setup, 8)]
    rows = np.argsort(-setup.data.train.extents, kind="stable")[:8]
    (batch,) = resolved._batches(setup, rows)
    found.append(resolved._saved(setup, batch))
    monkeypatch.setattr(resolved, "RUN_FLOPS", 0)
    found.append(resolved._saved_bytes(setup, 8))
    assert found[0] == found[1] == found[2] > 0


def test_compare_end_to_end(tmp_path):
    """The main command: a table for people, JSON for programs, a second time without training, the same report."""
    recipe = recipe_file(tmp_path)
    first = spt("compare", recipe, "--seeds", "2", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "cannot be decided with 2 seeds" in first.stdout and "digits / transformer" in first.stdout
    second = spt("compare", recipe, "--seeds", "0,1", "--json", cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    found = json.loads(second.stdout)
    (row,) = found["rows"]
    assert {"task", "model", "scratch", "spt", "delta", "low", "high", "n"} <= set(row)
    assert (row["task"], row["model"], row["n"]) == ("digits", "transformer", 2)
    assert row["delta"] == pytest.approx(row["spt"] - row["scratch"])
    assert len(found["runs"]) == 6
    assert all((tmp_path / folder / "result.json").is_file() for folder in found["runs"])
    assert "copied" not in second.stderr  # nothing was trained
    (folder,) = (tmp_path / "runs").glob("compare-*")
    assert {path.name for path in folder.iterdir()} == {
        "study.json",
        "study.yaml",
        "report.html",
        "report.md",
        "report.tex",
        "report.csv",
        "seeds.csv",
        "items.csv",
        "curves.csv",
        "metrics.csv",
        "report.json",
    }
    report = spt("report", folder, "--json", cwd=tmp_path)
    assert json.loads(report.stdout)["rows"] == found["rows"]
    assert spt("report", "runs", cwd=tmp_path).returncode == 0


def test_failed_runs_are_rows_and_the_rest_goes_on(tmp_path):
    recipe = recipe_file(tmp_path, pretrain__train__learning_rate=1e38, pretrain__train__max_grad_norm=None)
    done = spt("compare", recipe, "--seeds", "2", "--json", cwd=tmp_path)
    assert done.returncode == 8, done.stderr
    found = json.loads(done.stdout)
    assert found["rows"][0]["n"] == 0 and found["rows"][0]["delta"] is None
    assert len([f for f in found["failures"] if f["state"] == "diverged"]) >= 2
    assert len(list((tmp_path / "runs").glob("finetune-*/result.json"))) == 2  # the scratch arm did finish


@pytest.mark.slow
def test_pretrain_then_finetune(tmp_path):
    recipe = recipe_file(tmp_path)
    done = spt("pretrain", recipe, "--seed", "3", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    pretrained = json.loads(done.stdout)
    assert pretrained["stage"] == "pretrain" and pretrained["test"] is None and pretrained["seed"] == 3
    done = spt("finetune", recipe, "--seed", "3", cwd=tmp_path)
    assert done.returncode == 0 and "test loss" in done.stdout
    assert len(list((tmp_path / "runs").glob("pretrain-*"))) == 1  # found, not made again
    (folder,) = (tmp_path / "runs").glob("finetune-*")
    result = Result.model_validate_json((folder / "result.json").read_text())
    assert result.parent == pretrained["key"]
    done = spt("finetune", recipe, "--scratch", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["parent"] is None


@pytest.mark.slow
def test_show_trains_nothing(tmp_path):
    recipe = recipe_file(tmp_path)
    done = spt("show", recipe, "model.d_ff=32", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.yaml"}
    found = json.loads(done.stdout)
    origins = {row["key"]: row["origin"] for row in found["values"]}
    assert origins["model.d_ff"] == "command line" and origins["model.d_model"] == "recipe"
    assert origins["pretrain.train.schedule"] == "default"
    stages = {stage["stage"]: stage for stage in found["stages"]}
    assert stages["pretrain"]["steps"] == 6 and stages["pretrain"]["examples"] == 48
    trained = json.loads(spt("pretrain", recipe, "model.d_ff=32", "--json", cwd=tmp_path).stdout)
    # As many steps are hidden as chance has it.
    assert stages["pretrain"]["training FLOPs"] == pytest.approx(trained["own"]["flops"], rel=0.01)
    assert found["runs"]["pretrain"] in trained["run"]
    for stage in found["stages"]:
        assert sum(group["parameters"] for group in stage["groups"]) <= stage["parameters"]["total"]
        assert stage["memory estimate"]["total"] > 16 * stage["parameters"]["total"]
    assert found["budgets"].startswith("scratch trains for ") and found["published parameters"] is None
    for title in ("optimiser groups", "stages", "command line", "MiB", "scratch trains for"):
        assert title in call("show", recipe, "model.d_ff=32", "--all").stdout
    brief = call("show", recipe, "model.d_ff=32").stdout
    assert "as finetune, but  train.epochs=180.0  train.learning_rate=0.1\n" in re.sub(
        " +\n", "\n", call("show", "quickstart").stdout
    )
    assert "d_ff=32 (command line)" in brief and "schedule" not in brief and "optimiser groups (--all)" in brief


MODEL = '''"""Gated recurrent unit: h_t = GRU(x_t, h_{t-1})."""

from pydantic import Field
from torch import nn

from spt.models.base import Backbone, BackboneConfig, Mixer


class Config(BackboneConfig):
    layers_inside: int = Field(1, ge=1)


class GRU(Mixer):
    def __init__(self, config):
        super().__init__()
        self.gru = nn.GRU(config.d_model, config.d_model, config.layers_inside, batch_first=True)

    def forward(self, x, context):
        return self.gru(x)[0]

    def flops(self, length):
        return 2.0 * length * sum(p.numel() for p in self.parameters() if p.ndim == 2)


def build(config):
    return Backbone(config, lambda: [GRU(config)])
'''


@pytest.mark.slow
def test_a_users_model_and_task_work_from_outside(tmp_path):
    """Files of a user, in a folder of their own, named by path in a recipe, run from another folder."""
    home = tmp_path / "home"
    home.mkdir()
    assert len(MODEL.splitlines()) <= 40
    (home / "gru.py").write_text(MODEL)
    (home / "toy.py").write_text(TASK)
    recipe = recipe_file(home, task={"name": "./toy.py"}, model={"name": "./gru.py", "d_model": 16, "n_layers": 1})
    (tmp_path / "work").mkdir()
    done = spt("compare", recipe, "--seeds", "2", "--json", "finetune.train.steps=3", cwd=tmp_path / "work")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["task"], row["model"], row["n"]) == ("toy", "gru", 2)
    done = spt("check", "model", home / "gru.py", "--json", cwd=tmp_path / "work")
    checks = json.loads(done.stdout)
    assert done.returncode == 0 and all(check["ok"] for check in checks) and len(checks) == 18
    (home / "gru.py").write_text(MODEL.replace("self.gru(x)[0]", "self.gru(x.flip(1))[0]"))
    done = spt("check", "model", home / "gru.py", cwd=tmp_path / "work")
    assert done.returncode == 2 and "FAIL never looks ahead (causal)" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("compare", "quikstart"), 2, "did you mean quickstart?"),
        (("compare", "nowhere.yaml"), 2, "no recipe file"),
        (("compare",), 2, "RECIPE"),
        (("compare", "a.b=c"), 2, "no recipe is named"),
        (("compare", "tiny.yaml", "--seeds", "0,0"), 2, "is given twice"),
        (("compare", "tiny.yaml", "--seeds", "0"), 2, "at least one"),
        (("compare", "tiny.yaml", "--seeds", "01,1"), 2, "is given twice"),
        (("compare", "tiny.yaml", "--seeds", "one"), 2, "whole numbers"),
        (("compare", "tiny.yaml", "--seeds", "-1"), 2, "whole numbers"),
        (("compare", "tiny.yaml", "--seeds", "2", "1"), 2, "unknown recipe '1'"),
        (("compare", "tiny.yaml", "--seeds", "99999999"), 2, "to name one seed"),
        (("pretrain", "tiny.yaml", "--seed", "0,1"), 2, "spt compare takes several"),
        (("pretrain", "tiny.yaml", "--seed", ""), 2, "whole numbers"),
        (("pretrain", "tiny.yaml", "tiny.yaml"), 2, "one recipe is expected"),
        (("pretrain", "tiny.yaml", "model.d_modl=3"), 2, "did you mean d_model?"),
        (("pretrain", "tiny.yaml", "model.name=nope"), 2, "unknown model"),
        (("pretrain", "tiny.yaml", "task.name=nope"), 2, "unknown task"),
        (("pretrain", "tiny.yaml", "task.name=./nope.py"), 2, "no file"),
        (("pretrain", "tiny.yaml", "pretrain.train.select_by=mae"), 2, "no metric of this stage"),
        (("compare", "tiny.yaml", "pretrain.train.select_by=mae"), 2, "no metric of this stage"),
        (("pretrain", "tiny.yaml", "pretrain.objective.loss=l1"), 2, "for continuous inputs"),
        (("pretrain", "tiny.yaml", "model.max_length=10"), 2, "sequences of 64 steps"),
        (("pretrain", "tiny.yaml", "--resume", "maybe"), 2, "maybe"),
        (("pretrain", "tiny.yaml", "--resume", "must"), 6, "no checkpoint"),
        (("pretrain", "tiny.yaml", "--tracker", "paper"), 4, "paper"),
        (("pretrain", "tiny.yaml", "--out", "file"), 7, "cannot write"),
        (("pretrain", "tiny.yaml", "--out", "/proc/nowhere"), 7, "cannot write"),
        (("finetune", "tiny.yaml", "--scratch", "--from", "x"), 2, "contradict"),
        (("finetune", "tiny.yaml", "--from", "x"), 2, "no run folder"),
        (("report", "nowhere"), 2, "nowhere"),
        (("report", "."), 3, ""),
        (("frobnicate",), 2, "frobnicate"),
        (("pretrain", "tiny.yaml", "--frobnicate"), 2, "frobnicate"),
        (("check", "model", "nope"), 2, "unknown model"),
    ],
)
def test_mistakes_are_one_sentence_with_the_right_code_and_leave_nothing(tmp_path, monkeypatch, arguments, code, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPT_RUNS_DIR", raising=False)
    recipe_file(tmp_path)
    (tmp_path / "file").write_text("")
    result = call(*arguments, code=code)
    assert words in " ".join(result.stderr.split()).replace("│ ", "")
    assert "Traceback" not in result.output and result.stdout == ""
    left = {path.name for path in tmp_path.iterdir()} - {"tiny.yaml", "file"}
    runs = {path.name for path in (tmp_path / "runs").glob("*")} - {".locks"} if left else set()
    assert left <= {"runs"} and not runs


def test_missing_and_invalid_data_is_code_3(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.py").write_text(TASK.replace("rng = ", "open('/no/such/data')\n    rng = "))
    recipe_file(tmp_path, task={"name": "./toy.py"})
    result = call("pretrain", "tiny.yaml", code=3)
    assert "/no/such/data" in result.stderr and len(result.stderr.strip().splitlines()) == 1


def test_files_that_lack_a_piece_of_the_contract(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text, words in (
        ("x = 1", "no function build"),
        ("def build(config): pass", "no class Config"),
        ("def build(config): pass\nclass Config: pass", "derives from spt.models.base.BackboneConfig"),
        ("1 / 0", "mine.py:1 fails when imported: ZeroDivisionError"),
        ("def build(:", "mine.py:1 fails when imported: SyntaxError"),
        ("import nosuchmodule", "No module named 'nosuchmodule'"),
        (MODEL.replace("return Backbone(config, lambda: [GRU(config)])", "return GRU(config)"), "not a Backbone"),
        (MODEL.replace("config.layers_inside,", "config.nosuch,"), "build fails with AttributeError"),
    ):
        (tmp_path / "mine.py").write_text(text)
        recipe_file(tmp_path, model={"name": "./mine.py", "d_model": 16})
        assert words in call("pretrain", "tiny.yaml", code=2).stderr


def test_debug_shows_the_traceback(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "Traceback" in call("compare", "quikstart", "--debug", code=2).stderr


def test_a_bug_of_ours_is_code_1_and_told_in_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe_file(tmp_path)

    def broken(*_):
        raise RuntimeError("something of ours")

    monkeypatch.setattr("spt.training.stage.fit", broken)
    result = call("pretrain", "tiny.yaml", "--out", "runs", code=1)
    assert "a bug in spt: RuntimeError: something of ours" in result.stderr and "Traceback" not in result.stderr
    (folder,) = (tmp_path / "runs").glob("pretrain-*")
    assert RunFolder(tmp_path / "runs", folder.name).status()["state"] == "failed"
    assert "something of ours" in (folder / "traceback.txt").read_text()


@pytest.mark.slow
def test_env_and_doctor(tmp_path):
    found = json.loads(call("env", "--json").stdout)
    assert found["spt"] and found["torch"] and found["device"]
    checks = json.loads(call("doctor", "--json").stdout)
    assert all(check["ok"] for check in checks) and len(checks) >= 4


def test_python_m_works_like_the_command(tmp_path):
    done = spt("--version", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("spt ")
    done = subprocess.run(
        [sys.executable, "-m", "spt", "--version"], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.startswith("spt ")


def test_smoke_is_quick_and_marked(tmp_path):
    recipe = recipe_file(tmp_path, changed(RECIPE, pretrain__train__steps=100000, finetune__train__steps=100000))
    done = spt("compare", recipe, "--smoke", "--seeds", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "smoke run" in done.stdout


def test_metrics_can_go_to_a_tracker(tmp_path):
    done = spt("pretrain", recipe_file(tmp_path), "--tracker", "tensorboard", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / json.loads(done.stdout)["run"]).rglob("events.out.tfevents*"))


@pytest.mark.slow
def test_whatever_prints_json_stays_alone_on_stdout(tmp_path):
    """A user's task and model that print, also from a program they start."""
    noise = "import os\nprint('noise')\nos.system('echo more noise')\n"
    (tmp_path / "gru.py").write_text(MODEL.replace("class Config", noise + "class Config", 1))
    (tmp_path / "toy.py").write_text(TASK.replace("    rng = ", "    print('loading')\n    rng = "))
    recipe = recipe_file(tmp_path, task={"name": "./toy.py"}, model={"name": "./gru.py", "d_model": 16, "n_layers": 1})
    for arguments in (("pretrain", recipe), ("show", recipe), ("check", "model", tmp_path / "gru.py")):
        done = spt(*arguments, "--json", cwd=tmp_path)
        assert done.returncode == 0 and json.loads(done.stdout), done.stderr
        assert "noise" in done.stderr


def test_user_code_that_calls_exit_does_not_look_like_success(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gru.py").write_text(MODEL)
    recipe_file(tmp_path, model={"name": "./gru.py", "d_model": 16, "n_layers": 1})
    for place, words in (
        ("class GRU", "fails when imported: SystemExit"),
        ("    return Backbone", "build fails with SystemExit"),
        ("        return self.gru", "called sys.exit(0)"),
    ):
        indent = " " * (len(place) - len(place.lstrip()))
        (tmp_path / "gru.py").write_text(MODEL.replace(place, f"{indent}raise SystemExit(0)\n{place}", 1))
        assert words in call("pretrain", "tiny.yaml", code=2).stderr


@pytest.mark.slow
def test_two_compares_at_once_share_the_work(tmp_path):
    recipe = recipe_file(tmp_path, pretrain__train__steps=60)
    command = [sys.executable, "-m", "spt_cli", "compare", str(recipe), "--seeds", "2", "--json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(command, cwd=tmp_path, env=environment(), **pipes) for _ in range(2)]
    outputs = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert json.loads(outputs[0][0])["rows"] == json.loads(outputs[1][0])["rows"]
    assert len(list((tmp_path / "runs").glob("finetune-*"))) == 4


def test_damaged_files_of_a_comparison(tmp_path, monkeypatch):
    """One unreadable result is a failed run; a damaged plan is written anew; damaged weights say what to do."""
    monkeypatch.chdir(tmp_path)
    recipe_file(tmp_path)
    call("compare", "tiny.yaml", "--seeds", "2", "--out", "runs")
    (folder,) = (tmp_path / "runs").glob("compare-*")
    (folder / "study.json").write_text("[]")
    call("compare", "tiny.yaml", "--seeds", "2", "--out", "runs")
    assert json.loads((folder / "study.json").read_text())["seeds"] == [0, 1]
    one = min((tmp_path / "runs").glob("finetune-*"))
    (one / "result.json").write_text("{")
    found = json.loads(call("compare", "tiny.yaml", "--seeds", "2", "--out", "runs", "--json", code=8).stdout)
    assert found["rows"][0]["n"] == 1 and [failure["state"] for failure in found["failures"]] == ["unreadable"]
    for pretrain in (tmp_path / "runs").glob("pretrain-*"):
        (pretrain / "checkpoints/best/model.safetensors").write_bytes(b"")
    result = call("finetune", "tiny.yaml", "--from", next((tmp_path / "runs").glob("pretrain-*")), code=6)
    assert "move" in result.stderr and "away, then it is made again" in result.stderr


@pytest.mark.slow
def test_a_narrow_terminal_keeps_every_column(tmp_path):
    recipe = recipe_file(tmp_path)
    wide, narrow = (
        spt("compare", recipe, "--seeds", "2", cwd=tmp_path, env={"COLUMNS": columns}) for columns in ("80", "30")
    )
    assert wide.stdout == narrow.stdout and "interval" in narrow.stdout


@pytest.mark.slow
def test_a_terminal_that_knows_ascii_alone(tmp_path):
    done = spt("compare", recipe_file(tmp_path), "--seeds", "2", cwd=tmp_path, env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
