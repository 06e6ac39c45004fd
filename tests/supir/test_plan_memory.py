"""Automatic tile and workspace: tables of free memory, pictures and what is chosen."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from supir_xpu.supir.plan import (
    choose_tile,
    choose_workspace,
    supir_dims_for,
    tile_memory_bytes,
    unet_dims,
)
from supir_xpu.supir.plan_vae import fit_limits
from supir_xpu.supir.striped import MIB, KLLayout, plan_decode
from supir_xpu.supir.tiling import windows

GIB = 1 << 30
UNET = unet_dims()
SUPIR = supir_dims_for(UNET)


def tile_bytes(px):
    return tile_memory_bytes(UNET, SUPIR, px // 8, px // 8)


def choose(free, width_px, height_px, **options):
    return choose_tile(free, height_px // 8, width_px // 8, UNET, SUPIR, **options)


@pytest.mark.parametrize(
    ("free", "size", "tile"),
    [
        (0, (1024, 1024), 0),
        (0, (1536, 1536), 0),
        (0, (1600, 1024), 1024),
        (0, (12288, 12288), 1024),
        (16 * GIB, (1536, 1536), 0),
        (16 * GIB, (2944, 2944), 1024),
        (1, (1024, 1024), 64),
        (1, (64, 64), 0),
    ],
)
def test_auto_tile(free, size, tile):
    choice = choose(free, *size)
    assert choice.tile_px == tile
    assert choice.fits is (free != 1)
    if free > 1:
        assert choice.live_peak_bytes <= free


def need(px, picture_px):
    """Bytes of a tile batch, and of the latents a step holds at full size."""
    cells = picture_px // 8
    return tile_bytes(px) + 8 * 4 * 4 * cells * cells


@pytest.mark.parametrize("tile", [1024, 960, 576, 512, 448, 128])
def test_auto_tile_at_and_below_its_threshold(tile):
    assert choose(need(tile, 1600), 1600, 1600).tile_px == tile
    assert choose(need(tile, 1600) - 1, 1600, 1600).tile_px == tile - 64


def test_untiled_at_and_below_its_threshold():
    assert choose(need(1536, 1536), 1536, 1536).tile_px == 0
    assert choose(need(1536, 1536) - 1, 1536, 1536).tile_px == 1024
    assert choose(need(1024, 1024) - 1, 1024, 1024).tile_px == 960


@settings(max_examples=25, deadline=None)
@given(st.integers(40 * MIB, 2 * GIB), st.integers(1, 60), st.integers(1, 60), st.integers(0, 1024))
def test_auto_tile_is_the_largest_that_fits(free, rows, columns, overlap):
    choice = choose(free, columns * 64, rows * 64, overlap_px=overlap)
    if choice.tile_px == 0:
        assert choice.tiles == 1
        return
    tile, shared = choice.tile_px // 8, choice.overlap_px // 8
    assert choice.tile_px % 64 == 0
    assert 2 * choice.overlap_px <= choice.tile_px
    assert choice.tiles == len(windows(rows * 8, columns * 8, tile, shared))
    assert choice.fits
    bigger = choice.tile_px + 64
    if bigger <= 1024 and bigger < max(rows, columns) * 64:
        height, width = min(bigger // 8, rows * 8), min(bigger // 8, columns * 8)
        assert (
            tile_memory_bytes(UNET, SUPIR, height, width) > free - 8 * 4 * 4 * rows * columns * 64
        )


def test_tile_memory_grows_with_size_batch_and_control():
    sizes = [tile_bytes(px) for px in range(256, 1537, 128)]
    assert sizes == sorted(sizes)
    assert tile_memory_bytes(UNET, None, 128, 128) < tile_bytes(1024)
    assert tile_memory_bytes(UNET, SUPIR, 128, 128, batch=1) < 0.6 * tile_bytes(1024)
    # a whole 12288 px picture would need 144 times what its tile needs
    assert 140 < tile_memory_bytes(UNET, SUPIR, 1536, 1536) / tile_bytes(1024) < 146


@pytest.mark.parametrize(
    ("free", "other", "workspace"),
    [
        (0, 0, 256),
        (100 * MIB, 0, 256),
        (512 * MIB, 0, 256),
        (1000 * MIB, 0, 500),
        (2048 * MIB, 0, 1024),
        (64 * GIB, 0, 1024),
        (2048 * MIB, 1048 * MIB, 500),
        (2048 * MIB, 4096 * MIB, 256),
    ],
)
def test_workspace(free, other, workspace):
    assert choose_workspace(free, other) == workspace * MIB


@pytest.mark.parametrize("free", [1 * GIB, 4 * GIB, 12 * GIB, 96 * GIB])
@pytest.mark.parametrize("side", [512, 1536, 3072])
def test_vae_budgets_keep_a_decode_within_free_memory(free, side):
    limits = fit_limits(free, side, side, KLLayout(), 2)
    plan = plan_decode(side // 8, side // 8, limits)
    spills = limits.store_budget_bytes is not None
    assert plan.live_peak_bytes <= 1.02 * free
    assert (plan.host_peak_bytes > 0) <= spills
    if not spills:
        assert plan.host_peak_bytes == 0


def test_wanted_workspace_is_kept():
    assert fit_limits(12 * GIB, 1024, 1024, KLLayout(), 2, 64 * MIB).workspace_bytes == 64 * MIB
    assert fit_limits(0, 1024, 1024, KLLayout(), 2).store_budget_bytes is None
