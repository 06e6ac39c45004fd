"""How large a tile may be: memory of one tile batch, and the choice that tile_px 0 asks for."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cache

from .layout import SupirDims
from .plan_dims import UNetDims
from .plan_network import plan_step
from .plan_tape import FLOAT_BYTES, Attention
from .tiling import windows

TRAINED_PX = 1024
"""Side SDXL was trained at; the largest tile that is chosen (Podell et al. 2023)."""

UNTILED_MAX_PX = TRAINED_PX * 3 // 2
"""Side up to which a picture is sampled in one piece if it fits: beyond it SDXL repeats content."""

COMFORT_PX, LEAST_PX, STEP_PX = 512, 64, 64
"""Least tile that is chosen freely, least tile at all (the UNet's 8 cells), and the step between."""

RUN_LATENTS = 8
"""Full-size float32 latents a step holds besides the networks: x before and after, noise, estimate,
derivative, centre, blend sum and its quotient."""


@dataclass(frozen=True)
class TileChoice:
    """A tile size. tile_px 0 = the whole latent; ``fits`` is False when nothing fits the memory."""

    tile_px: int
    overlap_px: int
    tiles: int
    live_peak_bytes: int
    fits: bool


def tile_memory_bytes(
    unet: UNetDims,
    supir: SupirDims | None,
    height: int,
    width: int,
    batch: int = 2,
    tokens: int = 77,
    dtype_bytes: int = 2,
    attention: Attention | None = None,
    weight_bytes: tuple[int, int] = (0, 0),
) -> int:
    """Return the activation bytes of one call of the networks on a tile of height x width cells.

    Args: as in ``plan_step``; counted at a control scale other than 1, which needs the most.
    """
    step = plan_step(
        unet,
        supir,
        height,
        width,
        batch,
        tokens,
        dtype_bytes,
        control_scale=0.5,
        attention=attention,
        weight_bytes=weight_bytes,
    )
    return step.live_peak_bytes


def choose_tile(
    free_bytes: int,
    latent_h: int,
    latent_w: int,
    unet: UNetDims,
    supir: SupirDims | None,
    batch: int = 2,
    tokens: int = 77,
    dtype_bytes: int = 2,
    cell_px: int = 8,
    overlap_px: int = 256,
    attention: Attention | None = None,
    weight_bytes: tuple[int, int] = (0, 0),
) -> TileChoice:
    """Return the tile size for tile_px 0.

    The whole latent if it fits and no side is above 1.5 times SDXL's training size; else the
    largest multiple of 64 px up to 1024 that fits, below 512 px only if nothing else does.

    Args:
        free_bytes: for activations; 0 = unknown, everything fits.
        latent_h, latent_w: cells of ``cell_px`` px each. The rest as in ``plan_step``.
        overlap_px: as wanted; at most half a tile is used.
    """

    @cache
    def need(tile: int) -> int:
        """Bytes with tiles of so many cells; 0 = the whole latent."""
        height, width = (min(tile or side, side) for side in (latent_h, latent_w))
        network = tile_memory_bytes(
            unet, supir, height, width, batch, tokens, dtype_bytes, attention, weight_bytes
        )
        latents = RUN_LATENTS * unet.in_channels * latent_h * latent_w * FLOAT_BYTES
        return network + latents

    def fits(tile: int) -> bool:
        return free_bytes <= 0 or need(tile) <= free_bytes

    longest_px = max(latent_h, latent_w) * cell_px
    if longest_px <= UNTILED_MAX_PX and fits(0):
        return TileChoice(0, 0, 1, need(0), True)
    sizes = [px for px in range(TRAINED_PX, LEAST_PX - 1, -STEP_PX) if px < longest_px]
    if not sizes:
        return TileChoice(0, 0, 1, need(0), fits(0))
    # memory falls with the size, so the first that fits is found by halving
    index = bisect_left(sizes, True, key=lambda px: fits(px // cell_px))
    tile_px = sizes[min(index, len(sizes) - 1)]
    tile = tile_px // cell_px
    overlap = min(overlap_px, tile_px // 2) // cell_px
    tiles = len(windows(latent_h, latent_w, tile, overlap))
    return TileChoice(tile_px, overlap * cell_px, tiles, need(tile), fits(tile))
