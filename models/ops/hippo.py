"""HiPPO-LegS and the initial state matrices derived from it.

Gu et al. 2020 (HiPPO), Gu et al. 2022 (S4, appendix C.1; S4D, section 4), Gupta et al. 2022 (DSS), Smith et al. 2023
(S5, section 4.3). Everything is computed once, in float64 on the CPU, when a model is built.

Letters: N state size, A (N, N) state matrix, B (N,) input vector, P (N,) its rank-1 correction, w eigenvalues, V
eigenvectors, n a mode. Models with conjugate pairs store the N/2 modes of negative imaginary part.
"""

import math
from typing import Literal, NamedTuple

import torch
from jaxtyping import Complex128, Float64
from torch import Tensor

DiagonalInit = Literal["legs", "lin", "inv", "quad", "real", "random"]


class NPLR(NamedTuple):
    """HiPPO-LegS in the eigenbasis of its normal part, one mode of each conjugate pair (S4, theorem 1)."""

    w: Complex128[Tensor, " pairs"]  # eigenvalues, from the most negative imaginary part upwards
    P: Complex128[Tensor, " pairs"]
    B: Complex128[Tensor, " pairs"]
    V: Complex128[Tensor, "N pairs"]


def legs(N: int) -> tuple[Float64[Tensor, "N N"], Float64[Tensor, " N"]]:
    """A and B of HiPPO-LegS (HiPPO, theorem 2): x' = A x + B u."""
    n = torch.arange(N, dtype=torch.float64)
    B = torch.sqrt(2 * n + 1)
    return -torch.tril(B[:, None] * B, -1) - torch.diag(n + 1), B


def legs_rank_correction(N: int) -> Float64[Tensor, " N"]:
    """P for which A + P P^T is normal: minus one half plus a skew-symmetric matrix (S4, appendix C.1)."""
    return torch.sqrt(torch.arange(N, dtype=torch.float64) + 0.5)


def normal_part(N: int) -> tuple[Complex128[Tensor, " N"], Complex128[Tensor, "N N"]]:
    """Eigenvalues w, ascending in imaginary part, and orthonormal eigenvectors V (columns) of A + P P^T.

    The real parts are exactly -1/2; the imaginary parts come from `eigh` of the skew part, which is stable, unlike a
    general eigensolver. An eigenvector is defined up to its phase: here its first entry is real and positive.
    """
    A, _ = legs(N)
    P = legs_rank_correction(N)
    normal = A + P[:, None] * P
    skew = (normal - normal.T) / 2
    imag, V = torch.linalg.eigh(-1j * skew)
    first = V[0]
    return torch.complex(torch.full_like(imag, -0.5), imag), V * (first.conj() / first.abs())


def nplr(N: int, clip: float | None = 2.0) -> NPLR:
    """One mode of each conjugate pair; N even. `clip` bounds the imaginary part of B, as in the published S4.

    With the bound, the size of B depends on the phases of the eigenvectors. Ours are those of LAPACK up to a sign,
    which flips B, P and the states together, so this equals the published initialisation.
    """
    B, P = legs(N)[1], legs_rank_correction(N)
    w, V = normal_part(N)
    w, V = w[: N // 2], V[:, : N // 2]
    b, p = V.mH @ B.to(V.dtype), V.mH @ P.to(V.dtype)
    if clip is not None:
        b = torch.complex(b.real, b.imag.clamp(-clip, clip))
    return NPLR(w, p, b, V)


def diagonal(
    kind: DiagonalInit, N: int, copies: int = 1
) -> tuple[Complex128[Tensor, "S M"], Complex128[Tensor, "S M"]]:
    """Initial A and B of S4D (section 4 of its paper), N/2 modes with imaginary part <= 0, for S copies.

    The copies are equal, except for `random`, which draws each from torch's generator.
    """
    n = torch.arange(N // 2, dtype=torch.float64)
    real, B = torch.full_like(n, 0.5), torch.ones(N // 2, dtype=torch.complex128)
    if kind == "legs":
        half = nplr(N)
        A, B = half.w, half.B
    elif kind == "real":
        A = torch.complex(-(n + 1), torch.zeros_like(n))
    elif kind == "random":
        imag = torch.exp(torch.randn(copies, N // 2, dtype=torch.float64))
        return torch.complex(-real.expand_as(imag), -imag), B.repeat(copies, 1)
    else:
        imag = {
            "lin": math.pi * n,
            "inv": N / math.pi * (N / (2 * n + 1) - 1),
            "quad": (1 + 2 * n) ** 2 / math.pi,
        }[kind]
        A = torch.complex(-real, -imag)
    return A.repeat(copies, 1), B.repeat(copies, 1)
