"""One remembered preflight as plain data: written, and read back with every value checked.

A file on disk can hold anything. ``entry_from`` returns an entry that this program could have
written, or raises; nothing after it needs to doubt a value. Pure.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, cast, get_args

from .boot import same_boot
from .probe_types import OP_CLASSES, Battery, Check, Status
from .probe_verdict import decide

WAYS = dict.fromkeys(range(2, 7), ("contiguous", "dtype", "cpu_block", "math")) | {
    OP_CLASSES.index("silence"): ("read_back",)
}
"""Workarounds a check of each stage can have found."""

COUNTS = ("allocated", "size", "free_bytes", "total_bytes", "devices", "dim_head", "threads")
WORDS = ("kernel", "host_device", "torch", "python", "torch_folder", "block_dtype")
PROPERTY_WORDS = ("name", "uuid", "driver_version", "type", "vendor", "platform_name", "version")
PROPERTY_COUNTS = ("architecture", "total_memory")

MOST_COUNT = 2**63 - 1
MOST_RATE = 1e18
"""Bytes or operations per second no device reaches (our choice)."""
LONGEST_S = 1e7
LAST_TIME_S = 1e11
"""Seconds since 1970, about the year 5138: anything later is no time (our choice)."""
DEEPEST = 4


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


def entry_to(entry: Remembered) -> dict[str, Any]:
    """Return an entry as JSON values."""
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


def entry_from(item: object) -> Remembered:
    """Build an entry from plain data.

    Raises: ValueError naming what is wrong: a key that is missing, a type, a range, a word nobody
        writes, or a status that the checks do not lead to.
    """
    data = _mapping(item, "entry")
    names = [field.name for field in fields(CacheKey)]
    key_data = _mapping(_of(data, "key"), "key")
    _need(set(key_data) == set(names), "key", sorted(key_data))
    key = CacheKey(**{name: _text(key_data, name) for name in names})
    battery = _battery(_mapping(_of(data, "battery"), "battery"))
    _need(battery.device == key.selector, "battery.device", battery.device)
    when = _number(_of(data, "when"), "when", LAST_TIME_S)
    status = _text(data, "status")
    try:
        anew = decide(battery).status
    except (
        ArithmeticError,
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
        StopIteration,
    ) as e:
        # Whatever a rule stumbles over is not a value a check has ever written.
        raise ValueError(f"no judgement can be made of it ({type(e).__name__}: {e})") from e
    if status != anew:
        raise ValueError(f"status is {status!r:.40}, its checks say {anew!r}")
    texts = (_text(data, "after_fault"), _text(data, "stale"))
    return Remembered(key, battery, status, *texts, when)


def _battery(data: Mapping[str, Any]) -> Battery:
    stages = _list(_of(data, "stages"), "stages")
    for stage in stages:
        _need(_is_whole(stage, len(OP_CLASSES) - 1), "stages", stage)
    checks = [_check(_mapping(c, "check")) for c in _list(_of(data, "checks"), "checks")]
    _need(bool(checks), "checks", "empty")
    return Battery(
        device=_text(data, "device"),
        stages=frozenset(cast("list[int]", stages)),
        checks=checks,
        warnings=_texts(_of(data, "warnings"), "warnings"),
        stderr=_texts(_of(data, "stderr"), "stderr"),
        libraries=_texts(_of(data, "libraries"), "libraries"),
        complete=_flag(data, "complete"),
        covered=_flag(data, "covered"),
        seconds=_number(_of(data, "seconds"), "seconds", LONGEST_S),
    )


def _check(data: Mapping[str, Any]) -> Check:
    stage, status = _of(data, "stage"), _of(data, "status")
    _need(_is_whole(stage, len(OP_CLASSES) - 1), "check.stage", stage)
    _need(isinstance(status, str) and status in get_args(Status), "check.status", status)
    ways = WAYS.get(stage, ())
    way, tried = _text(data, "workaround"), _texts(_of(data, "tried"), "check.tried")
    _need(not way or (way in ways and way in tried), "check.workaround", way)
    _need(set(tried) <= set(ways), "check.tried", tried)
    name = _text(data, "name")
    numbers = _numbers(_mapping(_of(data, "numbers"), "check.numbers"))
    _need(bool(name), "check.name", name)
    if OP_CLASSES[stage] == "allocation" and status in ("error", "wrong"):
        named = re.match(r"allocate [0-9]+(\.[0-9]+)? (GiB|bytes)\b", name)
        _need(bool(numbers.get("size")) or named is not None, "check.name", name)
    return Check(
        stage=stage,
        name=name,
        status=cast("Status", status),
        dtype=_text(data, "dtype"),
        text=_text(data, "text"),
        workaround=way,
        tried=tuple(tried),
        seconds=_number(_of(data, "seconds"), "check.seconds", LONGEST_S),
        numbers=numbers,
    )


def _numbers(data: Mapping[str, Any]) -> dict[str, Any]:
    """Check what was measured: the numbers that are used by name, the rest by kind."""
    for key, value in data.items():
        where = f"numbers.{key:.40}"
        if key == "properties":
            _properties(_mapping(value, where))
        elif key == "arch_list":
            _texts(value, where)
        elif key in WORDS:
            _need(isinstance(value, str), where, value)
        elif key in COUNTS:
            _need(_is_whole(value, MOST_COUNT), where, value)
        elif key.endswith("_per_s"):
            rate = _number(value, where, MOST_RATE)
            _need(rate == 0 or rate >= 1, where, value)
        elif key.endswith("_s"):
            _number(value, where, LONGEST_S)
        elif key == "error":
            _number(value, where, math.inf)
        else:
            _plain(value, where)
    return dict(data)


def _properties(data: Mapping[str, Any]) -> None:
    for key, value in data.items():
        where = f"properties.{key:.40}"
        if key in PROPERTY_WORDS:
            _need(isinstance(value, str), where, value)
        elif key in PROPERTY_COUNTS:
            _need(_is_whole(value, MOST_COUNT), where, value)
        else:
            _plain(value, where)


def _plain(value: object, where: str, depth: int = 0) -> None:
    """Any JSON value, if its numbers are finite and it is not nested deeply."""
    _need(depth <= DEEPEST, where, "nested too deeply")
    if isinstance(value, (list, dict)):
        inner = cast("dict[str, object]", value).values() if isinstance(value, dict) else value
        for part in cast("list[object]", inner):
            _plain(part, where, depth + 1)
    elif isinstance(value, int):
        _need(abs(value) <= MOST_COUNT, where, value)
    elif isinstance(value, float):
        _need(math.isfinite(value), where, value)


def _need(holds: bool, where: str, value: object) -> None:
    if not holds:
        raise ValueError(f"{where} is {value!r:.60}")


def _of(data: Mapping[str, Any], key: str) -> Any:
    if key not in data:
        raise ValueError(f"{key} is missing")
    return data[key]


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    _need(isinstance(value, dict), where, value)
    return cast("dict[str, Any]", value)


def _list(value: object, where: str) -> list[object]:
    _need(isinstance(value, (list, tuple)), where, value)
    return list(cast("list[object]", value))


def _texts(value: object, where: str) -> list[str]:
    items = _list(value, where)
    for item in items:
        _need(isinstance(item, str), where, item)
    return cast("list[str]", items)


def _text(data: Mapping[str, Any], key: str) -> str:
    value = _of(data, key)
    _need(isinstance(value, str), key, value)
    return value


def _flag(data: Mapping[str, Any], key: str) -> bool:
    value = _of(data, key)
    _need(isinstance(value, bool), key, value)
    return value


def _is_whole(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _number(value: object, where: str, most: float) -> float:
    """Return a finite number from 0 to ``most``."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    _need(is_number and 0 <= cast("float", value) <= most, where, value)  # NaN fails this too
    try:
        number = float(cast("float", value))
    except OverflowError:
        number = math.inf
    _need(math.isfinite(number), where, value)
    return number
