"""SUPIR's guidance as a ComfyUI guider: tiles, cfg ramp, control and restoration.

Thin: every formula is in ``supir/``; every model call goes through the host's own functions, so its
patches, hooks and cfg functions work.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import uuid5

import comfy.samplers
import torch
from comfy.patcher_extension import WrappersMP

from ..supir.constants import WORK_KEY
from ..supir.denoiser import quantise_sigma
from ..supir.errors import SettingsError, ShapeError
from ..supir.guidance import GuidanceSettings, StepCall, restore
from ..supir.injection import ATTENTION_OVERRIDE, InjectedState, make_wrapper
from ..supir.plan import dims_from_unet, tile_memory_bytes
from ..supir.tiling import Window, blend_weights, windows
from . import host
from .control_crop import ControlCropper
from .execution import Execution, check_stage
from .types import SupirModel

POST_CFG = "sampler_post_cfg_function"
"""The host's list of functions that change a cfg result, in ``model_options``."""


@dataclass(frozen=True)
class GuiderInputs:
    """Everything the guider needs besides models and conditioning.

    Attributes:
        settings: the steering.
        hint: [B, 4, h, w] latent of the degraded picture in the model's scale.
        center: the first-stage latent in the same scale, or None for no restoration.
        tile_latent: side of a tile in latent cells; 0 = the whole latent at once.
        overlap_latent: cells neighbouring tiles share.
        captions_per_tile: whether row t of the positive conditioning belongs to tile t.
        picture: part of the latent's height and width the picture covers; the rest is padding.
        share_batch: whether cond and uncond run as one batch (known before the run, not decided by
            what memory happens to be free).
    """

    settings: GuidanceSettings
    hint: torch.Tensor
    center: torch.Tensor | None
    tile_latent: int = 0
    overlap_latent: int = 0
    captions_per_tile: bool = False
    picture: tuple[float, float] = (1.0, 1.0)
    share_batch: bool = True

    def tiles(self) -> list[Window]:
        height, width = self.hint.shape[-2:]
        if self.tile_latent <= 0:
            return [Window(0, height, 0, width)]
        return windows(height, width, self.tile_latent, self.overlap_latent)


class SupirGuider(comfy.samplers.CFGGuider):
    """A host guider that restores. Works with the pack's samplers and with every host sampler."""

    def __init__(
        self,
        model: Any,
        supir: SupirModel,
        inputs: GuiderInputs,
        execution: Execution | None = None,
        on_first_call: Callable[[], None] | None = None,
    ) -> None:
        self._on_first_call = on_first_call
        self._execution = execution
        self.inputs = inputs
        self._tiles = inputs.tiles()
        self._table = model.get_model_object("model_sampling").sigmas.cpu()
        self._cropper = ControlCropper(inputs.hint.shape[-2:], inputs.picture)
        super().__init__(_prepare_model(model, supir, inputs, self._tiles, execution))
        self.set_cfg(inputs.settings.cfg_end)

    @property
    def takes_part(self) -> bool:
        """Whether SUPIR changes anything; if not, this is the plain host guider with tiles."""
        settings = self.inputs.settings
        return settings.uses_control or (settings.uses_restore and self.inputs.center is not None)

    def sample(self, noise: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        hint = self.inputs.hint
        if noise.shape[-2:] != hint.shape[-2:] or noise.shape[0] % hint.shape[0]:
            raise ShapeError(
                f"latent_image is {tuple(noise.shape)}, control is {tuple(hint.shape)} (batch, "
                "channels, height, width). Sample a latent of the size First Stage gave."
            )
        try:
            return super().sample(noise, *args, **kwargs)
        finally:
            self._cropper.clear()

    def predict_noise(
        self,
        x: torch.Tensor,
        timestep: torch.Tensor,
        model_options: dict[str, Any] | None = None,
        seed: int | None = None,
    ) -> torch.Tensor:
        """Return the guided denoised estimate of x, [B, 4, h, w], at noise level timestep[0]."""
        if self._on_first_call is not None:  # the weights are loaded, nothing has run yet
            self._on_first_call()
            self._on_first_call = None
        options = {} if model_options is None else model_options
        sigma_hat = float(timestep.flatten()[0])
        told = options.get("transformer_options", {}).get(WORK_KEY, {})
        settings = self.inputs.settings
        settings = settings.unsteered() if told.get("plain") else settings
        call = step_call(sigma_hat, options)
        cfg_scale = settings.cfg_scale(call.sigma_hat)
        level = timestep
        if self.takes_part:
            level = torch.full_like(timestep, quantise_sigma(sigma_hat, self._table))
        control_scale = settings.control_scale(call.sigma)
        denoised = self._denoise(x, level, control_scale, cfg_scale, options, seed)
        if call.step == 0:
            check_stage("Step 1 of sampling", denoised, self._execution)
        center = self.inputs.center
        if center is None:
            return denoised
        center = center.to(denoised).repeat(denoised.shape[0] // center.shape[0], 1, 1, 1)
        return restore(denoised, center, call, settings.restore_cfg)

    def _denoise(
        self,
        x: torch.Tensor,
        level: torch.Tensor,
        control_scale: float,
        cfg_scale: float,
        options: dict[str, Any],
        seed: int | None,
    ) -> torch.Tensor:
        """Return the cfg result of every tile, blended.

        Post-cfg functions of the MODEL run on each tile, where they can call the network; those a
        sampler added (the cfg_pp samplers) keep what they are given and get the blended whole.
        """
        if len(self._tiles) == 1:
            return self._tile(0, x, level, control_scale, cfg_scale, options, seed)
        own = self.model_options.get(POST_CFG, [])
        late = [fn for fn in options.get(POST_CFG, []) if fn not in own]
        parts: dict[str, torch.Tensor] = {}
        if late:
            options = {**options, POST_CFG: [*own, partial(_keep_parts, parts)]}
        totals: dict[str, torch.Tensor] = {}
        weights = torch.zeros(x.shape[-2:], dtype=torch.float32, device=x.device)
        for index, window in enumerate(self._tiles):
            host.check_cancel()
            tile = window.crop(x)
            denoised = self._tile(index, tile, level, control_scale, cfg_scale, options, seed)
            weight = blend_weights(*tile.shape[-2:], device=x.device)
            for name, part in {**parts, "denoised": denoised}.items():
                if name not in totals:
                    totals[name] = torch.zeros_like(x, dtype=torch.float32)
                window.crop(totals[name]).add_(part * weight)
            window.crop(weights).add_(weight)
        args: dict[str, Any] = {k: (total / weights).to(x.dtype) for k, total in totals.items()}
        args |= {"cond": self.conds.get("positive"), "uncond": self.conds.get("negative")}
        args |= {"cond_scale": cfg_scale, "model": self.inner_model, "sigma": level}
        for fn in late:
            args["denoised"] = fn({**args, "model_options": options, "input": x})
        return args["denoised"]

    def _tile(
        self,
        index: int,
        x: torch.Tensor,
        level: torch.Tensor,
        control_scale: float,
        cfg_scale: float,
        options: dict[str, Any],
        seed: int | None,
    ) -> torch.Tensor:
        """Return the host's cfg result on one tile (already cropped to x)."""
        window = self._tiles[index]
        inner = dict(options.get("transformer_options", {}))
        state = InjectedState(window.crop(self.inputs.hint), control_scale)
        inner[WORK_KEY] = {**inner.get(WORK_KEY, {}), "state": state}
        options = {**options, "transformer_options": inner}
        conds = {
            name: self._crop_conds(self.conds.get(name), index, name == "positive")
            for name in ("positive", "negative")
        }

        def run(together: bool) -> torch.Tensor:
            own = dict(options)
            if not together:
                own.setdefault("sampler_calc_cond_batch_function", _one_by_one)
            return comfy.samplers.sampling_function(
                self.inner_model,
                x,
                level,
                conds["negative"],
                conds["positive"],
                cfg_scale,
                model_options=own,
                seed=seed,
            )

        together = partial(run, self.inputs.share_batch)
        if self._execution is None:
            return together()
        return self._execution.run_tile(together, partial(run, False))

    def _crop_conds(self, conds: Any, index: int, positive: bool) -> Any:
        """Return the conditionings as they are on one tile: captions, masks and ControlNet hints."""
        padded = self.inputs.picture != (1.0, 1.0)
        if conds is None or (len(self._tiles) == 1 and not padded):
            return conds
        window, cropped = self._tiles[index], []
        for cond in conds:
            one = dict(cond)
            one["uuid"] = uuid5(cond["uuid"], str(index))  # caches of other packs go by it
            if self.inputs.captions_per_tile and positive:
                one["model_conds"] = {
                    k: _row(v, index, len(self._tiles)) for k, v in cond["model_conds"].items()
                }
            if "mask" in cond:
                one["mask"] = window.crop(cond["mask"])
            if "control" in cond:
                one["control"] = self._cropper.crop(cond["control"], index, window)
            cropped.append(one)
        return cropped


def _keep_parts(parts: dict[str, torch.Tensor], args: dict[str, Any]) -> torch.Tensor:
    """Note the two estimates behind a cfg result, as the last post-cfg function of a tile."""
    parts.update({name: args[name] for name in ("cond_denoised", "uncond_denoised")})
    return args["denoised"]


def step_call(sigma_hat: float, model_options: dict[str, Any]) -> StepCall:
    """Return where the sampler stands, as it says, or as the schedule's nearest entries tell.

    The pack's samplers put step, sigma and sigma_next under our key; of a foreign sampler only the
    schedule (``sample_sigmas``) and the level it asks at are known.
    """
    options = model_options.get("transformer_options", {})
    told = options.get(WORK_KEY, {})
    if "sigma" in told:
        return StepCall(told["step"], told["sigma"], sigma_hat, told["sigma_next"])
    levels = options.get("sample_sigmas")
    if levels is None or len(levels) < 2:
        return StepCall(0, sigma_hat, sigma_hat, 0.0)
    distance = (levels[:-1].detach().to("cpu", torch.float32) - sigma_hat).abs()
    step = int(torch.argmin(distance))
    return StepCall(step, float(levels[step]), sigma_hat, float(levels[step + 1]))


def check_conditioning(name: str, conds: Any, tiles: int) -> None:
    """Refuse conditioning the guider cannot cut into tiles or run beside the control network.

    Raises: SettingsError naming the input and the kind.
    """
    for _, extra in conds:
        if "area" in extra or extra.get("set_area_to_bounds"):
            raise SettingsError(
                f"{name} is limited to an area of the picture, but SUPIR's control network always "
                "sees the whole tile. Use a mask (Conditioning Set Mask, 'default') instead of an area."
            )
        if tiles > 1 and "gligen" in extra:
            raise SettingsError(
                f"{name} carries GLIGEN boxes, which cannot be cut into {tiles} tiles. Remove "
                "them, or set tile_px to -1."
            )


def _row(value: Any, index: int, rows: int) -> Any:
    """Return row ``index`` of a model conditioning that holds one row per tile."""
    tensor = getattr(value, "cond", None)
    if not isinstance(tensor, torch.Tensor) or tensor.shape[0] != rows:
        return value
    return value._copy_with(tensor[index : index + 1])


def _one_by_one(args: dict[str, Any]) -> list[torch.Tensor]:
    """Run each conditioning as a batch of its own, in the host's order."""
    x, sigma, options = args["input"], args["sigma"], dict(args["model_options"])
    options.pop("sampler_calc_cond_batch_function", None)
    return [
        comfy.samplers.calc_cond_batch(args["model"], [cond], x, sigma, options)[0]
        for cond in args["conds"]
    ]


def _prepare_model(
    model: Any,
    supir: SupirModel,
    inputs: GuiderInputs,
    tiles: list[Window],
    execution: Execution | None,
) -> Any:
    """Return a clone of the MODEL that runs SUPIR and tells the host what one tile needs."""
    clone = model.clone()
    for kind in (WrappersMP.DIFFUSION_MODEL, WrappersMP.PREPARE_SAMPLING):
        clone.remove_wrappers_with_key(kind, WORK_KEY)
    clone.remove_additional_models(WORK_KEY)
    uses_control = inputs.settings.uses_control
    run_layer = None
    if execution is not None:
        run_layer = execution.run_layer
        options = clone.model_options["transformer_options"]
        options[ATTENTION_OVERRIDE] = execution.override(options.get(ATTENTION_OVERRIDE))
    if uses_control or run_layer is not None:
        wrapper = make_wrapper(supir.patcher.model, run_layer)
        clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, WORK_KEY, wrapper)
    if uses_control:
        clone.set_additional_models(WORK_KEY, [supir.patcher])
    height = max(w.bottom - w.top for w in tiles)
    width = max(w.right - w.left for w in tiles)
    rows = math.ceil(height * _memory_factor(model, supir, inputs, height, width))

    def prepare(executor: Any, model: Any, noise_shape: Any, *args: Any, **kwargs: Any) -> Any:
        shape = [*noise_shape[:-2], rows, width]
        return executor(model, shape, *args, **kwargs)

    clone.add_wrapper_with_key(WrappersMP.PREPARE_SAMPLING, WORK_KEY, prepare)
    return clone


def _memory_factor(
    model: Any, supir: SupirModel, inputs: GuiderInputs, height: int, width: int
) -> float:
    """Return how much more memory a tile batch needs than the host thinks its UNet does.

    The host's estimate is linear in the latent's area and knows nothing of the control network, so
    it is told a latent that is taller by this factor.
    """
    base = model.model
    needed = tile_memory_bytes(
        dims_from_unet(base.diffusion_model),
        supir.dims if inputs.settings.uses_control else None,
        height,
        width,
        dtype_bytes=base.get_dtype_inference().itemsize,
    )
    expected = base.memory_required([2, inputs.hint.shape[1], height, width])
    return max(1.0, needed / max(1.0, float(expected)))
