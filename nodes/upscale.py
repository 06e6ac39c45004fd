"""Upscale: the whole restoration in one node."""

from __future__ import annotations

from typing import Any

import torch
from comfy_api.latest import io, ui

from ..supir.guidance import GuidanceSettings
from . import vae as codec
from . import widgets
from .color_fix import METHODS, fix_colors
from .condition import encode
from .first_stage import run_first_stage
from .host import PhasedProgress
from .picture import crop_image
from .sample import SampleSettings, prepare_run, run_sample
from .types import CATEGORY, SupirModel, SupirSocket


def restore_pictures(
    model: Any,
    clip: Any,
    vae: Any,
    supir: SupirModel,
    image: Any,
    upscale_by: float,
    prompts: tuple[str, str],
    settings: SampleSettings,
    color_fix: str,
) -> tuple[torch.Tensor, list[str]]:
    """Run First Stage, Conditioning, Sample, Decode and Color Fix on a batch.

    Returns: restored pictures [B, H, W, 3 or 4] and notes for the user.
    Raises: as those nodes do.
    """
    stage = run_first_stage(vae, supir, image, upscale_by)
    positive, negative = (encode(clip, text) for text in prompts)
    run = prepare_run(model, supir, positive, negative, stage.control, stage.center, settings)
    latent = {**stage.control, "samples": run_sample(run)}
    decoded, note = codec.decode_latent(vae, latent["samples"], progress=PhasedProgress(1).phase(0))
    restored = fix_colors(crop_image(decoded, latent), stage.stage1, color_fix)
    return restored, [*stage.notes, *run.notes, *([note] if note else [])]


class Upscale(io.ComfyNode):
    """Restore and upscale in one node."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SUPIR_XPU_Upscale",
            display_name="SUPIR Upscale",
            category=CATEGORY,
            description=(
                "The whole restoration in one node: first stage, prompts, sampling, decoding and "
                "colour fix. The single nodes give the same picture and more control."
            ),
            search_aliases=["supir", "restore", "upscale", "enhance"],
            inputs=[
                io.Model.Input(
                    "model", tooltip="SDXL base model, also with LoRA or other patches."
                ),
                io.Clip.Input("clip", tooltip="CLIP of the SDXL checkpoint."),
                io.Vae.Input("vae", tooltip="VAE of the SDXL checkpoint."),
                SupirSocket.Input("supir", tooltip="From Load SUPIR."),
                io.Image.Input("image", tooltip="Picture or batch to restore. Any size."),
                widgets.upscale_by(),
                widgets.positive(),
                widgets.negative(),
                widgets.seed(),
                widgets.steps(),
                *widgets.sampler(),
                *widgets.guidance(),
                *widgets.noise(),
                *widgets.tiles(),
                io.Combo.Input(
                    "color_fix",
                    options=list(METHODS),
                    default="wavelet",
                    tooltip="How the colours of the cleaned input are put back.",
                ),
                widgets.batch_seed(),
            ],
            outputs=[io.Image.Output("image", display_name="IMAGE")],
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        clip: Any,
        vae: Any,
        supir: SupirModel,
        image: Any,
        upscale_by: float,
        positive: str,
        negative: str,
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
        color_fix: str,
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
        )
        restored, notes = restore_pictures(
            model,
            clip,
            vae,
            supir,
            image,
            upscale_by,
            (positive, negative),
            settings,
            color_fix,
        )
        height, width = restored.shape[1:3]
        text = "\n".join([f"{restored.shape[0]} picture(s) of {width}x{height} px", *notes])
        return io.NodeOutput(restored, ui=ui.PreviewText(text))
