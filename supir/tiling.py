"""Where the tiles of a latent lie and how their overlaps are blended. Integers and one mask."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .errors import SettingsError

BLEND_VARIANCE = 0.01
"""Variance of the Gaussian blend profile in units of the tile side (SUPIR's tiled samplers)."""


class Window(NamedTuple):
    """A tile in latent cells: rows top..bottom, columns left..right (ends excluded)."""

    top: int
    bottom: int
    left: int
    right: int

    def crop(self, x: torch.Tensor) -> torch.Tensor:
        """Return the view of [..., H, W] that lies in this window."""
        return x[..., self.top : self.bottom, self.left : self.right]


def starts(size: int, tile: int, stride: int) -> list[int]:
    """Return where tiles start along one side: every stride, the last shifted inwards to fit.

    A tile as long as the side, or longer, gives [0]. Never empty; every cell is covered as long as
    stride <= tile.
    """
    if tile >= size:
        return [0]
    positions = list(range(0, size - tile + 1, stride))
    if positions[-1] != size - tile:
        positions.append(size - tile)
    return positions


def windows(height: int, width: int, tile: int, overlap: int) -> list[Window]:
    """Return the tiles of a latent, rows outer, columns inner (reading order).

    Args:
        height, width: latent cells, >= 1.
        tile: side of a tile in latent cells, clamped to each side of the latent.
        overlap: cells two neighbours share, 0 <= overlap < tile.
    Raises: SettingsError naming tile_px or tile_overlap_px.
    """
    if tile < 1:
        raise SettingsError(
            f"tile_px comes to {tile} latent cells, but a tile needs at least one. Raise tile_px."
        )
    if not 0 <= overlap < tile:
        raise SettingsError(
            f"tile_overlap_px comes to {overlap} latent cells in tiles of {tile}, so tiles would not "
            "advance. Set tile_overlap_px below tile_px (half of tile_px works well)."
        )
    stride = tile - overlap
    return [
        Window(top, min(top + tile, height), left, min(left + tile, width))
        for top in starts(height, tile, stride)
        for left in starts(width, tile, stride)
    ]


def blend_weights(
    height: int, width: int, *, row_offset: float = -0.5, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return the blend mask of a tile, [height, width] float64 on the CPU, then moved as float32.

    Args:
        height, width: cells of the tile.
        row_offset: added to height / 2 for the centre of the rows. -0.5 is the exact centre;
            0.0 reproduces SUPIR's, which is half a cell off.
    Source: SUPIR's tiled samplers: exp(-((p - mid) / side)^2 / (2 * 0.01)) / sqrt(2 * pi * 0.01).
    """

    def profile(side: int, mid: float) -> torch.Tensor:
        position = (torch.arange(side, dtype=torch.float64) - mid) / side
        scale = (2.0 * torch.pi * BLEND_VARIANCE) ** 0.5
        return torch.exp(-(position**2) / (2.0 * BLEND_VARIANCE)) / scale

    rows = profile(height, height / 2.0 + row_offset)
    columns = profile(width, (width - 1) / 2.0)
    return (rows[:, None] * columns[None, :]).to(torch.float32).to(device)
