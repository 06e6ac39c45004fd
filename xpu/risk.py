"""Judge a plan before it runs.

Owns the verdict: all rules applied, points added, one severity. The rules themselves are in
``risk_rules.py``, the data in ``risk_types.py``; both are re-exported here. Pure: same numbers,
same verdict. Every code is documented in ``CODES``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .device_profiles import Profile
from .errors import RiskBlockedError
from .governor import WINDOW_LAUNCHES
from .history import History, JobSize
from .risk_rules import STATIC_RULES
from .risk_rules_history import HISTORY_RULES
from .risk_types import BLOCK_AT as BLOCK_AT
from .risk_types import WARN_AT as WARN_AT
from .risk_types import Case, FactsLike, JudgeSettings, PlanNumbers, Severity, Verdict, Waits
from .risk_types import PhaseNumbers as PhaseNumbers
from .risk_types import Policy as Policy
from .risk_types import Risk as Risk
from .risk_types import RiskMode as RiskMode
from .risk_types import predicted_seconds as predicted_seconds
from .risk_types import severity_of as severity_of

CODES: dict[str, str] = {
    "SIZE_INVALID": "a side of the result is below one pixel; any device; blocks",
    "MEMORY_FIT": "the plan does not fit into device memory; any device; blocks, or notes pressure",
    "XPU_DRIVER": "this family has died, or was never tested, on this driver or firmware; 0-1 point",
    "XPU_UNSUPPORTED": "older than what PyTorch's XPU backend supports; 4 points; preflight decides",
    "XPU_UNKNOWN": "a device or driver nothing is known about: judged by the careful profile; note",
    "XPU_PREFLIGHT": "the health battery said that this device must not be used; blocks",
    "XPU_LAUNCHES": "planned launches; 1 from 150 000, 2 from 600 000, 3 from 1 000 000",
    "XPU_BUSY_TIME": "predicted busy time; 1 from 2 min, 2 from 6 min, 3 from 20 min",
    "XPU_VAE_TILE": "VAE tile of 1024 px or more, or a whole VAE pass above 1 Mpix; 2 points",
    "XPU_OUTPUT_SIZE": "untiled chunk-looped run: warns from 1792 px or 4 Mpix, blocks above 2048 px or 5 Mpix",
    "XPU_SCORES": "more than 2^30 float32 attention scores at once hang the device; blocks",
    "XPU_ALLOC_LIMIT": "one tensor of 4 GiB or more; blocks on Alchemist, warns elsewhere",
    "XPU_GAP": "too soon after the last job: 3 points; after a heavy one within 30 s: 1 point",
    "XPU_BATCH_SETTLE": "heavy images of a batch without a pause between them; 3 points",
    "XPU_FRESH_LOAD": "the weights reached the device less than 30 s before the first step; 1 point",
    "XPU_CRASHED_BEFORE": "a job of at least half this size took the machine down; blocks or warns",
    "XPU_CRASHES": "each crash on this device: 2 points, halved by clean runs and driver changes",
    "XPU_ENDED_BEFORE": "processes that ended with the device at work: half a crash each, at most 2",
    "XPU_NEW_SIZE": "no job this large has ended well yet on this device, driver and policy; note",
}
"""Every code, what it means, and its weight. Stable: saved workflows and reports name them."""

RULES = (*STATIC_RULES, *HISTORY_RULES)

JudgeFn = Callable[[PlanNumbers, Waits], Verdict]

RANK: dict[str, int] = {"ok": 0, "note": 0, "warn": 1, "block": 2}


def judge(
    plan: PlanNumbers,
    facts: FactsLike,
    profile: Profile,
    history: History,
    now: float,
    settings: JudgeSettings,
) -> Verdict:
    """Apply every rule to one plan.

    Args:
        now: seconds since 1970, on the journal's clock.
    The severity is the higher of what the summed points say and of the severest single risk.
    More pixels, steps, launches or a smaller gap never lower the score.
    """
    bw, flops = rates(facts, profile)
    per_launch = launch_seconds(facts, profile)
    size = JobSize(plan.launches_total, predicted_seconds(plan, bw, flops, per_launch))
    case = Case(plan, facts, profile, history, now, settings, size)
    risks = tuple(r for r in (rule(case) for rule in RULES) if r is not None)
    score = sum(r.points for r in risks)
    severity: Severity = severity_of(score)
    for risk in risks:
        if risk.severity != "note" and RANK[risk.severity] > RANK[severity]:
            severity = risk.severity
    ordered = sorted(risks, key=lambda r: (-RANK[r.severity], -r.points))
    return Verdict(score, severity, tuple(ordered), size, case.is_heavy)


def make_judge(
    facts: FactsLike, profile: Profile, history: History, now: float, settings: JudgeSettings
) -> JudgeFn:
    """Return ``judge`` with everything fixed but the plan and its waits."""

    def judge_plan(plan: PlanNumbers, waits: Waits) -> Verdict:
        return judge(plan, facts, profile, history, now, replace(settings, waits=waits))

    return judge_plan


def rates(facts: FactsLike, profile: Profile) -> tuple[float, float]:
    """Return (bytes per second, operations per second): measured if known, else the profile's."""
    return (
        facts.bw_bytes_per_s or profile.bw_bytes_per_s,
        facts.flops_per_s or profile.flops_per_s,
    )


def launch_seconds(facts: FactsLike, profile: Profile) -> float:
    """Return the measured seconds per launch, 0 if nobody measured.

    Where the governor is on (a driver that is known to be bad, or not known), every window of
    launches is waited for once.
    """
    waits = facts.sync_s / WINDOW_LAUNCHES if profile.known_bad or profile.careful else 0.0
    return facts.launch_s + waits


def blocks(verdict: Verdict, mode: RiskMode) -> bool:
    """Tell whether a run with this verdict must not start. ``warn`` and ``off`` never block."""
    return verdict.severity == "block" and mode in ("auto", "block")


def enforce(verdict: Verdict, mode: RiskMode) -> None:
    """Refuse a run that must not start.

    Raises: RiskBlockedError with every reason, its numbers, and what to change.
    """
    if blocks(verdict, mode):
        raise RiskBlockedError(explain(verdict))


def explain(verdict: Verdict) -> str:
    """Return the verdict as text, one risk per line, severest first."""
    size = verdict.size
    points = ""
    if verdict.score > 0:
        points = f", {verdict.score:g} points (warn from {WARN_AT:g}, block from {BLOCK_AT:g})"
    head = (
        f"Risk {verdict.severity}{points}: {size.launches:,} launches, about "
        f"{duration(size.seconds)} of busy time predicted."
    )
    lines = [
        f"[{r.code}{f', +{r.points:g}' if r.points else ''}] {r.message} {r.action}"
        for r in verdict.risks
    ]
    return "\n".join([head, *lines])


def duration(seconds: float) -> str:
    """Return a span of time as a person says it: seconds, minutes or hours."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
