"""The nodes a converted workflow is made of, as ComfyUI stores them: sockets, widgets, outputs.

A test compares this with what the nodes themselves declare.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Slot:
    """An input or output of a node, as saved workflows name and type it."""

    name: str
    type: str


@dataclass(frozen=True)
class Field:
    """A widget: its name, socket type, and default; ``low`` and ``high`` bound a number."""

    name: str
    type: str
    default: Any
    low: float | None = None
    high: float | None = None
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class NewNode:
    """A node's sockets, widgets in stored order, outputs, and the size it is drawn with."""

    title: str
    sockets: tuple[Slot, ...]
    widgets: tuple[Field, ...]
    outputs: tuple[Slot, ...]
    size: tuple[int, int]
    optional: tuple[str, ...] = ()


def _slots(*pairs: str) -> tuple[Slot, ...]:
    return tuple(Slot(*pair.split(":")) for pair in pairs)


LARGEST_SEED = 2**64 - 1
_RISK = Field("risk", "COMBO", "auto", options=("auto", "block", "warn", "off"))
_POSITIVE = Field("positive", "STRING", "high quality, detailed, sharp focus")
_NEGATIVE = Field("negative", "STRING", "blurry, noisy, low quality, jpeg artifacts")
_UPSCALE_BY = Field("upscale_by", "FLOAT", 2.0, 0.01, 32.0)
_WORKSPACE = Field("workspace_mb", "INT", 0, 0, 16384)
_TILES = (
    Field("tile_px", "INT", 0, -1, 8192),
    Field("tile_overlap_px", "INT", 256, 0, 8191),
)
_SAMPLING = (
    Field("seed", "INT", 0, 0, LARGEST_SEED),
    Field("steps", "INT", 45, 1, 1000),
    Field("sampler", "COMBO", "restore_edm", options=("restore_edm", "restore_dpmpp_2m")),
    Field("cfg_start", "FLOAT", 4.0, 0.0, 100.0),
    Field("cfg_end", "FLOAT", 4.0, 0.0, 100.0),
    Field("control_start", "FLOAT", 1.0, 0.0, 10.0),
    Field("control_end", "FLOAT", 1.0, 0.0, 10.0),
    Field("restore_cfg", "FLOAT", 4.0, -1.0, 20.0),
    Field("s_churn", "FLOAT", 5.0, 0.0, 100.0),
    Field("s_noise", "FLOAT", 1.003, 0.5, 1.5),
    Field("eta", "FLOAT", 1.0, 0.0, 10.0),
    *_TILES,
)
_BATCH_SEED = Field("batch_seed", "COMBO", "increment", options=("increment", "same"))
_COLOR = ("wavelet", "adain", "none")
_IMAGE = _slots("IMAGE:IMAGE")
_LATENT = _slots("LATENT:LATENT")

NEW_NODES: dict[str, NewNode] = {
    "SUPIR_XPU_LoadSUPIR": NewNode(
        "Load SUPIR",
        (),
        (Field("supir_name", "COMBO", ""),),
        _slots("SUPIR:SUPIR"),
        (340, 60),
    ),
    "SUPIR_XPU_FirstStage": NewNode(
        "SUPIR First Stage",
        _slots("vae:VAE", "supir:SUPIR", "image:IMAGE"),
        (_UPSCALE_BY, _RISK),
        _slots("stage1:IMAGE", "control:LATENT", "center:LATENT"),
        (300, 150),
    ),
    "SUPIR_XPU_Tiles": NewNode(
        "SUPIR Tiles",
        _slots("image:IMAGE", "latent:LATENT"),
        _TILES,
        _slots("tiles:IMAGE", "tile_px:INT", "tile_overlap_px:INT", "count:INT"),
        (300, 150),
    ),
    "SUPIR_XPU_Conditioning": NewNode(
        "SUPIR Conditioning",
        _slots("clip:CLIP", "captions:STRING"),
        (_POSITIVE, _NEGATIVE),
        _slots("positive:CONDITIONING", "negative:CONDITIONING"),
        (360, 240),
        ("captions",),
    ),
    "SUPIR_XPU_Sample": NewNode(
        "SUPIR Sample",
        _slots(
            *("model:MODEL", "supir:SUPIR", "positive:CONDITIONING", "negative:CONDITIONING"),
            *("control:LATENT", "center:LATENT"),
        ),
        (*_SAMPLING, _RISK, _BATCH_SEED),
        _LATENT,
        (320, 500),
        ("center",),
    ),
    "SUPIR_XPU_Upscale": NewNode(
        "SUPIR Upscale",
        _slots("model:MODEL", "clip:CLIP", "vae:VAE", "supir:SUPIR", "image:IMAGE"),
        (
            *(_UPSCALE_BY, _POSITIVE, _NEGATIVE, *_SAMPLING),
            Field("color_fix", "COMBO", "wavelet", options=_COLOR),
            *(_RISK, _BATCH_SEED),
        ),
        _IMAGE,
        (380, 700),
    ),
    "SUPIR_XPU_Encode": NewNode(
        "SUPIR Encode",
        _slots("vae:VAE", "image:IMAGE"),
        (_WORKSPACE, _RISK),
        _LATENT,
        (260, 120),
    ),
    "SUPIR_XPU_Decode": NewNode(
        "SUPIR Decode",
        _slots("vae:VAE", "latent:LATENT"),
        (_WORKSPACE, _RISK),
        _IMAGE,
        (260, 120),
    ),
    "SUPIR_XPU_ColorFix": NewNode(
        "SUPIR Color Fix",
        _slots("image:IMAGE", "reference:IMAGE"),
        (Field("method", "COMBO", "wavelet", options=_COLOR),),
        _IMAGE,
        (260, 110),
    ),
    "CheckpointLoaderSimple": NewNode(
        "Load Checkpoint",
        (),
        (Field("ckpt_name", "COMBO", ""),),
        _slots("MODEL:MODEL", "CLIP:CLIP", "VAE:VAE"),
        (340, 110),
    ),
    "DualCLIPLoader": NewNode(
        "DualCLIPLoader",
        (),
        (
            Field("clip_name1", "COMBO", ""),
            Field("clip_name2", "COMBO", ""),
            Field("type", "COMBO", "sdxl"),
            Field("device", "COMBO", "default"),
        ),
        _slots("CLIP:CLIP"),
        (340, 140),
    ),
    "ImageScaleBy": NewNode(
        "Upscale Image By",
        _slots("image:IMAGE"),
        (
            Field("upscale_method", "COMBO", "lanczos"),
            Field("scale_by", "FLOAT", 1.0, 0.01, 8.0),
        ),
        _IMAGE,
        (280, 90),
    ),
}
