"""The device ComfyUI computes on: its facts, its profile, the user's settings. Asked once.

Everything that decides by device goes through ``machine()``, so a simulated one can take its place.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import comfy.model_management as mm
import folder_paths

from ..supir.settings import load_settings
from ..xpu.device import DeviceFacts, device_identity, facts_from_mapping, probe_facts
from ..xpu.device_profiles import Profile, ProfileSet, load_profiles
from ..xpu.probe import cache_key
from ..xpu.probe_facts import apply_measured
from ..xpu.probe_types import Verdict
from ..xpu.processor_rates import measure_processor
from .health import Health

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
        if self.guard_core in ("True", "False"):
            raise ValueError(
                "guard_core is off, on, no, yes, false or true without quotes, which YAML reads as a "
                'boolean; write guard_core: "warn" or guard_core: "block".'
            )
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
        health: the preflight's judgement of the device; None where nothing is judged: on anything
            but a real Intel GPU, unless a simulation brings its own.
        settings_problem: why the user's settings are not in force, empty if they are.
    """

    facts: DeviceFacts
    profile: Profile
    simulated: bool = False
    guard_core: str = "warn"
    health: Health | None = None
    settings_problem: str = ""

    @property
    def verdict(self) -> Verdict | None:
        """The judgement as it is known now; asking starts no process."""
        found = None if self.health is None else self.health.known()
        return None if found is None else found.verdict

    @property
    def measured(self) -> DeviceFacts:
        """The facts, with what the preflight measured in place of guesses."""
        verdict = self.verdict
        return self.facts if verdict is None else apply_measured(self.facts, verdict)

    @property
    def workarounds(self) -> Mapping[str, str]:
        """The ways a degraded device must be used in, by class of operations."""
        verdict = self.verdict
        return verdict.workarounds if verdict and verdict.status == "degraded" else {}

    def now(self) -> DeviceFacts:
        """Return the facts with what was measured and the memory that is free at this moment."""
        if self.simulated:
            return self.measured
        device = mm.get_torch_device()
        return replace(self.measured, free_bytes=int(mm.get_free_memory(device)))


_machine: Machine | None = None


def settings_path() -> str:
    """Return where the user's settings are looked for."""
    return os.path.join(folder_paths.get_user_directory(), SETTINGS_FILE)


def read_machine() -> Machine:
    """Ask for the device's facts and read the user's settings.

    Raises: SettingsError or ProfileError naming file and key when the user's settings are wrong.
    """
    path = settings_path()
    problem = settings_problem(path)
    if problem:
        log.warning("SUPIR XPU: %s", problem)
    found = os.path.isfile(path)
    user = load_settings(UserSettings, path) if found else UserSettings()
    profiles: ProfileSet = load_profiles(Path(path) if user.profiles else None)
    device = mm.get_torch_device()
    memory = (int(mm.get_free_memory(device)), int(mm.get_total_memory(device)))
    facts = probe_facts(device, memory=memory)
    if device.type == "cpu":
        facts = replace(facts, **asdict(measure_processor()))
    if user.facts:
        facts = facts_from_mapping(user.facts)
        log.warning("Device facts are taken from %s: %s (%s)", path, facts.name, facts.kind)
    profile, health = profiles.pick(facts), None
    if device.type == "xpu" and facts.is_xpu:
        name, driver = device_identity(device)
        key = cache_key(str(device), uuid_or_name=name, driver=driver)
        health = Health(key, Path(folder_paths.get_user_directory()))
    return Machine(facts, profile, bool(user.facts), user.guard_core, health, problem)


def settings_problem(path: str) -> str:
    """Return why a settings file that is there is not one; empty if it is, or there is none."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        if not os.path.islink(path):
            return ""
        what = "is a link to nothing"
    except OSError as e:
        what = f"cannot be looked at ({e.strerror or e})"
    else:
        if stat.S_ISREG(mode):
            return ""
        what = "is a folder" if stat.S_ISDIR(mode) else "is not a file"
    return f"{path} {what}, so the default settings are used. Put a text file there, or remove it."


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
