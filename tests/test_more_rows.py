"""Pretraining on more rows than the training split: what is read, what is left out, and that every report says so."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import yaml
from recordings import FILES, N, config, label_files, make, sound
from tiny import load, recipe_file, run, spt, spt_job

from spt.advisor.answer import answer
from spt.advisor.backbones import choose
from spt.advisor.recipes import Template, recipe_text
from spt.config.job import Job
from spt.data.dataset import open_stage, open_task
from spt.data.more_rows import _alike
from spt.errors import DataError, RecipeError, UsageError
from spt.execution.estimate import MeasuredCosts
from spt.report.collect import read_report
from spt.runs.result import NOT_SELF_PRETRAINING
from spt.runtime.distributed import Runtime
from spt.runtime.settings import Settings
from spt.studies.grid import expand
from spt.studies.schema import validate
from spt.tasks import custom
from spt.tasks.base import Split

RNG = np.random.default_rng(0)


def series(folder, name, rows, label=True, groups=None):
    """A table of lists; returns its rows."""
    header = "x" + ",y" * label + ",patient" * (groups is not None)
    lines = [header]
    for i, row in enumerate(rows):
        cells = [" ".join(map(str, row))]
        cells += [str(i % 2)] * label + ([groups[i]] if groups is not None else [])
        lines.append(",".join(cells))
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("\n".join(lines))


def numbers(n, length=6):
    return RNG.integers(0, 99, (n, length)).tolist()


@pytest.fixture
def rows(tmp_path):
    """Twenty rows of a task in three files, and five others."""
    own = numbers(20)
    for name, part in (("train", own[:12]), ("val", own[12:16]), ("test", own[16:])):
        series(tmp_path, f"own/{name}.csv", part)
    return own, numbers(5)


def recipe(tmp_path, **changes):
    task = {"name": "custom", "path": "own", "list_column": "x", "label_column": "y"}
    given = {"pretrain__data": "more.csv", "pretrain__not_self_pretraining": True, **changes}
    return load(str(recipe_file(tmp_path, task=given.pop("task", task), **given)))


def test_rows_of_the_task_are_left_out(tmp_path, rows):
    """Validation and test rows are never pretrained on; training rows are not seen twice."""
    own, other = rows
    series(tmp_path, "more.csv", [*other, *own], label=False)
    resolved = recipe(tmp_path)
    data, plain = open_stage(resolved.recipe, "pretrain"), open_task(resolved.recipe.task)
    assert [data.train.row(i)[:, 0].tolist() for i in range(len(data.train))] == own[:12] + other
    assert data.input == plain.input and np.array_equal(data.val.values, plain.val.values)
    (note,) = [note for note in data.notes if note.startswith(NOT_SELF_PRETRAINING)]
    assert "5 rows of more.csv were added to the 12 training rows; 8 were left out" in note
    assert "12 were among them already" in note
    assert open_stage(resolved.recipe, "finetune").train.ids.tolist() == plain.train.ids.tolist()


def test_groups_of_validation_and_test_are_left_out(tmp_path):
    """Other recordings of a patient whose recordings are scored would tell of these."""
    patients = [f"p{i // 2}" for i in range(40)]
    series(tmp_path, "all.csv", numbers(40), groups=patients)
    task = {"name": "custom", "path": "all.csv", "list_column": "x", "label_column": "y", "group_column": "patient"}
    series(tmp_path, "more.csv", numbers(20), label=False, groups=[f"p{i}" for i in range(20)])
    data = open_stage(recipe(tmp_path, task=task).recipe, "pretrain")
    scored = {*data.val.groups.tolist(), *data.test.groups.tolist()}
    assert scored and not scored & {*data.train.groups.tolist()}
    assert len(data.train) == len(open_task(recipe(tmp_path, task=task).recipe.task).train) + 20 - len(scored)
    plain = open_task(recipe(tmp_path, task=task).recipe.task)
    seen = plain.train.row(0)[:, 0].tolist()  # also another patient's, who is scored
    series(tmp_path, "more.csv", [seen, *numbers(2)], label=False, groups=[plain.test.groups[0], "p98", "p99"])
    (note,) = [note for note in open_stage(recipe(tmp_path, task=task).recipe, "pretrain").notes if "more.csv" in note]
    assert "; 1 were left out" in note and "among them already" not in note
    series(tmp_path, "more.csv", numbers(20), label=False)
    with pytest.raises(DataError, match="has no column 'patient'"):
        recipe(tmp_path, task=task)


def test_numbers_are_stored_as_trainings_are():
    """Else equal inputs would have other fingerprints, and a row of the test split would not be known."""
    train = Split.from_rows([np.array([[1], [255]], np.uint8)], np.zeros(1, np.int64))
    given = np.array([[0.9999], [300.0], [-4.0]])
    more = Split.from_rows([given], np.zeros(1, np.int64), steps=[np.ones(3, np.float32)])
    stored = _alike(more, train)
    assert stored.values[:, 0].tolist() == [1, 255, 0] and stored.values.dtype == np.uint8
    assert stored.steps is None and not {*map(str, stored.ids)} & {*map(str, train.ids)}


def test_every_window_of_a_recording_that_is_scored_is_left_out(tmp_path):
    """Also one that was never a row, because no label lies within it."""
    lists = numbers(60, 16)
    rows = [{"x": row, "y": [i % 2, None]} for i, row in enumerate(lists)]
    more = [{"x": row} for row in [*lists, *numbers(3, 16)]]
    for name, part in (("own.jsonl", rows), ("more.jsonl", more)):
        (tmp_path / name).write_text("\n".join(map(json.dumps, part)))
    task = {"name": "custom", "path": "own.jsonl", "list_column": "x", "label_column": "y", "label_at": "last"}
    data = open_stage(recipe(tmp_path, task={**task, "window": 8}, pretrain__data="more.jsonl").recipe, "pretrain")
    plain = open_task(recipe(tmp_path, task={**task, "window": 8}, pretrain__data="more.jsonl").recipe.task)
    assert len(plain.train) + len(plain.val) + len(plain.test) == 60, "one window of two has a label"
    windows = {tuple(data.train.row(i)[:, 0].tolist()) for i in range(len(data.train))}
    scored = {*plain.val.sources.tolist(), *plain.test.sources.tolist()}
    assert scored and not scored & {*data.train.sources.tolist()}
    assert len(windows) == 2 * (63 - len(scored))


@pytest.mark.parametrize("kind", ["wav", "npy", "flac", "edf"])
@pytest.mark.parametrize(
    "shape", [{"window": 96}, {"resample": 100, "window": "0.3s"}, {"window": 96, "spectrogram": {"window": 16}}]
)
def test_recordings_are_known_by_the_numbers_that_their_files_hold(kind, shape, tmp_path):
    """Whatever type these are of, and whatever is cut or computed from them."""
    make(kind, tmp_path / "own")
    if kind == "npy":
        for file in (tmp_path / "own").glob("*.npy"):
            np.save(file, (1000 * np.load(file)).astype(np.int16))
        shape = {**shape, "rate": 200}
    options = config(tmp_path / "own", **FILES, **shape)
    data = custom.load(options, tmp_path)
    more = custom.more_rows(options, tmp_path, tmp_path / "own", data)
    known = {source for split in data.splits.values() for source in split.sources.tolist()}
    assert len(known) == N and {*more.sources.tolist()} == known
    stored = _alike(more, data.train)
    rows = [row.tobytes() for split in data.splits.values() for row in map(split.row, range(len(split)))]
    assert sorted(stored.row(i).tobytes() for i in range(len(stored))) == sorted(rows)


def test_small_numbers_of_another_type_are_stored_as_trainings(tmp_path):
    """Among files of 16 bits one of 24: the former are known, the latter is rounded."""
    label_files(tmp_path / "own", [f"{i}.wav" for i in range(N)])
    draws = [RNG.normal(0, 0.1, 400) for _ in range(N)]
    for i, samples in enumerate(draws):
        (tmp_path / "own" / f"{i}.wav").write_bytes(sound("wav", samples))
    options = config(tmp_path / "own", **FILES, window=100)
    data = custom.load(options, tmp_path)
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "0.wav").write_bytes(sound("wav", draws[0]))
    (tmp_path / "more" / "1.wav").write_bytes(sound("wav", draws[1], subtype="PCM_24"))
    more = custom.more_rows(options, tmp_path, tmp_path / "more", data)
    known = {source for split in data.splits.values() for source in split.sources.tolist()}
    assert len(more) == 8 and [source in known for source in more.sources.tolist()][:4] == [True] * 4
    assert np.abs(more.values[400:, 0] - 32768 * draws[1]).max() <= 0.51


def test_a_fraction_is_no_token(tmp_path):
    for name, ids in (("own", [[i, 2, 3] for i in range(12)]), ("more", [[1.5, 2.5, 3.2]])):
        (tmp_path / name).mkdir()
        for i, row in enumerate(ids):
            np.save(tmp_path / name / f"{i}.npy", np.array(row))
    lines = [json.dumps({"f": f"{i}.npy", "y": "ab"[i % 2]}) for i in range(12)]
    (tmp_path / "own" / "train.jsonl").write_text("\n".join(lines))
    (tmp_path / "more" / "train.jsonl").write_text(json.dumps({"f": "0.npy"}))
    options = custom.Config(path=tmp_path / "own", file_column="f", tokens="ids", label_column="y")
    data = custom.load(options, tmp_path)
    with pytest.raises(ValueError, match=r"step 1: 1\.5 is no token id"):
        custom.more_rows(options, tmp_path, tmp_path / "more", data)


def test_a_held_out_text_is_known_by_words_that_no_training_row_has(tmp_path):
    """Its words have codes in the task; the model's vocabulary lacks them."""
    (tmp_path / "own").mkdir()
    parts = {"train": [f"a{i} b c" for i in range(12)], "val": ["a1 unseen", "b b"], "test": ["novel words", "c a2"]}
    for name, texts in parts.items():
        lines = ["x,y", *(f"{text},{i % 2}" for i, text in enumerate(texts))]
        (tmp_path / "own" / f"{name}.csv").write_text("\n".join(lines))
    (tmp_path / "more.csv").write_text(
        "\n".join(["x", *(text for texts in parts.values() for text in texts), "quite other"])
    )
    task = {"name": "custom", "path": "own", "text_column": "x", "label_column": "y", "tokens": "words", "min_count": 2}
    resolved = recipe(tmp_path, task=task)
    data = open_stage(resolved.recipe, "pretrain")
    assert len(data.train) == 13, "its own twelve, which occur once, and the one that is new"
    (note,) = [note for note in data.notes if note.startswith(NOT_SELF_PRETRAINING)]
    assert "1 rows of more.csv" in note and "4 were left out" in note and "12 were among them already" in note


@pytest.mark.parametrize(
    "options", [{"rate": 4, "window": "2s"}, {"rate": 4, "resample": 2}, {"rate": 4, "patch": 2}, {"time_column": "t"}]
)
def test_more_recordings_are_cut_and_resampled_as_trainings_were(options, tmp_path):
    own, other = numbers(60, 16), numbers(3, 16)
    task = {"name": "custom", "path": "own.jsonl", "label_column": "y"}
    for name, part in (("own.jsonl", own), ("more.jsonl", other)):
        if "time_column" in options:
            rows = [{"s": i, "t": k / 4, "x": x, "y": i % 2} for i, row in enumerate(part) for k, x in enumerate(row)]
            options |= {"layout": "long", "id_column": "s", "value_columns": ["x"], "resample": "1/2"}
        else:
            rows = [{"x": row, "y": i % 2} for i, row in enumerate(part)]
            task["list_column"] = "x"
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
    resolved = recipe(tmp_path, task=task | options, pretrain__data="more.jsonl")
    data, plain = open_stage(resolved.recipe, "pretrain"), open_task(resolved.recipe.task)
    assert len(data.train) == len(plain.train) + 3 * (2 if "window" in options else 1)


def test_runs_are_named_by_what_the_rows_are(tmp_path, rows):
    series(tmp_path, "more.csv", rows[1], label=False)
    with_more = recipe(tmp_path)
    plain = recipe(tmp_path, pretrain__data=None, pretrain__not_self_pretraining=False)
    series(tmp_path, "more.csv", [*rows[1], *numbers(1)], label=False)
    others = recipe(tmp_path)
    pretraining = {Job(each, "pretrain", 0).name for each in (with_more, plain, others)}
    assert len(pretraining) == 3
    assert len({Job(each, "finetune", 0).name for each in (with_more, plain, others)}) == 1, "scratch is the same"


def test_what_is_left_out_follows_the_tasks_rows(tmp_path, rows):
    """Files of the same names with other rows: what was added to the former ones is not taken for theirs."""
    own, other = rows
    series(tmp_path, "more.csv", other, label=False)
    before = open_stage(recipe(tmp_path).recipe, "pretrain").train
    series(tmp_path, "own/test.csv", [*own[16:], other[0]])
    after = open_stage(recipe(tmp_path).recipe, "pretrain").train
    assert [after.row(i)[:, 0].tolist() for i in range(len(after))] == own[:12] + other[1:]
    assert len(before) == len(after) + 1


def test_a_report_says_that_it_is_no_self_pretraining(tmp_path, rows):
    series(tmp_path, "more.csv", rows[1], label=False)
    recipe(tmp_path)
    done = spt("compare", "tiny.yaml", "--seeds", "2", "--out", "runs", "--cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "not self-pretraining" in done.stdout and "pretraining on more data - scratch" in done.stdout
    (row,) = read_report([tmp_path / "runs"]).rows
    assert row.not_self_pretraining and row.label.endswith("not self-pretraining")
    assert any(warning.startswith(NOT_SELF_PRETRAINING) for warning in row.warnings)
    assert row.decision == "too few seeds", "the arms are compared all the same"
    (study,) = (tmp_path / "runs").glob("compare-*")
    words = answer(read_report([tmp_path / "runs"]), study, tmp_path, 2, "1m").words
    assert "pretraining on more data - scratch" in words and "elf-pretraining" not in words


def test_recipes_of_a_try_pretrain_on_more_rows_for_as_many_updates(tmp_path):
    shape = {"rows": 90, "labelled": 90, "validation": 20, "length": 8, "tokens": None, "real": False, "epochs": 3.0}
    task = {"value_prefix": "x", "label_column": "y"}
    template = Template("rows.csv", task, {"path": str(tmp_path / "rows.csv")}, (), **shape)
    one = choose(False, 8, 16)[0]
    plain, more = (
        yaml.safe_load(recipe_text(each, one, {}, tmp_path / "try"))["pretrain"]
        for each in (template, replace(template, unlabelled=tmp_path / "more.csv"))
    )
    assert more["data"] == "../more.csv" and more["not_self_pretraining"]
    assert more["train"]["steps"] == round(plain["train"]["epochs"] * template.steps_per_epoch)
    assert "epochs" not in more["train"] and "data" not in plain
    done = spt("try", "rows.csv", "--unlabelled", "none.csv", cwd=tmp_path)
    assert done.returncode == 2 and "--unlabelled none.csv: no such file or folder" in done.stderr


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"pretrain__not_self_pretraining": False}, RecipeError, "say not_self_pretraining: true"),
        ({"pretrain__data": None}, RecipeError, "goes with data, which is not given"),
        ({"pretrain__data": "none.csv"}, DataError, "no file or folder"),
        ({"pretrain__data": "long.csv"}, DataError, "has 9 steps, but this task's longest has 6; cut both"),
        ({"pretrain__data": "words.csv"}, DataError, "words.csv, line 2, column x"),
        ({"pretrain__data": "own/test.csv"}, DataError, "test.csv has no row that is not one of this task already"),
        ({"pretrain__data": "other.csv"}, DataError, "other.csv has no column 'x'"),
        ({"task": {"name": "digits"}}, UsageError, "task digits reads none; it is for task custom"),
    ],
)
def test_what_cannot_be_added(tmp_path, rows, changes, error, message):
    series(tmp_path, "long.csv", numbers(2, 9), label=False)
    (tmp_path / "words.csv").write_text("x\nabc\n")
    (tmp_path / "other.csv").write_text("z\n1 2 3\n")
    series(tmp_path, "more.csv", rows[1], label=False)
    with pytest.raises(error, match=message):
        recipe(tmp_path, **changes)


def test_everything_at_once(tmp_path):
    """Windows of recordings with gaps, features beside them, several labels and groups; more rows without labels."""
    import pandas as pd

    def table(n, first=0):
        signals = [np.where(RNG.random(48) < 0.1, np.nan, RNG.normal(size=48)).tolist() for _ in range(n)]
        other = {"sex": ["F", "M", None] * 40, "patient": [f"p{first + i // 2}" for i in range(120)]}
        return pd.DataFrame({"a": signals, "b": [row[::-1] for row in signals]} | {k: v[:n] for k, v in other.items()})

    labels = pd.DataFrame({"af": [i % 2 for i in range(40)], "pvc": [i % 3 == 0 for i in range(40)]}).astype(float)
    labels.loc[3, "af"] = np.nan
    table(40).join(labels).to_parquet(tmp_path / "all.parquet")
    table(20, first=15).to_parquet(tmp_path / "more.parquet")
    inputs = {"list_columns": ["a", "b"], "missing": "hidden", "static_columns": ["sex"], "group_column": "patient"}
    shape = {"window": 16, "stride": 8, "patch": 4, "score": "recording"}
    asked = {"target": "labels", "label_columns": ["af", "pvc"], "missing_labels": "ignore"}
    task = {"name": "custom", "path": "all.parquet", **inputs, **shape, **asked}
    resolved = recipe(tmp_path, task={**task, "test_fraction": 0.3}, pretrain__data="more.parquet")
    data, plain = open_stage(resolved.recipe, "pretrain"), open_task(resolved.recipe.task)
    scored = {*plain.val.groups.tolist(), *plain.test.groups.tolist()}
    assert scored and not scored & {*data.train.groups.tolist()} and len(data.train) > len(plain.train)
    assert data.target == plain.target
    result = run(spt_job(resolved), tmp_path / "runs")
    assert result.test is not None and all(map(math.isfinite, result.test.values()))
    predictions = pd.read_parquet(tmp_path / "runs" / spt_job(resolved).name / "predictions.parquet")
    assert len(predictions) == len(np.unique(plain.test.recordings)) < len(plain.test)


@pytest.mark.parametrize("kind", ["data", "compute"])
def test_studies_that_count_passes_ask_for_another_budget(kind, tmp_path, rows):
    series(tmp_path, "more.csv", rows[1], label=False)
    epochs = {"epochs": 2, "batch_size": 4, "learning_rate": 0.01}
    recipe(tmp_path, pretrain__train={**epochs}, finetune__train={**epochs})
    study = validate({"kind": kind, "recipes": [str(tmp_path / "tiny.yaml")], "seeds": 1}, "here")
    with pytest.raises(UsageError, match=r"pretrain\.data adds rows.*in steps or examples"):
        expand(study, False, MeasuredCosts(tmp_path / "runs", Runtime(Settings(quiet=True, cpu=True))))


def test_labels_in_time_of_more_rows_are_not_looked_at(tmp_path):
    rows = [{"x": row, "y": [i % 2] * 16} for i, row in enumerate(numbers(45, 16))]
    for name, part in (("own.jsonl", rows[:40]), ("more.jsonl", rows[40:])):
        (tmp_path / name).write_text("\n".join(map(json.dumps, part)))
    task = {"name": "custom", "path": "own.jsonl", "list_column": "x", "label_column": "y", "label_at": "majority"}
    more = recipe(tmp_path, task={**task, "window": 8}, pretrain__data="more.jsonl").recipe
    assert len(open_stage(more, "pretrain").train) == len(open_task(more.task).train) + 10
