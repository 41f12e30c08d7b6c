"""Kernels of S4: the state matrix is diagonal plus low rank (DPLR), discretised by the bilinear rule.

Gu et al. 2022 (S4, sections 3 and C.3). The state matrix is diag(A) - P P* over conjugate pairs of modes, of which one
is stored; <a, b> = 2 Re sum_n a_n b_n. The discretised system is again diagonal plus rank one:

    x_t = F x_{t-1} - g <r, x_{t-1}> + B u_t,    y_t = <C, x_t>,    kernel[l] = <C, Abar^l B>

Two algorithms give the kernel. `krylov` works in the time domain and uses C itself instead of the published code's C~,
which depends on a length. `cauchy` is the published one (S4, algorithm 1): sums at the roots of unity and an inverse
transform; it checks the other, and is what Triton and KeOps compute.

Letters: H features, N state size, M = N / 2 stored modes, K directions, L kernel length, S copies of (A, P, B) that the
features take in turn (feature h the copy h mod S).
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Complex, Complex128, Float, Float64
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from spt.models.ops import backends
from spt.models.ops.counts import Counts
from spt.models.ops.discretise import Transform, as_complex, positive
from spt.models.ops.hippo import nplr
from spt.models.ops.precision import without_autocast

Algorithm = Literal["krylov", "cauchy"]

_SMALL = 32  # steps with a table of powers; fastest for N = 64 at L = 1024 to 65536
_CACHE = 1 << 21  # numbers in the tables of one block of features on a CPU; the fastest


class StateSpace(NamedTuple):
    """In continuous time, in double precision: x' = (A - P P*) x + B u, y = <C, x>, and the step dt of each feature."""

    dt: Float64[Tensor, " H"]
    A: Complex128[Tensor, "H M"]
    P: Complex128[Tensor, "H M"]
    B: Complex128[Tensor, "H M"]
    C: Complex128[Tensor, "K H M"]


def state_space(parameters: Mapping[str, Tensor], transform: Transform, rate: float = 1.0) -> StateSpace:
    """From parameters as in the S4 repository, with steps `rate` times as large: inv_dt (H, 1); A_real, A_imag (S, M);
    P, B (S, M, 2); C (K, H, M, 2). A = -exp(A_real) - i A_imag."""
    dt = rate * positive(parameters["inv_dt"][:, 0].double(), transform)
    A = torch.complex(-parameters["A_real"].double().exp(), -parameters["A_imag"].double())
    shared = (A, as_complex(parameters["P"]), as_complex(parameters["B"]))
    A, P, B = (x.repeat(len(dt) // len(x), 1) for x in shared)
    return StateSpace(dt, A, P, B, as_complex(parameters["C"]))


def legs_parameters(N: int, H: int, K: int, S: int) -> dict[str, Tensor]:
    """The initial parameters of S4 but for its steps: copies of HiPPO-LegS, with the imaginary part of B clipped at
    2 as in the S4 repository, and C ~ CN(0, 1)."""
    legs = nplr(N)
    C = torch.randn(K, H, N // 2, dtype=torch.complex64)  # E|C|² = 1
    return {
        "A_real": (-legs.w.real).log().repeat(S, 1),
        "A_imag": (-legs.w.imag).repeat(S, 1),
        "P": torch.view_as_real(legs.P).repeat(S, 1, 1),
        "B": torch.view_as_real(legs.B).repeat(S, 1, 1),
        "C": torch.view_as_real(C),
    }


class System(NamedTuple):
    """The discretised system: x_t = F x - g <r, x> + B u, y = <C, x_t>."""

    F: Complex[Tensor, "H M"]
    g: Complex[Tensor, "H M"]
    r: Complex[Tensor, "H M"]
    B: Complex[Tensor, "H M"]
    C: Complex[Tensor, "K H M"]


def discretise(continuous: StateSpace) -> System:
    """Bilinear rule with step dt; the inverse of a diagonal plus rank-one matrix is written out (Woodbury).

    With d = 1 / (1 - dt/2 A): Abar = 2 (1 - dt/2 (A - P P*))^-1 - 1 and Bbar = dt (1 - dt/2 (A - P P*))^-1 B.
    """
    dt, A, P, B, C = continuous
    step = dt[:, None]
    d = 1 / (1 - step / 2 * A)
    g, r = d * P, d * P.conj()
    c = step / (1 + step * (P.conj() * g).real.sum(-1, keepdim=True))
    return System((1 + step / 2 * A) * d, c * g, r, step * d * B - c * g * step * (r * B).real.sum(-1, keepdim=True), C)


def dplr_step(
    system: System, state: Complex[Tensor, "B H M"], u: Float[Tensor, "B H"]
) -> tuple[Float[Tensor, "B H"], Complex[Tensor, "B H M"]]:
    """One step of a causal system in O(N) per feature: y and the next state."""
    low_rank = 2 * (system.r * state).real.sum(-1, keepdim=True)
    state = system.F * state - system.g * low_rank + system.B * u[..., None]
    return 2 * (system.C[0] * state).real.sum(-1), state


def truncated(system: System, length: int) -> Complex128[Tensor, "K H M"]:
    """C~ = C (1 - Abar^length), which the published code trains (S4, section C.3)."""
    rows, matrix = _complement(system, length)
    return _from_rows(rows @ matrix)


def _complement(system: System, length: int) -> tuple[Float64[Tensor, "H K N"], Float64[Tensor, "H N N"]]:
    """C and 1 - Abar^length in real coordinates: columns (Re x, Im x), rows (Re C, -Im C)."""
    F, g, r = system.F, system.g, 2 * system.r
    real, imag = torch.diag_embed(F.real), torch.diag_embed(F.imag)
    matrix = torch.cat([torch.cat([real, -imag], -1), torch.cat([imag, real], -1)], -2)
    matrix = matrix - torch.cat([g.real, g.imag], -1)[..., :, None] * torch.cat([r.real, -r.imag], -1)[..., None, :]
    rows = torch.cat([system.C.real, -system.C.imag], -1).transpose(0, 1)
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return rows, identity - torch.linalg.matrix_power(matrix, length)


def _from_rows(rows: Float64[Tensor, "H K N"]) -> Complex128[Tensor, "K H M"]:
    real, imag = rows.transpose(0, 1).chunk(2, -1)
    return torch.complex(real, -imag)


def dplr_kernel(
    continuous: StateSpace, length: int, dtype: torch.dtype, algorithm: Algorithm | None = None
) -> Float[Tensor, "K H L"]:
    """kernel[l] = <C, Abar^l Bbar>. Tables over modes and lengths have the type `dtype`, float32 or float64; what
    depends on modes alone is float64. Default: `krylov`, or `cauchy` where Triton or KeOps computes its sums."""
    if algorithm is None:
        sums = backends.current() == "keops" or backends.uses_triton("cauchy", continuous.dt, dtype)
        algorithm = "cauchy" if sums else "krylov"
    with without_autocast(continuous.dt):
        system = discretise(continuous)
        if algorithm == "cauchy":
            return _frequencies(continuous._replace(C=truncated(system, length)), length, dtype)
        kernel: Tensor = _Krylov.apply(*system, length, dtype)
        return kernel[..., :length]


def dplr_flops(K: int, H: int, M: int, length: int) -> Counts:
    """Of `krylov`: matrix products, triangular solves, and products of complex numbers by mode and step.

    Backward recomputes rows and columns, and then takes two products for every one, of the kernel and of its tables.
    """
    plan, N = _Plan.of(length), 2 * M
    T, blocks, rows = plan.small, plan.blocks, K + 1
    kernel = 2 * K * N * plan.block * blocks
    short = 2 * rows * N * (T - 1)  # the series' coefficients
    folded = 2 * rows * N * T**2
    solved = rows * T**2
    planar = 3 * N * T * (1 + rows + K)  # powers of F, and the tables times r and C
    doubled = [(2 * N**3, 2 * N**2 * K * (T << i)) for i in range(plan.doublings)]
    step = chain = 0
    if blocks > 1:
        step, chain = 2 * N**2 * T, 2 * N**2 * (blocks - 1)
        planar += 3 * N * T  # and times g
    tables = short + folded + solved + planar + step + chain + sum(map(sum, doubled))
    planar_back = N * T * ((3 + 4) * (rows + K + (blocks > 1)) + 4)  # for both factors of each, and for F
    toeplitz = 2 * rows * T**2 + 2 * (rows + 1) * T**2  # and sums along antidiagonals
    products = 2 * (short + folded + step + chain + sum(map(sum, doubled))) + solved + toeplitz
    return Counts.of("kernel", H * (tables + kernel), H * (tables + 2 * kernel + products + planar_back))


# -- in the time domain ------------------------------------------------------------------------------------------------
#
# With l = a T + j, kernel[l] = <C Abar^j, Abar^(aT) B>: for each feature a product of T rows and L / T columns.
#
# Rows. Abar^j = F^j - sum_{m<j} Abar^m g r F^(j-1-m), so that C Abar^j = C F^j - sum_{m<j} v_m r F^(j-1-m) needs only
# the scalars v_m = <C, Abar^m g>. As power series in z they are v = k_c / (1 + z k_r), where k_c[j] = <C, F^j g> and
# k_r[j] = <r, F^j g>: short sums over modes and one small triangular Toeplitz system.
#
# Columns. In the same way Abar^T = F^T - sum_{j<T} F^(T-1-j) g s_j with the rows s_j = r Abar^j, whose scalars are the
# series q = 1 / (1 + z k_r): s_j = sum_m q_(j-m) r F^m. One product makes Abar^T. No matrix of N x N is squared until L
# is so large that T has to grow; from then on both are doubled: [Y, Y E] and E^2.
#
# Powers of F come from complex128, so that the error of Abar^T is one rounding to its type; repeated squaring of a
# rounded Abar has 10 to 30 times that error in float32.
#
# Complex numbers are planar: columns hold (Re, Im) of conj(x), rows (2 Re, 2 Im), so that a real product is <., .>.


class _Plan(NamedTuple):
    """l < blocks * block, block = small * 2^doublings."""

    small: int
    doublings: int
    blocks: int

    @property
    def block(self) -> int:
        return self.small << self.doublings

    @staticmethod
    def of(length: int) -> "_Plan":
        """A block of about sqrt(length) steps, which balances the work on rows and on columns."""
        small = 1 << (min(length, _SMALL) - 1).bit_length()
        doublings = max(0, (length.bit_length() - 1) // 2 - (small.bit_length() - 1))
        return _Plan(small, doublings, -(-length // (small << doublings)))


class _Krylov(torch.autograd.Function):
    """One block of features at a time. On a CPU only the system is kept for the backward pass, which recomputes the
    tables while they are in its cache; a GPU, whose launches cost more than its memory, keeps them."""

    @staticmethod
    def forward(
        ctx: Any, F: Tensor, g: Tensor, r: Tensor, B: Tensor, C: Tensor, length: int, dtype: torch.dtype
    ) -> Tensor:
        plan = _Plan.of(length)
        ctx.save_for_backward(F, g, r, B, C)
        ctx.plan, ctx.dtype = plan, dtype
        ctx.tables = []
        K, H, _ = C.shape
        kernel = torch.empty(K, H, plan.blocks, plan.block, dtype=dtype, device=F.device)
        for part, system in _feature_blocks(System(F, g, r, B, C), plan):
            tables = _Tables(system, plan, dtype)
            if _keeps_tables(F):
                ctx.tables.append(tables)
            columns = tables.columns.transpose(0, 1)
            for k in range(K):
                torch.bmm(columns, tables.rows[-1][:, :, k], out=kernel[k, part])
        return kernel.flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        with without_autocast(grad):
            return _Krylov.gradients(ctx, grad)

    @staticmethod
    def gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        whole, plan = System(*ctx.saved_tensors), ctx.plan
        grad = grad.unflatten(-1, (plan.blocks, plan.block))
        grads = [torch.empty_like(x) for x in whole]
        for i, (part, system) in enumerate(_feature_blocks(whole, plan)):
            tables = ctx.tables[i] if ctx.tables else _Tables(system, plan, ctx.dtype)
            for total, block in zip(grads, tables.backward(grad[:, part]), strict=True):
                total[..., part, :] = block
        return *grads, None, None


def _keeps_tables(x: Tensor) -> bool:
    return x.device.type != "cpu"


def _feature_blocks(system: System, plan: _Plan) -> Iterator[tuple[slice, System]]:
    """The system of some features at a time, so that their tables stay in a CPU's cache."""
    K, H, M = system.C.shape
    size = H
    if system.C.device.type == "cpu":
        size = max(1, min(H, _CACHE // (4 * M * (M + (K + 1) * plan.block))))
    for first in range(0, H, size):
        part = slice(first, min(first + size, H))
        yield part, System(*(x[..., part, :] for x in system))


class _Tables:
    """Rows and columns of some features, and the intermediate results that the backward pass needs."""

    def __init__(self, system: System, plan: _Plan, dtype: torch.dtype) -> None:
        F, g, r, B, C = system
        self.F, self.g, self.r, self.C = F, g, r, C.transpose(0, 1)  # C (H, K, M)
        self.plan, self.dtype = plan, dtype
        H, K, M = self.C.shape
        T = plan.small
        powers, self.last = _powers(F, T)
        self.up = torch.stack([powers.real, powers.imag], 1).to(dtype)  # (H, 2, M, T): F^j
        self.down = self.up.flip(-1)  # F^(T-1-j)

        # The series q and z v: columns of the solution of (1 + z k_r) [q, z v] = [1, z k_c]
        weights = torch.cat([r[:, None], self.C], 1) * g[:, None]
        self.weights = torch.cat([2 * weights.real, -2 * weights.imag], -1).to(dtype)  # (H, 1 + K, 2M)
        right = pad(torch.bmm(self.weights, self.up.view(H, 2 * M, T)[..., : T - 1]), (1, 0))
        right[:, 0, 0] = 1
        self.toeplitz = _hankel(right[:, 0]).flip(-1)
        right[:, 0, 1:] = 0
        self.series = torch.linalg.solve_triangular(self.toeplitz, right.mT, upper=False, unitriangular=True)
        self.hankel = _hankel(self.series.mT).transpose(1, 2).reshape(H, T, (1 + K) * T)

        # sum_m (q, z v)_(j-m) F^m, and from it s_j and C Abar^j
        self.folded = torch.bmm(self.down.view(H, 2 * M, T), self.hankel).view(H, 2, M, 1 + K, T)
        times_r = _times(self.folded, 2 * r[..., None, None])
        rows = _times(self.up[:, :, :, None].expand(-1, -1, -1, K, -1), 2 * C.permute(1, 2, 0)[..., None])
        self.rows = [rows.sub_(times_r[:, :, :, 1:]).reshape(H, 2 * M, K, T)]
        self.steps: list[Tensor] = []  # Abar^T and its squares, transposed: a column is a row vector here
        if plan.blocks > 1:
            self.s = times_r[:, :, :, 0].reshape(H, 2 * M, T)
            self.G = _conj_(_times(self.down, g[..., None])).view(H, 2 * M, T)
            self.steps.append(self._first_step())
            for _ in range(plan.doublings):
                rows, step = self.rows[-1], self.steps[-1]
                self.rows.append(torch.cat([rows, torch.bmm(step, rows.flatten(2)).view_as(rows)], -1))
                self.steps.append(torch.bmm(step, step))

        self.columns = torch.empty(plan.blocks, H, 2 * M, dtype=dtype, device=F.device)
        self.columns[0] = torch.cat([B.real, -B.imag], -1)
        for a in range(1, plan.blocks):
            torch.bmm(self.columns[a - 1][:, None], self.steps[-1], out=self.columns[a][:, None])

    def _first_step(self) -> Tensor:
        """Abar^T, transposed, for planar conj(x)."""
        step = torch.bmm(self.s, self.G.mT).neg_()
        real, imag = self.last.real.to(self.dtype), self.last.imag.to(self.dtype)
        diagonal = _diagonals(step)
        diagonal[:, 0, 0] += real
        diagonal[:, 1, 1] += real
        diagonal[:, 1, 0] += imag
        diagonal[:, 0, 1] -= imag
        return step

    def backward(self, grad: Float[Tensor, "K H a T"]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Gradients of F, g, r, B and C from the gradient of the kernel: the lines of __init__ in reverse."""
        plan, (H, K, M), T = self.plan, self.C.shape, self.plan.small
        rows = self.rows[-1]
        dcolumns = torch.bmm(grad[0], rows[:, :, 0].mT)
        drows = torch.empty_like(rows)
        for k in range(K):
            if k:
                dcolumns.baddbmm_(grad[k], rows[:, :, k].mT)
            drows[:, :, k] = torch.bmm(self.columns.permute(1, 2, 0), grad[k])
        dcolumns = dcolumns.transpose(0, 1).contiguous()

        dtimes_r = torch.zeros_like(self.folded)
        dg, dlast = torch.zeros_like(self.g), torch.zeros_like(self.F)
        ddown = torch.zeros_like(self.down)
        if plan.blocks > 1:
            back = self.steps[-1].mT.contiguous()
            for a in range(plan.blocks - 1, 0, -1):
                dcolumns[a - 1][:, None].baddbmm_(dcolumns[a][:, None], back)
            dstep = torch.bmm(self.columns[:-1].permute(1, 2, 0), dcolumns[1:].transpose(0, 1))
            for rows, step in zip(self.rows[-2::-1], self.steps[-2::-1], strict=True):
                n = rows.shape[-1]
                later = drows[..., n:].flatten(2)
                dstep = torch.bmm(dstep, step.mT).baddbmm_(step.mT, dstep).baddbmm_(later, rows.flatten(2).mT)
                drows = torch.bmm(step.mT, later).view_as(rows).add_(drows[..., :n])
            diagonal = _diagonals(dstep).double()
            dlast = torch.complex(diagonal[:, 0, 0] + diagonal[:, 1, 1], diagonal[:, 1, 0] - diagonal[:, 0, 1])
            dtimes_r[:, :, :, 0] = torch.bmm(dstep, self.G).neg_().view_as(self.up)
            dG = _conj_(torch.bmm(dstep.mT, self.s).neg_().view_as(self.up))
            dg += _inner(self.down, dG)
            ddown = _times(dG, self.g.conj()[..., None])
        dB = torch.complex(dcolumns[0, :, :M].double(), -dcolumns[0, :, M:].double())

        drows = drows.view(H, 2, M, K, T)
        dtimes_r[:, :, :, 1:] = drows
        dtimes_r[:, :, :, 1:].neg_()
        dC = torch.stack([2 * _inner(self.up, drows[:, :, :, k]) for k in range(K)], 1)
        dup = _times(drows, 2 * self.C.mT.conj()[..., None]).sum(3)
        dr = 2 * _inner(self.folded, dtimes_r)
        dfolded = _times(dtimes_r, 2 * self.r.conj()[..., None, None]).view(H, 2 * M, (1 + K) * T)
        ddown += torch.bmm(dfolded, self.hankel.mT).view_as(ddown)
        dhankel = torch.bmm(self.down.view(H, 2 * M, T).mT, dfolded)
        dseries = _hankel_adjoint(dhankel.view(H, T, 1 + K, T).transpose(1, 2)).mT
        dright = torch.linalg.solve_triangular(self.toeplitz.mT, dseries, upper=True, unitriangular=True)
        dtoeplitz = torch.bmm(dright, self.series.mT).neg_()
        dshifted = dright.mT.clone()
        dshifted[:, 0] = _hankel_adjoint(dtoeplitz.flip(-1))
        dshifted = dshifted[..., 1:]
        powers = self.up.view(H, 2 * M, T)[..., : T - 1]
        dweights = torch.bmm(dshifted, powers.mT).double()
        dw = torch.complex(2 * dweights[..., :M], -2 * dweights[..., M:])
        g = self.g.conj()[:, None]
        dr += g[:, 0] * dw[:, 0]
        dC += g * dw[:, 1:]
        dg += (torch.cat([self.r[:, None], self.C], 1).conj() * dw).sum(1)

        dup += ddown.flip(-1)
        dup.view(H, 2 * M, T)[..., : T - 1] += torch.bmm(self.weights.mT, dshifted)
        count = torch.arange(1, T, dtype=self.dtype, device=self.F.device)
        dF = _inner(self.up[..., :-1] * count, dup[..., 1:])
        dF += T * torch.complex(self.up[:, 0, :, -1].double(), -self.up[:, 1, :, -1].double()) * dlast
        return dF, dg, dr, dB, dC.transpose(0, 1)


def _powers(F: Complex128[Tensor, "H M"], count: int) -> tuple[Complex128[Tensor, "H M T"], Complex128[Tensor, "H M"]]:
    """F^0 to F^(count-1), and F^count; count is a power of two."""
    powers, last = torch.ones_like(F)[..., None], F
    while powers.shape[-1] < count:
        powers = torch.cat([powers, powers * last[..., None]], -1)
        last = last * last
    return powers, last


def _times(x: Float[Tensor, "H 2 M *#rest"], w: Complex128[Tensor, "H M *#rest"]) -> Float[Tensor, "H 2 M *rest"]:
    """Planar x times complex w."""
    real, imag = w.real.to(x.dtype), w.imag.to(x.dtype)
    product = x * real[:, None]
    product[:, 0].addcmul_(x[:, 1], imag, value=-1)
    product[:, 1].addcmul_(x[:, 0], imag)
    return product


def _inner(x: Float[Tensor, "H 2 M *rest"], d: Float[Tensor, "H 2 M *rest"]) -> Complex128[Tensor, "H M"]:
    """Sum of conj(x) d over all but features and modes."""
    real = (x * d).sum(1)
    imag = (x[:, 0] * d[:, 1]).addcmul_(x[:, 1], d[:, 0], value=-1)
    return torch.complex(real.flatten(2).sum(-1).double(), imag.flatten(2).sum(-1).double())


def _conj_(x: Float[Tensor, "H 2 M T"]) -> Float[Tensor, "H 2 M T"]:
    x[:, 1].neg_()
    return x


def _diagonals(step: Float[Tensor, "H N N"]) -> Float[Tensor, "H 2 2 M"]:
    """A view of the diagonals of the four blocks."""
    H, N, _ = step.shape
    return step.view(H, 2, N // 2, 2, N // 2).diagonal(dim1=2, dim2=4)


def _hankel(series: Float[Tensor, "*batch T"]) -> Float[Tensor, "*batch T T"]:
    """[m, i] = series[m + i - (T - 1)], zero before the beginning."""
    T = series.shape[-1]
    return pad(series, (T - 1, 0)).unfold(-1, T, 1)


def _hankel_adjoint(matrix: Float[Tensor, "*batch T T"]) -> Float[Tensor, "*batch T"]:
    """Sums along the antidiagonals from m + i = T - 1 on; padding and reshaping skews the rows."""
    T = matrix.shape[-1]
    skewed = pad(matrix, (0, T)).flatten(-2)[..., : T * (2 * T - 1)].unflatten(-1, (T, 2 * T - 1))
    return skewed.sum(-2)[..., T - 1 :]


# -- in the frequency domain -------------------------------------------------------------------------------------------


def _frequencies(continuous: StateSpace, length: int, dtype: torch.dtype) -> Float[Tensor, "K H L"]:
    """S4, algorithm 1, with C~ in place of C. At node k, z = 2 i tan(pi k / L) and k_XY = dt sum X Y / (z - dt A) with
    conjugates; the kernel's transform is (1 + z/2) (k_CB - k_CP k_QB / (1 + k_QP)) with Q = conj(P).

    At the last node of an even length z is infinite; the limit is dt Re sum_n B_n C~_n.
    """
    dt, A, P, B, C = continuous
    K, step = len(C), dt[:, None]
    k = torch.arange((length - 1) // 2 + 1, dtype=torch.float64, device=dt.device)
    y = 2 * torch.tan(math.pi * k / length)
    numerators = step * torch.cat([C * B, C * P, (P.conj() * B)[None], (P.conj() * P)[None]])
    sums = _cauchy(numerators, step * A, y, dtype)
    cb, cp, qb, qp = sums[:K], sums[K : 2 * K], sums[2 * K], sums[2 * K + 1]
    transform = (1 + 0.5j * y) * (cb - cp * (qb / (1 + qp)))
    if length % 2 == 0:
        transform = torch.cat([transform, (step * B * C).real.sum(-1, keepdim=True)], -1)
    return torch.fft.irfft(transform, n=length).to(dtype)


def _cauchy(
    v: Complex128[Tensor, "R H M"], w: Complex128[Tensor, "H M"], y: Float64[Tensor, " Q"], dtype: torch.dtype
) -> Complex128[Tensor, "R H Q"]:
    """sum_n v_n / (iy - w_n) + conj(v_n) / (iy - conj(w_n)), its terms in `dtype`.

    One denominator serves the pair and all R sums: 2 (iy Re v - Re(v conj(w))) / (|w|^2 - y^2 - 2 i y Re w).
    """
    rows = torch.cat([v.real, (v * w.conj()).real]).to(dtype)  # (2R, H, M)
    if backends.current() == "keops":
        real, imag = _cauchy_keops(rows, w, y)
    elif backends.uses_triton("cauchy", rows):
        from spt.models.ops import triton_cauchy

        real, imag = triton_cauchy.Sums.apply(rows, w, y)
    else:
        blocks = []
        for part in torch.arange(w.shape[0]).split(max(1, _CACHE // (w.shape[1] * len(y)))):
            inputs = rows[:, part].transpose(0, 1), w[part], y
            blocks.append(checkpoint(_cauchy_torch, *inputs, use_reentrant=False))
        real, imag = torch.cat(blocks).permute(2, 1, 0, 3)
    real, imag = real.double(), imag.double()
    a, b = torch.complex(real, imag).chunk(2)
    return 2 * (1j * y * a - b)


def _cauchy_torch(
    rows: Float[Tensor, "H R M"], w: Complex128[Tensor, "H M"], y: Float64[Tensor, " Q"]
) -> Float[Tensor, "H R 2 Q"]:
    """Sums of rows over denominators, real and imaginary part."""
    real, imag = w.real[..., None], w.imag[..., None]
    down = real.square() + (imag - y) * (imag + y)
    side = -2 * real * y
    square = down.square() + side.square()
    table = torch.cat([down / square, -side / square], -1).to(rows.dtype)
    return torch.bmm(rows, table).unflatten(-1, (2, -1))


def _cauchy_keops(
    rows: Float[Tensor, "R H M"], w: Complex128[Tensor, "H M"], y: Float64[Tensor, " Q"]
) -> tuple[Float[Tensor, "R H Q"], Float[Tensor, "R H Q"]]:
    lazy = backends.keops().LazyTensor
    R, H, M = rows.shape
    dtype = rows.dtype
    numerator = lazy(rows.permute(1, 2, 0).reshape(H, 1, M, R).contiguous())
    real, imag = (lazy(x.to(dtype).reshape(H, 1, M, 1).contiguous()) for x in (w.real, w.imag))
    node = lazy(y.to(dtype).reshape(1, -1, 1, 1).expand(H, -1, -1, -1).contiguous())
    down = real * real + (imag - node) * (imag + node)
    side = -2 * real * node
    inverse = 1 / (down * down + side * side)
    sums = (numerator * (down * inverse)).concat(numerator * (-(side * inverse))).sum(dim=2)
    return sums[..., :R].permute(2, 0, 1), sums[..., R:].permute(2, 0, 1)
