"""Limits, rates and waits per device family and driver range, read from ``profiles/*.yaml``.

Owns the choice of a profile and the merge with the user's own settings. Every number in those
files carries its source. Decides nothing about a run.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, cast

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from .errors import DeviceError

PROFILE_DIR = Path(__file__).parent / "profiles"


class ProfileError(DeviceError, ValueError):
    """A profile file, or the user's change to one, has a key or value that cannot be used."""


class DeviceKey(Protocol):
    """What chooses a profile; ``DeviceFacts`` fits. Empty text means unknown."""

    @property
    def kind(self) -> str: ...
    @property
    def family(self) -> str: ...
    @property
    def os(self) -> str: ...
    @property
    def driver(self) -> str: ...
    @property
    def name(self) -> str: ...


@dataclass(frozen=True)
class Profile:
    """What one kind of device on one range of drivers is planned with.

    Args:
        name: stable name; ``profiles.<name>`` in the user's settings changes it.
        note: why it is careful, for messages.
        careful: nothing is known about the device; it is judged as if the driver were bad.
        known_bad: machines are known to have died, so the first report's size gate applies.
        unsupported: older than what PyTorch's XPU backend supports.
        base_points: points before any plan is looked at.
        bw_bytes_per_s, flops_per_s: sustained rates for predictions.
        gap_s, heavy_gap_s: rest before a run, and after a heavy one.
        load_settle_s, image_settle_s: rest after loading weights, and between heavy images.
        alloc_limit_bytes: largest single tensor; alloc_blocks: reaching it cannot work.
        memory_fraction: part of the device memory that may be planned for, 0 to 1.
        sustained_cap: most points from launches and busy time together.
        sources: where each number comes from, by field name.
    """

    name: str
    note: str
    careful: bool
    known_bad: bool
    unsupported: bool
    alloc_blocks: bool
    base_points: float
    bw_bytes_per_s: float
    flops_per_s: float
    gap_s: float
    heavy_gap_s: float
    load_settle_s: float
    image_settle_s: float
    alloc_limit_bytes: float
    memory_fraction: float
    sustained_cap: float
    sources: Mapping[str, str] = field(
        default_factory=lambda: cast("dict[str, str]", {}), hash=False
    )


@dataclass
class Number:
    """One number of a profile file and where it comes from."""

    value: float = MISSING
    source: str = MISSING


def _number() -> Any:
    return field(default_factory=Number)


@dataclass
class Entry:
    """One range of a profile file, as written. The match fields choose, the rest is the profile.

    os: ``windows``, ``linux`` or empty for any. driver_max, level_zero_max: last driver version of
    the range, in the two ways it is reported; a driver that cannot be read is in the range.
    guc_below: graphics firmware older than this; guc_unread: firmware version not known.
    """

    name: str = MISSING
    os: str = ""
    driver_max: str = ""
    level_zero_max: str = ""
    guc_below: str = ""
    guc_unread: bool = False
    note: str = ""
    careful: bool = False
    known_bad: bool = False
    unsupported: bool = False
    alloc_blocks: bool = False
    base_points: Number = _number()
    bw_bytes_per_s: Number = _number()
    flops_per_s: Number = _number()
    gap_s: Number = _number()
    heavy_gap_s: Number = _number()
    load_settle_s: Number = _number()
    image_settle_s: Number = _number()
    alloc_limit_bytes: Number = _number()
    memory_fraction: Number = _number()
    sustained_cap: Number = _number()


_MATCH = ("name", "os", "driver_max", "level_zero_max", "guc_below", "guc_unread")
_NUMBERS = tuple(f.name for f in fields(Entry) if str(f.type) == "Number")
_USER_KEYS = tuple(f.name for f in fields(Entry) if f.name not in _MATCH)


@dataclass(frozen=True)
class _Choice:
    """One range with the name pattern of the cards its rates belong to."""

    family: str
    card: str
    entry: Entry
    profile: Profile


@dataclass(frozen=True)
class ProfileSet:
    """All profiles of one installation, with the user's changes merged in."""

    choices: tuple[_Choice, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Return every profile name once, in file order."""
        return tuple(dict.fromkeys(c.profile.name for c in self.choices))

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """Return every profile; one name appears once per card with rates of its own."""
        return tuple(c.profile for c in self.choices)

    def pick(self, device: DeviceKey, guc: str = "") -> Profile:
        """Return the profile of a device; the careful one if nothing is known about it.

        Args:
            guc: version of the graphics firmware (Linux), empty if it could not be read.
        """
        family = device.family if device.kind == "xpu" else "other"
        known = {c.family for c in self.choices}
        family = family if family in known else "unknown"
        for choice in self.choices:
            if choice.family != family or not re.search(choice.card, device.name):
                continue
            if _in_range(choice.entry, device.os, device.driver, guc):
                return choice.profile
        raise ProfileError(f"The profiles of family '{family}' have no entry for every driver.")


def load_profiles(user_file: Path | None = None, folder: Path = PROFILE_DIR) -> ProfileSet:
    """Read the bundled profiles and merge the section ``profiles`` of the user's file.

    Args:
        user_file: ComfyUI user folder's ``supir_xpu.yaml``; None or a missing file changes nothing.
    Raises: ProfileError naming the file and the key.
    """
    changes = _user_changes(user_file) if user_file is not None and user_file.is_file() else {}
    choices: list[_Choice] = []
    base = _read(folder / "common.yaml")
    for path in sorted(folder.glob("*.yaml")):
        if path.name != "common.yaml":
            choices.extend(_choices_of(path, base, changes))
    result = ProfileSet(tuple(choices))
    for name in changes:
        if name not in result.names:
            raise ProfileError(
                f"{user_file}: 'profiles.{name}' is not a profile.{_hint(name, result.names)} "
                f"Known profiles: {', '.join(result.names)}."
            )
    return result


@functools.cache
def bundled_profiles() -> ProfileSet:
    """Return the profiles without any user changes, read once."""
    return load_profiles()


def version(text: str) -> tuple[int, ...] | None:
    """Return the first dotted number of ``text`` as integers; None if there is none.

    ``32.0.101.8629`` and ``70.65.0`` compare as tuples of their parts.
    """
    found = re.search(r"\d+(?:\.\d+)+|\d+", text)
    return tuple(int(part) for part in found.group().split(".")) if found else None


def compare_versions(a: str, b: str) -> int | None:
    """Return -1, 0 or 1 as ``a`` is older than, equal to or newer than ``b``; None if unreadable."""
    left, right = version(a), version(b)
    if left is None or right is None:
        return None
    length = max(len(left), len(right))
    left += (0,) * (length - len(left))
    right += (0,) * (length - len(right))
    return (left > right) - (left < right)


def _in_range(entry: Entry, os_name: str, driver: str, guc: str) -> bool:
    if entry.os and entry.os != _system(os_name):
        return False
    if entry.driver_max and not _driver_in_range(entry, driver):
        return False
    if entry.guc_unread:
        return version(guc) is None
    return not entry.guc_below or compare_versions(guc, entry.guc_below) == -1


def _driver_in_range(entry: Entry, driver: str) -> bool:
    """Windows reports 32.0.101.8629; the Level Zero runtime calls the same driver 1.14.37111."""
    parts = version(driver)
    if parts is None:
        return True
    last = entry.level_zero_max if parts[0] < 10 and entry.level_zero_max else entry.driver_max
    return (compare_versions(driver, last) or 0) <= 0


def _system(os_name: str) -> str:
    lowered = os_name.lower()
    if lowered.startswith("win") or lowered == "nt":
        return "windows"
    return "linux" if lowered.startswith("linux") else lowered


def _read(path: Path) -> DictConfig:
    try:
        data = OmegaConf.load(path)
    except (OSError, OmegaConfBaseException, YAMLError, UnicodeDecodeError) as e:
        raise ProfileError(f"{path} cannot be read: {e} Correct or delete the file.") from e
    if not isinstance(data, DictConfig):
        raise ProfileError(f"{path} is not made of 'key: value' lines. Correct or delete the file.")
    return data


def _choices_of(path: Path, base: DictConfig, changes: Mapping[str, Any]) -> list[_Choice]:
    data = _read(path)
    plain = cast("dict[str, Any]", OmegaConf.to_container(data))
    found: list[_Choice] = []
    for card in plain["rates"]:
        rates = {key: value for key, value in card.items() if key != "card"}
        for item in plain["ranges"]:
            change = changes.get(item["name"], {})
            try:
                merged = OmegaConf.merge(OmegaConf.structured(Entry), base, rates, item, change)
                entry = cast("Entry", OmegaConf.to_object(merged))
            except OmegaConfBaseException as e:
                where = f"profiles.{item['name']}.{e.full_key or '?'}"
                raise ProfileError(f"'{where}' cannot be used: {e.msg or e}") from e
            found.append(_Choice(plain["family"], card["card"], entry, _profile(entry)))
    return found


def _profile(entry: Entry) -> Profile:
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for item in fields(Profile):
        if item.name == "sources":
            continue
        value = getattr(entry, item.name)
        if isinstance(value, Number):
            _check_number(entry.name, item.name, value)
            sources[item.name] = value.source
            value = value.value
        values[item.name] = value
    return Profile(**values, sources=sources)


def _check_number(profile: str, key: str, number: Number) -> None:
    where = f"profiles.{profile}.{key}"
    if not 0 <= number.value < float("inf"):  # NaN fails this too
        raise ProfileError(f"'{where}' is {number.value}; it must be a number of 0 or more.")
    if key == "memory_fraction" and not 0 < number.value <= 1:
        raise ProfileError(f"'{where}' is {number.value}; it is a part of the memory, 0 to 1.")
    if not number.source.strip():
        raise ProfileError(f"'{where}' has no source.")


def _user_changes(path: Path) -> dict[str, Any]:
    """Return the user's changes per profile, with plain numbers turned into sourced ones."""
    data = cast("dict[object, Any]", OmegaConf.to_container(_read(path), resolve=False))
    section: object = data.get("profiles")
    if section is None:
        return {}
    if not isinstance(section, dict):
        raise ProfileError(f"{path}: 'profiles' must hold one block per profile name.")
    changes: dict[str, Any] = {}
    for name, block in cast("dict[object, Any]", section).items():
        where = f"profiles.{name}"
        if not isinstance(block, dict):
            raise ProfileError(f"{path}: '{where}' must hold 'key: value' lines, not {block!r}.")
        changes[str(name)] = {
            str(key): _user_value(path, f"{where}.{key}", str(key), value)
            for key, value in cast("dict[object, Any]", block).items()
        }
    return changes


def _user_value(path: Path, where: str, key: str, value: object) -> object:
    if key not in _USER_KEYS:
        raise ProfileError(
            f"{path}: '{where}' is not a setting of a profile.{_hint(key, _USER_KEYS)} Known: "
            f"{', '.join(_USER_KEYS)}."
        )
    if "${" in str(value):
        raise ProfileError(
            f"{path}: '{where}' is {value!r}; '${{' would read another value or the environment, and "
            "is not allowed. Write the value itself."
        )
    if key not in _NUMBERS:
        wanted = str if key == "note" else bool
        if not isinstance(value, wanted):
            raise ProfileError(f"{path}: '{where}' is {value!r}; it must be {wanted.__name__}.")
        return value
    source = f"set in {path.name}"
    if isinstance(value, dict):
        block = cast("dict[object, object]", value)
        extra = set(block) - {"value", "source"}
        if extra or "value" not in block:
            raise ProfileError(f"{path}: '{where}' may hold 'value' and 'source' only.")
        source, value = str(block.get("source", source)), block["value"]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ProfileError(f"{path}: '{where}' is {value!r}; it must be a number.")
    try:
        return {"value": float(value), "source": source}
    except OverflowError as e:
        raise ProfileError(
            f"{path}: '{where}' is an integer of so many digits that no number here can hold "
            f"it. Correct that key."
        ) from e


def _hint(word: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f" Did you mean '{near[0]}'?" if near else ""
