"""What the crash journal's rows add up to: who died, what was learned, when the device last worked.

Owns the questions asked of an open journal; each runs inside the caller's transaction. Names of
columns whose value cannot be right are added to ``odd``. Standard library only.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

from . import journal_file as file
from . import journal_rows as rows
from .boot import Owner
from .history import Crash, DeathKind, JobSize

FUTURE_S = 2.0
"""How far ahead of the clock the end of a job may lie (seconds; our choice: beyond it the clock was
set back)."""


def claim_deaths(
    db: sqlite3.Connection, me: Owner, is_alive: Callable[[Owner], bool], odd: set[str]
) -> list[rows.Death]:
    """Close the open rows of processes that are gone and remember them as deaths; oldest first."""
    left_open = db.execute("SELECT * FROM phases WHERE closed IS NULL ORDER BY id").fetchall()
    by_run: dict[tuple[Owner, str], list[sqlite3.Row]] = {}
    for row in left_open:
        owner = rows.owner(row)
        if is_alive(owner):
            continue
        by_run.setdefault((owner, rows.run_id(row)), []).append(row)
        # The end of a dead row is the last sign of life, not the moment it was found.
        db.execute("UPDATE phases SET closed=updated, result='died' WHERE id=?", (row["id"],))
    found: list[rows.Death] = []
    for (owner, _), nested in by_run.items():
        innermost = nested[-1]
        at_work = any(r["xpu"] for r in nested)
        machine = not file.same_boot(owner.boot_id, me.boot_id)
        if not (machine or at_work):
            continue
        kind: DeathKind = "machine" if machine else "process"
        event = owner.boot_id if machine else f"{owner.boot_id}/{owner.pid}/{owner.started}"
        added = db.execute(file.INSERT_DEATH, (kind, event, at_work, innermost["id"]))
        row = db.execute("SELECT * FROM deaths WHERE id=?", (added.lastrowid,)).fetchone()
        found.append(rows.death(row, odd))
    return sorted(found, key=lambda d: d.when)


def crashes(db: sqlite3.Connection, device: str, odd: set[str]) -> tuple[Crash, ...]:
    """Return every crash on the device, oldest first."""
    sql = "SELECT * FROM deaths WHERE device=? ORDER BY happened, id"
    return tuple(rows.crash(row, odd) for row in db.execute(sql, (device,)))


def clean_sizes(
    db: sqlite3.Connection, device: str, driver: str, odd: set[str]
) -> tuple[tuple[str, JobSize], ...]:
    """Return (policy, size) of the largest jobs that ended well."""
    sql = (
        "SELECT policy, launches, seconds FROM clean WHERE device=? AND driver=? "
        "ORDER BY policy, launches, seconds"
    )
    found = [rows.clean_size(row, odd) for row in db.execute(sql, (device, driver))]
    return tuple(size for size in found if size is not None)


def last_end(
    db: sqlite3.Connection, device: str, now: float, odd: set[str]
) -> tuple[float | None, bool]:
    """Return when the device was last at work (None: never), and whether that job was heavy.

    An end that lies in the future (the clock was set back) or is no time at all is rewritten to
    ``now`` when it is first seen: it counts as just now, once. So the gap is kept in full after a
    job whose end is unknown, and it passes like any other.
    """
    last = db.execute(file.LAST_END, (device,)).fetchone()
    if last is not None and not rows.is_time(last["closed"], now + FUTURE_S):
        if not rows.is_time(last["closed"], rows.LATEST):
            odd.add("closed")
        db.execute(file.MOVE_ENDS, (now, device, now + FUTURE_S))
        last = db.execute(file.LAST_END, (device,)).fetchone()
    return (last["closed"], bool(last["heavy"])) if last is not None else (None, False)


def is_busy(
    db: sqlite3.Connection, device: str, me: Owner, is_alive: Callable[[Owner], bool]
) -> bool:
    """Tell whether another living process has work open on the device."""
    owners = map(rows.owner, db.execute(file.OPEN_ON_DEVICE, (device,)))
    return any(owner != me and is_alive(owner) for owner in owners)
