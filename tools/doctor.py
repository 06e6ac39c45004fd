"""``run.py doctor``: say whether this machine's Intel GPU can be trusted, in the Python that calls it.

Sets nothing up and imports only the standard library until it runs. Close ComfyUI first: the checks
need the device's memory and disturb a running job.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from the_pack import ROOT, load

JOURNAL_FILE = "supir_xpu_journal.sqlite3"
"""The crash journal in ComfyUI's user folder; nodes/journal.py gives it that name."""

FINE, RETREAT, UNUSABLE, INTERRUPTED = 0, 1, 2, 130
"""Exit codes: usable, or no XPU at all; not to be used; could not be asked; Ctrl-C."""


DEVICE = re.compile(r"cpu|xpu(:([0-9]|[1-9][0-9]|1[01][0-9]|12[0-7]))?")
"""Devices that can be asked; torch numbers them up to 127."""


def device_name(text: str) -> str:
    """Return a device as the nodes call it, for example ``xpu:0`` for ``xpu``.

    Raises: ValueError in one sentence if there can be no such device.
    """
    if DEVICE.fullmatch(text) is None:
        raise ValueError(
            f"--device is {text!r:.60}; give cpu, xpu or xpu:N with a number from 0 to 127."
        )
    return "xpu:0" if text == "xpu" else text


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Take the command line apart."""
    parser = argparse.ArgumentParser(
        prog="run.py doctor",
        description="Try this machine's Intel GPU in child processes and say whether it can be "
        "trusted. Takes about a minute, longer where kernels are compiled at first use. "
        "Close ComfyUI first.",
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="write a report for the maker "
                        "of the driver, without user names and home folders; .zip adds the raw results")  # fmt: skip
    parser.add_argument("--user", type=Path, metavar="FOLDER", help="ComfyUI's user folder, whose "
                        "journal goes into the report (found where this folder is in custom_nodes)")  # fmt: skip
    parser.add_argument("--device", default="xpu:0", help="cpu, xpu or xpu:N (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="the simplest operations only")
    parser.add_argument("--cache", type=Path, metavar="FOLDER", help="keep the verdict here instead "
                        "of in ComfyUI's user folder, where the nodes look for it")  # fmt: skip
    options = parser.parse_args(list(arguments))
    try:
        options.device = device_name(options.device)
    except ValueError as error:
        parser.exit(UNUSABLE, f"{error}\n")
    return options


def main(arguments: Sequence[str], run: Callable[..., Any] | None = None) -> int:
    """Run the command; return its exit code.

    Args:
        run: takes the place of ``xpu.probe.preflight``, for tests.
    """
    for stream in (sys.stdout, sys.stderr):  # device names hold signs no old console has
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace", line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    options = parse(arguments)
    try:
        probe = load("xpu.probe")
    except (ImportError, OSError) as error:  # OSError: a library of torch does not load
        print(
            f"torch cannot be imported by {sys.executable} ({error}). Run this with ComfyUI's own Python."
        )
        return UNUSABLE
    types, report = load("xpu.probe_types"), load("xpu.probe_report")
    user = options.user or user_folder()
    groups = types.QUICK_STAGES if options.quick else types.FULL_STAGES
    request = types.ProbeRequest(device=options.device, groups=groups)
    try:
        folder = options.cache or user
        found = (run or probe.preflight)(request, folder, refresh=True, progress=_Progress())
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        print(f"The checks cannot be started: {error}", file=sys.stderr)
        return UNUSABLE
    verdict = found.verdict
    missing = verdict.status == "absent" or verdict.criterion == "no-driver"
    lines = [report.absent_line(verdict)] if missing else report.verdict_lines(verdict)
    print("\n".join(lines))
    if options.report is not None:
        try:
            write_report(options.report, found, report, journal_sections(user))
        except OSError as error:
            print(f"The report cannot be written: {error}", file=sys.stderr)
            return UNUSABLE
        print(f"Report: {options.report}")
    return FINE if missing or verdict.status != "retreat" else RETREAT


def user_folder(root: Path = ROOT) -> Path | None:
    """Return the user folder of the ComfyUI this folder is installed in; None if it is in none."""
    folder = root.parents[1] / "user"
    return folder if root.parent.name == "custom_nodes" and folder.is_dir() else None


def journal_sections(user: Path | None) -> dict[str, str]:
    """Return the journal's parts of the report: last plan, last phases, deaths."""
    if user is None:
        return {"Journal": "not looked for: name ComfyUI's user folder with --user"}
    return load("xpu.journal_report").journal_sections(user / JOURNAL_FILE)


def write_report(path: Path, found: Any, report: Any, sections: Mapping[str, str]) -> None:
    """Write the report as text, or with the raw results as a zip. Raises: OSError."""
    private = report.Private.here()
    text = report.vendor_report(found.verdict, found.battery, private=private, sections=sections)
    if path.suffix.lower() != ".zip":
        path.write_text(text, encoding="utf-8")
        return
    raw = [asdict(check) for check in found.battery.checks]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("report.txt", text)
        lines = json.dumps(raw, indent=1, default=str, ensure_ascii=False)
        archive.writestr("checks.json", report.scrub(lines, private))


class _Progress:
    """Tells each group of checks once, and whenever kernels are being compiled.

    Says nothing about the first group: without an XPU nothing follows it, and one line is enough.
    """

    def __init__(self) -> None:
        self._said = ""

    def __call__(self, text: str) -> None:
        group = text.partition(": ")[0]
        if "compiling kernels" in text:
            print(f"  {text}", file=sys.stderr)
        elif self._said and group != self._said:
            print(f"  trying {group}", file=sys.stderr)
        self._said = group


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
