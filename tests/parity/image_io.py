"""The original's 8-bit picture path, only to read its golden data (the product never stretches)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from PIL import Image


class TargetSize(NamedTuple):
    width: int
    height: int
    final_width: int
    final_height: int


def target_size(width, height, upscale, min_size, fix_resize) -> TargetSize:
    w, h = width * upscale, height * upscale
    final_w, final_h = round(w), round(h)
    if min(w, h) < min_size:
        factor = min_size / min(w, h)
        w, h = w * factor, h * factor
    if fix_resize is not None:
        factor = fix_resize / min(w, h)
        w, h = w * factor, h * factor
        final_w, final_h = round(w), round(h)
    grid_w, grid_h = (int(np.round(side / 64.0)) * 64 for side in (w, h))
    return TargetSize(grid_w, grid_h, final_w, final_h)


def to_tensor(image: np.ndarray, upscale, min_size, fix_resize):
    size = target_size(image.shape[1], image.shape[0], upscale, min_size, fix_resize)
    resized = Image.fromarray(image).resize((size.width, size.height), Image.Resampling.BICUBIC)
    tensor = torch.from_numpy(np.asarray(resized).astype(np.float64) / 255.0 * 2.0 - 1.0)
    return tensor.permute(2, 0, 1).float(), size.final_height, size.final_width


def from_tensor(tensor: torch.Tensor, height: int, width: int) -> np.ndarray:
    image = torch.nn.functional.interpolate(
        tensor[None].float(), size=(height, width), mode="bicubic", align_corners=False
    )
    scaled = (image[0] * 127.5 + 127.5).permute(1, 2, 0).clamp(0, 255)
    return scaled.numpy().astype(np.uint8)
