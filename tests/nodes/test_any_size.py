"""Sizes, tiles, batches and frames through the real nodes on the demo model."""

from __future__ import annotations

import gc

import pytest
import torch

pytestmark = pytest.mark.host

CELL_PX = 4


def picture(kind, height, width):
    if kind == "grey":
        return torch.full((1, height, width, 3), 0.5)
    if kind == "black":
        return torch.zeros(1, height, width, 3)
    ramp = torch.linspace(0.0, 1.0, width).expand(height, width)
    return ramp[None, ..., None].repeat(1, 1, 1, 3)


def border_and_interior_energy(latent, edges):
    """Mean step across tile edges, and the mean steps across every other column."""
    steps = (latent[..., 1:] - latent[..., :-1]).abs().mean(dim=(0, 1, 2))
    at_edges = [e - 1 for e in edges if 0 < e < latent.shape[-1]]
    border = steps[at_edges].mean().item()
    rest = [i for i in range(len(steps)) if i not in at_edges]
    return border, steps[rest]


@pytest.mark.parametrize("kind", ["grey", "black", "gradient"])
def test_flat_pictures_show_no_tile_grid(demo, kind):
    from supir_xpu.supir.tiling import windows

    image = picture(kind, 64, 256)
    _, control, center = demo.first_stage(demo.vae, demo.supir, image, 1.0).result
    tile, overlap = 24, 8
    out = demo.run_latent(
        control=control,
        center=center,
        steps=4,
        s_churn=0.0,
        tile_px=tile * CELL_PX,
        tile_overlap_px=overlap * CELL_PX,
    )
    places = windows(*out.shape[-2:], tile, overlap)
    edges = {w.left for w in places} | {w.right for w in places}
    border, interior = border_and_interior_energy(out, edges)
    assert border <= interior.mean().item() + 2 * interior.std().item()


def tiled_guider(demo, shape, predict, monkeypatch):
    """A guider on 24-cell tiles whose network is replaced by ``predict(tile index, x)``."""
    import comfy.samplers
    from supir_xpu.nodes.guider import GuiderInputs, SupirGuider
    from supir_xpu.supir.guidance import GuidanceSettings

    inputs = GuiderInputs(GuidanceSettings(), torch.zeros(shape), None, 24, 8)
    guider = SupirGuider(demo.model, demo.supir, inputs)
    guider.set_conds(demo.positive, demo.negative)
    guider.conds, guider.inner_model = {"positive": [], "negative": []}, None
    index = iter(range(1000))

    def network(model, x, *args, **kwargs):
        return predict(next(index), x)

    monkeypatch.setattr(comfy.samplers, "sampling_function", network)
    return guider


@pytest.mark.parametrize("kind", ["constant", "gradient", "noise"])
def test_tiles_that_agree_are_blended_without_a_trace(demo, monkeypatch, kind):
    """The input comes back where every tile predicts what it is given."""
    shape = (1, 4, 40, 72)
    x = {
        "constant": torch.full(shape, 0.7),
        "gradient": torch.linspace(-3.0, 3.0, 72).expand(shape).clone(),
        "noise": torch.randn(shape, generator=torch.Generator().manual_seed(6)),
    }[kind]
    guider = tiled_guider(demo, shape, lambda i, tile: tile.clone(), monkeypatch)
    out = guider.predict_noise(x, torch.tensor([1.0]))
    assert (out - x).abs().max() <= 1e-6 * x.abs().max()


def test_tiles_that_differ_are_joined_by_a_ramp_not_an_edge(demo, monkeypatch):
    shape = (1, 4, 24, 72)
    offsets = {i: float(i % 2) for i in range(8)}
    guider = tiled_guider(
        demo, shape, lambda i, tile: torch.full_like(tile, offsets[i]), monkeypatch
    )
    out = guider.predict_noise(torch.zeros(shape), torch.tensor([1.0]))
    steps = (out[..., 1:] - out[..., :-1]).abs()
    assert out.min() >= 0.0
    assert out.max() <= 1.0
    assert 0.0 < steps.max() < 0.7, "a hard edge would be a step of 1"


@pytest.mark.parametrize(
    ("size_px", "tile_px", "overlap_px"),
    [
        ((512, 512), 1024, 512),  # each of these failed or gave no tile in the old wrapper
        ((64, 512), 256, 128),
        pytest.param((112, 112), 96, 92, marks=pytest.mark.newest),  # one cell less than the tile
        ((320, 64), 128, 0),
        ((256, 320), 255, 1),
    ],
)
def test_defaults_that_used_to_fail(demo, size_px, tile_px, overlap_px):
    height, width = (side // CELL_PX for side in size_px)
    g = torch.Generator().manual_seed(4)
    control = {"samples": torch.randn(1, 4, height, width, generator=g)}
    settings = {"tile_px": tile_px, "tile_overlap_px": overlap_px, "steps": 1, "cfg_end": 1.0}
    out = demo.run_latent(control=control, center=None, cfg_start=1.0, **settings)
    assert out.shape == control["samples"].shape
    assert torch.isfinite(out).all()


def test_memory_asked_for_12288_px_is_that_of_one_tile(demo, monkeypatch):
    import comfy.model_management as mm

    asked = []

    class PlannedError(Exception):
        pass

    def spy(models, memory_required=0, **kwargs):
        asked.append(memory_required)
        raise PlannedError

    monkeypatch.setattr(mm, "load_models_gpu", spy)
    side = 12288 // CELL_PX
    for cells in (side, 1024 // CELL_PX):
        control = {"samples": torch.zeros(1, 4, cells, cells)}
        with pytest.raises(PlannedError):
            demo.run(control=control, center=None, steps=1, tile_px=1024, tile_overlap_px=256)
    assert asked[0] == asked[1] > 0


def test_auto_tiles_follow_the_free_memory(demo, monkeypatch):
    from dataclasses import replace

    from supir_xpu.nodes.machine import machine, set_machine
    from supir_xpu.nodes.sample_request import tile_cells

    here = machine()
    latent = {"samples": torch.empty(1, 4, 512, 512, device="meta")}
    try:
        chosen = []
        for free in (2**40, 2**31, 2**29):
            facts = replace(here.facts, free_bytes=free)
            set_machine(replace(here, facts=facts, simulated=True))
            chosen.append(tile_cells(0, 256, latent)[0])
        assert chosen[0] == 1024 // 8
        assert chosen[0] >= chosen[1] >= chosen[2] >= 8
        assert chosen[2] < chosen[0]
        assert tile_cells(-1, 256, latent) == (0, 0)
    finally:
        set_machine(here)


def test_a_failure_names_its_picture_and_keeps_nothing(demo, monkeypatch):
    import supir_xpu.nodes.sample_run as sample_run

    control = {**demo.control, "samples": demo.control["samples"].repeat(3, 1, 1, 1)}
    real, calls = sample_run.check_stage, []

    def fail_at_second(stage, *args):
        calls.append(stage)
        if len(calls) == 2:
            raise RuntimeError("something broke")
        real(stage, *args)

    monkeypatch.setattr(sample_run, "check_stage", fail_at_second)
    with pytest.raises(RuntimeError, match=r"Picture 2 of 3: something broke"):
        demo.run(control=control, center=None, steps=1)
    monkeypatch.undo()
    whole = demo.run_latent(control=control, center=None, steps=1)
    assert whole.shape[0] == 3


def live_tensors():
    gc.collect()
    return sum(
        o.numel() * o.element_size()
        for o in gc.get_objects()
        if type(o) is torch.Tensor and o.device.type == "cpu"
    )


def test_memory_stays_flat_over_many_frames(demo, monkeypatch):
    """What is alive after each frame grows by that frame's result alone."""
    import supir_xpu.nodes.sample_run as sample_run

    frames, sizes = 10, []
    control = {**demo.control, "samples": demo.control["samples"].repeat(frames, 1, 1, 1)}
    real = sample_run.check_stage

    def watch(stage, *args):
        real(stage, *args)
        if stage == "Sampling":
            sizes.append(live_tensors())

    monkeypatch.setattr(sample_run, "check_stage", watch)
    settings = {"steps": 1, "cfg_start": 1.0, "cfg_end": 1.0, "batch_seed": "same"}
    out = demo.run_latent(control=control, center=None, **settings)
    assert torch.equal(out[0], out[-1])
    frame = out[0].numel() * 4
    growth = (sizes[-1] - sizes[3]) / (frames - 4)
    assert growth <= 1.5 * frame, f"{growth:.0f} bytes per frame of {frame}"
