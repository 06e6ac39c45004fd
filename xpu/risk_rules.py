"""The risk rules about plan and device: one rule, one pure function, one code.

A rule looks at a ``Case`` and returns a ``Risk`` or None. Except for size and memory, no rule says
anything about a device that is not an Intel GPU. No rule ever falls when the job grows or the gap
shrinks.
"""

from __future__ import annotations

from collections.abc import Callable

from .risk_types import Case, Risk, RiskSeverity, band, gib, own_severity

Rule = Callable[[Case], "Risk | None"]

MEGAPIXEL = 1_000_000

LAUNCH_BANDS = ((1_000_000, 3.0), (600_000, 2.0), (150_000, 1.0))
BUSY_BANDS_S = ((1200.0, 3.0), (360.0, 2.0), (120.0, 1.0))
VAE_TILE_PX = 1024
SIZE_WARN_PX, SIZE_WARN_PIXELS = 1792, 4 * MEGAPIXEL
SIZE_BLOCK_PX, SIZE_BLOCK_PIXELS = 2048, 5 * MEGAPIXEL
MAX_SCORES = 2**30
"""Bands and weights. Source: the jobs and thresholds of the first crash report (Arc Pro B70,
Windows driver 32.0.101.8629), see ``WARN_AT``."""


def rule_size(case: Case) -> Risk | None:
    """Refuse a result without pixels."""
    plan = case.plan
    if min(plan.output_width_px, plan.output_height_px) >= 1:
        return None
    return Risk(
        "SIZE_INVALID",
        "block",
        0.0,
        f"The result would be {plan.output_width_px} x {plan.output_height_px} px, which is no "
        "picture.",
        "Raise upscale_by.",
        "upscale_by",
    )


def rule_memory(case: Case) -> Risk | None:
    """Compare the live peak with the device's memory."""
    plan, facts = case.plan, case.facts
    if facts.total_bytes <= 0 or plan.live_peak_bytes <= 0:
        return None
    usable = facts.total_bytes * case.profile.memory_fraction
    need = plan.live_peak_bytes + plan.weight_bytes
    what = f"The run holds up to {gib(plan.live_peak_bytes)} besides {gib(plan.weight_bytes)} of "
    if plan.live_peak_bytes > usable:
        return Risk(
            "MEMORY_FIT",
            "block",
            0.0,
            f"{what}weights; the device has {gib(facts.total_bytes)}, of which {gib(usable)} can "
            "be planned for.",
            f"{_lower(case)}, or make a smaller picture: lower upscale_by, where it is enlarged.",
            "tile_px" if plan.steps else "workspace_mb",
        )
    if need > usable:
        return Risk(
            "MEMORY_FIT",
            "note",
            0.0,
            f"{what}weights; both do not fit into {gib(usable)}, so ComfyUI moves weights in and "
            "out during the run, which is slow.",
            f"{_lower(case)}, or use smaller weights.",
            "tile_px" if plan.steps else "workspace_mb",
        )
    return None


def _lower(case: Case) -> str:
    """Name the inputs that the planned node has and that make its run smaller."""
    samples = case.plan.steps > 0
    if samples and any(p.name != "sample" for p in case.plan.phases):
        return "Lower tile_px or workspace_mb"
    return "Lower tile_px" if samples else "Lower workspace_mb"


def rule_driver(case: Case) -> Risk | None:
    """Count what is known about family, system, driver and firmware."""
    profile = case.profile
    if not case.is_xpu or profile.unsupported or profile.base_points <= 0:
        return None
    return Risk(
        "XPU_DRIVER",
        own_severity(profile.base_points),
        profile.base_points,
        f"{case.facts.name or case.facts.family} with driver {case.facts.driver or 'unknown'}: "
        f"{profile.note} No job on it is without risk.",
        "Save your work, and install a newer driver when its notes name a fix.",
    )


def rule_unsupported(case: Case) -> Risk | None:
    """Count a device the backend was never validated on; only a passed preflight opens it."""
    if not (case.is_xpu and case.profile.unsupported):
        return None
    passed = case.settings.preflight in ("healthy", "degraded", "pending")
    severity: RiskSeverity = own_severity(case.profile.base_points) if passed else "block"
    return Risk(
        "XPU_UNSUPPORTED",
        severity,
        case.profile.base_points,
        f"{case.facts.name or case.facts.family} is older than what PyTorch's XPU backend supports"
        f"; preflight: {case.settings.preflight}. {case.profile.note}",
        "Run `python run.py doctor`; if it does not pass, start ComfyUI with --cpu.",
    )


def rule_unknown(case: Case) -> Risk | None:
    """Say that nothing is known about this device."""
    if not (case.is_xpu and case.profile.careful):
        return None
    return Risk(
        "XPU_UNKNOWN",
        "note",
        0.0,
        f"Nothing is known about {case.facts.name or 'this device'} (family "
        f"{case.facts.family}, {case.facts.os or 'unknown system'}, driver "
        f"{case.facts.driver or 'unknown'}); the careful profile judges it.",
        "Run `python run.py doctor` to replace guesses by measurements.",
    )


def rule_preflight(case: Case) -> Risk | None:
    """Refuse a device that failed its health battery."""
    if not case.is_xpu or case.settings.preflight != "retreat":
        return None
    reason = case.settings.preflight_reason
    return Risk(
        "XPU_PREFLIGHT",
        "block",
        0.0,
        f"The health battery found {case.facts.name or 'the device'} unusable on driver "
        f"{case.facts.driver or 'unknown'}{f': {reason}' if reason else '.'}",
        case.settings.preflight_action
        or "Read the Preflight report; update the driver, or start ComfyUI with --cpu.",
    )


def rule_launches(case: Case) -> Risk | None:
    """Count planned launches."""
    points = band(case.size.launches, LAUNCH_BANDS)
    if not case.is_xpu or points == 0:
        return None
    return Risk(
        "XPU_LAUNCHES",
        own_severity(points),
        points,
        f"The run launches {case.size.launches} kernels; every one ends in an interrupt, where "
        "the reported crashes happened.",
        "Use fused attention (risk = auto chooses it), lower steps, or raise tile_px.",
        "steps",
    )


def rule_busy_time(case: Case) -> Risk | None:
    """Count predicted busy time, capped so that launches and time alone do not block.

    The cap is the profile's: it is absent where machines are known to have died.
    """
    points = band(case.size.seconds, BUSY_BANDS_S)
    points = min(
        points, max(0.0, case.profile.sustained_cap - band(case.size.launches, LAUNCH_BANDS))
    )
    if not case.is_xpu or points == 0:
        return None
    return Risk(
        "XPU_BUSY_TIME",
        own_severity(points),
        points,
        f"The device would be busy for about {case.size.seconds:.0f} s without a break.",
        "Lower upscale_by or steps, or process fewer images at once.",
        "steps",
    )


def rule_vae_tile(case: Case) -> Risk | None:
    """Count large overlapped VAE tiles and whole VAE passes."""
    plan = case.plan
    whole = plan.vae_untiled and plan.output_pixels > MEGAPIXEL
    if not case.is_xpu or not (plan.vae_tile_px >= VAE_TILE_PX or whole):
        return None
    how = "in one piece" if whole else f"in tiles of {plan.vae_tile_px} px"
    return Risk(
        "XPU_VAE_TILE",
        "note",
        2.0,
        f"The VAE would run {how} on {plan.output_width_px} x {plan.output_height_px} px; tiles of "
        f"{VAE_TILE_PX} px took a machine down at 1.8 Mpix.",
        "Use this pack's Encode and Decode with workspace_mb = 0, or VAE tiles of 512 px.",
        "workspace_mb",
    )


def rule_output_size(case: Case) -> Risk | None:
    """Apply the first report's own size gate to the kind of run it was made for."""
    plan = case.plan
    looped = plan.attention_policy in ("chunk_loop", "unknown")
    if not (case.is_xpu and case.profile.known_bad and looped and plan.tiles <= 1):
        return None
    side, pixels = plan.longest_side_px, plan.output_pixels
    if side > SIZE_BLOCK_PX or pixels > SIZE_BLOCK_PIXELS:
        severity: RiskSeverity = "block"
    elif side >= SIZE_WARN_PX or pixels >= SIZE_WARN_PIXELS:
        severity = "warn"
    else:
        return None
    return Risk(
        "XPU_OUTPUT_SIZE",
        severity,
        0.0,
        f"{plan.output_width_px} x {plan.output_height_px} px ({pixels / MEGAPIXEL:.1f} Mpix), "
        f"untiled, with attention in a loop ({plan.attention_policy}): runs from {SIZE_WARN_PX} px "
        f"or 4 Mpix were unstable on this driver, above {SIZE_BLOCK_PX} px or 5 Mpix they crashed.",
        "Set tile_px to 1024, or risk to auto.",
        "tile_px",
    )


def rule_scores(case: Case) -> Risk | None:
    """Refuse attention score blocks that hang the device."""
    plan = case.plan
    fused = plan.attention_policy in ("fused", "fused_pieces", "cpu")
    if not case.is_xpu or fused or plan.max_score_elements <= MAX_SCORES:
        return None
    return Risk(
        "XPU_SCORES",
        "block",
        0.0,
        f"One attention call would hold {plan.max_score_elements} float32 scores; more than "
        f"{MAX_SCORES} (2^30) at once hang the device.",
        "Set tile_px to 1024 or less, or risk to auto.",
        "tile_px",
    )


def rule_alloc_limit(case: Case) -> Risk | None:
    """Compare the largest tensor with the single-allocation limit."""
    plan, profile = case.plan, case.profile
    reported = case.facts.max_alloc_bytes
    limit = min(x for x in (profile.alloc_limit_bytes, reported or profile.alloc_limit_bytes))
    if not case.is_xpu or plan.largest_tensor_bytes < limit:
        return None
    hard = profile.alloc_blocks or limit < profile.alloc_limit_bytes
    return Risk(
        "XPU_ALLOC_LIMIT",
        "block" if hard else "warn",
        0.0,
        f"The largest tensor has {gib(plan.largest_tensor_bytes)}; "
        + (
            f"{case.facts.family} devices cannot allocate {gib(limit)} in one piece."
            if hard
            else f"tensors of {gib(limit)} or more have given wrong results on Intel GPUs."
        ),
        "Lower tile_px, or set workspace_mb to 0 so that the VAE runs in stripes.",
        "workspace_mb" if plan.vae_untiled else "tile_px",
    )


STATIC_RULES: tuple[Rule, ...] = (
    rule_size,
    rule_memory,
    rule_driver,
    rule_unsupported,
    rule_unknown,
    rule_preflight,
    rule_launches,
    rule_busy_time,
    rule_vae_tile,
    rule_output_size,
    rule_scores,
    rule_alloc_limit,
)
