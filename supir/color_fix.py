"""Give a restored picture the colours of its first-stage picture. Pure image maths in fp32."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from .errors import ShapeError

WAVELET_LEVELS = 5
"""Dilations 1, 2, 4, 8, 16 (SUPIR's wavelet colour fix)."""


def check_batch(content: torch.Tensor, style: torch.Tensor) -> None:
    """Raise ShapeError unless ``style`` has the size of ``content`` and one picture or as many."""
    if content.shape[1:] != style.shape[1:] or style.shape[0] not in (1, content.shape[0]):
        raise ShapeError(
            f"image is {tuple(content.shape)} and reference is {tuple(style.shape)} (batch, channels, "
            "height, width). Both need the same size, and reference one picture or as many as image."
        )


def blur(image: torch.Tensor, radius: int) -> torch.Tensor:
    """Smooth with [1 2 1] x [1 2 1] / 16 at the given dilation, edges replicated.

    Args: image: [B, C, H, W], any range. radius: dilation in pixels, >= 1.
    Returns: the same shape.
    """
    channels = image.shape[1]
    row = image.new_tensor([0.25, 0.5, 0.25])
    kernel = (row[:, None] * row[None, :]).expand(channels, 1, 3, 3)
    padded = F.pad(image, (radius,) * 4, mode="replicate")
    return F.conv2d(padded, kernel, groups=channels, dilation=radius)


def low_frequencies(image: torch.Tensor) -> torch.Tensor:
    """Return what is left of an image after five dilated blurs; the rest is its detail."""
    for level in range(WAVELET_LEVELS):
        image = blur(image, 2**level)
    return image


def wavelet(content: torch.Tensor, style: torch.Tensor) -> torch.Tensor:
    """Return the detail of ``content`` on the low frequencies of ``style``.

    Args: content, style: [B, 3, H, W] in one common range; nothing is clamped.
    Raises: ShapeError when the sizes differ.
    Source: undecimated a-trous decomposition, as SUPIR uses it (StableSR's colour fix).
    """
    check_batch(content, style)
    content, style = content.float(), style.float()
    return content - low_frequencies(content) + low_frequencies(style)


def adain(content: torch.Tensor, style: torch.Tensor) -> torch.Tensor:
    """Return ``content`` with each channel's mean and deviation moved to those of ``style``.

    Args: content, style: [B, 3, H, W] in the range -1..1; nothing is clamped.
    Raises: ShapeError when the sizes differ.
    Source: Huang & Belongie 2017; deviation = sqrt(unbiased variance + 1e-5).
    """
    check_batch(content, style)
    content, style = content.float(), style.float()

    def moments(image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = image.flatten(2)
        correction = 1 if flat.shape[-1] > 1 else 0
        deviation = (flat.var(-1, correction=correction) + 1e-5).sqrt()
        return flat.mean(-1)[..., None, None], deviation[..., None, None]

    mean, deviation = moments(content)
    style_mean, style_deviation = moments(style)
    return (content - mean) / deviation * style_deviation + style_mean
