"""The diagonal scan x_t = a_t x_{t-1} + b_t of `scan`, in a few kernels for a GPU, forward and backward, by Triton.

A loop over the steps of one state is short work and much waiting for memory, so a sequence is cut into chunks that are
processed at the same time: one kernel walks through each from a state of zero and stores only where it ends; one
carries the state across chunks; one walks through each again, from its true state. Inputs are read twice and states
written once. A single walk would read them once, but leave most of a GPU idle unless a batch has many thousands of
states, and a tree over steps would write intermediate states. Neighbouring states are neighbouring lanes, so that reads
are contiguous, and inputs of a few steps are read before the first is used.

Backward is the same scan in reverse, with conjugated coefficients; its last kernel also gives the gradients of the
coefficients, conj(x_{t-1}) g_t.

Float32 throughout, real or in pairs, without tensor cores, but for three things. A fixed coefficient, which may be in
double precision, is the sum of two floats; between chunks, where it is a high power, state and power are in double
precision; and so are the sums of its gradients. So errors do not grow with the length. Sums are in a fixed order:
results are the same from run to run.

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
from jaxtyping import Inexact
from torch import Tensor

_GROUP = tl.constexpr(8)  # steps whose inputs are read before the first of them is used
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


def trial_of_fixed(device: str, small: bool) -> Callable[[], tuple[Tensor, ...]]:
    """Coefficients that all steps share, as in S5 and LRU; see `backends.TRITON`."""
    return _trial(device, (2, 40, 5) if small else (16, 1024, 128), torch.complex64, per_step=False)


def trial_of_varying(device: str, small: bool) -> Callable[[], tuple[Tensor, ...]]:
    """Coefficients of every step, as in gated recurrences."""
    return _trial(device, (2, 40, 5) if small else (16, 1024, 256), torch.float32, per_step=True)


def _trial(
    device: str, shape: tuple[int, int, int], dtype: torch.dtype, per_step: bool
) -> Callable[[], tuple[Tensor, ...]]:
    """Both directions."""
    from spt.models.ops.scan import scan

    def waves(*shape: int) -> Tensor:  # not drawn: the random numbers of a run stay as they are
        angles = torch.arange(1, math.prod(shape) + 1, dtype=torch.float64, device=device).view(shape)
        return torch.polar(angles.cos(), angles).to(dtype) if dtype.is_complex else angles.sin().to(dtype)

    a, b = waves(*shape[0 if per_step else 2 :]).requires_grad_(), waves(*shape).requires_grad_()
    upstream = waves(*shape)

    def run() -> tuple[Tensor, ...]:
        forwards, backwards = scan(a, b), scan(a, b, reverse=True)
        return forwards, backwards, *torch.autograd.grad((forwards, backwards), (a, b), (upstream, upstream))

    return run


def chunk_length(length: int) -> int:
    """The steps of a chunk, a power of two: about the root of the length, so that no kernel waits long for another;
    a short sequence is one chunk."""
    if length <= 2 * _SHORTEST:
        return max(_GROUP.value, triton.next_power_of_2(length))
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
    steps = chunk_length(L)
    lanes = min(_LANES, triton.next_power_of_2(P))
    chunks, lane_blocks = -(-L // steps), -(-P // lanes)
    kind = {"IS_COMPLEX": b.is_complex(), "PER_STEP": per_step, "LANES": lanes, "num_warps": max(1, lanes // 32)}
    walk = {**kind, "STEPS": steps, "ADJOINT": adjoint}
    factors = _in_order(a.to(b.dtype), reverse) if per_step else _parts(a)
    inputs = _in_order(b, reverse)
    sequence, lane = (0, 0) if initial is None else initial.stride()
    before: Place = (None if initial is None else _words(initial), sequence, 0, lane)
    kept = gradients = _NOWHERE
    da: Tensor | None = None
    if states is not None:
        kept = _in_order(states, reverse)
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
            _chunk_ends[(lane_blocks * (chunks - 1) * B,)](*factors, *inputs, *borders, P, chunks, lane_blocks, **walk)
            _carry[(lane_blocks * B,)](
                factors[0], factors[-1], *borders, before[0], sequence, lane, P, chunks, lane_blocks,
                LOG_STEPS=steps.bit_length() - 1, CONJUGATE=adjoint, **kind,
            )  # fmt: skip
            before = (borders[0], *ends.stride())
        _walk[(lane_blocks * chunks * B,)](
            *factors, *inputs, *before, *_in_order(x, reverse), *kept, *gradients, L, P, chunks, lane_blocks, **walk
        )
    return da if da is None or per_step else da.sum((0, 1))


def _in_order(x: Inexact[Tensor, "B L P"], reverse: bool) -> Place:
    """The first step in the order of the scan; to the next sequence, step and state."""
    sequence, step, lane = x.stride()
    return _words(x[:, -1 if reverse else 0]), sequence, -step if reverse else step, lane


def _words(x: Tensor) -> Tensor:
    """A complex number as one word of 64 bits, which is read and written at once."""
    return x.resolve_conj().view(torch.int64) if x.is_complex() else x


def _parts(x: Inexact[Tensor, "*B P"]) -> Place:
    """Of numbers that are read or written one part at a time, in floats; to the next sequence, chunk and state."""
    parts = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    strides = parts.stride()[: x.ndim]
    return parts, *(0,) * (3 - x.ndim), *strides


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
    return re, im


@triton.jit
@no_type_check
def _write(pointer, offsets, known, re, im, IS_COMPLEX: tl.constexpr):
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
    return (
        lanes.to(tl.int64),
        lanes < P,
        (program // lane_blocks) % chunks,
        (program // lane_blocks // chunks).to(tl.int64),
    )


@triton.jit
@no_type_check
def _factor(a, a_step, a_lane, step, lanes, known, ADJOINT: tl.constexpr, IS_COMPLEX: tl.constexpr):
    """The coefficient of a step; backward the conjugate of the one before it, and zero at the first."""
    if ADJOINT:
        re, im = _read(a, (step - 1) * a_step + lanes * a_lane, known & (step > 0), IS_COMPLEX)
        im = -im
    else:
        re, im = _read(a, step * a_step + lanes * a_lane, known, IS_COMPLEX)
    return re, im


@triton.jit
@no_type_check
def _fixed(a, a_lane, lanes, known, CONJUGATE: tl.constexpr, IS_COMPLEX: tl.constexpr):
    """A coefficient that all steps share, in double precision."""
    re = tl.load(a + lanes * a_lane, mask=known, other=0.0).to(tl.float64)
    im = re
    if IS_COMPLEX:
        im = tl.load(a + lanes * a_lane + 1, mask=known, other=0.0).to(tl.float64)
        if CONJUGATE:
            im = -im
    return re, im


@triton.jit
@no_type_check
def _halves(a):
    """A number of double precision as two floats: the rounded one and what rounding lost."""
    high = a.to(tl.float32)
    return high, (a - high.to(tl.float64)).to(tl.float32)


@triton.jit
@no_type_check
def _chunk_ends(
    a, a_sequence, a_step, a_lane,
    b, b_sequence, b_step, b_lane,
    ends, across, P, chunks, lane_blocks,
    STEPS: tl.constexpr, ADJOINT: tl.constexpr,
    IS_COMPLEX: tl.constexpr, PER_STEP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Where each chunk but the last ends from a state of zero; with coefficients of their own, also their product."""
    lanes, known, chunk, sequence = _place(tl.program_id(0), P, chunks - 1, lane_blocks, LANES)
    a += sequence * a_sequence
    b += sequence * b_sequence
    state_re = tl.zeros([LANES], tl.float32)
    state_im = tl.zeros([LANES], tl.float32)
    if PER_STEP:
        product_re = tl.full([LANES], 1.0, tl.float32)
        product_im = tl.zeros([LANES], tl.float32)
    else:
        fixed_re, fixed_im = _fixed(a, a_lane, lanes, known, ADJOINT, IS_COMPLEX)
        a_re, low_re = _halves(fixed_re)
        a_im, low_im = _halves(fixed_im)
    for group in range(0, STEPS, _GROUP):
        inputs = ()
        factors = ()
        for i in tl.static_range(_GROUP):
            step = (chunk * STEPS + group + i).to(tl.int64)
            inputs += (_read(b, step * b_step + lanes * b_lane, known, IS_COMPLEX),)
            if PER_STEP:
                factors += (_factor(a, a_step, a_lane, step, lanes, known, ADJOINT, IS_COMPLEX),)
        for i in tl.static_range(_GROUP):
            b_re, b_im = inputs[i]
            if PER_STEP:
                a_re, a_im = factors[i]
                product_re, product_im = _multiply_add(a_re, a_im, product_re, product_im, 0.0, 0.0, IS_COMPLEX)
            else:
                b_re, b_im = _multiply_add(low_re, low_im, state_re, state_im, b_re, b_im, IS_COMPLEX)
            state_re, state_im = _multiply_add(a_re, a_im, state_re, state_im, b_re, b_im, IS_COMPLEX)
    place = (sequence * chunks + chunk) * P + lanes
    _write(ends, place, known, state_re, state_im, IS_COMPLEX)
    if PER_STEP:
        _write(across, place, known, product_re, product_im, IS_COMPLEX)


@triton.jit
@no_type_check
def _carry(
    a, a_lane, ends, across,
    initial, initial_sequence, initial_lane, P, chunks, lane_blocks,
    LOG_STEPS: tl.constexpr, CONJUGATE: tl.constexpr,
    IS_COMPLEX: tl.constexpr, PER_STEP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """From where chunks end (all but the last) to the states before them, in the same place."""
    lanes, known, _, sequence = _place(tl.program_id(0), P, 1, lane_blocks, LANES)
    state_re = tl.zeros([LANES], tl.float64)
    state_im = tl.zeros([LANES], tl.float64)
    if initial is not None:
        first_re, first_im = _read(initial + sequence * initial_sequence, lanes * initial_lane, known, IS_COMPLEX)
        state_re += first_re
        state_im += first_im
    if not PER_STEP:
        a_re, a_im = _fixed(a, a_lane, lanes, known, CONJUGATE, IS_COMPLEX)
        for _ in tl.static_range(LOG_STEPS):
            a_re, a_im = _multiply_add(a_re, a_im, a_re, a_im, 0.0, 0.0, IS_COMPLEX)
    for group in range(0, chunks, _GROUP):
        inputs = ()
        factors = ()
        for i in tl.static_range(_GROUP):
            chunk = group + i
            place = (sequence * chunks + chunk) * P + lanes
            inside = known & (chunk < chunks - 1)
            inputs += (_read(ends, place, inside, IS_COMPLEX),)
            if PER_STEP:
                factors += (_read(across, place, inside, IS_COMPLEX),)
        for i in tl.static_range(_GROUP):
            chunk = group + i
            place = (sequence * chunks + chunk) * P + lanes
            rounded_re, rounded_im = state_re.to(tl.float32), state_im.to(tl.float32)
            _write(ends, place, known & (chunk < chunks), rounded_re, rounded_im, IS_COMPLEX)
            b_re, b_im = inputs[i]
            if PER_STEP:
                one_re, one_im = factors[i]
                a_re, a_im = one_re.to(tl.float64), one_im.to(tl.float64)
            state_re, state_im = _multiply_add(
                a_re, a_im, state_re, state_im, b_re.to(tl.float64), b_im.to(tl.float64), IS_COMPLEX
            )


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
    STEPS: tl.constexpr, ADJOINT: tl.constexpr,
    IS_COMPLEX: tl.constexpr, PER_STEP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The states of each chunk from the one before it. With `states`, those of a forward scan that is being gone back
    through, the products conj(x_{t-1}) g_t too, or their sum over the chunk."""
    lanes, known, chunk, sequence = _place(tl.program_id(0), P, chunks, lane_blocks, LANES)
    a += sequence * a_sequence
    b += sequence * b_sequence
    x += sequence * x_sequence
    state_re = tl.zeros([LANES], tl.float32)
    state_im = tl.zeros([LANES], tl.float32)
    if before is not None:
        before += sequence * before_sequence + chunk * before_chunk
        state_re, state_im = _read(before, lanes * before_lane, known, IS_COMPLEX)
    if states is not None:
        states += sequence * states_sequence
        da += sequence * da_sequence
    sum_re = tl.zeros([LANES], tl.float64)
    sum_im = tl.zeros([LANES], tl.float64)
    if not PER_STEP:
        fixed_re, fixed_im = _fixed(a, a_lane, lanes, known, ADJOINT, IS_COMPLEX)
        a_re, low_re = _halves(fixed_re)
        a_im, low_im = _halves(fixed_im)
    for group in range(0, STEPS, _GROUP):
        inputs = ()
        factors = ()
        earlier = ()
        for i in tl.static_range(_GROUP):
            step = (chunk * STEPS + group + i).to(tl.int64)
            inside = known & (step < L)
            inputs += (_read(b, step * b_step + lanes * b_lane, inside, IS_COMPLEX),)
            if PER_STEP:
                factors += (_factor(a, a_step, a_lane, step, lanes, inside, ADJOINT, IS_COMPLEX),)
            if states is not None:
                place = (step + 1) * states_step + lanes * states_lane
                earlier += (_read(states, place, known & (step + 1 < L), IS_COMPLEX),)
        for i in tl.static_range(_GROUP):
            step = (chunk * STEPS + group + i).to(tl.int64)
            inside = known & (step < L)
            b_re, b_im = inputs[i]
            if PER_STEP:
                a_re, a_im = factors[i]
            else:
                b_re, b_im = _multiply_add(low_re, low_im, state_re, state_im, b_re, b_im, IS_COMPLEX)
            state_re, state_im = _multiply_add(a_re, a_im, state_re, state_im, b_re, b_im, IS_COMPLEX)
            _write(x, step * x_step + lanes * x_lane, inside, state_re, state_im, IS_COMPLEX)
            if states is not None:
                x_re, x_im = earlier[i]
                product_re, product_im = _multiply_add(x_re, -x_im, state_re, state_im, 0.0, 0.0, IS_COMPLEX)
                if PER_STEP:
                    _write(da, step * da_step + lanes * da_lane, inside, product_re, product_im, IS_COMPLEX)
                else:
                    sum_re += product_re.to(tl.float64)
                    sum_im += product_im.to(tl.float64)
    if states is not None and not PER_STEP:
        place = chunk * da_step + lanes * da_lane
        tl.store(da + place, sum_re, mask=known)
        if IS_COMPLEX:
            tl.store(da + place + 1, sum_im, mask=known)
