"""Remembered preflights: one JSON file in a folder the caller names.

A judgement holds for one device, driver, torch and boot. A file that cannot be read or written
costs another preflight, never a run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from .boot import same_boot
from .probe_types import Battery, Check

log = logging.getLogger(__name__)

FILE_NAME = "supir_xpu_preflight.json"
FORMAT = 1
MOST_ENTRIES = 16


@dataclass(frozen=True)
class CacheKey:
    """What a judgement holds for.

    selector: torch device, for example ``xpu:0``. device: its uuid, else its name; driver: its
    version; both empty if the device ended or blocked the process that asked.
    """

    selector: str
    device: str
    driver: str
    torch: str
    boot: str

    @property
    def is_identified(self) -> bool:
        """True if the device could be asked what it is."""
        return bool(self.device)

    def matches(self, other: CacheKey) -> bool:
        """True if both name the same device, driver, torch and boot."""
        mine = (self.selector, self.device, self.driver, self.torch)
        theirs = (other.selector, other.device, other.driver, other.torch)
        return mine == theirs and same_boot(self.boot, other.boot)


@dataclass(frozen=True)
class Remembered:
    """One entry: what was found, when (seconds since 1970), and whether something happened since."""

    key: CacheKey
    battery: Battery
    status: str
    after_fault: str = ""
    stale: str = ""
    when: float = 0.0


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
        for entry in reversed(self._read()):
            covers = stages <= entry.battery.stages or entry.status == "retreat"
            if entry.stale or not covers or (lost is not None and entry.after_fault != lost):
                continue
            if entry.key.matches(key):
                return entry
        return None

    def was_seen(self, selector: str) -> bool:
        """True if any entry found a device under this name, on any boot."""
        return any(e.key.selector == selector and e.key.is_identified for e in self._read())

    def keep(self, entry: Remembered) -> None:
        """Add an entry; it takes the place of the one with the same key."""
        kept = [old for old in self._read() if not old.key.matches(entry.key)]
        self._write([*kept, entry][-MOST_ENTRIES:])

    def spoil(self, selector: str, reason: str) -> None:
        """Make every entry of a device invalid, for example after it was lost in a run."""
        entries = self._read()
        spoilt = [replace(e, stale=reason) if e.key.selector == selector else e for e in entries]
        if spoilt != entries:
            self._write(spoilt)

    def _read(self) -> list[Remembered]:
        if self._path is None:
            return []
        try:
            data: Any = json.loads(self._path.read_text(encoding="utf-8"))
            if data["format"] != FORMAT:
                return []
            return [_entry_from(item) for item in data["entries"]]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            log.warning("%s cannot be read and is ignored: %s", self._path, e)
            return []

    def _write(self, entries: list[Remembered]) -> None:
        if self._path is None:
            return
        data = {"format": FORMAT, "entries": [_entry_to(entry) for entry in entries]}
        part = self._path.with_name(f"{FILE_NAME}.{os.getpid()}.{threading.get_ident()}.part")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(data, indent=1, default=str), encoding="utf-8")
            os.replace(part, self._path)
        except OSError as e:
            log.warning("The preflight cannot be kept in %s: %s", self._path, e)
            with contextlib.suppress(OSError):
                part.unlink()


def _entry_to(entry: Remembered) -> dict[str, Any]:
    battery = asdict(entry.battery)
    battery["stages"] = sorted(entry.battery.stages)
    return {
        "key": asdict(entry.key),
        "status": entry.status,
        "after_fault": entry.after_fault,
        "stale": entry.stale,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "when": entry.when,
        "battery": battery,
    }


def _entry_from(item: Mapping[str, Any]) -> Remembered:
    key = CacheKey(**{name: str(value) for name, value in item["key"].items()})
    return Remembered(
        key,
        battery_from_mapping(item["battery"]),
        str(item["status"]),
        str(item.get("after_fault", "")),
        str(item.get("stale", "")),
        float(item.get("when", 0.0)),
    )


def battery_from_mapping(data: Mapping[str, Any]) -> Battery:
    """Build a battery from plain data.

    Raises: KeyError, ValueError or TypeError if it is not one.
    """
    texts = {
        name: [str(text) for text in cast("list[object]", data.get(name, []))]
        for name in ("warnings", "stderr", "libraries")
    }
    return Battery(
        device=str(data["device"]),
        stages=frozenset(int(stage) for stage in data["stages"]),
        checks=[Check.from_mapping(check) for check in data["checks"]],
        complete=bool(data["complete"]),
        covered=bool(data["covered"]),
        seconds=float(data["seconds"]),
        **texts,
    )
