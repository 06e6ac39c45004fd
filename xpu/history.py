"""What the journal has learned about one device, as plain numbers for the risk rules.

Owns the meaning of a remembered crash: its weight, and how clean runs and a new driver lower it.
Reads and writes nothing. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

DeathKind = Literal["machine", "process"]

PROCESS_WEIGHT = 0.5
"""A process that ended with the device at work may have been closed by hand: half a crash."""

OTHER_DRIVER_FACTOR = 0.5
"""A crash under another driver version still counts, half."""

CLEAN_RUNS_PER_HALVING = 3
"""Clean runs at least as large as the crashed one that halve its weight, each time again."""


class JobSize(NamedTuple):
    """How much one job asks of the device: launches, and predicted busy seconds."""

    launches: int
    seconds: float

    def covers(self, other: JobSize) -> bool:
        """Tell whether this job is at least as large as ``other`` in both numbers."""
        return self.launches >= other.launches and self.seconds >= other.seconds


@dataclass(frozen=True)
class Crash:
    """One remembered death of the machine, or of a process with the device at work.

    ``size`` is what the run had planned, not how far it came: the same job is what must not be
    started again; a part of it that is not known is 0. ``event`` is equal for rows that ended in the same crash. ``clean_after``
    counts clean runs since then on this device that were at least as large, under the driver
    that crashed; ``clean_elsewhere`` those under another driver.
    """

    kind: DeathKind
    size: JobSize
    policy: str
    driver: str
    phase: str
    when: float
    event: str
    clean_after: int = 0
    clean_elsewhere: int = 0
    device_at_work: bool = True

    def weight(self, driver: str) -> float:
        """Return how much this crash counts for a run on ``driver``: 0 to 1, never forgotten."""
        if not self.device_at_work:
            return 0.0
        weight = 1.0 if self.kind == "machine" else PROCESS_WEIGHT
        clean = self.clean_after
        if self.driver != driver:
            weight *= OTHER_DRIVER_FACTOR
            clean = self.clean_elsewhere
        return weight * 0.5 ** (clean // CLEAN_RUNS_PER_HALVING)


@dataclass(frozen=True)
class History:
    """What is known about one device, seen from one driver version.

    Args:
        clean: (attention policy, size) of the largest jobs that ended well on this driver.
        crashes: every crash on this device, under any driver and policy, oldest first.
        last_end: when the device was last at work, seconds since 1970; None if never. The journal
            gives none in the future (see Journal.history).
        last_heavy: whether that job was heavy.
        busy: another living process has work open on the device now.
    """

    driver: str = ""
    clean: tuple[tuple[str, JobSize], ...] = ()
    crashes: tuple[Crash, ...] = ()
    last_end: float | None = None
    last_heavy: bool = False
    busy: bool = False

    def max_clean(self, policy: str) -> JobSize | None:
        """Return the most launches and the most seconds that ended well under ``policy``."""
        found = [size for name, size in self.clean if name == policy]
        return JobSize(*map(max, zip(*found, strict=True))) if found else None

    def min_crashed(self, policy: str) -> JobSize | None:
        """Return the fewest launches and seconds of a job that crashed under ``policy``."""
        found = [c.size for c in self.crashes if c.policy == policy and c.kind == "machine"]
        return JobSize(*map(min, zip(*found, strict=True))) if found else None

    def is_proven(self, policy: str, size: JobSize) -> bool:
        """Tell whether one clean job under ``policy`` was at least this large."""
        return any(name == policy and done.covers(size) for name, done in self.clean)

    def crash_weights(self) -> tuple[float, float]:
        """Return the summed weights (machine, process); one event counts once."""
        events: dict[tuple[DeathKind, str], float] = {}
        for crash in self.crashes:
            key = (crash.kind, crash.event)
            events[key] = max(events.get(key, 0.0), crash.weight(self.driver))
        machine = sum(w for (kind, _), w in events.items() if kind == "machine")
        process = sum(w for (kind, _), w in events.items() if kind == "process")
        return machine, process
