"""Sizes of a run and the padding around a picture. Never stretches, always gives the size back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from .constants import PAD_PX
from .errors import SettingsError, ShapeError

MAX_SIDE_PX = 65536
"""Longest side the host's image library resizes without overflow in its 32-bit row sizes."""


@dataclass(frozen=True)
class Geometry:
    """Sizes of one run, in pixels: what comes out and what the networks work on."""

    width_px: int
    height_px: int
    padded_width_px: int
    padded_height_px: int


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple that is at least value."""
    return -(-value // multiple) * multiple


def plan_geometry(width_px: int, height_px: int, upscale_by: float) -> Geometry:
    """Return the target size round(side * upscale_by), at least 1 px, and its padded size.

    Raises: ShapeError for an empty picture, SettingsError when upscale_by is unusable or a side
        would pass 65536 px.
    """
    if width_px < 1 or height_px < 1:
        raise ShapeError(
            f"image is {width_px}x{height_px} px; there is nothing to restore. Connect an image of "
            "at least 1x1 px."
        )
    if not 0.0 < upscale_by < float("inf"):
        raise SettingsError(f"upscale_by is {upscale_by}; set it to a number above 0.")
    asked = [side * float(upscale_by) for side in (width_px, height_px)]
    if max(asked) >= MAX_SIDE_PX + 0.5:
        raise SettingsError(
            f"upscale_by {upscale_by} makes {asked[0]:.6g}x{asked[1]:.6g} px out of "
            f"{width_px}x{height_px}; the longest side allowed is {MAX_SIDE_PX} px. Lower upscale_by."
        )
    width, height = (max(1, round(side)) for side in asked)
    return Geometry(width, height, round_up(width, PAD_PX), round_up(height, PAD_PX))


def pad(image: torch.Tensor, padded_height: int, padded_width: int) -> torch.Tensor:
    """Extend a picture to the right and below, by reflection as far as it reaches, then by its edge.

    Args: image: [B, C, H, W], H <= padded_height, W <= padded_width.
    Returns: [B, C, padded_height, padded_width]; the picture itself is the top left corner.
    """
    height, width = image.shape[-2:]
    reflect_bottom = min(padded_height - height, height - 1)
    reflect_right = min(padded_width - width, width - 1)
    if reflect_bottom or reflect_right:
        image = F.pad(image, (0, reflect_right, 0, reflect_bottom), mode="reflect")
    bottom = padded_height - image.shape[-2]
    right = padded_width - image.shape[-1]
    if bottom or right:
        image = F.pad(image, (0, right, 0, bottom), mode="replicate")
    return image
