"""Upscale: the whole restoration in one node."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from comfy_api.latest import io

from ..supir.guidance import GuidanceSettings
from . import vae as codec
from . import widgets
from .color_fix import METHODS, fix_colors
from .condition import encode
from .execution import check_stage
from .first_stage import FirstStageInput, run_first_stage
from .guarded_run import GuardedRun, Judged
from .host import PhasedProgress, is_loaded
from .judging import judge_run
from .model_check import check_base, check_pair
from .picture import crop_image, make_latent
from .planning import layout_of_vae, sample_networks
from .sample_request import SampleSettings, sampling_request, tile_cells
from .sample_run import describe, prepare_run, run_sample
from .sockets import check_clip, check_model
from .types import CATEGORY, SupirModel, SupirSocket


def judge_upscale(
    model: Any, vae: Any, supir: SupirModel, asked: FirstStageInput, settings: SampleSettings
) -> Judged:
    """Judge the whole restoration before anything is loaded. Raises: RiskBlockedError."""
    ratio = vae.spacial_compression_encode()
    size = asked.geometry
    shape = (asked.images, 4, size.padded_height_px // ratio, size.padded_width_px // ratio)
    latent = make_latent(torch.empty(shape, device="meta"), size, None)
    networks = replace(
        sample_networks(model, supir, ratio),
        vae=layout_of_vae(vae, ratio),
        vae_dtype_bytes=vae.vae_dtype.itemsize,
    )
    tile = tile_cells(settings.tile_px, settings.tile_overlap_px, latent, networks)
    request = sampling_request([], [], latent, settings, tile)
    request = replace(request, stages=("first_stage", "sample", "decode"))
    loads = not is_loaded(model)
    return judge_run(request, networks, settings.risk, loads_model=loads, starts=True)


def restore_pictures(
    model: Any,
    clip: Any,
    vae: Any,
    supir: SupirModel,
    asked: FirstStageInput,
    prompts: tuple[str, str],
    settings: SampleSettings,
    color_fix: str,
    guard: GuardedRun,
) -> tuple[torch.Tensor, list[str]]:
    """Run First Stage, Conditioning, Sample, Decode and Color Fix on a judged batch.

    Returns: restored pictures [B, H, W, 3 or 4] and notes for the user.
    """
    stage = run_first_stage(asked, guard)
    positive, negative = (encode(clip, text) for text in prompts)
    latents = (stage.control, stage.center)
    run = prepare_run(model, supir, positive, negative, *latents, settings, guard.judged)
    with guard.phase("sample"):
        latent = {**stage.control, "samples": run_sample(run, guard)}
    with guard.phase("decode"):
        decoded, note = codec.decode_latent(
            vae,
            latent["samples"],
            progress=PhasedProgress(1).phase(0),
            execution=guard.execution,
        )
        check_stage("Decode", decoded)
    cropped, _ = crop_image(decoded, latent)
    restored = fix_colors(cropped, stage.stage1, color_fix)
    return restored, [describe(run), *stage.notes, *run.notes, *([note] if note else [])]


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
                widgets.risk(),
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
    def validate_inputs(cls, tile_px: Any = None) -> bool | str:
        return widgets.check_tile_px(tile_px)

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
        risk: str = "auto",
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
        check_model(model)
        check_clip(clip)
        check_base(model)
        asked = FirstStageInput(vae, supir, image, upscale_by)
        check_pair(model, supir.dims, supir.name)
        judged = judge_upscale(model, vae, supir, asked, settings)
        with GuardedRun.start("Upscale", judged) as guard:
            restored, notes = restore_pictures(
                model,
                clip,
                vae,
                supir,
                asked,
                (positive, negative),
                settings,
                color_fix,
                guard,
            )
        height, width = restored.shape[1:3]
        head = f"{restored.shape[0]} picture(s) of {width}x{height} px"
        return io.NodeOutput(restored, ui=guard.ui(head, *notes))
