"""`spt try` on bad days: one sentence, the right exit code, nothing written."""

import json
import os
import random
import zipfile

import numpy as np
import pytest
from typer.testing import CliRunner

from spt_cli import app

RNG = random.Random(1)
N = 40


def table(header, rows):
    return "\n".join([",".join(header), *(",".join(map(str, row)) for row in rows)]) + "\n"


def numbers(length=8):
    return " ".join(f"{RNG.gauss(0, 1):.2f}" for _ in range(length))


def good(n=N, label=lambda i: i % 2):
    return table(["signal", "label"], [[numbers(), label(i)] for i in range(n)])


def arrays(**given):
    def write(path):
        np.savez(path, **given)

    return write


def damaged(method):
    """An archive whose compressed bytes have changed."""

    def write(path):
        with zipfile.ZipFile(path, "w", method) as archive:
            for name, array in (("X", X), ("y", Y)):
                with archive.open(f"{name}.npy", "w") as member:
                    np.save(member, array)
        content = bytearray(path.read_bytes())
        content[60:160] = bytes(100)
        path.write_bytes(content)

    return write


X = np.linspace(0, 1, N * 8).reshape(N, 8)
Y = np.arange(N) % 2
RAGGED = np.empty(2, object)
RAGGED[:] = [[1.0], [1.0, 2.0]]
STATE = json.dumps({"asked": {}, "files": {}})

# name of a file: its content or what writes it; arguments; exit code; words of the sentence
CASES = {
    "missing": ({}, ["gone.csv"], 3, "no file or folder gone.csv"),
    "no name": ({}, [""], 2, "DATA is empty"),
    "hub without a copy": ({}, ["owner/name"], 3, "spt data prepare"),
    "empty": ({"a.csv": ""}, ["a.csv"], 3, "empty"),
    "header alone": ({"a.csv": "signal,label\n"}, ["a.csv"], 3, "no rows"),
    "binary": ({"a.csv": bytes(range(256)) * 4}, ["a.csv"], 3, "UTF-8"),
    "not UTF-8": ({"a.csv": good().replace("signal", "sign\xe4l").encode("latin-1")}, ["a.csv"], 3, "not UTF-8"),
    "ragged": ({"a.csv": good() + "1 2,0,3\n"}, ["a.csv"], 3, "3 cells"),
    "broken JSON": ({"a.jsonl": '{"x": [1, 2], "label": 0}\n{"x": [1\n'}, ["a.jsonl"], 3, "line 2"),
    "damaged Parquet": ({"a.parquet": b"PAR1 and no more"}, ["a.parquet"], 3, "Parquet"),
    "another format": ({"a.xlsx": "x"}, ["a.xlsx"], 3, "save the table as .csv"),
    "three rows": ({"a.csv": good(3)}, ["a.csv"], 3, "3 sequences"),
    "one class": ({"a.csv": good(label=lambda i: "ill")}, ["a.csv"], 3, "one value"),
    "a class for each": ({"a.csv": good(label=lambda i: f"r{i}")}, ["a.csv"], 3, "as an id has"),
    "no label at all": ({"a.csv": good(label=lambda i: "")}, ["a.csv"], 3, "no value in any row"),
    "a label of numbers and NA": (
        {"a.csv": good(label=lambda i: "NA" if i % 5 == 0 else i % 2)},
        ["a.csv"],
        3,
        "has 'NA' in 8 of 40 rows; leave the cell empty",
    ),
    "a label of words and nan": (
        {"a.csv": good(label=lambda i: ["ill", "well", "nan"][i % 3])},
        ["a.csv"],
        3,
        "has 'nan' in 13 of 40 rows",
    ),
    "labels of numbers and NA": (
        {"a.csv": table(["signal", "p", "q"], [[numbers(), i % 2, "nan" if i == 3 else 0] for i in range(N)])},
        ["a.csv", "--label", "p,q"],
        3,
        "'q' has 'nan' in 1 of 40 rows",
    ),
    "no separator": (
        {"a.csv": good(label=lambda i: "a;b")},
        ["a.csv", "--separator", ""],
        2,
        "--separator: what stands between the labels",
    ),
    "no label column": ({"a.csv": table(["signal"], [[numbers()] for _ in range(N)])}, ["a.csv"], 2, "--label"),
    "two labels": (
        {"a.csv": table(["signal", "p", "q"], [[numbers(), i % 2, i % 3] for i in range(N)])},
        ["a.csv"],
        2,
        "--label p (2 values: 0, 1); --label q",
    ),
    "unknown label": ({"a.csv": good()}, ["a.csv", "--label", "lable"], 2, "no such column"),
    "label none": ({"a.csv": good()}, ["a.csv", "--label", "none"], 2, "needs a label"),
    "label is the input": ({"a.csv": good()}, ["a.csv", "--label", "signal", "--inputs", "signal"], 2, "another role"),
    "no input": ({"a.csv": table(["age", "label"], [[i, i % 2] for i in range(N)])}, ["a.csv"], 2, "--inputs"),
    "unknown inputs": ({"a.csv": good()}, ["a.csv", "--inputs", "x,y"], 2, "no such column"),
    "empty inputs": ({"a.csv": good()}, ["a.csv", "--inputs", ","], 2, "--inputs"),
    "mixed inputs": (
        {"a.csv": table(["s", "t", "y"], [[numbers(), f"a text of row {i}", i % 2] for i in range(N)])},
        ["a.csv", "--inputs", "s,t"],
        2,
        "different kinds",
    ),
    "a window of words": ({"a.csv": good()}, ["a.csv", "--window", "long"], 2, "--window long"),
    "a window in seconds": ({"a.csv": good()}, ["a.csv", "--window", "4s"], 3, "give it as rate"),
    "a window of nothing": ({"a.csv": good()}, ["a.csv", "--window", "0"], 2, "0 is no span"),
    "windows of no whole patches": (
        {},
        ["gone.csv", "--patch", "3", "--window", "8"],
        2,
        "--window: 8 steps are no multiple of patch, 3; 6 or 9 are",
    ),  # before anything is read
    "a stride alone": ({"a.csv": good()}, ["a.csv", "--stride", "4"], 2, "up to 8 steps are not cut into windows"),
    "a patch too long": ({"a.csv": good()}, ["a.csv", "--patch", "9"], 3, "every sequence has one step"),
    "a rate to no end": ({"a.csv": good()}, ["a.csv", "--resample", "100"], 3, "is not known"),
    "a ratio of words": ({"a.csv": good()}, ["a.csv", "--resample", "half"], 2, "ratio of whole numbers"),
    "frames of words": ({"a.csv": good()}, ["a.csv", "--spectrogram", "wide"], 2, "256,128"),
    "frames too long": ({"a.csv": good()}, ["a.csv", "--spectrogram", "64"], 3, "fewer than a frame of 64"),
    "patches of a text": (
        {"a.csv": table(["text", "label"], [[f"row {i} of some text", i % 2] for i in range(N)])},
        ["a.csv", "--patch", "4"],
        2,
        "no meaning for tokens",
    ),
    "labels of other lengths": (
        {"a.csv": table(["signal", "label"], [[numbers(), "0.1 0.1 0.4 0.8"[: 7 + 8 * (i % 2)]] for i in range(N)])},
        ["a.csv", "--label", "label", "--inputs", "signal", "--window", "4"],
        3,
        "are not, as in other rows, one for every so many",
    ),
    **{
        f"{option} of numbers": (
            {"a.csv": good(label=lambda i: i + 0.5)},
            ["a.csv", *arguments],
            2,
            f"{option} is for classes and labels, but here numbers are predicted",
        )
        for option, *arguments in (
            ("--class-weights", "--class-weights", "balanced"),
            ("--positive", "--positive", "ill"),
            ("--balanced-sampling", "--balanced-sampling"),
        )
    },
    "weights of words": ({}, ["gone.csv", "--class-weights", "a=much"], 2, "a number above 0 for one label or several"),
    "weights of nothing": ({}, ["gone.csv", "--class-weights", "a=0"], 2, "--class-weights a=0: balanced is expected"),
    "a weight without a label": ({}, ["gone.csv", "--class-weights", "2"], 2, "as in rare=5,usual=1"),
    "weights of another label": (
        {"a.csv": good()},
        ["a.csv", "--class-weights", "0=2,ill=5"],
        2,
        "--class-weights: there is no label 'ill' in the training rows; there: 0, 1",
    ),
    "another positive class": ({"a.csv": good()}, ["a.csv", "--positive", "ill"], 2, "--positive: there is no label"),
    "one positive of several labels": (
        {"a.csv": table(["signal", "p", "q"], [[numbers(), i % 2, i // 2 % 2] for i in range(N)])},
        ["a.csv", "--label", "p,q", "--positive", "p"],
        2,
        "--positive is one of several classes",
    ),
    "balanced draws of steps": (
        {"a.csv": table(["id", "time", "v", "y"], [[i // 5, i % 5, RNG.random(), i % 2] for i in range(200)])},
        ["a.csv", "--label", "y", "--balanced-sampling"],
        2,
        "--balanced-sampling needs a class for every sequence",
    ),
    "a separator that stands nowhere": (
        {"a.csv": good(label=lambda i: ["AF|PVC", "PVC", "AF"][i % 3])},
        ["a.csv", "--separator", ";"],
        2,
        "--separator ';': no cell of column 'label' has it; there: 'AF|PVC', 'AF', 'PVC'",
    ),
    "a separator for several columns": (
        {"a.csv": table(["signal", "p", "q"], [[numbers(), i % 2, i % 2] for i in range(N)])},
        ["a.csv", "--label", "p,q", "--separator", ";"],
        2,
        "--separator is for one label column",
    ),
    "unknown kind": ({"a.csv": good()}, ["a.csv", "--kind", "video"], 2, "text, list, wide, long, files"),
    "kind that is not there": ({"a.csv": good()}, ["a.csv", "--kind", "text"], 2, "no column is of that kind"),
    "doubled column": (
        {"a.csv": table(["signal", "label", "label"], [[numbers(), i % 2, 1] for i in range(N)])},
        ["a.csv", "--label", "label"],
        2,
        "two columns have this name",
    ),
    "constant input": (
        {"a.csv": table(["signal", "label"], [["1 1 1 1", i % 2] for i in range(N)])},
        ["a.csv"],
        3,
        "nothing to learn",
    ),
    "one step": (
        {"a.jsonl": "".join(json.dumps({"x": [i], "label": i % 2}) + "\n" for i in range(N))},
        ["a.jsonl"],
        3,
        "one step",
    ),
    "label only in test": (
        {"d/train.csv": good(), "d/test.csv": good(9, lambda i: "new")},
        ["d"],
        3,
        "new",
    ),
    "test rows are training rows": (
        {"d/train.csv": (same := good()), "d/test.csv": same},
        ["d"],
        3,
        "test rows must be new",
    ),
    "folder without tables": ({"d/readme.txt": "x"}, ["d"], 3, "no training file"),
    "sounds without a table": ({"d/a.wav": b"RIFF", "d/b.wav": b"RIFF"}, ["d"], 3, "labels.csv"),
    "one array": ({"a.npy": lambda path: np.save(path, X)}, ["a.npy"], 3, "np.savez"),
    "array without labels": ({"a.npz": arrays(X=X)}, ["a.npz"], 3, "labels"),
    "arrays of two lengths": ({"a.npz": arrays(X=X, y=Y[1:])}, ["a.npz"], 3, "one a row"),
    "flat array": ({"a.npz": arrays(X=X[:, 0], y=Y)}, ["a.npz"], 3, "shape"),
    "infinite array": ({"a.npz": arrays(X=np.where(X > 0.9, np.inf, X), y=Y)}, ["a.npz"], 3, "finite"),
    "infinite beside gaps": (
        {"a.csv": good() + "1 nan inf 3,0\n"},
        ["a.csv"],
        3,
        "step 3: 'inf' is not a finite number",
    ),
    "no static column": ({"a.csv": good()}, ["a.csv", "--static", "age"], 2, "--static age: there is no such column"),
    "empty static": ({"a.csv": good()}, ["a.csv", "--static", ","], 2, "--static"),
    "static label": ({"a.csv": good()}, ["a.csv", "--label", "label", "--static", "label"], 2, "another role already"),
    "static list": (
        {"a.csv": table(["s", "t", "y"], [[numbers(), numbers(9), i % 2] for i in range(N)])},
        ["a.csv", "--inputs", "s", "--static", "t"],
        3,
        "a static feature is a number or word",
    ),
    "static that changes": (
        {
            "a.csv": table(
                ["id", "time", "v", "age", "y"], [[i // 5, i % 5, RNG.random(), i, i // 5 % 2] for i in range(200)]
            )
        },
        ["a.csv", "--static", "age"],
        3,
        "--static age: this column changes within a sequence",
    ),
    "pickled array": ({"a.npz": arrays(X=RAGGED, y=Y[:2])}, ["a.npz"], 3, "cannot be read as an array"),
    "archive that is none": ({"a.npz": "no zip"}, ["a.npz"], 3, "archive"),
    "damaged deflated archive": ({"a.npz": damaged(zipfile.ZIP_DEFLATED)}, ["a.npz"], 3, "archive of arrays: "),
    "damaged LZMA archive": ({"a.npz": damaged(zipfile.ZIP_LZMA)}, ["a.npz"], 3, "archive of arrays: "),
    "damaged bzip2 archive": ({"a.npz": damaged(zipfile.ZIP_BZIP2)}, ["a.npz"], 3, "cannot be read"),
    "odd budget": ({"a.csv": good()}, ["a.csv", "--budget", "soon"], 2, "30m"),
    "no budget": ({"a.csv": good()}, ["a.csv", "--budget", "0s"], 2, "30m"),
    "odd jobs": ({"a.csv": good()}, ["a.csv", "--jobs", "many"], 2, "--jobs"),
    "folder in use": ({"a.csv": good(), "a-try/notes.txt": "mine"}, ["a.csv"], 7, "holds other files"),
    "folder is a file": ({"a.csv": good(), "b": "mine"}, ["a.csv", "--out", "b"], 7, "is a file"),
    "damaged record": ({"a.csv": good(), "a-try/try.json": "{"}, ["a.csv"], 7, "move a-try away"),
    "record of something else": ({"a.csv": good(), "a-try/try.json": STATE}, ["a.csv"], 7, "cannot be read"),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SPT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("SPT_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.delenv("SPT_RUNS_DIR", raising=False)
    monkeypatch.setattr("spt.advisor.advise.Layout", None)  # nothing gets as far as training
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def written(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_sentence(case, folder):
    check(case, (), folder)


@pytest.mark.parametrize("case", ["missing", "two labels", "one class", "folder in use"])
def test_it_is_the_same_where_json_was_asked_for(case, folder):
    check(case, ("--json",), folder)


def check(case, option, folder):
    files, arguments, code, words = CASES[case]
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if callable(content):
            content(path)
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
    before = written(folder)
    done = CliRunner().invoke(app, ["try", *arguments, *option])
    assert done.exit_code == code, (done.stderr, done.exception)
    last = done.stderr.rstrip().splitlines()[-1]
    assert last.startswith("spt: ") and words in last, done.stderr
    assert "Traceback" not in done.stderr and "bug" not in last and not done.stdout
    assert written(folder) == before, "something was written"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(folder):
    (folder / "a.csv").write_text(good())
    folder.chmod(0o555)
    done = CliRunner().invoke(app, ["try", "a.csv"])
    folder.chmod(0o755)
    assert done.exit_code == 7 and "permission denied" in done.stderr
