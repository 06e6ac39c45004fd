"""The preflight: can this device be trusted? Runs the battery in child processes and judges it.

Owns the order of the children, the use of the cache and the ways in (a blocking call, an awaitable
one). The checks are in the child, the rules in ``probe_verdict.py``. Never touches the device in
this process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .boot import read_boot_id
from .device import device_key
from .fault_table import FAULT_TABLE
from .faults import device_lost_reason
from .probe_cache import CacheKey, ProbeCache, Remembered
from .probe_economics import DEFAULT_JOB_FLOPS
from .probe_facts import child_facts, is_covered
from .probe_process import child_command, child_environment, left_out_variables, run_child
from .probe_types import (
    QUICK_STAGES,
    Battery,
    ProbeRequest,
    Verdict,
)
from .probe_verdict import decide

log = logging.getLogger(__name__)

ECONOMICS = 8
LOST_PATTERN = "|".join(fault.pattern for fault in FAULT_TABLE if fault.kind == "lost")

Progress = Callable[[str], None]
Cancel = Callable[[], None]

_turns: dict[str, threading.Lock] = {}


class PreflightCancelled(Exception):  # noqa: N818  (a request, not an error)
    """The awaiting task was cancelled; the child is ended."""


@dataclass(frozen=True)
class Preflight:
    """One judgement with what it rests on.

    from_cache: no full battery was run for it now. when: seconds since 1970; 0 if not known.
    """

    verdict: Verdict
    battery: Battery
    from_cache: bool
    when: float = 0.0


def quick_request(device: str = "xpu:0") -> ProbeRequest:
    """Return the request of the stages that run before the first job."""
    return ProbeRequest(device=device, groups=QUICK_STAGES)


def preflight(
    request: ProbeRequest,
    folder: Path | None = None,
    *,
    refresh: bool = False,
    known: CacheKey | None = None,
    boot_id: str | None = None,
    check_cancel: Cancel | None = None,
    progress: Progress | None = None,
    job_flops: float = DEFAULT_JOB_FLOPS,
    openvino_devices: Sequence[str] | None = None,
) -> Preflight:
    """Judge a device, from memory if nothing has changed since.

    Args:
        folder: where judgements are kept; None keeps none.
        refresh: run the battery even if a judgement is kept.
        known: the device as this process knows it, see ``cache_key``; with it a kept judgement is
            found without starting a process.
        boot_id: replaces what the system says (for tests).
        check_cancel: called every 50 ms; raises to cancel. The child is gone when this returns.
        progress: told in words what is being tried.
        job_flops: operations of the job at hand, for the minutes of a retreat.
        openvino_devices: what OpenVINO lists, None if nobody asked.
    Blocks the calling thread only; one battery at a time runs per device.
    Raises: whatever check_cancel raises.
    """
    cache = ProbeCache(folder)
    boot = boot_id or read_boot_id()
    lost = device_lost_reason()
    unknown = CacheKey(request.device, "", "", str(torch.__version__), boot)

    def judge(battery: Battery, seen: bool = False) -> Verdict:
        return _judge(battery, seen, job_flops, openvino_devices)

    def recall(key: CacheKey) -> Preflight | None:
        entry = None if refresh else cache.find(key, request.stages, lost)
        return entry and Preflight(judge(entry.battery), entry.battery, True, entry.when)

    turn = _turns.setdefault(request.device, threading.Lock())
    while not turn.acquire(timeout=0.1):
        if check_cancel is not None:
            check_cancel()
    try:
        found = recall(unknown) or (recall(known) if known is not None else None)
        if found is not None:
            return found
        run = _Run(request, check_cancel, progress)
        run.group(0)
        key = identified(unknown, run.battery)
        found = recall(key) if key.is_identified else None
        if found is not None:
            return found
        run.rest()
        verdict, when = judge(run.battery, cache.was_seen(request.device)), time.time()
        if key.is_identified or verdict.criterion in ("hang", "crash", "lost"):
            cache.keep(Remembered(key, run.battery, verdict.status, lost or "", when=when))
    finally:
        turn.release()
    log.info("Preflight of %s: %s. %s", request.device, verdict.status, verdict.reason)
    return Preflight(verdict, run.battery, False, when)


def remembered(
    folder: Path | None, known: CacheKey, stages: frozenset[int] = frozenset((0, 1, 2, 3))
) -> Preflight | None:
    """Return the kept judgement of a device, or None. Starts no process.

    Args: stages: those it must rest on; by default the ones that run before the first job.
    """
    cache, lost = ProbeCache(folder), device_lost_reason()
    unknown = CacheKey(known.selector, "", "", known.torch, known.boot)
    entry = cache.find(unknown, stages, lost) or cache.find(known, stages, lost)
    if entry is None:
        return None
    verdict = _judge(entry.battery, False, DEFAULT_JOB_FLOPS, None)
    return Preflight(verdict, entry.battery, True, entry.when)


def _judge(
    battery: Battery, seen: bool, job_flops: float, openvino_devices: Sequence[str] | None
) -> Verdict:
    verdict = decide(
        battery, job_flops=job_flops, openvino_devices=openvino_devices, seen_before=seen
    )
    names = left_out_variables(os.environ)
    note = f"Set here, but kept from the checks: {', '.join(names)}."
    return verdict.with_notes(note) if names else verdict


async def preflight_in_background(
    request: ProbeRequest, folder: Path | None = None, **options: Any
) -> Preflight:
    """Do ``preflight`` in a thread, so that an event loop goes on. Cancelling ends the child.

    Args:
        options: as for ``preflight``.
    """
    stop = threading.Event()
    inner: Cancel | None = options.pop("check_cancel", None)

    def check_cancel() -> None:
        if stop.is_set():
            raise PreflightCancelled("The preflight was cancelled.")
        if inner is not None:
            inner()

    task = asyncio.create_task(
        asyncio.to_thread(preflight, request, folder, check_cancel=check_cancel, **options)
    )
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait([task])
        task.exception()
        raise


def invalidate(folder: Path | None, device: str, reason: str) -> None:
    """Forget kept judgements of a device; call it when a run has lost the device."""
    ProbeCache(folder).spoil(device, reason)


def cache_key(
    device: str, *, uuid_or_name: str, driver: str, boot_id: str | None = None
) -> CacheKey:
    """Return the key of a device whose properties this process already knows."""
    version = str(torch.__version__)
    return CacheKey(device, uuid_or_name, driver, version, boot_id or read_boot_id())


def identified(key: CacheKey, battery: Battery) -> CacheKey:
    """Return ``key`` with the device and driver the child read, unchanged if it could not."""
    found = battery.properties
    device = device_key(found.get("uuid"), found.get("name"))
    return CacheKey(key.selector, device, str(found.get("driver_version", "")), key.torch, key.boot)


class _Run:
    """One battery: group after group, until the end or a retreat."""

    def __init__(
        self, request: ProbeRequest, check_cancel: Cancel | None, progress: Progress | None
    ) -> None:
        self.battery = Battery(request.device)
        self._request = request
        self._check_cancel = check_cancel
        self._progress = progress
        self._started = time.monotonic()
        self._done = 0
        self._env = child_environment(os.environ, Path(torch.__file__).parent)

    def group(self, number: int) -> None:
        """Run one group of stages."""
        self._done = number + 1
        self._child(self._request.groups[number])

    def rest(self) -> None:
        """Run the remaining groups; stop as soon as more checks could not mend the verdict."""
        while self._done < len(self._request.groups) and self._goes_on():
            self.group(self._done)
        if self._goes_on() and self._wants_costs():
            self._child((ECONOMICS,))
        self.battery.complete = self._request.stages <= self.battery.stages

    def _goes_on(self) -> bool:
        return decide(self.battery).status in ("healthy", "degraded")

    def _wants_costs(self) -> bool:
        """A workaround on the processor is judged by its cost, also in the short battery."""
        detours = any(check.workaround == "cpu_block" for check in self.battery.checks)
        return detours and ECONOMICS not in self.battery.stages

    def _child(self, stages: tuple[int, ...]) -> None:
        battery, request = self.battery, self._request
        battery.covered = is_covered(battery) if 0 not in stages else True
        if not battery.covered:
            self._env["SYCL_CACHE_PERSISTENT"] = "1"  # compile once, not once per child
        limits = request.deadlines
        message: dict[str, Any] = {
            "device": request.device,
            "stages": list(stages),
            "small": request.small,
            "facts": child_facts(battery),
            "lost_pattern": LOST_PATTERN,
            "longest_s": max(asdict(limits).values()),
        }
        if request.stand_in is not None:
            message["stand_in"] = str(request.stand_in)
            message["stand_in_options"] = dict(request.stand_in_options)
        outcome = run_child(
            child_command(message),
            self._env,
            limits,
            covered=battery.covered,
            check_cancel=self._check_cancel,
            progress=self._progress,
        )
        if outcome.ended == "done":
            battery.stages |= frozenset(stages)
        battery.checks += outcome.checks
        battery.warnings += [text for text in outcome.warnings if text not in battery.warnings]
        battery.stderr += outcome.stderr
        battery.libraries = sorted({*battery.libraries, *outcome.libraries})
        battery.seconds = time.monotonic() - self._started
