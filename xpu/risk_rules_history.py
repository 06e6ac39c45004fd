"""The risk rules about time and memory: gaps between jobs, and what the journal remembers.

One rule, one pure function, one code, as in ``risk_rules.py``. Silent on other devices.
"""

from __future__ import annotations

from .history import JobSize
from .risk_rules import Rule
from .risk_types import HEAVY_SECONDS, Case, Risk, RiskSeverity, own_severity

GAP_POINTS, HEAVY_GAP_POINTS = 3.0, 1.0
SETTLE_POINTS = 3.0
LOAD_POINTS = 1.0
CRASH_POINTS = 2.0
"""Weights. Source: the first crash report (second runs within 5 s died, 8 s between runs and 6 s
after each heavy image helped, first runs after a reload faulted more often); see ``WARN_AT``."""

CRASHED_FRACTION = 0.5
"""Part of a crashed job's launches and seconds from which a job counts as the same again (our
choice: nothing is known about what lies between a clean job and a crashed one)."""

PROCESS_POINTS_CAP = 2.0
"""Most points for processes that ended early: closing a console is normal (our choice)."""


def rule_gap(case: Case) -> Risk | None:
    """Count a start too soon after the last job on the device."""
    profile, history, waits = case.profile, case.history, case.settings.waits
    if not case.is_xpu or profile.gap_s <= 0:
        return None
    if history.busy:
        return Risk(
            "XPU_GAP",
            own_severity(GAP_POINTS),
            GAP_POINTS,
            "Another process works on this device now, so there is no pause between the two jobs.",
            "Let the other job end first.",
        )
    if history.last_end is None:
        return None
    gap = max(0.0, case.now - history.last_end) + waits.before_s
    quiet = gap + (waits.after_load_s if case.settings.loads_model else 0.0)
    if gap < profile.gap_s:
        points, needed = GAP_POINTS, profile.gap_s
    elif history.last_heavy and quiet < profile.heavy_gap_s:
        points, needed, gap = HEAVY_GAP_POINTS, profile.heavy_gap_s, quiet
    else:
        return None
    kind = "heavy job" if history.last_heavy else "job"
    return Risk(
        "XPU_GAP",
        own_severity(points),
        points,
        f"The device would get {gap:.0f} s of rest after the last {kind}; second runs within a few "
        f"seconds crashed on this driver, and {needed:.0f} s are planned for.",
        f"Wait {needed - gap:.0f} s more (risk = auto waits by itself, or use the Cooldown node).",
        "risk",
    )


def rule_batch_settle(case: Case) -> Risk | None:
    """Count heavy images that follow each other without a pause."""
    plan, needed = case.plan, case.profile.image_settle_s
    each = case.size.seconds / max(1, plan.images)
    heavy = plan.is_large or each >= HEAVY_SECONDS
    settled = case.settings.waits.per_image_s >= needed
    if not case.is_xpu or plan.images < 2 or not heavy or settled:
        return None
    return Risk(
        "XPU_BATCH_SETTLE",
        own_severity(SETTLE_POINTS),
        SETTLE_POINTS,
        f"{plan.images} images of {plan.output_width_px} x {plan.output_height_px} px would run one "
        f"after the other with {case.settings.waits.per_image_s:.0f} s between them; batches "
        f"without {needed:.0f} s of rest crashed on this driver.",
        "Set risk to auto, which waits between images, or process one image at a time.",
        "risk",
    )


def rule_fresh_load(case: Case) -> Risk | None:
    """Count weights that have only just reached the device."""
    settings, needed = case.settings, case.profile.load_settle_s
    if settings.loads_model:
        age = settings.waits.after_load_s
    elif settings.loaded_at is not None:
        age = max(0.0, case.now - settings.loaded_at) + settings.waits.before_s
    else:
        return None
    if not case.is_xpu or age >= needed:
        return None
    return Risk(
        "XPU_FRESH_LOAD",
        own_severity(LOAD_POINTS),
        LOAD_POINTS,
        f"The first step would start {age:.0f} s after the weights reached the device; "
        f"{needed:.0f} s are planned for on this driver.",
        "Set risk to auto, which waits after loading.",
        "risk",
    )


def rule_crashed_before(case: Case) -> Risk | None:
    """Compare the job with those that took the machine down under the same attention policy."""
    policy, size = case.plan.attention_policy, case.size
    worst = None
    for crash in case.history.crashes:
        same = "unknown" in (policy, crash.policy) or policy == crash.policy
        half = CRASHED_FRACTION
        near = (
            size.launches >= half * crash.size.launches
            and size.seconds >= half * crash.size.seconds
        )
        weight = crash.weight(case.history.driver)
        if not (crash.kind == "machine" and same and near and weight > 0):
            continue
        if worst is None or weight > worst[0]:
            worst = (weight, crash)
    if not case.is_xpu or worst is None:
        return None
    weight, crash = worst
    severity: RiskSeverity = "block" if weight >= 1 else "warn" if weight >= 0.5 else "note"
    return Risk(
        "XPU_CRASHED_BEFORE",
        severity,
        0.0,
        f"A job of {_size_text(crash.size)} with attention "
        f"'{crash.policy}' on driver {crash.driver} took this machine down during "
        f"'{crash.phase}'; this one has {size.launches} launches and {size.seconds:.0f} s.",
        "Stay below half of that with upscale_by, tile_px or steps, or set risk to warn."
        if crash.size.launches > 0 or crash.size.seconds > 0
        else "Set risk to warn; three runs that end well lower this.",
        "upscale_by",
    )


def _size_text(size: JobSize) -> str:
    launches = str(size.launches) if size.launches > 0 else "an unknown number of"
    seconds = f"{size.seconds:.0f}" if size.seconds > 0 else "an unknown number of"
    return f"{launches} launches and {seconds} s"


def rule_crashes(case: Case) -> Risk | None:
    """Count the machine's crashes on this device."""
    machine, _ = case.history.crash_weights()
    points = CRASH_POINTS * machine
    if not case.is_xpu or points <= 0:
        return None
    count = len({c.event for c in case.history.crashes if c.kind == "machine"})
    return Risk(
        "XPU_CRASHES",
        own_severity(points),
        points,
        f"This machine went down {count} time(s) with this device at work, counted as "
        f"{machine:g} after clean runs and driver changes.",
        "Update the driver; three clean runs of at least the crashed size halve the count.",
    )


def rule_ended_before(case: Case) -> Risk | None:
    """Count processes that ended with the device at work."""
    _, process = case.history.crash_weights()
    points = min(PROCESS_POINTS_CAP, CRASH_POINTS * process)
    if not case.is_xpu or points <= 0:
        return None
    return Risk(
        "XPU_ENDED_BEFORE",
        "note",
        points,
        f"ComfyUI ended {sum(c.kind == 'process' for c in case.history.crashes)} time(s) while "
        "this device was at work; it may have been closed by hand.",
        "If it was not, read ComfyUI's log of that run and update the driver.",
    )


def rule_new_size(case: Case) -> Risk | None:
    """Say that no job this large has ended well yet."""
    mode, policy = case.settings.novelty, case.plan.attention_policy
    if not case.is_xpu or mode == "off" or case.history.is_proven(policy, case.size):
        return None
    best = case.history.max_clean(policy)
    known = f"{best.launches} launches and {best.seconds:.0f} s" if best else "none"
    return Risk(
        "XPU_NEW_SIZE",
        "note",
        1.0 if mode == "score" else 0.0,
        f"No job of {case.size.launches} launches and {case.size.seconds:.0f} s with attention "
        f"'{policy}' has ended on this device and driver yet (largest so far: {known}).",
        "Save your work before the first job of a new size.",
    )


HISTORY_RULES: tuple[Rule, ...] = (
    rule_gap,
    rule_batch_settle,
    rule_fresh_load,
    rule_crashed_before,
    rule_crashes,
    rule_ended_before,
    rule_new_size,
)
