"""SQLite under the crash journal: schema, durability, transactions, size.

Owns how bytes reach the disk. Knows nothing about processes or what a row means. Standard
library only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from .boot import same_boot as same_boot

_log = logging.getLogger(__name__)

T = TypeVar("T")

VERSION = 1
BUSY_TIMEOUT_S = 5.0
"""How long a write waits for another process's write (seconds; our choice: a write takes ms)."""

KEEP_PROCESS_DEATHS = 100
"""Process deaths kept when the file is full, newest first (our choice; machine deaths all stay)."""

_RUN = (
    "run_id TEXT NOT NULL, device TEXT NOT NULL, driver TEXT NOT NULL, torch TEXT NOT NULL, "
    "policy TEXT NOT NULL, planned INTEGER NOT NULL, seconds REAL NOT NULL, "
    "heavy INTEGER NOT NULL, summary TEXT NOT NULL, phase TEXT NOT NULL"
)
_SCHEMA = (
    f"CREATE TABLE IF NOT EXISTS phases (id INTEGER PRIMARY KEY AUTOINCREMENT, {_RUN}, "
    "xpu INTEGER NOT NULL, step INTEGER NOT NULL, launches INTEGER NOT NULL, "
    "opened REAL NOT NULL, updated REAL NOT NULL, boot_id TEXT NOT NULL, pid INTEGER NOT NULL, "
    "started TEXT NOT NULL, space TEXT NOT NULL, closed REAL, result TEXT)",
    "CREATE INDEX IF NOT EXISTS open_phases ON phases (device) WHERE closed IS NULL",
    "CREATE INDEX IF NOT EXISTS ended_phases ON phases (device, closed)",
    f"CREATE TABLE IF NOT EXISTS deaths (id INTEGER PRIMARY KEY AUTOINCREMENT, {_RUN}, "
    "step INTEGER NOT NULL, launches INTEGER NOT NULL, opened REAL NOT NULL, "
    "happened REAL NOT NULL, kind TEXT NOT NULL, event TEXT NOT NULL, at_work INTEGER NOT NULL, "
    "clean_after INTEGER NOT NULL DEFAULT 0, clean_elsewhere INTEGER NOT NULL DEFAULT 0)",
    "CREATE TABLE IF NOT EXISTS clean (device TEXT NOT NULL, driver TEXT NOT NULL, "
    "policy TEXT NOT NULL, launches INTEGER NOT NULL, seconds REAL NOT NULL, last REAL NOT NULL)",
)
_RUN_NAMES = "run_id, device, driver, torch, policy, planned, seconds, heavy, summary, phase"

INSERT_PHASE = (
    f"INSERT INTO phases ({_RUN_NAMES}, xpu, step, launches, opened, updated, boot_id, pid, "
    f"started, space) VALUES ({', '.join('?' * 19)})"
)
INSERT_DEATH = (
    f"INSERT INTO deaths ({_RUN_NAMES}, step, launches, opened, happened, kind, event, at_work) "
    f"SELECT {_RUN_NAMES}, step, launches, opened, updated, ?, ?, ? FROM phases WHERE id=?"
)
CLOSE_OWN = (
    "UPDATE phases SET closed=?, updated=?, result=? "
    "WHERE closed IS NULL AND boot_id=? AND pid=? AND started=? AND space=?"
)
OPEN_ON_DEVICE = (
    "SELECT boot_id, pid, started, space FROM phases WHERE device=? AND closed IS NULL AND xpu"
)
# What is no number sorts above every number, so an end that cannot be right is found first.
LAST_END = (
    "SELECT closed, heavy FROM phases WHERE device=? AND xpu AND closed IS NOT NULL "
    "ORDER BY closed DESC, heavy DESC LIMIT 1"
)
MOVE_ENDS = (
    "UPDATE phases SET closed=? WHERE device=? AND closed IS NOT NULL "
    "AND NOT (typeof(closed) IN ('integer', 'real') AND closed BETWEEN 0 AND ?)"
)
_TABLES = ("phases", "deaths", "clean")


class DamagedError(sqlite3.DatabaseError):
    """The file is a database whose content contradicts itself."""


class Place(NamedTuple):
    """Which file on the disk is open: its device and file number, and one page in bytes."""

    device: int
    number: int
    page_bytes: int


def place_of(path: Path, db: sqlite3.Connection) -> Place | None:
    """Return where the open file lies; None when the system does not tell."""
    try:
        found = os.stat(path)
        return Place(found.st_dev, found.st_ino, db.execute("PRAGMA page_size").fetchone()[0])
    except (sqlite3.Error, OSError):
        return None


def state_of(path: Path, known: Place) -> Literal["same", "gone", "other", "cut"]:
    """Compare the file at ``path`` with the one that was opened.

    SQLite does not notice a deleted or replaced file: it goes on with one nobody can open again.
    """
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return "gone"
    except OSError:
        return "same"  # it cannot be told now; a write will say what is wrong
    if found.st_ino and (found.st_dev, found.st_ino) != known[:2]:
        return "other"
    return "cut" if found.st_size < known.page_bytes else "same"


def has_phase(db: sqlite3.Connection, row_id: int, run_id: str, opened: float) -> bool:
    """Tell whether the file holds the phase with this id, run and opening time."""
    sql = "SELECT 1 FROM phases WHERE id=? AND run_id=? AND opened=?"
    return db.execute(sql, (row_id, run_id, opened)).fetchone() is not None


def is_damage(error: Exception) -> bool:
    """Tell a file whose content is broken from one that only cannot be used now."""
    text = str(error)
    return isinstance(error, DamagedError) or (
        isinstance(error, sqlite3.DatabaseError)
        and ("is not a database" in text or "malformed" in text)
    )


def connect(path: Path) -> sqlite3.Connection:
    """Open or create the journal so that a committed row survives a power cut.

    Raises: sqlite3.Error or OSError when the file cannot be read and written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    db = _connection(str(path))
    try:
        _while_locked(lambda: _prepare(db))
    except BaseException:
        db.close()
        raise
    return db


def connect_memory(copy_of: Path | None = None) -> sqlite3.Connection:
    """Open a journal in memory, with what can still be read of the file ``copy_of``."""
    db = _connection(":memory:")
    _prepare(db)
    if copy_of is not None and copy_of.is_file():
        # 'immutable' reads a file in a folder where SQLite may not create its side files.
        for how in ("mode=ro", "immutable=1"):
            if _copy_rows(f"{copy_of.absolute().as_uri()}?{how}", db):
                break
    return db


def transact(db: sqlite3.Connection, work: Callable[[sqlite3.Connection], T]) -> T:
    """Run ``work`` as one transaction that no other writer can interleave with."""
    if db.in_transaction:
        # A signal handler came in between. It may end the process: what it does is kept now.
        value = work(db)
        db.execute("COMMIT")
        return value
    _while_locked(lambda: db.execute("BEGIN IMMEDIATE"))
    try:
        value = work(db)
        if db.in_transaction:
            db.execute("COMMIT")
        return value
    except BaseException:
        if db.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
        raise


def add_clean(
    db: sqlite3.Connection, job: tuple[str, str, str, int, float], now: float, keep: int
) -> None:
    """Remember a clean job, drop the ones it covers, and relax the crashes it covers."""
    device, driver, policy, launches, seconds = job
    db.execute(
        "UPDATE deaths SET clean_after = clean_after + (driver = ?), "
        "clean_elsewhere = clean_elsewhere + (driver <> ?) "
        f"WHERE device=? AND {_known('planned')}<=? AND {_known('seconds')}<=?",
        (driver, driver, device, launches, seconds),
    )
    here = "device=? AND driver=? AND policy=?"
    covered = db.execute(
        f"SELECT 1 FROM clean WHERE {here} AND launches>=? AND seconds>=? "
        "AND NOT (launches=? AND seconds=?)",
        (*job, launches, seconds),
    ).fetchone()
    if covered:
        return
    db.execute(f"DELETE FROM clean WHERE {here} AND launches<=? AND seconds<=?", job)
    db.execute("INSERT INTO clean VALUES (?, ?, ?, ?, ?, ?)", (*job, now))
    db.execute(
        f"DELETE FROM clean WHERE {here} AND rowid NOT IN "
        f"(SELECT rowid FROM clean WHERE {here} ORDER BY last DESC, rowid DESC LIMIT ?)",
        (device, driver, policy, device, driver, policy, keep),
    )


def rotate(db: sqlite3.Connection, max_bytes: int) -> None:
    """Drop the older half of the closed rows when the used part of the file exceeds max_bytes."""
    if _used_bytes(db) <= max_bytes:
        return
    closed = "closed IS NOT NULL"
    db.execute(
        f"DELETE FROM phases WHERE {closed} AND id <= (SELECT id FROM phases WHERE {closed} "
        f"ORDER BY id LIMIT 1 OFFSET (SELECT COUNT(*) / 2 FROM phases WHERE {closed}))"
    )
    db.execute(
        "DELETE FROM deaths WHERE kind='process' AND id NOT IN "
        "(SELECT id FROM deaths WHERE kind='process' ORDER BY id DESC LIMIT ?)",
        (KEEP_PROCESS_DEATHS,),
    )
    db.execute("COMMIT")
    db.execute("PRAGMA incremental_vacuum").fetchall()


def forget(db: sqlite3.Connection, device: str | None) -> int:
    """Delete crashes and clean sizes of one device, or of all. Returns the number of crashes."""
    where, values = ("WHERE device=?", (device,)) if device is not None else ("", ())
    gone = db.execute(f"DELETE FROM deaths {where}", values).rowcount
    db.execute(f"DELETE FROM clean {where}", values)
    return gone


def set_aside(path: Path) -> None:
    """Rename the file and its side files so that a new one can be made; keep the old bytes.

    Raises: OSError when the file cannot be renamed; the side files are left alone then.
    """
    for suffix in ("", "-wal", "-shm"):
        old = path.with_name(path.name + suffix)
        try:
            os.replace(old, old.with_name(old.name + ".damaged"))
        except FileNotFoundError:
            continue
        except OSError:
            if not suffix:
                raise


def try_on_disk(path: Path, sql: str, values: tuple[object, ...]) -> None:
    """Make one small write to a file that was in trouble before. Failing is fine."""
    try:
        with contextlib.closing(_connection(str(path), 0.2)) as db:
            db.execute(sql, values)
    except (sqlite3.Error, OSError) as e:
        _log.debug("run journal still not writable: %s", e)


def close_quietly(db: sqlite3.Connection) -> None:
    """Close a connection that is in trouble."""
    with contextlib.suppress(sqlite3.Error):
        db.close()


def _while_locked(action: Callable[[], object]) -> None:
    """Repeat ``action`` while another process writes, at most BUSY_TIMEOUT_S.

    SQLite's own waiting sleeps up to 0.1 s between tries and starves beside a process that writes
    without a pause; short uneven sleeps find the gaps.
    """
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            action()
            return
        except sqlite3.OperationalError as e:
            if "locked" not in str(e) or time.monotonic() > deadline:
                raise
        time.sleep(random.uniform(0.0005, 0.004))


def _connection(name: str, timeout_s: float = 0.0, uri: bool = False) -> sqlite3.Connection:
    db = sqlite3.connect(
        name, timeout=timeout_s, isolation_level=None, check_same_thread=False, uri=uri
    )
    db.row_factory = sqlite3.Row
    db.text_factory = _decode
    return db


def _decode(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _known(column: str) -> str:
    """SQL for a size that is 0 where the column holds none (the same bounds as journal_rows)."""
    is_size = f"typeof({column}) IN ('integer', 'real') AND {column} BETWEEN 0 AND 1e12"
    return f"(CASE WHEN {is_size} THEN {column} ELSE 0 END)"


def _prepare(db: sqlite3.Connection) -> None:
    found = db.execute("PRAGMA user_version").fetchone()[0]
    if found > VERSION:
        raise sqlite3.DatabaseError(f"it was written by a newer version of the pack ({found})")
    db.execute("PRAGMA auto_vacuum=INCREMENTAL")  # only has an effect on a new file
    db.execute("PRAGMA journal_mode=WAL").fetchall()
    db.execute("PRAGMA synchronous=FULL")  # every commit is on the disk when it returns
    db.execute("PRAGMA wal_autocheckpoint=128")
    db.execute("PRAGMA journal_size_limit=524288")
    if found != VERSION:
        transact(db, _make_schema)
    damage = db.execute("PRAGMA quick_check(1)").fetchone()[0]
    if damage != "ok":
        raise DamagedError(f"the file is damaged: {damage}")


def _make_schema(db: sqlite3.Connection) -> None:
    for statement in _SCHEMA:
        db.execute(statement)
    db.execute(f"PRAGMA user_version={VERSION}")


def _used_bytes(db: sqlite3.Connection) -> int:
    pages, free, size = (
        int(db.execute(f"PRAGMA {name}").fetchone()[0])
        for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size


def copy_rows(old: sqlite3.Connection, new: sqlite3.Connection) -> None:
    """Copy every row to a file that may hold some of them already.

    Raises: sqlite3.Error when one of the two cannot be used; ``new`` is unchanged then.
    """

    def work(db: sqlite3.Connection) -> None:
        for table in _TABLES:
            found = old.execute(f"SELECT * FROM {table}").fetchall()
            if found:
                marks = ", ".join("?" * len(found[0]))
                db.executemany(f"INSERT OR IGNORE INTO {table} VALUES ({marks})", map(tuple, found))

    transact(new, work)


def _copy_rows(source: str, db: sqlite3.Connection) -> bool:
    try:
        with contextlib.closing(_connection(source, 0.2, uri=True)) as old:
            copy_rows(old, db)
        return True
    except (sqlite3.Error, OSError) as e:
        _log.debug("run journal not readable: %s", e)
        return False
