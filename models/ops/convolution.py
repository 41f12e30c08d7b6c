"""Long convolutions by FFT: causal and two-sided kernels as one circular product, with its own backward pass.

Letters: B sequences, L steps, H features, K directions, M kernel length, n length of the transform, F = n // 2 + 1.
A kernel with K = 2 holds k and r: y[t] = sum_j k[j] u[t-j] + sum_j r[j] u[t+1+j]. The reverse kernel begins at the
next step; only k has a weight for the present (as in the published code of the S4 family).
"""

from typing import Any

import torch
from jaxtyping import Complex, Float
from scipy.fft import next_fast_len
from torch import Tensor

# On a CPU: bytes of one temporary (fastest at L = 1,024), and fewest features at a time (fastest at longer L, because
# neighbours in memory are read together).
_CACHE, _MIN_FEATURES = 1 << 21, 8


def transform_length(length: int, kernel_length: int, two_sided: bool) -> int:
    """The smallest fast length (2^a 3^b 5^c) at which nothing wraps around onto a step that is used."""
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
    """Some features at a time, so that temporaries stay in a CPU's cache; (B, L, H) outside, (B, block, n) inside."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, spectrum: Tensor, n: int) -> Tensor:
        ctx.save_for_backward(u, spectrum)
        ctx.n = n
        y = torch.empty_like(u)
        for part in _blocks(u, n):
            product = _transform(u, part, n, spectrum).mul_(spectrum[part])
            y[..., part] = torch.fft.irfft(product, n=n)[..., : u.shape[1]].mT
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        u, spectrum = ctx.saved_tensors
        n, length = ctx.n, u.shape[1]
        du = torch.empty_like(u) if ctx.needs_input_grad[0] else None
        dspectrum = torch.empty_like(spectrum) if ctx.needs_input_grad[1] else None
        for part in _blocks(u, n):
            transformed = _transform(grad, part, n, spectrum)
            if dspectrum is not None:
                product = _transform(u, part, n, spectrum).conj_physical_().mul_(transformed)
                torch.sum(product, 0, out=dspectrum[part])
            if du is not None:
                product = transformed.mul_(spectrum[part].conj())
                du[..., part] = torch.fft.irfft(product, n=n)[..., :length].mT
        return du, dspectrum, None


def _blocks(u: Tensor, n: int) -> list[slice]:
    """Slices of features."""
    features = u.shape[-1]
    if u.device.type != "cpu":
        return [slice(0, features)]
    size = max(_MIN_FEATURES, _CACHE // (4 * n * len(u)))
    return [slice(first, min(first + size, features)) for first in range(0, features, size)]


def _transform(x: Tensor, part: slice, n: int, like: Tensor) -> Tensor:
    """(B, block, F) of some features of x (B, L, H), in the precision of `like`."""
    return torch.fft.rfft(x[..., part].mT.to(like.real.dtype).contiguous(), n=n)
