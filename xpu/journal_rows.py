"""The rows of the crash journal as values: what a run, a death and a crash are, and reading them.

Owns the one place where what lies in the file is checked. A value that cannot be right (text for a
number, negative, not finite, beyond any sense) counts as unknown and is named; it never raises.
Standard library only.
"""

from __future__ import annotations

import sqlite3
import time
from dataclasses import dataclass
from typing import Any

from .boot import Owner
from .history import Crash, DeathKind, JobSize

SUMMARY_CHARS = 1000
"""Longest plan summary that is stored (characters; our choice, keeps the file small)."""

MOST = 1e12
"""Largest launches or seconds that are believed (our choice, far beyond any job)."""

LATEST = 32_503_680_000.0
"""Latest time that is believed: the year 3000 (seconds since 1970; Windows can show no later)."""

LARGEST_PID = 2**31 - 1
NO_PID = -1
"""Stands for a process number that cannot be read. No process has it, so none is alive."""


@dataclass(frozen=True)
class RunInfo:
    """One run as the journal names it: where it runs, and what it plans.

    Args:
        launches, seconds: planned launches and predicted busy seconds of the whole run; 0 when
            what the file says cannot be right.
        heavy: the next job must leave the longer gap after this one.
        summary: the plan in one line, for the message after a crash.
    """

    run_id: str
    device: str
    driver: str
    torch: str
    policy: str
    launches: int
    seconds: float
    heavy: bool = False
    summary: str = ""


@dataclass(frozen=True)
class Death:
    """A phase that was open when its process, or the whole machine, went away.

    ``opened`` and ``when`` are seconds since 1970; 0 when unknown. ``unknown`` names the columns
    whose value in the file cannot be right.
    """

    kind: DeathKind
    run: RunInfo
    phase: str
    step: int
    launches: int
    opened: float
    when: float
    device_at_work: bool
    unknown: tuple[str, ...] = ()

    @property
    def message(self) -> str:
        """Say what ran, where it stopped, and what is stricter now."""
        run = self.run
        planned = "an unknown number of" if "planned" in self.unknown else str(run.launches)
        step = "?" if "step" in self.unknown else str(self.step)
        made = "?" if "launches" in self.unknown else str(self.launches)
        at = f"at {_clock_text(self.when)}" if self.when > 0 else "at an unknown time"
        done = f"step {step}, {made} of {planned} planned launches"
        where = f"during '{self.phase}' ({done}) on {run.device}, driver {run.driver}"
        plan = f" Plan: {run.summary}." if run.summary else ""
        if not self.device_at_work:
            return f"The last run stopped {at} {where}; the device was idle.{plan} Nothing changed."
        if self.kind == "process":
            return (
                f"ComfyUI ended {at} {where}.{plan} It may have been closed by hand, so this "
                "counts as half a crash: no job is blocked for it."
            )
        return (
            f"The machine went down {at} {where}.{plan} Jobs with attention '{run.policy}' of "
            f"at least {run.launches // 2} launches and {run.seconds / 2:.0f} s are blocked on "
            "this device and driver until three runs of that size end well (set risk to warn to "
            "try), the driver changes, or the journal is told to forget."
        )


def run_columns(run: RunInfo) -> tuple[Any, ...]:
    """Return a run as values SQLite takes: text that is UTF-8, numbers that are numbers."""
    names = (run.run_id, run.device, run.driver, run.torch, run.policy)
    launches, seconds = _believed(run.launches, MOST), _believed(run.seconds, MOST)
    summary = _storable(run.summary[:SUMMARY_CHARS])
    values: tuple[Any, ...] = (int(launches or 0), seconds or 0.0, run.heavy, summary)
    return tuple(map(_storable, names)) + values


def owner(row: sqlite3.Row) -> Owner:
    """Return whose row it is; a process number that cannot be read is NO_PID."""
    pid = _believed(row["pid"], LARGEST_PID)
    odd: set[str] = set()
    names = (_text(row, name, odd) for name in ("boot_id", "started", "space"))
    boot_id, started, space = names
    return Owner(boot_id, NO_PID if pid is None else int(pid), started, space)


def run_id(row: sqlite3.Row) -> str:
    """Return the run a row belongs to."""
    return _text(row, "run_id", set())


def death(row: sqlite3.Row, odd: set[str]) -> Death:
    """Read one row of ``deaths``. Names of columns that cannot be right are added to ``odd``."""
    mine: set[str] = set()
    run = RunInfo(
        _text(row, "run_id", mine),
        _text(row, "device", mine),
        _text(row, "driver", mine),
        _text(row, "torch", mine),
        _text(row, "policy", mine),
        launches=int(_number(row, "planned", MOST, mine)),
        seconds=_number(row, "seconds", MOST, mine),
        heavy=bool(row["heavy"]),
        summary=_text(row, "summary", mine),
    )
    found = Death(
        _kind(row, mine),
        run,
        _text(row, "phase", mine),
        step=int(_number(row, "step", MOST, mine)),
        launches=int(_number(row, "launches", MOST, mine)),
        opened=_number(row, "opened", LATEST, mine),
        when=_number(row, "happened", LATEST, mine),
        device_at_work=bool(row["at_work"]),
        unknown=tuple(sorted(mine)),
    )
    odd |= mine
    return found


def crash(row: sqlite3.Row, odd: set[str]) -> Crash:
    """Read one row of ``deaths`` for the rules. An unknown part of the size is 0: any job is
    at least that large, so nothing is let through for a value that cannot be read."""
    size = JobSize(
        int(_number(row, "planned", MOST, odd)), float(_number(row, "seconds", MOST, odd))
    )
    return Crash(
        _kind(row, odd),
        size,
        _text(row, "policy", odd),
        _text(row, "driver", odd),
        _text(row, "phase", odd),
        _number(row, "happened", LATEST, odd),
        _text(row, "event", odd),
        clean_after=int(_number(row, "clean_after", MOST, odd)),
        clean_elsewhere=int(_number(row, "clean_elsewhere", MOST, odd)),
        device_at_work=bool(row["at_work"]),
    )


def clean_size(row: sqlite3.Row, odd: set[str]) -> tuple[str, JobSize] | None:
    """Read one row of ``clean``; None when its size cannot be right, for it would prove nothing."""
    mine: set[str] = set()
    launches, seconds = (_number(row, name, MOST, mine) for name in ("launches", "seconds"))
    odd |= mine
    return None if mine else (_text(row, "policy", odd), JobSize(int(launches), seconds))


def is_time(value: object, latest: float) -> bool:
    """Tell whether a column holds a time from 1970 to ``latest``."""
    return _believed(value, latest) is not None


def _kind(row: sqlite3.Row, odd: set[str]) -> DeathKind:
    if row["kind"] == "process":
        return "process"
    if row["kind"] != "machine":
        odd.add("kind")
    return "machine"


def _believed(value: object, most: float) -> float | None:
    # Comparing is false for NaN.
    return value if isinstance(value, int | float) and 0 <= value <= most else None


def _number(row: sqlite3.Row, name: str, most: float, odd: set[str]) -> float:
    value = _believed(row[name], most)
    if value is None:
        odd.add(name)
    return value or 0


def _text(row: sqlite3.Row, name: str, odd: set[str]) -> str:
    value: object = row[name]
    if isinstance(value, str):
        return value
    odd.add(name)
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _storable(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


def _clock_text(when: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))
    except (OverflowError, OSError, ValueError):
        return f"second {when:.0f}"
