"""Rows that a program, such as an estimator, hands over, prepared in a folder of their own. Not for written recipes.

The folder holds what the cache of prepared data would; it is opened in place and not copied. There may be no test rows:
whoever hands rows over keeps those.
"""

from pathlib import Path

from pydantic import Field

from spt.tasks.base import TaskConfig, TaskData


class Config(TaskConfig):
    path: Path = Field(description="the folder of the prepared rows")


def prepared(config: Config) -> Path:
    if not (config.path / "data.json").is_file():
        raise ValueError(f"the rows that were handed over are not in {config.path} any more; fit the estimator again")
    return config.path


def load(config: Config, raw: Path) -> TaskData:
    raise NotImplementedError("its rows are prepared already")
