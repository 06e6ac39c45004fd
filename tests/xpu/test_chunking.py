"""Piece sizes and costs, on integers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from supir_xpu.xpu.chunking import MAX_SCORES, AttentionLimits, plan_attention
from supir_xpu.xpu.errors import DeviceMemoryError

GIB = 2**30
CAP = 2 * GIB
TEN_TFLOPS = int(0.25 * 10e12)
ONE_TFLOPS = int(0.25 * 1e12)


def limits(workspace=2 * GIB, alloc=CAP, flops=TEN_TFLOPS, **changes):
    return AttentionLimits(workspace, alloc, flops, **changes)


# batch, heads, queries, keys, width, bytes | limits | policy, rows, batch, heads, keys, pieces
AWKWARD = [
    ("small self", (1, 10, 64, 64, 64, 2), limits(fused="fused"), ("fused", 64, 1, 10, 64, 1)),
    ("one token", (1, 1, 1, 1, 64, 2), limits(fused="math"), ("math", 1, 1, 1, 1, 1)),
    ("368 fused, strong", (2, 10, 33856, 33856, 64, 2), limits(fused="fused"),
     ("fused_pieces", 11328, 2, 10, 33856, 3)),
    ("368 fused, weak", (2, 10, 33856, 33856, 64, 2), limits(flops=ONE_TFLOPS, fused="fused"),
     ("fused_pieces", 1408, 2, 10, 33856, 25)),
    ("368 math, 2 GiB", (2, 10, 33856, 33856, 64, 2), limits(fused="math"),
     ("math", 1472, 1, 5, 33856, 92)),
    ("368 ds4 math, 2 GiB", (2, 20, 8464, 8464, 64, 2), limits(fused="math"),
     ("math", 1472, 1, 20, 8464, 12)),
    ("77 keys math", (2, 20, 8464, 77, 64, 2), limits(fused="math"),
     ("math", 8464, 2, 20, 77, 1)),
    ("77 keys, tight", (2, 20, 8464, 77, 64, 2), limits(workspace=GIB // 4, fused="math"),
     ("math", 4288, 2, 20, 77, 2)),
    ("prime tokens", (1, 8, 10007, 10007, 64, 2), limits(workspace=GIB // 2, fused="math"),
     ("math", 704, 1, 8, 10007, 15)),
    ("heads split", (1, 24, 32768, 32768, 64, 2), limits(workspace=GIB // 4, fused="math"),
     ("math", 896, 1, 1, 32768, 888)),
    ("batch and heads split", (4, 4, 16384, 16384, 64, 2), limits(workspace=GIB // 8, fused="math"),
     ("math", 896, 1, 1, 16384, 304)),
    ("keys split", (1, 1, 135424, 135424, 512, 2), limits(workspace=GIB // 8, fused="math"),
     ("math", 64, 1, 1, 27136, 2116)),
    ("unknown is bounded", (2, 10, 33856, 33856, 64, 2), limits(),
     ("fused_pieces", 256, 2, 10, 33856, 133)),
    ("unknown, small is whole", (2, 10, 1764, 1764, 64, 2), limits(), ("fused", 1764, 2, 10, 1764, 1)),
    ("float32 is bounded", (1, 10, 16384, 16384, 64, 4), limits(fused="fused"),
     ("fused_pieces", 1280, 1, 10, 16384, 13)),
    ("wide head goes to math", (1, 1, 4096, 4096, 640, 2), limits(fused="fused"),
     ("math", 4096, 1, 1, 4096, 1)),
    ("score limit", (1, 16, 16384, 16384, 64, 2), limits(workspace=64 * GIB, alloc=64 * GIB, fused="math"),
     ("math", 1024, 1, 16, 16384, 16)),
    ("allocation limit", (1, 1, 18496, 18496, 512, 2), limits(alloc=64 * 2**20, fused="math"),
     ("math", 896, 1, 1, 18496, 21)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "bound", "expected"), [row[1:] for row in AWKWARD], ids=[row[0] for row in AWKWARD]
)
def test_plan_of_awkward_shapes(sizes, bound, expected):
    plan = plan_attention(*sizes, bound)
    got = (plan.policy, plan.rows, plan.batch_step, plan.head_step, plan.key_step, plan.pieces)
    assert got == expected


SIZES = st.tuples(
    st.integers(1, 4), st.integers(1, 24), st.integers(1, 140000), st.integers(1, 140000),
    st.sampled_from([1, 40, 64, 80, 128, 160, 512]), st.sampled_from([2, 4]),
)  # fmt: skip
BOUNDS = st.tuples(st.integers(20, 34), st.integers(18, 32), st.integers(32, 42))


@settings(max_examples=300, deadline=None)
@given(SIZES, BOUNDS, st.sampled_from(["none", "bool", "float"]), st.booleans())
def test_math_plan_keeps_every_limit(sizes, powers, mask, half):
    bound = limits(*(2**p for p in powers), half_scores=half)
    try:
        plan = plan_attention(*sizes, bound, "math", mask)
    except DeviceMemoryError:
        return
    batch, heads, n_query, n_key, dim_head, _ = sizes
    group = plan.batch_step * plan.head_step
    assert plan.score_elements <= MAX_SCORES
    assert plan.temp_bytes <= bound.workspace_bytes
    assert plan.largest_bytes <= bound.alloc_bytes
    assert 4 * group * plan.rows * plan.key_step * dim_head <= bound.launch_flops
    assert plan.rows == n_query or plan.rows % 64 == 0
    assert plan.key_step == n_key or plan.key_step % 64 == 0
    row_pieces = -(-n_query // plan.rows)
    assert plan.pieces == -(-batch // plan.batch_step) * -(-heads // plan.head_step) * row_pieces
    # equal pieces: the last one lacks less than 64 rows per piece
    assert row_pieces * plan.rows - n_query < 64 * row_pieces
    if plan.key_step < n_key:
        assert group == 1, "keys are split last"
    if plan.head_step < heads:
        assert plan.batch_step == 1, "batch is split before heads"


@settings(max_examples=200, deadline=None)
@given(SIZES, BOUNDS)
def test_fused_pieces_leave_room_for_an_unfused_fallback(sizes, powers):
    bound = limits(*(2**p for p in powers))
    try:
        plan = plan_attention(*sizes, bound)
    except DeviceMemoryError:
        return
    if plan.policy == "math":
        return
    assert plan.score_elements * 10 <= bound.workspace_bytes
    assert plan.score_elements <= MAX_SCORES
    assert plan.score_elements * 4 * sizes[4] <= bound.launch_flops


def test_cross_attention_to_77_keys_is_whole_at_every_sdxl_size():
    for latent in ((64, 64), (168, 168), (184, 184), (240, 352), (368, 368)):
        tokens = latent[0] * latent[1]
        for down, heads in ((4, 10), (16, 20)):
            for fused in ("fused", "math", "unknown"):
                plan = plan_attention(2, heads, tokens // down, 77, 64, 2, limits(fused=fused))
                assert plan.pieces == 1, (latent, down, fused)


def test_shrinking_limits_makes_smaller_pieces():
    bound = limits(fused="math")
    whole = plan_attention(2, 10, 33856, 33856, 64, 2, bound)
    half = plan_attention(2, 10, 33856, 33856, 64, 2, bound.shrunk(1))
    assert half.score_elements <= whole.score_elements // 2
    assert half.pieces > whole.pieces


def test_half_scores_halve_the_traffic():
    full = plan_attention(2, 10, 33856, 33856, 64, 2, limits(fused="math"))
    half = plan_attention(2, 10, 33856, 33856, 64, 2, limits(fused="math", half_scores=True))
    assert half.bytes_moved < 0.55 * full.bytes_moved


def test_too_little_memory_is_refused_with_numbers():
    with pytest.raises(
        DeviceMemoryError, match=r"needs a workspace of \d+ bytes.*65536 bytes in all"
    ):
        plan_attention(1, 1, 4096, 4096, 512, 2, limits(workspace=65536, fused="math"))


@pytest.mark.parametrize("position", range(6))
def test_sizes_below_one_are_refused(position):
    sizes = [1, 1, 8, 8, 8, 2]
    sizes[position] = 0
    with pytest.raises(ValueError, match="at least 1"):
        plan_attention(*sizes, limits())
