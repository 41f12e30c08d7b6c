"""Who may import whom: the contracts in pyproject.toml, run on the unpacked wheel.

In a checkout import-linter does not see spt.models, whose folder lies elsewhere. What may be imported inside functions
only, and what spt_cli imports, is in test_layers.py.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from test_packaging import ROOT, SOURCES


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's files, built from a copy of the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--wheel-dir", folder / "dist", folder], check=True, capture_output=True)
    (built,) = (folder / "dist").glob("*.whl")
    zipfile.ZipFile(built).extractall(folder / "unpacked")
    return folder / "unpacked"


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = Path(sysconfig.get_path("scripts")) / "lint-imports"
    environ = {**os.environ, "PYTHONPATH": str(folder), "PYTHONSAFEPATH": ""}
    config = ["--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    return subprocess.run([command, *config], cwd=folder, env=environ, capture_output=True, text=True, check=False)


def test_the_import_contracts_are_kept(unpacked: Path) -> None:
    done = lint_imports(unpacked)
    assert done.returncode == 0, done.stdout
    assert "4 kept, 0 broken" in done.stdout


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("runs/folder.py", "from spt.training.stage import run_stage"),  # to a higher floor
        ("config/recipe.py", "import torch"),
        ("tasks/digits.py", "def late():\n    from spt.data.batching import collate"),  # inside a function, too
        ("data/cache.py", "from spt.tasks.generators.listops import evaluate"),
    ],
)
def test_a_wrong_import_is_found(unpacked: Path, tmp_path: Path, module: str, line: str) -> None:
    copy = shutil.copytree(unpacked, tmp_path / "unpacked")
    with (copy / "spt" / module).open("a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")
    done = lint_imports(copy)
    assert done.returncode == 1 and "BROKEN" in done.stdout, done.stdout
