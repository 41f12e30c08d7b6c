"""Nested lists, the value of each asked for where it closes: ListOps-SubTrees, up to 8,192 steps.

Generated on the spot by the rules of the code of the DLR paper (section 3.2; Gupta, Mehta & Berant 2022), or read from
its files, whose labels have to be the values of their expressions. A closing bracket's class is the value of what it
closes; other steps are not scored, and a causal model can know every answer. No two expressions, of whatever splits,
differ in their digits alone. Vocabulary: `<pad>`, `<unk>`, `]`, digits, operators; no `<eos>`, nothing is cut.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from spt.tasks.base import IGNORED, Classes, Split, TaskConfig, TaskData, Tokens
from spt.tasks.files import places, plain
from spt.tasks.generators.listops import (
    DRAWN,
    OPERATORS,
    SUBTREES_HEADER,
    Law,
    Row,
    Trees,
    arguments,
    checked,
    evaluate,
    generate,
    operator_names,
    parquet,
    read_back,
    text,
    tokens,
    tsv,
    values,
)
from spt.tasks.generators.workers import room

ADDRESSED = True
SPLITS = ("train", "val", "test")
OFFICIAL = (96_000, 2_000, 2_000)  # rows
LAWS = {"long": Law(7000, 8180, 15, 9), "short": Law(1500, 2000, 10, 10)}
SAMPLES = {"long": "subtrees_official_code_8k.parquet", "short": "subtrees_official_code_2k.parquet"}
SPECIALS = 2  # <pad>, <unk>


class Config(TaskConfig):
    source: Literal["auto", "generated", "released"] = Field(
        "auto", description="files of the DLR paper's code where they are in the data folder, else generated; or one"
    )
    variant: Literal["long", "short"] = Field(
        "long",
        description="7,001 to 8,179 tokens, 15 levels, 9 arguments, as the paper's results; 1,501 to 1,999, 10, 10",
    )
    classes: Literal["values", "vocabulary"] = Field(
        "values", description="10 classes, one a value; or 17, one a token, as the published output layer has them"
    )
    unique: Literal["templates", "trees"] = Field(
        "templates", description="generated: expressions that differ in digits alone count as one, or as two"
    )
    max_length: int = Field(8192, ge=4, le=2**20, description="steps; a longer expression is an error, never cut")
    seed: int = Field(0, ge=0, description="of generated expressions")
    train_size: int = Field(OFFICIAL[0], ge=1, le=10**7, description="generated training rows")
    val_size: int = Field(OFFICIAL[1], ge=1, le=10**7, description="generated validation rows")
    test_size: int = Field(OFFICIAL[2], ge=1, le=10**7, description="generated test rows")
    min_tokens: int | None = Field(
        None,
        ge=1,
        description="generated: an expression has more tokens; null: as the variant has it, as with the rest",
    )
    max_tokens: int | None = Field(None, ge=3, le=2**20, description="generated: an expression has fewer tokens")
    max_depth: int | None = Field(None, ge=2, le=1000, description="generated: levels of a tree, the last are digits")
    max_args: int | None = Field(None, ge=2, le=1000, description="generated: arguments of an operator")

    @model_validator(mode="after")
    def _possible(self) -> "Config":
        self.law.check()
        if self.source != "released" and self.law.max_tokens - 1 > self.max_length:
            raise ValueError(
                f"expressions may have {self.law.max_tokens - 1} tokens, more than max_length {self.max_length}"
            )
        return self

    @property
    def law(self) -> Law:
        given = (self.min_tokens, self.max_tokens, self.max_depth, self.max_args)
        return Law(*(usual if mine is None else mine for mine, usual in zip(given, LAWS[self.variant], strict=True)))


@dataclass(frozen=True)
class Part:
    """Expressions, the values at their closing brackets (-1 elsewhere), and their names."""

    trees: Trees
    values: NDArray[np.int8]
    ids: NDArray[Any]


# ------------------------------------------------------------------------------------------------------ hooks


def sources(config: Config, raw: Path) -> list[Path]:
    """The files in use, in the data folder or its sub-folders subtrees and listops; none where they are generated.

    subtrees_{train,val,test}.tsv as the paper's code writes them, or .parquet (columns source and target, and any of
    subtree_evals, subtree_lengths, subtree_heights, subtree_ops, subtree_inds); with `source: released` also
    subtrees_official_code_8k.parquet (variant long) or …_2k.parquet (short), one file that is cut into three.
    """
    if config.source == "generated":
        return []
    near = [*places(raw, "subtrees"), *(place for place in [raw / "listops"] if place.is_dir())]
    for form in ("subtrees_{}.tsv", "subtrees_{}.parquet"):
        for folder in near:
            found = [folder / form.format(split) for split in SPLITS]
            if found[0].exists():
                return [path for path in found if path.exists()]
    samples = [folder / SAMPLES[config.variant] for folder in near]
    return [path for path in samples if path.exists()][:1] if config.source == "released" else []


def load(config: Config, raw: Path) -> TaskData:
    files = sources(config, raw)
    notes: tuple[str, ...] = ()
    if files:
        parts, notes = _read(config, files)
    elif config.source == "released":
        raise FileNotFoundError(
            f"ListOps-SubTrees is not in the data folder {raw}: put subtrees_train.tsv, subtrees_val.tsv and "
            "subtrees_test.tsv, as the code of the DLR paper writes them, into subtrees/ there (another folder: "
            "--data-dir or SPT_DATA_DIR), or set source: generated"
        )
    else:
        sizes = (config.train_size, config.val_size, config.test_size)
        what = "subtrees"
        made = generate(config.seed, config.law, sizes, config.limit, templates=config.unique == "templates", what=what)
        parts = [
            Part(trees, values(trees, what), _names(name, len(trees.stops)))
            for name, trees in zip(SPLITS, made, strict=True)
        ]
        notes = ("generated by the rules of the DLR paper's code: not the rows of its authors",)
    table = tokens(SPECIALS, OPERATORS[:DRAWN])
    vocab = int(table.max()) + 1
    count = 10 if config.classes == "values" else vocab
    train, val, test = (_split(part, table, config) for part in parts)
    length = 0 if files else config.law.max_tokens - 1  # of generated rows: the longest that there can be
    return TaskData(Tokens(vocab), Classes(count, per_step=True), train, val, test, length, notes)


def breakdown(config: Config, rows: Split) -> dict[str, NDArray[Any]]:
    """Of the subtree that closes at a step: height, operator, arguments, tokens."""
    trees = Trees(read_back(rows.values, tokens(SPECIALS, OPERATORS[:DRAWN])), rows.stops)
    found = evaluate(trees)
    opening = np.arange(len(trees.codes)) + 1 - np.maximum(found.lengths, 1)
    return {
        "height": found.heights,
        "operator": operator_names(trees.codes[opening]),
        "arguments": arguments(trees, found.lengths),
        "subtree tokens": found.lengths,
    }


def readable(config: Config, row: NDArray[Any]) -> str:
    return text(read_back(row, tokens(SPECIALS, OPERATORS[:DRAWN])), parentheses=False)


# -------------------------------------------------------------------------------------------------------- rows


def _names(split: str, n: int) -> NDArray[Any]:
    return np.char.add(f"{split}-", np.arange(n).astype(str))


def _split(part: Part, table: NDArray[np.uint8], config: Config) -> Split:
    found, targets = room(part.trees.codes.shape, np.uint8), part.values
    for i in range(0, len(found), 2**24):
        found[i : i + 2**24] = table[part.trees.codes[i : i + 2**24]]
        if config.classes == "vocabulary":  # in place: the values are nobody else's
            piece = targets[i : i + 2**24]
            piece[piece >= 0] = table[piece[piece >= 0]]
    assert IGNORED == -1, "what is stored where nothing is scored"
    return Split(found, part.trees.starts, part.trees.stops, targets, part.ids, per_step=True)


# ------------------------------------------------------------------------------------------------------- files


def _read(config: Config, files: list[Path]) -> tuple[list[Part], tuple[str, ...]]:
    if len(files) == 1 and files[0].name in SAMPLES.values():
        return _cut(_file(files[0], "row", config), files[0])
    if len(files) < len(SPLITS):
        raise FileNotFoundError(
            f"beside {files[0]} there is not one file for each of training, validation and test, but "
            f"{' and '.join(path.name for path in files)} alone"
        )
    parts = [_file(path, name, config) for path, name in zip(files, SPLITS, strict=True)]
    sizes = tuple(len(part.ids) for part in parts)
    if config.limit is None and sizes != OFFICIAL:
        found, official = (" / ".join(f"{size:,}" for size in each) for each in (sizes, OFFICIAL))
        return parts, (f"{found} rows, where the paper has {official}: not the published data",)
    return parts, ()


def _file(path: Path, name: str, config: Config) -> Part:
    if path.suffix == ".parquet":
        return _part(parquet(path, None if name == "row" else config.limit), name, config, path)
    plain(path)
    with path.open("rb") as file:
        return _part(tsv(file.readline, str(path), SUBTREES_HEADER, config.limit), name, config, path)


def _part(rows: Iterable[Row], name: str, config: Config, where: Path) -> Part:
    codes: list[NDArray[np.uint8]] = []
    labels: list[NDArray[np.int8]] = []
    for trees, found in checked(rows, OPERATORS[:DRAWN], config.max_length):
        codes += trees.rows()
        labels.append(found.values)
    if not codes:
        raise ValueError(f"{where} has no rows")
    names = _names(name, len(codes))
    joined = Trees.joined(codes)
    told = room(joined.codes.shape, np.int8)
    place = 0
    for piece in labels:
        told[place : place + len(piece)] = piece
        place += len(piece)
    return Part(joined, told, names)


def _cut(part: Part, path: Path) -> tuple[list[Part], tuple[str, ...]]:
    """Four, one and one sixths of the rows, in their order."""
    n = len(part.ids)
    if n < 6:
        raise ValueError(f"{path} has {n} rows; 6 or more are needed, as it is cut into three parts")
    parts = []
    for first, last in ((0, n - 2 * (n // 6)), (n - 2 * (n // 6), n - n // 6), (n - n // 6, n)):
        begin, end = int(part.trees.starts[first]), int(part.trees.stops[last - 1])
        trees = Trees(part.trees.codes[begin:end], part.trees.stops[first:last] - begin)
        parts.append(Part(trees, part.values[begin:end], part.ids[first:last]))
    return parts, (f"{n} sample rows, cut into training, validation and test: no published number is for these rows",)
