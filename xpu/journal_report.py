"""The end of a crash journal as text, for a report: what ran last, with its plan, and what died.

Reads a journal file without changing it, whatever process writes to it. Standard library only.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

ROWS = 20
"""Phases and deaths that are told, newest first (our choice: the last few runs)."""

LAST_PLAN = "Last plan"
PHASES = "Journal, last phases"
DEATHS = "Journal, deaths"


def journal_sections(path: Path, rows: int = ROWS) -> dict[str, str]:
    """Return the sections of a report by title. What cannot be read is said in one line.

    Args:
        path: the journal of ComfyUI's user folder.
        rows: most rows of a section.
    """
    if not path.is_file():
        return {PHASES: f"no journal at {path}"}
    problem = ""
    for how in ("mode=ro", "immutable=1"):  # the latter where SQLite may not make its side files
        try:
            phases, deaths = _read(f"{path.resolve().as_uri()}?{how}", rows)
            break
        except sqlite3.Error as e:
            problem = problem or str(e)
    else:
        return {PHASES: f"the journal cannot be read: {problem}"}
    return {
        LAST_PLAN: "\n".join(_plan_lines(phases[0])) if phases else "no run yet",
        PHASES: "\n".join(map(_phase_line, phases)) or "none",
        DEATHS: "\n".join(map(_death_line, deaths)) or "none",
    }


def _read(uri: str, rows: int) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    with closing(sqlite3.connect(uri, uri=True, timeout=2.0)) as db:
        db.row_factory = sqlite3.Row
        phases = _rows(db, "SELECT * FROM phases ORDER BY id DESC LIMIT ?", rows)
        return phases, _rows(db, "SELECT * FROM deaths ORDER BY id DESC LIMIT ?", rows)


def _rows(db: sqlite3.Connection, sql: str, rows: int) -> list[dict[str, object]]:
    return [dict(row) for row in db.execute(sql, (rows,))]


def _plan_lines(row: Mapping[str, object]) -> list[str]:
    return [
        f"{row['summary']}",
        f"{row['device']}, driver {row['driver']}, torch {row['torch']}",
        f"planned launches {row['planned']}, predicted seconds {row['seconds']}, attention "
        f"{row['policy']}, heavy {bool(row['heavy'])}",
    ]


def _phase_line(row: Mapping[str, object]) -> str:
    end = row["result"] or "open"
    return f"{_at(row['opened'])} {row['phase']}: {end}; {_progress(row)}; {row['summary']}"


def _death_line(row: Mapping[str, object]) -> str:
    work = "at work" if row["at_work"] else "idle"
    return (
        f"{_at(row['happened'])} {row['kind']} died in {row['phase']}, device {work}; "
        f"{_progress(row)}; driver {row['driver']}; {row['summary']}"
    )


def _progress(row: Mapping[str, object]) -> str:
    return f"step {row['step']}, {row['launches']} of {row['planned']} launches"


def _at(seconds: object) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(str(seconds))))
