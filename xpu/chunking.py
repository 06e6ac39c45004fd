"""How one attention call is cut into pieces, decided on integers alone.

Owns the piece sizes and the exact cost of a plan: launches, bytes, temporaries. Touches no tensor;
``attention.py`` carries plans out and tests hold both to the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from .errors import DeviceMemoryError

MAX_SCORES = 2**28
"""Most score elements one unfused piece may hold. Calls with more than 2^30 fp32 scores hang some
devices; 2^28 leaves a factor of four."""

ROW_MULTIPLE = 64
"""Pieces have a multiple of this many query rows (the tile height of the matrix engine)."""

UNFUSED_BYTES_PER_SCORE = 10
"""What a fused call costs per score if the library falls back to its unfused path: fp32 scores,
fp32 probabilities, half-precision copy."""

Policy = Literal["auto", "fused", "fused_pieces", "math", "cpu"]
MaskKind = Literal["none", "bool", "float"]
Rows = Callable[[int], int]


@dataclass(frozen=True)
class AttentionLimits:
    """What one attention call may cost.

    workspace_bytes: all temporaries of the call together, result excluded.
    alloc_bytes: largest single temporary.
    launch_flops: most arithmetic in one launch (seconds per launch × sustained FLOP/s).
    max_scores: most score elements an unfused piece may hold.
    fused: evidence about the fused kernel: ``fused``, ``math`` or ``unknown``.
    fused_max_dim_head: widest head the fused kernel takes.
    half_scores: keep scores in the input's dtype instead of float32; half the traffic, error at
        the input dtype's own level.
    """

    workspace_bytes: int
    alloc_bytes: int
    launch_flops: int
    max_scores: int = MAX_SCORES
    fused: str = "unknown"
    fused_max_dim_head: int = 512
    half_scores: bool = False

    def shrunk(self, halvings: int) -> AttentionLimits:
        """Return these limits with memory, arithmetic and scores divided by 2**halvings."""
        return replace(
            self,
            workspace_bytes=self.workspace_bytes >> halvings,
            alloc_bytes=self.alloc_bytes >> halvings,
            launch_flops=self.launch_flops >> halvings,
            max_scores=self.max_scores >> halvings,
        )


@dataclass(frozen=True)
class AttentionPlan:
    """One call, cut.

    policy: ``fused`` (one kernel), ``fused_pieces``, ``math`` (unfused, exact) or ``cpu``.
    rows: query rows of a piece; the last piece may have fewer.
    batch_step, head_step: batch items and heads of a piece.
    key_step: keys of a block. online: the softmax is carried from block to block.
    pieces: number of (batch, heads, rows) pieces; blocks: key blocks over all pieces.
    score_elements: scores of the largest piece, whether or not they are materialised.
    temp_bytes: peak of everything allocated besides the result. largest_bytes: largest of them.
    inner_bytes: bytes per score.
    launches, flops: exactly what a dispatch counter sees. bytes_moved: the same, for ungrouped
    calls without a mask.
    """

    policy: Literal["fused", "fused_pieces", "math", "cpu"]
    rows: int
    batch_step: int
    head_step: int
    key_step: int
    pieces: int
    blocks: int
    score_elements: int
    temp_bytes: int
    largest_bytes: int
    inner_bytes: int
    launches: int
    bytes_moved: int
    flops: int
    online: bool

    @property
    def head_split(self) -> int:
        """Batch items times heads of one piece."""
        return self.batch_step * self.head_step


@dataclass(frozen=True)
class _Call:
    """Sizes of one call; ``width`` is bytes per element of q, k, v and ``inner`` of the scores."""

    batch: int
    heads: int
    n_query: int
    n_key: int
    dim_head: int
    width: int
    inner: int
    mask: MaskKind


def plan_attention(
    batch: int,
    heads: int,
    n_query: int,
    n_key: int,
    dim_head: int,
    dtype_bytes: int,
    limits: AttentionLimits,
    policy: Policy = "auto",
    mask: MaskKind = "none",
    grouped: bool = False,
) -> AttentionPlan:
    """Cut one attention call so that every piece stays within the limits.

    Args:
        batch, heads, n_query, n_key, dim_head: sizes of q [B, H, Nq, D] and k, v [B, H, Nk, D],
            heads counted after grouped keys are expanded; all >= 1.
        dtype_bytes: bytes per element of q, k and v.
        limits: what a piece may cost.
        policy: ``auto`` follows the evidence in limits. ``fused`` cuts by arithmetic per launch
            only; ``fused_pieces`` also keeps each piece small enough for an unfused fallback.
        mask: whether scores are masked, and how.
        grouped: k and v have fewer heads than q and are expanded unless one kernel takes them.
    Guarantees: scores of a math piece <= limits.max_scores; temp_bytes <= limits.workspace_bytes
        and largest_bytes <= limits.alloc_bytes for math.
    Raises: ValueError for sizes below 1. DeviceMemoryError if even 64 keys at a time do not fit.
    """
    sizes = (batch, heads, n_query, n_key, dim_head, dtype_bytes)
    if min(sizes) < 1:
        raise ValueError(f"Attention sizes {sizes} must all be at least 1.")
    inner = dtype_bytes if limits.half_scores else max(4, dtype_bytes)
    call = _Call(batch, heads, n_query, n_key, dim_head, dtype_bytes, inner, mask)
    if not grouped:
        return _plan(call, limits, policy)
    expanded = 2 * batch * heads * n_key * dim_head * dtype_bytes
    left = max(0, limits.workspace_bytes - expanded)
    plan = _plan(call, replace(limits, workspace_bytes=left), policy)
    if plan.policy == "fused" and mask == "none":
        return plan
    return replace(plan, launches=plan.launches + 2, temp_bytes=plan.temp_bytes + expanded)


def _plan(call: _Call, limits: AttentionLimits, policy: Policy) -> AttentionPlan:
    if policy == "cpu":
        return _cpu_plan(call)
    if policy == "auto":
        unfit = limits.fused == "math" or call.dim_head > limits.fused_max_dim_head
        policy = "math" if unfit else "fused"
        if policy == "fused" and (limits.fused != "fused" or call.width > 2):
            policy = "fused_pieces"  # float32 may run unfused inside the library
    if policy != "math":
        plan = _fused_plan(call, limits, bounded=policy == "fused_pieces")
        if plan is not None:
            return plan
    return _math_plan(call, limits)


def _round_down(rows: int) -> int:
    return rows // ROW_MULTIPLE * ROW_MULTIPLE


def _equal_rows(total: int, most: int) -> int:
    """Equal pieces, a multiple of 64 rows each, none above ``most`` (>= 64 or >= total)."""
    if most >= total:
        return total
    pieces = -(-total // _round_down(most))
    return min(total, -(-total // (pieces * ROW_MULTIPLE)) * ROW_MULTIPLE)


def _equal_step(total: int, most: int) -> int:
    return -(-total // -(-total // most))


def _split(call: _Call, rows_for: Rows, fewest: bool) -> tuple[int, int, int] | None:
    """Return (batch_step, head_step, rows), or None if one head at 64 rows is already too much.

    Batch items are split before heads. The largest group that allows 64 rows wins; with ``fewest``,
    the one with the fewest pieces (flattened keys of a smaller group leave room for more rows).
    """
    floor = min(ROW_MULTIPLE, call.n_query)
    steps = [(b, call.heads) for b in range(call.batch, 0, -1)]
    steps += [(1, h) for h in range(call.heads - 1, 0, -1)]
    best, least = None, 0
    for batch_step, head_step in steps:
        batch_step, head_step = (
            _equal_step(call.batch, batch_step),
            _equal_step(call.heads, head_step),
        )
        most = rows_for(batch_step * head_step)
        if most < floor:
            continue
        rows = _equal_rows(call.n_query, most)
        cost = _groups(call, batch_step, head_step) * (1 - (-call.n_query // rows))
        if best is None or cost < least:
            best, least = (batch_step, head_step, rows), cost
        if not fewest:
            break
    return best


def _fused_plan(call: _Call, limits: AttentionLimits, bounded: bool) -> AttentionPlan | None:
    """Cut by arithmetic per launch; if bounded, also so that an unfused fallback would fit."""

    def rows_for(group: int) -> int:
        scores_per_row = group * call.n_key
        most = limits.launch_flops // (4 * scores_per_row * call.dim_head)
        if bounded:
            most = min(
                most,
                limits.workspace_bytes // (scores_per_row * UNFUSED_BYTES_PER_SCORE),
                limits.alloc_bytes // (scores_per_row * 4),
                limits.max_scores // scores_per_row,
            )
        return most

    cut = _split(call, rows_for, fewest=False)
    if cut is None:
        if bounded:
            return None
        cut = (1, 1, min(ROW_MULTIPLE, call.n_query))
    batch_step, head_step, rows = cut
    pieces = _groups(call, batch_step, head_step) * -(-call.n_query // rows)
    whole = pieces == 1
    row_bytes = batch_step * head_step * rows * call.dim_head * call.width
    result = call.batch * call.heads * call.n_query * call.dim_head * call.width
    key_bytes = 2 * call.batch * call.heads * call.n_key * call.dim_head * call.width
    key_bytes *= -(-call.n_query // rows)
    return AttentionPlan(
        policy="fused" if whole else "fused_pieces",
        online=False,
        temp_bytes=0 if whole else 2 * row_bytes,
        largest_bytes=0 if whole else row_bytes,
        launches=1 if whole else 3 * pieces,
        bytes_moved=key_bytes + (2 * result if whole else 6 * result),
        **_shape(call, cut, call.n_key),
    )


def _groups(call: _Call, batch_step: int, head_step: int) -> int:
    return -(-call.batch // batch_step) * -(-call.heads // head_step)


def _shape(call: _Call, cut: tuple[int, int, int], key_step: int) -> dict[str, int]:
    """The part of a plan that follows from the cut alone."""
    batch_step, head_step, rows = cut
    pieces = _groups(call, batch_step, head_step) * -(-call.n_query // rows)
    lines = call.batch * call.heads
    return {
        "rows": rows,
        "batch_step": batch_step,
        "head_step": head_step,
        "key_step": key_step,
        "pieces": pieces,
        "blocks": pieces * -(-call.n_key // key_step),
        "score_elements": batch_step * head_step * rows * key_step,
        "inner_bytes": call.inner,
        "flops": 4 * lines * call.n_query * call.n_key * call.dim_head,
    }


def _cpu_plan(call: _Call) -> AttentionPlan:
    """Everything to the host and the result back: 3 copies out (4 with a mask), 1 copy in."""
    tokens = 2 * (call.n_query + call.n_key)
    moved = 2 * call.batch * call.heads * call.dim_head * call.width * tokens
    return AttentionPlan(
        policy="cpu",
        online=False,
        temp_bytes=0,
        largest_bytes=0,
        launches=4 + (call.mask != "none"),
        bytes_moved=moved,
        **_shape(call, (call.batch, call.heads, call.n_query), call.n_key),
    )


def _math_plan(call: _Call, limits: AttentionLimits) -> AttentionPlan:
    """Cut rows, then batch and heads, then keys."""
    d, nq, nk, inner = call.dim_head, call.n_query, call.n_key, call.inner
    masked = call.mask == "bool"

    def rows_for(group: int) -> int:
        flat = group * d * inner * (nq + 2 * nk)
        if group * d * inner * max(nq, nk) > limits.alloc_bytes:
            return 0
        # scores and probabilities, the piece's result, the inverted mask, its per-row flags
        per_row = group * (nk * (2 * inner + masked) + d * inner + 2 * inner + 2)
        return max(
            0,
            min(
                (limits.workspace_bytes - flat) // per_row,
                limits.alloc_bytes // (group * nk * inner),
                limits.max_scores // (group * nk),
                limits.launch_flops // (4 * group * nk * d),
            ),
        )

    cut = _split(call, rows_for, fewest=True)
    if cut is None:
        return _online_plan(call, limits)
    batch_step, head_step, rows = cut
    group = batch_step * head_step
    groups = _groups(call, batch_step, head_step)
    row_pieces = -(-nq // rows)
    pieces = groups * row_pieces
    flat = group * d * inner * (nq + 2 * nk)
    per_row = group * (nk * (2 * inner + masked) + d * inner)
    if call.mask != "none":
        per_row += group * (2 * inner + 2)
    return AttentionPlan(
        policy="math",
        online=False,
        temp_bytes=flat + rows * per_row,
        largest_bytes=group * inner * max(rows * nk, d * nq, d * nk),
        launches=4 * groups + (4 if call.mask == "none" else 8) * pieces,
        bytes_moved=_math_bytes(call, row_pieces),
        **_shape(call, cut, nk),
    )


def _math_bytes(call: _Call, row_pieces: int) -> int:
    """Traffic of the unmasked math path, each operand counted where an operator reads or writes it."""
    lines = call.batch * call.heads
    query, keys = lines * call.n_query * call.dim_head, lines * call.n_key * call.dim_head
    scores = lines * call.n_query * call.n_key
    flatten = (query + 2 * keys) * (call.width + call.inner) + 2 * query * call.inner
    gemms = row_pieces * 2 * keys * call.inner + 2 * query * call.inner
    store = query * (call.inner + call.width)
    return flatten + gemms + store + 4 * scores * call.inner


def _online_plan(call: _Call, limits: AttentionLimits) -> AttentionPlan:
    """One head, up to 64 rows, as many keys at a time as fit; softmax carried from block to block."""
    d, inner = call.dim_head, call.inner
    rows = min(ROW_MULTIPLE, call.n_query)
    fixed = rows * inner * (3 * d + 8)  # q, accumulator, reserve; running maximum, sum, temporaries
    per_key = rows * (inner + (call.mask == "bool")) + 2 * d * inner
    most = min(
        (limits.workspace_bytes - fixed) // per_key,
        limits.alloc_bytes // (inner * max(rows, d)),
        limits.max_scores // rows,
        limits.launch_flops // (4 * rows * d),
    )
    if most < min(ROW_MULTIPLE, call.n_key):
        need = fixed + per_key * min(ROW_MULTIPLE, call.n_key)
        raise DeviceMemoryError(
            f"Attention over {call.n_query} queries and {call.n_key} keys with head width {d} needs "
            f"a workspace of {need} bytes even for {rows} rows and 64 keys at a time; the limits are "
            f"{limits.workspace_bytes} bytes in all, {limits.alloc_bytes} bytes per tensor and "
            f"{limits.max_scores} scores. Free device memory, or set a smaller tile_px."
        )
    key_step = _equal_rows(call.n_key, most)
    pieces = call.batch * call.heads * -(-call.n_query // rows)
    per_piece = -(-call.n_key // key_step)
    block = 14 + {"none": 0, "bool": 2, "float": 1}[call.mask]
    blocks = pieces * per_piece
    return AttentionPlan(
        policy="math",
        online=True,
        temp_bytes=fixed + per_key * key_step,
        largest_bytes=inner * max(rows * key_step, key_step * d, rows * d),
        launches=8 * pieces + block * blocks,
        bytes_moved=_online_bytes(call, rows, per_piece),
        **_shape(call, (1, 1, rows), key_step),
    )


def _online_bytes(call: _Call, rows: int, blocks: int) -> int:
    """Traffic of the unmasked online path; ``blocks`` key blocks for every row piece.

    Numbers of passes are read off the operators in ``attention.py``: per block and score element 8,
    per row 18, per query element 5.
    """
    lines, inner, width = call.batch * call.heads, call.inner, call.width
    row_pieces = -(-call.n_query // rows)
    query, keys = lines * call.n_query * call.dim_head, lines * call.n_key * call.dim_head
    scores, tokens = lines * call.n_query * call.n_key, lines * call.n_query
    once = 2 * query * (width + inner) + 5 * query * inner + 5 * tokens * inner
    key_blocks = row_pieces * 2 * keys * (width + 2 * inner)
    per_block = (5 * query + 18 * tokens) * inner
    return once + key_blocks + 8 * scores * inner + blocks * per_block
