"""The device ComfyUI computes on: its facts, its profile, the user's settings. Asked once.

Everything that decides by device goes through ``machine()``, so a simulated one can take its place.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import comfy.model_management as mm
import folder_paths

from ..supir.settings import load_settings
from ..xpu.device import DeviceFacts, facts_from_mapping, probe_facts
from ..xpu.device_profiles import Profile, ProfileSet, load_profiles

log = logging.getLogger(__name__)

SETTINGS_FILE = "supir_xpu.yaml"
"""The user's settings, in ComfyUI's user folder; every key is optional."""


@dataclass
class UserSettings:
    """What ``supir_xpu.yaml`` may hold.

    Attributes:
        profiles: per profile name, numbers that replace the bundled ones.
        facts: device facts that replace what was found, for simulation and odd machines.
        guard_core: ``warn`` or ``block``: what to do when a graph is queued in which ComfyUI's own
            nodes do SUPIR work that is judged too risky.
    """

    profiles: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    guard_core: str = "warn"

    def __post_init__(self) -> None:
        if self.guard_core not in ("warn", "block"):
            raise ValueError(f"guard_core is {self.guard_core!r}; set it to warn or block.")


@dataclass(frozen=True)
class Machine:
    """What is known about the device.

    Attributes:
        facts: the device; free memory is asked again by ``now()``.
        profile: limits and waits for its family and driver.
        simulated: the facts come from the user's settings, not from the device.
        guard_core: see ``UserSettings``.
    """

    facts: DeviceFacts
    profile: Profile
    simulated: bool = False
    guard_core: str = "warn"

    def now(self) -> DeviceFacts:
        """Return the facts with the memory that is free at this moment."""
        if self.simulated:
            return self.facts
        device = mm.get_torch_device()
        return replace(self.facts, free_bytes=int(mm.get_free_memory(device)))


_machine: Machine | None = None


def settings_path() -> str:
    """Return where the user's settings are looked for."""
    return os.path.join(folder_paths.get_user_directory(), SETTINGS_FILE)


def read_machine() -> Machine:
    """Ask for the device's facts and read the user's settings.

    Raises: SettingsError or ProfileError naming file and key when the user's settings are wrong.
    """
    path = settings_path()
    found = os.path.isfile(path)
    user = load_settings(UserSettings, path) if found else UserSettings()
    profiles: ProfileSet = load_profiles(Path(path) if user.profiles else None)
    device = mm.get_torch_device()
    memory = (int(mm.get_free_memory(device)), int(mm.get_total_memory(device)))
    facts = probe_facts(device, memory=memory)
    if user.facts:
        facts = facts_from_mapping(user.facts)
        log.warning("Device facts are taken from %s: %s (%s)", path, facts.name, facts.kind)
    return Machine(facts, profiles.pick(facts), bool(user.facts), user.guard_core)


def machine() -> Machine:
    """Return the device, asked once per process."""
    global _machine
    if _machine is None:
        _machine = read_machine()
    return _machine


def set_machine(value: Machine | None) -> None:
    """Put another device in place (None: ask again); for simulation."""
    global _machine
    _machine = value
