"""What is installed, and that it works from a wheel, from an editable installation and in a checkout."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS: dict[str, str] = PROJECT["tool"]["setuptools"]["package-dir"]
SOURCES = ["pyproject.toml", "README.md", "LICENSE", "spt_cli.py", *FOLDERS.values()]


def requirements(*extras: str) -> list[Requirement]:
    listed = list(PROJECT["project"]["dependencies"])
    for extra in extras:
        listed += PROJECT["project"]["optional-dependencies"][extra]
    found = [Requirement(line) for line in listed]
    return [r for r in found if r.name != PROJECT["project"]["name"] and (not r.marker or r.marker.evaluate())]


def pins() -> dict[str, str]:
    lines = [
        line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if line and line[0] != "#"
    ]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def test_packages_are_the_folders_with_an_init() -> None:
    found = set()
    for package, folder in FOLDERS.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            found.add(".".join([package, *init.parent.relative_to(ROOT / folder).parts]))
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found


def test_no_dependency_is_under_a_licence_that_binds_its_users() -> None:
    """Of a plain installation, as docs/licences.md says."""
    seen: dict[str, str] = {}
    waiting = ["selfpretrain"]
    while waiting:
        try:
            package = metadata.distribution(waiting.pop())
        except metadata.PackageNotFoundError:  # of another platform
            continue
        if (name := package.name.lower()) in seen:
            continue
        about = package.metadata
        classifiers = [each for each in about.get_all("Classifier") or [] if each.startswith("License")]
        seen[name] = "; ".join(filter(None, [about.get("License-Expression"), *classifiers])) or about["License"] or ""
        wanted = [Requirement(each) for each in package.requires or []]
        waiting += [each.name for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
    assert len(seen) > 40 and {"torch", "tqdm", "numpy"} <= seen.keys()
    assert [name for name, licence in seen.items() if not licence] == []
    binding = re.compile(r"\b[AL]?GPL|Affero|GNU|proprietary", re.I)
    nvidia = re.compile(r"nvidia|cuda")
    assert {n: text for n, text in seen.items() if binding.search(text) and not nvidia.match(n)} == {}


def test_every_folder_of_recipes_is_a_package() -> None:
    recipes = (ROOT / "recipes").rglob("*.yaml")
    assert [str(r) for r in recipes if not (r.parent / "__init__.py").is_file()] == []


def test_no_file_holds_an_unfinished_merge() -> None:
    """In Markdown or YAML nothing else would notice."""
    texts = [
        *ROOT.glob("*.*"),
        *(path for name in (*FOLDERS.values(), "tests", "docs") for path in (ROOT / name).rglob("*.*")),
    ]
    marked = re.compile(rb"^(<{7} |>{7} )", re.MULTILINE)
    kinds = {".md", ".yaml", ".yml", ".toml", ".txt", ".py", ".json", ".html", ".css"}
    assert [str(path) for path in texts if path.suffix in kinds and marked.search(path.read_bytes())] == []


def test_pins_lie_within_the_ranges() -> None:
    pinned = pins()
    for requirement in requirements("test", "dev"):
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} has no pin in constraints.txt"
        assert requirement.specifier.contains(version), f"{requirement} excludes the pinned {version}"


def test_pins_hold_on_every_machine() -> None:
    assert pins()["torch"] == "2.13.0"
    assert not [f"{name}=={version}" for name, version in pins().items() if "+" in version or "/" in version]


LOCKS = ("requirements.lock", "requirements-cuda.lock")


def locked(name: str) -> dict[str, tuple[Requirement, list[str]]]:
    """What a lock pins, by canonical name, with the hashes."""
    lines = [line for line in (ROOT / name).read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    found = {}
    for entry in re.split(r"\n(?=\S)", "\n".join(lines)):
        first, *hashes = (line.removesuffix("\\").strip() for line in entry.splitlines())
        requirement = Requirement(first)
        found[canonicalize_name(requirement.name)] = (requirement, hashes)
    return found


def test_the_lock_and_the_pins_agree() -> None:
    """On the machine that the pins are for: Linux with Python 3.11."""
    machine = {**default_environment(), "python_version": "3.11", "python_full_version": "3.11.9"}
    machine |= {"sys_platform": "linux", "os_name": "posix", "platform_machine": "x86_64"}
    lock = {
        name: str(requirement.specifier).removeprefix("==")
        for name, (requirement, _) in locked("requirements.lock").items()
        if requirement.marker is None or requirement.marker.evaluate(machine)
    }
    assert lock == pins()


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_has_hashes_and_names_no_index(name: str) -> None:
    entries = locked(name)
    assert len(entries) > 10
    for requirement, hashes in entries.values():
        assert re.fullmatch(r"==[0-9a-z.]+", str(requirement.specifier)) and not requirement.url
        assert hashes and all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", line) for line in hashes), requirement
    assert not re.search(r"://|index|find-links|trusted-host|@", (ROOT / name).read_text(encoding="utf-8"))


def test_one_version_everywhere() -> None:
    import spt

    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {spt.__version__}\n" in citation


def test_nothing_loads_the_folders_under_their_bare_names() -> None:
    run(ROOT, sys.executable, "-c", "import spt_cli, spt.models.base, spt.tasks.base, sys; " + NO_BARE_NAMES)


@pytest.mark.parametrize("name", ["models", "tasks", "recipes", "results"])
def test_the_bare_names_refuse_to_load(name: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True)
    assert f"import spt.{name}, not {name}" in done.stderr


NO_BARE_NAMES = "assert not {'models', 'tasks', 'recipes', 'results'} & set(sys.modules)"
EVERYTHING = f"""
import sys
import spt.models.base, spt.tasks.base
from importlib.resources import files
assert [f for f in files("spt.recipes").iterdir() if f.name == "quickstart.yaml"], "no recipes"
assert (files("spt") / "py.typed").is_file()
{NO_BARE_NAMES}
print(spt.models.__file__)
"""


def run(cwd: Path, *command: str | Path, **environment: str) -> str:
    """Standard output of a command that must succeed, without Python's own variables."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=plain | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def copy_sources(target: Path) -> Path:
    """A checkout of its own, so that building leaves nothing in ours."""
    target.mkdir()
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target / name)
    return target


class Environment:
    """A virtual environment that sees this one's libraries, but not its installation of the project."""

    def __init__(self, folder: Path) -> None:
        run(folder.parent, sys.executable, "-m", "venv", "--without-pip", folder)
        self.bin = folder / ("Scripts" if os.name == "nt" else "bin")
        self.python = self.bin / "python"
        # Python follows .pth files in its own site-packages only, so an editable installation stays unseen.
        site = Path(run(folder, self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        libraries = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
        (site / "libraries.pth").write_text("\n".join(libraries) + "\n")

    def install(self, cwd: Path, *what: str | Path) -> None:
        pip = (self.python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation")
        run(cwd, *pip, "--ignore-installed", "--no-index", *what)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_sources(tmp_path_factory.mktemp("packaging") / "checkout")


@pytest.fixture(scope="module")
def wheel(checkout: Path) -> Path:
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    run(checkout, *pip, "--wheel-dir", checkout / "dist", checkout)
    shutil.rmtree(checkout / "build")  # where setuptools keeps copies that a later build would take for sources
    (built,) = (checkout / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def plain(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    environment = Environment(tmp_path_factory.mktemp("plain") / "venv")
    environment.install(wheel.parent, wheel)
    return environment


@pytest.mark.slow
def test_the_wheel_holds_the_packages_and_their_data(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".yaml", ".html"} or path.name == "py.typed":
                assert f"{package.replace('.', '/')}/{path.relative_to(ROOT / folder).as_posix()}" in names
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"spt", "spt_cli.py"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_a_plain_installation_works_anywhere(plain: Environment, tmp_path: Path) -> None:
    works(plain, tmp_path)
    assert "site-packages" in run(tmp_path, plain.python, "-c", EVERYTHING)


@pytest.mark.slow
def test_a_plain_installation_works_in_a_checkout(plain: Environment, checkout: Path) -> None:
    works(plain, checkout)
    assert str(checkout / "models") in run(checkout, plain.python, "-c", EVERYTHING)


@pytest.mark.slow
def test_an_editable_installation_sees_new_files(tmp_path: Path) -> None:
    checkout = copy_sources(tmp_path / "checkout")
    environment = Environment(tmp_path / "venv")
    environment.install(checkout, "--editable", checkout)
    works(environment, tmp_path)
    assert str(checkout / "models") in run(tmp_path, environment.python, "-c", EVERYTHING)
    (checkout / "models" / "newcomer.py").write_text("")
    run(tmp_path, environment.python, "-c", "import spt.models.newcomer")


def works(environment: Environment, cwd: Path) -> None:
    import spt

    assert spt.__version__ in run(cwd, environment.bin / "spt", "--version")
    for command in ("spt_cli", "spt"):
        assert "compare" in run(cwd, environment.python, "-m", command, "--help")
