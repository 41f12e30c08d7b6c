"""A copy of a data set on the Hugging Face hub, as Parquet files in the data folder; for `spt data prepare` alone."""

import errno
import os
import shutil
from pathlib import Path

from spt.tasks.files import Say
from spt.tasks.own.options import Options
from spt.tasks.own.places import SPLITS, hub_folder

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)


def copy(config: Options, raw: Path, say: Say) -> None:
    """Get the data set, unless it is there: one file for each split called train, validation, test or the like.

    Labels with names (the hub's ClassLabel) become these names. Raises ValueError when it cannot be had, OSError when
    it cannot be written.
    """
    folder = hub_folder(config, raw)
    if folder.is_dir():
        say(f"{folder} is there already")
        return
    import datasets

    beside = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        say(f"getting {config.hub} from the Hugging Face hub")
        try:
            found = datasets.load_dataset(str(config.hub), config.hub_config, revision=config.revision)
            known = [name for name in found if str(name).lower() in SPLITS]
            if not known and len(found) == 1:  # a single split of another name is split here
                known = list(found)
            for name in known:
                split = SPLITS.get(str(name).lower(), "train")
                _named(found[name]).to_parquet(str(beside / f"{split}.parquet"))
                say(f"{split}: {len(found[name]):,} rows")
        except Exception as error:  # of a library, a network and other people's files
            if isinstance(error, OSError) and error.errno in FULL:
                raise
            reason = " ".join(str(error).split())[:300]
            raise ValueError(f"{config.hub} cannot be copied from the Hugging Face hub: {reason}") from error
        left = sorted(str(name) for name in set(found) - set(known))
        if left:
            say(f"not copied: {', '.join(left)}, which are no training, validation or test rows")
        if not any(SPLITS.get(str(name).lower(), "train") == "train" for name in known):
            raise ValueError(f"{config.hub} has no training split; it has {', '.join(map(str, found))}")
        os.replace(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _named(part: "datasets.Dataset") -> "datasets.Dataset":  # type: ignore[name-defined]  # noqa: F821
    """With names for the numbers of labels."""
    import datasets

    names = [name for name, kind in part.features.items() if isinstance(kind, datasets.ClassLabel)]
    for name in names:
        kind = part.features[name]
        labels = [None if label is None or label < 0 else kind.int2str(label) for label in part[name]]
        part = part.remove_columns(name).add_column(name, labels)
    return part
