"""Devices whose preflight is told instead of run: verdicts for node tests. Nothing is measured."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from supir_xpu.nodes.health import Health
from supir_xpu.nodes.machine import Machine
from supir_xpu.tests.nodes import device_case
from supir_xpu.xpu.probe import Preflight
from supir_xpu.xpu.probe_cache import CacheKey, ProbeCache, Remembered
from supir_xpu.xpu.probe_types import Battery, Check, Measured, RetreatOption, Verdict

machine = importlib.import_module("supir_xpu.nodes.machine")

KEY = CacheKey("xpu:0", "simulated-0001", "32.0.101.8629", "2", "linux:a")

HEALTHY = Verdict("healthy", "all-passed", "All 12 checks passed.")
RETREAT = Verdict(
    "retreat",
    "hang",
    "The device stopped answering in 'sum over dim 1' (reductions): no answer for 20 s.",
    "Restart the computer.",
    retreats=(RetreatOption("torch on the processor", 240.0, "start ComfyUI with --cpu"),),
)


def degraded(**workarounds: str) -> Verdict:
    """A verdict with these workarounds."""
    return Verdict(
        "degraded",
        "workaround",
        "'layer norm' (norms) gave an error (45).",
        workarounds=workarounds,
    )


class Runner:
    """Takes the place of ``xpu.probe.preflight``: gives the verdicts it was made with, in order."""

    def __init__(self, *verdicts: Verdict | BaseException) -> None:
        self.verdicts = list(verdicts)
        self.requests: list[Any] = []
        self.options: list[dict[str, Any]] = []

    def __call__(self, request: Any, folder: Path | None, **options: Any) -> Preflight:
        self.requests.append(request)
        self.options.append(options)
        options["check_cancel"]()
        options["progress"]("reductions: sum over dim 1")
        verdict = self.verdicts[min(len(self.requests), len(self.verdicts)) - 1]
        if isinstance(verdict, BaseException):
            raise verdict
        return Preflight(verdict, Battery(request.device, request.stages), False, 1.0)


def health(*verdicts: Verdict | BaseException, folder: Path | None = None) -> Health:
    """A device that would be judged like this if it were asked."""
    return Health(KEY, folder, Runner(*verdicts))


def judged_machine(found: Health, spec: Any = device_case.GOOD) -> Machine:
    """A simulated device with a judgement."""
    return replace(device_case.place(spec), health=found)


def put(monkeypatch: Any, found: Health, spec: Any = device_case.GOOD) -> Machine:
    """Put a simulated device with a judgement in place."""
    made = judged_machine(found, spec)
    monkeypatch.setattr(machine, "_machine", made)
    return made


def keep(folder: Path, status: str = "healthy", *checks: Check, when: float = 1.0) -> None:
    """Keep a quick battery's judgement of the device on disk, as another process would."""
    battery = Battery(
        "xpu:0", frozenset((0, 1, 2, 3)), list(checks) or [Check(1, "event")], complete=True
    )
    ProbeCache(folder).keep(Remembered(KEY, battery, status, when=when))


MEASURED = Measured(
    flops_per_s=1e9,
    bw_bytes_per_s=1e9,
    launch_s=1e-4,
    sync_s=1e-4,
    allocated_bytes=2**30,
    refused_bytes=2**31,
    fused_sdpa="math",
)
