"""IMAGE and LATENT as ComfyUI passes them, checked and converted. The only layout changes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from ..supir.constants import WORK_KEY
from ..supir.errors import ShapeError
from ..supir.prepare import Geometry, pad, plan_geometry
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
    if isinstance(image, torch.Tensor) and not image.is_floating_point():
        raise ShapeError(
            f"{name} holds {image.dtype} values, but an IMAGE holds floats in 0..1. Divide 8-bit "
            f"pictures by 255 before connecting them to {name}."
        )
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
        max(1, geometry.padded_width_px // samples.shape[-1]),
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


def crop_image(image: torch.Tensor, latent: Any) -> tuple[torch.Tensor, str | None]:
    """Return a decoded IMAGE [B, H, W, 3] cut to its picture, transparency put back, and a note.

    A latent that was resized as a whole since is cut in proportion; one of another shape is
    returned whole, as its canvas no longer applies.
    """
    canvas = latent.get(WORK_KEY)
    if not isinstance(canvas, Canvas):
        return image, None
    height, width = image.shape[1:3]
    size = picture_size(width, height, canvas)
    if size is None:
        return image, "The latent was reshaped since it was encoded: the whole canvas is shown."
    columns, rows = size
    image = image[:, :rows, :columns, :].contiguous()
    if canvas.alpha is None:
        return image, None
    alpha = _alpha_rows(canvas.alpha, latent, image.shape[0])
    if alpha is None:
        return image, "The batch was changed since it was encoded: its transparency is left out."
    if alpha.shape[1:3] != image.shape[1:3]:
        rgb = alpha.movedim(-1, 1).expand(-1, 3, -1, -1)  # BHWC -> BCHW
        alpha = resize_lanczos(rgb, columns, rows)[:, :1].movedim(1, -1)  # BCHW -> BHWC
    return torch.cat([image, alpha.to(image)], dim=-1), None


def picture_size(width_px: int, height_px: int, canvas: Canvas) -> tuple[int, int] | None:
    """Return (width, height) in px of the picture on a decoded canvas; None when that was reshaped.

    A canvas that was resized as a whole has its picture in proportion.
    """
    scale = height_px / canvas.padded_height_px
    if width_px != round(canvas.padded_width_px * scale):
        return None
    return max(1, round(canvas.width_px * scale)), max(1, round(canvas.height_px * scale))


def size_to_plan(width_px: int, height_px: int, canvas: object) -> tuple[int, int]:
    """Return (width, height) in px by which the decoding of a whole canvas is planned.

    That of the picture, so that the plan names what comes out, where its padding gives the same
    canvas again; else that of the canvas.
    """
    size = picture_size(width_px, height_px, canvas) if isinstance(canvas, Canvas) else None
    if size is None:
        return width_px, height_px
    g = plan_geometry(*size, 1.0)
    same = (g.padded_width_px, g.padded_height_px) == (width_px, height_px)
    return size if same else (width_px, height_px)


def _alpha_rows(alpha: torch.Tensor, latent: Any, count: int) -> torch.Tensor | None:
    """Return the transparency of the pictures that are left in a LATENT, None if it is not known."""
    picked = latent.get("batch_index")
    if isinstance(picked, list) and len(picked) == count and max(picked) < alpha.shape[0]:
        return alpha[picked]
    return alpha if alpha.shape[0] in (1, count) and alpha.shape[0] == count else None


def fit_to_canvas(mask: torch.Tensor, latent: Any) -> torch.Tensor:
    """Return a mask of the picture as a mask of its canvas: padded by its edge, not stretched.

    Args: mask: [..., H, W]; one that already has the canvas's or the latent's size stays as it is.
    """
    canvas = latent.get(WORK_KEY)
    size = tuple(mask.shape[-2:])
    if not isinstance(canvas, Canvas) or size == tuple(latent["samples"].shape[-2:]):
        return mask
    whole = (canvas.padded_height_px, canvas.padded_width_px)
    inner = (canvas.height_px, canvas.width_px)
    if size == whole or inner == whole:
        return mask
    flat = mask.reshape(-1, 1, *size).float()
    if size != inner:
        flat = F.interpolate(flat, size=inner, mode="bilinear")
    flat = F.pad(flat, (0, whole[1] - inner[1], 0, whole[0] - inner[0]), mode="replicate")
    return flat.reshape(*mask.shape[:-2], *whole)


def picture_part(latent: Any) -> tuple[float, float]:
    """Return the part of a latent's height and width that its picture covers, 0..1 each."""
    canvas = latent.get(WORK_KEY)
    if not isinstance(canvas, Canvas):
        return 1.0, 1.0
    return (
        canvas.height_px / canvas.padded_height_px,
        canvas.width_px / canvas.padded_width_px,
    )
