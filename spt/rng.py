"""Random numbers addressed by seed and purpose: a draw follows from where it is used, never from earlier draws.

So the batch size, the number of processes, and interruptions change nothing, and a new use disturbs no old one. Whole
batches of rows cost no more than their numbers: a row follows from its key alone, whatever rows are made beside it, and
a shorter row is a prefix of a longer one. Only +, -, *, / and square roots of IEEE 754 are used, which are exactly
rounded, so that every machine, with whatever vector instructions, makes the same bits.

Letters: B rows, L numbers of a row.
"""

import hashlib
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray


def order(n: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order of n examples in one epoch; the same in both arms of a comparison."""
    return generator(seed, "order", epoch).permutation(n)


class Draw(NamedTuple):
    """Counter-based uniforms, addressed by (seed, use, epoch, example, position)."""

    seed: int
    use: str
    epoch: int

    def uniform(self, index: NDArray[np.int64], length: int) -> NDArray[np.float64]:
        """Uniforms in [0, 1), one row for each example in `index`, (B, length).

        Rows do not depend on each other, and a shorter row is a prefix of a longer one.
        """
        return uniforms(keys(self.seed, self.use, self.epoch, rows=index), length)


Reals = TypeVar("Reals", NDArray[np.float32], NDArray[np.float64])
BLOCK = 2**15  # numbers worked on at once: a step's arrays then stay in the cache of a core
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: consecutive multiples spread evenly

# Wichura, Algorithm AS 241 (1988), PPND7: quantiles of N(0, 1) to 1 part in 10^7 as ratios of polynomials, the highest
# power first. Near the middle in 0.180625 - q^2, times q = p - 1/2; beyond |q| = 0.425 in sqrt(-log(1/2 - |q|)) - 1.6.
_MIDDLE = (
    (59.10937472, 159.29113202, 50.434271938, 3.3871327179),
    (67.1875636, 78.757757664, 17.895169469, 1.0),
)

_TAIL = (
    (0.17023821103, 1.3067284816, 2.75681539, 1.4234372777),
    (0.12021132975, 0.7370016425, 1.0),
)

_SERIES = (1 / 11, 1 / 9, 1 / 7, 1 / 5, 1 / 3, 1.0)  # artanh(s) / s in s^2; to 10^-10 where |s| < 0.172
_LN2 = 0.6931471805599453


def keys(seed: int, *address: object, rows: NDArray[np.int64]) -> NDArray[np.uint64]:
    """(B,) keys of the rows with these numbers, one stream for each purpose: keys(0, "noise", "train", rows=rows)."""
    base = np.uint64(stream(seed, *address))
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is meant
        return mixed(base + np.asarray(rows).astype(np.uint64) * GOLDEN)


def uniforms(keys: NDArray[np.uint64], length: int) -> NDArray[np.float64]:
    """(B, L) uniform on [0, 1), multiples of 2^-53."""
    values = np.empty((len(keys), length))
    for rows, columns in _blocks(len(keys), length):
        bits = _bits(keys[rows], columns)
        bits >>= np.uint64(11)
        np.multiply(bits, 2.0**-53, out=values[rows, columns])
    return values


def below(keys: NDArray[np.uint64], length: int, limit: int) -> NDArray[np.int64]:
    """(B, L) whole numbers uniform on [0, limit); for limits up to 2^32 no number is likelier by 1 part in 10^6."""
    return (uniforms(keys, length) * limit).astype(np.int64)


def normals(keys: NDArray[np.uint64], length: int) -> NDArray[np.float32]:
    """(B, L) from N(0, 1), out of 2^32 equally likely numbers (see `quantiles`)."""
    values = np.empty((len(keys), length), np.float32)
    for rows, columns in _blocks(len(keys), length):
        bits = _bits(keys[rows], slice(columns.start // 2, (columns.stop + 1) // 2))
        halves = bits.astype("<u8", copy=False).view("<u4")[:, : columns.stop - columns.start]  # two of a number
        values[rows, columns] = quantiles(halves)
    return values


def exponentials(keys: NDArray[np.uint64], length: int) -> NDArray[np.float64]:
    """(B, L) from the exponential distribution of mean 1, up to 36.7; to 1 part in 10^9."""
    u = uniforms(keys, length)
    np.subtract(1.0, u, out=u)
    return -_log(u)


def quantiles(bits: NDArray[np.uint32]) -> NDArray[np.float32]:
    """The z with P(N(0, 1) < z) = (bits + 1/2) / 2^32, of the same shape, from -6.34 to 6.34; to 1 part in 10^6."""
    shape, bits = bits.shape, np.ascontiguousarray(bits).reshape(-1)
    q = (bits ^ np.uint32(2**31)).view(np.int32).astype(np.float32)
    q += np.float32(0.5)
    q *= np.float32(2.0**-32)
    r = np.float32(0.180625) - q * q
    values = _ratio(r, _MIDDLE)
    values *= q
    outside = np.flatnonzero(r < 0)
    q, tail = q[outside], bits[outside]
    tail = np.minimum(tail, ~tail)  # the smaller of P and 1 - P; float32 would lose it in 1/2 - |q|
    r64 = np.sqrt(-_log((tail.astype(np.float64) + 0.5) * 2.0**-32))
    r64 -= 1.6
    values[outside] = np.copysign(_ratio(r64, _TAIL), q)
    return values.reshape(shape)


def _blocks(rows: int, length: int) -> Iterator[tuple[slice, slice]]:
    """Parts of a (B, L) array of about BLOCK numbers; columns begin at even numbers."""
    down = max(1, BLOCK // max(1, length))
    for i in range(0, rows, down):
        for j in range(0, length, BLOCK):
            yield slice(i, i + down), slice(j, min(j + BLOCK, length))


def _bits(keys: NDArray[np.uint64], columns: slice) -> NDArray[np.uint64]:
    """(B, columns) uniform on all 64-bit numbers: SplitMix64 (Steele, Lea, Flood 2014), each row from its key on."""
    with np.errstate(over="ignore"):
        steps = np.arange(columns.start + 1, columns.stop + 1, dtype=np.uint64) * GOLDEN
        return mixed(keys[:, None] + steps)


def mixed(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser, in place."""
    part = z >> np.uint64(30)
    z ^= part
    z *= np.uint64(0xBF58476D1CE4E5B9)
    np.right_shift(z, np.uint64(27), out=part)
    z ^= part
    z *= np.uint64(0x94D049BB133111EB)
    np.right_shift(z, np.uint64(31), out=part)
    z ^= part
    return z


def _ratio(x: Reals, polynomials: tuple[tuple[float, ...], tuple[float, ...]]) -> Reals:
    above, under = (_polynomial(x, coefficients) for coefficients in polynomials)
    above /= under
    return above


def _polynomial(x: Reals, coefficients: tuple[float, ...]) -> Reals:
    numbers = [x.dtype.type(coefficient) for coefficient in coefficients]
    values = x * numbers[0]
    values += numbers[1]
    for number in numbers[2:]:
        values *= x
        values += number
    return values


def _log(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Natural logarithm of positive, normal numbers, to 10^-9. The system's own differs between machines."""
    bits = x.view(np.int64) - np.int64(0x3FE6A09E667F3BCD)  # less sqrt(1/2): the exponent that leaves x near 1
    exponent = bits >> 52
    near = (x.view(np.int64) - (exponent << 52)).view(np.float64)  # x / 2^exponent, in [sqrt(1/2), sqrt(2))
    s = (near - 1) / (near + 1)
    values = _polynomial(s * s, _SERIES)
    values *= s
    values *= 2
    values += exponent * _LN2
    return values


def stream(seed: int, *address: object) -> int:
    """A 64-bit seed for one purpose, e.g. stream(0, "order", epoch)."""
    text = "/".join(str(part) for part in (seed, *address))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def generator(seed: int, *address: object) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(stream(seed, *address)))
