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

LAST_TIME_S = 4e9
"""Seconds since 1970, in the year 2096: anything later is damage (our choice), and a calendar may
not go further."""

OWNER_KEYS = {"boot_id", "pid", "started", "space"}


class Breadcrumbs:
    """A file of JSON lines, each flushed to the disk before ``write`` returns."""

    def __init__(self, path: str | Path) -> None:
        cut_off = not _ends_in_a_line(Path(path))
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  (open for the whole session)
        if cut_off:  # what a crash left; the next line must not be lost with it
            self._file.write("\n")

    def write(self, line: dict[str, Any]) -> None:
        """Append a line and wait until it is on the disk. Raises: OSError."""
        self._file.write(json.dumps({**line, "time": time.time()}) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _ends_in_a_line(path: Path) -> bool:
    """False if the last line of a file was cut off."""
    try:
        with path.open("rb") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return True
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"
    except OSError:
        return True


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
        made = self.burst * self.session.get("launches", 0)
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


def last_unfinished(path: Path, boot: Any) -> tuple[Unfinished | None, int]:
    """Return the last session if it has no end, else None; and the damaged lines since it began.

    A session counts as running while its process or that of its loop may be alive.

    Args: boot: the pack's ``xpu.boot``.
    """
    session: dict[str, Any] | None = None
    owners: list[Any] = []
    burst, when, damaged = 0, 0.0, 0
    for line in read_lines(path):
        event = None if line is None else line["event"]
        if line is None or not _is_sound(line):
            damaged += 1
            if event in ("session", "end"):
                session = None  # who began it is not known, or it ended all the same
            continue
        when = float(line["time"])
        if event == "session":
            session, burst, damaged = line, 0, 0
            owners = [boot.Owner(**line["owner"])]
        elif event == "end":
            session = None
        elif session is not None and event == "ready":
            session = {**session, "launches": line["launches"]}
            owners += [boot.Owner(**line["owner"])] if "owner" in line else []
        elif event == "before":
            burst = line["burst"]
    if session is None:
        return None, damaged
    here = boot.current_owner()
    if any(boot.is_alive(owner, here, boot.process_start) for owner in owners):
        return Unfinished("running", session, burst, when), damaged
    kind = "process" if boot.same_boot(owners[0].boot_id, here.boot_id) else "machine"
    return Unfinished(kind, session, burst, when), damaged


def read_lines(path: Path) -> list[dict[str, Any] | None]:
    """Return the lines; None for one that is no event. A crash may have left half of one."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    lines: list[dict[str, Any] | None] = []
    for row in text.split("\n"):
        if not row.strip():
            continue
        try:
            line: Any = json.loads(row)
        except (ValueError, RecursionError):
            line = None
        is_event = isinstance(line, dict) and isinstance(line.get("event"), str)
        lines.append(line if is_event else None)
    return lines


def _is_sound(line: dict[str, Any]) -> bool:
    """True if every value that is used is one this file's writers write."""
    event, when = line["event"], line.get("time")
    if isinstance(when, bool) or not isinstance(when, (int, float)):
        return False
    if not 0 <= when <= LAST_TIME_S:
        return False
    if event == "session":
        return _is_owner(line.get("owner")) and isinstance(line.get("device"), str)
    if event == "ready":
        return _is_count(line.get("launches")) and ("owner" not in line or _is_owner(line["owner"]))
    if event == "before":
        return _is_count(line.get("burst"))
    return event == "end"


def _is_owner(value: Any) -> bool:
    if not isinstance(value, dict) or not {"boot_id", "pid", "started"} <= set(value) <= OWNER_KEYS:
        return False
    words = [value[key] for key in value if key != "pid"]
    is_boot = str(value["boot_id"]).startswith(("linux:", "windows:", "macos:", "time:"))
    return is_boot and all(isinstance(word, str) for word in words) and _is_count(value["pid"])


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**32


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
    last = (read_lines(path) or [None])[-1]
    if last is None or last["event"] != "end":
        log = Breadcrumbs(path)
        log.write({"event": "end", "ended": ended})
        log.close()
