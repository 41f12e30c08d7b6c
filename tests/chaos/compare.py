"""Are two folders of runs the same? Weights, courses, scores, predictions and reports; not what a clock says."""

import json
import math
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

MOVING = {"environment", "created", "command", "pid", "host", "time"}
CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # sums of two processes' losses and gradients round in another order
PAGES = (".html", ".md", ".tex")
DATE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}")
EMBEDDED = re.compile(r"data:text/plain;base64,[\w+/=]*")  # the report's CSV files, which are compared themselves


def differences(
    whole: Path, runs: Path, *, exact: bool = True, without: Collection[str] = (), reports: bool = True
) -> list[str]:
    """What is not the same, one line each; `without` files or folders, by their names in the folder of runs; `reports`:
    hold them too."""
    spared = tuple(without), tuple(f"{name}/" for name in without)
    ours, theirs = (
        {name for name in _files(root) if name not in spared[0] and not name.startswith(spared[1])}
        for root in (runs, whole)
    )
    lines = [f"{name} is missing" for name in sorted(theirs - ours)]
    lines += [f"{name} should not be there" for name in sorted(ours - theirs)]
    for name in sorted(ours & theirs):
        if reports or _of_a_run(name):
            try:
                problem = _difference(whole / name, runs / name, exact)
            except Exception as error:
                problem = f"cannot be read ({type(error).__name__}: {error})"
            if problem:
                lines.append(f"{name}: {problem}")
    return lines


def _of_a_run(name: str) -> bool:
    return name.startswith(("pretrain-", "finetune-"))


def _files(root: Path) -> Iterator[str]:
    for path in root.rglob("*"):
        name = path.relative_to(root).as_posix()
        logs = name.startswith(".locks/") or "/workers/" in name or "/workers" in name
        if not logs and (path.is_file() or path.name.endswith(".tmp")):
            yield name


def _difference(one: Path, two: Path, exact: bool) -> str:
    if one.suffix == ".json":
        return _unlike(still(json.loads(one.read_text())), still(json.loads(two.read_text())), exact)
    if one.suffix == ".jsonl":
        rows = [[json.loads(line) for line in path.read_text().splitlines()] for path in (one, two)]
        return _unlike(rows[0], rows[1], exact)
    if exact:
        same = _content(one) == _content(two)
        return "" if same else "another content"
    return _unlike(_arrays(one), _arrays(two), exact) if one.suffix in (".safetensors", ".parquet", ".npy") else ""


def _content(path: Path) -> bytes | str:
    if path.suffix not in (*PAGES, ".csv", ".yaml"):
        return path.read_bytes()
    return EMBEDDED.sub("CSV", DATE.sub("DATE", path.read_text()))


def still(value: Any) -> Any:
    """Without what a clock, a place or the way of running says."""
    if isinstance(value, dict):
        return {key: still(inner) for key, inner in value.items() if key not in MOVING}
    return [still(inner) for inner in value] if isinstance(value, list) else value


def _arrays(path: Path) -> dict[str, Any]:
    if path.suffix == ".npy":
        return {"rows": np.load(path).tolist()}
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        return dict(pq.read_table(path).to_pydict())
    from safetensors.numpy import load_file

    return {name: array.tolist() for name, array in load_file(path).items()}


def _unlike(one: Any, two: Any, exact: bool, place: str = "") -> str:
    """Where two values differ first, as text; nothing if they do not."""
    if isinstance(one, dict) and isinstance(two, dict):
        if one.keys() != two.keys():
            return f"{place or 'it'} has other keys: {', '.join(map(str, sorted(one.keys() ^ two.keys())[:4]))}"
        inner = [(f"{place}.{key}".lstrip("."), one[key], two[key]) for key in one]
    elif isinstance(one, list) and isinstance(two, list):
        if len(one) != len(two):
            return f"{place or 'it'} has {len(two)} entries in place of {len(one)}"
        inner = [(f"{place}[{i}]", a, b) for i, (a, b) in enumerate(zip(one, two, strict=True))]
    else:
        numbers = isinstance(one, int | float) and isinstance(two, int | float) and not exact
        near = numbers and math.isclose(one, two, rel_tol=CLOSE["rtol"], abs_tol=CLOSE["atol"])
        return "" if near or one == two else f"{place or 'it'} is {str(two)[:60]} in place of {str(one)[:60]}"
    return next((problem for name, a, b in inner if (problem := _unlike(a, b, exact, name))), "")
