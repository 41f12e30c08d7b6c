"""What README and docs tell a reader to do is done here."""

import re
import shlex

import pytest
from tiny import ROOT, recipe_file, spt
from typer.testing import CliRunner

from spt.recipe import parse_yaml
from spt.study import KINDS, check
from spt_cli import app

BLOCK = re.compile(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```", re.M | re.S)
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def blocks(name):
    return BLOCK.findall((ROOT / name).read_text(encoding="utf-8"))


def commands(name):
    lines = [line for language, _, text in blocks(name) if language == "console" for line in text.splitlines()]
    return [shlex.split(line[2:], comments=True) for line in lines if line.startswith("$ ")]


@pytest.mark.slow
def test_extending_works_as_written(tmp_path):
    for _, file, text in blocks("docs/extending.md"):
        if file:
            (tmp_path / file).write_text(text)
    listed = commands("docs/extending.md")
    assert len(listed) == 5 and all(command[0] == "spt" for command in listed)
    for command in listed:
        done = spt(*command[1:], cwd=tmp_path)
        assert done.returncode == 0, (command, done.stdout, done.stderr)


def run_all(listed, tmp_path, env=None):
    for command in listed:
        many = (
            command[1] == "compare"
            or command[1:3] == ["study", "run"]
            or (command[1] == "study" and command[2] in KINDS)
        )
        extra = ["--smoke"] if many or command[1] in ("pretrain", "finetune") else []
        seeds = ["--seeds", "2"] if many and "--seeds" not in command else []
        done = spt(*command[1:], *extra, *seeds, cwd=tmp_path, env=env)
        assert done.returncode == 0, (command, done.stdout, done.stderr)


def needs_data(command):
    return any(word in ("images", "text") or word.startswith(("small/", "lra/")) for word in command)


@pytest.mark.slow
def test_the_readmes_commands_exist(tmp_path):
    """Every `spt …` in the README runs; what trains, in smoke size, in one folder, in the README's order."""
    listed = [command for command in commands("README.md") if command[0] == "spt" and not needs_data(command)]
    assert len(listed) >= 5
    run_all(listed, tmp_path)


@pytest.mark.slow
def test_the_readmes_commands_on_real_data_exist(tmp_path, data_dir):
    listed = [command for command in commands("README.md") if command[0] == "spt" and needs_data(command)]
    assert len(listed) >= 3
    run_all(listed, tmp_path, {"SPT_DATA_DIR": str(data_dir)})


def test_commands_of_studies_parse(tmp_path, monkeypatch):
    """Every `spt study KIND …` of the docs, as far as its file; `run` reads the file that an earlier command saved."""
    monkeypatch.chdir(tmp_path)
    recipe_file(tmp_path).rename(tmp_path / "recipe.yaml")
    listed = [c for page in ("docs/studies.md", "docs/running.md") for c in commands(page) if c[1] == "study"]
    assert {c[2] for c in listed} >= {*KINDS, "run", "status", "list", "show"} - {"compare"}
    for number, command in enumerate(listed):
        if command[2] in ("run", "status", "list", "show"):
            continue
        words = ["recipe.yaml" if word == "mine.yaml" and command[-2] != "--save" else word for word in command[1:]]
        saving = [] if "--save" in words else ["--save", f"{number}.yaml"]
        done = CliRunner().invoke(app, [*words, *saving])
        assert done.exit_code == 0, (command, done.stderr)
    for command in listed:
        if command[2] == "show" or (command[2] == "run" and (tmp_path / command[3]).exists()):
            assert CliRunner().invoke(app, ["study", "show", command[3]]).exit_code == 0, command


def test_files_of_studies_in_the_docs_are_studies():
    found = [text for language, _, text in blocks("docs/studies.md") if language == "yaml"]
    assert len(found) == 1
    assert check(parse_yaml(found[0], "docs") | {"set": {}}, "docs").kind == "data"


def test_make_targets_that_are_mentioned_exist():
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for target in re.findall(r"`?make (\w+)", page.read_text(encoding="utf-8")):
            if re.search(rf"`make {target}|\$ make {target}", page.read_text(encoding="utf-8")):
                assert re.search(rf"^{target}:", makefile, re.M), (page.name, target)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        if not re.match(r"https?:|mailto:", target):
            assert (page.parent / target).exists(), target
