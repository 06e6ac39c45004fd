"""What a sampling run is asked to do: the widgets, the tiles, and the plan that is judged."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..supir.constants import WORK_KEY
from ..supir.errors import SettingsError
from ..supir.guidance import GuidanceSettings
from ..supir.plan import Networks, RunRequest
from ..supir.presets import hint
from .guarded_run import Judged
from .machine import machine
from .planning import layout_of_ratio, plan_cached
from .types import Canvas

DEFAULT_RATIO = 8
"""Pixels per latent cell of a LATENT that does not say where it comes from (SDXL's VAE)."""


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
    risk: str = "auto"

    @property
    def effective_guidance(self) -> GuidanceSettings:
        """The guidance the sampler really uses: DPM++ knows neither ramp nor restoration."""
        g = self.guidance
        if self.sampler != "restore_dpmpp_2m":
            return g
        return g.unsteered()

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
    return canvas.ratio if isinstance(canvas, Canvas) else DEFAULT_RATIO


def tile_cells(
    tile_px: int, overlap_px: int, latent: Any, networks: Networks | None = None
) -> tuple[int, int]:
    """Return (tile, overlap) in latent cells for the widgets' pixels; tile 0 = the whole latent.

    Args: networks: what runs, for tile_px 0, which chooses by the memory that is free now.
    Raises: SettingsError naming the widget that cannot work.
    """
    ratio = latent_ratio(latent)
    height, width = latent["samples"].shape[-2:]
    if tile_px == -1:
        return 0, 0
    if tile_px == 0:
        networks = networks or Networks(vae=layout_of_ratio(ratio))
        size = RunRequest(
            width * ratio,
            height * ratio,
            tile_overlap_px=overlap_px,
            stages=(),
            latent_h=height,
            latent_w=width,
        )
        plan = plan_cached(size, networks, machine().now())
        return plan.tile_px // ratio, plan.overlap_px // ratio
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
            "Set tile_overlap_px below tile_px; a quarter to a half of it works well."
        )
    return tile, overlap


def sampling_request(
    positive: Any, negative: Any, control: Any, settings: SampleSettings, tile: tuple[int, int]
) -> RunRequest:
    """Return what the planner is asked for a sampling run on a LATENT.

    Args: tile: (tile, overlap) in latent cells, tile 0 = untiled.
    """
    ratio = latent_ratio(control)
    batch, _, height, width = control["samples"].shape
    canvas = control.get(WORK_KEY)
    # A latent that was resized since belongs to a picture of its own size.
    known = isinstance(canvas, Canvas) and canvas.padded_width_px == width * ratio
    return RunRequest(
        width_px=canvas.width_px if known else width * ratio,
        height_px=canvas.height_px if known else height * ratio,
        latent_h=height,
        latent_w=width,
        images=batch,
        steps=settings.steps,
        sampler=settings.sampler,
        guidance=settings.effective_guidance,
        s_churn=settings.s_churn,
        eta=settings.eta,
        tile_px=tile[0] * ratio or -1,
        tile_overlap_px=tile[1] * ratio,
        tokens=max((cond.shape[1] for cond, _ in positive), default=77),
        negative_tokens=max((cond.shape[1] for cond, _ in negative), default=77),
        stages=("sample",),
    )


def chosen_tile(judged: Judged, tile: tuple[int, int], ratio: int) -> tuple[int, int]:
    """Return (tile, overlap) in cells as the judged plan has them."""
    cells = judged.result.settings.tile_px // ratio
    return tile if cells == tile[0] else (cells, cells // 4)
