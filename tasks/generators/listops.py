"""ListOps expressions: the law of their trees, their values, their text form.

Law (the generator of the Long Range Arena, after Nangia & Bowman 2018): a node above the last level is an operator with
probability 1/4, else, and always on the last level, a digit, uniform on 0 to 9. An operator is uniform on MIN, MAX, MED
and SM, its number of arguments uniform on 2 … max_args; the root is on level 1. A tree is kept when
min_tokens < tokens < max_tokens; parentheses are no tokens.

Value: least, greatest, median (of an even number of arguments the mean of the middle two, rounded down), sum modulo 10;
also FIRST and LAST, which one file of the original data has.

A tree is written as its tokens in order, here as codes: 0 to 9 digits, CLOSE for `]`, from OPEN on operators in the
order of OPERATORS. Letters: n expressions, T tokens of all of them together.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from spt.rng import GOLDEN, mixed, stream
from spt.tasks.base import row_ids
from spt.tasks.generators.compiled import is_compiled, jit
from spt.tasks.parallel import allocate, map_chunks

SPLITS = ("train", "val", "test")
CLOSE, OPEN = 10, 11
OPERATORS = ("[MIN", "[MAX", "[MED", "[SM", "[FIRST", "[LAST")
MIN, MAX, MED, SM, FIRST = range(OPEN, OPEN + 5)
NAMES = (*"0123456789", "]", *OPERATORS)  # of the codes
DRAWN = 4  # operators that are drawn

CHUNK = 128  # trees a worker makes at a time
PATIENCE = 10**6  # draws for one tree; with the published limits 12, 69 and 257 are usual
STALE = 100  # repeated trees for each new one, after which there are too few


class Law(NamedTuple):
    """Which trees are drawn, and which of them are kept."""

    min_tokens: int  # exclusive
    max_tokens: int  # exclusive
    max_depth: int  # levels, the last of which has digits only
    max_args: int

    def check(self) -> None:
        """Raise ValueError where no tree can be kept."""
        longest = 1
        for _ in range(self.max_depth - 1):
            longest = 2 + self.max_args * longest
            if longest > self.min_tokens:
                break
        if self.max_tokens - self.min_tokens < 2:
            raise ValueError(f"no length lies between min_tokens {self.min_tokens} and max_tokens {self.max_tokens}")
        if longest <= self.min_tokens:
            raise ValueError(
                f"trees of {self.max_depth} levels with {self.max_args} arguments have at most {longest} tokens, never "
                f"more than min_tokens {self.min_tokens}; raise max_depth or max_args"
            )


class Trees(NamedTuple):
    """Expressions end to end: tree i is codes[stops[i - 1] : stops[i]]."""

    codes: NDArray[np.uint8]  # (T,)
    stops: NDArray[np.int64]  # (n,)

    @property
    def starts(self) -> NDArray[np.int64]:
        return np.concatenate([np.zeros(1, np.int64), self.stops])[:-1]

    def rows(self) -> list[NDArray[np.uint8]]:
        return np.split(self.codes, self.stops[:-1])

    @staticmethod
    def joined(rows: list[NDArray[np.uint8]]) -> "Trees":
        """The list is emptied, so that the rows are not held twice."""
        stops = np.cumsum([len(row) for row in rows], dtype=np.int64)
        return Trees(joined(rows, np.uint8), stops)


def joined(rows: list[NDArray[Any]], dtype: DTypeLike) -> NDArray[Any]:
    """The rows end to end; the list is emptied, so that they are not held twice."""
    whole = allocate((sum(map(len, rows)),), dtype)
    rows.reverse()
    place = 0
    while rows:
        row = rows.pop()
        whole[place : place + len(row)] = row
        place += len(row)
    return whole


class Values(NamedTuple):
    """Values of trees. The arrays of length T are of the subtree that closes at a token, where one does."""

    roots: NDArray[np.int8]  # (n,)
    values: NDArray[np.int8]  # (T,) -1 at every token but a closing bracket
    lengths: NDArray[np.int32]  # (T,) tokens of the subtree; 0 elsewhere
    heights: NDArray[np.int32]  # (T,) a digit has 0, an operator 1 more than its highest argument; 0 elsewhere
    arguments: NDArray[np.int32]  # (T,) how many the operator has; 0 elsewhere


class Expressions(NamedTuple):
    """Trees with the values of their subtrees and with names, of one split."""

    trees: Trees
    values: NDArray[np.int8]  # (T,) as in `Values`
    ids: NDArray[Any]  # (n,)

    @property
    def labels(self) -> NDArray[np.int64]:
        """(n,) Values of the trees, from those of their subtrees."""
        last = self.trees.stops - 1
        ends = self.trees.codes[last].astype(np.int64)
        return np.where(ends == CLOSE, self.values[last], ends)

    def take(self, rows: NDArray[np.int64]) -> "Expressions":
        trees, values = self.trees.rows(), np.split(self.values, self.trees.stops[:-1])
        chosen = rows.tolist()
        return Expressions(
            Trees.joined([trees[row] for row in chosen]),
            np.concatenate([values[row] for row in chosen]),
            self.ids[rows],
        )


class Malformed(ValueError):
    """The first row that is no expression, and why."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(f"expression {row}: {reason}")
        self.row, self.reason = row, reason


# ------------------------------------------------------------------------------------------------------ drawing


def distinct(seed: int, law: Law, n: int, *, templates: bool, what: str) -> Iterator[NDArray[np.uint8]]:
    """n different trees, (length,) codes each, the first ones of an endless sequence that no worker count changes.

    With `templates`, two that differ in digits alone count as one. Raises ValueError when trees of this law are too
    rare, or too few.
    """
    law.check()
    seen: set[bytes] = set()
    first = stale = 0
    numbers = stream(seed, "trees", what)
    while len(seen) < n:
        count = n - len(seen)
        make = partial(draw, numbers, law, first)
        for trees in map_chunks(make, count, CHUNK, what, by="threads" if is_compiled() else "processes"):
            for row in trees.rows():
                key = blake2b((row[row >= CLOSE] if templates else row).tobytes(), digest_size=16).digest()
                if key in seen:
                    stale += 1
                    continue
                seen.add(key)
                yield row
        first += count
        if stale > STALE * (len(seen) + 100):
            raise ValueError(
                f"only {len(seen):,} different trees among {first:,} drawn, but {n:,} are asked for; widen the limits, "
                "or ask for fewer rows"
            )


def deal(sizes: Sequence[int], max_rows: int | None) -> NDArray[np.int64]:
    """The split of each tree of the sequence: each split in turn, until it has its size.

    So max_rows of every split are the first rows of a load without it.
    """
    counts = np.array(sizes) if max_rows is None else np.minimum(sizes, max_rows)
    return np.nonzero(counts[None, :] > np.arange(counts.max())[:, None])[1]


def generate(
    seed: int, law: Law, sizes: Sequence[int], max_rows: int | None, *, templates: bool, what: str
) -> list[Expressions]:
    """Training, validation and test rows, of these sizes, without a common tree (or template)."""
    owners = deal(sizes, max_rows)
    rows: list[list[NDArray[np.uint8]]] = [[] for _ in sizes]
    trees = distinct(seed, law, len(owners), templates=templates, what=what)
    for owner, row in zip(owners.tolist(), trees, strict=True):
        rows[owner].append(row)
    splits = zip(SPLITS, map(Trees.joined, rows), strict=True)
    return [Expressions(trees, values(trees, what), row_ids(name, len(trees.stops))) for name, trees in splits]


def draw(seed: int, law: Law, begin: int, first: int, last: int) -> Trees:
    """Trees first … last - 1 of the sequence from tree `begin` on, repeated ones among them.

    Each has random numbers of its own. Raises ValueError when trees of this law are too rare.
    """
    count = last - first
    codes, stops = np.empty(count * (law.max_tokens - 1), np.uint8), np.empty(count, np.int64)
    if not _draw(_states(seed, begin + first, begin + last), *law, PATIENCE, codes, stops):
        raise ValueError(
            f"no tree of more than {law.min_tokens} and fewer than {law.max_tokens} tokens among {PATIENCE:,} drawn; "
            "widen min_tokens and max_tokens"
        )
    return Trees(codes[: stops[-1]].copy(), stops)


def _states(seed: int, first: int, last: int) -> NDArray[np.int64]:
    """(last - first, 4) Numbers of 32 bits, by SplitMix64 (Steele, Lea & Flood 2014) at places of their own."""
    z = mixed(np.arange(2 * first + 1, 2 * last + 1, dtype=np.uint64) * GOLDEN + np.uint64(seed))
    halves = np.stack([z >> np.uint64(32), z & np.uint64(0xFFFFFFFF)], 1)
    return halves.astype(np.int64).reshape(-1, 4)


@jit
def _next(x: int, y: int, z: int, w: int) -> tuple[int, int, int, int]:
    """Xorshift128 (Marsaglia 2003): the next state, whose last number is the next 32 random bits."""
    t = x ^ (x << 11) & 0xFFFFFFFF
    return y, z, w, w ^ (w >> 19) ^ t ^ (t >> 8)


@jit
def _draw(
    states: NDArray[np.int64],
    min_tokens: int,
    max_tokens: int,
    max_depth: int,
    max_args: int,
    patience: int,
    codes: NDArray[np.uint8],
    stops: NDArray[np.int64],
) -> bool:
    """Fill codes and stops with one tree for each state; False when one takes more than `patience` draws.

    Whether a tree is kept depends on its shape alone, so shapes are drawn first and given up as soon as they are sure
    to be too long; operators and digits, which are independent of the shape, are drawn for the kept ones.
    """
    left = [0] * max_depth  # arguments still to come, of the open operators
    shape = [0] * max_tokens
    place = 0
    for row in range(len(states)):
        x, y, z, w = int(states[row, 0]), int(states[row, 1]), int(states[row, 2]), int(states[row, 3])
        size = 0
        for _ in range(patience):
            size, depth, least = 0, 0, 1  # least: tokens that the tree will have at least
            while True:
                x, y, z, w = _next(x, y, z, w)
                if depth + 1 < max_depth and w & 3 == 0:
                    arguments = 2 + ((w >> 2) * (max_args - 1) >> 30)
                    least += 1 + arguments
                    if least >= max_tokens:
                        size = 0
                        break
                    shape[size] = OPEN
                    left[depth] = arguments
                    size += 1
                    depth += 1
                    continue
                shape[size] = 0
                size += 1
                while depth > 0:
                    left[depth - 1] -= 1
                    if left[depth - 1] > 0:
                        break
                    shape[size] = CLOSE
                    size += 1
                    depth -= 1
                if depth == 0:
                    break
            if size > min_tokens:
                break
        if size <= min_tokens:
            return False
        for i in range(size):
            kind = shape[i]
            if kind != CLOSE:
                x, y, z, w = _next(x, y, z, w)
                kind = w * 10 >> 32 if kind == 0 else OPEN + (w >> 30)
            codes[place + i] = kind
        place += size
        stops[row] = place
    return True


# ------------------------------------------------------------------------------------------------------ values


FAULTS = (
    "it is empty",
    "it has more closing brackets than operators",
    "it lacks a closing bracket",
    "it goes on after its end",
    "an operator has no argument",
)


def evaluate(trees: Trees) -> Values:
    """Values of the trees and of all their subtrees. Raises Malformed."""
    n, total = len(trees.stops), len(trees.codes)
    numbers = np.zeros((3, total), np.int32)
    result = Values(np.empty(n, np.int8), np.full(total, -1, np.int8), *numbers)
    row, fault = _evaluate(trees.codes, trees.starts, trees.stops, *result)
    if fault >= 0:
        raise Malformed(row, FAULTS[fault])
    return result


def values(trees: Trees, what: str) -> NDArray[np.int8]:
    """(T,) Value of each subtree at its closing bracket, -1 elsewhere. By several workers."""
    n = len(trees.stops)
    result = allocate(trees.codes.shape, np.int8)
    place = 0
    for part in map_chunks(partial(_values, trees), n, CHUNK, f"{what}: values"):
        result[place : place + len(part)] = part
        place += len(part)
    return result


def _values(trees: Trees, first: int, last: int) -> NDArray[np.int8]:
    begin = int(trees.stops[first - 1]) if first else 0
    return evaluate(Trees(trees.codes[begin : trees.stops[last - 1]], trees.stops[first:last] - begin)).values


@jit
def _evaluate(
    codes: NDArray[np.uint8],
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
    roots: NDArray[np.int8],
    values: NDArray[np.int8],
    lengths: NDArray[np.int32],
    heights: NDArray[np.int32],
    arguments: NDArray[np.int32],
) -> tuple[int, int]:
    """Row and number of the first fault, or (-1, -1). Of an open operator the arguments are kept as counts of 0 … 9."""
    deepest = 0
    for row in range(len(starts)):
        depth = 0
        for i in range(starts[row], stops[row]):
            code = int(codes[i])
            if code > CLOSE:
                depth += 1
                deepest = max(deepest, depth)
            elif code == CLOSE:
                depth -= 1
                if depth < 0:
                    return row, 1
        if depth > 0:
            return row, 2
    counts = [0] * (10 * (deepest + 1))
    begun, kinds, highest = [0] * (deepest + 1), [0] * (deepest + 1), [0] * (deepest + 1)
    firsts, lasts, given = [0] * (deepest + 1), [0] * (deepest + 1), [0] * (deepest + 1)
    for row in range(len(starts)):
        depth, root = 0, -1
        for i in range(starts[row], stops[row]):
            code = int(codes[i])
            if root >= 0:
                return row, 3
            if code > CLOSE:
                depth += 1
                begun[depth], kinds[depth], highest[depth], given[depth] = i, code, 0, 0
                for digit in range(10):
                    counts[10 * depth + digit] = 0
                continue
            value, height = code, 0
            if code == CLOSE:
                number, kind = given[depth], kinds[depth]
                if number == 0:
                    return row, 4
                if kind == FIRST:
                    value = firsts[depth]
                elif kind > FIRST:
                    value = lasts[depth]
                else:
                    value = _reduced(counts, 10 * depth, number, kind)
                height = highest[depth] + 1
                values[i], lengths[i], heights[i], arguments[i] = value, i + 1 - begun[depth], height, number
                depth -= 1
            if depth == 0:
                root = value
                continue
            if given[depth] == 0:
                firsts[depth] = value
            lasts[depth] = value
            given[depth] += 1
            counts[10 * depth + value] += 1
            highest[depth] = max(highest[depth], height)
        if root < 0:
            return row, 0
        roots[row] = root
    return -1, -1


@jit
def _reduced(counts: list[int], at: int, number: int, kind: int) -> int:
    """Least, greatest, median or sum of `number` digits, of which counts[at + d] are d."""
    if kind == SM:
        total = 0
        for digit in range(10):
            total += digit * counts[at + digit]
        return total % 10
    low, high = 0, 0  # the two that are averaged, by rank
    if kind == MAX:
        low = high = number - 1
    elif kind == MED:
        low, high = (number - 1) // 2, number // 2
    passed, lower = 0, -1
    for digit in range(10):
        passed += counts[at + digit]
        if lower < 0 and passed > low:
            lower = digit
        if passed > high:
            return (lower + digit) // 2
    return 0


# ------------------------------------------------------------------------------------------------------- text


def text(codes: NDArray[np.uint8]) -> str:
    """An expression's tokens, parted by blanks."""
    return " ".join(NAMES[code] for code in codes)


def tokenize(sources: Sequence[bytes]) -> Trees:
    """Codes of expressions written with single tokens parted by blanks; parentheses are left out. Raises Malformed."""
    whole = b"\n".join(sources) + b"\n"
    if whole.count(b"\n") != len(sources):
        raise Malformed(next(i for i, source in enumerate(sources) if b"\n" in source), "it has several lines")
    known = not any(code in whole for code in range(OPEN, len(NAMES)))  # bytes that stand for operators from here on
    for code, name in enumerate(OPERATORS, OPEN):
        whole = whole.replace(name.encode(), bytes([code]))
    data = np.frombuffer(whole, np.uint8)
    codes = _CODES[data]
    inside = codes != _GAP
    if not known or (codes == _UNKNOWN).any() or (inside[1:] & inside[:-1]).any():  # tokens of one byte each
        words = ((i, word) for i, source in enumerate(sources) for word in source.split(b" "))
        row, strange = next((i, word.decode("utf-8", "replace")) for i, word in words if word not in _WORDS)
        raise Malformed(row, f"{strange!r:.40} is no token of ListOps")
    kept = codes < len(NAMES)
    return Trees(codes[kept], np.cumsum(kept)[data == ord("\n")])


_UNKNOWN, _PARENTHESIS, _GAP = 255, 254, 253
_CODES = np.full(256, _UNKNOWN, np.uint8)
_CODES[list(b"0123456789]")] = np.arange(OPEN)
_CODES[OPEN : len(NAMES)] = np.arange(OPEN, len(NAMES))
_CODES[list(b"()")] = _PARENTHESIS
_CODES[list(b" \n")] = _GAP
_WORDS = {b"", b"(", b")", *(name.encode() for name in NAMES)}


def tokens(specials: int, operators: Sequence[str]) -> NDArray[np.uint8]:
    """Token of each code, after `specials` others: the commonest first, equally common ones by name.

    That is how the published loaders number what they read: a bracket is twice as common as each digit, and each digit
    (of trees with up to ten arguments) twice as common as each operator. `]` is called X there.
    """
    order = [CLOSE, *range(10), *sorted((NAMES.index(name) for name in operators), key=NAMES.__getitem__)]
    table = np.zeros(len(NAMES), np.uint8)
    table[order] = np.arange(specials, specials + len(order))
    return table


def read_back(found: NDArray[Any], table: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Codes of tokens that `tokens` numbered so."""
    back = np.zeros(int(table.max()) + 1, np.uint8)
    back[table] = np.arange(len(table))
    return back[found]


def nesting(trees: Trees) -> NDArray[np.int64]:
    """(T,) Operators that are open after each token."""
    opened = (trees.codes > CLOSE).astype(np.int64) - (trees.codes == CLOSE)
    depth = np.cumsum(opened)
    before = np.concatenate([np.zeros(1, np.int64), depth])[trees.starts]
    return depth - np.repeat(before, trees.stops - trees.starts)


def operator_names(codes: NDArray[np.uint8]) -> NDArray[Any]:
    """MIN, MAX … of operators; `digit` of digits, nothing of a bracket."""
    names = [b"digit"] * CLOSE + [b""] + [name[1:].encode() for name in OPERATORS]
    return np.array(names)[codes]
