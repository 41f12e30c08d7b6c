"""The diagonal scan x_t = a_t x_{t-1} + b_t of `scan`, in a few kernels for a GPU, forward and backward, by Triton.

A loop over the steps of one state is short work and much waiting for memory, so a sequence is cut into chunks that are
processed at the same time: one kernel walks through each from a state of zero and stores only where it ends; one
carries the state across chunks; one walks through each again, from its true state. Inputs are read twice and states
written once. A single walk would read them once, but leave most of a GPU idle unless a batch has many thousands of
states, and a tree over steps would write intermediate states. Neighbouring states are neighbouring lanes, so that reads
are contiguous, and inputs of a few steps are read before the first is used.

Backward is the same scan in reverse, with conjugated coefficients; its last kernel also gives the gradients of the
coefficients, conj(x_{t-1}) g_t.

What is read and written is in single precision, but for a fixed coefficient and its gradients; in between, states are
in double precision. In single precision the errors of a mode that turns and hardly decays would add up over the steps
of a chunk. Memory takes longer than the arithmetic by far, or, by reckoning, about as long where double precision is 64
times slower, as on GPUs for games. Sums are in a fixed order: the same numbers from run to run.

No GPU has run this yet. Tests run it in Triton's interpreter (TRITON_INTERPRET=1), which shows neither races between
programs nor the rounding of a GPU's instructions, and have the compiler make code for two of them.

Kernels count steps in the order of the scan: a pointer is to the step that comes first there, and strides lead on from
it, backwards if need be. Letters: B sequences, L steps, P states.
"""

import contextlib
import math
from collections.abc import Callable
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Complex64, Float64, Inexact
from torch import Tensor

from spt.models.ops.precision import as_stored

_GROUP = 8  # steps whose inputs are read before the first of them is used
_LANES = 64  # states of a program
_SHORTEST = 16  # steps of a chunk


def solve(
    a: Inexact[Tensor, "*steps P"],
    b: Inexact[Tensor, "B L P"],
    x: Inexact[Tensor, "B L P"],
    initial: Inexact[Tensor, "B P"] | None,
    reverse: bool,
) -> None:
    """As `scan.solve`: write the states after `initial` into x, which is b or shares no memory with it."""
    _run(a, b, x, initial, reverse)


def solve_back(
    a: Inexact[Tensor, "*steps P"], dx: Inexact[Tensor, "B L P"], g: Inexact[Tensor, "B L P"], reverse: bool
) -> None:
    """As `scan.solve_back`: write the gradients of b into g, which is dx or shares no memory with it."""
    _run(a, dx, g, None, not reverse, adjoint=True)


def gradients(
    a: Inexact[Tensor, "*steps P"],
    x: Inexact[Tensor, "B L P"],
    dx: Inexact[Tensor, "B L P"],
    g: Inexact[Tensor, "B L P"],
    reverse: bool,
) -> Inexact[Tensor, "*steps P"]:
    """As `scan.gradients`: those of b are written into g, those of a returned."""
    da = _run(a, dx, g, None, not reverse, adjoint=True, states=x)
    assert da is not None, "which comes from the states"
    return da


Trial = Callable[[], tuple[Tensor, ...]]


def trial_of_fixed(device: str, small: bool) -> Trial:
    """A scan with coefficients that all steps share; the large one within a two-sided layer of S5 or LRU, whose time is
    what matters. See `backends.TRITON`."""
    from spt.models.ops.recurrence import recurrence
    from spt.models.ops.scan import scan

    B, L, H, P = (1, 33, 2, 3) if small else (16, 1024, 128, 128)
    a = torch.polar(1 - 0.5 * _waves(device, P) ** 2, 3 * _waves(device, P))
    if small:
        return _trial(scan, [a, _complex_waves(device, B, L, P)])
    inputs = [_waves(device, B, L, H).float(), a, _complex_waves(device, P, H), _complex_waves(device, 2, H, P)]
    return _trial(recurrence, [*inputs, _waves(device, H).float()])


def trial_of_varying(device: str, small: bool) -> Trial:
    """Coefficients of every step, as in gated recurrences; backwards."""
    from spt.models.ops.scan import scan

    shape = (1, 33, 5) if small else (16, 1024, 256)
    inputs = [_waves(device, *shape).float(), _waves(device, *shape).float()]
    return _trial(lambda a, b: scan(a, b, reverse=True), inputs)


def _waves(device: str, *shape: int) -> Float64[Tensor, "..."]:
    """Not drawn: the random numbers of a run stay as they are."""
    return torch.arange(1, math.prod(shape) + 1, dtype=torch.float64, device=device).sin().view(shape)


def _complex_waves(device: str, *shape: int) -> Complex64[Tensor, "..."]:
    return torch.view_as_complex(_waves(device, *shape, 2)).to(torch.complex64)


def _trial(function: Callable[..., Tensor], inputs: list[Tensor]) -> Trial:
    for x in inputs:
        x.requires_grad_()

    def run() -> tuple[Tensor, ...]:
        y = function(*inputs)
        return y, *torch.autograd.grad(y, inputs, y.detach())

    return run


def chunk_length(length: int) -> int:
    """The steps of a chunk, a power of two: about the root of the length, so that no kernel waits long for another;
    a short sequence is one chunk."""
    if length <= 2 * _SHORTEST:
        return max(_GROUP, triton.next_power_of_2(length))
    return max(_SHORTEST, 1 << length.bit_length() // 2)


Place = tuple[Tensor | None, int, int, int]  # where something begins, and how far it is to the next of each kind
_NOWHERE: Place = (None, 0, 0, 0)


def _run(
    a: Tensor,
    b: Tensor,
    x: Tensor,
    initial: Tensor | None,
    reverse: bool,
    adjoint: bool = False,
    states: Tensor | None = None,
) -> Tensor | None:
    """`adjoint`: the coefficient of a step is the conjugate of the one before it in this order, and with `states` the
    result is the gradient of a."""
    (B, L, P), per_step = b.shape, a.ndim > 1
    a, b = as_stored(a.to(b.dtype) if per_step else a), as_stored(b)
    steps = chunk_length(L)
    lanes = min(_LANES, triton.next_power_of_2(P))
    chunks, lane_blocks = -(-L // steps), -(-P // lanes)
    kind: dict[str, int] = {"IS_COMPLEX": b.is_complex(), "PER_STEP": per_step, "ADJOINT": adjoint}
    kind |= {"LANES": lanes, "GROUP": _GROUP, "num_warps": max(1, lanes // 32)}
    factors = _in_order(a, reverse) if per_step else _parts(a)
    inputs = _in_order(b, reverse)
    before = _NOWHERE
    if initial is not None:
        initial = as_stored(initial)
        before = (_words(initial), initial.stride(0), 0, initial.stride(1))
    kept = gradients = _NOWHERE
    da: Tensor | None = None
    if states is not None:
        kept = _in_order(as_stored(states), reverse)
        if per_step:
            da = torch.empty_like(b, memory_format=torch.contiguous_format)
            gradients = _in_order(da, reverse)
        else:
            da = b.new_empty(B, chunks, P, dtype=torch.promote_types(b.dtype, torch.float64))
            gradients = _parts(da)
    with torch.cuda.device(b.device) if b.is_cuda else contextlib.nullcontext():  # kernels run on the current one
        if chunks > 1:
            ends = b.new_empty(B, chunks, P)
            borders = (_words(ends), _words(torch.empty_like(ends)) if per_step else None)
            _chunk_ends[(lane_blocks * (chunks - 1) * B,)](
                *factors, *inputs, *borders, P, chunks, lane_blocks, STEPS=steps, **kind
            )
            _carry[(lane_blocks * B,)](
                factors[0], factors[-1], *borders, before[0], before[1], before[3], P, chunks, lane_blocks,
                LOG_STEPS=steps.bit_length() - 1, **kind,
            )  # fmt: skip
            sequence, chunk, lane = ends.stride()
            before = (borders[0], sequence, chunk, lane)
        _walk[(lane_blocks * chunks * B,)](
            *factors, *inputs, *before, *_in_order(x, reverse), *kept, *gradients, L, P, chunks, lane_blocks,
            STEPS=steps, **kind,
        )  # fmt: skip
    return da if da is None or per_step else da.sum((0, 1))


def _in_order(x: Inexact[Tensor, "B L P"], reverse: bool) -> Place:
    """The first step in the order of the scan; to the next sequence, step and state."""
    sequence, step, lane = x.stride()
    return _words(x[:, -1 if reverse else 0]), sequence, -step if reverse else step, lane


def _words(x: Tensor) -> Tensor:
    """A complex number as one word of 64 bits, which is read and written at once."""
    return x.view(torch.int64) if x.is_complex() else x


def _parts(x: Inexact[Tensor, "*B P"]) -> Place:
    """Of numbers that are read or written one part at a time, in floats; to the next sequence, chunk and state."""
    parts = torch.view_as_real(x) if x.is_complex() else x
    sequence, chunk, lane = (*(0,) * (3 - x.ndim), *parts.stride()[: x.ndim])
    return parts, sequence, chunk, lane


# -------------------------------------------------------------------------------------------------------- the kernels


@triton.jit
@no_type_check
def _read(pointer, offsets, known, IS_COMPLEX: tl.constexpr):
    """Real and imaginary part; zero where it is not known. Of real numbers the second is not used."""
    if IS_COMPLEX:
        pair = tl.load(pointer + offsets, mask=known, other=0)
        re = pair.to(tl.int32).to(tl.float32, bitcast=True)
        im = (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        re = tl.load(pointer + offsets, mask=known, other=0.0)
        im = re
    return re.to(tl.float64), im.to(tl.float64)


@triton.jit
@no_type_check
def _write(pointer, offsets, known, re, im, IS_COMPLEX: tl.constexpr):
    re, im = re.to(tl.float32), im.to(tl.float32)
    if IS_COMPLEX:
        low = re.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        high = im.to(tl.int32, bitcast=True).to(tl.int64) << 32
        tl.store(pointer + offsets, high | low, mask=known)
    else:
        tl.store(pointer + offsets, re, mask=known)


@triton.jit
@no_type_check
def _multiply_add(a_re, a_im, x_re, x_im, b_re, b_im, IS_COMPLEX: tl.constexpr):
    """a x + b."""
    if IS_COMPLEX:
        re = b_re + a_re * x_re - a_im * x_im
        im = b_im + a_re * x_im + a_im * x_re
    else:
        re = b_re + a_re * x_re
        im = re
    return re, im


@triton.jit
@no_type_check
def _place(program, P, chunks, lane_blocks, LANES: tl.constexpr):
    """Of a program: its states, which of them exist, its chunk and its sequence."""
    lanes = (program % lane_blocks) * LANES + tl.arange(0, LANES)
    rest = program // lane_blocks
    return lanes.to(tl.int64), lanes < P, rest % chunks, (rest // chunks).to(tl.int64)


@triton.jit
@no_type_check
def _varying(a, a_step, a_lane, step, lanes, known, ADJOINT: tl.constexpr, IS_COMPLEX: tl.constexpr):
    """The coefficient of a step; backward the conjugate of the one before it, and zero at the first."""
    if ADJOINT:
        re, im = _read(a, (step - 1) * a_step + lanes * a_lane, known & (step > 0), IS_COMPLEX)
        im = -im
    else:
        re, im = _read(a, step * a_step + lanes * a_lane, known, IS_COMPLEX)
    return re, im


@triton.jit
@no_type_check
def _fixed(a, a_lane, lanes, known, ADJOINT: tl.constexpr, IS_COMPLEX: tl.constexpr):
    """The coefficient that all steps share, or backward its conjugate."""
    re = tl.load(a + lanes * a_lane, mask=known, other=0.0).to(tl.float64)
    im = re
    if IS_COMPLEX:
        im = tl.load(a + lanes * a_lane + 1, mask=known, other=0.0).to(tl.float64)
        if ADJOINT:
            im = -im
    return re, im


@triton.jit
@no_type_check
def _chunk_ends(
    a, a_sequence, a_step, a_lane,
    b, b_sequence, b_step, b_lane,
    ends, across, P, chunks, lane_blocks,
    STEPS: tl.constexpr, GROUP: tl.constexpr, ADJOINT: tl.constexpr,
    IS_COMPLEX: tl.constexpr, PER_STEP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Where each chunk but the last ends from a state of zero; of coefficients that vary, also their product."""
    lanes, known, chunk, sequence = _place(tl.program_id(0), P, chunks - 1, lane_blocks, LANES)
    a += sequence * a_sequence
    b += sequence * b_sequence
    x_re = tl.zeros([LANES], tl.float64)
    x_im = tl.zeros([LANES], tl.float64)
    if PER_STEP:
        product_re = tl.full([LANES], 1.0, tl.float64)
        product_im = tl.zeros([LANES], tl.float64)
    else:
        a_re, a_im = _fixed(a, a_lane, lanes, known, ADJOINT, IS_COMPLEX)
    for group in range(0, STEPS, GROUP):
        inputs = ()
        factors = ()
        for i in tl.static_range(GROUP):
            step = (chunk * STEPS + group + i).to(tl.int64)
            inputs += (_read(b, step * b_step + lanes * b_lane, known, IS_COMPLEX),)
            if PER_STEP:
                factors += (_varying(a, a_step, a_lane, step, lanes, known, ADJOINT, IS_COMPLEX),)
        for i in tl.static_range(GROUP):
            if PER_STEP:
                a_re, a_im = factors[i]
                product_re, product_im = _multiply_add(a_re, a_im, product_re, product_im, 0.0, 0.0, IS_COMPLEX)
            b_re, b_im = inputs[i]
            x_re, x_im = _multiply_add(a_re, a_im, x_re, x_im, b_re, b_im, IS_COMPLEX)
    place = (sequence * chunks + chunk) * P + lanes
    _write(ends, place, known, x_re, x_im, IS_COMPLEX)
    if PER_STEP:
        _write(across, place, known, product_re, product_im, IS_COMPLEX)


@triton.jit
@no_type_check
def _carry(
    a, a_lane, ends, across,
    initial, initial_sequence, initial_lane, P, chunks, lane_blocks,
    LOG_STEPS: tl.constexpr, GROUP: tl.constexpr, ADJOINT: tl.constexpr,
    IS_COMPLEX: tl.constexpr, PER_STEP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """From where chunks end, all but the last, to the states before them, in the same place."""
    lanes, known, _, sequence = _place(tl.program_id(0), P, 1, lane_blocks, LANES)
    x_re = tl.zeros([LANES], tl.float64)
    x_im = tl.zeros([LANES], tl.float64)
    if initial is not None:
        x_re, x_im = _read(initial + sequence * initial_sequence, lanes * initial_lane, known, IS_COMPLEX)
    if not PER_STEP:
        a_re, a_im = _fixed(a, a_lane, lanes, known, ADJOINT, IS_COMPLEX)
        for _ in tl.static_range(LOG_STEPS):
            a_re, a_im = _multiply_add(a_re, a_im, a_re, a_im, 0.0, 0.0, IS_COMPLEX)
    for group in range(0, chunks, GROUP):
        inputs = ()
        factors = ()
        for i in tl.static_range(GROUP):
            place = (sequence * chunks + group + i) * P + lanes
            inside = known & (group + i < chunks - 1)
            inputs += (_read(ends, place, inside, IS_COMPLEX),)
            if PER_STEP:
                factors += (_read(across, place, inside, IS_COMPLEX),)
        for i in tl.static_range(GROUP):
            place = (sequence * chunks + group + i) * P + lanes
            _write(ends, place, known & (group + i < chunks), x_re, x_im, IS_COMPLEX)
            if PER_STEP:
                a_re, a_im = factors[i]
            b_re, b_im = inputs[i]
            x_re, x_im = _multiply_add(a_re, a_im, x_re, x_im, b_re, b_im, IS_COMPLEX)


@triton.jit
@no_type_check
def _walk(
    a, a_sequence, a_step, a_lane,
    b, b_sequence, b_step, b_lane,
    before, before_sequence, before_chunk, before_lane,
    x, x_sequence, x_step, x_lane,
    states, states_sequence, states_step, states_lane,
    da, da_sequence, da_step, da_lane,
    L, P, chunks, lane_blocks,
    STEPS: tl.constexpr, GROUP: tl.constexpr, ADJOINT: tl.constexpr,
    IS_COMPLEX: tl.constexpr, PER_STEP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Every x of each chunk, from the one before it. With `states`, those of the scan that is gone back through, also
    the gradients of its coefficients, or their sum over the chunk."""
    lanes, known, chunk, sequence = _place(tl.program_id(0), P, chunks, lane_blocks, LANES)
    a += sequence * a_sequence
    b += sequence * b_sequence
    x += sequence * x_sequence
    x_re = tl.zeros([LANES], tl.float64)
    x_im = tl.zeros([LANES], tl.float64)
    if before is not None:
        before += sequence * before_sequence + chunk * before_chunk
        x_re, x_im = _read(before, lanes * before_lane, known, IS_COMPLEX)
    if states is not None:
        states += sequence * states_sequence
        da += sequence * da_sequence
        sum_re = tl.zeros([LANES], tl.float64)
        sum_im = tl.zeros([LANES], tl.float64)
    if not PER_STEP:
        a_re, a_im = _fixed(a, a_lane, lanes, known, ADJOINT, IS_COMPLEX)
    for group in range(0, STEPS, GROUP):
        inputs = ()
        factors = ()
        earlier = ()
        for i in tl.static_range(GROUP):
            step = (chunk * STEPS + group + i).to(tl.int64)
            inside = known & (step < L)
            inputs += (_read(b, step * b_step + lanes * b_lane, inside, IS_COMPLEX),)
            if PER_STEP:
                factors += (_varying(a, a_step, a_lane, step, lanes, inside, ADJOINT, IS_COMPLEX),)
            if states is not None:
                place = (step + 1) * states_step + lanes * states_lane
                earlier += (_read(states, place, known & (step + 1 < L), IS_COMPLEX),)
        for i in tl.static_range(GROUP):
            step = (chunk * STEPS + group + i).to(tl.int64)
            inside = known & (step < L)
            if PER_STEP:
                a_re, a_im = factors[i]
            b_re, b_im = inputs[i]
            x_re, x_im = _multiply_add(a_re, a_im, x_re, x_im, b_re, b_im, IS_COMPLEX)
            _write(x, step * x_step + lanes * x_lane, inside, x_re, x_im, IS_COMPLEX)
            if states is not None:
                s_re, s_im = earlier[i]
                if PER_STEP:
                    da_re, da_im = _multiply_add(s_re, -s_im, x_re, x_im, 0.0, 0.0, IS_COMPLEX)
                    _write(da, step * da_step + lanes * da_lane, inside, da_re, da_im, IS_COMPLEX)
                else:
                    sum_re, sum_im = _multiply_add(s_re, -s_im, x_re, x_im, sum_re, sum_im, IS_COMPLEX)
    if states is not None and not PER_STEP:
        place = chunk * da_step + lanes * da_lane
        tl.store(da + place, sum_re, mask=known)
        if IS_COMPLEX:
            tl.store(da + place + 1, sum_im, mask=known)
