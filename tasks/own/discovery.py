"""Which files hold the user's rows: a table, a folder of tables by split, or the copy of a data set from the hub."""

import re
import stat
from collections.abc import Sequence
from pathlib import Path

from spt.tasks.files import SPLITS
from spt.tasks.own.arrays import ENDINGS as ARRAYS
from spt.tasks.own.options import Options
from spt.tasks.own.parsing import list_names, parse_name
from spt.tasks.own.tables import FORMATS

LABELS = ("labels", "label", "metadata", "index")  # names of a table beside array files
ADVICE = {  # on the usual other formats
    **dict.fromkeys((".gz", ".zip", ".bz2", ".xz", ".zst", ".tar", ".tgz"), "unpack it first"),
    ".json": "write one object a line and call the file .jsonl",
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "save the table as .csv"),
    **dict.fromkeys(
        ARRAYS, "name a table of such files and their labels, and the column that names them (file_column)"
    ),
}


def find_tables(config: Options, raw: Path) -> list[tuple[str, Path]]:
    """The tables to read, each with its split, training first.

    Raises for what is no file, and for a folder without training files.
    """
    path = config.path
    if path is None:
        path = hub_folder(config, raw)
        if not path.is_dir():
            raise FileNotFoundError(
                f"{config.hub} is not in the data folder {raw}: get it with `spt data prepare` and the recipe's name "
                "(another folder: --data-dir or SPT_DATA_DIR)"
            )
    if not path.exists():
        raise FileNotFoundError(f"no file or folder {path}; a path in a recipe is relative to the recipe's folder")
    if not path.is_dir():
        ending = path.suffix.lower()
        if ending not in FORMATS:
            advice = ADVICE.get(ending, f"its name should end in one of {', '.join(FORMATS)}")
            raise ValueError(f"{path} is not read: {advice}")
        return [("train", regular(path)), *_test_beside(path)]
    files = sorted(path.iterdir())
    tables = [file for file in files if file.suffix.lower() in FORMATS and not file.name.startswith(".")]
    by_split = _by_split(tables)
    labels = [file for file in tables if file.stem.lower() in LABELS]
    if config.file_column is not None and len(labels) == 1 and not by_split:
        return [("train", regular(labels[0]))]
    if "train" not in by_split:
        arrays = config.file_column is None and any(file.suffix.lower() in ARRAYS for file in files)
        more = "for a folder of arrays or sounds: file_column" if arrays else f"formats: {', '.join(FORMATS)}"
        names = list_names([file.name for file in files])
        raise ValueError(f"the folder {path} has no training file such as train.csv{names} ({more})")
    if config.split_column is not None and sum(map(len, by_split.values())) > 1:
        raise ValueError(f"split_column is for a single file; in the folder {path} the files' names say the split")
    for split, paths in by_split.items():
        endings = sorted({file.suffix.lower() for file in paths})
        if len(endings) > 1:
            raise ValueError(f"the {split} split is in {path} as {' and as '.join(endings)}; keep one of them")
    return [(split, path) for split, paths in by_split.items() for path in paths]


def hub_folder(config: Options, raw: Path) -> Path:
    """Where the copy of a hub data set lies: <data folder>/hub/owner--name[--config][@revision]."""
    more = f"--{config.hub_config}" * (config.hub_config is not None) + f"@{config.revision}" * bool(config.revision)
    return raw / "hub" / f"{config.hub}{more}".replace("/", "--")


def parse_split(cell: object, place: str) -> str:
    name = parse_name(cell, place)
    if name.strip().lower() not in SPLITS:
        raise ValueError(f"{place}: {name!r} is no split; train, validation or test is expected")
    return SPLITS[name.strip().lower()]


def regular(path: Path) -> Path:
    if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its other end
        raise ValueError(f"{path} is not a regular file")
    return path


def _test_beside(path: Path) -> list[tuple[str, Path]]:
    """X_TEST.ts, which belongs to X_TRAIN.ts in the archives of this format."""
    if path.suffix.lower() != ".ts" or not path.stem.upper().endswith("_TRAIN"):
        return []
    test = path.with_name(f"{path.stem[:-5]}{'TEST' if path.stem.endswith('TRAIN') else 'test'}{path.suffix}")
    return [("test", regular(test))] if test.exists() else []


def _by_split(tables: Sequence[Path]) -> dict[str, list[Path]]:
    """Those whose names say a split, training first."""
    by_split: dict[str, list[Path]] = {split: [] for split in ("train", "validation", "test")}
    for path in tables:
        splits = {SPLITS[word] for word in re.split(r"[^a-z]+", path.stem.lower()) if word in SPLITS}
        if len(splits) > 1:
            raise ValueError(f"the name of {path} says {' and '.join(sorted(splits))}; a file is one split's")
        for split in splits:
            by_split[split].append(regular(path))
    problems = sorted({re.sub(r"_(train|test)$", "", path.stem, flags=re.I) for path in tables if path.suffix == ".ts"})
    if len(problems) > 1:
        raise ValueError(
            f"{tables[0].parent} holds .ts files of several data sets{list_names(problems)}; name one file"
        )
    return {split: paths for split, paths in by_split.items() if paths}
