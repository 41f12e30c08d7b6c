"""The operations that `spt bench op` measures: inputs, the formula as written, and the way models compute it.

The formula is plain PyTorch, differentiated by autograd. In double precision it is what errors are measured against,
in single precision the row `plain`. Letters: B sequences, L steps or positions, M kernel length, H features, N modes
(one of each conjugate pair, where they come in pairs), K directions, P states or pairs, A attention heads, E width of a
head, w steps of a chunk.
"""

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Sizes = Mapping[str, int]
Inputs = tuple[Tensor, ...]


class Operation(NamedTuple):
    """Its functions take the sizes and the inputs."""

    summary: str
    sizes: dict[str, int]
    small: dict[str, int]  # of --quick
    inputs: Callable[[Sizes], Inputs]  # from torch's generator
    plain: Callable[[Sizes, Inputs], Tensor]
    ours: Callable[[Sizes, Inputs], Tensor]
    libraries: tuple[str, ...] = ()  # besides torch, what can compute it


def _uniform(low: float, high: float, *shape: int) -> Tensor:
    return low + (high - low) * torch.rand(shape)


def _complex(*shape: int) -> Tensor:
    return torch.view_as_complex(torch.randn(*shape, 2))


def _convolution_inputs(s: Sizes) -> Inputs:
    decay = torch.exp(-torch.arange(s["M"]) / s["M"])
    return torch.randn(s["B"], s["L"], s["H"]), torch.randn(s["K"], s["H"], s["M"]) * decay / math.sqrt(s["M"])


def _convolution_plain(s: Sizes, inputs: Inputs) -> Tensor:
    u, kernel = inputs
    n = u.shape[1] + kernel.shape[2]
    circular = F.pad(kernel[0], (0, n - kernel.shape[2]))
    if len(kernel) == 2:
        circular = circular + F.pad(kernel[1].flip(-1), (n - kernel.shape[2], 0))
    product = torch.fft.rfft(u.mT, n=n) * torch.fft.rfft(circular)
    return torch.fft.irfft(product, n=n)[..., : u.shape[1]].mT


def _convolution(s: Sizes, inputs: Inputs) -> Tensor:
    from spt.models.ops.convolution import convolve, spectrum, transform_length

    u, kernel = inputs
    n = transform_length(u.shape[1], kernel.shape[2], len(kernel) == 2)
    return convolve(u, spectrum(kernel, n), n)


def _modes(s: Sizes, *shape: int) -> Inputs:
    alpha, theta = -_uniform(1e-4, 0.1, *shape), _uniform(0.0, 2 * math.pi, *shape)
    return torch.randn(s["K"], s["H"], s["N"], 2) / s["N"], alpha, theta


def _vandermonde_plain(s: Sizes, inputs: Inputs) -> Tensor:
    W, alpha, theta = inputs
    powers = torch.exp(torch.complex(alpha, theta)[..., None] * torch.arange(s["L"], device=W.device))
    modes = "nl" if alpha.ndim == 1 else "hnl"
    return torch.einsum(f"khn,{modes}->khl", torch.view_as_complex(W), powers).real


def _vandermonde(s: Sizes, inputs: Inputs) -> Tensor:
    from spt.models.ops.vandermonde import vandermonde

    W, alpha, theta = inputs
    return vandermonde(W, alpha, theta, s["L"])


def _dplr_inputs(s: Sizes) -> Inputs:
    from spt.models.ops.hippo import nplr

    start = nplr(2 * s["N"])
    dt = torch.exp(_uniform(math.log(1e-3), math.log(0.1), s["H"]))
    A, P, B = (x.to(torch.complex64).repeat(s["H"], 1) for x in (start.w, start.P, start.B))
    return dt, A, P, B, _complex(s["K"], s["H"], s["N"])


def _dplr_plain(s: Sizes, inputs: Inputs) -> Tensor:
    """The recurrence x_l = Abar x_(l-1) over all 2N modes, Abar by the bilinear rule."""
    dt, *halves = inputs
    A, P, B, C = (torch.cat([x, x.conj()], dim=-1) for x in halves)
    half = dt[:, None, None] / 2 * (torch.diag_embed(A) - P[..., :, None] * P.conj()[..., None, :])
    identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    step = torch.linalg.solve(identity - half, identity + half)
    x = torch.linalg.solve(identity - half, dt[:, None] * B)
    kernel = []
    for _ in range(s["L"]):
        kernel.append((C * x).sum(-1).real)
        x = (step @ x[..., None])[..., 0]
    return torch.stack(kernel, dim=-1)


def _dplr(algorithm: Literal["krylov", "cauchy"]) -> Callable[[Sizes, Inputs], Tensor]:
    def kernel(s: Sizes, inputs: Inputs) -> Tensor:
        from spt.models.ops.dplr import StateSpace, dplr_kernel

        dt, *modes = inputs
        continuous = StateSpace(dt.double(), *(x.to(torch.complex128) for x in modes))  # as in S4
        return dplr_kernel(continuous, s["L"], dt.dtype, algorithm)

    return kernel


def _scan_inputs(s: Sizes, *steps: int) -> Inputs:
    radius, angle = torch.exp(-_uniform(1e-3, 0.1, *steps, s["P"])), _uniform(0.0, math.pi, *steps, s["P"])
    return torch.polar(radius, angle), _complex(s["B"], s["L"], s["P"])


def _scan_plain(s: Sizes, inputs: Inputs) -> Tensor:
    from spt.models.ops.scan import sequential

    a, b = inputs
    return sequential(a, b)


def _scan(s: Sizes, inputs: Inputs) -> Tensor:
    from spt.models.ops.scan import scan

    a, b = inputs
    return scan(a.to(torch.complex128) if a.ndim == 1 else a, b)  # as S5 and LRU give a fixed coefficient


def _attention_inputs(s: Sizes) -> Inputs:
    q, k, v = torch.randn(3, s["B"], s["A"], s["L"], s["E"]).unbind()
    return q, k, v


def _attention_plain(s: Sizes, inputs: Inputs) -> Tensor:
    q, k, v = inputs
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), dim=-1) @ v


def _attention(s: Sizes, inputs: Inputs) -> Tensor:
    q, k, v = inputs
    from spt.models.ops.attention import attend

    return attend(q, k, v)


def _local_attention_plain(s: Sizes, inputs: Inputs) -> Tensor:
    """All chunks padded and unfolded, and one mask for missing neighbours, as in the SPT repository."""
    w, L = s["w"], s["L"]
    count = -(-L // w)
    q, k, v = (F.pad(x, (0, 0, 0, count * w - L)).flatten(0, 1).unflatten(1, (count, w)) for x in inputs)

    def around(x: Tensor, filler: int) -> Tensor:
        padded = F.pad(x, (*(0, 0) * (x.ndim - 2), 1, 1), value=filler)
        return torch.cat([padded[:, i : i + count] for i in range(3)], dim=2)

    step = torch.arange(count * w, device=q.device)
    known = around(step.where(step < L, -1).view(1, count, w), -1) >= 0
    mask = known[:, :, None].expand(-1, -1, w, -1).contiguous()
    y = F.scaled_dot_product_attention(q, around(k, 0), around(v, 0), attn_mask=mask)
    return y.flatten(1, 2)[:, :L].unflatten(0, (s["B"], s["A"]))


def _local_attention(s: Sizes, inputs: Inputs) -> Tensor:
    from spt.models.ops.attention import local_attend

    q, k, v = inputs
    return local_attend(q, k, v, s["w"])


def _rotary_inputs(s: Sizes) -> Inputs:
    return (torch.randn(s["B"], s["A"], s["L"], 2 * s["P"]),)


@cache
def _table(length: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    from spt.models.ops.attention import rotary_table

    return rotary_table(length, width, dtype=dtype).to(device)


@cache
def _turns(length: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    cos, sin = _table(length, width, dtype, device).unbind(-1)
    return torch.stack([cos, -sin, sin, cos], dim=-1).unflatten(-1, (2, 2))


def _rotary_plain(s: Sizes, inputs: Inputs) -> Tensor:
    """A 2x2 matrix for each step and pair, as in the DLR and SPT repositories."""
    (x,) = inputs
    turns = _turns(s["L"], 2 * s["P"], x.dtype, x.device)
    return torch.einsum("...rc,...c->...r", turns, x.unflatten(-1, (-1, 2))).flatten(-2)


def _rotary(s: Sizes, inputs: Inputs) -> Tensor:
    from spt.models.ops.attention import rotate

    (x,) = inputs
    return rotate(x, _table(s["L"], 2 * s["P"], x.dtype, x.device))


OPERATIONS: dict[str, Operation] = {
    "convolution": Operation(
        "two-sided long convolution by FFT (K=1: causal)",
        {"B": 8, "L": 1024, "M": 1024, "H": 128, "K": 2},
        {"B": 2, "L": 33, "M": 20, "H": 3, "K": 2},
        _convolution_inputs,
        _convolution_plain,
        _convolution,
    ),
    "vandermonde": Operation(
        "kernel of a diagonal model with separate modes for each feature (S4D, DSS)",
        {"K": 2, "H": 128, "N": 32, "L": 1024},
        {"K": 2, "H": 3, "N": 4, "L": 33},
        lambda s: _modes(s, s["H"], s["N"]),
        _vandermonde_plain,
        _vandermonde,
        libraries=("triton", "keops"),
    ),
    "vandermonde_shared": Operation(
        "kernel of a diagonal model whose features share their modes (DLR)",
        {"K": 2, "H": 128, "N": 256, "L": 1024},
        {"K": 2, "H": 3, "N": 4, "L": 33},
        lambda s: _modes(s, s["N"]),
        _vandermonde_plain,
        _vandermonde,
        libraries=("triton", "keops"),
    ),
    "dplr_krylov": Operation(
        "kernel of S4 in the time domain, by doubling",
        {"K": 2, "H": 64, "N": 32, "L": 1024},
        {"K": 2, "H": 3, "N": 4, "L": 33},
        _dplr_inputs,
        _dplr_plain,
        _dplr("krylov"),
    ),
    "dplr_cauchy": Operation(
        "kernel of S4 from Cauchy sums at the roots of unity",
        {"K": 2, "H": 64, "N": 32, "L": 1024},
        {"K": 2, "H": 3, "N": 4, "L": 33},
        _dplr_inputs,
        _dplr_plain,
        _dplr("cauchy"),
        libraries=("triton", "keops"),
    ),
    "scan": Operation(
        "diagonal recurrence with fixed coefficients (S5, LRU)",
        {"B": 4, "L": 1024, "P": 64},
        {"B": 2, "L": 33, "P": 3},
        _scan_inputs,
        _scan_plain,
        _scan,
        libraries=("triton",),
    ),
    "scan_varying": Operation(
        "diagonal recurrence with coefficients that vary by step (S5 on irregular samples)",
        {"B": 4, "L": 1024, "P": 64},
        {"B": 2, "L": 33, "P": 3},
        lambda s: _scan_inputs(s, s["B"], s["L"]),
        _scan_plain,
        _scan,
        libraries=("triton",),
    ),
    "attention": Operation(
        "softmax attention",
        {"B": 4, "A": 4, "L": 1024, "E": 16},
        {"B": 2, "A": 2, "L": 33, "E": 4},
        _attention_inputs,
        _attention_plain,
        _attention,
    ),
    "local_attention": Operation(
        "softmax attention of chunks to themselves and both neighbours",
        {"B": 1, "A": 4, "L": 4096, "w": 512, "E": 32},
        {"B": 2, "A": 2, "L": 33, "w": 8, "E": 4},
        _attention_inputs,
        _local_attention_plain,
        _local_attention,
    ),
    "rotary": Operation(
        "rotary positions (P pairs a head)",
        {"B": 8, "A": 4, "L": 1024, "P": 8},
        {"B": 2, "A": 2, "L": 33, "P": 2},
        _rotary_inputs,
        _rotary_plain,
        _rotary,
    ),
}
