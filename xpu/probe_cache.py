"""Remembered preflights: one JSON file in a folder the caller names.

A judgement holds for one device, driver, torch and boot. A file that cannot be read or written
costs another preflight, never a run; so does an entry with a value nobody writes. Several processes
may use the file: it is replaced whole, and only if nobody else has since it was read.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from .probe_entry import CacheKey, Remembered, entry_from, entry_to

__all__ = ["FILE_NAME", "CacheKey", "ProbeCache", "Remembered", "file_stamp"]

log = logging.getLogger(__name__)

FILE_NAME = "supir_xpu_preflight.json"
FORMAT = 1
MOST_ENTRIES = 16
TRIES = 5
"""How often a change is made anew because another process changed the file meanwhile (our choice);
the last one is written in any case."""

_one_at_a_time = threading.Lock()


def file_stamp(path: Path) -> tuple[int, int, int]:
    """Return what changes when a file is replaced: time, size and number; zeros without a file."""
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0, 0
    return found.st_mtime_ns, found.st_size, found.st_ino


@functools.lru_cache(maxsize=64)
def _tell_once(path: Path, why: str) -> None:
    log.warning("%s: %s. The device is checked anew instead.", path, why)


@dataclass
class _Content:
    """The file. spoilt: per device, why and when (seconds since 1970) it was last spoilt."""

    entries: list[Remembered] = field(default_factory=lambda: list[Remembered]())
    spoilt: dict[str, tuple[str, float]] = field(
        default_factory=lambda: dict[str, tuple[str, float]]()
    )


class ProbeCache:
    """The file. Every method is safe to call with a folder that is missing, full or read-only."""

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / FILE_NAME

    def find(self, key: CacheKey, stages: frozenset[int], lost: str | None) -> Remembered | None:
        """Return the newest entry for this key that covers ``stages`` and still holds.

        Args:
            lost: why the device was lost in this process, None if it was not. A judgement from
                before that does not hold.
        A battery that stopped early covers everything: more checks could not change its verdict.
        """
        for entry in reversed(self._read().entries):
            covers = stages <= entry.battery.stages or entry.status == "retreat"
            if entry.stale or not covers or (lost is not None and entry.after_fault != lost):
                continue
            if entry.key.matches(key):
                return entry
        return None

    def was_seen(self, selector: str) -> bool:
        """True if any entry found a device under this name, on any boot."""
        return any(e.key.selector == selector and e.key.is_identified for e in self._read().entries)

    def keep(self, entry: Remembered) -> None:
        """Add an entry; it takes the place of the one with the same key.

        A device that was spoilt after its checks began, here or by another process, stays spoilt.
        """

        def change(content: _Content) -> None:
            now = time.time()
            begun = entry.when - entry.battery.seconds if entry.when else now
            reason, spoilt_at = content.spoilt.get(entry.key.selector, ("", 0.0))
            late = begun < spoilt_at <= now
            kept = [old for old in content.entries if not old.key.matches(entry.key)]
            new = replace(entry, stale=entry.stale or reason) if late else entry
            content.entries = [*kept, new][-MOST_ENTRIES:]

        self._change(change)

    def spoil(self, selector: str, reason: str) -> None:
        """Make every entry of a device invalid, for example after it was lost in a run.

        Also one whose checks are under way in another process.
        """
        reason = reason or "spoilt"

        def change(content: _Content) -> None:
            content.entries = [
                replace(e, stale=reason) if e.key.selector == selector else e
                for e in content.entries
            ]
            content.spoilt.pop(selector, None)
            content.spoilt[selector] = (reason, time.time())
            for old in list(content.spoilt)[:-MOST_ENTRIES]:
                del content.spoilt[old]

        self._change(change)

    def _change(self, change: Callable[[_Content], None]) -> None:
        """Read, change and replace the file; do it anew if it was replaced meanwhile."""
        if self._path is None:
            return
        with _one_at_a_time:
            for left in reversed(range(TRIES)):
                stamp = file_stamp(self._path)
                content = self._read()
                change(content)
                if self._write(content, None if left == 0 else stamp):
                    return

    def _read(self) -> _Content:
        if self._path is None:
            return _Content()
        try:
            data: Any = json.loads(self._path.read_text(encoding="utf-8"))
            if data["format"] != FORMAT:
                return _Content()
            items: object = data["entries"]
            if not isinstance(items, list):
                raise TypeError(f"entries is a {type(items).__name__}")
            spoilt = _spoilt_from(data.get("spoilt", {}))
        except FileNotFoundError:
            return _Content()
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            _tell_once(self._path, f"It cannot be read ({type(e).__name__}: {str(e)[:200]})")
            return _Content()
        entries: list[Remembered] = []
        for item in cast("list[object]", items):
            try:
                entries.append(entry_from(item))
            except ValueError as e:
                _tell_once(self._path, f"An entry is left out, {e}")
        return _Content(entries, spoilt)

    def _write(self, content: _Content, stamp: tuple[int, int, int] | None) -> bool:
        """Replace the file; False, with nothing done, if it is no longer the one with ``stamp``."""
        assert self._path is not None
        data = {
            "format": FORMAT,
            "entries": [entry_to(entry) for entry in content.entries],
            "spoilt": {
                name: {"why": why, "when": when} for name, (why, when) in content.spoilt.items()
            },
        }
        part = self._path.with_name(f"{FILE_NAME}.{os.getpid()}.{threading.get_ident()}.part")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(data, indent=1, default=str), encoding="utf-8")
            if stamp is not None and file_stamp(self._path) != stamp:
                part.unlink()
                return False
            os.replace(part, self._path)
        except OSError as e:
            log.warning("The preflight cannot be kept in %s: %s", self._path, e)
            with contextlib.suppress(OSError):
                part.unlink()
        return True


def _spoilt_from(data: object) -> dict[str, tuple[str, float]]:
    """Return the marks that can be read; one that makes no sense is left out."""
    marks: dict[str, tuple[str, float]] = {}
    if not isinstance(data, dict):
        return marks
    for name, mark in cast("dict[str, object]", data).items():
        if not isinstance(mark, dict):
            continue
        found = cast("dict[str, object]", mark)
        why, when = found.get("why"), found.get("when")
        if isinstance(why, str) and isinstance(when, float) and math.isfinite(when):
            marks[name] = (why, when)
    return marks
