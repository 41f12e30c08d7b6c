"""`baseline-KEY/result.json`: a finished baseline, an answer to a task without a network.

The folder is named by what is computed, as a run's is, and holds job.json (what the key is the hash of), status.json,
predictions.parquet and, written last, result.json.
"""

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from spt.errors import OutputError
from spt.runs.files import check_regular
from spt.runs.folder import RunFolder
from spt.runs.index import Failure
from spt.runs.plan import Factor
from spt.runs.result import Amount, Count, SplitRecord, check_scores, read_problem

SCHEMA = 1  # of a baseline's result.json; raised when a field changes its meaning
PREFIX = "baseline-"


class BaselineResult(BaseModel):
    """Everything a report needs of one finished baseline."""

    model_config = ConfigDict(frozen=True)

    format: int = SCHEMA
    kind: Literal["baseline"] = "baseline"
    key: str
    baseline: str  # its name, as studies have it
    title: str  # and in a report
    version: int
    task: str
    seed: int | None = None  # None: no chance is in it, so that it stands for every seed
    smoke: bool = False
    metric: str  # what is compared, and chooses settings on validation
    higher_is_better: bool
    val: dict[str, float]
    test: dict[str, float]  # scored once, after the choice
    sees: str  # its features, in words
    settings: dict[str, Factor] = {}  # chosen on validation
    tried: Count = 1  # settings that were tried there
    fitted: Count  # training rows, or steps of them, that it was fitted to
    seconds: Amount
    data: dict[str, SplitRecord]  # as in the results of runs
    notes: tuple[str, ...] = ()
    environment: dict[str, Any]  # versions

    @model_validator(mode="after")
    def _scores_are_possible(self) -> "BaselineResult":
        for scores in (self.val, self.test):
            check_scores(scores)
        return self


def read_baseline(root: Path, name: str) -> BaselineResult | None:
    """The result, if the baseline is done. Raises OutputError where it cannot be read."""
    path = root / name / "result.json"
    if not os.path.exists(path):
        return None
    check_regular(path)
    try:
        result = BaselineResult.model_validate_json(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise OutputError(
            f"{path} cannot be read as a baseline's result ({read_problem(error)}); move the folder away to make it "
            "again"
        ) from error
    if result.format != SCHEMA:
        raise OutputError(f"{path} has format {result.format} of another version of spt, not {SCHEMA}")
    if name != f"{PREFIX}{result.key}":
        raise OutputError(f"{path} is the result of another baseline, {PREFIX}{result.key}; move the folder away")
    return result


def baseline_outcome(root: Path, name: str) -> BaselineResult | Failure:
    """A baseline's result, or why there is none."""
    try:
        if (result := read_baseline(root, name)) is not None:
            return result
    except OutputError as error:
        return Failure(run=name, state="unreadable", reason=str(error))
    status = RunFolder(root, name).status() or {}
    state, code = status.get("state"), status.get("exit_code")
    if state not in ("running", "failed", "stopped"):
        return Failure(run=name, state="missing", reason="not made yet")
    without = "started, not finished" if state == "running" else "no reason was recorded"
    reason = str(status.get("reason") or without)
    return Failure(run=name, state=state, reason=reason, exit_code=code if isinstance(code, int) else None)
