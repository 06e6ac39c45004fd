"""Bounds what is in flight on the device, and notices when nothing comes back.

Owns the window of events, the pause after long work and the stall watch. Called at block boundaries
with the number of launches just submitted; never looks at operators. Inert unless switched on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

from .device import DeviceFacts, EventLike, make_event, synchronize

log = logging.getLogger(__name__)

WINDOW_LAUNCHES = 64
WINDOWS = 4
"""Default window, 64 × 4 launches in flight: an estimate, no measurement on a device supports it."""

PAUSE_SLICE_S = 0.25
FIRST_STALL_S = 600.0
STALL_S = 20.0
LOOKS_PER_DEADLINE = 4
"""How often the stall watch looks within one deadline: it speaks at most a quarter late."""


@dataclass(frozen=True)
class DutyCycle:
    """Pause ``idle_s`` seconds after more than ``busy_s`` seconds of work.

    The only mitigation reported to help against the driver crash of Battlemage under Windows:
    8 s between runs.
    """

    busy_s: float = 60.0
    idle_s: float = 8.0


@dataclass
class GovernorReport:
    """What the governor did in a run. ``largest_tick`` is the most launches between two ticks."""

    ticks: int = 0
    launches: int = 0
    events: int = 0
    waits: int = 0
    waited_s: float = 0.0
    max_in_flight: int = 0
    largest_tick: int = 0
    pauses: int = 0
    paused_s: float = 0.0


@dataclass
class _Pending:
    event: EventLike
    launches: int


@dataclass
class Governor:
    """Keep at most ``window_launches * windows`` launches in flight.

    An event is recorded after every ``window_launches`` launches; before the next block could
    exceed the bound, the oldest is waited for, so the queue never drains completely.
    Guarantees the bound while no tick reports more than ``window_launches`` launches; a larger block
    is submitted before the governor sees it, and ``report.largest_tick`` shows it.

    Args:
        enabled: False makes ``tick`` do nothing and launch nothing.
        event_factory, clock, sleep, drain: replaceable for simulation.
        check_cancel: called during waits of a pause; raises to cancel.
        on_tick: called on every tick, also while switched off, for example ``StallWatch.beat``.
    """

    window_launches: int = WINDOW_LAUNCHES
    windows: int = WINDOWS
    duty_cycle: DutyCycle | None = None
    enabled: bool = True
    event_factory: Callable[[], EventLike] = make_event
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    drain: Callable[[], None] = synchronize
    check_cancel: Callable[[], None] | None = None
    on_tick: Callable[[], None] | None = None
    report: GovernorReport = field(default_factory=GovernorReport)
    _pending: deque[_Pending] = field(default_factory=lambda: deque[_Pending](), repr=False)
    _open: int = field(default=0, repr=False)
    _in_flight: int = field(default=0, repr=False)
    _busy_since: float | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.window_launches < 1 or self.windows < 2:
            raise ValueError(
                f"A governor with {self.windows} windows of {self.window_launches} launches cannot "
                f"bound anything. Use at least 2 windows of at least 1 launch."
            )

    @classmethod
    def for_facts(
        cls, facts: DeviceFacts, window_launches: int = 0, windows: int = WINDOWS,
        duty_cycle: DutyCycle | None = None,
    ) -> Governor:  # fmt: skip
        """Return a governor that is on only for an XPU and a positive window."""
        on = facts.is_xpu and window_launches > 0
        return cls(
            window_launches=window_launches if on else WINDOW_LAUNCHES,
            windows=windows,
            duty_cycle=duty_cycle,
            enabled=on,
        )

    @property
    def limit(self) -> int:
        """Most launches in flight."""
        return self.window_launches * self.windows

    def tick(self, launches: int) -> None:
        """Account for ``launches`` operators just submitted; wait if too many are in flight."""
        if self.on_tick is not None:
            self.on_tick()
        if not self.enabled or launches <= 0:
            return
        report = self.report
        report.ticks += 1
        report.launches += launches
        report.largest_tick = max(report.largest_tick, launches)
        self._open += launches
        self._in_flight += launches
        report.max_in_flight = max(report.max_in_flight, self._in_flight)
        if self._open >= self.window_launches:
            self._record()
        while self._in_flight > self.limit - self.window_launches:
            if not self._pending:
                self._record()
            self._wait_oldest()
        self._pause_if_due()

    def finish(self) -> None:
        """Wait for everything recorded; call at the end of a phase."""
        if not self.enabled:
            return
        if self._open:
            self._record()
        while self._pending:
            self._wait_oldest()
        self._busy_since = None

    def _record(self) -> None:
        event = self.event_factory()
        event.record()
        self.report.events += 1
        self._pending.append(_Pending(event, self._open))
        self._open = 0

    def _wait_oldest(self) -> None:
        oldest = self._pending.popleft()
        started = self.clock()
        oldest.event.synchronize()
        self.report.waits += 1
        self.report.waited_s += self.clock() - started
        self._in_flight -= oldest.launches

    def _pause_if_due(self) -> None:
        if self.duty_cycle is None:
            return
        now = self.clock()
        if self._busy_since is None:
            self._busy_since = now
        if now - self._busy_since <= self.duty_cycle.busy_s:
            return
        self.drain()
        self._pending.clear()
        self._open = self._in_flight = 0
        log.info(
            "Pausing %.1f s after %.0f s of work", self.duty_cycle.idle_s, now - self._busy_since
        )
        self.report.pauses += 1
        left = self.duty_cycle.idle_s
        while left > 0:
            if self.check_cancel is not None:
                self.check_cancel()
            self.sleep(min(PAUSE_SLICE_S, left))
            left -= PAUSE_SLICE_S
            if self.on_tick is not None:
                self.on_tick()
        self.report.paused_s += self.duty_cycle.idle_s
        self._busy_since = None


class StallWatch:
    """Says once, from a side thread, that the device has stopped answering.

    A spinning driver call cannot be interrupted from inside the process, so the message is all this
    does. ``beat`` is called whenever work went on; it wakes nobody, as it is called per layer.

    Args:
        on_stall: receives the message; defaults to the log.
        first_s: deadline before the first beat (kernels may compile for minutes). stall_s: later.
    """

    def __init__(
        self,
        on_stall: Callable[[str], None] | None = None,
        first_s: float = FIRST_STALL_S,
        stall_s: float = STALL_S,
    ) -> None:
        self.stalled: str | None = None
        self._on_stall = on_stall or log.error
        self._first_s, self._stall_s = first_s, stall_s
        self._beats = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="supir-xpu-stall", daemon=True)

    def __enter__(self) -> StallWatch:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._closed.set()
        self._thread.join(timeout=5)

    def beat(self) -> None:
        """Note that the device made progress; called by one thread."""
        self._beats += 1

    def _watch(self) -> None:
        seen, since = 0, time.monotonic()
        shortest = min(self._first_s, self._stall_s)
        while not self._closed.wait(shortest / LOOKS_PER_DEADLINE):
            deadline, now = self._stall_s if seen else self._first_s, time.monotonic()
            if self._beats != seen:
                seen, since = self._beats, now
                continue
            if now - since < deadline:
                continue
            self.stalled = (
                f"There was no progress on the device for {deadline:.0f} s, so the driver has "
                f"probably lost a completion. This process cannot recover. End ComfyUI once, start "
                f"it again, and restart the computer if the next run stalls too."
            )
            self._on_stall(self.stalled)
            return
