"""Long convolutions by FFT: causal and two-sided kernels as one circular product, with its own backward pass.

Letters: B sequences, L steps, H features, K directions, M kernel length, n length of the transform, F = n // 2 + 1.
A kernel with K = 2 holds k and r: y[t] = sum_j k[j] u[t-j] + sum_j r[j] u[t+1+j]. The reverse kernel begins at the
next step; only k has a weight for the present (as in the published code of the S4 family).
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Complex, Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

# On a CPU: bytes of one temporary (fastest at L = 1,024), and fewest features at a time (fastest at longer L, because
# neighbours in memory are read together). Sequences of at most so many steps, and at least so many numbers, are
# transformed one by one.
_CACHE, _MIN_FEATURES = 1 << 21, 8
_LONG, _SMALL = 8192, 1 << 16


@functools.cache
def transform_length(length: int, kernel_length: int, two_sided: bool) -> int:
    """The smallest fast length (2^a 3^b 5^c) at which nothing wraps around onto a step that is used."""
    from scipy.fft import next_fast_len  # in the function: a quarter of a second to import

    return int(next_fast_len(max(1, length + kernel_length - (0 if two_sided else 1)), real=True))


def spectrum(kernel: Float[Tensor, "K H M"], n: int) -> Complex[Tensor, "H F"]:
    """Transform of the circular kernel of length n: k at the front, r reversed at the end (r[j] at n - 1 - j).

    Its gradient, which only `convolve` computes, is the spectrum of the kernel's gradient; torch's own convention would
    cost a full complex transform. Computed in the kernel's type, float32 or float64.
    """
    transform: Tensor = _Spectrum.apply(kernel, n)
    return transform


def convolve(u: Float[Tensor, "B L H"], spectrum: Complex[Tensor, "H F"], n: int) -> Float[Tensor, "B L H"]:
    """The first L steps of the circular convolution, computed in the spectrum's precision, as u's type.

    Only u and the spectrum are kept for the backward pass, which transforms u again.
    """
    y: Tensor = _Convolve.apply(u, spectrum, n)
    return y


def short_convolve(
    u: Float[Tensor, "B L P"], weight: Float[Tensor, "W P"], *, reverse: bool = False
) -> Float[Tensor, "B L P"]:
    """y_t = sum_j w_j u_{t-j}, feature by feature, over few steps; `reverse`: of u_{t+j}. What stands before the first
    step, or beyond the last, is zero. Only u and the weights are kept for the backward pass."""
    y: Tensor = _ShortConvolve.apply(u.to(torch.promote_types(u.dtype, weight.dtype)), weight, reverse)
    return y


class _ShortConvolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor, weight: Tensor, reverse: bool) -> Tensor:
        ctx.save_for_backward(u, weight)
        ctx.reverse = reverse
        y = u * weight[0]
        for lag, into, source in _shifts(u, weight, reverse):
            y[:, into].addcmul_(u[:, source], weight[lag])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        u, weight = ctx.saved_tensors
        du, dweight = dy * weight[0], torch.zeros_like(weight)
        dweight[0] = (dy * u).sum((0, 1))
        for lag, into, source in _shifts(u, weight, ctx.reverse):
            du[:, source].addcmul_(dy[:, into], weight[lag])
            dweight[lag] = (dy[:, into] * u[:, source]).sum((0, 1))
        return du, dweight, None


def _shifts(u: Tensor, weight: Tensor, reverse: bool) -> Iterator[tuple[int, slice, slice]]:
    """Each lag after the first, with the steps that read and those that are read."""
    L = u.shape[1]
    for lag in range(1, min(len(weight), L)):
        late, early = slice(lag, L), slice(0, L - lag)
        yield (lag, early, late) if reverse else (lag, late, early)


class _Spectrum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: Tensor, n: int) -> Tensor:
        directions, features, length = kernel.shape
        ctx.shape, ctx.n = kernel.shape, n
        circular = kernel.new_zeros(features, n)
        circular[:, :length] = kernel[0]
        if directions == 2:
            circular[:, n - length :] += kernel[1].flip(-1)
        return torch.fft.rfft(circular)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        directions, _, length = ctx.shape
        circular = torch.fft.irfft(grad, n=ctx.n)
        parts = [circular[:, :length]]
        if directions == 2:
            parts.append(circular[:, ctx.n - length :].flip(-1))
        return torch.stack(parts), None


class _Convolve(torch.autograd.Function):
    """(B, L, H) outside. On a CPU block by block of (features, steps), so that temporaries stay in its cache."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, spectrum: Tensor, n: int) -> Tensor:
        ctx.save_for_backward(u, spectrum)
        ctx.n = n
        if _at_once(u):
            return _back(_transform(u, spectrum, n).mul_(spectrum), u, n)
        y = torch.empty_like(u)
        for block in _blocks(u, spectrum, n):
            rows = block.load(u)
            for part in block.parts:
                product = torch.fft.rfft(rows[..., part, :], n=n).mul_(spectrum[block.features][part])
                rows[..., part, :] = torch.fft.irfft(product, n=n)[..., : u.shape[1]]
            block.store(rows, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        u, spectrum = ctx.saved_tensors
        n, length = ctx.n, u.shape[1]
        if _at_once(u):
            return *_backward_at_once(u, spectrum, grad, n, ctx.needs_input_grad[:2]), None
        du = torch.empty_like(u) if ctx.needs_input_grad[0] else None
        dspectrum = torch.zeros_like(spectrum) if ctx.needs_input_grad[1] else None
        for block in _blocks(u, spectrum, n):
            rows = block.load(grad)
            inputs = None if dspectrum is None else block.load(u)
            for part in block.parts:
                transformed = torch.fft.rfft(rows[..., part, :], n=n)
                if inputs is not None and dspectrum is not None:
                    product = torch.fft.rfft(inputs[..., part, :], n=n).conj_physical_().mul_(transformed)
                    dspectrum[block.features][part] += product if product.ndim == 2 else product.sum(0)
                if du is not None:
                    product = transformed.mul_(spectrum[block.features][part].conj())
                    rows[..., part, :] = torch.fft.irfft(product, n=n)[..., :length]
            if du is not None:
                block.store(rows, du)
        return du, dspectrum, None


def _at_once(u: Tensor) -> bool:
    """Not on a CPU; and in an exported program, whose sizes are open."""
    return u.device.type != "cpu" or torch.compiler.is_exporting()


def _transform(x: Float[Tensor, "B L H"], spectrum: Complex[Tensor, "H F"], n: int) -> Complex[Tensor, "B H F"]:
    return torch.fft.rfft(pad(x.to(spectrum.real.dtype).mT, (0, n - x.shape[1])))


def _back(transformed: Complex[Tensor, "B H F"], like: Float[Tensor, "B L H"], n: int) -> Float[Tensor, "B L H"]:
    y = torch.fft.irfft(transformed, n=n)[..., : like.shape[1]].mT
    return y.to(like.dtype, memory_format=torch.contiguous_format, copy=True)


def _backward_at_once(
    u: Tensor, spectrum: Tensor, grad: Tensor, n: int, needed: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    du = dspectrum = None
    transformed = _transform(grad, spectrum, n)
    if needed[1]:
        dspectrum = _transform(u, spectrum, n).conj_physical_().mul_(transformed).sum(0)
    if needed[0]:
        du = _back(transformed.mul_(spectrum.conj()), u, n)
    return du, dspectrum


class _Block(NamedTuple):
    """Sequences and features whose steps are brought together in memory for the transforms, done part by part."""

    sequences: slice | int
    features: slice
    parts: list[slice]  # of the features
    dtype: torch.dtype

    def load(self, x: Float[Tensor, "B L H"]) -> Float[Tensor, "*b h L"]:
        rows = x[self.sequences, :, self.features].to(self.dtype).mT
        return rows.clone(memory_format=torch.contiguous_format)

    def store(self, rows: Float[Tensor, "*b h L"], x: Float[Tensor, "B L H"]) -> None:
        x[self.sequences, :, self.features] = rows.mT


def _blocks(u: Tensor, spectrum: Tensor, n: int) -> list[_Block]:
    """Few features of all sequences at a time; or one whole sequence, which torch transposes twice as fast, if it is
    large enough to be worth a block and small enough for the cache."""
    sequences, length, features = u.shape
    dtype, everything = spectrum.real.dtype, slice(None)
    if length <= _LONG and _SMALL <= length * features:
        parts = _slices(features, _CACHE // (8 * n))
        return [_Block(sequence, everything, parts, dtype) for sequence in range(sequences)]
    slices = _slices(features, _CACHE // (4 * n * sequences))
    return [_Block(everything, part, [everything], dtype) for part in slices]


def _slices(features: int, size: int) -> list[slice]:
    size = max(_MIN_FEATURES, size)
    return [slice(first, min(first + size, features)) for first in range(0, features, size)]
