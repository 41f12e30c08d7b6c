"""The law of Pathfinder pictures: two long dashed paths, short ones, two discs (Linsley et al., NeurIPS 2018).

Parameters are those of the Long Range Arena (its data/pathfinder.py, with integer division) and, for segmentation, of
the DLR paper's generator. The construction is that of the published generator, github.com/drewlinsley/pathfinder at
ab9c130, and of github.com/ag1988/dlr at 580d854c, as they behave when run:

- A dash is drawn on a canvas `antialias` times finer and shrunk by Pillow's Lanczos filter; its mask, the fine dash
  dilated by a disc, likewise. Both depend on an orientation alone, of which there are few: 360 for a first dash, and
  one for each pixel of the circle on which a path goes on. They are drawn once (`tables`); what remains for a picture
  is choosing and placing them, compiled. Masks are bytes, and what is compared with them are bytes: "free" is at most
  76 (0.3), two dashes cross where their masks sum to 459 (1.8) or more.
- A first dash is never laid in an orientation whose mask, seen from a corner, can lie outside the picture as a whole:
  OpenCV gives such corners -1e308, and the generator then finds no place. At 32 pixels 11 of 12 orientations
  are lost so, for the distractors too, of which few are laid therefore; at 64 three of four; from 128 on almost none.
- An attempt at the two long paths that fails is repeated from both first dashes on.

Letters: W pixels a side, L = W² pixels, O orientations, J ends that a dash can have around its pivot. Coordinates are
(row, column), angles radians, displacements (distance sin, distance cos), rounded up to whole pixels.
"""

import functools
import math
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spt.rng import stream
from spt.tasks.generators.compiled import is_compiled, jit
from spt.tasks.parallel import allocate, fill

CHUNK = 2**22  # pixels that a worker makes at a time, about


class Law(NamedTuple):
    """Parameters of one published set. Lengths are in pixels, except of paths: dashes."""

    side: int
    padding: int  # border kept free
    length: int  # of a dash
    thickness: float
    margins: tuple[int, ...]  # gap around a dash; one of them for each picture
    apart: int  # the starts of the two paths
    radius: float  # of a disc
    continuity: float  # larger: straighter paths
    contour: int  # dashes of a path
    distractor: int  # dashes of a short path
    distractors: int
    contrast: float = 1.0  # of short paths
    dash_contrast: float = 1.0  # times `contrast`: of long paths
    antialias: int = 2
    segmentation: bool = False  # discs on short paths too; ringing is not clipped


_32 = Law(32, 1, 2, 0.5, (1,), 7, 1.5, 1.0, 14, 4, 5, contrast=2.0, dash_contrast=0.75)
_64 = Law(64, 1, 5, 1.0, (1,), 12, 2.5, 1.8, 14, 4, 5, contrast=0.8)
_128 = Law(128, 1, 5, 1.5, (2, 3), 20, 3.0, 1.8, 14, 4, 8, contrast=0.9)
_256 = Law(256, 22, 5, 2.0, (3,), 27, 5.0, 1.8, 14, 4, 7)
PATHFINDER = {law.side: law for law in (_32, _64, _128, _256)}  # the hard sets
SHORT_DASHES = {32: 20, 64: 22, 128: 35, 256: 30}  # of all distractors together, about
CONTOURS = {"easy": 6, "intermediate": 9, "hard": 14}
SEGMENTATION = {
    law.side: law._replace(segmentation=True)
    for law in (
        Law(128, 1, 5, 1.5, (2, 3), 22, 2.1, 1.8, 14, 4, 16, contrast=0.9),
        Law(256, 1, 8, 2.0, (4,), 27, 4.2, 2.2, 16, 5, 16),
        Law(512, 1, 22, 6.0, (7,), 40, 9.0, 2.5, 12, 4, 18, antialias=3),
    )
}


def pathfinder(side: int, difficulty: str = "hard", distractors: int | None = None) -> Law:
    """Long Range Arena's parameters; `distractors` short paths instead of theirs."""
    contour = CONTOURS[difficulty]
    short = contour // 3
    count = SHORT_DASHES[side] // short if distractors is None else distractors
    return PATHFINDER[side]._replace(contour=contour, distractor=short, distractors=count)


DEGREES = 360
FREE = 76  # a mask's byte up to which a pixel counts as free: 0.3
CROSSING = 459  # two masks' bytes that together are a crossing: 1.8
SCARCE = 0.01  # share of free pixels under which no more short paths are laid
HOPELESS = 1e-4 * 255  # total weight of all ends under which a path is stuck
DASH_TRIALS, SNAKE_TRIALS = 3, 5
RANDOM_TRIES = 64  # at a free pixel, before all of them are listed
WORD = 0xFFFFFFFF


# ---------------------------------------------------------------------------------------------------- tables


class Tables(NamedTuple):
    """What follows from a law and a margin, for the compiled functions.

    Orientation o is -180 + o degrees for o < 360; 360 + j is the direction from a pivot to end j. Stamps are centred;
    boxes (O, 4) say which of their rows and columns (first, last, first, last) are not zero. Masks stand in fields of
    S = W + 2 pad pixels a side, since ends and dashes can reach beyond the picture.
    """

    side: int
    pad: int
    contour: int
    distractor: int
    distractors: int
    frame: NDArray[np.uint8]  # (2, S, S) the mask at first; the same dilated by the margin, full beyond the picture
    opening: NDArray[np.float64]  # (360, 4) from a first dash's tail to its head, from there to the pivot behind
    ring: NDArray[np.float64]  # (360, 2) from the start of path 1 to that of path 2
    place: NDArray[np.int64]  # (360, 4) where path 1 can start: first row, rows, first column, columns
    usable: NDArray[np.bool_]  # (360,) is a first dash ever laid so?
    foot_start: NDArray[np.int64]  # what must be free around a start
    foot: NDArray[np.int64]  # (…, 2)
    step: NDArray[np.float64]  # (O, 2) from a pivot to the next
    ends: NDArray[np.int64]  # (J, 2) from a pivot
    spans: NDArray[np.int64]  # (O, 4) where `near` begins, how many are there; where `core` begins and stops
    near: NDArray[np.int64]  # (…, 2) ends that have a weight: which, where in a field
    weight: NDArray[np.float64]
    core: NDArray[np.int64]  # (…, 2) where a dash can cross another, and the other mask's byte from which it does
    mask: NDArray[np.uint8]  # (O, m, m)
    mask_box: NDArray[np.int64]
    wide: NDArray[np.uint8]  # (O, m + 2 margin, …) the mask dilated by the margin
    wide_box: NDArray[np.int64]
    path_line: NDArray[np.float32]  # (O, m, m) grey, with contrast
    snake_line: NDArray[np.float32]
    line_box: NDArray[np.int64]
    disc: NDArray[np.float32]  # (R, R, R, R) discs in row and column k of a canvas of R pixels: borders cut them


@functools.lru_cache(maxsize=16)
def tables(law: Law, margin: int) -> Tables:
    W, length, reach = law.side, law.length, law.length + margin
    half = length + math.ceil(law.thickness) + margin
    pad = reach + half + 4  # a pivot lies a margin behind an end, a few roundings apart
    stride = W + 2 * pad
    degrees = np.arange(-180, 180) * np.pi / 180
    reverse = np.where(degrees + np.pi < np.pi, degrees + np.pi, degrees - np.pi)

    angles = np.arange(0, 360, 360.0 / (2 * reach * np.pi)) * np.pi / 180  # one for each pixel of arc
    ends = np.unique(np.floor(reach * _direction(angles)).astype(np.int64), axis=0)
    towards = np.arctan2(ends[:, 0], ends[:, 1])
    course = np.concatenate([degrees, towards])
    drawn = np.concatenate([degrees, np.where(towards < 0, towards + np.pi, towards - np.pi)])  # from its first pixel

    turn = np.abs(towards[None] - course[:, None])
    turn = np.minimum(turn, 2 * np.pi - turn)
    weights = np.maximum(np.cos(np.minimum(turn * law.continuity, np.pi / 2)), 0) ** 2
    near_start, near_row, near = _ragged(weights > 1e-30)

    line, mask = _dashes(law, margin, half, drawn)
    core_start, o, y, x = _ragged(mask >= CROSSING - 255)
    # The mask of a first dash, put a pixel away from its place in both directions, as the generator has it.
    foot_start, _, fy, fx = _ragged(_foot(mask[:DEGREES], half, reach))
    foot = np.stack([fy, fx], 1) - reach
    usable, place = np.zeros(DEGREES, np.bool_), np.zeros((DEGREES, 4), np.int64)
    low, high = 2 * law.apart, W - 2 * law.apart
    for i in range(DEGREES):
        around = foot[foot_start[i] : foot_start[i + 1]]
        usable[i] = len(around) > 0 and not _escapes(around)
        if usable[i]:
            first, last = low - around.min(0), high - around.max(0)
            place[i] = first[0], last[0] - first[0], first[1], last[1] - first[1]

    blocked = np.ones((W, W), np.uint8) * np.uint8(255)
    blocked[law.padding : W - law.padding, law.padding : W - law.padding] = 0
    wide = _dilated(mask, margin)
    frame = np.zeros((2, stride, stride), np.uint8)
    frame[1] = 255
    frame[0, pad : pad + W, pad : pad + W] = blocked
    frame[1, pad : pad + W, pad : pad + W] = _dilated(blocked[None], margin)[0, margin:-margin, margin:-margin]
    return Tables(
        side=W,
        pad=pad,
        contour=law.contour,
        distractor=law.distractor,
        distractors=law.distractors,
        frame=frame,
        opening=np.concatenate([length * _direction(degrees), reach * _direction(reverse)], 1),
        ring=law.apart * _direction(np.arange(DEGREES) * np.pi / 180),
        place=place,
        usable=usable,
        foot_start=foot_start,
        foot=foot,
        step=(length + 2 * margin) * _direction(course),
        ends=ends,
        spans=np.stack([near_start[:-1], np.diff(near_start), core_start[:-1], core_start[1:]], 1),
        near=np.stack([near, ends[near] @ np.array([stride, 1])], 1),
        weight=weights[near_row, near],
        core=np.stack([(y - half) * stride + x - half, CROSSING - mask[o, y, x].astype(np.int64)], 1),
        mask=mask,
        mask_box=_boxes(mask),
        wide=wide,
        wide_box=_boxes(wide),
        path_line=(line * (law.contrast * law.dash_contrast)).astype(np.float32),
        snake_line=(line * law.contrast).astype(np.float32),
        line_box=_boxes(line),
        disc=_discs(law),
    )


def _direction(angles: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.stack([np.sin(angles), np.cos(angles)], 1)


def _ragged(chosen: NDArray[np.bool_]) -> tuple[NDArray[np.int64], ...]:
    """Starts of each first index's entries, one more than there are, then the indices."""
    where = np.nonzero(chosen)
    return np.searchsorted(where[0], np.arange(len(chosen) + 1)), *where


def _dashes(
    law: Law, margin: int, half: int, drawn: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
    """(O, m, m) grey (0 to 1, about) and mask of a dash from the centre in each direction; m = 2 half + 1."""
    from PIL import Image, ImageDraw
    from scipy.ndimage import distance_transform_edt

    a, small = law.antialias, 2 * half + 1
    fine, centre = 2 * half * a + 1, half * a
    lines, masks = np.zeros((len(drawn), small, small)), np.zeros((len(drawn), small, small), np.uint8)
    known: dict[tuple[int, int], int] = {}
    for i, (down, right) in enumerate(law.length * a * _direction(drawn)):
        head = math.ceil(centre + down), math.ceil(centre + right)
        same = known.setdefault(head, i)
        if same != i:
            lines[i], masks[i] = lines[same], masks[same]
            continue
        canvas = Image.new("L", (fine, fine))
        ends = [(centre, centre), (head[1], head[0])]
        ImageDraw.Draw(canvas).line(ends, fill=255, width=round(law.thickness * a))
        near = distance_transform_edt(np.asarray(canvas) == 0) <= margin * a + 1e-6
        lines[i] = _shrunk(canvas, small, law.segmentation)
        masks[i] = _resized(Image.fromarray(near.astype(np.uint8) * np.uint8(255)), small)
    return lines, masks


def _resized(canvas: Any, small: int) -> NDArray[Any]:
    from PIL import Image

    return np.asarray(canvas.resize((small, small), Image.Resampling.LANCZOS))


def _shrunk(canvas: Any, small: int, floats: bool) -> NDArray[np.float64]:
    """A canvas of bytes 0 and 255, shrunk, as 0 to 1: in bytes, which clips, or with overshoot above and below."""
    return _resized(canvas.convert("F") if floats else canvas, small).astype(np.float64) / 255


def _foot(mask: NDArray[np.uint8], half: int, reach: int) -> NDArray[np.bool_]:
    """(360, 2 reach + 1, …) where the mask is full, cut out one pixel off the centre."""
    full = np.pad(mask == 255, ((0, 0), (1, 0), (1, 0)))
    cut = slice(half - reach, half + reach + 1)
    return full[:, cut, cut]


def _escapes(foot: NDArray[np.int64]) -> bool:
    """Does it lie outside the picture as a whole when it stands at one of the picture's corners?"""
    y, x = foot.T
    outside = [(first, second) for first in (y > 0, y < 0) for second in (x > 0, x < 0)]
    return any(bool((first | second).all()) for first, second in outside)


def _dilated(masks: NDArray[np.uint8], radius: int) -> NDArray[np.uint8]:
    """(O, m, m) -> (O, m + 2 radius, …), by a disc."""
    from scipy.ndimage import maximum_filter

    squares = np.arange(-radius, radius + 1) ** 2
    room = np.pad(masks, ((0, 0), (radius, radius), (radius, radius)))
    disc = np.less_equal(squares[:, None] + squares, radius * radius)
    wide: NDArray[np.uint8] = maximum_filter(room, footprint=disc[None], mode="constant")
    return wide


def _boxes(stamps: NDArray[Any]) -> NDArray[np.int64]:
    """(O, 4) first and last row, first and last column that are not zero, from the centre."""
    borders = []
    for axis in (2, 1):
        filled: NDArray[np.bool_] = np.logical_or.reduce(stamps, axis=axis)
        borders += [filled.argmax(1), filled.shape[1] - 1 - filled[:, ::-1].argmax(1)]
    return np.stack(borders, 1) - stamps.shape[1] // 2


@functools.lru_cache(maxsize=16)
def _discs(law: Law) -> NDArray[np.float32]:
    from PIL import Image

    a, reach = law.antialias, math.ceil(law.radius) + 7  # three pixels of the filter, and those it has of its own
    small = 2 * reach + 1
    discs = np.zeros((small,) * 4, np.float32)
    steps = np.arange(small * a)
    for y in range(small):
        for x in range(small):
            inside = (steps[:, None] - y * a) ** 2 + (steps - x * a) ** 2 <= (law.radius * a) ** 2
            canvas = Image.fromarray(inside.astype(np.uint8) * np.uint8(255))
            if law.segmentation:
                discs[y, x] = _resized(Image.fromarray(inside.astype(np.float32)), small)
            else:
                discs[y, x] = _shrunk(canvas, small, False)
    return discs


# ------------------------------------------------------------------------------------------------ construction


@jit
def _next(state: NDArray[np.int64]) -> Any:
    """32 random bits: sfc32 (Doty-Humphrey), in words that never leave 64-bit integers."""
    word = (state[0] + state[1] + state[3]) & WORD
    state[3] = (state[3] + 1) & WORD
    state[0] = state[1] ^ (state[1] >> 9)
    state[1] = (state[2] + (state[2] << 3)) & WORD
    state[2] = ((((state[2] << 21) & WORD) | (state[2] >> 11)) + word) & WORD
    return word


@jit
def _below(state: NDArray[np.int64], n: int) -> int:
    return int((_next(state) * n) >> 32)


def _stamp_loop(
    field: NDArray[Any], pad: int, W: int, stamps: NDArray[Any], boxes: NDArray[np.int64], o: int, y: int, x: int
) -> None:
    half = stamps.shape[1] // 2
    left = max(boxes[o, 2], -x)
    count = min(boxes[o, 3], W - 1 - x) - left + 1
    for row in range(max(boxes[o, 0], -y), min(boxes[o, 1], W - 1 - y) + 1):
        into = field[pad + y + row, pad + x + left : pad + x + left + count]
        values = stamps[o, half + row, half + left : half + left + count]
        for i in range(count):
            into[i] = max(into[i], values[i])


def _stamp_slices(
    field: NDArray[Any], pad: int, W: int, stamps: NDArray[Any], boxes: NDArray[np.int64], o: int, y: int, x: int
) -> None:
    """The same without a compiler."""
    half = stamps.shape[1] // 2
    top, low = max(int(boxes[o, 0]), -y), min(int(boxes[o, 1]), W - 1 - y) + 1
    left, right = max(int(boxes[o, 2]), -x), min(int(boxes[o, 3]), W - 1 - x) + 1
    if top < low and left < right:
        part = field[pad + y + top : pad + y + low, pad + x + left : pad + x + right]
        np.maximum(part, stamps[o, half + top : half + low, half + left : half + right], out=part)


def _copy_loop(into: NDArray[np.uint8], values: NDArray[np.uint8]) -> None:
    flat, others = into.reshape(-1), values.reshape(-1)
    for i in range(len(flat)):
        flat[i] = others[i]


def _copy_slices(into: NDArray[np.uint8], values: NDArray[np.uint8]) -> None:
    into[:] = values


def _lighten_loop(into: NDArray[np.float32], values: NDArray[np.float32]) -> None:
    for row in range(into.shape[0]):
        for column in range(into.shape[1]):
            into[row, column] = max(into[row, column], values[row, column])


def _lighten_slices(into: NDArray[np.float32], values: NDArray[np.float32]) -> None:
    np.maximum(into, values, out=into)


# Numba makes slow work of slices, Python of loops.
_lighten = jit(_lighten_loop) if is_compiled() else _lighten_slices
_copy = jit(_copy_loop) if is_compiled() else _copy_slices
# Lays a stamp centred on pixel (y, x) of the picture; the larger value of each pixel stays, the border cuts.
_stamp = jit(_stamp_loop) if is_compiled() else _stamp_slices


@jit
def _extend(
    spans: NDArray[np.int64],
    near: NDArray[np.int64],
    weight: NDArray[np.float64],
    core: NDArray[np.int64],
    taken: NDArray[np.uint8],
    around: NDArray[np.uint8],
    state: NDArray[np.int64],
    sums: NDArray[np.float64],
    pivot: int,
    course: int,
) -> int:
    """The end around a pivot at which the next dash begins, drawn by weight; -1: stuck. Fields are (S * S,)."""
    first, count = spans[course, 0], spans[course, 1]
    total = 0.0
    for k in range(count):
        total += weight[first + k] * (255 - around[pivot + near[first + k, 1]])
        sums[k] = total
    if total < HOPELESS:
        return -1
    for _ in range(DASH_TRIALS):
        drawn = _next(state) * (total / 4294967296.0)
        k = 0
        while sums[k] <= drawn:
            k += 1
        end = near[first + k, 0]
        place = pivot + near[first + k, 1]
        crosses = False
        for i in range(spans[DEGREES + end, 2], spans[DEGREES + end, 3]):
            if taken[place + core[i, 0]] >= core[i, 1]:
                crosses = True
                break
        if not crosses:
            return int(end)
    return -1


@jit
def _begin(W: int, opening: NDArray[np.float64], now: NDArray[np.int64], y: int, x: int, o: int) -> bool:
    """Lay a path's first dash, unless head or pivot are outside. `now`: pivot, course; the dash's pixel, its shape."""
    head_y, head_x = math.ceil(y + opening[o, 0]), math.ceil(x + opening[o, 1])
    pivot_y, pivot_x = math.ceil(head_y + opening[o, 2]), math.ceil(head_x + opening[o, 3])
    inside = head_y >= 0 and head_y < W and head_x >= 0 and head_x < W
    if not (inside and pivot_y >= 0 and pivot_y < W and pivot_x >= 0 and pivot_x < W):
        return False
    now[0], now[1], now[2], now[3], now[4], now[5] = pivot_y, pivot_x, o, y, x, o
    return True


@jit
def _grow(
    t: Tables,
    state: NDArray[np.int64],
    fields: NDArray[np.uint8],
    sums: NDArray[np.float64],
    now: NDArray[np.int64],
    dashes: NDArray[np.int64],
    path: int,
    first: int,
    last: int,
) -> int:
    """Lay dashes first … last - 1 in turn on the paths `path`, …, one for each row of `now`, from their starts.

    Gives how many; fewer where one is stuck. The mask takes in the dash before, so that neighbours may touch.
    """
    # Named once: handing all tables to a function, or taking one of them in a loop, costs more than what is done here.
    W, pad, spans, near, weight, core = t.side, t.pad, t.spans, t.near, t.weight, t.core
    step, ends, mask, mask_box, wide, wide_box = t.step, t.ends, t.mask, t.mask_box, t.wide, t.wide_box
    field, dilated = fields[0], fields[1]
    taken, around = field.reshape(-1), dilated.reshape(-1)
    paths = len(now)
    for i in range(first, last):
        k = (i - first) % paths
        if i - first >= paths:
            course = now[k, 2]
            y, x = math.ceil(now[k, 0] + step[course, 0]), math.ceil(now[k, 1] + step[course, 1])
            pivot = (y + pad) * (W + 2 * pad) + x + pad
            end = _extend(spans, near, weight, core, taken, around, state, sums, pivot, course)
            if end < 0:
                return i - first
            _stamp(field, pad, W, mask, mask_box, now[k, 5], now[k, 3], now[k, 4])
            _stamp(dilated, pad, W, wide, wide_box, now[k, 5], now[k, 3], now[k, 4])
            now[k, 0], now[k, 1], now[k, 2] = y, x, DEGREES + end
            now[k, 3], now[k, 4], now[k, 5] = y + ends[end, 0], x + ends[end, 1], DEGREES + end
        dashes[i, 0], dashes[i, 1], dashes[i, 2], dashes[i, 3] = path + k, now[k, 3], now[k, 4], now[k, 5]
    # Of several paths the last one's last dash alone is taken in: so it is published.
    _stamp(field, pad, W, mask, mask_box, now[-1, 5], now[-1, 3], now[-1, 4])
    _stamp(dilated, pad, W, wide, wide_box, now[-1, 5], now[-1, 3], now[-1, 4])
    return last - first


@jit
def _two_starts(
    W: int,
    place: NDArray[np.int64],
    opening: NDArray[np.float64],
    ring: NDArray[np.float64],
    state: NDArray[np.int64],
    now: NDArray[np.int64],
) -> bool:
    laid = False
    for _ in range(DASH_TRIALS):
        o = _below(state, DEGREES)
        rows, columns = place[o, 1], place[o, 3]
        if rows <= 0 or columns <= 0:
            return False
        y, x = place[o, 0] + _below(state, rows), place[o, 2] + _below(state, columns)
        laid = _begin(W, opening, now[0], y, x, o)
        if laid:
            break
    if not laid:
        return False
    for _ in range(DASH_TRIALS):
        o, angle = _below(state, DEGREES), _below(state, DEGREES)
        y, x = int(np.rint(now[0, 3] + ring[angle, 0])), int(np.rint(now[0, 4] + ring[angle, 1]))
        if _begin(W, opening, now[1], y, x, o):
            return True
    return False


@jit
def _two_paths(
    t: Tables,
    state: NDArray[np.int64],
    fields: NDArray[np.uint8],
    sums: NDArray[np.float64],
    now: NDArray[np.int64],
    dashes: NDArray[np.int64],
) -> None:
    """Lay both paths, dash by dash in turn; from the start when one is stuck."""
    W, place, opening, ring = t.side, t.place, t.opening, t.ring
    n_dashes = 2 * t.contour
    _copy(fields, t.frame)
    while True:
        if _two_starts(W, place, opening, ring, state, now):
            if _grow(t, state, fields, sums, now, dashes, 0, 0, n_dashes) == n_dashes:
                return
            _copy(fields, t.frame)


@jit
def _is_free(foot: NDArray[np.int64], first: int, last: int, mask: NDArray[np.uint8], pad: int, y: int, x: int) -> bool:
    free = True
    for i in range(first, last):
        if mask[pad + y + foot[i, 0], pad + x + foot[i, 1]] > FREE:
            free = False
            break
    return free


@jit
def _free_place(t: Tables, state: NDArray[np.int64], mask: NDArray[np.uint8], o: int) -> int:
    """A pixel, row by row, drawn from all where a first dash has room; -1: there is none."""
    W, pad, foot, first, last = t.side, t.pad, t.foot, t.foot_start[o], t.foot_start[o + 1]
    for _ in range(RANDOM_TRIES):
        place = _below(state, W * W)
        if _is_free(foot, first, last, mask, pad, place // W, place % W):
            return place
    count = 0
    for place in range(W * W):
        count += _is_free(foot, first, last, mask, pad, place // W, place % W)
    if count == 0:
        return -1
    left, place = _below(state, count), -1
    while left >= 0:
        place += 1
        left -= _is_free(foot, first, last, mask, pad, place // W, place % W)
    return place


@jit
def _start(t: Tables, state: NDArray[np.int64], mask: NDArray[np.uint8], now: NDArray[np.int64]) -> bool:
    for _ in range(DASH_TRIALS):
        o = _below(state, DEGREES)
        place = _free_place(t, state, mask, o) if t.usable[o] else -1
        if place < 0:
            return False
        if _begin(t.side, t.opening, now, place // t.side, place % t.side, o):
            return True
    return False


@jit
def _short_paths(
    t: Tables,
    state: NDArray[np.int64],
    fields: NDArray[np.uint8],
    kept: NDArray[np.uint8],
    sums: NDArray[np.float64],
    now: NDArray[np.int64],
    dashes: NDArray[np.int64],
    starts: NDArray[np.int64],
) -> int:
    """Lay short paths, fewer where none has room. `kept` (2, S, S) holds the fields of what is complete."""
    W, pad, laid = t.side, t.pad, 0
    for _ in range(t.distractors):
        if np.count_nonzero(fields[0, pad : pad + W, pad : pad + W] <= FREE) < SCARCE * W * W:
            break
        _copy(kept, fields)
        for _ in range(SNAKE_TRIALS):
            if _start(t, state, fields[0], now[0]):
                starts[laid, 0], starts[laid, 1] = now[0, 0], now[0, 1]
                first = 2 * t.contour + laid * t.distractor
                done = _grow(t, state, fields, sums, now[:1], dashes, 2 + laid, first, first + t.distractor)
                if done == t.distractor:
                    laid += 1
                    break
                _copy(fields, kept)
    return laid


@jit
def _disc(t: Tables, image: NDArray[np.float32], y: int, x: int) -> None:
    W, size = t.side, t.disc.shape[0]
    row, column = size // 2, size // 2  # on the canvas, whose borders are the picture's where these are near
    if y < row:
        row = y
    elif W - 1 - y < row:
        row = size - W + y
    if x < column:
        column = x
    elif W - 1 - x < column:
        column = size - W + x
    _lighten(image[y - row : y - row + size, x - column : x - column + size], t.disc[row, column])


@jit
def _draw(
    t: Tables,
    state: NDArray[np.int64],
    label: int,
    distractor_discs: bool,
    fields: NDArray[np.uint8],
    sums: NDArray[np.float64],
    now: NDArray[np.int64],
    dashes: NDArray[np.int64],
    discs: NDArray[np.int64],
    image: NDArray[np.float32],
    paths: NDArray[np.float32],
) -> tuple[int, int, int]:
    """One picture, and its two paths where `paths` has room: how many dashes and discs; the marked path."""
    _two_paths(t, state, fields[:2], sums, now, dashes)
    short = _short_paths(t, state, fields[:2], fields[2:], sums, now, dashes, discs[2:])
    laid = 2 * t.contour + short * t.distractor
    marked = _below(state, 2)
    # Dashes alternate between the paths: the first two have their starts, the last two their ends.
    discs[0] = dashes[marked, 1:3]
    discs[1] = dashes[2 * t.contour - 2 + (marked if label == 1 else 1 - marked), 1:3]
    image[:] = 0
    paths[:] = 0
    for i in range(laid):
        path, y, x, o = dashes[i, 0], dashes[i, 1], dashes[i, 2], dashes[i, 3]
        _stamp(image, 0, t.side, t.path_line if path < 2 else t.snake_line, t.line_box, o, y, x)
        if path < paths.shape[0]:
            _stamp(paths[path], 0, t.side, t.path_line, t.line_box, o, y, x)
    shown = 2 + (short if distractor_discs else 0)
    for i in range(shown):
        _disc(t, image, discs[i, 0], discs[i, 1])
    return laid, shown, marked


# ---------------------------------------------------------------------------------------------------- pictures


class Drawing(NamedTuple):
    """How a picture was drawn."""

    label: int  # 1: the two discs are on the two ends of one path
    margin: int  # which of the law's
    dashes: NDArray[np.int64]  # (n, 4) path (0, 1, then short ones), row and column it is drawn from, orientation
    discs: NDArray[np.int64]  # (2 or more, 2) centres; those of the long paths first, start before end
    marked: int  # the path whose start has a disc


class Painter:
    """Draws pictures of one law, with arrays of its own: one for each thread."""

    def __init__(self, law: Law) -> None:
        self.law = law
        self._tables = [tables(law, margin) for margin in law.margins]
        W, short = law.side, law.distractors
        self._fields = [np.empty((4, *t.frame.shape[1:]), np.uint8) for t in self._tables]
        self._sums = np.empty(max(len(t.ends) for t in self._tables))
        self._now = np.empty((2, 6), np.int64)
        self._dashes = np.empty((2 * law.contour + short * law.distractor, 4), np.int64)
        self._discs = np.empty((2 + short, 2), np.int64)
        self._image = np.empty((W, W), np.float32)
        self._paths = np.empty((2 if law.segmentation else 0, W, W), np.float32)
        self._grey = np.empty((W, W))

    def draw(self, seed: int, pixels: NDArray[np.uint8], classes: NDArray[np.uint8] | None = None) -> Drawing:
        """Fill (W, W) arrays: grey; in segmentation 1 on a path, 2 on the one with both discs, 0 elsewhere.

        What is given back holds until the next picture.
        """
        plan = stream(seed, "plan")
        label, which = plan & 1, (plan >> 1) % len(self.law.margins)
        state = np.array([seed & WORD, (seed >> 32) & WORD, plan >> 32, 1], np.int64)
        for _ in range(12):
            _next(state)
        t, marks = self._tables[which], self.law.segmentation
        dashes, discs, marked = _draw(
            t,
            state,
            label,
            marks,
            self._fields[which],
            self._sums,
            self._now,
            self._dashes,
            self._discs,
            self._image,
            self._paths,
        )
        low, high = float(self._image.min()), float(self._image.max())
        self._stretch(self._image, low, high, pixels)
        if classes is not None:
            classes[:] = 0
            part = np.empty_like(pixels)
            for path in range(2):
                self._stretch(self._paths[path], low, high, part)
                np.maximum(classes, (part > 0) * np.uint8(1 + (label == 1 and path == marked)), out=classes)
        return Drawing(label, which, self._dashes[:dashes], self._discs[:discs], marked)

    def _stretch(self, image: NDArray[np.float32], low: float, high: float, into: NDArray[np.uint8]) -> None:
        """To 0 … 255: halves up as the old SciPy did, or to even as scikit-image does."""
        grey = self._grey
        np.subtract(image, low, out=grey, dtype=np.float64)
        if self.law.segmentation:
            np.rint(np.multiply(np.divide(grey, high - low, out=grey), 255, out=grey), out=grey)
        else:
            np.add(np.multiply(grey, 255 / (high - low), out=grey), 0.5, out=grey)
        into[:] = grey  # cut to whole numbers


class Pictures(NamedTuple):
    """Rows of a split."""

    pixels: NDArray[np.uint8]  # (n, L) grey
    labels: NDArray[np.uint8]  # (n,)
    classes: NDArray[np.uint8] | None  # (n, L) of pixels, where the law has them


def pictures(law: Law, seed: int, split: str, first: int, last: int) -> Pictures:
    """Rows first … last - 1 of a split."""
    n, W = last - first, law.side
    pixels, labels = np.empty((n, W, W), np.uint8), np.empty(n, np.uint8)
    classes = np.empty((n, W, W), np.uint8) if law.segmentation else None
    painter = Painter(law)
    for i in range(n):
        address = stream(seed, "segmentation" if law.segmentation else "pathfinder", W, split, first + i)
        labels[i] = painter.draw(address, pixels[i], None if classes is None else classes[i]).label
    return Pictures(pixels.reshape(n, W * W), labels, None if classes is None else classes.reshape(n, W * W))


def generate(law: Law, seed: int, split: str, n: int, what: str) -> Pictures:
    """The first n rows of a split, by several workers; `what` names the work in the log."""
    length = law.side**2
    classes = allocate((n, length), np.uint8) if law.segmentation else None
    rows = Pictures(allocate((n, length), np.uint8), np.empty(n, np.uint8), classes)
    for margin in law.margins:
        tables(law, margin)  # once, not by each thread
    size = max(1, min(CHUNK // length, math.ceil(n / 8)))
    by: Literal["threads", "processes"] = "threads" if is_compiled() else "processes"
    fill(rows, functools.partial(pictures, law, seed, split), n, size, f"{what}, {split}", by)
    return rows
