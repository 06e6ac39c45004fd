"""Color Fix: give the restored picture the colours of a reference."""

from __future__ import annotations

from typing import Any

import torch
from comfy_api.latest import io

from ..supir import color_fix
from .picture import read_image, resize, write_image
from .types import CATEGORY

METHODS = ("wavelet", "adain", "none")
"""Method ids; frozen."""


def fix_colors(image: Any, reference: Any, method: str) -> torch.Tensor:
    """Return an IMAGE with the reference's colours, clamped to 0..1; alpha is the image's own.

    Args: reference: one picture, or as many as image; resized to the image's size if it differs.
    Raises: ShapeError on unusable pictures or batch sizes.
    """
    picture = read_image(image)
    if method == "none":
        return write_image(picture.rgb, picture.alpha)
    style = resize(read_image(reference, "reference"), *picture.size_px).rgb
    apply = color_fix.wavelet if method == "wavelet" else color_fix.adain
    color_fix.check_batch(picture.rgb, style)
    rows = []
    for k in range(picture.rgb.shape[0]):
        one = picture.rgb[k : k + 1] * 2.0 - 1.0
        like = style if style.shape[0] == 1 else style[k : k + 1]
        rows.append((apply(one, like * 2.0 - 1.0) + 1.0) / 2.0)
    return write_image(torch.cat(rows).clamp(0.0, 1.0), picture.alpha)


class ColorFix(io.ComfyNode):
    """Move the colours of a picture to those of a reference."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SUPIR_XPU_ColorFix",
            display_name="SUPIR Color Fix",
            category=CATEGORY,
            description=(
                "Keeps the restored detail and takes the colours of the reference, usually First "
                "Stage's picture."
            ),
            search_aliases=["color match", "wavelet", "adain"],
            inputs=[
                io.Image.Input("image", tooltip="Restored picture or batch."),
                io.Image.Input(
                    "reference", tooltip="Colours to take: one picture, or one for each."
                ),
                io.Combo.Input(
                    "method",
                    options=list(METHODS),
                    default="wavelet",
                    tooltip=(
                        "wavelet: low frequencies of the reference. adain: mean and deviation of "
                        "each colour channel. none: pass through."
                    ),
                ),
            ],
            outputs=[io.Image.Output("image", display_name="IMAGE")],
        )

    @classmethod
    def execute(cls, image: Any, reference: Any, method: str) -> io.NodeOutput:
        return io.NodeOutput(fix_colors(image, reference, method))
