"""Which files hold the user's rows: a table, a folder of tables by split, or the copy of a data set from the hub."""

import re
import stat
from collections.abc import Sequence
from pathlib import Path

from spt.tasks.own.cells import listed, name_of
from spt.tasks.own.options import Options
from spt.tasks.own.tables import FORMATS, rows, where

SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
SOUNDS = (".wav", ".flac", ".mp3", ".ogg", ".npy", ".npz")
LABELS = ("labels", "label", "metadata", "index")  # names of a table beside array files


def tables(config: Options, raw: Path) -> dict[str, list[Path]]:
    """The tables to read, training first. Raises for what is no file, and for a folder without training files."""
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
        if path.suffix.lower() not in FORMATS:
            raise ValueError(f"{path} is not read: {_unreadable(path.suffix.lower())}")
        check_regular(path)
        return {"train": [path]}
    there = sorted(path.iterdir())
    found = _by_name(there)
    single = [one for one in there if one.suffix.lower() in FORMATS and one.stem.lower() in LABELS]
    if config.file_column is not None and len(single) == 1 and not any(found.values()):
        check_regular(single[0])
        return {"train": single}
    if not found["train"]:
        sounds = config.file_column is None and any(one.suffix.lower() in SOUNDS for one in there)
        more = "for a folder of arrays or sounds: file_column" if sounds else f"formats: {', '.join(FORMATS)}"
        names = listed([one.name for one in there])
        raise ValueError(f"the folder {path} has no training file such as train.csv{names} ({more})")
    if config.split_column is not None and sum(map(len, found.values())) > 1:
        raise ValueError(f"split_column is for a single file; in the folder {path} the files' names say the split")
    for split, paths in found.items():
        endings = sorted({one.suffix.lower() for one in paths})
        if len(endings) > 1:
            raise ValueError(f"the {split} split is in {path} as {' and as '.join(endings)}; keep one of them")
    return {split: paths for split, paths in found.items() if paths}


def hub_folder(config: Options, raw: Path) -> Path:
    """Where the copy of a hub data set lies: <data folder>/hub/owner--name[--config][@revision]."""
    more = f"--{config.hub_config}" * (config.hub_config is not None) + f"@{config.revision}" * bool(config.revision)
    return raw / "hub" / f"{config.hub}{more}".replace("/", "--")


def splits_of_column(config: Options, path: Path) -> set[str]:
    """The splits that a file's split column names."""
    column = str(config.split_column)
    names: dict[str, str] = {}
    for line, (cell,) in rows(path, lambda there, file: [column]):
        if not isinstance(cell, str) or cell not in names:
            names[str(cell)] = split_name(cell, f"{where(path, line)}, column {column}")
    return set(names.values())


def split_name(cell: object, place: str) -> str:
    name = name_of(cell, place)
    if name.strip().lower() not in SPLITS:
        raise ValueError(f"{place}: {name!r} is no split; train, validation or test is expected")
    return SPLITS[name.strip().lower()]


def check_regular(path: Path) -> None:
    if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its other end
        raise ValueError(f"{path} is not a regular file")


def _by_name(there: Sequence[Path]) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {"train": [], "validation": [], "test": []}
    for one in there:
        if one.suffix.lower() in FORMATS and not one.name.startswith("."):
            splits = {SPLITS[word] for word in re.split(r"[^a-z]+", one.stem.lower()) if word in SPLITS}
            if len(splits) > 1:
                raise ValueError(f"the name of {one} says {' and '.join(sorted(splits))}; a file is one split's")
            for split in splits:
                check_regular(one)
                found[split].append(one)
    return found


def _unreadable(ending: str) -> str:
    """What to do with the usual other formats."""
    if ending in (".gz", ".zip", ".bz2", ".xz", ".zst", ".tar", ".tgz"):
        return "unpack it first"
    if ending == ".json":
        return "write one object a line and call the file .jsonl"
    if ending in (".xlsx", ".xls", ".ods"):
        return "save the table as .csv"
    if ending in SOUNDS:
        return "name a table of such files and their labels, and the column that names them (file_column)"
    return f"its name should end in one of {', '.join(FORMATS)}"
