"""The network as a torch.export program: what it answers, what it takes, and that a model without one says so."""

import json
import subprocess
import sys

import measure_programs
import numpy as np
import programs_page
import pytest
import torch
from test_trained_model import CPU, trained
from tiny import ROOT, environment, model_file, spt

from spt.inference.trained_model import TrainedModel
from spt.training.load_run import load_run

ANY, LENGTH = {"batch": "any", "length": "2 to 24"}, {"batch": "any", "length": 24}


@pytest.fixture(scope="module")
def found():
    """Of tests/programs.py, run by itself: shape checks in a test ask for sizes, which a program would then be held
    to."""
    environ = environment({"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"})
    command = [sys.executable, str(ROOT / "tests" / "programs.py")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "takes"),
    [
        *((f"transformer, {pool}", {**ANY, "padding": True}) for pool in ("mean", "max", "last")),
        ("s4d", {**LENGTH, "padding": True}),
        ("lru", {**LENGTH, "padding": True}),
        ("gla", {**LENGTH, "padding": True}),
        ("mamba", {**LENGTH, "padding": True}),
        ("steps", {**ANY, "padding": True}),
        ("pairs", {"batch": 4, "length": 24, "padding": True}),
        ("rnn", {**LENGTH, "padding": False}),
    ],
)
def test_a_program_answers_as_the_network_at_every_size_that_it_takes(case, takes, found):
    """Rows of other numbers and lengths than it was made with, padded where it takes padding."""
    row = found[case]
    assert {name: row[name] for name in takes} == takes
    assert max(row["off"]) < 1e-4


@pytest.mark.slow
def test_the_networks_own_answers_stay_as_they_were(found):
    assert found["unchanged"] is True


@pytest.mark.slow
def test_what_differs_is_no_program(found):
    """By one part in a thousand; and products in bfloat16, which a program would not round."""
    assert "its outputs differ from the network's by 0.001" in found["off"]
    assert "bfloat16" in found["bfloat16"]


@pytest.mark.slow
def test_the_command_writes_a_program_that_torch_alone_runs(tmp_path):
    path = trained(tmp_path, "numbers")
    done = spt("export", path, "--out", tmp_path / "out", "--program", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["program"] == {"batch": "any", "length": "2 to 12", "padding": True}
    assert "program.pt2" in told["files"] and "program.pt2" in (tmp_path / "out" / "README.md").read_text()
    shown = json.loads((tmp_path / "out" / "config.json").read_text())["input"]
    program, rows = torch.export.load(tmp_path / "out" / "program.pt2").module(), load_run(path).data.test
    for i in range(len(rows)):
        x = torch.tensor((np.array(rows.row(i)) - shown["mean"]) / shown["std"], dtype=torch.float32)
        logits = program(x[None], torch.ones(1, len(x), dtype=torch.bool)).detach().numpy()
        assert np.allclose(logits, TrainedModel.open(path).logits([np.array(rows.row(i))], runtime=CPU), atol=1e-4)


@pytest.mark.slow
def test_without_a_program_nothing_is_written_and_the_reason_is_told(tmp_path):
    file = model_file(tmp_path, "x if float(x.detach().sum()) > 0 else -x")
    path = trained(tmp_path, model={"name": str(file), "d_model": 8, "n_layers": 1})
    done = spt("export", path, "--out", tmp_path / "out", "--program", cwd=tmp_path)
    assert done.returncode == 2 and "has no program: torch.export cannot trace it" in done.stderr
    assert done.stderr.count("\n") == 1 and "without --program" in done.stderr
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*tmp"))


# ------------------------------------------------------------------------------------------------ the table in the docs


def test_every_model_stands_in_the_table():
    rows = json.loads(programs_page.FILE.read_text(encoding="utf-8"))["rows"]
    assert sorted(rows) == sorted(measure_programs.models())
    page = programs_page.export_page()
    assert "{{" not in page and f"`{measure_programs.COMMAND}`" in page
    assert all(f"| `{name}` |" in page for name in rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", measure_programs.models())
def test_the_table_says_what_a_models_program_takes(name, tmp_path):
    rows = json.loads(programs_page.FILE.read_text(encoding="utf-8"))["rows"]
    file = str(tmp_path / "f.json")
    program = f"import measure_programs as m, pathlib; m.FILE = pathlib.Path({file!r}); m.main([{name!r}])"
    environ = environment({"PYTHONPATH": f"{ROOT}:{ROOT / 'docs'}"})
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "f.json").read_text())["rows"][name] == rows[name]
