"""What a risk judgement is made of: planned numbers, waits, settings, risks, a verdict.

Plain data only. The model layer fills ``PlanNumbers``; ``risk_rules.py`` reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from .device_profiles import Profile
from .history import History, JobSize

RiskSeverity = Literal["note", "warn", "block"]
Severity = Literal["ok", "warn", "block"]
RiskMode = Literal["auto", "block", "warn", "off"]
Policy = Literal["fused", "fused_pieces", "math", "chunk_loop", "cpu", "unknown"]
Preflight = Literal["unknown", "pending", "healthy", "degraded", "retreat"]
NoveltyMode = Literal["off", "note", "score"]

WARN_AT = 3.0
BLOCK_AT = 6.0
"""ok < 3 <= warn < 6 <= block, in points. Source: fitted by hand to the eight jobs of the first
crash report (Arc Pro B70, Windows driver 32.0.101.8629); a prior, not a measurement."""

HEAVY_SIDE_PX = 1792
HEAVY_PIXELS = 4_000_000
"""Output from which the first crash report let the device settle after each image."""

HEAVY_SECONDS = 60.0
"""Busy time from which a job counts as heavy at any size (our choice: the reported second runs
died within a minute)."""


@dataclass(frozen=True)
class PhaseNumbers:
    """One phase of a plan: launches, floating-point operations, bytes moved."""

    name: str
    launches: int = 0
    flops: float = 0.0
    bytes_moved: float = 0.0


@dataclass(frozen=True)
class PlanNumbers:
    """What one run will ask of the device, before it starts.

    Args:
        output_width_px, output_height_px: size of one result image.
        latent_h, latent_w: its latent size.
        tile_px, tiles: sampling tile edge (0 = untiled) and tiles per image.
        steps, images: sampling steps per image, and images one after the other.
        launches_per_step: launches of one step over all tiles; launches_total: of the whole run.
        attention_policy: how attention is carried out; ``unknown`` is judged as ``chunk_loop``.
        max_score_elements: most attention scores held at once in float32 (0 when fused).
        largest_tensor_bytes: largest single tensor.
        live_peak_bytes: most bytes alive at once, weights excluded; weight_bytes: the weights.
        flops_total, bytes_moved_total: arithmetic and memory traffic of the whole run.
        vae_tile_px: edge of an overlapped VAE tile, 0 when striped (exact) or untiled.
        vae_untiled: the VAE runs on the whole picture at once.
        phases: the same numbers per phase; may be empty.
    """

    output_width_px: int
    output_height_px: int
    latent_h: int = 0
    latent_w: int = 0
    tile_px: int = 0
    tiles: int = 1
    steps: int = 0
    images: int = 1
    launches_per_step: int = 0
    launches_total: int = 0
    attention_policy: Policy = "unknown"
    max_score_elements: int = 0
    largest_tensor_bytes: int = 0
    live_peak_bytes: int = 0
    weight_bytes: int = 0
    flops_total: float = 0.0
    bytes_moved_total: float = 0.0
    vae_tile_px: int = 0
    vae_untiled: bool = False
    phases: tuple[PhaseNumbers, ...] = ()

    @property
    def output_pixels(self) -> int:
        """Return the pixels of one result image."""
        return self.output_width_px * self.output_height_px

    @property
    def longest_side_px(self) -> int:
        """Return the longer side of one result image."""
        return max(self.output_width_px, self.output_height_px)

    @property
    def is_large(self) -> bool:
        """Tell whether the result reaches the size after which the report let the device settle."""
        return self.longest_side_px >= HEAVY_SIDE_PX or self.output_pixels >= HEAVY_PIXELS


class FactsLike(Protocol):
    """The device numbers the rules read; ``DeviceFacts`` fits. 0 and empty text mean unknown."""

    @property
    def kind(self) -> str: ...
    @property
    def family(self) -> str: ...
    @property
    def os(self) -> str: ...
    @property
    def driver(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def total_bytes(self) -> int: ...
    @property
    def free_bytes(self) -> int: ...
    @property
    def max_alloc_bytes(self) -> int: ...
    @property
    def bw_bytes_per_s(self) -> float: ...
    @property
    def flops_per_s(self) -> float: ...
    @property
    def launch_s(self) -> float: ...
    @property
    def sync_s(self) -> float: ...


@dataclass(frozen=True)
class Waits:
    """Idle time planned into a run, in seconds.

    before_s: before the run touches the device. after_load_s: between loading the weights and the
    first step. per_image_s: after each image of a batch but the last.
    """

    before_s: float = 0.0
    after_load_s: float = 0.0
    per_image_s: float = 0.0

    def total_s(self, images: int) -> float:
        """Return the idle seconds of a run over ``images`` images."""
        return self.before_s + self.after_load_s + self.per_image_s * max(0, images - 1)


@dataclass(frozen=True)
class JudgeSettings:
    """What the judge must know besides plan, device and history.

    Args:
        waits: idle time already planned.
        loads_model: weights move to the device in this run.
        loaded_at: when they last did, seconds since 1970; None if long ago or not known.
        preflight: what the health battery said about this device; ``pending`` if it will be asked
            before the run starts. preflight_reason, preflight_action: the same in sentences.
        novelty: ``off``, ``note`` (said, no point) or ``score`` (one point).
    """

    waits: Waits = Waits()
    loads_model: bool = False
    loaded_at: float | None = None
    preflight: Preflight = "unknown"
    preflight_reason: str = ""
    preflight_action: str = ""
    novelty: NoveltyMode = "note"


@dataclass(frozen=True)
class Risk:
    """One reason for care. ``input`` names the node input that changes it, or is empty."""

    code: str
    severity: RiskSeverity
    points: float
    message: str
    action: str
    input: str = ""


@dataclass(frozen=True)
class Verdict:
    """The judgement of one plan. ``size`` is what the journal compares it with."""

    score: float
    severity: Severity
    risks: tuple[Risk, ...] = ()
    size: JobSize = field(default=JobSize(0, 0.0))
    heavy: bool = False


@dataclass(frozen=True)
class Case:
    """All a rule may look at."""

    plan: PlanNumbers
    facts: FactsLike
    profile: Profile
    history: History
    now: float
    settings: JudgeSettings
    size: JobSize

    @property
    def is_xpu(self) -> bool:
        """Tell whether the run works on an Intel GPU."""
        return self.facts.kind == "xpu"

    @property
    def is_heavy(self) -> bool:
        """Tell whether the next job must leave the longer gap after this one."""
        return self.plan.is_large or self.size.seconds >= HEAVY_SECONDS


def severity_of(score: float) -> Severity:
    """Return the severity of a score in points."""
    if score >= BLOCK_AT:
        return "block"
    return "warn" if score >= WARN_AT else "ok"


def own_severity(points: float) -> RiskSeverity:
    """Return the severity of a risk that has nothing but its points."""
    severity = severity_of(points)
    return "note" if severity == "ok" else severity


def band(value: float, bands: Sequence[tuple[float, float]]) -> float:
    """Return the points of the first (threshold, points) that ``value`` reaches, else 0."""
    return next((points for threshold, points in bands if value >= threshold), 0.0)


def gib(count: float) -> str:
    """Return a byte count as text."""
    return f"{count / 1024**3:.2f} GiB"


def predicted_seconds(
    plan: PlanNumbers, bw: float, flops: float, per_launch_s: float = 0.0
) -> float:
    """Return the busy seconds of a plan on a device of given sustained rates.

    Args:
        bw: bytes per second. flops: operations per second. per_launch_s: seconds between two
            launches, at least. 0 leaves that limit out.
    Each phase takes the longest of its memory time, its arithmetic time and the time its launches
    take to submit. Never falls when a number of the plan grows. Source: roofline model (Williams
    et al. 2009), the launches added by us.
    """

    def longest(moved: float, work: float, launches: int) -> float:
        memory, arithmetic = moved / bw if bw > 0 else 0.0, work / flops if flops > 0 else 0.0
        return max(memory, arithmetic, launches * per_launch_s)

    phases = sum(longest(p.bytes_moved, p.flops, p.launches) for p in plan.phases)
    total = longest(plan.bytes_moved_total, plan.flops_total, plan.launches_total)
    return max(phases, total)
