"""Is this MODEL one that SUPIR can restore with? Answered before anything is loaded."""

from __future__ import annotations

import math
from typing import Any

import comfy.model_sampling

from ..supir.constants import SIGMA_MAX
from ..supir.errors import ModelError
from ..supir.layout import SftDims, SupirDims
from .sockets import check_model

WANTED = (
    "Connect the MODEL of an SDXL base checkpoint (eps prediction), such as a photographic SDXL "
    "fine-tune or a Lightning/Hyper variant of one."
)


def _refuse(what: str, why: str) -> None:
    raise ModelError(f"{what}, but {why}. {WANTED}")


def check_base(model: Any) -> None:
    """Refuse a MODEL that is no SDXL base with eps prediction and SDXL's noise range.

    Raises: ModelError saying what the model is.
    """
    check_model(model)
    base = model.model
    kind = type(base).__name__
    config = base.model_config.unet_config
    unet = base.diffusion_model
    if not hasattr(unet, "input_blocks") or not hasattr(unet, "middle_block"):
        _refuse(
            f"model is a {kind} model without a UNet", "SUPIR's adapters sit between UNet blocks"
        )
    if "Refiner" in kind or config.get("context_dim") == 1280:
        _refuse("model is the SDXL refiner", "SUPIR was trained on the SDXL base")
    channels = config.get("in_channels", 4)
    if channels != 4:
        what = "an inpaint model" if channels == 9 else f"a model with {channels} input channels"
        _refuse(f"model is {what}", "SUPIR's control network expects the 4 channels of plain SDXL")
    if unet.num_classes != "sequential":
        _refuse(
            f"model is a {kind} model without SDXL's size conditioning",
            "SUPIR's control network needs it",
        )
    prediction = getattr(base.model_type, "name", str(base.model_type))
    if prediction != "EPS":
        _refuse(
            f"model predicts {prediction}", "SUPIR was trained with eps prediction on SDXL's noise"
        )
    sampling = model.get_model_object("model_sampling")
    estimate = getattr(type(sampling), "calculate_denoised", None)
    if estimate is not comfy.model_sampling.EPS.calculate_denoised:
        kind = next(
            (c.__name__ for c in type(sampling).__mro__ if "calculate_denoised" in vars(c)), "?"
        )
        _refuse(f"model was patched to predict {kind}", "SUPIR was trained with eps prediction")
    sigma_max = float(sampling.sigma_max)
    if not math.isclose(sigma_max, SIGMA_MAX, rel_tol=1e-3):
        _refuse(
            f"model starts at noise level {sigma_max:.4f}",
            f"SUPIR's schedule and ramps are made for SDXL's {SIGMA_MAX}",
        )


def check_pair(model: Any, dims: SupirDims, name: str) -> None:
    """Refuse a MODEL whose UNet does not have the widths and blocks the SUPIR file was made for.

    Raises: ModelError naming the first difference.
    """
    unet = model.model.diffusion_model
    blocks = len(unet.input_blocks)
    wanted = dims.control
    if blocks != len(wanted.blocks) + 1:
        _refuse(
            f"model has {blocks} input blocks and {name} has {len(wanted.blocks) + 1}",
            "the two must be of one architecture",
        )
    config = model.model.model_config.unet_config
    for key, value in (
        ("model_channels", wanted.model_channels),
        ("context_dim", wanted.context_dim),
        ("adm_in_channels", wanted.adm_in_channels),
    ):
        if config.get(key) != value:
            _refuse(
                f"model has {key} {config.get(key)} and {name} has {value}",
                "the two must be of one architecture",
            )
    outputs = [one for one in dims.adapters if isinstance(one, SftDims)]
    if len(outputs) != len(unet.output_blocks) + 1:
        _refuse(
            f"model has {len(unet.output_blocks)} output blocks and {name} has adapters for "
            f"{len(outputs) - 1}",
            "every block needs its adapter",
        )
    depths = [_depth(block) for block in unet.input_blocks]
    expected = [0, *(block.depth for block in wanted.blocks)]
    middle = _depth(unet.middle_block)
    if [*depths, middle] != [*expected, wanted.middle_depth]:
        _refuse(
            f"model has transformer depths {depths} with {middle} in the middle, {name} was trained "
            f"on {expected} with {wanted.middle_depth}",
            "distilled SDXL variants such as SSD-1B and Vega lack blocks that SUPIR steers",
        )


def _depth(block: Any) -> int:
    return sum(len(getattr(layer, "transformer_blocks", ())) for layer in block)
