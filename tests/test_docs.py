"""What README and docs tell a reader to do is done here: every block of every page is run, checked, or excepted."""

import os
import re
import shlex

import pytest
from pages import (
    EVERYWHERE,
    EXCEPTIONS,
    FENCE,
    OWN,
    PAGES,
    PRESUMED,
    READ,
    RUN,
    SHOWN,
    Block,
    all_blocks,
    all_commands,
    blocks,
    commands,
    documents,
    exception,
    found,
    parse,
    run_page,
    smoke,
    write_files,
)
from tiny import ROOT
from typer.testing import CliRunner

from spt.config.load import anchor_paths, resolve
from spt.config.plugins import find_plugin, listing
from spt.config.recipe import Pretrain, Recipe, Train
from spt.studies.schema import KINDS, read, validate
from spt.training.objectives import OBJECTIVES
from spt_cli import app

BLOCKS, COMMANDS = all_blocks(), all_commands()
PROGRAMS = [block for block in BLOCKS if block.language == "python" and block.file is None]


def runs(page, real):
    mine = [c for c in COMMANDS if c.page == page and exception(c) is None and c.words[0] not in ("cd", "mkdir")]
    return any(command.real == real for command in mine) or (
        not real and any(program.page == page for program in PROGRAMS)
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", [page for page in PAGES if runs(page, real=False)])
def test_a_page_works_as_written(page, tmp_path):
    """Its files are written, its programs and commands run in its order; what trains, in smoke size."""
    assert run_page(page, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", [page for page in PAGES if runs(page, real=True)])
def test_a_pages_commands_on_real_data_work(page, tmp_path, data_dir):
    assert run_page(page, tmp_path, {"SPT_DATA_DIR": str(data_dir)}, real=True)


# ------------------------------------------------------------------------------------- without running: in every suite


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_accounted_for(page):
    """All fences are seen; each block is run, written and used, or of a language that is only looked at."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert 2 * len(FENCE.findall(text)) == len(re.findall(r"^ *```", text, re.M)), "a fence that the reader misses"
    for block in blocks(page):
        assert block.language in RUN + SHOWN, block
        if block.language in SHOWN:
            assert not re.search(r"^\$ ", block.text, re.M), f"{block}: commands belong into a console block"
        if block.language == "csv":
            assert block.file, f"{block}: a table is of no use without file=NAME"
        if block.language == "console":
            assert commands(block), f"{block}: no line begins with $ and a blank"


@pytest.mark.parametrize("page", PAGES)
def test_nothing_that_a_page_is_made_of_is_left_unfilled(page):
    """`{{ name }}` in a source is a place for a table or a sentence."""
    assert "{{" not in FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_every_command_parses(command):
    """As it stands and as it is run; a command that is not spt's is one of few."""
    first, *rest = command.words
    try:
        os.fsencode(" ".join(rest))
    except UnicodeEncodeError:
        pytest.skip("this locale has no such names")
    if first == "spt":
        parse(tuple(rest))
        parse(tuple(smoke(tuple(rest)))) if rest and not rest[0].startswith("-") else None
    elif first == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert all(re.search(rf"^{target}:", makefile, re.M) for target in rest if "=" not in target), command
    else:
        assert exception(command) or first in ("cat", "cd", "mkdir", "python"), command


PLACEHOLDER = re.compile(r"[|…]|\b[A-Z]{2,}\b|\b[A-Z]\b")


@pytest.mark.parametrize("page", [page for page in PAGES if "results/reports" not in page])
def test_what_a_sentence_calls_a_command_is_one(page):
    """`spt …` within a line: the command exists and has these options; it may lack what the sentence leaves out."""
    text = FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    for span in re.findall(r"`spt ([^`]+)`", text):
        words = tuple(shlex.split(" ".join(span.split())))
        if PLACEHOLDER.search(span):
            words = tuple(word for word in words if not PLACEHOLDER.search(word))
        command, rest, _ = found(words)
        if hasattr(command, "commands") and not rest:
            continue  # a group of commands
        try:
            parse(words)
        except Exception as error:  # typer's own, which may come with it or from click
            left_out = ("MissingParameter", "BadOptionUsage", "BadParameter")
            assert type(error).__name__ in left_out, f"{page}: spt {span}: {error}"


def test_every_exception_has_a_use():
    used = {exception(command) for command in COMMANDS}
    assert set(EXCEPTIONS) - set(EVERYWHERE) <= used
    assert {(page, file) for page, file in OWN} <= {(c.page, word) for c in COMMANDS for word in c.words}
    assert set(PRESUMED) <= {program.text.partition("\n")[0] for program in PROGRAMS}
    assert {row.name for row in listing("tasks")} >= READ


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.file], ids=str)
def test_every_file_is_used(block):
    """By a command or a program of the page that runs, or by another of its files."""
    stem = block.file.rpartition("/")[2]
    names = {block.file, stem, block.file.partition("/")[0]}
    said = [word for c in COMMANDS if c.page == block.page and exception(c) is None for word in c.words]
    others = " ".join(
        other.text for other in blocks(block.page) if other in PROGRAMS or other.file not in (None, block.file)
    )
    assert names & set(said) or any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", others) for name in names), block


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "yaml"], ids=str)
def test_every_yaml_block_is_what_it_says(block, tmp_path):
    """A recipe, a study, or parts of a recipe with options that exist."""
    write_files(block.page, tmp_path)
    for raw in documents(block):
        if "apiVersion" in raw:  # a cluster's: test_work.py
            continue
        if "kind" in raw:
            assert validate({**raw, "set": {}}, str(block)).kind == raw["kind"]
            continue
        anchor_paths(raw, tmp_path)
        if {"task", "model", "pretrain", "finetune"} <= raw.keys():
            resolve(raw, str(block))
        else:
            parts(block, raw)


def parts(block: Block, raw):
    assert raw.keys() <= Recipe.model_fields.keys(), block
    for place, kind in (("task", "tasks"), ("model", "models")):
        if part := dict(raw.get(place, {})):
            find_plugin(kind, part.pop("name")).module.Config(**part)
    if "encoder" in raw:
        Recipe.model_fields["encoder"].annotation(**raw["encoder"])
    for place in ("pretrain", "finetune", "scratch"):
        stage = raw.get(place, {})
        assert stage.keys() <= Pretrain.model_fields.keys(), block
        if train := stage.get("train"):
            given = {"batch_size": 1, "learning_rate": 1.0, **train}
            Train(**given if {"epochs", "steps", "examples", "flops"} & given.keys() else {"steps": 10**6, **given})
        if objective := dict(stage.get("objective", {})):
            OBJECTIVES[objective.pop("name")](**objective)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.words[:2] == ("spt", "study") and exception(c)], ids=str)
def test_studies_that_are_not_run_are_studies(command, tmp_path, monkeypatch):
    write_files(command.page, tmp_path)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, [*command.words[1:], "--save", "saved.yaml"])
    assert done.exit_code == 0, done.stderr
    assert read("saved.yaml").study.kind == command.words[2]


def test_every_kind_of_study_is_shown():
    shown = {c.words[2] for c in COMMANDS if c.words[:2] == ("spt", "study")}
    assert shown >= {*KINDS, "run", "status", "list", "show"} - {"compare"}


def test_what_is_wrong_with_a_page_is_noticed(monkeypatch, tmp_path):
    """An option or a command that does not exist, a command that fails, a key that is unknown."""
    page = tmp_path / "page.md"
    monkeypatch.setattr("pages.ROOT", tmp_path)

    def written(text):
        page.write_text(text, encoding="utf-8")
        return blocks("page.md")

    (block,) = written("```console\n$ spt compare quickstart --sedes 5\n$ spt compere\nout\n$ cat no\n```\n")
    for command in commands(block)[:2]:
        with pytest.raises(Exception, match=r"sedes|compere"):
            parse(command.words[1:])
    with pytest.raises(Exception, match=r"sedes|compere"):
        run_page("page.md", tmp_path)
    (block,) = written("```console\n$ cat no\n```\n")
    with pytest.raises(AssertionError, match="no such file"):
        run_page("page.md", tmp_path)
    (block,) = written("```python\nraise SystemExit(3)\n```\n")
    with pytest.raises(AssertionError, match=r"page\.md:1"):
        run_page("page.md", tmp_path)
    (block,) = written("```yaml\nmodel: {name: s4, stat: 3}\n```\n")
    with pytest.raises(Exception, match="stat"):
        parts(block, next(documents(block)))


def test_files_are_written_and_commands_run_in_order(monkeypatch, tmp_path):
    shell = "$ mkdir e\n$ cd d\n$ python -c \"open('c', 'w')\"  # a\n$ cat a.* \\\n  c\n"
    text = f"```csv file=d/a.csv\na,b\n```\n```console\n{shell}```\n"
    (tmp_path / "page.md").write_text(text, encoding="utf-8")
    monkeypatch.setattr("pages.ROOT", tmp_path)
    assert run_page("page.md", tmp_path) == 2
    assert (tmp_path / "d" / "c").exists() and (tmp_path / "e").is_dir()


def test_make_targets_that_are_mentioned_exist():
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for target in re.findall(r"(?:`|\$ |^)make (\w+)", text, re.M):
            assert re.search(rf"^{target}:", makefile, re.M), (page, target)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#\s]+)", path.read_text(encoding="utf-8")):
        if not re.match(r"https?:|mailto:", target):
            assert (path.parent / target).exists(), target


def test_the_files_that_contributors_are_sent_to_exist():
    """Whole paths in code spans of CONTRIBUTING.md; a room's files may stand without it, behind another of the room."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    text = re.sub(r"`\w+/(?:[A-Z]+/)?[A-Z]+\.\w+`", "", text)  # models/NAME.py is a place for a new one
    named = set(re.findall(r"`((?:spt|tests|docs|models|tasks|recipes)/[\w./]*)`", text)) | {"spt_cli.py"}
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
    shorter = set(re.findall(r"`((?:\w+/)?\w+\.py)`", text)) - named
    assert [path for path in sorted(shorter) if not list(ROOT.glob(f"spt/**/{path}"))] == []
    rooms = {path.name for path in (ROOT / "spt").iterdir() if (path / "__init__.py").is_file()}
    assert rooms <= set(re.findall(r"spt/(\w+) ", text)), "a room that the picture lacks"
    listed = re.search(r"^\| changed \|.*?\n\n", text, re.M | re.S)
    tests = {name for row in listed[0].split("\n")[2:-2] for name in re.findall(r"`(\w+)`", row.split("|")[2])}
    assert [name for name in sorted(tests - {"docs"}) if not (ROOT / "tests" / f"test_{name}.py").is_file()] == []
