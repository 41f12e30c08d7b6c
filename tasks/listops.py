"""Nested lists such as [MAX 2 9 [MIN 4 7 ] 0 ]: what is the value? LRA ListOps, up to 2,000 steps.

Generated on the spot by LRA's published rules (see spt.tasks.generators.listops), or read: LRA's released files, the
original ones of NYU. Labels that are read have to be the values of their expressions, 0 to 9. Conventions of the S4 and
SPT code: blanks part the tokens, `]` counts and parentheses do not, vocabulary `<pad>`, `<unk>`, `<eos>`, `]`, digits,
operators; at most `max_length` - 1 tokens, then `<eos>`. `convention: lra`: at most 2,000 tokens, no `<eos>`.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from spt.tasks.base import Classes, Split, TaskConfig, TaskData, Tokens
from spt.tasks.files import LRA_ADDRESS, LRA_ARCHIVE, LRA_BYTES, LRA_FOLDER, places, plain, sound, streams
from spt.tasks.generators.listops import (
    DRAWN,
    OPERATORS,
    PLAIN_HEADER,
    Law,
    Row,
    Trees,
    checked,
    generate,
    nesting,
    operator_names,
    parquet,
    read_back,
    roots,
    text,
    tokens,
    tsv,
    values,
)
from spt.tasks.generators.workers import room

ADDRESSED = True
SPLITS = ("train", "val", "test")
OFFICIAL = (96_000, 2_000, 2_000)  # rows
FOLDER = f"{LRA_FOLDER}/listops-1000"
COPIES = (  # of the three splits, as Parquet files
    ("basic_train", "basic_val", "basic_test"),
    ("lra_official_code_train", "lra_official_code_validation", "lra_official_code_test"),
)
END = 2  # <eos>, behind <pad> and <unk>
CUT = {"s4": 2048, "lra": 2000}  # steps
SEED = 42  # of splits that NYU's files lack


class Config(TaskConfig):
    source: Literal["auto", "generated", "released", "nyu"] = Field(
        "auto",
        description="LRA's released .tsv files where they are in the data folder, else generated; or one of these; or "
        "the original, shorter expressions of NYU",
    )
    nyu: Literal["d20s", "d20"] = Field(
        "d20s", description="which files of NYU: with MIN MAX MED SM, or with FIRST LAST"
    )
    convention: Literal["s4", "lra"] = Field("s4", description="with <eos>, as S4 and SPT; without, as LRA")
    max_length: int | None = Field(
        None, ge=2, le=2**20, description="steps, <eos> included, longer ones are cut; null: 2048 (s4), 2000 (lra)"
    )
    seed: int = Field(0, ge=0, description="of generated expressions")
    train_size: int = Field(OFFICIAL[0], ge=1, le=10**7, description="generated training rows")
    val_size: int = Field(OFFICIAL[1], ge=1, le=10**7, description="generated validation rows")
    test_size: int = Field(OFFICIAL[2], ge=1, le=10**7, description="generated test rows")
    min_tokens: int = Field(500, ge=0, description="generated: an expression has more tokens")
    max_tokens: int = Field(2000, ge=2, le=2**20, description="generated: an expression has fewer tokens")
    max_depth: int = Field(10, ge=1, le=1000, description="generated: levels of a tree, the last of which are digits")
    max_args: int = Field(10, ge=2, le=1000, description="generated: arguments of an operator")

    @model_validator(mode="after")
    def _possible(self) -> "Config":
        self.law.check()
        return self

    @property
    def law(self) -> Law:
        return Law(self.min_tokens, self.max_tokens, self.max_depth, self.max_args)

    @property
    def steps(self) -> int:
        return self.max_length or CUT[self.convention]


class Part(NamedTuple):
    """Expressions with their values and names."""

    trees: Trees
    labels: NDArray[np.int64]
    ids: NDArray[Any]


# ------------------------------------------------------------------------------------------------------ hooks


def sources(config: Config, raw: Path) -> list[Path]:
    """The files in use, in the data folder or its sub-folder listops; none where expressions are generated.

    Released: listops-1000/basic_{train,val,test}.tsv, also inside an unpacked lra_release/; the archive lra_release.gz,
    read as it is; with `source: released` also Parquet copies, basic_train.parquet … or
    lra_official_code_{train,validation,test}.parquet with columns source and target.
    NYU: train_d20s.tsv and test_d20s.tsv, or nyu_train_d20s.parquet and nyu_test_d20s.parquet (likewise d20).
    """
    if config.source == "generated":
        return []
    near = places(raw, "listops")
    if config.source == "nyu":
        for form in ("{}_{}.tsv", "nyu_{}_{}.parquet"):
            for folder in near:
                found = [folder / form.format(split, config.nyu) for split in ("train", "test")]
                if found[1].exists():
                    return [path for path in found if path.exists()]
        return []
    for folder in (place / name for place in near for name in (FOLDER, "listops-1000", ".")):
        found = [folder / f"basic_{split}.tsv" for split in SPLITS]
        if found[0].exists():
            return [path for path in found if path.exists()]
    for folder in near:
        if (folder / LRA_ARCHIVE).exists():
            return [folder / LRA_ARCHIVE]
    for names in COPIES if config.source == "released" else ():
        for folder in near:
            found = [folder / f"{name}.parquet" for name in names]
            if found[0].exists():
                return [path for path in found if path.exists()]
    return []


def load(config: Config, raw: Path) -> TaskData:
    files = sources(config, raw)
    if config.source == "nyu":
        parts, notes = _read_nyu(config, files, raw)
    elif files:
        parts, notes = _read_released(config, files)
    elif config.source == "released":
        raise FileNotFoundError(
            f"LRA's ListOps is not in the data folder {raw}: put {LRA_ADDRESS} there (8 GB, need not be unpacked), or "
            "its listops-1000/ with basic_train.tsv, basic_val.tsv and basic_test.tsv (another folder: --data-dir or "
            "SPT_DATA_DIR), or set source: generated"
        )
    else:
        parts, notes = _generated(config)
    table = _table(config)
    train, val, test = (_split(part, table, config) for part in parts)
    # Of generated rows the longest that there can be, however many are made.
    length = 0 if files else min(config.steps, config.max_tokens - 1 + (config.convention == "s4"))
    return TaskData(Tokens(int(table.max()) + 1), Classes(10), train, val, test, length, notes)


def breakdown(config: Config, rows: Split) -> dict[str, NDArray[Any]]:
    """Levels of operators, the outermost one, and tokens; of a row that was cut, those of what is left."""
    kept = rows.stops - rows.starts - (config.convention == "s4")
    codes = read_back(np.concatenate([rows.row(i)[:n] for i, n in enumerate(kept.tolist())]), _table(config))
    trees = Trees(codes, np.cumsum(kept))
    depth = np.maximum.reduceat(nesting(trees), trees.starts)
    return {"depth": depth, "operator": operator_names(codes[trees.starts]), "length": kept}


def readable(config: Config, row: NDArray[Any]) -> str:
    kept = len(row) - (config.convention == "s4")
    return text(read_back(row[:kept], _table(config)), parentheses=False)


# -------------------------------------------------------------------------------------------------------- rows


def _table(config: Config) -> NDArray[np.uint8]:
    """Token of each code."""
    operators = OPERATORS if config.source == "nyu" and config.nyu == "d20" else OPERATORS[:DRAWN]
    return tokens(END + 1 if config.convention == "s4" else END, operators)


def _generated(config: Config) -> tuple[list[Part], tuple[str, ...]]:
    sizes = (config.train_size, config.val_size, config.test_size)
    made = generate(config.seed, config.law, sizes, config.limit, templates=False, what="listops")
    parts = [
        Part(trees, roots(trees, values(trees, "listops")), _names(name, len(trees.stops)))
        for name, trees in zip(SPLITS, made, strict=True)
    ]
    return parts, ("generated by the rules of LRA's code: not the rows of its released files",)


def _names(split: str, n: int) -> NDArray[Any]:
    return np.char.add(f"{split}-", np.arange(n).astype(str))


def _split(part: Part, table: NDArray[np.uint8], config: Config) -> Split:
    """Expressions as tokens, cut, with or without <eos>."""
    end = config.convention == "s4"
    lengths = np.minimum(np.diff(part.trees.stops, prepend=0), config.steps - end)
    stops = np.cumsum(lengths + end)
    found = room((int(stops[-1]),), np.uint8)
    for start, length, stop in zip(part.trees.starts.tolist(), lengths.tolist(), stops.tolist(), strict=True):
        found[stop - length - end : stop - end] = table[part.trees.codes[start : start + length]]
    if end:
        found[stops - 1] = END
    return Split(found, stops - lengths - end, stops, part.labels, part.ids)


# ------------------------------------------------------------------------------------------------------- files


def _part(rows: Iterable[Row], name: str, operators: tuple[str, ...], where: Path) -> Part:
    codes, labels = [], []
    for trees, found in checked(rows, operators):
        codes += trees.rows()
        labels.append(found.roots.astype(np.int64))
    if not codes:
        raise ValueError(f"{where} has no rows")
    n = len(codes)
    return Part(Trees.joined(codes), np.concatenate(labels), _names(name, n))


def _file(path: Path, name: str, header: tuple[str, ...], operators: tuple[str, ...], limit: int | None) -> Part:
    if path.suffix == ".parquet":
        return _part(parquet(path, limit), name, operators, path)
    plain(path)
    with path.open("rb") as file:
        return _part(tsv(file.readline, str(path), header, limit), name, operators, path)


def _read_released(config: Config, files: list[Path]) -> tuple[list[Part], tuple[str, ...]]:
    operators = OPERATORS[:DRAWN]
    if len(files) == 1 and files[0].name == LRA_ARCHIVE:
        parts = _read_archive(files[0], config.limit)
    elif len(files) < len(SPLITS):
        raise FileNotFoundError(
            f"beside {files[0]} there is not one file for each of training, validation and test, but "
            f"{' and '.join(path.name for path in files)} alone"
        )
    else:
        parts = [
            _file(path, name, PLAIN_HEADER, operators, config.limit) for path, name in zip(files, SPLITS, strict=True)
        ]
    sizes = tuple(len(part.labels) for part in parts)
    if config.limit is None and sizes != OFFICIAL:
        found, official = (" / ".join(f"{size:,}" for size in each) for each in (sizes, OFFICIAL))
        return parts, (f"{found} rows, where LRA's released files have {official}: not the published data",)
    return parts, ()


def _read_archive(path: Path, limit: int | None) -> list[Part]:
    """From LRA's archive, which is read from the front, until all three files were met."""
    wanted = {f"{FOLDER}/basic_{name}.tsv": name for name in SPLITS}
    found: dict[str, Part] = {}
    with sound(path):
        for member, file, _ in streams(path, wanted.__contains__, LRA_BYTES):
            where, name = f"{path}, member {member}", wanted[member]
            found[name] = _part(tsv(file.readline, where, PLAIN_HEADER, limit), name, OPERATORS[:DRAWN], path)
            if len(found) == len(SPLITS):
                break
    lacking = [name for name, split in wanted.items() if split not in found]
    if lacking:
        raise ValueError(f"{path} has no member {lacking[0]}; it is not LRA's archive")
    return [found[name] for name in SPLITS]


def _read_nyu(config: Config, files: list[Path], raw: Path) -> tuple[list[Part], tuple[str, ...]]:
    """A tenth of the training file is held out; the test file alone is cut into 8, 1 and 1 tenths."""
    if not files:
        raise FileNotFoundError(
            f"NYU's ListOps is not in the data folder {raw}: put train_{config.nyu}.tsv and test_{config.nyu}.tsv of "
            "the repository NYU-MLL/spinn (python/spinn/data/listops) there, in listops/ (another folder: "
            "--data-dir or SPT_DATA_DIR)"
        )
    operators = OPERATORS if config.nyu == "d20" else OPERATORS[:DRAWN]
    parts = [_file(path, name, (), operators, None) for path, name in zip(files[::-1], ("test", "train"), strict=False)]
    held = parts[-1]
    n = len(held.labels)
    if n < 10:
        raise ValueError(f"{files[0]} has {n} rows; 10 or more are needed, as it is cut into parts")
    order = np.random.Generator(np.random.PCG64(SEED)).permutation(n)
    notes = ["original ListOps of NYU, most of it far shorter than LRA's"]
    if len(parts) == 2:
        return [_taken(held, order[n // 10 :]), _taken(held, order[: n // 10]), parts[0]], tuple(notes)
    notes.append("NYU's test file alone, cut into training, validation and test: no published number is for these rows")
    test, val, train = np.split(order, [n // 10, n // 5])
    return [_taken(held, rows) for rows in (train, val, test)], tuple(notes)


def _taken(part: Part, rows: NDArray[np.int64]) -> Part:
    every = part.trees.rows()
    return Part(Trees.joined([every[row] for row in rows.tolist()]), part.labels[rows], part.ids[rows])
