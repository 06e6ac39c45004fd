"""One call of the networks: the plan against the dispatch count of the real ones on meta tensors."""

from __future__ import annotations

import random

import pytest
import torch
from supir_xpu.supir.errors import ModelError, ShapeError
from supir_xpu.supir.plan import dims_from_unet, plan_step, supir_dims_for, unet_dims
from supir_xpu.supir.tiling import windows
from supir_xpu.tests.supir import plan_case

BF16, FP32 = torch.bfloat16, torch.float32
LATENTS = [(64, 64), (168, 168), (184, 184), (240, 352), (368, 368)]
PEAK_TOLERANCE = 0.10
DRAWS = 20


@pytest.fixture(scope="module")
def sdxl():
    return plan_case.make_nets({}, BF16)


@pytest.fixture(scope="module")
def shallow():
    return {dtype: plan_case.make_nets(plan_case.SHALLOW, dtype) for dtype in (BF16, FP32)}


def check(nets, *call, track_live=True, **options):
    """The plan of a call equals its count; the live peak to within the tolerance."""
    count = nets.count(*call, **options, track_live=track_live)
    plan = nets.plan(*call, **options)
    assert plan.launches == count.launches, call
    assert plan.flops == count.flops, call
    assert plan.bytes_moved == count.bytes_moved, call
    assert plan.largest_tensor_bytes == count.largest[0], call
    if track_live:
        assert plan.live_peak_bytes == pytest.approx(count.live.peak, rel=PEAK_TOLERANCE), call
    return plan, count


@pytest.mark.host
@pytest.mark.parametrize("latent", LATENTS)
@pytest.mark.parametrize("policy", ["fused", "fused_pieces", "math"])
def test_plan_equals_count_at_true_size(sdxl, latent, policy):
    plan, _ = check(
        sdxl, *latent, 2, 1.0, policy, BF16, track_live=policy == "fused" or latent == (184, 184)
    )
    assert sum(plan.attention_calls.values()) == 210
    if policy == "math":
        assert 0 < plan.max_score_elements <= plan_case.LIMITS.max_scores


@pytest.mark.host
@pytest.mark.parametrize("scale", [0.0, 0.7])
def test_plan_equals_count_at_other_control_scales(sdxl, scale):
    plan, count = check(sdxl, 128, 128, 2, scale, "fused", BF16)  # one tile of 1024 px
    assert plan.launches == (1682 if scale == 0.0 else 2622)
    assert {k: n for k, n in plan.launches_by_kind.items() if k != "transfer"} == dict(count.kinds)


@pytest.mark.host
@pytest.mark.newest
def test_random_calls(shallow):
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for i in range(DRAWS):
        height, width = draw.randint(8, 400), draw.randint(8, 400)
        tile = draw.randint(8, 160)
        window = windows(height, width, tile, draw.randrange(tile // 2))[0]
        dtype = draw.choice([BF16, FP32])
        call = (
            window.bottom - window.top,
            window.right - window.left,
            draw.randint(1, 4),
            draw.choice([0.0, 0.3, 1.0]),
            draw.choice(["fused", "fused_pieces", "math"]),
            dtype,
        )
        print(call)
        # following every tensor takes time, so three draws of four go without
        check(shallow[dtype], *call, tokens=draw.choice([77, 154]), track_live=i % 4 == 0)


@pytest.mark.host
@pytest.mark.parametrize("latent", [(8, 8), (4, 9), (1, 1), (13, 500)])
def test_small_and_narrow_latents(shallow, latent):
    check(shallow[FP32], *latent, 1, 0.5, "fused", FP32)
    check(shallow[FP32], *latent, 2, 1.0, "math", FP32)


@pytest.mark.host
@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_weights_of_another_dtype_are_cast_once_per_layer(scale):
    cast = plan_case.make_nets(plan_case.NARROW, torch.float16, cast=True)
    plain = plan_case.make_nets(plan_case.NARROW, FP32)
    call = (24, 40, 2, scale, "fused", FP32)
    with_casts, _ = check(cast, *call)
    without, _ = check(plain, *call)
    assert without.cast_launches == 0
    assert with_casts.cast_launches == without.weight_tensors
    assert with_casts.launches - without.launches == with_casts.cast_launches


@pytest.mark.host
def test_dims_are_read_from_modules(sdxl, shallow):
    assert dims_from_unet(sdxl.unet) == unet_dims()
    assert dims_from_unet(shallow[FP32].unet) == unet_dims(**plan_case.SHALLOW)
    broken = plan_case.make_nets(plan_case.NARROW, FP32).unet
    broken.input_blocks[4][0] = torch.nn.Identity()
    with pytest.raises(ModelError, match="Identity"):
        dims_from_unet(broken)


@pytest.mark.host
def test_parameters_are_those_of_the_networks(sdxl):
    def elements(module):
        return sum(p.numel() for p in module.parameters())

    unet = sdxl.plan(16, 16, 1, 0.0, "fused", BF16).parameters
    whole = sdxl.plan(16, 16, 1, 1.0, "fused", BF16).parameters
    assert unet == elements(sdxl.unet)
    assert whole - unet == elements(sdxl.supir)


def test_published_counts():
    """The table of counts made with the core's SUPIR (batch 2, fused): same layers, fewer glue ops.

    Its adapters take 25 more operators at scale 1: they blend by two products and concatenate the
    unmodified activations even where the blend leaves nothing of them.
    """
    dims = unet_dims()
    supir = supir_dims_for(dims)
    step = plan_step(dims, supir, 368, 368)
    assert plan_step(dims, None, 368, 368).launches == 1682
    assert step.launches == 2628 - 25
    layers = {k: step.launches_by_kind[k] for k in ("matmul", "norm", "attention", "conv")}
    assert layers == {"matmul": 1113, "norm": 393, "attention": 210, "conv": 113}
    assert round(step.flops / 1e12, 1) == 302.6
    assert [round(plan_step(dims, supir, h, w).flops / 1e12, 1) for h, w in LATENTS[1:4]] == [
        37.6,
        46.7,
        152.5,
    ]
    assert plan_step(dims, None, 64, 64).flops == 3_177_557_524_480
    assert step.attention_calls[2, 10, 33856, 33856, 64] == 15
    assert step.attention_calls[2, 20, 8464, 8464, 64] == 91


def test_scale_zero_is_the_hosts_forward():
    dims = unet_dims()
    assert plan_step(dims, supir_dims_for(dims), 64, 64, control_scale=0.0) == plan_step(
        dims, None, 64, 64
    )


@pytest.mark.parametrize("bad", [{"height": 0}, {"batch": 0}, {"tokens": 0}])
def test_empty_calls_are_refused(bad):
    with pytest.raises(ShapeError, match="at least 1"):
        plan_step(unet_dims(), None, **{"height": 8, "width": 8, **bad})
