"""What the browser is told when a phase of a run begins or ends: which of how many, and how long.

Sends nothing and decides nothing; ``GuardedRun.phase`` sends it, at phase changes only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..xpu.risk import PlanNumbers


def phase_seconds(plan: PlanNumbers, total_s: float) -> dict[str, float]:
    """Return the predicted seconds of each phase of a run.

    The run's seconds are shared out by the bytes each phase moves, and by launches where a plan
    counts none: an estimate for display, not the prediction a verdict rests on.
    """
    weights = {p.name: p.bytes_moved for p in plan.phases}
    if not any(weights.values()):
        weights = {p.name: float(p.launches) for p in plan.phases}
    whole = sum(weights.values())
    return {name: total_s * weight / whole if whole else 0.0 for name, weight in weights.items()}


FIRST_STAGE = ("encode_control", "decode_stage1", "encode_center")
"""Phases that share one of ComfyUI's progress bars where all three run; every other has its own."""


def phase_event(
    node: str, plan: PlanNumbers, total_s: float, name: str, ended: Sequence[str]
) -> dict[str, Any]:
    """Return the event of a phase that begins now.

    Args:
        node: what the run report calls the node. total_s: predicted busy seconds of the run.
        ended: names of the phases of this run that ended before.
    Returns: ``index`` of ``count`` phases, ``bar``: which part of how many of ComfyUI's progress bar
        this phase is, ``planned_s`` of this phase, and ``remaining_s`` of this and all later ones.
    """
    seconds = phase_seconds(plan, total_s)
    names = list(seconds) if name in seconds else [*ended, name]
    shares = name in FIRST_STAGE and all(n in names for n in FIRST_STAGE)
    left = [seconds.get(n, 0.0) for n in names if n not in ended]
    return {
        "node": node,
        "phase": name,
        "state": "start",
        "index": len(ended),
        "count": max(len(names), len(ended) + 1),
        "bar": [FIRST_STAGE.index(name), len(FIRST_STAGE)] if shares else [0, 1],
        "planned_s": round(seconds.get(name, 0.0), 1),
        "remaining_s": round(sum(left), 1),
    }
