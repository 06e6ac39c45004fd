"""Did a link bring what the socket is for? ComfyUI checks links, but lets constants through."""

from __future__ import annotations

from typing import Any

from ..supir.errors import ModelError
from .types import SupirModel


def _refuse(name: str, value: Any, wanted: str, source: str) -> None:
    raise ModelError(
        f"{name} is {str(value)[:40]!r} ({type(value).__name__}), but only a link can bring the "
        f"{wanted} that is needed. Connect {source} to {name}."
    )


def check_model(model: Any) -> None:
    """Refuse what is no MODEL. Raises: ModelError."""
    if not hasattr(model, "get_model_object"):
        _refuse("model", model, "MODEL", "the MODEL of an SDXL checkpoint loader")


def check_clip(clip: Any) -> None:
    """Refuse what is no CLIP, or the empty CLIP of a checkpoint without one. Raises: ModelError."""
    if clip is None:
        raise ModelError(
            "clip is empty: the checkpoint has no text encoders. Load them with DualCLIPLoader "
            "(type sdxl) and connect that to clip."
        )
    if not hasattr(clip, "encode_from_tokens_scheduled"):
        _refuse("clip", clip, "CLIP", "the CLIP of an SDXL checkpoint loader")


def check_vae(vae: Any) -> None:
    """Refuse what is no VAE. Raises: ModelError."""
    if not hasattr(vae, "first_stage_model"):
        _refuse("vae", vae, "VAE", "the VAE of an SDXL checkpoint loader, or Load VAE,")
    if vae.first_stage_model is None:
        raise ModelError(
            "vae is empty: the checkpoint has no VAE. Load one with Load VAE and connect it to vae."
        )


def check_supir(supir: Any) -> None:
    """Refuse what is no SUPIR. Raises: ModelError."""
    if not isinstance(supir, SupirModel):
        _refuse("supir", supir, "SUPIR", "Load SUPIR")


def check_prompts(positive: Any, negative: Any) -> None:
    """Refuse what is no CONDITIONING. Raises: ModelError."""
    for name, conds in (("positive", positive), ("negative", negative)):
        if not isinstance(conds, list) or not all(_is_cond(one) for one in conds):
            _refuse(name, conds, "CONDITIONING", "SUPIR Conditioning")


def _is_cond(one: Any) -> bool:
    return isinstance(one, (list, tuple)) and len(one) == 2 and isinstance(one[1], dict)
