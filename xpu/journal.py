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
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal, TypeVar

from . import journal_file as file
from . import journal_read as read
from . import journal_rows as rows
from .boot import Owner, current_owner, is_alive, process_start
from .history import History
from .journal_rows import SUMMARY_CHARS as SUMMARY_CHARS
from .journal_rows import Death as Death
from .journal_rows import RunInfo as RunInfo

_log = logging.getLogger(__name__)

Result = Literal["ok", "error", "cancel"]
T = TypeVar("T")

KEEP_CLEAN = 32
"""Most clean job sizes kept per device, driver and policy (our choice)."""

ROTATE_EVERY = 50
"""Phases between two checks of the file's size (our choice)."""


_GENERATION = 1 << 40
"""Ids handed out count up by this when another file takes the journal's place, so that an id of
the old file can never name a row of the new one."""


class ForgetError(OSError):
    """The journal's file could not be written, so nothing was forgotten."""

    def __init__(self, path: Path, cause: Exception) -> None:
        super().__init__(
            f"Nothing was forgotten: the run journal '{path}' cannot be written "
            f"({type(cause).__name__}: {cause}). Close other programs that use it, make it and its "
            "folder writable, free disk space, or update the pack, whichever is the cause; then ask "
            "again."
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
        self._ending = False
        self._odd_said = False
        self._move_said = False
        self._generation = 0
        self._newest: tuple[int, str, float] = (0, "", 0.0)  # last row: id, run, opened
        self._place: file.Place | None = None
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
        run has made so far. Nothing is opened (id 0) once close_open_rows was called.
        """
        with self._lock:
            if self._ending:
                return 0
            phase_id = self._insert_phase(run, phase, step, launches, xpu)
            if self._ending:  # a signal handler came in between, and may have missed this row
                self.close_open_rows()
            return phase_id

    def _insert_phase(self, run: RunInfo, phase: str, step: int, launches: int, xpu: bool) -> int:
        me, now = self.owner, self._clock()
        row = (
            *rows.run_columns(run), phase, xpu, step, launches, now, now,
            me.boot_id, me.pid, me.started, me.space,
        )  # fmt: skip
        row_id = self._do(lambda db: db.execute(file.INSERT_PHASE, row).lastrowid, 0) or 0
        self._newest = (row_id, str(row[0]), now)
        self._since_rotation += 1
        if self._since_rotation >= ROTATE_EVERY:
            self._since_rotation = 0
            self._do(lambda db: file.rotate(db, self._max_bytes), None)
        return row_id + self._generation if row_id else 0

    def progress(self, phase_id: int, *, step: int, launches: int) -> None:
        """Note how far an open phase has come: step, and launches of the run so far."""
        now = self._clock()
        sql = "UPDATE phases SET step=?, launches=?, updated=? WHERE id=? AND closed IS NULL"
        self._write(lambda db: db.execute(sql, (step, launches, now, self._row_id(phase_id))))

    def close_phase(self, phase_id: int, result: Result, *, launches: int | None = None) -> None:
        """Close a phase: nothing it did can be reported as a death any more."""
        now = self._clock()
        sql = (
            "UPDATE phases SET closed=?, updated=?, result=?, launches=COALESCE(?, launches) "
            "WHERE id=? AND closed IS NULL"
        )
        self._write(
            lambda db: db.execute(sql, (now, now, result, launches, self._row_id(phase_id)))
        )

    def close_run(self, run: RunInfo, result: Result) -> None:
        """Note that a whole run ended. Only ``ok`` teaches anything: this much ran cleanly."""
        if result != "ok":
            return
        values = rows.run_columns(run)
        me = (values[1], values[2], values[4], values[5], values[6])
        self._write(lambda db: file.add_clean(db, me, self._clock(), KEEP_CLEAN))

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
        """Close every row this process left open: it is being ended on purpose.

        From here on nothing is written: a thread that goes on while the process ends would leave a
        row open that looks like a crash.
        """
        now, me = self._clock(), self.owner
        row = (now, now, result, me.boot_id, me.pid, me.started, me.space)
        with self._lock:
            self._ending = True
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
        odd: set[str] = set()
        found = self._do(lambda db: read.claim_deaths(db, self.owner, self._is_alive, odd), [])
        self._say_odd(odd)
        return found

    def deaths(self, limit: int = 20) -> list[Death]:
        """Return deaths already found, newest first."""
        sql = "SELECT * FROM deaths ORDER BY happened DESC, id DESC LIMIT ?"
        odd: set[str] = set()
        found = self._do(lambda db: [rows.death(r, odd) for r in db.execute(sql, (limit,))], [])
        self._say_odd(odd)
        return found

    def history(self, device: str, driver: str) -> History:
        """Return what was learned about ``device``, for runs on ``driver``.

        An end in the future is moved to the present (see journal_read.last_end).
        """
        odd: set[str] = set()

        def work(db: sqlite3.Connection) -> History:
            end, heavy = read.last_end(db, device, self._clock(), odd)
            busy = read.is_busy(db, device, self.owner, self._is_alive)
            crashes = read.crashes(db, device, odd)
            clean = read.clean_sizes(db, device, driver, odd)
            return History(driver, clean, crashes, end, heavy, busy)

        found = self._do(work, History(driver))
        self._say_odd(odd)
        return found

    def forget(self, device: str | None = None) -> int:
        """Drop what was learned about one device, or about all. Only ever on the user's word.

        Returns the number of crashes dropped from the file. Without ``device``, a damaged file is
        moved aside (``.damaged`` is added to its name) and a new one started.
        Raises: ForgetError if the file cannot be written: locked, no right to, disk full, made by a
            newer version, or damaged when one ``device`` is named. It is left as it is then.
        """
        with self._lock:
            gone = self._forget(device)
        _log.info("Run journal: %d crash(es) forgotten (%s).", gone, device or "all devices")
        return gone

    def _forget(self, device: str | None) -> int:
        def work(db: sqlite3.Connection) -> int:
            return file.forget(db, device)

        if self.path is None or self._closed:
            return self._do(work, 0)
        try:
            self._look_after_file()
            if self.problem is None:
                return file.transact(self._db, work)
            with closing(self._connect(self.path)) as db:
                gone = file.transact(db, work)
        except (sqlite3.Error, OSError) as e:
            if device is None and file.is_damage(e):
                return self._start_anew(self.path, work)
            raise ForgetError(self.path, e) from e
        self._do(work, 0)  # what this session holds in memory
        return gone

    def _start_anew(self, path: Path, work: Callable[[sqlite3.Connection], int]) -> int:
        gone = self._do(work, 0)
        file.close_quietly(self._db)
        try:
            file.set_aside(path)
            self.problem = None
            self._generation += _GENERATION
            self._db = self._connect(path)
        except (sqlite3.Error, OSError) as e:
            self._db = self._fall_back(path, e)
            raise ForgetError(path, e) from e
        self._place = file.place_of(path, self._db)
        return gone

    def _is_alive(self, owner: Owner) -> bool:
        return owner.pid != rows.NO_PID and is_alive(owner, self.owner, self._start_of)

    def _say_odd(self, odd: set[str]) -> None:
        if not odd or self._odd_said:
            return
        self._odd_said = True
        _log.warning(
            "The run journal '%s' holds values that cannot be right (%s). They count as unknown; "
            "crashes are still reported. Let the journal forget if this comes back.",
            self.path,
            ", ".join(sorted(odd)),
        )

    # -- the file ----------------------------------------------------------------------------

    def _open(self) -> sqlite3.Connection:
        if self.path is None:
            return file.connect_memory()
        try:
            db = self._connect(self.path)
        except (sqlite3.Error, OSError) as e:
            return self._fall_back(self.path, e)
        self._place = file.place_of(self.path, db)
        return db

    def _look_after_file(self) -> None:
        """Notice that the file was deleted, replaced or cut short while it is in use."""
        path = self.path
        if path is None or self._place is None or self.problem is not None:
            return
        state = file.state_of(path, self._place)
        if state == "same" or self._db.in_transaction:
            return
        old = self._db
        if state == "cut":
            self._db = self._fall_back(path, OSError("it was cut short while in use"))
            file.close_quietly(old)
            return
        try:
            new = self._connect(path)
            if state == "gone":
                file.copy_rows(old, new)
        except (sqlite3.Error, OSError) as e:
            self._db = self._fall_back(path, e)
        else:
            self._db, self._place = new, file.place_of(path, new)
            self._say_moved(path, state, new)
        file.close_quietly(old)

    def _say_moved(self, path: Path, state: str, db: sqlite3.Connection) -> None:
        """Say once what happened to the file. A file with our newest row is the same journal."""
        if state != "gone" and (not self._newest[0] or file.has_phase(db, *self._newest)):
            return
        if state != "gone":
            self._generation += _GENERATION
        if not self._move_said:
            self._move_said = True
            what = "replaced while in use; the file that is there now is used"
            if state == "gone":
                what = "deleted while in use; it was written anew with all it held"
            _log.warning("The run journal '%s' was %s. End ComfyUI to change it.", path, what)

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

    def _row_id(self, phase_id: int) -> int:
        """Return the row a handed-out id names; 0, which no row has, for one of another file."""
        row_id = phase_id - self._generation
        return row_id if 0 < row_id < _GENERATION else 0

    def _write(self, work: Callable[[sqlite3.Connection], object]) -> None:
        with self._lock:
            if not self._ending:
                self._do(work, None)

    def _do(self, work: Callable[[sqlite3.Connection], T], default: T) -> T:
        """Run one transaction; on trouble with the file, again in memory; never raise for it."""
        with self._lock:
            if self._closed:
                return default
            try:
                self._look_after_file()
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
