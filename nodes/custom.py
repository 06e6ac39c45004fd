"""Guider, Sampler and Sigmas: SUPIR's parts for ComfyUI's custom sampling nodes."""

from __future__ import annotations

from typing import Any

import comfy.model_management as mm
import torch
from comfy_api.latest import io, ui

from ..supir.errors import SettingsError
from ..supir.guidance import GuidanceSettings
from ..supir.sigmas import ddpm_sigmas, karras_sigmas
from . import widgets
from .execution import Execution
from .guarded_run import GuardedRun
from .guider import GuiderInputs, SupirGuider
from .model_check import check_base
from .picture import fit_to_canvas, picture_part
from .sample_request import SampleSettings
from .sample_run import SampleRun, fit_masks, prepare_run
from .sampler import make_sampler
from .types import CATEGORY, SupirModel, SupirSocket


class RecordedGuider(SupirGuider):
    """A guider whose every sampling is recorded as a judged run."""

    def __init__(self, run: SampleRun, inputs: GuiderInputs) -> None:
        self._judged, self._control = run.judged, run.control
        self._execution = Execution.for_run(run.judged.machine)
        super().__init__(run.model, run.supir, inputs, self._execution)

    def sample(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        guard = GuardedRun.start("Guider", self._judged, self._execution)
        mask = kwargs.get("denoise_mask")
        if mask is not None:  # of the picture, as SetLatentNoiseMask left it
            kwargs["denoise_mask"] = fit_to_canvas(mask, self._control)
        with guard, guard.phase("sample"):
            self._on_first_call = guard.settle_after_load
            return super().sample(*args, **kwargs)


def make_guider(run: SampleRun) -> SupirGuider:
    """Return a guider over the whole batch of a checked request. Raises: SettingsError."""
    if run.captions == "image_tile":
        raise SettingsError(
            "captions holds one caption for every tile of every picture, but a guider runs the whole "
            "batch at once. Use the Sample node, or give one caption per picture or per tile."
        )
    scale = run.model.get_model_object("latent_format").process_in
    center = None if run.center is None else scale(run.center["samples"].float())
    inputs = GuiderInputs(
        run.settings.guidance,
        scale(run.control["samples"].float()),
        center,
        *run.tile,
        picture=picture_part(run.control),
        captions_per_tile=run.captions == "tile",
    )
    guider = RecordedGuider(run, inputs)
    guider.set_conds(fit_masks(run.positive, run.control), fit_masks(run.negative, run.control))
    return guider


class Guider(io.ComfyNode):
    """SUPIR's guidance for SamplerCustomAdvanced and any host sampler."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SUPIR_XPU_Guider",
            display_name="SUPIR Guider",
            category=CATEGORY,
            description=(
                "SUPIR's control network, cfg ramp, restoration and tiles as a guider: works with "
                "SamplerCustomAdvanced, every ComfyUI sampler and every schedule."
            ),
            search_aliases=["supir", "guider", "custom sampling"],
            inputs=[
                io.Model.Input(
                    "model", tooltip="SDXL base model, also with LoRA or other patches."
                ),
                SupirSocket.Input("supir", tooltip="From Load SUPIR."),
                io.Conditioning.Input("positive", tooltip="From SUPIR Conditioning."),
                io.Conditioning.Input("negative", tooltip="From SUPIR Conditioning."),
                io.Latent.Input(
                    "control",
                    tooltip="control of First Stage; connect the same latent to latent_image.",
                ),
                *widgets.guidance(),
                *widgets.tiles(),
                widgets.risk(),
                io.Latent.Input(
                    "center",
                    optional=True,
                    tooltip="center of First Stage: what restore_cfg pulls towards.",
                ),
            ],
            outputs=[io.Guider.Output("guider", display_name="GUIDER")],
        )

    @classmethod
    def validate_inputs(cls, tile_px: Any = None) -> bool | str:
        return widgets.check_tile_px(tile_px)

    @classmethod
    def execute(
        cls,
        model: Any,
        supir: SupirModel,
        positive: Any,
        negative: Any,
        control: Any,
        cfg_start: float,
        cfg_end: float,
        control_start: float,
        control_end: float,
        restore_cfg: float,
        tile_px: int,
        tile_overlap_px: int,
        risk: str = "auto",
        center: Any = None,
    ) -> io.NodeOutput:
        guidance = GuidanceSettings(cfg_start, cfg_end, control_start, control_end, restore_cfg)
        settings = SampleSettings(
            guidance=guidance, tile_px=tile_px, tile_overlap_px=tile_overlap_px, risk=risk
        )
        run = prepare_run(model, supir, positive, negative, control, center, settings)
        return io.NodeOutput(
            make_guider(run), ui=ui.PreviewText("\n".join([*run.notes, run.judged.text]))
        )


class Sampler(io.ComfyNode):
    """SUPIR's samplers for ComfyUI's custom sampling nodes."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SUPIR_XPU_Sampler",
            display_name="SUPIR Sampler",
            category=CATEGORY,
            description="SUPIR's restoring samplers as a SAMPLER for custom sampling.",
            search_aliases=["supir", "sampler"],
            inputs=[*widgets.sampler(), *widgets.noise()],
            outputs=[io.Sampler.Output("sampler", display_name="SAMPLER")],
        )

    @classmethod
    def execute(cls, sampler: str, s_churn: float, s_noise: float, eta: float) -> io.NodeOutput:
        return io.NodeOutput(make_sampler(sampler, s_churn, s_noise, eta))


class Sigmas(io.ComfyNode):
    """SUPIR's noise schedules for ComfyUI's custom sampling nodes."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SUPIR_XPU_Sigmas",
            display_name="SUPIR Sigmas",
            category=CATEGORY,
            description=(
                "The noise levels the original uses: ddpm with restore_edm, karras with "
                "restore_dpmpp_2m (its lower end depends on the steps, unlike ComfyUI's karras)."
            ),
            search_aliases=["supir", "schedule", "sigmas"],
            inputs=[
                io.Model.Input("model", tooltip="SDXL base model the levels are for."),
                widgets.steps(),
                io.Combo.Input(
                    "schedule",
                    options=["ddpm", "karras"],
                    default="ddpm",
                    tooltip="ddpm goes with restore_edm, karras with restore_dpmpp_2m.",
                ),
            ],
            outputs=[io.Sigmas.Output("sigmas", display_name="SIGMAS")],
        )

    @classmethod
    def execute(cls, model: Any, steps: int, schedule: str) -> io.NodeOutput:
        check_base(model)
        levels = karras_sigmas(steps) if schedule == "karras" else ddpm_sigmas(steps)
        return io.NodeOutput(levels.to(mm.intermediate_device()))
