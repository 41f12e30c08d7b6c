"""The 11 atomic skills of the DLR paper: shift, add up, reverse, sort, select, match, solve.

Eleven sequence-to-sequence regressions of Gupta, Mehta, Berant: "Simplifying and Understanding State Space Models with
Diagonal Linear RNNs" (2022), section 3.1, scored by R² (Table 1). Where the paper and its code differ, `rule` chooses.
An answer is at the last steps of its row; the steps before them have no target (NaN). Answers are computed in float64
from the inputs as stored (float32); in solve the answers are drawn first, and b is rounded. Inputs are given as
published, without further standardisation.

The two position channels that the paper adds to every input, cos and sin of 2 pi i / T, come from the encoder
(`encoder: {positions: circle}`); T is the number of steps in a row, zeros after the data included: 2 L for reverse and
sort, L + 2 M for select and select_fixed, L for the others. The leading pair of context_shift looks alike, but is part
of the stored data.

A row is determined by the seed, its split, its epoch and its number alone. The paper draws a new batch for every step,
in validation too; here the training split is virtual (`train_size` rows per epoch, new ones in every epoch), while
validation and test are fixed, so that scores can be compared. The numbers are not those of the official code.

Letters, the paper's: L `length`, C `shifts`, M `chosen`, D `width`; B rows, T steps in a row, K numbers in an answer,
N unknowns in an equation.
"""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from spt.rng import below, keys, normals
from spt.tasks.base import Reals, Split, TaskConfig, TaskData, Values
from spt.tasks.generators.compiled import is_compiled, jit
from spt.tasks.rows import made_splits, resampled, subsets

INDEXABLE = True
Skill = Literal[
    "shift",
    "cumsum",
    "cummax",
    "reverse",
    "sort",
    "select",
    "select_fixed",
    "mips",
    "context_shift",
    "solve",
    "solve_fixed",
]
OWN = {"shifts": ("shift",), "chosen": ("select", "select_fixed"), "width": ("mips",)}
OWN |= {"rule": ("context_shift", "solve", "solve_fixed"), "fixed_seed": ("select_fixed", "solve_fixed")}


class Config(TaskConfig):
    skill: Skill = Field(
        "shift",
        description="the answer: copies shifted right by 0, L/C, …; the running sum, or maximum; the row backwards; "
        "the row sorted by distance from its first value; marked values (marks drawn for each row, or once); the value "
        "of the key nearest to each query; the row shifted by what its first two values say; the solution of A x = b "
        "(A drawn for each row, or once)",
    )
    length: int = Field(
        512, ge=4, le=2**20, description="L; 512 or 4096 in the paper's Table 1 (shift in Table 2: 256 to 1048576)"
    )
    shifts: int = Field(8, ge=1, le=4096, description="shift: how many shifted copies are asked for (C)")
    chosen: int = Field(32, ge=1, le=2**16, description="select, select_fixed: how many values are chosen (M)")
    width: int = Field(4, ge=1, le=1024, description="mips: size of a query, a key and a value (D)")
    rule: Literal["paper", "code"] = Field(
        "paper",
        description="where the two differ. solve: the largest N with N² + N <= L, so that answers may overlap the "
        "data, or with N² + 2N <= L; context_shift: shifts of 0 to L-2, or 0 to L-3",
    )
    train_size: int = Field(
        14_400,
        ge=1,
        le=2**32,
        description="training rows per epoch; the paper's code says 14,400, but its 4 workers make that 57,600. With "
        "new rows in every epoch this only defines an epoch: set the budget in steps (published: 11,000 at L = 512 "
        "with batches of 64, 40,000 at 4096 with 16)",
    )
    eval_size: int = Field(
        1000, ge=1, le=2**24, description="number of validation rows, and of test rows; the paper does not say how many"
    )
    resample_each_epoch: bool = Field(
        True, description="new training rows in every epoch, as published; or the same ones again"
    )
    seed: int = Field(0, ge=0, description="seed of all rows")
    fixed_seed: int = Field(0, ge=0, description="seed of select_fixed's positions, or of solve_fixed's matrix")

    def smoke_sizes(self) -> dict[str, int]:
        return {"length": 64}

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        for name, skills in OWN.items():
            given, default = getattr(self, name), type(self).model_fields[name].default
            if given != default and self.skill not in skills:
                raise ValueError(f"{name}: {given} is for {' and '.join(skills)}; the skill is {self.skill}")
        if self.skill == "shift" and self.shifts > self.length:
            raise ValueError(f"{self.shifts} shifts of a row of {self.length} steps; give at most as many as steps")
        return self

    @property
    def unknowns(self) -> int:
        """N of solve."""
        if self.rule == "code":
            return math.isqrt(self.length + 1) - 1
        return (math.isqrt(4 * self.length + 1) - 1) // 2

    @property
    def shape(self) -> "Shape":
        L = self.length
        match self.skill:
            case "shift":
                return Shape(L, 1, L, self.shifts)
            case "reverse" | "sort":
                return Shape(2 * L, 1, L, 1)
            case "select" | "select_fixed":
                return Shape(L + 2 * self.chosen, 2, self.chosen, 1)
            case "mips":
                return Shape(L, 3 * self.width, L, self.width)
            case "solve" | "solve_fixed":
                return Shape(L, 1, self.unknowns, 1)
        return Shape(L, 1, L, 1)


class Shape(NamedTuple):
    steps: int  # T
    channels: int
    asked: int  # steps that have a target: the last ones
    size: int  # K


Key = Callable[[str], NDArray[np.uint64]]  # the rows' keys for one purpose
Made = tuple[NDArray[np.float32], NDArray[np.float32]]  # inputs (B, T, channels) and answers (B, asked, K)


# ------------------------------------------------------------------------------------------------------ hooks


def load(config: Config, raw: Path) -> TaskData:
    shape = config.shape
    train, val, test = made_splits(config, make, config.train_size, config.eval_size, config.skill)
    return TaskData(Values(shape.channels), Reals(shape.size, per_step=True), train, val, test)


def resample(config: Config, ids: NDArray[np.int64], epoch: int) -> Split:
    return resampled(config, make, config.train_size, ids, epoch)


def make(config: Config, split: str, rows: NDArray[np.int64], epoch: int = 0) -> Made:
    """Inputs (B, T, channels) and targets (B, T, K) of the rows with these numbers, float32; NaN: no target.

    `split` is train, val or test.
    """

    def key(purpose: str) -> NDArray[np.uint64]:
        return keys(config.seed, "skills", config.skill, purpose, split, epoch, rows=rows)

    inputs, answers = MAKERS[config.skill](config, key)
    steps, _, asked, size = config.shape
    if asked == steps:
        return inputs, answers
    targets = np.full((len(rows), steps, size), np.nan, np.float32)
    targets[:, steps - asked :] = answers
    return inputs, targets


# ----------------------------------------------------------------------------------------------------- skills


def _normalised(key: NDArray[np.uint64], length: int) -> NDArray[np.float32]:
    """(B, length) from N(0, 1), divided by the row's largest absolute value."""
    x = normals(key, length)
    x /= np.maximum(x.max(axis=1), -x.min(axis=1))[:, None]
    return x


def _padded(x: NDArray[np.float32], steps: int) -> NDArray[np.float32]:
    """(B, L) -> (B, steps, 1), zeros at the end."""
    padded = np.zeros((len(x), steps, 1), np.float32)
    padded[:, : x.shape[1], 0] = x
    return padded


def _shift(config: Config, key: Key) -> Made:
    """y[i, j] = x[i - j L / C] (whole part), 0 before the start."""
    x, L = _normalised(key("x"), config.length), config.length
    y = np.zeros((len(x), L, config.shifts), np.float32)
    for j in range(config.shifts):
        by = j * L // config.shifts
        y[:, by:, j] = x[:, : L - by]
    return x[..., None], y


def _cumsum(config: Config, key: Key) -> Made:
    """y[i] = (x[0] + … + x[i]) / sqrt(i + 1)."""
    x = _normalised(key("x"), config.length)
    sums = np.cumsum(x, axis=1, dtype=np.float64)
    sums /= np.sqrt(np.arange(1, config.length + 1))
    return x[..., None], sums.astype(np.float32)[..., None]


def _cummax(config: Config, key: Key) -> Made:
    """y[i] = max(x[0], …, x[i])."""
    x = _normalised(key("x"), config.length)
    return x[..., None], np.maximum.accumulate(x, axis=1)[..., None]


def _reverse(config: Config, key: Key) -> Made:
    """y[i] = x[L - 1 - i]."""
    x = _normalised(key("x"), config.length)
    return _padded(x, 2 * config.length), x[:, ::-1, None]


def _sort(config: Config, key: Key) -> Made:
    """x in the order of |x[i] - x[0]|, equal distances in the order of their places; so y[0] = x[0]."""
    x = _normalised(key("x"), config.length)
    distances = np.abs(x.astype(np.float64) - x[:, :1])
    order = np.argsort(distances, axis=1)  # not stable, but several times as fast
    ranked = np.take_along_axis(distances, order, axis=1)
    tied = (ranked[:, 1:] == ranked[:, :-1]).any(axis=1)  # few rows: two values as far from x[0] to the last bit
    if tied.any():
        order[tied] = np.argsort(distances[tied], axis=1, kind="stable")
    return _padded(x, 2 * config.length), np.take_along_axis(x, order, axis=1)[..., None]


def _select(config: Config, key: Key) -> Made:
    """Of L + M values the M marked ones, in order; M zeros behind them. Channels: value, mark."""
    total, M = config.length + config.chosen, config.chosen
    x = _normalised(key("x"), total)
    if config.skill == "select_fixed":
        once = keys(config.fixed_seed, "skills", "select_fixed", "positions", rows=np.zeros(1, np.int64))
        places = np.broadcast_to(subsets(once, M, total), (len(x), M))
    else:
        places = subsets(key("positions"), M, total)
    inputs = np.zeros((len(x), total + M, 2), np.float32)
    inputs[:, :total, 0] = x
    np.put_along_axis(inputs[..., 1], places, np.float32(1), axis=1)
    return inputs, np.take_along_axis(x, places, axis=1)[..., None]


def _mips(config: Config, key: Key) -> Made:
    """y[i] = v[j], j <= i the first with the largest q[i] · k[j]; q, k, v (L, D) have rows of norm 1, joined to one."""
    L, D = config.length, config.width
    x = normals(key("x"), L * 3 * D).reshape(-1, L, 3, D)
    x /= np.sqrt((x * x).sum(axis=3, keepdims=True))
    keys_found = nearest(x[:, :, 0], x[:, :, 1])
    return x.reshape(-1, L, 3 * D), np.take_along_axis(x[:, :, 2], keys_found[..., None], axis=1)


def nearest(q: NDArray[np.float32], k: NDArray[np.float32]) -> NDArray[np.int64]:
    """(B, L) the first j <= i with the largest q[i] · k[j] in float64, summed from the left; (B, L, D) of norm 1 each.

    Searches keys near the query where numba is installed, else computes all products, block by block, with the same
    result.
    """
    q, k = np.ascontiguousarray(q, np.float64), np.ascontiguousarray(k, np.float64)
    indices = np.zeros(q.shape[:2], np.int64)
    if is_compiled():
        _compiled_search()(q, k, _cells(q.shape[1]), indices)
    else:
        for row in range(len(q)):
            _compare(q[row], k[row], indices[row])
    return indices


def _cells(length: int) -> int:
    """Boxes along a side of [-1, 1]^4: fastest where a box on the sphere holds about 10 of `length` keys (measured)."""
    return max(2, min(32, round((length / 32) ** (1 / 3))))


@functools.cache
def _compiled_search() -> Callable[..., None]:
    return jit(search)


def search(q: NDArray[np.float64], k: NDArray[np.float64], cells: int, found: NDArray[np.int64]) -> None:
    """Fill `found` (B, L), as `nearest` says, by keys in boxes of width h = 2 / cells of their first four numbers.

    Vectors of norm 1 at a distance r have the product 1 - r²/2. So boxes farther than the best key so far are left out,
    and keys outside the boxes around the query's own, which are at least h away, are tried (with all others) only when
    no key inside is nearer than h.
    """
    B, L, D = q.shape
    margin = 1e-5  # norms are 1 to the precision of float32
    width = 2.0 / cells
    bound = 1.0 - width * width / 2 + margin
    sides = np.ones(4, np.int64)
    sides[:D] = cells
    head = np.empty((sides[0], sides[1], sides[2], sides[3]), np.int32)  # the newest key of each box
    before = np.empty(L, np.int32)  # the key before each key, in its box
    at, of = np.zeros(4, np.int64), np.zeros(4, np.int64)
    near = np.zeros((4, 3), np.int64)  # for each number: the query's own box, the one below, the one above
    gap = np.zeros((4, 3))  # and their least squared distances from the query; infinite where there is no box
    for b in range(B):
        head[:] = -1
        for i in range(L):
            for d in range(4):
                if d < D:
                    at[d] = min(max(int((k[b, i, d] + 1.0) / width), 0), cells - 1)
                    of[d] = min(max(int((q[b, i, d] + 1.0) / width), 0), cells - 1)
                    inside = q[b, i, d] + 1.0 - of[d] * width
                    near[d, 0], near[d, 1], near[d, 2] = of[d], max(of[d] - 1, 0), min(of[d] + 1, cells - 1)
                    gap[d, 1] = inside * inside if of[d] > 0 else np.inf
                    gap[d, 2] = (width - inside) * (width - inside) if of[d] < cells - 1 else np.inf
                else:
                    gap[d, 1] = gap[d, 2] = np.inf
            before[i] = head[at[0], at[1], at[2], at[3]]
            head[at[0], at[1], at[2], at[3]] = i
            best, chosen = -2.0, 0
            reach = np.inf  # the squared distance beyond which no box is looked into
            for n0 in range(3):
                g0 = gap[0, n0]
                if g0 >= reach:
                    continue
                for n1 in range(3):
                    g1 = g0 + gap[1, n1]
                    if g1 >= reach:
                        continue
                    for n2 in range(3):
                        g2 = g1 + gap[2, n2]
                        if g2 >= reach:
                            continue
                        for n3 in range(3):
                            if g2 + gap[3, n3] >= reach:
                                continue
                            j = head[near[0, n0], near[1, n1], near[2, n2], near[3, n3]]
                            while j >= 0:
                                product = q[b, i, 0] * k[b, j, 0]
                                for d in range(1, D):
                                    product += q[b, i, d] * k[b, j, d]
                                if product > best or (product == best and j < chosen):
                                    best, chosen = product, j
                                    reach = 2.0 * (1.0 + margin - best)
                                j = before[j]
            if best <= bound:
                best, chosen = -2.0, 0
                for j in range(i + 1):
                    product = q[b, i, 0] * k[b, j, 0]
                    for d in range(1, D):
                        product += q[b, i, d] * k[b, j, d]
                    if product > best:
                        best, chosen = product, j
            found[b, i] = chosen


def _compare(q: NDArray[np.float64], k: NDArray[np.float64], found: NDArray[np.int64]) -> None:
    """Fill `found` (L,), as `nearest` says, from products of some queries with all keys before them."""
    L, D = q.shape
    block = max(1, 2**15 // L)  # queries at once: products then stay in the cache
    products, part = np.empty((2, block, L))
    later = np.triu(np.ones((block, block), np.bool_), 1)
    columns = np.ascontiguousarray(k.T)
    for first in range(0, L, block):
        last = min(first + block, L)
        n = last - first
        total, term = products[:n, :last], part[:n, :last]
        np.multiply(q[first:last, :1], columns[0, :last], out=total)
        for d in range(1, D):
            np.multiply(q[first:last, d : d + 1], columns[d, :last], out=term)
            total += term
        total[:, first:][later[:n, :n]] = -np.inf
        found[first:last] = total.argmax(axis=1)


def _context_shift(config: Config, key: Key) -> Made:
    """The row (cos 2 pi s / L, sin 2 pi s / L, x) shifted right by s, zeros first."""
    L = config.length
    s = below(key("s"), 1, L - 1 if config.rule == "paper" else L - 2)
    row = np.empty((len(s), L), np.float32)
    angle = s * (2 * np.pi / L)
    row[:, :1], row[:, 1:2] = np.cos(angle), np.sin(angle)
    row[:, 2:] = _normalised(key("x"), L - 2)
    y = np.take_along_axis(np.concatenate([np.zeros_like(row), row], axis=1), np.arange(L, 2 * L) - s, axis=1)
    return row[..., None], y[..., None]


def _solve(config: Config, key: Key) -> Made:
    """(a_1, b_1, …, a_N, b_N, 0 …), a_i the rows of an orthonormal A and b = A X; asked for is X, of norm 1."""
    N = config.unknowns
    X = normals(key("X"), N).astype(np.float64)
    X /= np.sqrt((X * X).sum(axis=1, keepdims=True))
    A = _fixed_matrix(config.fixed_seed, N) if config.skill == "solve_fixed" else orthonormal(key("A"), N)
    rows = np.empty((len(X), N, N + 1), np.float32)
    rows[..., :N], rows[..., N] = A, (A * X[:, None]).sum(axis=2)
    return _padded(rows.reshape(len(X), -1), config.length), X.astype(np.float32)[..., None]


def orthonormal(key: NDArray[np.uint64], n: int) -> NDArray[np.float64]:
    """(B, n, n) orthonormal matrices from Haar's measure.

    The Q of a Gaussian matrix whose R has a positive diagonal; it has the same distribution as the matrix's polar
    factor, which the official code uses, and costs less.
    """
    q, r = np.linalg.qr(normals(key, n * n).reshape(-1, n, n).astype(np.float64))
    return q * np.where(np.diagonal(r, axis1=1, axis2=2) < 0, -1.0, 1.0)[:, None]


@functools.lru_cache(maxsize=4)
def _fixed_matrix(seed: int, n: int) -> NDArray[np.float64]:
    return orthonormal(keys(seed, "skills", "solve_fixed", "A", rows=np.zeros(1, np.int64)), n)


MAKERS: dict[str, Callable[[Config, Key], Made]] = {
    "shift": _shift,
    "cumsum": _cumsum,
    "cummax": _cummax,
    "reverse": _reverse,
    "sort": _sort,
    "select": _select,
    "select_fixed": _select,
    "mips": _mips,
    "context_shift": _context_shift,
    "solve": _solve,
    "solve_fixed": _solve,
}
