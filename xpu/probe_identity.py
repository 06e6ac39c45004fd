"""Is there a device at all, and can it be asked what it is? The first part of the verdict. Pure."""

from __future__ import annotations

import re

from .probe_types import Battery, Verdict

UPDATE = "Update the Intel graphics driver and torch, restart the computer, and run this again."

_ENUMERATION = (
    (
        r"2147483646|UR_RESULT_ERROR_UNKNOWN",
        "several-devices",
        "Let the runtime see one device only: start ComfyUI with --oneapi-device-selector "
        "level_zero:0, or set ZE_AFFINITY_MASK=0.",
    ),
    (
        r"device count is zero",
        "vanished",
        "Restart the computer; the driver has lost the device.",
    ),
    (
        r"Failed to initialize XPU devices|No XPU devices are available",
        "no-driver",
        "Install or update the Intel graphics driver (on Linux also the Level Zero loader and the "
        "compute runtime), then run this again.",
    ),
)
"""Messages of an enumeration that fails: rows 22, 26 and 27 of the fault list in docs/xpu.md."""


def judge_identity(battery: Battery, *, seen_before: bool = False) -> Verdict | None:
    """Judge stage 0; None if the device was found and could be asked.

    Args:
        seen_before: an earlier preflight found this device, so its absence is a fault.
    """
    named = {check.name: check for check in battery.checks if check.stage == 0}
    start, count = named.get("starting torch"), named.get("device count")
    if start is not None and start.status != "hang":
        return Verdict(
            "retreat", "import",
            f"torch cannot be loaded in a clean process: {start.text}.",
            "Reinstall torch for XPU in a clean environment; libraries of two versions are mixed, "
            "or one is missing.",
        )  # fmt: skip
    properties = named.get("device properties")
    if properties is not None and properties.status == "error":
        return Verdict(
            "retreat", "identity", f"The device's properties cannot be read: {properties.text}.",
            UPDATE,
        )  # fmt: skip
    if count is None or count.status in ("ok", "hang", "crash", "lost"):
        return None
    if count.status == "error":
        for pattern, criterion, action in _ENUMERATION:
            if re.search(pattern, count.text, re.IGNORECASE):
                if criterion == "no-driver" and seen_before:
                    return _vanished(count.text)
                return Verdict(
                    "retreat", criterion, f"No device can be listed: {count.text}.", action
                )
        return Verdict("retreat", "enumeration", f"No device can be listed: {count.text}.", UPDATE)
    if count.status == "wrong":
        action = "Choose one of the listed devices."
        return Verdict("retreat", "no-such-device", f"{count.text}.", action)
    return _vanished(count.text) if seen_before else _absent(count.text)


def _vanished(text: str) -> Verdict:
    return Verdict(
        "retreat", "vanished",
        f"An earlier preflight found this device and now it is gone ({text}).",
        "Restart the computer; the driver has lost the device.",
    )  # fmt: skip


def _absent(text: str) -> Verdict:
    return Verdict("absent", "absent", f"This machine has no XPU that torch can use: {text}.")
