"""ComfyUI's own model patches together with SUPIR, whole and in tiles."""

from __future__ import annotations

import importlib

import pytest
import torch

pytestmark = pytest.mark.host

TILES = {"tile_px": 64, "tile_overlap_px": 16}
SHRINK = {
    "block_number": 3,
    "downscale_factor": 2.0,
    "start_percent": 0.0,
    "end_percent": 0.35,
    "downscale_after_skip": True,
    "downscale_method": "bicubic",
    "upscale_method": "bicubic",
}
PATCHES = {
    "PatchModelAddDownscale": ("nodes_model_downscale", SHRINK),
    "HyperTile": (
        "nodes_hypertile",
        {"tile_size": 32, "swap_size": 2, "max_depth": 2, "scale_depth": False},
    ),
    "PerturbedAttentionGuidance": ("nodes_pag", {"scale": 3.0}),
    "SelfAttentionGuidance": ("nodes_sag", {"scale": 0.5, "blur_sigma": 2.0}),
    "PerpNeg": ("nodes_perpneg", {"neg_scale": 1.0}),
    "RescaleCFG": ("nodes_model_advanced", {"multiplier": 0.7}),
    "CFGZeroStar": ("nodes_cfg", {}),
    "TCFG": ("nodes_tcfg", {}),
    "APG": ("nodes_apg", {"eta": 0.5, "norm_threshold": 3.0, "momentum": -0.5}),
    "UNetSelfAttentionMultiply": (
        "nodes_attention_multiply",
        {"q": 1.5, "k": 1.0, "v": 1.0, "out": 1.0},
    ),
    "UNetCrossAttentionMultiply": (
        "nodes_attention_multiply",
        {"q": 1.1, "k": 1.0, "v": 1.2, "out": 1.0},
    ),
    "LazyCacheNode": (
        "nodes_easycache",
        {"reuse_threshold": 5.0, "start_percent": 0.1, "end_percent": 0.99, "verbose": False},
    ),
}
"""Class of each node, its module in comfy_extras, and its widgets."""


def latent(height=8, width=12, seed=1):
    g = torch.Generator().manual_seed(seed)
    return {"samples": torch.randn(1, 4, height, width, generator=g)}


def run(demo, **changes):
    control = latent()
    args = {"steps": 2, "control": control, "center": control, "cfg_start": 2.0, "cfg_end": 3.0}
    return demo.run_latent(**{**args, "restore_cfg": 0.0, "s_churn": 0.0, **changes})


def apply(module, name, model, **settings):
    """Run a node of comfy_extras of either API generation; returns its first output."""
    node = getattr(importlib.import_module(f"comfy_extras.{module}"), name)
    if hasattr(node, "execute"):
        out = node.execute(model, **settings)
        return getattr(out, "result", out)[0]
    return getattr(node(), node.FUNCTION)(model, **settings)[0]


def patched(demo, name, **changes):
    module, settings = PATCHES[name]
    if name == "PerpNeg":
        settings = {
            **settings,
            "empty_conditioning": demo.condition([demo.clip], [""], [""]).result[0],
        }
    return apply(module, name, demo.model, **{**settings, **changes})


@pytest.mark.parametrize("name", PATCHES)
def test_patch_acts_and_supir_still_steers(demo, name):
    model = patched(demo, name)
    args = {"steps": 4} if name == "LazyCacheNode" else {"steps": 2}
    tiles = TILES
    if name == "HyperTile":  # acts on maps of at least two of its tiles
        control = latent(16, 24)
        args |= {"control": control, "center": control}
        tiles = {"tile_px": 128, "tile_overlap_px": 64}
    whole = run(demo, model=model, **args)
    tiled = run(demo, model=model, **args, **tiles)
    for got, plain in ((whole, run(demo, **args)), (tiled, run(demo, **args, **tiles))):
        assert torch.isfinite(got).all()
        assert (got - plain).abs().max() > 1e-2
    off = run(demo, model=model, **args, control_start=0.0, control_end=0.0)
    assert (whole - off).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("block", "factor", "after_skip"),
    [(1, 2.0, True), (2, 1.5, False), (4, 1.3, True), (7, 2.0, False)],
)
def test_deep_shrink_at_every_depth(demo, block, factor, after_skip):
    changes = {"block_number": block, "downscale_factor": factor, "end_percent": 1.0}
    model = patched(demo, "PatchModelAddDownscale", downscale_after_skip=after_skip, **changes)
    got = run(demo, model=model, steps=1)
    assert torch.isfinite(got).all()
    assert (got - run(demo, steps=1)).abs().max() > 1e-2


def test_deep_shrink_by_nothing_is_the_plain_run_bit_for_bit(demo):
    model = patched(demo, "PatchModelAddDownscale", downscale_factor=1.0)
    assert (run(demo, model=model) - run(demo)).abs().max() < 1e-3


def test_differential_diffusion_keeps_by_threshold(demo):
    model = apply("nodes_differential_diffusion", "DifferentialDiffusion", demo.model)
    mask = torch.full((1, 1, 8, 12), 0.5)
    mask[..., :3], mask[..., 9:] = 0.0, 1.0
    control, center = {**latent(), "noise_mask": mask}, latent(seed=2)
    for tiles in ({}, TILES):
        args = {"control": control, "center": center, "steps": 4, **tiles}
        got, soft = run(demo, model=model, **args), run(demo, **args)
        assert (got - center["samples"])[..., :3].abs().max() < 1e-4
        assert (got - soft)[..., 3:].abs().max() > 1e-2


def test_every_tile_has_conditionings_of_its_own_name(demo):
    """Packs that cache a network's output by conditioning must not hand it to another tile."""
    seen = []

    def note(executor, x, *args, **kwargs):
        options = next(a for a in args if isinstance(a, dict) and "uuids" in a)
        seen.append(tuple(options["uuids"]))
        return executor(x, *args, **kwargs)

    model = demo.model.clone()
    model.add_wrapper_with_key("diffusion_model", "note", note)
    run(demo, model=model, **TILES)
    first, second, again_first, again_second = seen
    assert (first, second) == (again_first, again_second)
    assert len({*first, *second}) == 4


def test_easy_cache_skips_tile_by_tile(demo):
    settings = {"start_percent": 0.0, "end_percent": 1.0, "verbose": False}
    never = apply("nodes_easycache", "EasyCacheNode", demo.model, reuse_threshold=0.0, **settings)
    often = apply("nodes_easycache", "EasyCacheNode", demo.model, reuse_threshold=100.0, **settings)
    args = {"steps": 4, **TILES}
    plain = run(demo, **args)
    assert torch.equal(run(demo, model=never, **args), plain)
    got = run(demo, model=often, **args)
    assert torch.isfinite(got).all()
    assert (got - plain).abs().max() > 1e-3
    assert (got - plain)[..., 9:].norm() < 0.5 * plain[..., 9:].norm()
