"""What goes wrong on bad days, through the command: one sentence, one exit code, no traceback, nothing half-written."""

import errno
import gzip
import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from tiny import MODEL, RECIPE, TASK, changed, environment, reseal
from typer.testing import CliRunner

from spt.errors import CheckpointError, SptError, UsageError
from spt.runs.baseline import read_baseline
from spt.runs.folder import RunFolder
from spt.runs.plan import read_plan
from spt.runtime import launch
from spt.training import build
from spt.training.checkpoint import _newest, verify
from spt_cli import app

TEXT = {"name": "custom", "path": "rows.csv", "text_column": "body", "label_column": "stars"}
WIDE = {"name": "custom", "path": "rows.csv", "value_prefix": "v", "label_column": "y"}
LIST = {"name": "custom", "path": "rows.parquet", "list_column": "x", "label_column": "y"}
SPLIT = {**TEXT, "split_column": "split"}
CIFAR = {"name": "images", "dataset": "cifar10"}
MNIST = {"name": "images", "dataset": "mnist"}
IMDB = {"name": "text"}
TOY = {"name": "./toy.py"}


def call(folder: Path, *arguments: str | Path) -> tuple[int, str, str]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    finally:
        os.chdir(before)
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a task, a model, and an empty `data`, where raw sources are looked for."""
    (tmp_path / "toy.py").write_text(TASK)
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("SPT_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("SPT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("SPT_RUNS_DIR", raising=False)
    return tmp_path


def recipe(folder: Path, **changes) -> str:
    (folder / "r.yaml").write_text(yaml.safe_dump(changed(RECIPE, **changes)))
    return "r.yaml"


def refused(folder: Path, code: int, words: str, *arguments, busy: bool = False) -> str:
    """The command ends with this code and a sentence with these words, and leaves no unfinished file."""
    exit_code, output, errors = call(folder, *arguments)
    assert exit_code == code, (output, errors)
    assert words in errors, errors
    assert errors.count("spt: ") == 1 and "Traceback" not in output + errors and output == ""
    if not busy:  # another process may be writing at this moment
        assert [path for path in folder.rglob("*") if path.name.endswith((".tmp", ".part", ".incomplete"))] == []
    return errors


def rows(folder: Path, header: str, *lines: str) -> None:
    (folder / "rows.csv").write_text("\n".join([header, *lines, ""]), encoding="utf-8")


def table(folder: Path, **columns) -> None:
    pq.write_table(pa.table(columns), folder / "rows.parquet")


def idx(path: Path, array: np.ndarray, opener=open) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with opener(path, "wb") as file:
        file.write(bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape))
        file.write(array.astype(np.uint8).tobytes())


def cifar(folder: Path, content: bytes) -> None:
    (folder / "data/cifar-10-batches-py").mkdir()
    for name in ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"):
        (folder / "data/cifar-10-batches-py" / name).write_bytes(content)


class Evil:
    def __reduce__(self):
        return (os.system, ("touch owned",))


GOOD = [f"text number {i},{i % 2}" for i in range(60)]
WIDE_ROWS = [f"{i}.5,{i}.25,{i}.125,{i % 2}" for i in range(60)]

# name -> (task, what stands in the folder, words)
DATA = {
    "no file": (TEXT, lambda f: None, "rows.csv"),
    "an empty CSV": (TEXT, lambda f: (f / "rows.csv").write_text(""), "empty"),
    "a header alone": (TEXT, lambda f: rows(f, "body,stars"), "no rows"),
    "an empty Parquet": (LIST, lambda f: empty_parquet(f), "no rows"),
    "a Parquet of zero bytes": (LIST, lambda f: (f / "rows.parquet").write_bytes(b""), "rows.parquet"),
    "a truncated Parquet": (LIST, lambda f: truncated_parquet(f), "rows.parquet"),
    "no such column": (TEXT, lambda f: rows(f, "bodi,stars", *GOOD), "bodi"),
    "ragged rows": (TEXT, lambda f: rows(f, "body,stars", *GOOD, "a,1,extra"), "rows.csv"),
    "not UTF-8": (TEXT, lambda f: (f / "rows.csv").write_bytes(b"body,stars\n\xff\xfe\xfa,1\n"), "UTF-8"),
    "one class": (TEXT, lambda f: rows(f, "body,stars", *[f"text {i},1" for i in range(60)]), "class"),
    "an unseen label": (
        SPLIT,
        lambda f: rows(f, "body,stars,split", *[f"{x},train" for x in GOOD], "odd,7,test", "x,1,val"),
        "7",
    ),
    "a split that is none": (SPLIT, lambda f: rows(f, "body,stars,split", *[f"{x},holdout" for x in GOOD]), "holdout"),
    "NaN among values": (WIDE, lambda f: rows(f, "v1,v2,v3,y", *WIDE_ROWS, "nan,1,2,0"), "rows.csv"),
    "infinity among values": (WIDE, lambda f: rows(f, "v1,v2,v3,y", *WIDE_ROWS, "inf,1,2,0"), "rows.csv"),
    "an empty cell": (WIDE, lambda f: rows(f, "v1,v2,v3,y", *WIDE_ROWS, ",1,2,0"), "rows.csv"),
    "text among values": (WIDE, lambda f: rows(f, "v1,v2,v3,y", *WIDE_ROWS, "many,1,2,0"), "many"),
    "a sequence of no steps": (LIST, lambda f: table(f, x=[[1.0, 2.0]] * 59 + [[]], y=[0, 1] * 30), "rows.parquet"),
    "an over-long sequence": (
        {**TEXT, "max_length": 20},
        lambda f: rows(f, "body,stars", *GOOD, f"{'long ' * 50},1"),
        "20",
    ),
    "a folder of nothing": ({**TEXT, "path": "data"}, lambda f: None, "data"),
    "an unknown ending": ({**TEXT, "path": "rows.xml"}, lambda f: (f / "rows.xml").write_text("<a/>"), "rows.xml"),
    "a device for a file": ({**TEXT, "path": "/dev/zero"}, lambda f: None, "/dev/zero"),
    "CIFAR-10 is not there": (CIFAR, lambda f: None, "cifar-10-batches-py"),
    "CIFAR-10 batches of nothing": (CIFAR, lambda f: cifar(f, b""), "data_batch_1"),
    "CIFAR-10 batches that run code": (CIFAR, lambda f: cifar(f, pickle.dumps(Evil())), "data_batch_1"),
    "CIFAR-10 of a few images": (
        CIFAR,
        lambda f: cifar(f, pickle.dumps({b"data": np.zeros((7, 3072), np.uint8), b"labels": [0] * 7})),
        "7",
    ),
    "a truncated CIFAR-10 archive": (
        CIFAR,
        lambda f: (f / "data/cifar-10-python.tar.gz").write_bytes(gzip.compress(b"x" * 9999)[:-20]),
        "cifar-10-python.tar.gz",
    ),
    "MNIST is not there": (MNIST, lambda f: None, "train-images-idx3-ubyte"),
    "MNIST of the wrong size": (MNIST, lambda f: small_mnist(f), "(60000, 28, 28) are expected"),
    "MNIST cut short": (MNIST, lambda f: cut_mnist(f), "train-images-idx3-ubyte"),
    "IMDb is not there": (IMDB, lambda f: None, "aclImdb"),
    "IMDb of a few reviews": (IMDB, lambda f: few_reviews(f), "12,500"),
    "a task whose load fails": (
        TOY,
        lambda f: (f / "toy.py").write_text(TASK.replace("rng = ", "1 / 0; rng = ", 1)),
        "ZeroDivisionError",
    ),
}  # fmt: skip


def empty_parquet(folder):
    table(folder, x=pa.array([], pa.list_(pa.int64())), y=pa.array([], pa.int64()))


def truncated_parquet(folder):
    table(folder, x=[[1.0, 2.0]] * 60, y=[0, 1] * 30)
    path = folder / "rows.parquet"
    path.write_bytes(path.read_bytes()[:200])


def small_mnist(folder):
    for part in ("train", "t10k"):
        idx(folder / f"data/{part}-images-idx3-ubyte", np.zeros((5, 28, 28)))
        idx(folder / f"data/{part}-labels-idx1-ubyte", np.zeros(5))


def cut_mnist(folder):
    small_mnist(folder)
    path = folder / "data/train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:100])


def few_reviews(folder):
    for split in ("train", "test"):
        for label in ("pos", "neg"):
            place = folder / "data/aclImdb" / split / label
            place.mkdir(parents=True)
            (place / "0_9.txt").write_text("short")


@pytest.mark.parametrize("name", DATA)
def test_data_that_cannot_be_used(folder, name):
    task, make, words = DATA[name]
    make(folder)
    refused(folder, 3, words, "pretrain", recipe(folder, task=task))
    assert not (folder / "runs").exists() and not (folder / "owned").exists()
    prepared = [path for path in (folder / "cache").rglob("*") if path.suffix in (".arrow", ".json")]
    assert prepared == []


EPOCHS = {"batch_size": 8, "learning_rate": 1e-2}
SETTINGS = {
    "more rows in a batch than there are": ({"task": TOY, "pretrain__train__batch_size": 41}, "choose at most 40"),
    "a batch larger than the fraction": (
        {"task": {**TOY, "subset_fraction": 0.1}, "pretrain__train__batch_size": 8},
        "4 training rows are in use",
    ),
    "next with a model that looks ahead": ({"task": TOY, "pretrain__objective": {"name": "next"}}, "model.causal=true"),
    "L1 on tokens": ({"task": TOY, "pretrain__objective": {"name": "masked", "loss": "l1"}}, "has tokens"),
    "cross-entropy without levels": (
        {"task": {**TOY, "kind": "values"}, "pretrain__objective": {"name": "masked", "loss": "cross_entropy"}},
        "number of levels",
    ),
    "a sequence longer than the model": ({"task": TOY, "model__max_length": 5}, "sequences of 12 steps"),
    "scaled classes": ({"task": TOY, "finetune__objective": {"name": "supervised", "scale": "range"}}, "has classes"),
    "a plateau without effect": ({"task": TOY, "pretrain__train__plateau_patience": 3}, "has no effect"),
    "no head and too narrow a model": (
        {"task": {**TOY}, "model__d_model": 8, "pretrain__head": {"identity": True}},
        "fewer than the 9",
    ),
    "redrawn masks where nothing is hidden": (
        {"task": TOY, "model__causal": True, "pretrain__objective": {"name": "next"},
         "pretrain__train__validation_masks": "redrawn"},
        "hides nothing",
    ),
    "batches larger than the validation split": (
        {"task": TOY, "pretrain__train__batch_size": 20, "pretrain__train__metric_average": "per_batch"},
        "the validation split has 17 rows",
    ),
    "a size that does not divide": ({"task": {**CIFAR, "size": 7}}, "7"),
    "an unknown data set": ({"task": {"name": "images", "dataset": "cifar100"}}, "cifar100"),
    "MNIST in colour": ({"task": {**MNIST, "grey": False}}, "grey"),
    "a billion layers": ({"task": TOY, "model__n_layers": 10**9}, "model.n_layers: input should be less than or equal"),
    "epochs without end": ({"task": TOY, "finetune__train": {**EPOCHS, "epochs": 1e300}}, "more than 1,000,000"),
    "epochs beyond a float": ({"task": TOY, "finetune__train": {**EPOCHS, "epochs": 1.7e308}}, "epochs comes to more"),
    "steps without end": (
        {"task": TOY, "finetune__train__steps": 10**400},
        "steps comes to more than",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_cannot_be_carried_out(folder, name):
    changes, words = SETTINGS[name]
    refused(folder, 2, words, "finetune", recipe(folder, **changes))
    assert not (folder / "runs").exists()


# ------------------------------------------------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A finished pretraining run."""
    folder = tmp_path_factory.mktemp("pretrained")
    (folder / "toy.py").write_text(TASK)
    code, _, errors = call(folder, "pretrain", recipe(folder, task=TOY), "--out", "runs")
    assert code == 0, errors
    (run,) = (folder / "runs").glob("pretrain-*")
    return run


@pytest.fixture
def parent(pretrained, folder):
    """A copy of it, to be damaged."""
    shutil.copytree(pretrained, folder / "before" / pretrained.name)
    return folder / "before" / pretrained.name


def edit(path: Path, change) -> None:
    path.write_bytes(change(path.read_bytes()))


def nonsense_weights(parent: Path) -> None:
    edit(parent / "checkpoints/best/model.safetensors", lambda b: b[:40])
    reseal(parent / "checkpoints/best")


def other_names(parent: Path) -> None:
    from safetensors.numpy import load_file, save_file

    path = parent / "checkpoints/best/model.safetensors"
    tensors = {name.replace("qkv", "qvk"): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path)
    reseal(parent / "checkpoints/best")


def of_another_run(parent: Path) -> None:
    path = parent / "checkpoints/best/about.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"key": "0123456789ab"}))
    reseal(parent / "checkpoints/best")


CHECKPOINTS = {
    "truncated weights": (lambda p: edit(p / "checkpoints/best/model.safetensors", lambda b: b[:-9]), {}, "is damaged"),
    "an edited bit": (
        lambda p: edit(p / "checkpoints/best/model.safetensors", lambda b: b[:-1] + bytes([b[-1] ^ 1])),
        {},
        "is damaged",
    ),
    "weights that are gone": (lambda p: (p / "checkpoints/best/model.safetensors").unlink(), {}, "is missing"),
    "no checkpoint at all": (lambda p: shutil.rmtree(p / "checkpoints"), {}, "not there"),
    "an emptied manifest": (
        lambda p: (p / "checkpoints/best/manifest.json").write_text("{}"),
        {},
        "manifest.json does not list about.json",
    ),
    "weights of another run": (of_another_run, {}, "belongs to another run, pretrain-0123456789ab"),
    "an unreadable manifest": (lambda p: (p / "checkpoints/best/manifest.json").write_text("{"), {}, "damaged"),
    "weights cut short with care": (nonsense_weights, {}, "cannot be read"),
    "tensors of other names": (other_names, {}, "does not fit this model"),
    "another width": (lambda p: None, {"model__d_model": 32}, "another architecture: d_model 16 there, 32 here"),
    "another kind of positions": (lambda p: None, {"model__positions": ["learned"]}, "another architecture: positions"),
    "another direction": (lambda p: None, {"model__causal": True}, "another architecture: causal"),
    "another kind of input": (lambda p: None, {"task": {**TOY, "kind": "bytes"}}, "another input"),
    "a run that is not finished": (lambda p: (p / "result.json").unlink(), {}, "not finished"),
    "a result that is no result": (lambda p: (p / "result.json").write_text("{}"), {}, "cannot be read as a result"),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints_that_cannot_be_used(folder, parent, name):
    damage, changes, words = CHECKPOINTS[name]
    damage(parent)
    code = 7 if name == "a result that is no result" else 6
    arguments = ("finetune", recipe(folder, **{"task": TOY, **changes}), "--from", parent)
    refused(folder, code, words, *arguments)
    assert not list((folder / "runs").glob("finetune-*/result.json"))


@pytest.mark.parametrize("kind", ["step", "best"])
def test_checkpoints_of_another_run_are_not_resumed_from(tmp_path, kind):
    run = RunFolder(tmp_path, "finetune-a")

    def checkpoint(kind: str, name: str, value: dict) -> None:
        folder = run.checkpoints / f"{kind}-00000004"
        folder.mkdir(parents=True)
        (folder / name).write_text(json.dumps(value))
        (folder / "manifest.json").write_text(
            json.dumps({name: hashlib.sha256((folder / name).read_bytes()).hexdigest()})
        )

    about = {"stage": "finetune", "step": 4, "model": {}, "input": {}, "data": {}}
    checkpoint("best", "about.json", {**about, "key": "b" if kind == "best" else "a"})
    checkpoint("step", "position.json", {"step": 4, "best_step": 4, "run": "finetune-b" if kind == "step" else ""})
    with pytest.raises(CheckpointError, match=f"{kind}-00000004 belongs to another run, finetune-b; move"):
        _newest(run)


def test_a_text_checkpoint_of_another_vocabulary(folder):
    """The vocabulary is that of the training rows in use, so another fraction may have another one."""
    lines = [f"{'ab' * 5} {i},{i % 2},train" for i in range(30)] + [
        f"{chr(0x3B1 + i)}ab,{i % 2},train" for i in range(20)
    ]
    rows(folder, "body,stars,split", *lines, *[f"ab {i},{i % 2},{s}" for i in range(9) for s in ("val", "test")])
    task = {**SPLIT, "min_count": 1}
    code, _, errors = call(folder, "pretrain", recipe(folder, task={**task, "subset_fraction": 0.3}))
    assert code == 0, errors
    (run,) = (folder / "runs").glob("pretrain-*")
    said = refused(folder, 6, "another vocabulary", "finetune", recipe(folder, task=task), "--from", run)
    assert "unknown there" in said and len(said) < 500


# ------------------------------------------------------------------------------------------------------ output folders


@pytest.mark.parametrize("out", ["/proc/spt", "/dev/null/runs", "r.yaml", "toy.py/deeper"])
def test_folders_that_cannot_be_written(folder, out):
    refused(folder, 7, out.split("/")[-1], "pretrain", recipe(folder, task=TOY), "--out", out)


def test_a_read_only_folder(folder):
    """A file system mounted read-only, where such a thing may be made."""
    (folder / "runs").mkdir()
    recipe(folder, task=TOY)
    enter = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mount = f"mount --bind {folder}/runs {folder}/runs && mount -o remount,ro,bind {folder}/runs"
    if shutil.which("unshare") is None or subprocess.run([*enter, mount], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    command = f"{mount}; {sys.executable} -m spt_cli pretrain r.yaml"
    done = subprocess.run([*enter, command], cwd=folder, env=environment(), capture_output=True, text=True)
    assert done.returncode == 7 and "the file system is read-only; choose another folder" in done.stderr
    assert done.stderr.count("spt: ") == 1 and "Traceback" not in done.stderr


def test_a_folder_in_use(folder):
    recipe(folder, task=TOY, pretrain__train__steps=100000)
    command = [sys.executable, "-m", "spt_cli", "pretrain", "r.yaml", "--save-every", "0"]
    first = subprocess.Popen(command, cwd=folder, env=environment(), stderr=subprocess.DEVNULL)
    end = time.monotonic() + 300
    while not list((folder / "runs").glob("*/checkpoints/step-*")):
        assert time.monotonic() < end and first.poll() is None
        time.sleep(0.05)
    try:
        said = refused(folder, 7, "is being written by another process", "pretrain", "r.yaml", busy=True)
        assert f"({first.pid} on {os.uname().nodename})" in said
    finally:
        first.kill()
        first.wait()


def test_a_file_system_without_locks(folder, monkeypatch):
    """Runs have claims beside locks; prepared data have locks alone."""

    def none(self, *_, **__):
        raise NotImplementedError

    call(folder, "data", "prepare", recipe(folder, task=TOY))
    monkeypatch.setattr("filelock.FileLock.acquire", none)
    assert call(folder, "pretrain", "r.yaml")[0] == 0
    monkeypatch.setenv("SPT_CACHE_DIR", str(folder / "cache"))
    refused(folder, 7, "has no locks", "pretrain", recipe(folder, task={**TOY, "shift": 1}))


# --------------------------------------------------------------------------------------------------------------- rest


def test_a_loss_that_explodes(folder):
    changes = {"task": TOY, "pretrain__train__learning_rate": 1e30, "pretrain__train__max_grad_norm": None}
    refused(folder, 5, "is not finite at step", "pretrain", recipe(folder, **changes))
    (status,) = (folder / "runs").glob("*/status.json")
    assert json.loads(status.read_text())["state"] == "diverged"


def test_a_model_that_breaks_on_a_batch(folder):
    (folder / "mine.py").write_text(MODEL.replace("FORWARD", "x[:, :-1]").replace("EXTRA", ""))
    recipe(folder, task=TOY, model={"name": "./mine.py", "d_model": 16})
    code, _, errors = call(folder, "pretrain", "r.yaml")
    assert code == 1 and "Traceback" not in errors  # not a mistake in a recipe: the model's own


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("data", "check", "nonesuch"), 2, "nonesuch"),
        (("data", "check", "images", "dataset=svhn"), 2, "svhn"),
        (("data", "check", "images", "--data-dir", "nowhere"), 3, "nowhere"),
        (("data", "prepare", "text", "max_length=1"), 2, "max_length"),
        (("pretrain", "r.yaml", "--accelerate-config", "none.yaml"), 2, "none.yaml"),
        (("pretrain", "r.yaml", "--num-processes", "1000"), 2, "more than 256"),
        (("show", "r.yaml", ".".join("a" * 5000) + "=1"), 2, "more than 32 levels"),
        (("show", "r.yaml", f"model={'[' * 500}{']' * 500}"), 2, "more than 32 levels"),
    ],
)
def test_commands_that_make_no_sense(folder, arguments, code, words):
    recipe(folder, task=TOY)
    refused(folder, code, words, *arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ("show", "NAME"),
        ("show", "r.yaml", "NAME=1"),
        ("show", "r.yaml", "task.name=NAME"),
        ("show", "r.yaml", "model.norm=NAME"),
        ("NAME",),
        ("show", "--NAME"),
        ("compare", "r.yaml", "--seeds", "NAME"),
        ("compare", "r.yaml", "--num-processes", "NAME"),
        ("report", "NAME"),
    ],
)
def test_long_names_and_control_characters_are_not_echoed(folder, arguments):
    recipe(folder, task=TOY)
    code, output, errors = call(folder, *(part.replace("NAME", "x" * 100_000) for part in arguments))
    assert code in (2, 7) and len(output + errors) < 6000 and "Traceback" not in errors, errors[:500]
    code, output, errors = call(folder, *(part.replace("NAME", "x\x1b[31m") for part in arguments))
    assert code in (2, 3) and "\x1b" not in output + errors, errors


def test_a_network_that_memory_cannot_hold(folder, monkeypatch):
    monkeypatch.setattr(build, "machine_memory", lambda: 10_000)
    refused(folder, 2, "weights, gradients and AdamW's state take more than", "show", recipe(folder, task=TOY))


@pytest.mark.parametrize(
    ("variables", "code", "words"),
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, 4, "(ACCELERATE_USE_DEEPSPEED): ImportError"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "old"}, 2, "(ACCELERATE_USE_FSDP, FSDP_VERSION): ValueError"),
    ],
)
def test_variables_of_accelerate_that_make_no_sense(folder, monkeypatch, variables, code, words):
    if find_spec("deepspeed"):
        pytest.skip("deepspeed is installed")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    refused(folder, code, words, "pretrain", recipe(folder, task=TOY))


def test_a_file_that_is_no_config_of_accelerate(folder):
    (folder / "rows.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match=r"accelerate launch cannot use .*rows\.csv: "):
        launch.relaunch(None, folder / "rows.csv", ["pretrain", "r.yaml"])


@pytest.mark.parametrize(
    ("variable", "complaint"),
    [
        ("TORCH_LOGS=junk", "the variable TORCH_LOGS is 'junk', which a library refuses (ValueError: Invalid log"),
        ("ACCELERATE_LOG_LEVEL=junk", "the variable ACCELERATE_LOG_LEVEL is 'junk', which a library refuses"),
        ("ACCELERATE_TORCH_DEVICE=junk", "Accelerate cannot start as its variables say (ACCELERATE_TORCH_DEVICE)"),
        ("ACCELERATE_USE_CPU=maybe", "Accelerate cannot start as its variables say (ACCELERATE_USE_CPU)"),
        ("SOURCE_DATE_EPOCH=junk", "the variable SOURCE_DATE_EPOCH is 'junk', which a library refuses"),
    ],
)
@pytest.mark.slow  # each needs a process of its own, which imports everything
def test_variables_that_libraries_refuse(folder, variable, complaint):
    name, _, value = variable.partition("=")
    command = [sys.executable, "-m", "spt_cli", "finetune", str(recipe(folder, task=TOY)), "--scratch", "--cpu"]
    done = subprocess.run(command, cwd=folder, env=environment({name: value}), capture_output=True, text=True)
    assert done.returncode == 2 and complaint in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("file", ["result.json", "predictions.parquet", "study.json"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(folder, file):
    path = recipe(folder, task=TOY)
    assert call(folder, "compare", path, "--seeds", "1", "--cpu")[0] == 0
    places = folder.glob(f"runs/*/{file}")
    for place in places:
        place.unlink()
        os.mkfifo(place)
    code, said, errors = call(folder, "report", next((folder / "runs").glob("compare-*")))
    assert code == (3 if file == "study.json" else 0), errors
    assert file != "result.json" or "is not a file" in " ".join(said.split())


@pytest.mark.parametrize(
    ("file", "read"),
    [
        ("manifest.json", verify),
        ("study.json", read_plan),
        ("result.json", lambda folder: read_baseline(folder.parent, folder.name)),
    ],
)
def test_readers_do_not_wait_for_a_pipe(tmp_path, file, read):
    os.mkfifo(tmp_path / file)
    try:
        problem = read(tmp_path)
    except SptError as error:
        problem = str(error)
    assert f"{file} is not a file" in problem


def test_a_broken_pipe_that_is_not_standard_output_is_no_success(folder, monkeypatch):
    def write(*_, **__):
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    monkeypatch.setattr("spt.api.plan_study", write)
    monkeypatch.setattr("spt.cli.streams.reader_has_left", lambda: False)
    code, _, errors = call(folder, "study", "compare", recipe(folder, task=TOY), "--dry-run")
    assert code == 7 and "standard output or a file: Broken pipe" in errors


def test_a_name_that_is_too_long_for_the_system(folder):
    refused(folder, 2, "too long for this system", "report", "r" * 300)


def test_a_working_folder_that_is_gone(folder, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    before = Path.cwd()
    os.chdir(gone)
    try:
        gone.rmdir()
        result = CliRunner().invoke(app, ["show", "quickstart"])
    finally:
        os.chdir(before)
    assert result.exit_code == 2 and "the folder in which this command was started does not exist" in result.stderr
