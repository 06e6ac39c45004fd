"""The Sample node on the demo model: determinism, batches, host planning, cancel, masks, tiles."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.host


def batch_of(latent, count):
    from dataclasses import replace

    from supir_xpu.supir.constants import WORK_KEY

    g = torch.Generator().manual_seed(11)
    rows = latent["samples"] + 0.1 * torch.randn(count, *latent["samples"].shape[1:], generator=g)
    return {"samples": rows, WORK_KEY: replace(latent[WORK_KEY])}


def row(latent, k):
    return {**latent, "samples": latent["samples"][k : k + 1]}


@pytest.mark.parametrize("sampler", ["restore_edm", "restore_dpmpp_2m"])
def test_same_seed_same_bytes_and_other_seed_other_bytes(demo, sampler):
    first = demo.run_latent(sampler=sampler)
    assert demo.digest(first) == demo.digest(demo.run_latent(sampler=sampler))
    assert demo.digest(first) != demo.digest(demo.run_latent(sampler=sampler, seed=8))
    assert torch.isfinite(first).all()


@pytest.mark.parametrize("sampler", ["restore_edm", "restore_dpmpp_2m"])
def test_picture_k_of_a_batch_is_a_single_run_with_seed_plus_k(demo, sampler):
    control, center = batch_of(demo.control, 3), batch_of(demo.center, 3)
    batch = demo.run_latent(control=control, center=center, sampler=sampler, seed=2**64 - 2)
    for k, seed in enumerate((2**64 - 2, 2**64 - 1, 0)):
        single = demo.run_latent(
            control=row(control, k), center=row(center, k), sampler=sampler, seed=seed
        )
        assert torch.equal(batch[k : k + 1], single)


def test_batch_seed_same_and_batch_index(demo):
    control, center = batch_of(demo.control, 2), batch_of(demo.center, 2)
    same = demo.run_latent(control=control, center=center, batch_seed="same")
    single = demo.run_latent(control=row(control, 1), center=row(center, 1))
    assert torch.equal(same[1:], single)
    picked = {**row(control, 1), "batch_index": [1]}
    indexed = demo.run_latent(control=picked, center=row(center, 1))
    whole = demo.run_latent(control=control, center=center)
    assert torch.equal(indexed, whole[1:])


def test_control_and_restore_off_is_plain_sampling(demo):
    import comfy.samplers
    from supir_xpu.nodes.sampler import make_sampler, schedule, start_noise

    off = {"control_start": 0.0, "control_end": 0.0, "restore_cfg": 0.0, "cfg_start": 3.0}
    got = demo.run_latent(**off, cfg_end=3.0)
    guider = comfy.samplers.CFGGuider(demo.model)
    guider.set_conds(demo.positive, demo.negative)
    guider.set_cfg(3.0)
    samples = demo.control["samples"]
    want = guider.sample(
        start_noise(tuple(samples.shape), 7),
        torch.zeros_like(samples),
        make_sampler("restore_edm", 5.0, 1.003, 1.0),
        schedule("restore_edm", 3),
        disable_pbar=True,
        seed=7,
    )
    assert torch.equal(got, want)


def test_every_setting_changes_the_result(demo):
    base = demo.run_latent(steps=2)
    for change in (
        {"control_start": 0.5},
        {"control_end": 0.2},
        {"cfg_start": 5.0},
        {"cfg_end": 5.0},
        {"restore_cfg": 0.25},
        {"s_churn": 0.0},
        {"s_noise": 1.1},
    ):
        assert not torch.equal(base, demo.run_latent(steps=2, **change)), change
    base = demo.run_latent(steps=3, sampler="restore_dpmpp_2m")
    for change in ({"eta": 0.0}, {"s_noise": 1.1}, {"cfg_end": 5.0}):
        changed = demo.run_latent(steps=3, sampler="restore_dpmpp_2m", **change)
        assert not torch.equal(base, changed), change


def test_ignored_settings_are_named(demo):
    out = demo.run(sampler="restore_dpmpp_2m", steps=2, restore_cfg=4.0)
    text = out.ui["text"][0]
    assert "ignores restore_cfg (4)" in text
    assert "control_end (0.9)" in text


def test_restore_uses_center_and_falls_back_to_control_with_a_note(demo):
    with_center = demo.run_latent(restore_cfg=0.5)
    out = demo.run(restore_cfg=0.5, center=None)
    assert "center is not connected" in out.ui["text"][0]
    as_control = demo.run_latent(restore_cfg=0.5, center=demo.control)
    assert torch.equal(out.result[0]["samples"], as_control)
    assert not torch.equal(with_center, as_control)


def test_control_net_is_in_the_hosts_load_plan(demo, monkeypatch):
    import comfy.model_management as mm

    planned = []
    real = mm.load_models_gpu

    def spy(models, *args, **kwargs):
        planned.append([m.model for m in models])
        return real(models, *args, **kwargs)

    monkeypatch.setattr(mm, "load_models_gpu", spy)
    demo.run_latent(steps=1)
    assert any(demo.supir.patcher.model in models for models in planned)
    planned.clear()
    demo.run_latent(steps=1, control_start=0.0, control_end=0.0)
    assert planned
    assert not any(demo.supir.patcher.model in models for models in planned)


def test_the_host_plans_for_one_tile_not_for_the_picture(demo, monkeypatch):
    import comfy.sampler_helpers

    asked = []
    real = comfy.sampler_helpers.estimate_memory

    def spy(model, noise_shape, conds):
        asked.append(list(noise_shape))
        return real(model, noise_shape, conds)

    monkeypatch.setattr(comfy.sampler_helpers, "estimate_memory", spy)
    control = {"samples": torch.zeros(1, 4, 40, 24)}
    demo.run_latent(control=control, center=None, steps=1, tile_px=64 * 2, tile_overlap_px=64)
    demo.run_latent(control={"samples": torch.zeros(1, 4, 16, 16)}, center=None, steps=1)
    assert asked[0] == asked[1] == [1, 4, 16, 16]
    # Where the host thinks a UNet needs little, the tile is made taller by what is really needed.
    monkeypatch.setattr(demo.model.model, "memory_required", lambda shape, **k: 1e5)
    demo.run_latent(control={"samples": torch.zeros(1, 4, 16, 16)}, center=None, steps=1)
    assert asked[2][:2] == [1, 4]
    assert asked[2][2] > 10 * 16


def test_cancel_leaves_the_next_run_like_a_first_run(demo, monkeypatch):
    import comfy.model_management as mm

    want = demo.run_latent()
    calls = 0

    def cancel_later():
        nonlocal calls
        calls += 1
        if calls == 5:
            raise mm.InterruptProcessingException()

    monkeypatch.setattr(mm, "throw_exception_if_processing_interrupted", cancel_later)
    with pytest.raises(mm.InterruptProcessingException):
        demo.run_latent(steps=30)
    monkeypatch.undo()
    assert torch.equal(demo.run_latent(), want)


def test_noise_mask_keeps_center_where_it_is_zero(demo):
    mask = torch.zeros(1, 1, 16, 16)
    mask[..., 8:] = 1.0
    out = demo.run(control={**demo.control, "noise_mask": mask})
    latent = out.result[0]["samples"]
    kept = (latent - demo.center["samples"])[..., :7].abs().max().item()
    changed = (latent - demo.center["samples"])[..., 9:].abs().max().item()
    assert kept < 1e-4
    assert changed > 0.1
    assert "noise_mask" not in out.result[0]


def test_progress_runs_over_the_steps_of_every_picture(demo):
    import comfy.utils

    seen = []
    comfy.utils.set_progress_bar_global_hook(
        lambda value, total, preview, **k: seen.append((value, total))
    )
    try:
        demo.run_latent(control=batch_of(demo.control, 2), center=None)
    finally:
        comfy.utils.set_progress_bar_global_hook(None)
    values = [value for value, total in seen if total == 6]  # the host may skip some in a hurry
    assert values[0] == 1
    assert values[-1] == 6
    assert values == sorted(set(values))


def test_tiles_as_large_as_the_picture_are_no_tiles(demo):
    want = demo.run_latent(tile_px=-1)
    assert torch.equal(demo.run_latent(tile_px=64, tile_overlap_px=32), want)
    assert torch.equal(demo.run_latent(tile_px=4096, tile_overlap_px=512), want)
    assert torch.equal(demo.run_latent(tile_px=0), want)


def test_tiles_change_little_where_the_network_is_local(demo):
    control = {"samples": torch.randn(1, 4, 24, 32, generator=torch.Generator().manual_seed(1))}
    whole = demo.run_latent(control=control, center=control, steps=2, restore_cfg=0.1)
    args = {"control": control, "center": control, "steps": 2, "restore_cfg": 0.1}
    tiled = demo.run_latent(**args, tile_px=16 * 8, tile_overlap_px=8 * 8)
    assert torch.isfinite(tiled).all()
    assert tiled.shape == whole.shape
    assert not torch.equal(tiled, whole)
    assert torch.equal(tiled, demo.run_latent(**args, tile_px=16 * 8, tile_overlap_px=8 * 8))


def test_dpmpp_noise_is_the_originals_brownian_tree():
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parity"))
    from comfy.k_diffusion.sampling import BrownianTreeNoiseSampler
    from golden_case import HERE, read_case

    case = read_case(HERE / "golden" / "dpmpp_browniantree.safetensors")
    x, sigmas = case.tensors["x_T"], case.tensors["sigmas"]
    entropy = next(v for k, v in case.meta.items() if "entropy" in k)
    levels = sigmas[sigmas > 0]
    tree = BrownianTreeNoiseSampler(x, levels.min(), levels.max(), seed=int(entropy), cpu=True)
    for i, want in enumerate(case.tensors["noise"]):
        got = tree(sigmas[i + 1], sigmas[i + 2])
        assert (got - want).abs().max() < 1e-4
