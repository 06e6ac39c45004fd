"""What travels on the pack's own sockets and under its key in a LATENT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from comfy_api.latest import io

from ..supir.layout import SupirDims

SupirSocket = io.Custom("SUPIR")
"""Socket of a loaded SUPIR model; carries a ``SupirModel``."""

CATEGORY = "SUPIR XPU"


@dataclass(frozen=True)
class SupirModel:
    """A loaded SUPIR file.

    Attributes:
        patcher: ComfyUI's patcher over ``SupirNets``; the host loads, offloads and frees it.
        dims: widths and depths of the networks.
        denoise_encoder: weights of the denoise encoder by VAE encoder key, or None.
        name: what messages call it.
    """

    patcher: Any
    dims: SupirDims
    denoise_encoder: dict[str, torch.Tensor] | None
    name: str


@dataclass(frozen=True)
class Canvas:
    """How a LATENT maps back to the picture, so that decoding returns the exact size.

    Attributes:
        width_px, height_px: the picture; it is the top left corner of the padded canvas.
        padded_width_px, padded_height_px: the canvas the latent covers.
        alpha: [B, height, width, 1] transparency in 0..1, or None.
        ratio: pixels one latent cell covers, as the VAE had it.
    """

    width_px: int
    height_px: int
    padded_width_px: int
    padded_height_px: int
    alpha: torch.Tensor | None = None
    ratio: int = 8
