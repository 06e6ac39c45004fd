"""What the preflight said about the device of this ComfyUI: asked once, remembered, told.

Owns the judgement for as long as this process lives. The checks are in ``xpu/probe.py`` and run in
child processes; nothing here touches the device.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..xpu.faults import device_lost_reason
from ..xpu.probe import Preflight, invalidate, preflight, quick_request, remembered
from ..xpu.probe_cache import FILE_NAME, CacheKey, file_stamp
from ..xpu.probe_types import CLASS_WORDS, ProbeRequest, Verdict

log = logging.getLogger(__name__)

Runner = Callable[..., Preflight]
"""``run(request, folder, known=, refresh=, check_cancel=, progress=)``, see ``xpu.probe.preflight``."""

OVERRIDES = ("warn", "off")
"""Risk modes in which a run starts on a device that must not be used."""

WHOLE = ProbeRequest().stages
"""Stages of the whole battery."""

WAY_WORDS = {
    "contiguous": "on contiguous tensors",
    "dtype": "in another precision",
    "cpu_block": "on the processor",
    "math": "as exact attention in pieces",
    "smaller": "in smaller allocations",
    "read_back": "with a value read back before memory is released",
}


class Health:
    """The judgement of one device.

    Args:
        key: the device as this process knows it.
        folder: where judgements are kept between starts; None keeps none.
        run: makes a judgement; replaceable for simulation.
    ``problem`` says why no judgement could be made, empty if nothing went wrong.
    """

    def __init__(self, key: CacheKey, folder: Path | None = None, run: Runner = preflight) -> None:
        self.key, self.folder = key, folder
        self.problem = ""
        self._run = run
        self._found: Preflight | None = None
        self._asked = False
        self._seen = (0, 0, 0)
        self._lock = threading.Lock()

    def known(self) -> Preflight | None:
        """Return the judgement as it is known now, None if there is none. Starts no process.

        A later judgement of another process, for example of ``run.py doctor``, takes its place.
        """
        if self.folder is not None:
            stamp = file_stamp(self.folder / FILE_NAME)
            if stamp != self._seen:
                self._seen = stamp
                kept, mine = remembered(self.folder, self.key), self._found
                if kept is not None and (mine is None or overrules(kept, mine)):
                    self._found = kept
        return self._found

    @property
    def word(self) -> Any:
        """The judgement as the risk rules take it; ``pending`` while it will be made before a run."""
        found = self.known()
        if found is not None:
            return found.verdict.for_risk
        return "unknown" if self._asked or device_lost_reason() is not None else "pending"

    def check(self, **options: Any) -> Preflight | None:
        """Return the judgement; without one, try the simplest operations, once per process.

        Args: options: check_cancel and progress, as for ``xpu.probe.preflight``.
        Raises: whatever check_cancel raises; the next call then tries again.
        """
        with self._lock:
            found = self.known()
            if found is None and not self._asked and device_lost_reason() is None:
                log.info("Trying the device before its first run: once, some seconds.")
                found = self._ask(quick_request(self.key.selector), **options)
            return found

    def check_all(self, *, refresh: bool = False, **options: Any) -> Preflight | None:
        """Return the judgement of the whole battery, which is run unless one is remembered.

        Args: refresh: run it in any case. options: as for ``check``.
        """
        with self._lock:
            return self._ask(ProbeRequest(device=self.key.selector), refresh=refresh, **options)

    def _ask(self, request: ProbeRequest, **options: Any) -> Preflight | None:
        try:
            self._found = self._run(request, self.folder, known=self.key, **options)
            self.problem = ""
        except OSError as e:
            self.problem = f"The device could not be checked: {e}"
            log.warning("SUPIR XPU: %s", self.problem)
        self._asked = True
        return self._found

    def spoil(self, reason: str) -> None:
        """Forget the judgement, also on disk: the next process checks the device again."""
        self._found = None
        self._asked = True
        invalidate(self.folder, self.key.selector, reason)
        if self.folder is not None:
            self._seen = file_stamp(self.folder / FILE_NAME)

    def as_dict(self) -> dict[str, Any]:
        """Return what is known, as JSON values; ``status`` is None if nothing is."""
        found, word = self.known(), self.word
        if found is None:
            why = self.problem or device_lost_reason() or ""
            return {**no_verdict(why), "pending": word == "pending"}
        return {**verdict_dict(found), "pending": False}


def overrules(kept: Preflight, mine: Preflight) -> bool:
    """True if a judgement on disk is later, and a retreat or made of at least the same checks."""
    covers = kept.battery.stages >= mine.battery.stages or kept.verdict.status == "retreat"
    return kept.when > mine.when and covers


def is_final(found: Preflight) -> bool:
    """True if more checks could not change the judgement: all were run, or one was enough."""
    return found.battery.stages >= WHOLE or found.verdict.status == "retreat"


def no_verdict(why: str = "") -> dict[str, Any]:
    """Return the keys of ``verdict_dict`` for a device that was not judged."""
    empty: dict[str, Any] = dict.fromkeys(("status", "criterion", "from_cache", "age_s"))
    lists: dict[str, Any] = {"workarounds": {}, "notes": [], "complete": False, "pending": False}
    return {**empty, "reason": why, "action": "", **lists}


def verdict_dict(found: Preflight) -> dict[str, Any]:
    """Return a judgement as JSON values."""
    verdict = found.verdict
    return {
        "status": verdict.status,
        "criterion": verdict.criterion,
        "from_cache": found.from_cache,
        "age_s": max(0.0, time.time() - found.when) if found.when else None,
        "reason": verdict.reason,
        "action": verdict.action,
        "workarounds": dict(verdict.workarounds),
        "notes": list(verdict.notes),
        "complete": is_final(found),
    }


def run_notes(verdict: Verdict | None, mode: str) -> list[str]:
    """Return what a run on this device must say about the judgement."""
    if verdict is None or verdict.status in ("healthy", "absent"):
        return []
    head = f"Preflight {verdict.status} ({verdict.criterion}): {verdict.reason}"
    if verdict.status == "retreat":
        return [f"{head} {override_words(mode)}"] if mode in OVERRIDES else [head]
    ways = [
        f"{CLASS_WORDS.get(name, name)} {WAY_WORDS.get(way, way)}"
        for name, way in verdict.workarounds.items()
    ]
    dropped = [f"{name} is replaced by float32" for name in verdict.dropped_dtypes]
    used = ", ".join([*ways, *dropped])
    return [f"{head} Used in this run: {used}." if used else head]


def override_words(mode: str) -> str:
    """Return the record of a run on a device that must not be used."""
    return f"Overridden: it runs because risk is {mode}."


def refusal(verdict: Verdict, device: str, driver: str) -> str:
    """Return the error of a run that is not started on a device that must not be used."""
    where = "; ".join(option.sentence for option in verdict.retreats)
    lines = [
        f"[XPU_PREFLIGHT] {device or 'The device'}, driver {driver or 'unknown'}, failed its health "
        f"check ({verdict.criterion}), so nothing was started on it. {verdict.reason}",
        f"What to do: {verdict.action}" if verdict.action else "",
        f"Where else to go: {where}." if where else "",
        "Set risk to off to run all the same; the run is then marked.",
    ]
    return "\n".join(line for line in lines if line)


def refusal_action(verdict: Verdict) -> str:
    """Return what the risk panel says to do."""
    return f"{verdict.action or 'Start ComfyUI with --cpu.'} Details: run.py doctor."
