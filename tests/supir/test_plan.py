"""Whole runs: geometry, phases, totals, predicted time, and a 12288 px picture within budget."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from supir_xpu.supir.errors import SettingsError, ShapeError
from supir_xpu.supir.guidance import GuidanceSettings
from supir_xpu.supir.plan import (
    AttentionCost,
    DeviceRates,
    Networks,
    RunRequest,
    SamplingRequest,
    fused_attention,
    plan_run,
    plan_sampling,
    plan_step,
    supir_dims_for,
    unet_dims,
)
from supir_xpu.supir.plan_vae import decoder_steps, encoder_steps, fit_limits, plan_vae
from supir_xpu.supir.striped import MIB, KLLayout, Limits
from supir_xpu.tests.supir.plan_case import NARROW
from supir_xpu.xpu.counting import count

GIB = 1 << 30
NARROW_UNET = unet_dims(**NARROW)
SMALL = Networks(
    NARROW_UNET, supir_dims_for(NARROW_UNET), KLLayout(ch=32, ch_mult=(1, 1, 2), num_res_blocks=1)
)


def test_geometry_and_phases():
    plan = plan_run(RunRequest(501, 333, 2.0, images=3), SMALL)
    assert (plan.output_width_px, plan.output_height_px) == (1002, 666)
    assert (plan.geometry.padded_width_px, plan.geometry.padded_height_px) == (1024, 704)
    assert (plan.latent_w, plan.latent_h) == (256, 176)
    names = ["encode_control", "decode_stage1", "encode_center", "sample", "decode"]
    assert [p.name for p in plan.phases] == names
    for total, name in (
        (plan.launches_total, "launches"),
        (plan.flops_total, "flops"),
        (plan.bytes_moved_total, "bytes_moved"),
        (plan.predicted_seconds, "seconds"),
    ):
        assert total == sum(getattr(p, name) for p in plan.phases)
    assert plan.live_peak_bytes == max(p.live_peak_bytes for p in plan.phases)
    assert plan.predicted_seconds == 0.0
    one = plan_run(RunRequest(501, 333, 2.0), SMALL)
    assert plan.launches_total == 3 * one.launches_total
    assert plan.live_peak_bytes == one.live_peak_bytes


def test_a_given_latent_is_planned_as_it_is():
    odd = RunRequest(133, 77, stages=("sample",), latent_h=19, latent_w=33, tile_px=-1)
    sampling = plan_run(odd, SMALL).sampling
    call = sampling.network
    direct = plan_step(NARROW_UNET, SMALL.supir, 19, 33, 2, control_scale=1.0)
    assert call.launches_by_kind["conv"] == direct.launches_by_kind["conv"]
    assert call.flops == direct.flops


@pytest.mark.parametrize("stage", ["first_stage", "sample", "decode"])
def test_stages_on_their_own(stage):
    whole = {p.name: p for p in plan_run(RunRequest(256, 256), SMALL).phases}
    part = plan_run(RunRequest(256, 256, stages=(stage,)), SMALL)
    assert len(part.phases) == {"first_stage": 3, "sample": 1, "decode": 1}[stage]
    assert all(whole[p.name] == p for p in part.phases)
    assert (part.sampling is None) == (stage != "sample")


def test_predicted_time_is_the_slower_of_memory_and_arithmetic():
    request = RunRequest(256, 256)
    plan = plan_run(request, SMALL, DeviceRates(0, 1e9, 1e30))
    assert plan.predicted_seconds == pytest.approx(plan.bytes_moved_total / 1e9)
    plan = plan_run(request, SMALL, DeviceRates(0, 1e30, 1e9))
    assert plan.predicted_seconds == pytest.approx(plan.flops_total / 1e9)
    plan = plan_run(request, SMALL, DeviceRates(0, 1e9, 1e10))
    expected = sum(max(p.bytes_moved / 1e9, p.flops / 1e10) for p in plan.phases)
    assert plan.predicted_seconds == pytest.approx(expected)


def test_attention_of_the_device_is_planned():
    def costly(batch, heads, n_query, n_key, dim_head):
        fused = fused_attention(2)(batch, heads, n_query, n_key, dim_head)
        return AttentionCost(
            7, fused.flops, fused.bytes_moved, 5 * GIB, 4 * GIB, n_query * n_key * heads
        )

    request = RunRequest(256, 256, tile_px=-1)
    plain = plan_run(request, SMALL)
    plan = plan_run(request, SMALL, attention=costly)
    calls = sum(plan.sampling.attention_calls.values())
    assert plan.launches_total - plain.launches_total == 6 * calls
    assert plan.max_score_elements == (256 // 4 // 2) ** 4
    assert plan.largest_tensor_bytes == 4 * GIB
    assert plan.live_peak_bytes > 5 * GIB
    vae = plan_run(request, SMALL, vae_attention=costly)
    assert vae.sampling == plain.sampling
    assert vae.launches_total > plain.launches_total


@pytest.mark.parametrize(
    ("changes", "error", "names"),
    [
        ({"width_px": 0}, ShapeError, "image"),
        ({"upscale_by": 0.0}, SettingsError, "upscale_by"),
        ({"steps": 0}, SettingsError, "steps"),
        ({"tile_px": 16}, SettingsError, "tile_px"),
        ({"tile_px": 64, "tile_overlap_px": 64}, SettingsError, "tile_overlap_px"),
    ],
)
def test_requests_that_cannot_work(changes, error, names):
    with pytest.raises(error, match=names):
        plan_run(replace(RunRequest(256, 256), **changes), SMALL)


@pytest.mark.parametrize(
    ("tile_px", "tiles", "planned"),
    [(-1, 1, 0), (0, 1, 0), (256, 1, 0), (512, 1, 0), (128, 9, 128)],
)
def test_tile_widget(tile_px, tiles, planned):
    plan = plan_run(RunRequest(256, 256, tile_px=tile_px, tile_overlap_px=64), SMALL)
    assert (plan.tiles, plan.tile_px) == (tiles, planned)
    assert plan.sampling.tiles == tiles


def test_weights_are_counted_in_their_own_dtype():
    half = plan_run(RunRequest(256, 256, stages=("sample",)), SMALL)
    single = plan_run(RunRequest(256, 256, stages=("sample",)), replace(SMALL, weight_bytes=(4, 4)))
    step = plan_step(NARROW_UNET, SMALL.supir, 8, 8)
    assert single.weight_bytes - half.weight_bytes == 2 * step.parameters
    assert single.sampling.cast_launches == step.weight_tensors * single.sampling.network_calls


def test_sdxl_weights():
    """2,567,463,684 UNet parameters (published); with SUPIR and VAE 7.9 GB in half precision."""
    assert plan_step(unet_dims(), None, 8, 8).parameters == 2_567_463_684
    plan = plan_run(RunRequest(1024, 1024, stages=()))
    assert 7.8e9 < plan.weight_bytes < 8.0e9
    assert plan.phases == ()


# -------------------------------------------------------------------- 12288 px


BIG = RunRequest(12288, 12288)
ARC = DeviceRates(12 * GIB, 400e9, 50e12)


def test_12288_px_is_planned_within_budget():
    plan = plan_run(BIG, device=ARC)
    assert (plan.latent_h, plan.latent_w) == (1536, 1536)
    assert plan.tile_px == 1024
    assert plan.largest_tensor_bytes < 4 * GIB
    assert plan.live_peak_bytes <= ARC.free_bytes
    sample = next(p for p in plan.phases if p.name == "sample")
    tile = plan_run(RunRequest(1024, 1024), device=ARC)
    full_size_latents = 8 * 4 * 4 * 1536 * 1536
    assert sample.live_peak_bytes <= tile.sampling.live_peak_bytes + full_size_latents
    # without spilled stripes the maps of the full resolution alone would be 72 GiB
    assert plan.host_peak_bytes > 50 * GIB
    assert plan.predicted_seconds > 1000


def test_sampling_of_a_large_picture_is_planned_quickly():
    request = replace(BIG, stages=("sample",))
    plan_run(request, device=ARC)
    times: list[float] = []
    for _ in range(3):
        start = time.process_time()
        plan_run(request, device=ARC)
        times.append(time.process_time() - start)
    assert min(times) < 0.05


def test_a_large_run_is_the_sum_of_its_tiles():
    """What a step costs grows by the same amount with every tile, up to 256 of them."""
    supir = supir_dims_for(unet_dims())
    guidance = GuidanceSettings(4.0, 4.0, 1.0, 1.0, 4.0)

    def run(rows, columns):
        size = (128 + 96 * (rows - 1), 128 + 96 * (columns - 1))
        request = SamplingRequest(
            *size, (14.6, 7.0, 3.0, 0.0), guidance=guidance, tile=128, overlap=32
        )
        return plan_sampling(request, unet_dims(), supir)

    two, three, many = run(1, 2), run(1, 3), run(16, 16)
    assert (two.tiles, three.tiles, many.tiles) == (2, 3, 256)
    per_tile = three.launches - two.launches
    assert per_tile > 3 * plan_step(unet_dims(), supir, 128, 128).launches
    assert many.launches == two.launches + 254 * per_tile
    assert many.flops == 256 * 3 * many.network.flops
    assert many.network == two.network
    assert many.largest_tensor_bytes < GIB


# ------------------------------------------------------------------------- VAE


@pytest.fixture(scope="module")
def vae():
    """SDXL's VAE on the meta device."""
    import comfy.ops
    from comfy.ldm.modules.diffusionmodules.model import Decoder, Encoder

    assert comfy.ops
    config = {
        "double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3,
        "ch": 128, "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [],
        "dropout": 0.0,
    }  # fmt: skip
    with torch.device("meta"):
        nets = Encoder(**config), Decoder(**config)
    for net in nets:
        net.eval()
        net.mid.attn_1.optimized_attention = _one_kernel
    return nets


def _one_kernel(q, k, v):
    """Attention over the pixels of [B, C, H, W] as one call."""
    tokens = (t.flatten(2).transpose(1, 2).unsqueeze(1) for t in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(*tokens)
    return out.squeeze(1).transpose(1, 2).reshape(q.shape)


@pytest.mark.host
@pytest.mark.parametrize(("height", "width"), [(512, 512), (1000, 344), (136, 2048)])
def test_vae_arithmetic_is_the_untiled_networks(vae, height, width):
    limits = Limits(256 * MIB, 4, own_attention=True)
    for net, steps, shape in (
        (vae[0], encoder_steps(KLLayout()), (1, 3, height, width)),
        (vae[1], decoder_steps(KLLayout()), (1, 4, height // 8, width // 8)),
    ):
        x = torch.empty(shape, device="meta")
        counted, _ = count(lambda net=net, x=x: net(x), track_live=False)
        plan = plan_vae(steps, *shape[2:], limits)
        assert plan.flops == counted.flops
        assert plan.bytes_moved == pytest.approx(counted.bytes_moved, rel=0.01)
        assert plan.parameters == sum(p.numel() for p in net.parameters())


def test_published_vae_arithmetic():
    """119.6 TFLOP for the decode of a 368x368 latent."""
    limits = fit_limits(0, 2944, 2944, KLLayout(), 2)
    plan = plan_vae(decoder_steps(KLLayout()), 368, 368, limits)
    assert round(plan.flops / 1e12, 1) == 119.6
