"""The ten nodes of the older wrapper: their inputs, and every layout their values were saved in.

Source: reading of github.com/kijai/ComfyUI-SUPIR (version 1.0.3) and its published workflows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

SAMPLERS = {
    "RestoreEDMSampler": ("restore_edm", False),
    "RestoreDPMPP2MSampler": ("restore_dpmpp_2m", False),
    "TiledRestoreEDMSampler": ("restore_edm", True),
    "TiledRestoreDPMPP2MSampler": ("restore_dpmpp_2m", True),
}
"""Old sampler name: (ours, whether it sampled in tiles)."""

RESIZE = ("nearest-exact", "bilinear", "area", "bicubic", "lanczos")
COLOR_FIX = {"None": "none", "AdaIn": "adain", "Wavelet": "wavelet"}
DTYPES = ("fp16", "bf16", "fp32", "auto")
CONTROLS = ("fixed", "randomize", "increment", "decrement")
"""What the front end stores behind a seed: what becomes of it after a run."""

SEED_CONTROL = "control_after_generate"
WEIGHTS = (".safetensors", ".sft", ".ckpt", ".pt", ".pt2", ".pth", ".bin", ".pkl")
"""Endings of the files ComfyUI lists as checkpoints."""


@dataclass(frozen=True)
class Widget:
    """One value of an old node. ``kind``: int, float, bool, text or file; ``options`` of a list."""

    name: str
    kind: str
    default: Any
    options: tuple[str, ...] = ()

    def fits(self, value: object) -> bool:
        """Say whether a stored value is of this widget's kind."""
        if self.options:
            return value in self.options
        if self.kind == "bool":
            return isinstance(value, bool)
        if self.kind in ("int", "float"):
            return isinstance(value, (int, float)) and not isinstance(value, bool)
        return isinstance(value, str)


@dataclass(frozen=True)
class OldNode:
    """Sockets and values of an old node, in order, and how many of the values are optional."""

    sockets: tuple[str, ...]
    widgets: tuple[Widget, ...]
    optional: int = 0

    @property
    def names(self) -> set[str]:
        return {*self.sockets, *(widget.name for widget in self.widgets)}


def _dtype(name: str, *options: str) -> Widget:
    return Widget(name, "text", "auto", options)


_FP8 = Widget("fp8_unet", "bool", False)
_HIGH = Widget("high_vram", "bool", False)
_MODEL = Widget("supir_model", "file", "")
_SDXL = Widget("sdxl_model", "file", "")
_SEED = Widget("seed", "int", 123)
_DIFFUSION = _dtype("diffusion_dtype", *DTYPES)
_ENCODER = _dtype("encoder_dtype", *DTYPES[1:])
_DECODER = _dtype("decoder_dtype", *DTYPES[1:])
_TILED = Widget("use_tiled_vae", "bool", True)
_ENCODER_TILE = Widget("encoder_tile_size", "int", 512)
_DECODER_TILE = Widget("decoder_tile_size", "int", 512)
_STEPS = Widget("steps", "int", 45)
_S_NOISE = Widget("s_noise", "float", 1.003)
_TILE = Widget("sampler_tile_size", "int", 1024)
_STRIDE = Widget("sampler_tile_stride", "int", 512)
POSITIVE, NEGATIVE = "high quality, detailed", "bad quality, blurry, messy"

OLD_NODES: dict[str, OldNode] = {
    "SUPIR_model_loader_v2": OldNode(
        ("model", "clip", "vae"), (_MODEL, _FP8, _DIFFUSION, _HIGH), 1
    ),
    "SUPIR_model_loader_v2_clip": OldNode(
        ("model", "clip_l", "clip_g", "vae"), (_MODEL, _FP8, _DIFFUSION, _HIGH), 1
    ),
    "SUPIR_model_loader": OldNode(("model", "clip", "vae"), (_MODEL, _SDXL, _FP8, _DIFFUSION)),
    "SUPIR_first_stage": OldNode(
        ("SUPIR_VAE", "image"), (_TILED, _ENCODER_TILE, _DECODER_TILE, _ENCODER)
    ),
    "SUPIR_encode": OldNode(("SUPIR_VAE", "image"), (_TILED, _ENCODER_TILE, _ENCODER)),
    "SUPIR_conditioner": OldNode(
        ("SUPIR_model", "latents"),
        (
            Widget("positive_prompt", "text", POSITIVE),
            Widget("negative_prompt", "text", NEGATIVE),
            Widget("captions", "text", ""),
        ),
        1,
    ),
    "SUPIR_sample": OldNode(
        ("SUPIR_model", "latents", "positive", "negative"),
        (
            _SEED,
            _STEPS,
            Widget("cfg_scale_start", "float", 4.0),
            Widget("cfg_scale_end", "float", 4.0),
            Widget("EDM_s_churn", "int", 5),
            _S_NOISE,
            Widget("DPMPP_eta", "float", 1.0),
            Widget("control_scale_start", "float", 1.0),
            Widget("control_scale_end", "float", 1.0),
            Widget("restore_cfg", "float", -1.0),
            Widget("keep_model_loaded", "bool", False),
            Widget("sampler", "text", "RestoreEDMSampler", tuple(SAMPLERS)),
            _TILE,
            _STRIDE,
        ),
        2,
    ),
    "SUPIR_decode": OldNode(("SUPIR_VAE", "latents"), (_TILED, _DECODER_TILE, _DECODER), 1),
    "SUPIR_tiles": OldNode(
        ("image",), (Widget("tile_size", "int", 512), Widget("tile_stride", "int", 256))
    ),
    "SUPIR_Upscale": OldNode(
        ("image",),
        (
            _MODEL,
            _SDXL,
            _SEED,
            Widget("resize_method", "text", "lanczos", RESIZE),
            Widget("scale_by", "float", 1.0),
            _STEPS,
            Widget("restoration_scale", "float", -1.0),
            Widget("cfg_scale", "float", 4.0),
            Widget("a_prompt", "text", POSITIVE),
            Widget("n_prompt", "text", NEGATIVE),
            Widget("s_churn", "int", 5),
            _S_NOISE,
            Widget("control_scale", "float", 1.0),
            Widget("cfg_scale_start", "float", 4.0),
            Widget("control_scale_start", "float", 0.0),
            Widget("color_fix_type", "text", "Wavelet", tuple(COLOR_FIX)),
            Widget("keep_model_loaded", "bool", True),
            _TILED,
            Widget("encoder_tile_size_pixels", "int", 512),
            Widget("decoder_tile_size_latent", "int", 64),
            Widget("captions", "text", ""),
            _DIFFUSION,
            _ENCODER,
            Widget("batch_size", "int", 1),
            Widget("use_tiled_sampling", "bool", False),
            _TILE,
            _STRIDE,
            _FP8,
            Widget("fp8_vae", "bool", False),
            Widget("sampler", "text", "RestoreEDMSampler", tuple(SAMPLERS)[:2]),
        ),
        10,
    ),
}
TITLES = {
    "SUPIR_model_loader_v2": "SUPIR Model Loader (v2)",
    "SUPIR_model_loader_v2_clip": "SUPIR Model Loader (v2) (Clip)",
    "SUPIR_model_loader": "SUPIR Model Loader (Legacy)",
    "SUPIR_first_stage": "SUPIR First Stage (Denoiser)",
    "SUPIR_encode": "SUPIR Encode",
    "SUPIR_conditioner": "SUPIR Conditioner",
    "SUPIR_sample": "SUPIR Sampler",
    "SUPIR_decode": "SUPIR Decode",
    "SUPIR_tiles": "SUPIR Tiles Preview",
    "SUPIR_Upscale": "SUPIR Upscale (Legacy)",
}
"""What the front end shows over each of them, and writes where the user chose no title."""

LOADERS = ("SUPIR_model_loader_v2", "SUPIR_model_loader_v2_clip", "SUPIR_model_loader")


@dataclass(frozen=True)
class Stored:
    """Values read from a saved node: by name, and what belongs to no input (name, value)."""

    values: dict[str, Any]
    left: list[tuple[str, Any]]


def read_values(kind: str, stored: object) -> Stored:
    """Read the ``widgets_values`` of a saved old node, whichever of its layouts it has."""
    old = OLD_NODES[kind]
    if isinstance(stored, dict):
        given = cast("dict[str, Any]", stored)
        known = {n: v for n, v in given.items() if n in old.names or n == SEED_CONTROL}
        return Stored(known, [(n, v) for n, v in given.items() if n not in known])
    if not isinstance(stored, list):
        return Stored({}, [] if stored is None else [("widgets_values", stored)])
    row = list(cast("list[Any]", stored))
    values: dict[str, Any] = {}
    seed = next((i for i, w in enumerate(old.widgets) if w.name == "seed"), None)
    if seed is not None and len(row) > seed + 1 and row[seed + 1] in CONTROLS:
        values[SEED_CONTROL] = row.pop(seed + 1)
    names = layout_of(kind, row)
    if names is None:
        files = {w.name: v for w, v in zip(old.widgets[:2], row, strict=False) if _is_file(v)}
        if len(files) < 2:
            return Stored({}, [("widgets_values", stored)])
        return Stored(files, [("widgets_values", stored[2:])])
    values.update(zip(names, row, strict=False))
    left = [(f"value {k + 1}", row[k]) for k in range(len(names), len(row))]
    xformers = values.pop("use_xformers", None)
    if xformers is not None:
        left.append(("use_xformers", xformers))
    return Stored(values, left)


def _is_file(value: object) -> bool:
    """Say whether a stored value is the name of a file with weights."""
    return isinstance(value, str) and value.lower().endswith(WEIGHTS)


def layout_of(kind: str, row: list[Any]) -> list[str] | None:
    """Return the names of a stored row (without the seed's control), or None if it fits none.

    Inputs were only ever appended, apart from the three exceptions handled here.
    """
    names = [widget.name for widget in OLD_NODES[kind].widgets]
    if kind == "SUPIR_sample":  # DPMPP_eta came later, in the middle
        where = next((i for i, v in enumerate(row) if isinstance(v, str) and v in SAMPLERS), None)
        if where == names.index("sampler") - 1:
            names.remove("DPMPP_eta")
    if kind == "SUPIR_Upscale":
        return _upscale_layout(names, row)
    return names


def _upscale_layout(names: list[str], row: list[Any]) -> list[str] | None:
    """Was the socket-only ``captions`` stored? The dtype word behind it tells."""
    method = names.index("resize_method")
    if len(row) > method and row[method] not in RESIZE:
        return None  # the order of the very first version, which had other inputs
    at = names.index("captions")
    words = [place < len(row) and row[place] in DTYPES for place in range(at, at + 3)]
    if words[0] and not all(words):  # three words: a caption that reads like one, then the two
        names.remove("captions")
    last = names.index("fp8_unet")
    if len(row) == last + 1:  # one day in March 2024 ended with this input instead of the fp8 pair
        names[last] = "use_xformers"
    return names
