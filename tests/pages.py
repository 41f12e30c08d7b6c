"""The pages of the documentation: their code blocks, and running them as a reader would, in one folder, in order.

A console block's lines that begin with `$ ` are commands, its other lines what they print (which is not compared). A
block with `file=NAME` is written to that file before the first command runs; Python without one is a program, or on
some pages a part of one.
"""

import contextlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import typer
from tiny import ROOT, environment, spt

from spt.config.load import packaged
from spt.config.yaml import parse_yaml
from spt_cli import app

PAGES = sorted(path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FENCE = re.compile(r"^```(\w*)(?: +file=(\S+))? *\n(.*?)^``` *$", re.M | re.S)
RUN = ("console", "python", "yaml", "csv")  # languages of blocks that are run, or written and used
SHOWN = ("", "text", "json", "bibtex")  # of blocks that are only looked at
READ = {"bidmc", "books", "images", "retrieval", "speech", "text"}  # tasks of real data

# A command that holds these words in this order is not run. Where it is one of spt's, its options are checked all the
# same. The first word says what kind of thing is missing.
EXCEPTIONS = {
    "git clone": "network: it fetches this repository",
    "pip install": "network: test_packaging.py installs the wheel",
    ".ci/run": "an hour: a sample of it is the suite itself",
    "-m pytest": "a part of the suite",
    "-m tests.fuzz": "minutes or hours: test_fuzz.py runs some cases, and the planted faults",
    "-m tests.chaos": "minutes or hours: test_chaos.py runs some disturbances",
    "-m tests.conditions": "hours: the whole suite under each condition",
    "srun": "Slurm: test_slurm.py",
    "torchrun --nnodes": "several machines: test_nodes.py starts its agents",
    "make": "installs an environment of its own; that the target exists is checked below",
    "…": "reader: a place to be filled in",
    "data prepare": "network: it downloads",
    "--slurm": "Slurm: test_slurm.py",
    "bench model s4": "minutes of measurements: test_bench.py measures models in small sizes",
    "bench slopes": "more minutes of measurements: likewise",
    "bench gpu": "a minute of small commands: test_bench_gpu.py runs the rehearsal",
    "--backend keops": "KeOps: test_backends.py",
    "--attention flash": "GPU: test_backends.py",
    "--compile": "a compiler: test_memory.py",
    "--tracker wandb": "an account",
}
EVERYWHERE = (
    *("git clone", "pip install", "make", "…", "--slurm"),
    *("--backend keops", "--attention flash", "--compile", "--tracker wandb"),
)  # may be unused
# Files of the reader's own that a page speaks of: the page, the file, and the packaged recipe that stands in for it.
OWN = {("docs/running.md", "mine.yaml"): "quickstart"}
# Pages whose blocks of Python are one program in parts; on others each is a program.
ONE_PROGRAM = {"docs/first-comparison.md", "docs/looking-inside.md"}
# What a fragment of Python on a page presumes, by its first line.
PRESUMED = {
    "backbone.eval()": (
        "import torch\nfrom spt.config.plugins import find_plugin\nfrom spt.checks.model_contract import tiny\n"
        "backbone = tiny(find_plugin('models', 's4'), causal=True, d_model=16)\nstream = torch.randn(3, 8, 16)\n"
    ),
}


class Block(NamedTuple):
    page: str
    line: int
    language: str
    file: str | None
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


class Command(NamedTuple):
    page: str
    text: str
    words: tuple[str, ...]  # without what follows
    target: str | None  # `> FILE`
    real: bool  # does it, or another command of its block, name a task of real data or a recipe with one?

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found[1], found[2], found[3])
        for found in FENCE.finditer(text)
    ]


def commands(block: Block) -> list[Command]:
    """Of a console block; a line that ends in a backslash goes on."""
    lines = block.text.replace("\\\n", " ").splitlines() if block.language == "console" else []
    found = [_command(block.page, line[2:]) for line in lines if line.startswith("$ ")]
    real = any(tasks().get(word, word) in READ for command in found for word in command.words[1:])
    return [command._replace(real=real) for command in found]


def _command(page: str, text: str) -> Command:
    words, target = shlex.split(text, comments=True), None
    if len(words) > 2 and words[-2] == ">":
        *words, _, target = words
    return Command(page, text, tuple(words), target, False)


def all_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks(page)]


def all_commands() -> list[Command]:
    return [command for block in all_blocks() for command in commands(block)]


# ----------------------------------------------------------------------------------------------- what is run, and how


def exception(command: Command) -> str | None:
    """The line of the table that excepts a command."""
    held = f" {' '.join(command.words)} "
    return next((words for words in EXCEPTIONS if f" {words} " in held or (words == "…" and words in held)), None)


@cache
def tasks() -> dict[str, str]:
    """Of the packaged recipes."""
    return {name: parse_yaml(text, name)["task"]["name"] for name, text in packaged().items()}


whole_command = cache(typer.main.get_command)


def found(words: tuple[str, ...]) -> tuple[Any, list[str], str]:
    """(typer's command, its arguments, its name) of the words behind `spt`."""
    command, rest, name = whole_command(app), list(words), "spt"
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        assert rest[0] in command.commands, f"{name} has no command {rest[0]}"
        name, command = f"{name} {rest[0]}", command.commands[rest[0]]
        rest = rest[1:]
    return command, rest, name


def parse(words: tuple[str, ...]) -> dict[str, Any]:
    """The parameters that typer reads from the words behind `spt`; raises what is wrong with them. Runs nothing.

    A pattern (`runs/*`) stands for one file, or, where a command needs so many, for two.
    """
    if any("*" in word for word in words):
        with contextlib.suppress(Exception):
            return parse(tuple(word.replace("*", "0") for word in words))
        return parse(
            tuple(one for word in words for one in ([word.replace("*", i) for i in "01"] if "*" in word else [word]))
        )
    command, rest, name = found(words)
    if hasattr(command, "commands"):
        known = {option for parameter in command.params for option in parameter.opts} | {"-h", "--help"}
        assert rest and set(rest) <= known, f"{name} has no {rest}"
        return {}
    return dict(command.make_context(name, rest).params)


def smoke(words: tuple[str, ...]) -> list[str]:
    """The same command in its smallest size."""
    known = {option for parameter in found(words)[0].params for option in parameter.opts}
    writes = "--save" in words and words[0] in ("compare", "study")  # a saved study has no size of its own
    sizes = () if writes else ("--smoke", "--quick")
    added = [option for option in sizes if option in known and option not in words]
    if "--seeds" in known and "--seeds" not in words:
        added += ["--seeds", "2"]
    less = {"--lags": "16", "--budget": "1m"}
    return [*(less.get(before, word) for before, word in zip(("", *words), words, strict=False)), *added]


def run_page(
    page: str, folder: Path, env: Mapping[str, str] | None = None, small: bool = True, real: bool | None = False
) -> int:
    """Write a page's files into the folder, run its commands and programs in order; how many were run.

    `real`: only those on real data, or only the others; None: all. Raises AssertionError for one that fails.
    """
    write_files(page, folder)
    where, count = folder, 0
    for block in blocks(page):
        if block.language == "python" and block.file is None and not real:
            if page in ONE_PROGRAM:
                continue
            text = PRESUMED.get(block.text.partition("\n")[0], "") + block.text
            _succeeds(block, [sys.executable, "-c", text], where, env)
            count += 1
        for command in commands(block):
            if command.words[0] in ("cd", "mkdir"):
                where = _moved(command, where)
            elif exception(command) is None and (real is None or command.real == real):
                _run(command, where, env, small)
                count += 1
    if page in ONE_PROGRAM and not real:
        parts = [block for block in blocks(page) if block.language == "python" and block.file is None]
        _succeeds(parts[0], [sys.executable, "-c", "\n".join(block.text for block in parts)], where, env)
        count += len(parts)
    return count


def write_files(page: str, folder: Path) -> None:
    own = {file: packaged()[recipe] for (where, file), recipe in OWN.items() if where == page}
    written = {block.file: block.text for block in blocks(page) if block.file is not None}
    for file, text in (own | written).items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text, encoding="utf-8")


def _run(command: Command, where: Path, env: Mapping[str, str] | None, small: bool) -> None:
    first, *rest = (one for word in command.words for one in _files(command, word, where))
    if first == "cat":
        assert all((where / file).is_file() for file in rest), f"{command}: no such file"
    elif first == "python":
        _succeeds(command, [sys.executable, *rest], where, env)
    else:
        assert first == "spt", f"{command}: neither spt nor python, cd, mkdir or cat; see EXCEPTIONS"
        words = smoke(tuple(rest)) if small else rest
        done = spt(*words, cwd=where, env=dict(env or {}))
        assert done.returncode == 0, f"{command}, run as spt {' '.join(words)}\n{done.stdout}\n{done.stderr}"
        if command.target is not None:
            (where / command.target).write_text(done.stdout, encoding="utf-8")


def _files(command: Command, word: str, where: Path) -> list[str]:
    """What a shell makes of a pattern."""
    if "*" not in word:
        return [word]
    files = sorted(path.relative_to(where).as_posix() for path in where.glob(word))
    assert files, f"{command}: {word} is nothing in {where}"
    return files


def _moved(command: Command, where: Path) -> Path:
    target = where / command.words[-1]
    if command.words[0] == "mkdir":
        target.mkdir(parents=True, exist_ok=True)
        return where
    assert target.is_dir(), f"{command}: no such folder"
    return target


def _succeeds(what: object, words: list[str], where: Path, env: Mapping[str, str] | None) -> None:
    done = subprocess.run(
        words, cwd=where, env=environment(dict(env or {})), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{what}\n{done.stdout}\n{done.stderr}"


def documents(block: Block) -> Iterator[Any]:
    """What a YAML block holds: one mapping, or, where its keys stand twice, one a line."""
    keys = [line.partition(":")[0] for line in block.text.splitlines() if re.match(r"\w+:", line)]
    texts = [block.text] if len(set(keys)) == len(keys) else block.text.splitlines()
    yield from (parse_yaml(text, str(block)) for text in texts if text.strip())
