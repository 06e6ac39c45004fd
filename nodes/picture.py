"""IMAGE and LATENT as ComfyUI passes them, checked and converted. The only layout changes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..supir.constants import WORK_KEY
from ..supir.errors import ShapeError
from ..supir.prepare import Geometry, pad
from .host import resize_lanczos
from .types import Canvas


class Picture(NamedTuple):
    """A batch of pictures: rgb [B, 3, H, W] in 0..1, alpha [B, 1, H, W] in 0..1 or None."""

    rgb: torch.Tensor
    alpha: torch.Tensor | None

    @property
    def size_px(self) -> tuple[int, int]:
        """Width and height."""
        return self.rgb.shape[-1], self.rgb.shape[-2]


def read_image(image: Any, name: str = "image") -> Picture:
    """Return an IMAGE as colour and transparency; grey becomes RGB, values are clamped to 0..1.

    Args: image: [B, H, W, C], C = 1 (grey), 2 (grey and alpha), 3 or 4 (RGB and alpha).
    Raises: ShapeError when it is none of these, is empty, or holds NaN or infinity.
    """
    shape = getattr(image, "shape", None)
    if not isinstance(image, torch.Tensor) or image.ndim != 4 or 0 in image.shape:
        found = type(image).__name__ if shape is None else tuple(shape)
        raise ShapeError(
            f"{name} is {found}, but a batch of pictures (batch, height, width, channels) with at "
            f"least one pixel is needed. Connect an IMAGE to {name}."
        )
    channels = image.shape[-1]
    if channels not in (1, 2, 3, 4):
        raise ShapeError(
            f"{name} has {channels} channels; 1 (grey), 2 (grey, alpha), 3 (RGB) or 4 (RGB, alpha) "
            f"are known. Convert it before connecting it to {name}."
        )
    bad = int((~torch.isfinite(image)).flatten(1).any(dim=1).sum())
    if bad:
        raise ShapeError(
            f"{name} holds NaN or infinite values in {bad} of {image.shape[0]} picture(s), which "
            f"would spread over the whole result. Look at the node that feeds {name}."
        )
    x = image.movedim(-1, 1).float().clamp(0.0, 1.0)  # BHWC -> BCHW
    rgb = x[:, :1].expand(-1, 3, -1, -1) if channels <= 2 else x[:, :3]
    return Picture(rgb, x[:, -1:] if channels in (2, 4) else None)


def write_image(rgb: torch.Tensor, alpha: torch.Tensor | None) -> torch.Tensor:
    """Return an IMAGE [B, H, W, 3 or 4] from colour [B, 3, H, W] and transparency."""
    x = rgb if alpha is None else torch.cat([rgb, alpha.to(rgb)], dim=1)
    return x.movedim(1, -1).contiguous()  # BCHW -> BHWC


def resize(picture: Picture, width_px: int, height_px: int) -> Picture:
    """Return the picture resized with ComfyUI's Lanczos filter; itself when the size is the same."""
    if picture.size_px == (width_px, height_px):
        return picture
    rgb = resize_lanczos(picture.rgb, width_px, height_px)
    alpha = picture.alpha
    if alpha is not None:
        alpha = resize_lanczos(alpha.expand(-1, 3, -1, -1), width_px, height_px)[:, :1]
    return Picture(rgb, alpha)


def padded(picture: Picture, geometry: Geometry) -> torch.Tensor:
    """Return the picture on its canvas as the VAE takes it, [B, H, W, 3]."""
    rgb = pad(picture.rgb, geometry.padded_height_px, geometry.padded_width_px)
    return rgb.movedim(1, -1)  # BCHW -> BHWC


def make_latent(samples: torch.Tensor, geometry: Geometry, alpha: torch.Tensor | None) -> Any:
    """Return a LATENT that knows which picture it belongs to."""
    canvas = Canvas(
        geometry.width_px,
        geometry.height_px,
        geometry.padded_width_px,
        geometry.padded_height_px,
        alpha,
    )
    return {"samples": samples, WORK_KEY: canvas}


def read_latent(latent: Any, name: str) -> torch.Tensor:
    """Return the samples of a LATENT, [B, C, h, w].

    Raises: ShapeError when it holds no 4-D tensor, is empty, or holds NaN or infinity.
    """
    samples: Any = latent.get("samples") if isinstance(latent, dict) else None
    if not isinstance(samples, torch.Tensor) or samples.ndim != 4 or 0 in samples.shape:
        shape = getattr(samples, "shape", None)
        found = type(latent).__name__ if shape is None else tuple(shape)
        raise ShapeError(
            f"{name} is {found}, but an image latent (batch, channels, height, width) is needed. "
            f"Connect the LATENT of First Stage or Encode to {name}."
        )
    if not bool(torch.isfinite(samples).all()):
        raise ShapeError(
            f"{name} holds NaN or infinite values. The VAE overflowed: start ComfyUI with "
            "--fp32-vae or --bf16-vae, then run again."
        )
    return samples


def crop_image(image: torch.Tensor, latent: Any) -> torch.Tensor:
    """Return a decoded IMAGE [B, H, W, 3] cut to its picture, with its transparency put back.

    A latent that was resized since is returned whole: its canvas no longer applies.
    """
    canvas = latent.get(WORK_KEY)
    size = tuple(image.shape[1:3])
    if not isinstance(canvas, Canvas) or size != (canvas.padded_height_px, canvas.padded_width_px):
        return image
    image = image[:, : canvas.height_px, : canvas.width_px, :]
    alpha = canvas.alpha
    if alpha is None:
        return image.contiguous()
    alpha = alpha.to(image)
    if alpha.shape[0] != image.shape[0]:
        alpha = alpha[torch.arange(image.shape[0]) % alpha.shape[0]]
    return torch.cat([image, alpha], dim=-1)
