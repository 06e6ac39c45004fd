"""Sample: restore every picture of a batch, one after the other."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..supir.guidance import GuidanceSettings
from . import widgets
from .guarded_run import GuardedRun
from .sample_request import SampleSettings
from .sample_run import describe, prepare_run, run_sample
from .types import CATEGORY, SupirModel, SupirSocket


class Sample(io.ComfyNode):
    """Restore with SUPIR: sampling with control network, guidance and tiles."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SUPIR_XPU_Sample",
            display_name="SUPIR Sample",
            category=CATEGORY,
            description=(
                "Restores the picture First Stage prepared, with SUPIR's own samplers. Large "
                "pictures are sampled in tiles; every picture of a batch runs on its own."
            ),
            search_aliases=["supir", "restore", "upscale", "ksampler"],
            inputs=[
                io.Model.Input(
                    "model", tooltip="SDXL base model, also with LoRA or other patches."
                ),
                SupirSocket.Input("supir", tooltip="From Load SUPIR."),
                io.Conditioning.Input("positive", tooltip="From SUPIR Conditioning."),
                io.Conditioning.Input("negative", tooltip="From SUPIR Conditioning."),
                io.Latent.Input("control", tooltip="control of First Stage: what is restored."),
                widgets.seed(),
                widgets.steps(),
                *widgets.sampler(),
                *widgets.guidance(),
                *widgets.noise(),
                *widgets.tiles(),
                widgets.risk(),
                io.Latent.Input(
                    "center",
                    optional=True,
                    tooltip="center of First Stage: what restore_cfg pulls towards.",
                ),
                widgets.batch_seed(),
            ],
            outputs=[io.Latent.Output("latent", display_name="LATENT")],
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
        seed: int,
        steps: int,
        sampler: str,
        cfg_start: float,
        cfg_end: float,
        control_start: float,
        control_end: float,
        restore_cfg: float,
        s_churn: float,
        s_noise: float,
        eta: float,
        tile_px: int,
        tile_overlap_px: int,
        risk: str = "auto",
        center: Any = None,
        batch_seed: str = "increment",
    ) -> io.NodeOutput:
        guidance = GuidanceSettings(cfg_start, cfg_end, control_start, control_end, restore_cfg)
        settings = SampleSettings(
            seed,
            steps,
            sampler,
            guidance,
            s_churn,
            s_noise,
            eta,
            tile_px,
            tile_overlap_px,
            batch_seed,
            risk,
        )
        run = prepare_run(model, supir, positive, negative, control, center, settings)
        with GuardedRun.start("Sample", run.judged) as guard, guard.phase("sample"):
            latent = run_sample(run, guard)
        out = {k: v for k, v in control.items() if k != "noise_mask"}
        out["samples"] = latent
        return io.NodeOutput(out, ui=guard.ui(describe(run), *run.notes))
