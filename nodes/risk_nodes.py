"""RiskCheck and Cooldown: look at the risk of a run, and let the device rest, anywhere in a graph.

Both pass on what comes in. The waiting that must happen is in the compute nodes themselves.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from comfy_api.latest import io

from ..supir.constants import WORK_KEY
from ..supir.errors import ShapeError
from ..xpu.auto_plan import needed_waits
from ..xpu.risk import JudgeSettings, enforce
from . import host, widgets
from .graph_jobs import Job, whole_run
from .graph_judging import judge_job
from .graph_networks import known_networks
from .journal import open_journal
from .machine import machine
from .picture_file import ImageSize
from .sample_request import DEFAULT_RATIO, SampleSettings
from .types import CATEGORY, Canvas

UNCHANGED = "unchanged"
"""Fingerprint of nodes that only look: they never make anything behind them run again."""

MAX_SECONDS = 3600.0


def size_of(*candidates: Any) -> ImageSize | None:
    """Return the picture size of the first IMAGE or LATENT among these, or None."""
    for value in candidates:
        shape = getattr(value, "shape", None)
        if shape is not None and len(shape) == 4:
            return ImageSize(int(shape[2]), int(shape[1]), int(shape[0]))
        samples = value.get("samples") if isinstance(value, dict) else None
        cells = getattr(samples, "shape", ())
        if len(cells) == 4:
            canvas = value.get(WORK_KEY)
            width, height = int(cells[3]) * DEFAULT_RATIO, int(cells[2]) * DEFAULT_RATIO
            if isinstance(canvas, Canvas):
                width, height = canvas.width_px, canvas.height_px
            return ImageSize(width, height, int(cells[0]))
    return None


def check_risk(size: ImageSize, upscale_by: float, settings: SampleSettings) -> str:
    """Return the judgement of the whole run on pictures of a size, in words.

    Raises: RiskBlockedError when the risk setting says so; SettingsError, ShapeError.
    """
    networks = known_networks(demo=False)
    request = whole_run(size, upscale_by, settings, networks, DEFAULT_RATIO)
    job = Job(request, networks, settings.risk, may_tile=True, loads_model=True)
    judged = judge_job(job, machine())
    enforce(judged.result.verdict, settings.risk)  # pyright: ignore[reportArgumentType]
    plan, seconds = judged.result.plan, judged.result.verdict.size.seconds
    tiles = f"{plan.tiles} tiles of {plan.tile_px} px" if plan.tiles > 1 else "one piece"
    head = (
        f"{plan.images} picture(s) of {plan.output_width_px}x{plan.output_height_px} px in {tiles}, "
        f"{plan.steps} steps: {plan.launches_total} launches, {seconds:.0f} s predicted with SDXL "
        f"and SUPIR, {plan.live_peak_bytes / 1024**3:.1f} GiB beside the weights."
    )
    verdict = judged.text or "No risk found."
    return "\n".join([head, verdict])


class RiskCheck(io.ComfyNode):
    """Judge a whole run before it starts."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        template = io.MatchType.Template("anything")
        return io.Schema(
            node_id="SUPIR_XPU_RiskCheck",
            display_name="SUPIR Risk Check",
            category=CATEGORY,
            description=(
                "Says what a SUPIR run on a picture of this size would cost and whether this device "
                "is likely to survive it. Passes through what comes in; loads and runs nothing."
            ),
            search_aliases=["supir", "risk", "plan", "crash"],
            inputs=[
                io.MatchType.Input(
                    "anything",
                    template=template,
                    tooltip="Passed through unchanged. An image or latent here gives the size.",
                ),
                io.Image.Input(
                    "image",
                    optional=True,
                    tooltip="Picture whose size is judged, before upscaling.",
                ),
                io.Latent.Input(
                    "latent",
                    optional=True,
                    tooltip="Latent whose picture size is judged, if no image is connected.",
                ),
                widgets.upscale_by(),
                widgets.steps(),
                *widgets.sampler(),
                *widgets.tiles(),
                widgets.risk(),
            ],
            outputs=[
                io.MatchType.Output(template=template, display_name="anything"),
                io.String.Output("report", display_name="report"),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, **_: Any) -> str:
        return UNCHANGED

    @classmethod
    def validate_inputs(cls, tile_px: Any = None) -> bool | str:
        return widgets.check_tile_px(tile_px)

    @classmethod
    def execute(
        cls,
        anything: Any,
        upscale_by: float,
        steps: int,
        sampler: str,
        tile_px: int,
        tile_overlap_px: int,
        risk: str = "auto",
        image: Any = None,
        latent: Any = None,
    ) -> io.NodeOutput:
        size = size_of(image, latent, anything)
        if size is None:
            raise ShapeError(
                "Neither image nor latent is connected, and what passes through is neither, so there "
                "is no size to judge. Connect a picture to image or a latent to latent."
            )
        settings = replace(
            SampleSettings(risk=risk),
            steps=steps,
            sampler=sampler,
            tile_px=tile_px,
            tile_overlap_px=tile_overlap_px,
        )
        report = check_risk(size, upscale_by, settings)
        return io.NodeOutput(anything, report, ui={"text": (report,)})


def wanted_rest() -> float:
    """Return the seconds the device still wants to rest before the next run."""
    device = machine()
    facts = device.now()
    if not facts.is_xpu:
        return 0.0
    history = open_journal().history(facts.name, facts.driver)
    return needed_waits(device.profile, history, time.time(), JudgeSettings()).before_s


class Cooldown(io.ComfyNode):
    """Let the device rest."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        template = io.MatchType.Template("anything")
        return io.Schema(
            node_id="SUPIR_XPU_Cooldown",
            display_name="XPU Cooldown",
            category=CATEGORY,
            description=(
                "Waits, then passes on what came in. The SUPIR nodes wait by themselves where it is "
                "needed; this is for the work of other nodes."
            ),
            search_aliases=["supir", "wait", "pause", "sleep", "cool down"],
            inputs=[
                io.MatchType.Input(
                    "anything", template=template, tooltip="Passed through after the wait."
                ),
                io.Float.Input(
                    "seconds",
                    default=0.0,
                    min=0.0,
                    max=MAX_SECONDS,
                    step=0.5,
                    tooltip=(
                        "How long to wait. 0 waits what is left of the rest this device needs after "
                        "its last run, which is nothing on most devices."
                    ),
                ),
            ],
            outputs=[
                io.MatchType.Output(template=template, display_name="anything"),
                io.String.Output("report", display_name="report"),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, **_: Any) -> str:
        return UNCHANGED

    @classmethod
    def execute(cls, anything: Any, seconds: float) -> io.NodeOutput:
        asked = seconds > 0
        wait_s = seconds if asked else wanted_rest()
        host.wait(wait_s, "cool-down")
        why = "as asked" if asked else "what this device needs after its last run"
        report = f"Waited {wait_s:.1f} s: {why}." if wait_s > 0 else "No rest needed: not waited."
        return io.NodeOutput(anything, report, ui={"text": (report,)})
