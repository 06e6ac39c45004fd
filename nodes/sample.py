"""Sample: restore every picture of a batch, one after the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import comfy.model_management as mm
import torch
from comfy_api.latest import io, ui

from ..supir.conditioning import choose_captions
from ..supir.constants import WORK_KEY
from ..supir.errors import SettingsError, ShapeError
from ..supir.guidance import GuidanceSettings
from ..supir.presets import hint
from . import widgets
from .condition import caption_count, pick_rows
from .guider import GuiderInputs, SupirGuider, check_conditioning
from .host import BatchProgress
from .model_check import check_base, check_pair
from .picture import read_latent
from .sampler import image_seed, make_sampler, schedule, start_noise
from .types import CATEGORY, Canvas, SupirModel, SupirSocket

DEFAULT_RATIO = 8
"""Pixels per latent cell of a LATENT that does not say where it comes from (SDXL's VAE)."""

AUTO_TILE_PX = 1024
"""Tile side chosen for tile_px 0: SDXL's training size, where its attention is at home."""


@dataclass(frozen=True)
class SampleSettings:
    """The widgets of the Sample node."""

    seed: int = 0
    steps: int = 45
    sampler: str = "restore_edm"
    guidance: GuidanceSettings = field(default_factory=GuidanceSettings)
    s_churn: float = 5.0
    s_noise: float = 1.003
    eta: float = 1.0
    tile_px: int = 0
    tile_overlap_px: int = 256
    batch_seed: str = "increment"

    @property
    def effective_guidance(self) -> GuidanceSettings:
        """The guidance the sampler really uses: DPM++ knows neither ramp nor restoration."""
        g = self.guidance
        if self.sampler != "restore_dpmpp_2m":
            return g
        return GuidanceSettings(g.cfg_start, g.cfg_end, g.control_end, g.control_end, -1.0)

    def notes(self) -> list[str]:
        """What is set but ignored, or does not fit together, in words."""
        g = self.guidance
        advice = hint(self.steps, self.sampler, max(g.cfg_start, g.cfg_end))
        notes = [advice] if advice else []
        if self.sampler != "restore_dpmpp_2m":
            return notes
        if g.uses_restore:
            notes.append(
                f"restore_dpmpp_2m ignores restore_cfg ({g.restore_cfg:g}), as the original does."
            )
        if g.control_start != g.control_end:
            notes.append(
                f"restore_dpmpp_2m uses control_end ({g.control_end:g}) throughout, as the original does."
            )
        return notes


def latent_ratio(latent: Any) -> int:
    """Return how many pixels one cell of a LATENT covers, as its VAE had it."""
    canvas = latent.get(WORK_KEY)
    if isinstance(canvas, Canvas):
        return max(1, round(canvas.padded_width_px / latent["samples"].shape[-1]))
    return DEFAULT_RATIO


def tile_cells(tile_px: int, overlap_px: int, latent: Any) -> tuple[int, int]:
    """Return (tile, overlap) in latent cells for the widgets' pixels; tile 0 = the whole latent.

    Raises: SettingsError naming the widget that cannot work.
    """
    ratio = latent_ratio(latent)
    height, width = latent["samples"].shape[-2:]
    if tile_px == -1:
        return 0, 0
    if tile_px == 0:
        tile_px = AUTO_TILE_PX
        if max(height, width) * ratio <= tile_px * 3 // 2:
            return 0, 0
        overlap_px = min(overlap_px, tile_px // 2)
    tile, overlap = tile_px // ratio, overlap_px // ratio
    if tile < 8:
        raise SettingsError(
            f"tile_px is {tile_px}, which is {tile} latent cells; the UNet needs at least 8 "
            f"({8 * ratio} px). Raise tile_px, or set 0 to let it be chosen."
        )
    if tile >= max(height, width):
        return 0, 0
    if overlap >= tile:
        raise SettingsError(
            f"tile_overlap_px is {overlap_px} and tile_px is {tile_px}, so tiles would not advance. "
            "Set tile_overlap_px below tile_px; half of it works well."
        )
    return tile, overlap


@dataclass(frozen=True)
class SampleRun:
    """One checked request: everything ``run`` needs, validated before a model moves."""

    model: Any
    supir: SupirModel
    positive: Any
    negative: Any
    control: Any
    center: Any
    settings: SampleSettings
    notes: list[str]
    tile: tuple[int, int]
    captions: str


def prepare_run(
    model: Any,
    supir: SupirModel,
    positive: Any,
    negative: Any,
    control: Any,
    center: Any,
    settings: SampleSettings,
) -> SampleRun:
    """Check a request. Raises: ModelError, ShapeError, SettingsError naming the input."""
    check_base(model)
    check_pair(model, supir.dims, supir.name)
    samples = read_latent(control, "control")
    channels = supir.dims.control.hint_channels
    if samples.shape[1] != channels:
        raise ShapeError(
            f"control has {samples.shape[1]} channels and SUPIR needs {channels}. Connect the "
            "control output of First Stage, made with the VAE of an SDXL checkpoint."
        )
    notes = settings.notes()
    if center is not None:
        size = read_latent(center, "center").shape
        if size[1:] != samples.shape[1:] or size[0] not in (1, samples.shape[0]):
            raise ShapeError(
                f"center is {tuple(size)} and control is {tuple(samples.shape)} (batch, channels, "
                "height, width). Connect both from the same First Stage node."
            )
    elif settings.effective_guidance.uses_restore:
        notes.append("center is not connected: restore_cfg pulls towards control instead.")
        center = control
    tile = tile_cells(settings.tile_px, settings.tile_overlap_px, control)
    probe = GuiderInputs(settings.guidance, samples[:1], None, *tile)
    count = len(probe.tiles())
    for name, conds in (("positive", positive), ("negative", negative)):
        check_conditioning(name, conds, count)
    captions = choose_captions(caption_count(positive), samples.shape[0], count)
    return SampleRun(
        model, supir, positive, negative, control, center, settings, notes, tile, captions
    )


def run_sample(run: SampleRun) -> torch.Tensor:
    """Restore every picture; picture k equals a single run with seed + k, bit for bit.

    Returns: [B, 4, h, w] unscaled latent on the intermediate device.
    """
    settings, model = run.settings, run.model
    samples = run.control["samples"]
    batch = samples.shape[0]
    levels = schedule(settings.sampler, settings.steps)
    sampler = make_sampler(settings.sampler, settings.s_churn, settings.s_noise, settings.eta)
    indices = run.control.get("batch_index") or list(range(batch))
    progress = BatchProgress(model, len(levels) - 1, batch)
    done: list[torch.Tensor] = []
    for k in range(batch):
        seed = image_seed(settings.seed, indices[k % len(indices)], settings.batch_seed)
        guider = _guider(run, k)
        mask, latent = _mask(run, k)
        noise = start_noise(tuple(samples[k : k + 1].shape), seed)
        out = guider.sample(
            noise,
            latent,
            sampler,
            levels,
            denoise_mask=mask,
            callback=progress.callback(k),
            disable_pbar=True,
            seed=seed,
        )
        done.append(_checked(out, k).to(mm.intermediate_device()))
    return torch.cat(done)


def _checked(out: torch.Tensor, k: int) -> torch.Tensor:
    if not bool(torch.isfinite(out).all()):
        raise ShapeError(
            f"Sampling picture {k} gave NaN or infinite values: the model overflowed in its dtype. "
            "Start ComfyUI with --fp32-unet or --bf16-unet, or lower control_start and cfg_start."
        )
    return out


def _guider(run: SampleRun, k: int) -> SupirGuider:
    scale = run.model.get_model_object("latent_format").process_in
    hint = scale(run.control["samples"][k : k + 1].float())
    center = None
    if run.center is not None:
        rows = run.center["samples"]
        center = scale(rows[k % rows.shape[0]][None].float())
    inputs = GuiderInputs(
        run.settings.effective_guidance,
        hint,
        center,
        *run.tile,
        captions_per_tile=run.captions in ("tile", "image_tile"),
    )
    guider = SupirGuider(run.model, run.supir, inputs)
    rows = {"image": 1, "image_tile": len(inputs.tiles())}.get(run.captions)
    positive = run.positive if rows is None else pick_rows(run.positive, k * rows, rows)
    guider.set_conds(positive, run.negative)
    return guider


def _mask(run: SampleRun, k: int) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return (noise mask, latent whose unmasked area is kept) of picture k; no mask keeps nothing."""
    samples = run.control["samples"][k : k + 1]
    mask = run.control.get("noise_mask")
    if mask is None:
        return None, torch.zeros_like(samples, dtype=torch.float32, device="cpu")
    kept = run.control if run.center is None else run.center
    rows = kept["samples"]
    if mask.ndim == 3:
        mask = mask[:, None]
    return mask[k % mask.shape[0]][None], rows[k % rows.shape[0]][None].float()


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
        )
        run = prepare_run(model, supir, positive, negative, control, center, settings)
        latent = run_sample(run)
        out = {k: v for k, v in control.items() if k != "noise_mask"}
        out["samples"] = latent
        tile, overlap = run.tile
        ratio = latent_ratio(control)
        tiles = f"tiles of {tile * ratio} px, overlap {overlap * ratio} px" if tile else "no tiles"
        text = "\n".join([f"{latent.shape[0]} picture(s), {steps} steps, {tiles}", *run.notes])
        return io.NodeOutput(out, ui=ui.PreviewText(text))
