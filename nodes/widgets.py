"""The widgets that several sampling nodes share, in one place so that they stay alike."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from .guarded_run import RISK_MODES
from .sampler import SAMPLERS, SEED_RANGE


def upscale_by() -> Any:
    return io.Float.Input(
        "upscale_by",
        default=2.0,
        min=0.01,
        max=32.0,
        step=0.01,
        tooltip="Output size as a factor of the input; 1 restores without resizing.",
    )


def positive() -> Any:
    return io.String.Input(
        "positive",
        multiline=True,
        default="high quality, detailed, sharp focus",
        tooltip="What the result should look like, added after each caption.",
    )


def negative() -> Any:
    return io.String.Input(
        "negative",
        multiline=True,
        default="blurry, noisy, low quality, jpeg artifacts",
        tooltip="What the result should not look like.",
    )


def seed() -> Any:
    return io.Int.Input(
        "seed",
        default=0,
        min=0,
        max=SEED_RANGE - 1,
        control_after_generate=True,
        tooltip="Noise of the first picture; the same seed gives the same picture on every device.",
    )


def steps() -> Any:
    return io.Int.Input(
        "steps",
        default=45,
        min=1,
        max=1000,
        tooltip="Sampling steps: 30 to 50 for a normal SDXL model, 6 to 12 for Lightning or Hyper.",
    )


def sampler() -> list[Any]:
    return [
        io.Combo.Input(
            "sampler",
            options=list(SAMPLERS),
            default="restore_edm",
            tooltip=(
                "restore_edm: SUPIR's own, best with normal models. restore_dpmpp_2m: fewer steps, "
                "for Lightning and Hyper models; ignores restore_cfg and the control ramp."
            ),
        ),
    ]


def guidance() -> list[Any]:
    return [
        io.Float.Input(
            "cfg_start",
            default=4.0,
            min=0.0,
            max=100.0,
            step=0.01,
            tooltip="Prompt guidance at the highest noise (the first steps). 1 switches it off.",
        ),
        io.Float.Input(
            "cfg_end",
            default=4.0,
            min=0.0,
            max=100.0,
            step=0.01,
            tooltip="Prompt guidance at the lowest noise; in between it follows the noise level.",
        ),
        io.Float.Input(
            "control_start",
            default=1.0,
            min=0.0,
            max=10.0,
            step=0.01,
            tooltip="How closely the input is followed at the highest noise. 0 is plain SDXL.",
        ),
        io.Float.Input(
            "control_end",
            default=1.0,
            min=0.0,
            max=10.0,
            step=0.01,
            tooltip="How closely the input is followed at the lowest noise; 0.9 gives more freedom.",
        ),
        io.Float.Input(
            "restore_cfg",
            default=4.0,
            min=-1.0,
            max=20.0,
            step=0.01,
            tooltip=(
                "Pull towards the first-stage picture. An exponent: small values pull hard over the "
                "whole run, large ones only in the first steps; 0 or less is off."
            ),
        ),
    ]


def noise() -> list[Any]:
    return [
        io.Float.Input(
            "s_churn",
            default=5.0,
            min=0.0,
            max=100.0,
            step=0.1,
            advanced=True,
            tooltip="restore_edm only: noise put back during the run; more invents more detail.",
        ),
        io.Float.Input(
            "s_noise",
            default=1.003,
            min=0.5,
            max=1.5,
            step=0.001,
            advanced=True,
            tooltip="Factor on the noise that is put back; slightly above 1 keeps texture.",
        ),
        io.Float.Input(
            "eta",
            default=1.0,
            min=0.0,
            max=10.0,
            step=0.01,
            advanced=True,
            tooltip="restore_dpmpp_2m only: randomness of each step; 0 is deterministic.",
        ),
    ]


SMALLEST_TILE_PX = 32
"""Side of the smallest tile of any VAE the nodes work with: 8 latent cells of 4 px."""

TILE_RANGE = (-1, 8192)


def check_tile_px(tile_px: Any) -> bool | str:
    """Return True, or why a constant tile_px cannot work whatever is connected.

    ComfyUI leaves the range of an input that is checked here to us; None means it is linked.
    """
    if not isinstance(tile_px, int):
        return True
    low, high = TILE_RANGE
    if not low <= tile_px <= high:
        return f"tile_px is {tile_px}; it goes from {low} to {high}. Set 0 to let it be chosen."
    if 0 < tile_px < SMALLEST_TILE_PX:
        return (
            f"tile_px is {tile_px}; the UNet needs tiles of at least 8 latent cells, which is 64 px "
            f"with SDXL's VAE. Raise tile_px, or set 0 to let it be chosen."
        )
    return True


def tiles() -> list[Any]:
    return [
        io.Int.Input(
            "tile_px",
            default=0,
            min=TILE_RANGE[0],
            max=TILE_RANGE[1],
            step=1,
            tooltip=(
                "Side of the square tiles the picture is sampled in, in output pixels. 0 chooses; "
                "-1 never tiles."
            ),
        ),
        io.Int.Input(
            "tile_overlap_px",
            default=256,
            min=0,
            max=8191,
            step=1,
            tooltip="How much neighbouring tiles share; a quarter to half of tile_px hides seams.",
        ),
    ]


def batch_seed() -> Any:
    return io.Combo.Input(
        "batch_seed",
        options=["increment", "same"],
        default="increment",
        optional=True,
        advanced=True,
        tooltip="increment: picture k of a batch uses seed + k. same: one seed for all, for video.",
    )


def workspace_mb() -> Any:
    return io.Int.Input(
        "workspace_mb",
        default=0,
        min=0,
        max=16384,
        step=16,
        optional=True,
        advanced=True,
        tooltip=(
            "Memory the VAE works in at a time, in MiB; the result is the same at any value. "
            "0 chooses from the free memory."
        ),
    )


def risk() -> Any:
    return io.Combo.Input(
        "risk",
        options=list(RISK_MODES),
        default="auto",
        optional=True,
        tooltip=(
            "What to do about a run this device may not survive. auto: plan tiles and waits so that "
            "it is safe, block only if no plan is. block: refuse. warn: say so and run. off: run."
        ),
    )
