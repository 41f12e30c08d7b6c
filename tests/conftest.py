"""Every test runs offline, in folders of its own, and as if no launcher had started it."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import typechecks
from hypothesis import settings
from hypothesis.internal.entropy import deterministic_PRNG

ROOT = Path(__file__).resolve().parent.parent

# Before anything imports torch or datasets, which read these once.
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "agg"
os.environ["WANDB_MODE"] = "disabled"
os.environ["NO_COLOR"] = "1"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes import the same code
sys.dont_write_bytecode = False
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # the workers share the cores already
else:
    os.environ.setdefault("OMP_NUM_THREADS", "2")
LAUNCHERS = ("ACCELERATE_", "TORCHELASTIC_", "SLURM_", "SPT_")  # beginnings of names
RANKS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "FORCE_COLOR"}
KEPT = {"SLURM_CONF", "SPT_GOLDEN", "SPT_DATA_DIR"}
for name in set(os.environ) - KEPT:
    if name in RANKS or name.startswith(LAUNCHERS):
        del os.environ[name]

os.environ["SPT_JOBS"] = "1"  # commands make their runs themselves, whatever the machine

signal.signal(signal.SIGINT, signal.default_int_handler)  # which is ignored in the background jobs of a shell

typechecks.install()
settings.register_profile("spt", deadline=None, derandomize=os.environ.get("CI") == "true")
settings.load_profile("spt")


def keep_survivors(phase: str, info: dict[str, int]) -> None:
    """What outlives a full collection of garbage, most of all what was imported, is not looked through again: there is
    one after every training, and a million objects to visit."""
    if phase == "stop" and info["generation"] == 2:
        gc.freeze()


with deterministic_PRNG():  # Hypothesis looks for its generator among what the collector visits, once
    gc.callbacks.append(keep_survivors)


@pytest.fixture(scope="session", autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Runs, prepared data and library caches, away from the user's."""
    home = tmp_path_factory.mktemp("home")
    for name in ("SPT_RUNS_DIR", "SPT_CACHE_DIR", "HF_HOME", "KEOPS_CACHE_FOLDER"):  # KeOps compiles into the last
        os.environ[name] = str(home / name.lower())


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """Every test draws the same weights and noise, whichever tests the worker has run before it."""
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture
def runs_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for the runs of one test, where finished runs of other tests must not be found."""
    folder = tmp_path / "runs"
    monkeypatch.setenv("SPT_RUNS_DIR", str(folder))
    return folder


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """What the loggers of spt are given during the test."""
    from spt.runtime.progress import forward_messages

    texts: list[str] = []
    with forward_messages(texts.append):
        yield texts


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """Stored arrays of the official implementations."""
    return optional_folder("SPT_GOLDEN", "golden")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Real data sets as Parquet files."""
    return optional_folder("SPT_DATA_DIR", "data")


@pytest.fixture
def keops() -> None:
    """KeOps on this machine."""
    from spt.models.ops import backends

    if problem := backends.probe("keops", "cpu"):
        pytest.skip(f"KeOps: {problem}")


def optional_folder(variable: str, name: str) -> Path:
    """The folder the variable names, or ../shared/<name>. Without it tests skip, or fail if CI=true."""
    folder = Path(os.environ.get(variable) or ROOT.parent / "shared" / name)
    if folder.is_dir():
        return folder.resolve()
    reason = f"{variable} is {os.environ.get(variable) or 'not set'} and {folder} is no folder"
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason}; with CI=true every test runs", pytrace=False)
    pytest.skip(f"{reason}: point {variable} at the {name} folder to run this")
