"""Breadcrumbs of ``run.py stress``: lines that are on disk before the work they announce begins.

Owns the file and what an unfinished session in it means. Standard library and the pack's ``boot``.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 20
"""Size from which a new session starts the file anew (our choice: some 10 000 bursts)."""


class Breadcrumbs:
    """A file of JSON lines, each flushed to the disk before ``write`` returns."""

    def __init__(self, path: str | Path) -> None:
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  (open for the whole session)

    def write(self, line: dict[str, Any]) -> None:
        """Append a line and wait until it is on the disk. Raises: OSError."""
        self._file.write(json.dumps({**line, "time": time.time()}) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass(frozen=True)
class Unfinished:
    """A session without an end. kind: ``machine``, ``process`` or ``running``."""

    kind: str
    session: dict[str, Any]
    burst: int
    when: float

    @property
    def message(self) -> str:
        """Say what ended, where, and what that means."""
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.when))
        made = self.burst * int(self.session.get("launches", 0))
        where = (
            f"in or after burst {self.burst} (about {made} launches) on "
            f"{self.session.get('device', '?')}, at {at}"
        )
        if self.kind == "running":
            return f"Another stress run is still going on: {where}. Wait for it or stop it."
        if self.kind == "machine":
            return (
                f"The last stress run never ended: the computer went down {where}. Do not use this "
                f"driver for long jobs; report it with run.py doctor --report."
            )
        return (
            f"The last stress run never ended: its process was gone {where}. If nobody closed it, the "
            f"driver or a library ended it."
        )


def last_unfinished(path: Path, boot: Any) -> Unfinished | None:
    """Return the last session if it has no end, else None.

    Args: boot: the pack's ``xpu.boot``.
    """
    session: dict[str, Any] | None = None
    burst, when = 0, 0.0
    for line in read_lines(path):
        event, when = line.get("event"), float(line.get("time", when))
        if event == "session":
            session, burst = line, 0
        elif event == "end":
            session = None
        elif session is not None and event == "ready":
            session = {**session, "launches": line.get("launches", 0)}
        elif event == "before":
            burst = int(line.get("burst", burst))
    if session is None:
        return None
    owner = boot.Owner(**session["owner"])
    here = boot.current_owner()
    if boot.is_alive(owner, here, boot.process_start):
        return Unfinished("running", session, burst, when)
    kind = "process" if boot.same_boot(owner.boot_id, here.boot_id) else "machine"
    return Unfinished(kind, session, burst, when)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines that can be read; a crash may have left half of one."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    lines: list[dict[str, Any]] = []
    for row in text.splitlines():
        try:
            line: Any = json.loads(row)
        except ValueError:
            continue
        if isinstance(line, dict) and (line.get("event") != "session" or "owner" in line):
            lines.append(line)
    return lines


def start_session(path: Path, owner: dict[str, Any], device: str) -> None:
    """Write the head of a session; a large old file is replaced. Raises: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > MOST_BYTES:
        path.unlink()
    log = Breadcrumbs(path)
    log.write({"event": "session", "owner": owner, "device": device})
    log.close()


def end_session(path: Path, ended: str) -> None:
    """Note the end, unless the child has. Raises: OSError."""
    lines = read_lines(path)
    if not lines or lines[-1].get("event") != "end":
        log = Breadcrumbs(path)
        log.write({"event": "end", "ended": ended})
        log.close()
