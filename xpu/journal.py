"""The crash journal: what was running when the machine, or this process, died.

A row is opened and on disk before a phase starts, and closed after it. A row found open whose
process is gone tells what died, where, and after how many launches. Owns the SQLite file and
nothing else; standard library only. Nothing here ever stops a run: when the file cannot be used,
it says so once and the session goes on in memory.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from . import journal_file as file
from .boot import Owner, current_owner, is_alive, process_start
from .history import Crash, DeathKind, History, JobSize

_log = logging.getLogger(__name__)

Result = Literal["ok", "error", "cancel"]
T = TypeVar("T")

SUMMARY_CHARS = 1000
"""Longest plan summary that is stored (characters; our choice, keeps the file small)."""

KEEP_CLEAN = 32
"""Most clean job sizes kept per device, driver and policy (our choice)."""

ROTATE_EVERY = 50
"""Phases between two checks of the file's size (our choice)."""


@dataclass(frozen=True)
class RunInfo:
    """One run as the journal names it: where it runs, and what it plans.

    Args:
        launches, seconds: planned launches and predicted busy seconds of the whole run.
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
    """A phase that was open when its process, or the whole machine, went away."""

    kind: DeathKind
    run: RunInfo
    phase: str
    step: int
    launches: int
    opened: float
    when: float
    device_at_work: bool

    @property
    def message(self) -> str:
        """Say what ran, where it stopped, and what is stricter now."""
        run = self.run
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.when))
        done = f"step {self.step}, {self.launches} of {run.launches} planned launches"
        where = f"during '{self.phase}' ({done}) on {run.device}, driver {run.driver}"
        plan = f" Plan: {run.summary}." if run.summary else ""
        if not self.device_at_work:
            return (
                f"The last run stopped at {at} {where}; the device was idle.{plan} Nothing changed."
            )
        if self.kind == "process":
            return (
                f"ComfyUI ended at {at} {where}.{plan} It may have been closed by hand, so this "
                "counts as half a crash: no job is blocked for it."
            )
        return (
            f"The machine went down at {at} {where}.{plan} Jobs with attention '{run.policy}' of "
            f"at least {run.launches // 2} launches and {run.seconds / 2:.0f} s are blocked on "
            "this device and driver until three runs of that size end well (set risk to warn to "
            "try), the driver changes, or the journal is told to forget."
        )


class Journal:
    """The run journal of one ComfyUI user folder. Safe to share between threads and processes.

    Args:
        path: the SQLite file; None keeps everything in memory.
        owner: this process; found out if None. ``boot_id`` replaces the boot id only.
        clock: wall clock, seconds since 1970.
        start_of: start time of a process, None if there is none (see boot.process_start).
        max_bytes: size at which old closed rows are dropped. Crashes are never dropped.
        connect: opens the file (see journal_file.connect).
    """

    def __init__(
        self,
        path: Path | str | None,
        *,
        owner: Owner | None = None,
        boot_id: str | None = None,
        clock: Callable[[], float] = time.time,
        start_of: Callable[[int], str | None] = process_start,
        max_bytes: int = 1 << 20,
        connect: Callable[[Path], sqlite3.Connection] = file.connect,
    ) -> None:
        self.path = Path(path) if path is not None else None
        self.owner = owner or current_owner(boot_id)
        self._clock = clock
        self._start_of = start_of
        self._max_bytes = max_bytes
        self._connect = connect
        self._lock = threading.RLock()
        self._since_rotation = 0
        self._closed = False
        self.problem: str | None = None
        """Why the file is not in use; None while it is."""
        self._db = self._open()

    @property
    def in_memory(self) -> bool:
        """Tell whether what is written now is lost when this process ends."""
        return self.path is None or self.problem is not None

    # -- writing -----------------------------------------------------------------------------

    def open_phase(
        self, run: RunInfo, phase: str, *, step: int = 0, launches: int = 0, xpu: bool = True
    ) -> int:
        """Put a row on disk before ``phase`` starts. Returns its id.

        ``xpu`` tells whether the device works during the phase; ``launches`` counts those the
        run has made so far.
        """
        me, now = self.owner, self._clock()
        row = (
            *_run_columns(run), phase, xpu, step, launches, now, now,
            me.boot_id, me.pid, me.started, me.space,
        )  # fmt: skip
        phase_id = self._do(lambda db: db.execute(file.INSERT_PHASE, row).lastrowid, 0) or 0
        self._since_rotation += 1
        if self._since_rotation >= ROTATE_EVERY:
            self._since_rotation = 0
            self._do(lambda db: file.rotate(db, self._max_bytes), None)
        return phase_id

    def progress(self, phase_id: int, *, step: int, launches: int) -> None:
        """Note how far an open phase has come: step, and launches of the run so far."""
        row = (step, launches, self._clock(), phase_id)
        sql = "UPDATE phases SET step=?, launches=?, updated=? WHERE id=? AND closed IS NULL"
        self._do(lambda db: db.execute(sql, row), None)

    def close_phase(self, phase_id: int, result: Result, *, launches: int | None = None) -> None:
        """Close a phase: nothing it did can be reported as a death any more."""
        now = self._clock()
        sql = (
            "UPDATE phases SET closed=?, updated=?, result=?, launches=COALESCE(?, launches) "
            "WHERE id=? AND closed IS NULL"
        )
        self._do(lambda db: db.execute(sql, (now, now, result, launches, phase_id)), None)

    def close_run(self, run: RunInfo, result: Result) -> None:
        """Note that a whole run ended. Only ``ok`` teaches anything: this much ran cleanly."""
        if result != "ok":
            return
        me = (run.device, run.driver, run.policy, run.launches, run.seconds)
        self._do(lambda db: file.add_clean(db, me, self._clock(), KEEP_CLEAN), None)

    @contextmanager
    def phase(
        self,
        run: RunInfo,
        phase: str,
        *,
        launches: int = 0,
        xpu: bool = True,
        cancelled_by: tuple[type[BaseException], ...] = (),
    ) -> Generator[int, None, None]:
        """Open a phase, yield its id, and close it however the block ends.

        ``cancelled_by`` names exceptions that mean the user stopped the run; so does everything
        that is no ``Exception``, such as KeyboardInterrupt and asyncio's CancelledError.
        """
        phase_id = self.open_phase(run, phase, launches=launches, xpu=xpu)
        result: Result = "error"
        try:
            yield phase_id
            result = "ok"
        except BaseException as e:
            if isinstance(e, cancelled_by) or not isinstance(e, Exception):
                result = "cancel"
            raise
        finally:
            self.close_phase(phase_id, result)

    def close_open_rows(self, result: Result = "cancel") -> None:
        """Close every row this process left open: it is being ended on purpose."""
        now, me = self._clock(), self.owner
        row = (now, now, result, me.boot_id, me.pid, me.started, me.space)
        self._do(lambda db: db.execute(file.CLOSE_OWN, row), None)
        if self.path is not None and self.problem is not None:
            file.try_on_disk(self.path, file.CLOSE_OWN, row)

    def close(self) -> None:
        """Close open rows as ``cancel`` and the file. Later calls do nothing."""
        with self._lock:
            self.close_open_rows()
            self._closed = True
            self._db.close()

    # -- reading -----------------------------------------------------------------------------

    def find_deaths(self) -> list[Death]:
        """Find, once, what was running when a process or the machine died; oldest first.

        A row of a living process is never reported, and no death is reported to two callers.
        A process that ended while the device was idle is closed without a report.
        """
        return self._do(self._claim_deaths, [])

    def deaths(self, limit: int = 20) -> list[Death]:
        """Return deaths already found, newest first."""
        sql = "SELECT * FROM deaths ORDER BY happened DESC, id DESC LIMIT ?"
        return self._do(lambda db: [_death(r) for r in db.execute(sql, (limit,))], [])

    def history(self, device: str, driver: str) -> History:
        """Return what was learned about ``device``, for runs on ``driver``."""
        return self._do(lambda db: self._read(db, device, driver), History(driver))

    def forget(self, device: str | None = None) -> int:
        """Drop what was learned about one device, or about all. Only ever on the user's word.

        Returns the number of crashes dropped. Without ``device``, a damaged file is moved aside
        (``.damaged`` is added to its name) and a new one started.
        """
        with self._lock:
            gone = self._do(lambda db: file.forget(db, device), 0)
            if device is None and self.path is not None and self.problem is not None:
                self._db.close()
                file.set_aside(self.path)
                self.problem = None
                self._db = self._open()
        _log.info("Run journal: %d crash(es) forgotten (%s).", gone, device or "all devices")
        return gone

    def _read(self, db: sqlite3.Connection, device: str, driver: str) -> History:
        sql = "SELECT * FROM deaths WHERE device=? ORDER BY happened, id"
        crashes = tuple(_crash(r) for r in db.execute(sql, (device,)))
        sql = (
            "SELECT policy, launches, seconds FROM clean WHERE device=? AND driver=? "
            "ORDER BY policy, launches, seconds"
        )
        clean = tuple((r[0], JobSize(r[1], r[2])) for r in db.execute(sql, (device, driver)))
        sql = (
            "SELECT closed, heavy FROM phases WHERE device=? AND xpu AND closed IS NOT NULL "
            "ORDER BY closed DESC, heavy DESC LIMIT 1"
        )
        last = db.execute(sql, (device,)).fetchone()
        busy = any(
            owner != self.owner and is_alive(owner, self.owner, self._start_of)
            for owner in map(_owner, db.execute(file.OPEN_ON_DEVICE, (device,)))
        )
        end, heavy = (last[0], bool(last[1])) if last else (None, False)
        return History(driver, clean, crashes, end, heavy, busy)

    def _claim_deaths(self, db: sqlite3.Connection) -> list[Death]:
        rows = db.execute("SELECT * FROM phases WHERE closed IS NULL ORDER BY id").fetchall()
        gone = [r for r in rows if not is_alive(_owner(r), self.owner, self._start_of)]
        by_run: dict[tuple[Owner, str], list[sqlite3.Row]] = {}
        for row in gone:
            by_run.setdefault((_owner(row), row["run_id"]), []).append(row)
            # The end of a dead row is the last sign of life, not the moment it was found.
            db.execute("UPDATE phases SET closed=updated, result='died' WHERE id=?", (row["id"],))
        found: list[Death] = []
        for (owner, _), nested in by_run.items():
            innermost = nested[-1]
            at_work = any(r["xpu"] for r in nested)
            machine = not file.same_boot(owner.boot_id, self.owner.boot_id)
            if not (machine or at_work):
                continue
            kind: DeathKind = "machine" if machine else "process"
            event = owner.boot_id if machine else f"{owner.boot_id}/{owner.pid}/{owner.started}"
            death_id = db.execute(
                file.INSERT_DEATH, (kind, event, at_work, innermost["id"])
            ).lastrowid
            row = db.execute("SELECT * FROM deaths WHERE id=?", (death_id,)).fetchone()
            found.append(_death(row))
        return sorted(found, key=lambda d: d.when)

    # -- the file ----------------------------------------------------------------------------

    def _open(self) -> sqlite3.Connection:
        if self.path is None:
            return file.connect_memory()
        try:
            return self._connect(self.path)
        except (sqlite3.Error, OSError) as e:
            return self._fall_back(self.path, e)

    def _fall_back(self, path: Path, error: Exception) -> sqlite3.Connection:
        self.problem = f"{type(error).__name__}: {error}"
        _log.warning(
            "The run journal '%s' cannot be used (%s). Runs go on, but a crash in this session will "
            "not be remembered after a restart. Make the file and its folder writable, close "
            "programs that lock it, free disk space, or let the journal forget if it is damaged.",
            path,
            self.problem,
        )
        return file.connect_memory(copy_of=path)

    def _do(self, work: Callable[[sqlite3.Connection], T], default: T) -> T:
        """Run one transaction; on trouble with the file, again in memory; never raise for it."""
        with self._lock:
            if self._closed:
                return default
            try:
                return file.transact(self._db, work)
            except (sqlite3.Error, OSError) as e:
                if self.in_memory or self.path is None:
                    _log.debug("run journal in memory failed: %s", e)
                    return default
                broken, self._db = self._db, self._fall_back(self.path, e)
                file.close_quietly(broken)
            try:
                return file.transact(self._db, work)
            except (sqlite3.Error, OSError) as e:
                _log.debug("run journal in memory failed: %s", e)
                return default


def _run_columns(run: RunInfo) -> tuple[Any, ...]:
    return (
        run.run_id, run.device, run.driver, run.torch, run.policy,
        run.launches, run.seconds, run.heavy, run.summary[:SUMMARY_CHARS],
    )  # fmt: skip


def _owner(row: sqlite3.Row) -> Owner:
    return Owner(row["boot_id"], row["pid"], row["started"], row["space"])


def _death(row: sqlite3.Row) -> Death:
    run = RunInfo(
        row["run_id"], row["device"], row["driver"], row["torch"], row["policy"],
        row["planned"], row["seconds"], bool(row["heavy"]), row["summary"],
    )  # fmt: skip
    return Death(
        row["kind"], run, row["phase"], row["step"], row["launches"],
        row["opened"], row["happened"], bool(row["at_work"]),
    )  # fmt: skip


def _crash(row: sqlite3.Row) -> Crash:
    return Crash(
        row["kind"], JobSize(row["planned"], row["seconds"]), row["policy"], row["driver"],
        row["phase"], row["happened"], row["event"],
        row["clean_after"], row["clean_elsewhere"], bool(row["at_work"]),
    )  # fmt: skip
