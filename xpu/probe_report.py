"""A preflight as text: lines for a person, and a report for the maker of the driver.

The report names software, the device and what failed, and nothing about who owns the machine.
Reads no file and asks no device.
"""

from __future__ import annotations

import getpass
import os
import platform
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from .probe_libraries import mixed_versions
from .probe_process import GPU_PREFIXES
from .probe_types import CLASS_WORDS, Battery, Check, Measured, Verdict

HEADLINES = {
    "healthy": "The device can be used.",
    "degraded": "The device can be used with care.",
    "retreat": "Do not use this device.",
    "absent": "There is no XPU.",
}
HOST_DEVICES = {
    "cpu": "the processor (CPU)",
    "cuda": "the CUDA or ROCm device",
    "mps": "the Apple GPU (MPS)",
}
_PICTURES = r"png|jpe?g|webp|gif|bmp|tiff?|avif|heic|exr|mp4|webm|mov|mkv"


@dataclass(frozen=True)
class Private:
    """What must not leave the machine: names of persons and of the machine, home folders."""

    names: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    homes: tuple[str, ...] = ()

    @classmethod
    def here(cls, environ: Mapping[str, str] | None = None) -> Private:
        """Return what this machine and its environment call the user, the host and the home."""
        env = os.environ if environ is None else environ
        names = {env.get(key, "") for key in ("USER", "USERNAME", "LOGNAME")}
        hosts = {env.get(key, "") for key in ("COMPUTERNAME", "HOSTNAME")}
        homes = {env.get(key, "") for key in ("HOME", "USERPROFILE")}
        if environ is None:
            try:
                names.add(getpass.getuser())
                homes.add(str(Path.home()))
            except (OSError, KeyError, ImportError, RuntimeError):
                pass  # a process without a name or a home has none to hide
            hosts |= {socket.gethostname(), platform.node()}
        hosts |= {name.split(".")[0] for name in hosts}
        folders = {re.split(r"[\\/]", home.rstrip("\\/"))[-1] for home in homes}
        return cls(
            _longest_first(names | folders),
            _longest_first(hosts - {"localhost"}),
            _longest_first(homes - {"/"}),
        )


def _longest_first(words: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({word for word in words if word}, key=lambda w: (-len(w), w)))


def scrub(text: str, private: Private) -> str:
    """Return the text without home paths, user, host and picture names.

    Home folders of other people go too. Case and the kind of slash do not matter.
    """
    for home in private.homes:
        parts = [re.escape(part) for part in re.split(r"[\\/]+", home) if part]
        lead = r"[\\/]*" if home[:1] in "\\/" else ""
        text = re.sub(
            lead + r"[\\/]+".join(parts) + r"(?![A-Za-z0-9_-])", "<home>", text, flags=re.I
        )
    text = re.sub(
        r"(?:[A-Za-z]:)?[\\/]+(?:Users|home)[\\/]+"
        r"(?:[^\\/:*?\"<>|\r\n]+(?=[\\/])|[^\\/\s:*?\"'<>|]+)",
        "<home>",
        text,
        flags=re.I,
    )
    text = re.sub(
        rf"\"[^\"\n]*\.(?:{_PICTURES})\"|'[^'\n]*\.(?:{_PICTURES})'", "<picture>", text, flags=re.I
    )
    text = re.sub(rf"[^\s\\/\"']+\.(?:{_PICTURES})\b", "<picture>", text, flags=re.I)
    for word, names in (("<host>", private.hosts), ("<user>", private.names)):
        for name in names:
            pattern = rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])"
            text = re.sub(pattern, word, text, flags=re.I)
    return text


def absent_line(verdict: Verdict) -> str:
    """Return the one line for a machine without a usable XPU."""
    device = HOST_DEVICES.get(verdict.host_device, verdict.host_device)
    hint = f" If this computer has an Intel GPU: {verdict.action}" if verdict.action else ""
    line = f"{verdict.reason.rstrip('.')}; ComfyUI will use {device}.{hint}"
    return " ".join(line.split())


def verdict_lines(verdict: Verdict) -> list[str]:
    """Return the verdict in words: what, why, what to do, where else to go, what was measured."""
    if verdict.status == "absent":
        return [absent_line(verdict)]
    name = f" ({verdict.device_name})" if verdict.device_name else ""
    lines = [
        f"{verdict.status.upper()}{name}: {HEADLINES[verdict.status]}",
        f"Decided by: {verdict.criterion}. {verdict.reason}",
    ]
    if verdict.action:
        lines.append(f"What to do: {verdict.action}")
    lines += [
        f"Workaround for {CLASS_WORDS.get(kind, kind)}: {way}"
        for kind, way in verdict.workarounds.items()
    ]
    if verdict.dropped_dtypes:
        lines.append(f"Not used on this device: {', '.join(verdict.dropped_dtypes)}")
    if verdict.retreats:
        lines.append("Where to go instead, in this order:")
        lines += [f"  {n}. {option.sentence}" for n, option in enumerate(verdict.retreats, 1)]
    lines += [f"Note: {note}" for note in verdict.notes]
    return lines + measured_lines(verdict.measured)


def measured_lines(measured: Measured) -> list[str]:
    """Return what was measured, one line each, nothing for what was not."""
    rows = (
        (measured.flops_per_s / 1e12, "{:.2f} TFLOP/s in a block like the model's"),
        (measured.bw_bytes_per_s / 1e9, "{:.1f} GB/s memory"),
        (measured.launch_s * 1e6, "{:.1f} us per launch"),
        (measured.sync_s * 1e6, "{:.1f} us more per wait"),
        (measured.h2d_bytes_per_s / 1e9, "{:.2f} GB/s to the device"),
        (measured.d2h_bytes_per_s / 1e9, "{:.2f} GB/s from the device"),
        (measured.processor_flops_per_s / 1e12, "{:.3f} TFLOP/s on the processor"),
        (measured.allocated_bytes / 2**30, "{:.2f} GiB in one allocation"),
    )
    lines = ["Measured: " + form.format(value) for value, form in rows if value > 0]
    if measured.fused_sdpa != "unknown":
        widest = measured.fused_max_dim_head
        upto = f", heads up to {widest} wide" if measured.fused_sdpa == "fused" and widest else ""
        lines.append(f"Measured: attention runs as {measured.fused_sdpa}{upto}")
    return lines


def vendor_report(
    verdict: Verdict,
    battery: Battery,
    *,
    private: Private | None = None,
    environ: Mapping[str, str] | None = None,
    sections: Mapping[str, str] | None = None,
) -> str:
    """Return the report a person can paste where drivers are reported.

    Args:
        private: what to leave out; None asks this machine.
        environ: variables to quote from; None takes this process's.
        sections: further parts by title, for example journal rows or a plan; scrubbed like the rest.
    """
    env = os.environ if environ is None else environ
    facts = battery.properties
    software = {
        "system": f"{platform.system()} {platform.release()} {platform.version()} {platform.machine()}",
        "python": battery.word("python") or platform.python_version(),
        "torch": battery.word("torch"),
        "torch was compiled for": battery.word("arch_list"),
        "driver": str(facts.get("driver_version", "not read")),
        "platform": str(facts.get("platform_name", "not read")),
    }
    parts: dict[str, Iterable[str]] = {
        "Verdict": verdict_lines(verdict),
        "Software": [f"{key}: {value}" for key, value in software.items()],
        "Device": [f"{key}: {value}" for key, value in facts.items() if key != "uuid"],
        "Libraries loaded": battery.libraries or ["none of the GPU's stack, or not readable here"],
        "Mixed versions": mixed_versions(battery.libraries) or ["none seen"],
        "Environment": _variables(env),
        "Checks": [_check_line(check) for check in battery.checks],
        "Numbers": [f"{key}: {value}" for key, value in asdict(verdict.measured).items()],
        "Warnings": battery.warnings or ["none"],
        "Standard error of the checks": battery.stderr or ["empty"],
    }
    parts.update({title: text.splitlines() for title, text in (sections or {}).items()})
    body = [f"SUPIR XPU preflight of {battery.device}, {battery.seconds:.0f} s"]
    for title, lines in parts.items():
        body += ["", f"== {title} ==", *lines]
    return scrub("\n".join(body) + "\n", Private.here() if private is None else private)


def _variables(environ: Mapping[str, str]) -> list[str]:
    lines = [
        f"{key}={value}"
        for key, value in sorted(environ.items())
        if key.upper().startswith((*GPU_PREFIXES, "OMP_", "MKL_"))
    ]
    return lines or ["none that concern the GPU"]


def _check_line(check: Check) -> str:
    words = [f"{check.stage} {check.status:7} {check.name}", f"{check.seconds:.2f} s"]
    if check.text:
        words.append(check.text.replace("\n", " "))
    if check.tried:
        words.append(f"tried {', '.join(check.tried)}: {check.workaround or 'none'} works")
    return "; ".join(words)
