"""spt predict and spt embed given what they cannot use: one sentence, the right exit code, nothing written."""

import json
import os
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_bad_inputs import call
from test_custom import wav, write
from test_predict import LONG, SMALL, TEXT, channels, folder_of, long, texts, trained
from tiny import own_task, run

from spt.config.job import Job

CHANNELS = {"list_columns": ["a", "b"], "label_column": "y"}
GOOD = [{"a": [1, 2, 3], "b": [4, 5, 6], "y": "no"}] * 3


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with runs of several kinds, and a file of rows that they can read."""
    folder = tmp_path_factory.mktemp("runs")

    def made(name, rows, options, stage="finetune", **changes):
        place = folder / f"{name}-data"
        place.mkdir()
        folder_of(place / "d", rows, "csv")
        (folder / name).symlink_to(trained(place, stage, task={"name": "custom", "path": "d", **options}, **changes))

    made("channels", channels, CHANNELS)
    made("inputs", channels, CHANNELS, "pretrain")
    made("texts", texts, TEXT)
    made("steps", long, LONG)
    fixed = {"name": "transformer", "d_model": 8, "n_layers": 1, "n_heads": 2, "d_ff": 8, "positions": "learned"}
    made("fixed", channels, CHANNELS, model=fixed)
    toy = folder / "toy"
    toy.mkdir()
    job = Job(own_task(toy, task={"name": "./toy.py"}, **SMALL), "finetune", 0)
    run(job, toy)
    (folder / "tokens").symlink_to(toy / job.name)
    sounds = folder / "sounds-data"
    (sounds / "d").mkdir(parents=True)
    for i in range(40):
        (sounds / "d" / f"{i}.wav").write_bytes(wav(i, samples=12))
    write(sounds / "d" / "labels.csv", [{"f": f"{i}.wav", "y": "ab"[i % 2]} for i in range(40)])
    task = {"name": "custom", "path": "d", "file_column": "f", "label_column": "y"}
    (folder / "sounds").symlink_to(trained(sounds, task=task))
    unfinished = shutil.copytree(folder / "channels", folder / "unfinished")
    (unfinished / "result.json").unlink()
    (unfinished / "status.json").write_text(json.dumps({"state": "running"}))
    (folder / "empty-folder").mkdir()
    return folder


def rows(*more):
    return lambda path: write(path / "rows.jsonl", [*GOOD, *more])


def content(name, what):
    return lambda path: (path / name).write_bytes(what if isinstance(what, bytes) else what.encode())


def array(name, numbers):
    return lambda path: np.save(path / name, numbers)


def nothing(path):
    pass


def sound(path):
    (path / "s").mkdir()
    (path / "s" / "a.wav").write_bytes(wav(0, rate=4000, samples=12))


def steps(*more):
    def make(path):
        fields = ("p", "t", "v", "y")
        write(path / "rows.csv", [dict(zip(fields, row, strict=True)) for row in (("a", 0, 1, "a"), *more)])

    return make


def there(path):
    rows()(path)
    (path / "out.csv").write_text("mine")
    (path / "out.npz").write_text("mine")


def binary(path):
    pq.write_table(pa.table({"a": [[1.0]]}), path / "rows.parquet")
    (path / "rows.csv").write_bytes((path / "rows.parquet").read_bytes())


PREDICT, EMBED = ["--out", "out.csv"], ["--out", "out.npz"]
BOTH = (("predict", PREDICT), ("embed", EMBED))
EVERY = {  # for either command: (run, what is made, arguments, exit code, words)
    "no run": ("nowhere", rows(), ["rows.jsonl"], 2, "nowhere"),
    "a folder that is no run": ("empty-folder", rows(), ["rows.jsonl"], 2, "neither the folder of a run"),
    "an unfinished run": ("unfinished", rows(), ["rows.jsonl"], 6, "is not finished"),
    "no file": ("channels", nothing, ["rows.jsonl"], 3, "no file or folder rows.jsonl"),
    "no rows named": ("channels", nothing, [], 2, "one file or folder of rows is expected, or --split test"),
    "two files": (
        "channels",
        rows(),
        ["rows.jsonl", "more.csv"],
        2,
        "one file or folder of rows is expected, not rows",
    ),
    "rows and a split": ("channels", rows(), ["rows.jsonl", "--split", "test"], 2, "leave out rows.jsonl"),
    "an empty file": ("channels", content("rows.csv", ""), ["rows.csv"], 3, "rows.csv is empty"),
    "a header alone": ("channels", content("rows.csv", "a,b\n"), ["rows.csv"], 3, "rows.csv has no rows"),
    "a binary file": ("channels", binary, ["rows.csv"], 3, "rows.csv, line 1"),
    "a broken Parquet file": ("channels", content("r.parquet", "PAR1"), ["r.parquet"], 3, "cannot be read as Parquet"),
    "a wrong ending": ("channels", content("rows.xlsx", "x"), ["rows.xlsx"], 3, "save the table as .csv"),
    "another wrong ending": ("channels", content("rows.dat", "x"), ["rows.dat"], 3, "its name should end in one of"),
    "an empty folder": ("channels", lambda path: (path / "f").mkdir(), ["f"], 3, "the folder f has no table"),
    "a missing column": (
        *("channels", lambda path: write(path / "r.csv", [{"a": "1 2", "c": "1 2"}]), ["r.csv"]),
        *(3, "r.csv has no column 'b'"),
    ),
    "channels of two lengths": (
        *("channels", rows({"a": [1, 2], "b": [1], "y": "no"}), ["rows.jsonl"]),
        *(3, "rows.jsonl, line 4, column b: the list has 1 steps, but 2 in column a"),
    ),
    "another number of channels": (
        *("channels", rows(), ["rows.jsonl", "list_columns=[a]"]),
        *(3, "rows.jsonl, line 1: a step has 1 numbers, but 2 in training"),
    ),
    "NaN": ("channels", rows({"a": [float("nan")], "b": [1], "y": "no"}), ["rows.jsonl"], 3, "not a finite number"),
    "text among numbers": (
        "channels",
        rows({"a": ["x"], "b": [1], "y": "no"}),
        ["rows.jsonl"],
        3,
        "'x' is not a number",
    ),
    "a row without steps": ("channels", rows({"a": [], "b": [], "y": "no"}), ["rows.jsonl"], 3, "has no steps"),
    "an empty cell": ("channels", rows({"a": None, "b": [1], "y": "no"}), ["rows.jsonl"], 3, "the cell is empty"),
    "an unknown option": ("channels", rows(), ["rows.jsonl", "list_colums=[a,b]"], 2, "did you mean list_columns?"),
    "static features of another column": (
        "channels",
        rows(),
        ["rows.jsonl", "static_columns="],
        2,
        "static_columns is no option for new rows, which are read as training's were; leave it out",
    ),
    "an option of splits": ("channels", rows(), ["rows.jsonl", "test_fraction=0.5"], 2, "no option for new rows"),
    "options that do not go together": (
        *("channels", rows(), ["rows.jsonl", "text_column=a", "list_column=b"], 2),
        "text_column and list_column are given",
    ),
    "an option twice": ("channels", rows(), ["rows.jsonl", "max_length=3", "max_length=4"], 2, "given twice"),
    "a value of the wrong kind": ("channels", rows(), ["rows.jsonl", "max_length=many"], 2, "max_length: "),
    "texts for a model of numbers": ("channels", rows(), ["rows.jsonl", "text_column=a"], 2, "trained on texts"),
    "numbers for a model of texts": (
        "texts",
        rows(),
        ["rows.jsonl", "list_column=a", "id_column="],
        2,
        "trained on texts",
    ),
    "other tokens": (
        "texts",
        content("r.csv", "id,body\n1,x\n"),
        ["r.csv", "tokens=words"],
        2,
        "tokens are characters",
    ),
    "no ids": ("texts", content("r.csv", "body,stars\nx,1\n"), ["r.csv"], 3, "r.csv has no column 'id'"),
    "ids beyond the vocabulary": (
        *("tokens", lambda path: write(path / "r.jsonl", [{"x": [1, 2]}, {"x": [1, 9]}]), ["r.jsonl", "list_column=x"]),
        *(3, "r.jsonl, line 2, step 2: the token id 9 is beyond the model's vocabulary, which goes from 0 to 8"),
    ),
    "no input named": (
        *("tokens", lambda path: write(path / "r.jsonl", [{"x": [1, 2]}]), ["r.jsonl"]),
        *(2, "say which column of r.jsonl is the input"),
    ),
    "an id twice at one time": (
        *("steps", steps(("a", 1, 2, "b"), ("a", 1, 3, "b")), ["rows.csv"]),
        *(3, "the id 'a' has this time in rows.csv, line 3 already"),
    ),
    "an array of other channels": (
        *("channels", array("r.npy", np.zeros((3, 5, 3))), ["r.npy"]),
        *(3, "r.npy holds an array of 3 x 5 x 3; (rows, steps, 2) is expected"),
    ),
    "an array with NaN": (
        *("channels", array("r.npy", np.full((2, 3, 2), np.nan)), ["r.npy"]),
        *(3, "r.npy, row 1, step 1: nan is not a finite number"),
    ),
    "a pickled array": ("channels", array("r.npy", np.array([{}, None])), ["r.npy"], 3, "cannot be read as an array"),
    "an archive that is none": ("channels", content("r.npz", "PK"), ["r.npz"], 3, "r.npz cannot be read as an archive"),
    "ids of an array beyond the vocabulary": (
        *("tokens", array("r.npy", np.array([[1, 2], [3, 99]])), ["r.npy"]),
        *(3, "r.npy, row 2, step 2: 99 is no token id of the model's vocabulary"),
    ),
    "another sampling rate": ("sounds", sound, ["s"], 3, "a.wav: 4,000 samples a second, but 8,000 in training"),
    "a length that the model cannot take": (
        *("fixed", rows({"a": [1] * 50, "b": [1] * 50, "y": "no"}), ["rows.jsonl"]),
        *(3, "cut the sequences (max_length="),
    ),
    "no folder to write to": ("channels", rows(), ["rows.jsonl", "--out", "no/out.parquet"], 7, "cannot write no/out"),
    "an ending that is no format": ("channels", rows(), ["rows.jsonl", "--out", "out.txt"], 2, "should end in one of"),
    "a file that is there": ("channels", there, ["rows.jsonl"], 7, "is there already; name another file"),
    "a split of an exported folder": ("exported", nothing, ["--split", "test"], 2, "--split is for a run's folder"),
    "a damaged export": ("damaged", rows(), ["rows.jsonl"], 6, "is damaged"),
}
ALONE = {  # for one command: (command, run, what is made, arguments, exit code, words)
    "a pretraining run": (
        "predict",
        "inputs",
        rows(),
        ["rows.jsonl", *PREDICT],
        6,
        "has no task to predict; spt embed",
    ),
    "a label column that is not there": (
        *("predict", "channels", rows(), ["rows.jsonl", "label_column=z", *PREDICT]),
        *(3, "line 1 has no column 'z'"),
    ),
    "JSON twice": (
        "predict",
        "channels",
        rows(),
        ["rows.jsonl", "--json"],
        2,
        "name a file for the predictions by --out",
    ),
    "embeddings without a file": ("embed", "channels", rows(), ["rows.jsonl"], 2, "--out FILE is needed"),
    "an unknown pool": ("embed", "channels", rows(), ["rows.jsonl", "--pool", "sum", *EMBED], 2, "'sum'"),
    "the file itself": (
        *("predict", "channels", rows(), ["rows.jsonl", "--out", "rows.jsonl", "--overwrite"]),
        *(2, "is the file that is read"),
    ),
}


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def exported(runs):
    code, _, errors = call(runs, "export", "channels", "--out", "exported")
    assert code == 0, errors
    damaged = shutil.copytree(runs / "exported", runs / "damaged")
    (damaged / "config.json").write_text("{")
    return runs


CASES = [  # the reader is the same: every other one for both commands
    (f"{command}, {name}", (command, *case, out))
    for i, (name, case) in enumerate(EVERY.items())
    for command, out in BOTH[: 1 + (i + 1) % 2]
]
CASES += [(f"{case[0]}, {name}", (*case, [])) for name, case in ALONE.items()]


@pytest.mark.parametrize("case", [case for _, case in CASES], ids=[name for name, _ in CASES])
def test_what_cannot_be_used_is_told_in_a_sentence(case, exported, tmp_path):
    command, name, make, arguments, code, words, out = case
    make(tmp_path)
    given = [*arguments, *([] if "--out" in arguments else out)]
    before = contents(tmp_path)
    found, output, errors = call(tmp_path, command, exported / name, *given, "--cpu")
    assert found == code, (found, output, errors)
    assert " ".join(words.split()) in " ".join(errors.replace("│", " ").split()), errors
    assert "Traceback" not in errors and output == ""
    if "'sum'" not in words:  # typer's own complaint has a form of its own
        assert errors.count("spt: ") == 1
    assert contents(tmp_path) == before, "nothing is written"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_read_only(exported, tmp_path):
    rows()(tmp_path)
    tmp_path.chmod(0o500)
    code, _, errors = call(tmp_path, "predict", exported / "channels", "rows.jsonl", *PREDICT, "--cpu")
    tmp_path.chmod(0o700)
    assert code == 7 and "permission denied" in errors


def test_overwriting_is_asked_for(exported, tmp_path):
    there(tmp_path)
    for command, out in (("predict", "out.csv"), ("embed", "out.npz")):
        arguments = (command, exported / "channels", "rows.jsonl", "--out", out, "--cpu", "--overwrite")
        code, _, errors = call(tmp_path, *arguments)
        assert code == 0, errors
        assert (tmp_path / out).read_bytes() != b"mine"


def test_a_bad_row_behind_good_ones_leaves_what_was_there(exported, tmp_path, monkeypatch):
    """Rows before it are answered already; the file that it would have replaced is as it was."""
    from spt.tasks.own import new_rows, tables

    monkeypatch.setattr(new_rows, "ROWS", 2)
    monkeypatch.setattr(tables, "BATCH", 2)
    there(tmp_path)
    rows(*GOOD, {"a": [1], "b": ["x"], "y": "no"})(tmp_path)
    before = contents(tmp_path)
    for command, out in (("predict", ["--out", "out.csv"]), ("predict", []), ("embed", ["--out", "out.npz"])):
        arguments = (command, exported / "channels", "rows.jsonl", *out, "--cpu", "--overwrite")
        code, output, errors = call(tmp_path, *arguments)
        assert (code, output) == (3, "") and "line 7, column b, step 1: 'x' is not a number" in errors
        assert contents(tmp_path) == before
