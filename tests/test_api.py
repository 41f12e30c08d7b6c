"""The Python API: what the commands do, as functions of `spt`."""

import inspect
import json
import logging
import subprocess
import sys
from pathlib import Path

import pandas
import pytest
import torch
from tiny import ROOT, recipe_file
from tiny import spt as command

import spt
from spt import api
from spt.errors import CheckpointError, DataError, RecipeError, UsageError
from spt.runtime import distributed
from spt.runtime.progress import forward_messages
from spt.training.load_run import FinishedRun

FUNCTIONS = ("load_recipe", "pretrain", "finetune", "compare", "run_study", "load_run", "read_report")
QUIET = spt.Settings(cpu=True, quiet=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("api")


@pytest.fixture(scope="module")
def recipe(folder: Path) -> Path:
    return recipe_file(folder)


@pytest.fixture(scope="module")
def study(folder: Path, recipe: Path) -> spt.FinishedStudy:
    return spt.compare(recipe, seeds=2, out=folder / "runs", settings=QUIET)


def test_names_are_loaded_when_they_are_asked_for() -> None:
    program = (
        "import sys, spt\n"
        "assert 'compare' in dir(spt) and not any(name.startswith('spt.') for name in sys.modules)\n"
        "spt.read_report, spt.SptError, spt.Settings\n"
        "heavy = {'torch', 'transformers', 'datasets', 'accelerate', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="no attribute 'compere'"):
        _ = spt.compere


def test_every_name_is_there_documented_and_typed() -> None:
    assert sorted(spt.__all__) == sorted(api.__all__)
    for name in FUNCTIONS:
        function = getattr(spt, name)
        signature = inspect.signature(function)
        assert signature.return_annotation is not inspect.Signature.empty
        assert all(p.annotation is not inspect.Parameter.empty for p in signature.parameters.values())
        assert f"spt.{name}(" in function.__doc__, f"{name} has no example"
        assert "Raises" in function.__doc__


def test_a_stage_is_the_run_that_the_command_makes(folder: Path, recipe: Path, study: spt.FinishedStudy) -> None:
    done = command("finetune", recipe, "--out", folder / "by-command", "--cpu", "--json", cwd=folder)
    there = json.loads(done.stdout)
    here = spt.finetune(recipe, out=folder / "runs", settings=QUIET)  # made by the study
    assert here.path.name == Path(there["run"]).name
    assert here.result.test == there["test"] and here.result.val == there["val"]
    parent = spt.pretrain(recipe, out=folder / "runs", settings=QUIET)
    assert (folder / "by-command" / parent.path.name / "result.json").is_file()
    assert spt.finetune(recipe, from_run=parent.path, out=folder / "runs", settings=QUIET) == here
    assert spt.finetune(recipe, scratch=True, out=folder / "runs", settings=QUIET).result.parent is None


def test_a_comparison_is_the_study_that_the_command_runs(folder: Path, study: spt.FinishedStudy) -> None:
    made = command("compare", "tiny.yaml", "--seeds", "2", "--out", "runs", "--cpu", "--json", cwd=folder)
    assert made.returncode == 0, made.stderr
    assert [path.name for path in (folder / "runs").glob("compare-*")] == [study.path.name]
    assert json.loads(made.stdout)["rows"] == study.report.records()
    assert study.failed == 0 and (study.path / "report.html").is_file()


@pytest.mark.slow
def test_a_study_is_run_by_its_keys_its_file_and_its_folder(folder: Path, recipe: Path) -> None:
    keys = {"kind": "data", "recipes": [str(recipe)], "fractions": [0.5, 1.0]}
    first = spt.run_study(keys, seeds=[3], out=folder / "runs", settings=QUIET)
    assert [seed.seed for row in first.report.rows for seed in row.seeds] == [3, 3]
    for source in (first.path, first.path / "study.yaml"):
        assert spt.run_study(source, out=folder / "runs", settings=QUIET) == first


def test_a_run_that_fails_is_counted_and_reported(folder: Path, recipe: Path) -> None:
    study = spt.compare(recipe, ["finetune.train.learning_rate=1e30"], seeds=1, out=folder / "failed", settings=QUIET)
    assert study.failed == 2
    assert {failure.state for _, failure in study.report.failures} == {"diverged"}


def test_a_run_is_opened_with_its_network_data_and_result(study: spt.FinishedStudy) -> None:
    row = study.report.rows[0]
    run = spt.load_run(study.path.parent / row.seeds[0].spt_run)
    assert isinstance(run, FinishedRun) and not run.network.training
    assert run.network.parameter_counts() == run.result.parameters
    assert len(run.data.test) == run.result.data["test"].rows
    assert run.job.stage == "finetune" and run.result.test["accuracy"] == row.seeds[0].spt


def test_a_report_is_records_and_data_frames(study: spt.FinishedStudy) -> None:
    report = spt.read_report(study.path)
    assert report == study.report
    assert report.records() == json.loads((study.path / "report.json").read_text())["rows"]
    for table, name in (("rows", "report"), ("seeds", "seeds"), ("items", "items"), ("curves", "curves")):
        frame, file = report.to_pandas(table), pandas.read_csv(study.path / f"{name}.csv")
        assert len(frame) == len(file) > 0 and list(frame) == list(file)
        numbers = frame.select_dtypes("number")
        pandas.testing.assert_frame_equal(numbers, file[list(numbers)], check_dtype=False)
    assert len(report.to_pandas("searches")) == 0


def test_overrides_are_texts_or_values(recipe: Path) -> None:
    texts = spt.load_recipe(recipe, ["model.n_heads=1", "scratch.train={steps: 2, batch_size: 8, learning_rate: 0.1}"])
    values = spt.load_recipe(
        str(recipe), {"model.n_heads": 1, "scratch.train": {"steps": 2, "batch_size": 8, "learning_rate": 0.1}}
    )
    assert texts == values and texts.data is not None
    assert spt.load_recipe("quickstart", smoke=True).smoke


def test_errors_are_those_of_the_commands(tmp_path: Path, recipe: Path) -> None:
    with pytest.raises(RecipeError, match=r"model\.n_haeds"):
        spt.load_recipe(recipe, {"model.n_haeds": 2})
    with pytest.raises(UsageError, match="contradict"):
        spt.finetune(recipe, scratch=True, from_run=tmp_path)
    with pytest.raises(UsageError, match="contradict"):
        spt.run_study({"kind": "compare", "recipes": [str(recipe)]}, jobs=2, slurm=["partition=x"], out=tmp_path)
    with pytest.raises(UsageError, match="shard"):
        spt.run_study({"kind": "compare", "recipes": [str(recipe)]}, shard=(3, 2), out=tmp_path)
    with pytest.raises(RecipeError, match="seeds is 0"):
        spt.compare(recipe, seeds=0, out=tmp_path)
    with pytest.raises(UsageError, match="no folder is named"):
        spt.read_report()
    with pytest.raises(DataError, match="holds no study"):
        spt.read_report(tmp_path)
    with pytest.raises(CheckpointError, match="not finished"):
        spt.load_run(tmp_path)
    assert issubclass(RecipeError, spt.SptError)


def test_messages_go_to_one_place_at_a_time():
    """The innermost; not a second time to what a library has given the root logger; afterwards as before."""
    outer, inner, root = [], [], []
    logger, handler = logging.getLogger("spt.tasks.books"), logging.Handler()
    handler.emit = lambda record: root.append(record.getMessage())
    logging.getLogger().addHandler(handler)
    try:
        with forward_messages(outer.append):
            logger.info("1")
            with forward_messages(inner.append):
                logger.info("2")
            logger.info("3")
        logger.warning("4")
    finally:
        logging.getLogger().removeHandler(handler)
    assert (outer, inner, root) == (["1", "3"], ["2"], ["4"])


def test_a_group_that_cannot_form_is_no_lost_process(monkeypatch):
    """A port in use is told as such, not as the end of another process."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not distributed.is_lost_peer(torch.distributed.DistNetworkError("the server socket has failed to listen"))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert distributed.is_lost_peer(torch.distributed.DistNetworkError("connection reset"))
    assert distributed.is_lost_peer(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    assert not distributed.is_lost_peer(RuntimeError("size mismatch"))
