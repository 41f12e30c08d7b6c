"""A copy of a data set on the Hugging Face hub, as Parquet files in the data folder; for `spt data prepare` alone."""

import errno
import os
import shutil
from pathlib import Path

from spt.tasks.files import Say
from spt.tasks.own.discovery import SPLITS, hub_folder
from spt.tasks.own.options import Options

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)


def copy(config: Options, raw: Path, say: Say) -> None:
    """Get the data set, unless it is there: one file for each split called train, validation, test or the like.

    Labels with names (the hub's ClassLabel) become these names. Raises ValueError when the data set cannot be loaded,
    OSError when it cannot be written.
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
            data_set = datasets.load_dataset(str(config.hub), config.hub_config, revision=config.revision)
            splits = {str(name): SPLITS.get(str(name).lower()) for name in data_set}
            if len(splits) == 1:  # a single split of another name is divided by us
                splits = {name: split or "train" for name, split in splits.items()}
            for name, split in splits.items():
                if split is not None:
                    _with_label_names(data_set[name]).to_parquet(str(beside / f"{split}.parquet"))
                    say(f"{split}: {len(data_set[name]):,} rows")
        except Exception as error:  # of a library, a network and other people's files
            if isinstance(error, OSError) and error.errno in FULL:
                raise
            reason = " ".join(str(error).split())[:300]
            raise ValueError(f"{config.hub} cannot be copied from the Hugging Face hub: {reason}") from error
        left = sorted(name for name, split in splits.items() if split is None)
        if left:
            say(f"not copied: {', '.join(left)}, which are no training, validation or test rows")
        if "train" not in splits.values():
            raise ValueError(f"{config.hub} has no training split; it has {', '.join(splits)}")
        os.replace(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _with_label_names(part: "datasets.Dataset") -> "datasets.Dataset":  # type: ignore[name-defined]  # noqa: F821
    import datasets

    names = [name for name, kind in part.features.items() if isinstance(kind, datasets.ClassLabel)]
    for name in names:
        kind = part.features[name]
        labels = [None if label is None or label < 0 else kind.int2str(label) for label in part[name]]
        part = part.remove_columns(name).add_column(name, labels)
    return part
