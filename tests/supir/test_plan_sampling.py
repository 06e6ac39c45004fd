"""A whole sampling run: the plan against the dispatch count of the Sample node on the demo model."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from supir_xpu.supir.errors import SettingsError
from supir_xpu.supir.guidance import GuidanceSettings
from supir_xpu.supir.plan import SamplingRequest, dims_from_unet, plan_sampling, unet_dims
from supir_xpu.supir.plan_guider import describe_steps
from supir_xpu.tests.supir.plan_case import NARROW
from supir_xpu.xpu.attention import PlannedAttention
from supir_xpu.xpu.chunking import AttentionLimits
from supir_xpu.xpu.counting import Count, CountOps
from supir_xpu.xpu.device import DeviceFacts, host_region

PEAK_TOLERANCE = 0.10
DEFAULTS = {
    "sampler": "restore_edm", "steps": 3, "tile": 0, "overlap": 0, "center": True,
    "s_churn": 5.0, "eta": 1.0, "cfg_start": 2.0, "cfg_end": 4.0,
    "control_start": 1.0, "control_end": 0.9, "restore_cfg": 4.0,
}  # fmt: skip
GUIDANCE = ("cfg_start", "cfg_end", "control_start", "control_end", "restore_cfg")


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo model with attention as one fused kernel, and its conditionings."""
    import folder_paths

    folder_paths.set_temp_directory(str(tmp_path_factory.mktemp("temp")))
    with torch.inference_mode():
        from supir_xpu.nodes import condition, sample, sampler
        from supir_xpu.nodes import demo as nodes

        model, clip, _, supir = nodes.LoadDemo.execute().result
        model = model.clone()
        limits = AttentionLimits(2**31, 2**31, 10**16, fused="fused")
        fused = PlannedAttention(
            DeviceFacts("xpu", fused_sdpa="fused"), limits, policy="fused"
        ).as_override()
        options = model.model_options.setdefault("transformer_options", {})
        options["optimized_attention_override"] = fused
        conds = condition.Conditioning.execute([clip], ["sharp"], ["blurry"]).result
    return SimpleNamespace(
        model=model, supir=supir, conds=conds, sample=sample, sampler=sampler,
        dims=dims_from_unet(model.model.diffusion_model),
    )  # fmt: skip


def effective_guidance(s):
    """DPM++ knows neither ramp nor restoration, as the node says."""
    guidance = GuidanceSettings(**{name: s[name] for name in GUIDANCE})
    if s["sampler"] == "restore_edm":
        return guidance
    end = guidance.control_end
    return GuidanceSettings(guidance.cfg_start, guidance.cfg_end, end, end, -1.0)


class HostTree:
    """The Brownian noise tree; what it does is the host's work, on any device."""

    def __init__(self, tree, *args, **kwargs):
        with host_region():
            self._tree = tree(*args, **kwargs)

    def __call__(self, *args):
        with host_region():
            return self._tree(*args)


@pytest.fixture
def counted(demo, monkeypatch):
    """Run Sample's own way and give the count of its sampling loop, and the plan of the run."""
    import comfy.k_diffusion.sampling as k_sampling

    tree = k_sampling.torchsde.BrownianTree
    quiet = SimpleNamespace(BrownianTree=lambda *args, **kwargs: HostTree(tree, *args, **kwargs))
    monkeypatch.setattr(k_sampling, "torchsde", quiet)
    counts: list[Count] = []
    live = True

    def wrap(function):
        def loop(*args, **kwargs):
            mode = CountOps()
            with mode:
                result = function(*args, **kwargs)
            counts.append(mode.count)
            return result

        return loop

    for name in ("sample_edm", "sample_dpmpp_2m"):
        monkeypatch.setattr(demo.sampler, name, wrap(getattr(demo.sampler, name)))

    def run(height, width, track_live=True, **changes):
        nonlocal live
        live = track_live
        s = {**DEFAULTS, **changes}
        latent = {"samples": torch.randn(1, 4, height, width)}
        widgets = {name: s[name] for name in ("steps", "sampler", "s_churn", "eta", *GUIDANCE)}
        demo.sample.Sample.execute(
            model=demo.model, supir=demo.supir, positive=demo.conds[0], negative=demo.conds[1],
            control=latent, center=latent if s["center"] else None, seed=7, s_noise=1.003,
            tile_px=s["tile"] * 8 if s["tile"] else -1, tile_overlap_px=s["overlap"] * 8,
            risk="off", **widgets,
        )  # fmt: skip
        guidance = effective_guidance(s)
        levels = demo.sampler.schedule(s["sampler"], s["steps"])
        request = SamplingRequest(
            height, width, tuple(float(x) for x in levels), s["sampler"],
            guidance, s["s_churn"], s["eta"], s["tile"], s["overlap"],
            has_center=s["center"] or guidance.uses_restore, dtype_bytes=4, weight_bytes=(0, 2),
        )  # fmt: skip
        return counts.pop(), plan_sampling(request, demo.dims, demo.supir.dims)

    return run


def check(count, plan):
    assert plan.launches + plan.host_launches == count.launches
    assert plan.flops == count.flops
    if count.live.peak:
        assert plan.live_peak_bytes == pytest.approx(count.live.peak, rel=PEAK_TOLERANCE)
    assert plan.bytes_moved == pytest.approx(count.bytes_moved, rel=2e-3)
    assert plan.network_calls >= plan.steps * plan.tiles


EDM = [
    {},
    {"s_churn": 0.0},
    {"cfg_start": 1.0, "cfg_end": 1.0},
    {"cfg_start": 1.0, "cfg_end": 3.0, "steps": 4},
    {"control_start": 0.0, "control_end": 0.0},
    {"control_start": 0.0, "control_end": 0.0, "restore_cfg": 0.0, "center": False},
    {"control_end": 1.0, "restore_cfg": -1.0},
    {"steps": 1},
]
DPMPP = [{"eta": eta, "steps": steps} for eta in (0.0, 1.0) for steps in (1, 2, 4)]
TILED = [
    {"tile": 13, "overlap": 3},
    {"tile": 16, "overlap": 8, "cfg_start": 1.0, "cfg_end": 1.0},
    {"tile": 12, "overlap": 0, "sampler": "restore_dpmpp_2m"},
]


@pytest.mark.host
@pytest.mark.parametrize("changes", EDM)
def test_edm(counted, changes):
    check(*counted(16, 24, **changes))


@pytest.mark.host
@pytest.mark.parametrize("changes", DPMPP)
def test_dpmpp(counted, changes):
    check(*counted(16, 16, sampler="restore_dpmpp_2m", **changes))


@pytest.mark.host
@pytest.mark.parametrize("changes", TILED)
def test_tiled(counted, changes):
    count, plan = counted(22, 15, steps=2, **changes)
    check(count, plan)
    assert plan.tiles > 1


@pytest.mark.host
def test_random_latents(counted):
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(3):
        size = (draw.randint(9, 32), draw.randint(9, 32))
        tile = draw.randint(12, 24)
        changes = {
            "steps": draw.randint(1, 2),
            "sampler": draw.choice(["restore_edm", "restore_dpmpp_2m"]),
            "tile": tile if tile < max(size) else 0,
            "overlap": draw.randrange(tile // 3),
            "s_churn": draw.choice([0.0, 5.0]),
        }
        print(size, changes)
        check(*counted(*size, track_live=False, **changes))


@pytest.mark.host
def test_network_work_is_that_of_the_tiles(counted):
    """Sampling in tiles adds no network work beyond its tiles."""
    count, plan = counted(24, 16, tile=16, overlap=8, steps=2, control_end=1.0)
    assert plan.network_calls == 2 * plan.tiles == 4
    assert plan.flops == plan.network_calls * plan.network.flops == count.flops


def request(**changes):
    levels = (14.6, 7.0, 1.0, 0.0)
    return SamplingRequest(**{"height": 16, "width": 16, "sigmas": levels, **changes})


def test_steps_differ_as_the_guidance_does():
    ramp = GuidanceSettings(1.0, 4.0, 1.0, 0.5, 4.0)
    steps = describe_steps(request(guidance=ramp))
    assert [s.position for s in steps] == ["first", "later", "last"]
    assert [s.restores for s in steps] == [True, True, False]
    assert all(s.guided and s.noise and s.control == 0.5 for s in steps)
    flat = GuidanceSettings(1.0, 1.0, 1.0, 1.0, 0.0)
    steps = describe_steps(request(guidance=flat, s_churn=0.0))
    assert not any(s.guided or s.noise or s.restores for s in steps)
    assert {s.control for s in steps} == {1.0}


def test_separate_batches_cost_two_calls():
    dims = unet_dims(**NARROW)
    shared = plan_sampling(request(), dims, None)
    apart = plan_sampling(request(share_batch=False), dims, None)
    assert apart.network_calls == 2 * shared.network_calls
    assert apart.flops == shared.flops
    assert apart.network.live_peak_bytes < shared.network.live_peak_bytes


def test_texts_of_different_length_share_a_batch_while_the_host_pads_them():
    dims = unet_dims(**NARROW)
    padded = plan_sampling(request(tokens=154, negative_tokens=77), dims, None)
    apart = plan_sampling(request(tokens=77 * 5, negative_tokens=77), dims, None)
    assert padded.network_calls == 3
    assert {call[3] for call in padded.network.attention_calls} >= {154}
    assert apart.network_calls == 6


def test_equal_steps_are_counted_as_often_as_they_run():
    dims = unet_dims(**NARROW)
    few, many = (
        plan_sampling(request(sigmas=tuple(float(n - i) for i in range(n + 1))), dims, None)
        for n in (4, 40)
    )
    per_step = few.launches_per_step
    assert many.steps == 40
    assert 35 * per_step < many.launches - few.launches <= 36 * per_step


def test_no_levels_are_refused():
    with pytest.raises(SettingsError, match="steps"):
        plan_sampling(request(sigmas=(1.0,)), unet_dims(**NARROW), None)
