"""From what the preflight measured to numbers that planning uses. Pure."""

from __future__ import annotations

import re
import types
from dataclasses import replace
from typing import Any

from .device import (
    MAX_SINGLE_ALLOC_BYTES,
    UNSUPPORTED_FAMILIES,
    DeviceFacts,
    classify_family,
)
from .probe_types import Battery, Measured, Verdict

ARCHITECTURES = {
    "pvc": ("pvc",),
    "alchemist": ("dg2", "acm", "ats"),
    "battlemage": ("bmg",),
    "lunar-lake": ("lnl",),
    "meteor-lake": ("mtl", "arl"),
    "panther-lake": ("ptl",),
}
"""How torch's list of compiled architectures names each family (beginnings of names)."""

UNSUPPORTED_TEXT = "is not officially supported by PyTorch XPU"


def family_of(battery: Battery) -> str:
    """Return the family of the device the children saw."""
    found = battery.properties
    architecture = found.get("architecture") or 0
    number = architecture if isinstance(architecture, int) else 0
    return classify_family(str(found.get("name", "")), number, types.SimpleNamespace(**found))


def is_unsupported(battery: Battery) -> bool:
    """True for a device older than what PyTorch's XPU backend is validated on."""
    heard = " ".join((*battery.warnings, *battery.stderr))
    return family_of(battery) in UNSUPPORTED_FAMILIES or UNSUPPORTED_TEXT in heard


def is_covered(battery: Battery) -> bool:
    """True if torch holds kernels compiled for the device, so that nothing compiles at first use."""
    if not battery.device.startswith("xpu"):
        return True
    arch_list: Any = next(
        (c.numbers["arch_list"] for c in battery.checks if "arch_list" in c.numbers), []
    )
    names = ARCHITECTURES.get(family_of(battery), ())
    return any(str(entry).lower().startswith(names) for entry in arch_list) if names else False


def child_facts(battery: Battery) -> dict[str, Any]:
    """Return what later children must know: dtypes, free bytes, integrated or not."""
    found = battery.properties
    dtypes = ["float32"]
    if found.get("has_fp16", True):
        dtypes.append("float16")
    if found.get("has_bfloat16_conversions", True):
        dtypes.append("bfloat16")
    free = battery.number("free_bytes")
    if not free and found.get("is_integrated_gpu") is False:
        free = 0.5 * float(found.get("total_memory") or 0)  # not reported: assume half of a card
    return {
        "dtypes": dtypes,
        "free_bytes": int(free),
        "is_integrated": bool(found.get("is_integrated_gpu", False)),
    }


def measured_of(battery: Battery) -> Measured:
    """Collect the measured numbers of a battery."""
    allocations = [check for check in battery.checks if check.op_class == "allocation"]
    worked = [int(check.numbers.get("allocated", 0)) for check in allocations]
    refused = [int(c.numbers.get("size", 0)) or _size_in(c.name) for c in allocations if c.failed]
    kernels = [
        (int(check.numbers.get("dim_head", 0)), str(check.numbers.get("kernel", "unknown")), check)
        for check in battery.checks
        if check.op_class == "attention"
    ]
    narrow = {"math" if c.failed else kernel for dim, kernel, c in kernels if dim <= 64}
    fused = "math" if "math" in narrow else "fused" if "fused" in narrow else "unknown"
    wide = [d for d, kernel, check in kernels if kernel == "fused" and not check.failed]
    return Measured(
        flops_per_s=battery.number("flops_per_s"),
        bw_bytes_per_s=battery.number("bw_bytes_per_s"),
        processor_flops_per_s=battery.number("processor_flops_per_s"),
        launch_s=battery.number("launch_s"),
        sync_s=battery.number("sync_s"),
        h2d_bytes_per_s=battery.number("h2d_bytes_per_s"),
        d2h_bytes_per_s=battery.number("d2h_bytes_per_s"),
        allocated_bytes=max(worked, default=0),
        refused_bytes=min((size for size in refused if size), default=0),
        fused_sdpa=fused,
        fused_max_dim_head=max(wide, default=0),
    )


def _size_in(name: str) -> int:
    """Return the bytes named in an allocation check that raised and so measured nothing; else 0."""
    found = re.search(r"allocate ([0-9]+(?:\.[0-9]+)?) (GiB|bytes)", name)
    if found is None:  # a child that ended between two allocations names none
        return 0
    return round(float(found.group(1)) * (2**30 if found.group(2) == "GiB" else 1))


def apply_measured(facts: DeviceFacts, verdict: Verdict) -> DeviceFacts:
    """Put measured numbers in place of guesses.

    Returns: facts whose ``sources`` say ``preflight`` for each replaced field. The allocation
    limit is only ever lowered; nothing is changed by what was not measured.
    """
    found = verdict.measured
    changes: dict[str, Any] = {}
    if found.flops_per_s > 0:
        changes["flops_per_s"] = found.flops_per_s
    if found.bw_bytes_per_s > 0:
        changes["bw_bytes_per_s"] = found.bw_bytes_per_s
    if found.launch_s > 0:
        changes["launch_s"] = found.launch_s
    if found.sync_s > 0:
        changes["sync_s"] = found.sync_s
    if found.fused_sdpa != "unknown":
        changes["fused_sdpa"] = found.fused_sdpa
    if found.fused_sdpa == "fused" and found.fused_max_dim_head > 0:
        changes["fused_max_dim_head"] = found.fused_max_dim_head
    limit = facts.max_alloc_bytes or MAX_SINGLE_ALLOC_BYTES
    if 0 < found.refused_bytes <= limit and 0 < found.allocated_bytes < limit:
        changes["max_alloc_bytes"] = found.allocated_bytes
    kept = tuple(name for name in facts.dtypes if name not in verdict.dropped_dtypes)
    if kept != facts.dtypes:
        changes["dtypes"] = kept
    if not changes:
        return facts
    sources = {**facts.sources, **dict.fromkeys(changes, "preflight")}
    return replace(facts, **changes, sources=sources)
