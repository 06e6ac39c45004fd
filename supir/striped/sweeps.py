"""Cut a network's steps into sweeps: one pass over the stripes of one map each.

Pure integers. Levels (maps of one size) whose every block fits in the workspace run natively;
elsewhere all sweeps that write maps of one level use the same cuts, so that a stripe reads
three stripes at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ..errors import ShapeError
from .geometry import MIN_ROWS, Reach, Task, out_size, partition, tasks
from .layout import Kind, Step

MAX_SCORES = 1 << 28  # query rows x keys of one attention call, should its kernel store them
_STAT_BYTES = 4  # statistics see fp32 values
_TALL_ROWS = 1 << 20  # where bytes grow in proportion to rows, whatever a sweep's fixed part


class Pass(str, Enum):
    """What a sweep does."""

    NATIVE = "native"  # the host's own block, on the whole map
    CONV_IN = "conv_in"
    CONV1 = "conv1"  # norm1, SiLU, conv1; the 1x1 shortcut too, where there is one
    CONV2 = "conv2"  # norm2, SiLU, conv2, plus the residual
    KEYS = "keys"  # attention keys and values of every token
    QUERIES = "queries"  # queries, attention, projection, plus the residual
    UP = "up"
    DOWN = "down"
    OUT = "out"


REACH = {
    Pass.UP: Reach.UP,
    Pass.DOWN: Reach.DOWN,
    Pass.KEYS: Reach.POINT,
    Pass.QUERIES: Reach.POINT,
}


@dataclass(frozen=True)
class Limits:
    """What shapes a plan besides the network and the picture. See StripeOptions."""

    workspace_bytes: int
    element_bytes: int
    polyphase: bool = False
    store_budget_bytes: int | None = None
    own_attention: bool = False  # an attention callable was passed in


@dataclass(frozen=True)
class Sweep:
    """One pass over a map.

    Args:
        step: the block it belongs to.
        height_in, width_in, height, width: size of the source and of the written map.
        cin, cout: channels read and written by this pass.
        bounds: cuts of the written map.
        tasks: one per stripe.
        stat_groups: groups of the statistics collected while writing, 0 for none.
        workspace_bytes: transient bytes of the tallest stripe.
    """

    step: Step
    work: Pass
    height_in: int
    width_in: int
    height: int
    width: int
    cin: int
    cout: int
    bounds: tuple[int, ...]
    tasks: tuple[Task, ...]
    stat_groups: int
    workspace_bytes: int

    @property
    def normed(self) -> bool:
        """True when the source is normalised on its way in."""
        return self.work in (Pass.CONV1, Pass.CONV2, Pass.KEYS, Pass.QUERIES, Pass.OUT)


@dataclass(frozen=True)
class _Placed:
    """A step with its map sizes; level is that of the written map, own_level decides nativeness."""

    step: Step
    height_in: int
    width_in: int
    height: int
    width: int
    level: int
    own_level: int


def make_sweeps(
    steps: Sequence[Step], height: int, width: int, limits: Limits
) -> tuple[Sweep, ...]:
    """Plan every sweep of a network over an input of height x width.

    Raises: ShapeError when a side is too short for the network.
    """
    placed = _place(steps, height, width)
    native = _native_levels(placed, limits)
    rows = _level_rows(placed, native, limits)
    made: list[Sweep] = []
    for i, at in enumerate(placed):
        following = placed[i + 1].step.groups if i + 1 < len(placed) else 0
        if _runs_natively(at, native, limits):
            made.append(_native_sweep(at, limits))
            continue
        bounds = partition(at.height, rows[at.level])
        works = _passes(at.step)
        for work in works:
            groups = following if work is works[-1] else 0
            made.append(
                _sweep(at, work, bounds, at.step.groups if work is Pass.CONV1 else groups, limits)
            )
    return tuple(made)


def query_chunk(queries: int, keys: int) -> int:
    """Return the queries per attention call that keep queries x keys within MAX_SCORES."""
    most = max(1, MAX_SCORES // keys)
    if most >= queries:
        return queries
    even = -(-queries // -(-queries // most))
    return min(most, -(-even // 64) * 64) if most >= 64 else most


def _place(steps: Sequence[Step], height: int, width: int) -> list[_Placed]:
    level, placed = 0, list[_Placed]()
    for step in steps:
        reach = {Kind.UP: Reach.UP, Kind.DOWN: Reach.DOWN}.get(step.kind, Reach.SAME)
        h, w = out_size(reach, height, width)
        if h < 1 or w < 1:
            raise ShapeError(
                f"A map of {height}x{width} cannot be halved again at {step.name}: the picture is "
                f"too small for this VAE. Use an image with both sides of at least 8 px."
            )
        into = level + (reach is not Reach.SAME)
        own = into if reach is Reach.UP else level
        placed.append(_Placed(step, height, width, h, w, into, own))
        height, width, level = h, w, into
    return placed


def _passes(step: Step) -> tuple[Pass, ...]:
    if step.kind is Kind.RES:
        return (Pass.CONV1, Pass.CONV2)
    if step.kind is Kind.ATTN:
        return (Pass.KEYS, Pass.QUERIES)
    return (Pass(step.kind.value),)


def _widths(step: Step, work: Pass) -> tuple[int, int]:
    return (step.cout, step.cout) if work is Pass.CONV2 else (step.cin, step.cout)


def _sweep(at: _Placed, work: Pass, bounds: tuple[int, ...], groups: int, limits: Limits) -> Sweep:
    reach = REACH.get(work, Reach.SAME)
    cin, cout = _widths(at.step, work)
    return Sweep(
        step=at.step,
        work=work,
        height_in=at.height_in,
        width_in=at.width_in,
        height=at.height,
        width=at.width,
        cin=cin,
        cout=cout,
        bounds=bounds,
        tasks=tasks(reach, bounds, at.height_in),
        stat_groups=groups,
        workspace_bytes=transient_bytes(at, work, bounds[1], limits),
    )


def _native_sweep(at: _Placed, limits: Limits) -> Sweep:
    own = at.step.cin * at.height_in * at.width_in * limits.element_bytes
    return Sweep(
        step=at.step,
        work=Pass.NATIVE,
        height_in=at.height_in,
        width_in=at.width_in,
        height=at.height,
        width=at.width,
        cin=at.step.cin,
        cout=at.step.cout,
        bounds=(0, at.height),
        tasks=(Task(0, at.height, 0, at.height_in, 0, 0, at.height_in),),
        stat_groups=0,
        workspace_bytes=_native_bytes(at, limits) - own,
    )


def transient_bytes(at: _Placed, work: Pass, rows: int, limits: Limits) -> int:
    """Return the bytes one stripe of ``rows`` output rows holds besides stored stripes."""
    size = limits.element_bytes
    cin, cout = _widths(at.step, work)
    out = cout * rows * at.width * size
    stats = cout * rows * at.width * _STAT_BYTES
    source_rows = rows + 2
    if work in (Pass.KEYS, Pass.QUERIES):
        source_rows = rows
        held = cin * rows * at.width * size * (2 if work is Pass.KEYS else 4) + stats
    elif work is Pass.DOWN:
        source_rows = 2 * rows + 1
        held = cin * source_rows * (at.width_in + 1) * size + out + stats
    elif work is Pass.UP and limits.polyphase:
        source_rows = rows // 2 + 2
        phases = 4 * cout * (rows // 2 + 1) * (at.width_in + 1) * size
        held = cin * source_rows * at.width_in * size + out + max(phases, stats)
        held += cin * source_rows * 2 * size
        kernels = 16 * size * cin * cout  # folded; folding takes fp32 copies of what it folds
        held = max(held + kernels, kernels + 88 * cin * cout)
    else:
        held = cin * (rows + 2) * at.width * size + out
        held += max(stats, out) if at.step.shortcut else stats
        source_rows = rows // 2 + 2 if work is Pass.UP else source_rows
    if limits.store_budget_bytes is not None:  # a spilled stripe comes back as a copy
        held += max(cin * source_rows * at.width_in, cout * rows * at.width) * size
    return held


def _native_bytes(at: _Placed, limits: Limits) -> int:
    """Return the live bytes of the host's own block, its input and output included."""
    step = at.step
    source, target = at.height_in * at.width_in, at.height * at.width
    if step.kind is Kind.RES:
        elements = max(2 * step.cin + step.cout, step.cin + 3 * step.cout) * target
    elif step.kind is Kind.UP:
        elements = step.cin * source + (step.cin + step.cout) * target
    elif step.kind is Kind.DOWN:
        padded = step.cin * (at.height_in + 1) * (at.width_in + 1)
        elements = step.cin * source + padded + step.cout * target
    elif step.kind is Kind.ATTN:
        return 8 * step.cin * target * limits.element_bytes + 8 * target * target
    elif step.kind is Kind.OUT:
        elements = (3 * step.cin + 2 * step.cout) * target
    else:
        elements = (step.cin + step.cout) * target
    return elements * limits.element_bytes


def _native_levels(placed: Sequence[_Placed], limits: Limits) -> frozenset[int]:
    """Return the levels on which every block but attention fits in the workspace."""
    levels = {at.own_level for at in placed}
    for at in placed:
        if at.step.kind is not Kind.ATTN and _native_bytes(at, limits) > limits.workspace_bytes:
            levels.discard(at.own_level)
    return frozenset(levels)


def _runs_natively(at: _Placed, native: frozenset[int], limits: Limits) -> bool:
    if at.own_level not in native:
        return False
    if at.step.kind is not Kind.ATTN:
        return True
    return not limits.own_attention and _native_bytes(at, limits) <= limits.workspace_bytes


def _level_rows(
    placed: Sequence[_Placed], native: frozenset[int], limits: Limits
) -> dict[int, int]:
    """Return the rows per stripe of each level: what the most demanding sweep can afford."""
    rows: dict[int, int] = {}
    for at in placed:
        if _runs_natively(at, native, limits):
            continue
        for work in _passes(at.step):
            tall = transient_bytes(at, work, _TALL_ROWS, limits)
            per_two = transient_bytes(at, work, _TALL_ROWS + 2, limits) - tall
            base = tall - per_two * (_TALL_ROWS - MIN_ROWS) // 2
            fit = MIN_ROWS + 2 * max(0, (limits.workspace_bytes - base) // per_two)
            rows[at.level] = min(rows.get(at.level, fit), fit)
    return rows
