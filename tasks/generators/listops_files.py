"""Files of ListOps expressions, read and checked: .tsv and Parquet, as published, with facts about the subtrees."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spt.tasks.base import row_ids
from spt.tasks.files import check_regular, read_batches
from spt.tasks.generators.listops import (
    CLOSE,
    NAMES,
    OPERATORS,
    SPLITS,
    Expressions,
    Malformed,
    Trees,
    Values,
    evaluate,
    joined,
    tokenize,
)

BLOCK = 2**23  # bytes of text in work at once
MAX_LINE = 2**24  # bytes
SUBTREES = {  # of a Parquet file, and of a .tsv
    "subtree_evals": "SubTreeEvals",
    "subtree_lengths": "SubTreeLengths",
    "subtree_heights": "SubTreeHeights",
    "subtree_ops": "SubTreeOps",
    "subtree_inds": "SubTreeInds",
}
PLAIN_HEADER = ("Source", "Target")
SUBTREES_HEADER = (*PLAIN_HEADER, *SUBTREES.values(), "Id")


class Form(NamedTuple):
    """What a data set's files hold."""

    operators: Sequence[str]
    header: Sequence[str] = ()  # of a .tsv file; none: the original files, (value, expression)
    longest: int | None = None  # tokens


def find_set(candidates: Iterable[Sequence[Path]], key: int = 0) -> list[Path]:
    """Those files that exist, of the first candidate whose file number `key` does."""
    return next(([path for path in files if path.exists()] for files in candidates if files[key].exists()), [])


def read_file(path: Path, split: str, form: Form, max_rows: int | None = None) -> Expressions:
    """A .tsv or Parquet file, as one split. Raises ValueError."""
    if path.suffix == ".parquet":
        return collect(parquet(path), split, form, path, max_rows)
    check_regular(path)
    with path.open("rb") as file:
        return collect(tsv(file.readline, str(path), form.header), split, form, path, max_rows)


def read_splits(files: Sequence[Path], form: Form, max_rows: int | None) -> list[Expressions]:
    """A file for each split. Raises FileNotFoundError where one is missing, and ValueError."""
    if len(files) < len(SPLITS):
        raise FileNotFoundError(
            f"beside {files[0]} there is not one file for each of training, validation and test, but "
            f"{' and '.join(path.name for path in files)} alone"
        )
    return [read_file(path, name, form, max_rows) for path, name in zip(files, SPLITS, strict=True)]


def official_sizes(
    parts: Sequence[Expressions], official: tuple[int, ...], whose: str, max_rows: int | None
) -> tuple[str, ...]:
    """A note where there are more or fewer rows than published, unless the rows are limited."""
    sizes = tuple(len(part.ids) for part in parts)
    if max_rows is not None or sizes == official:
        return ()
    ours, published = (" / ".join(f"{size:,}" for size in each) for each in (sizes, official))
    return (f"{ours} rows, where {whose} {published}: not the published data",)


def collect(rows: Iterable["Row"], split: str, form: Form, source: Path, max_rows: int | None = None) -> Expressions:
    """All rows of a file, or the first ones, as one split."""
    codes: list[NDArray[np.uint8]] = []
    values: list[NDArray[np.int8]] = []
    for trees, results in checked(islice(rows, max_rows), form):
        codes += trees.rows()
        values.append(results.values)
    if not codes:
        raise ValueError(f"{source} has no rows")
    whole = Trees.joined(codes)
    return Expressions(whole, joined(values, np.int8), row_ids(split, len(whole.stops)))


class Row(NamedTuple):
    """One expression of a file."""

    where: str
    source: bytes
    target: object  # digit, in any form
    subtrees: dict[str, Any]  # by column, of the subtrees: numbers or names, or their text


def tsv(readline: Callable[[int], bytes], name: str, header: Sequence[str]) -> Iterator[Row]:
    """Rows of a table with tabs and this first line; with no header, of the original files (value, expression).

    `readline` is that of an open file. Raises ValueError.
    """
    if header:
        names = readline(MAX_LINE).rstrip(b"\r\n").decode("utf-8", "replace").split("\t")
        if names != list(header):
            raise ValueError(
                f"{name}: the first line is {' | '.join(names)!r:.80}; {' | '.join(header)} are expected, with tabs"
            )
    columns = list(header) or ["Target", "Source"]
    for number in count(2 if header else 1):
        line = readline(MAX_LINE + 1)
        if not line:
            return
        if len(line) > MAX_LINE:
            raise ValueError(f"{name}, line {number}: it has more than {MAX_LINE:,} bytes; it is no ListOps file")
        fields = line.rstrip(b"\r\n").split(b"\t")
        if len(fields) != len(columns):
            raise ValueError(f"{name}, line {number}: {len(fields)} fields; {len(columns)} are expected, with tabs")
        cells = dict(zip(columns, fields, strict=True))
        subtrees = {key: cells[column] for key, column in SUBTREES.items() if column in cells}
        yield Row(f"{name}, line {number}", cells["Source"], cells["Target"], subtrees)


def parquet(path: Path) -> Iterator[Row]:
    """Rows of a Parquet file with columns source and target, and perhaps those of subtrees. Raises ValueError."""
    numbers = count()
    for _, columns in read_batches([path], [("source",), ("target",)], tuple(SUBTREES), rows=256):
        cells = {name: column.to_pylist() for name, column in columns.items()}
        sources, targets = cells.pop("source"), cells.pop("target")
        for source, target, *subtrees, number in zip(sources, targets, *cells.values(), numbers, strict=False):
            if not isinstance(source, str):
                raise ValueError(f"{path}, row {number}: the source is {source!r:.40}; text is expected")
            facts = dict(zip(cells, subtrees, strict=True))
            yield Row(f"{path}, row {number}", source.encode("utf-8", "replace"), target, facts)


def checked(rows: Iterable[Row], form: Form) -> Iterator[tuple[Trees, Values]]:
    """Trees of a file, some megabytes at a time, with computed values, which all that the file says has to agree with.

    Raises ValueError, which names the row, where they do not, where an operator is none of the form's, or where there
    are more tokens than its longest.
    """
    block: list[Row] = []
    size = 0
    for row in rows:
        block.append(row)
        size += len(row.source)
        if size > BLOCK:
            yield _checked(block, form)
            block, size = [], 0
    if block:
        yield _checked(block, form)


def _checked(block: Sequence[Row], form: Form) -> tuple[Trees, Values]:
    try:
        trees = tokenize([row.source for row in block])
        results = evaluate(trees)
    except Malformed as error:
        raise ValueError(f"{block[error.row].where}: {error.reason}") from None
    foreign = np.flatnonzero(np.isin(trees.codes, [NAMES.index(name) for name in set(OPERATORS) - set(form.operators)]))
    if len(foreign):
        row = block[int(np.searchsorted(trees.stops, foreign[0], side="right"))]
        raise ValueError(f"{row.where}: the operator {NAMES[trees.codes[foreign[0]]]} does not belong to this data set")
    sizes = np.diff(trees.stops, prepend=0)
    if form.longest is not None and (sizes > form.longest).any():
        i = int(np.argmax(sizes > form.longest))
        raise ValueError(f"{block[i].where}: {sizes[i]:,} tokens, more than max_length {form.longest:,}")
    for row, value, start, stop in zip(
        block, results.roots.tolist(), trees.starts.tolist(), trees.stops.tolist(), strict=True
    ):
        label = row.target.decode("utf-8", "replace") if isinstance(row.target, bytes) else row.target
        if str(label) != str(value):
            raise ValueError(f"{row.where}: its label is {label!r:.40}, but the expression's value is {value}")
        if row.subtrees:
            here = slice(start, stop)
            _compare(row, trees.codes[here], results.values[here], results.lengths[here], results.heights[here])
    return trees, results


def _compare(
    row: Row,
    codes: NDArray[np.uint8],
    values: NDArray[np.int8],
    lengths: NDArray[np.int32],
    heights: NDArray[np.int32],
) -> None:
    """Raise ValueError where a file's statements about an expression's subtrees are wrong."""
    closing = np.flatnonzero(codes == CLOSE)
    ours: dict[str, NDArray[Any]] = {
        "subtree_evals": values[closing],
        "subtree_lengths": lengths[closing],
        "subtree_heights": heights[closing],
        "subtree_ops": np.array(NAMES)[codes[closing + 1 - lengths[closing]]],
        "subtree_inds": closing,
    }
    for name, theirs in row.subtrees.items():
        cells = theirs.decode("utf-8", "replace").split() if isinstance(theirs, bytes) else theirs
        expected = ours[name].astype(str).tolist()
        if not isinstance(cells, list) or list(map(str, cells)) != expected:
            raise ValueError(f"{row.where}: {name} are not those of the expression, which has {len(expected)} subtrees")
