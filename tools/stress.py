"""``run.py stress``: load the GPU for some minutes the way the first crash report did, guarded.

Runs in the Python that calls it and sets nothing up. The work is in a process of its own
(``stress_loop.py``); this one watches it, ends it when it is silent, and says what became of it.
Imports only the standard library until it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import stress_log
from doctor import device_name
from stress_loop import Job
from the_pack import ROOT, load

FINE, ANOMALY, UNUSABLE, INTERRUPTED = 0, 1, 2, 130
"""Exit codes: nothing wrong; stopped at something wrong; not started; Ctrl-C."""

LOOP = Path(__file__).with_name("stress_loop.py")
LOG = ROOT / "output" / "stress.jsonl"

LONGEST_MINUTES = 60.0
LATENT_CELLS = (8, 512)
CONSENT = """\
This loads {device} without a break for {minutes:g} minute(s): attention in a loop over query rows in
SDXL's sizes at {width}x{height} px, with convolutions between. On a driver with the fault it looks for,
the computer can crash or freeze. Save your work, close other programs and ComfyUI.
A line is written to {log} before every burst, so the next start can say where a crash was.
"""


@dataclass(frozen=True)
class Deadlines:
    """Seconds of silence before the loop counts as hanging (our choice).

    start_s: until torch is imported and the work is counted. first_s: each of the first bursts, which
    may compile kernels for minutes. least_s, factor: any later one, at least so long and so many
    times the usual one. exit_s: until an ended process is gone.
    """

    start_s: float = 180.0
    first_s: float = 600.0
    least_s: float = 30.0
    factor: float = 10.0
    exit_s: float = 10.0


@dataclass
class Progress:
    """What the loop has said so far."""

    launches: int = 0
    burst: int = 0
    seconds: list[float] = field(default_factory=lambda: list[float]())
    ended: str = ""

    @property
    def usual_s(self) -> float:
        """Median seconds of a burst, 0 before the first ended."""
        return sorted(self.seconds)[len(self.seconds) // 2] if self.seconds else 0.0

    def line(self) -> str:
        """Say how far it came: bursts, launches and rate."""
        done, spent = len(self.seconds), sum(self.seconds)
        rate = done * self.launches / spent if spent > 0 else 0.0
        return (
            f"{done} bursts in {spent:.0f} s, at least {done * self.launches} launches, {rate:.0f} "
            f"launches/s, {self.usual_s:.2f} s per burst"
        )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Take the command line apart."""
    parser = argparse.ArgumentParser(
        prog="run.py stress",
        description="Load the GPU for some minutes and stop at the first thing that is wrong: an "
        "error, silence, values that are not finite or change, a burst that takes far too long.",
    )
    parser.add_argument("--minutes", type=float, default=5.0,
                        help=f"how long, up to {LONGEST_MINUTES:g} (default %(default)s)")  # fmt: skip
    parser.add_argument("--yes", action="store_true", help="do not ask; for scripts")
    parser.add_argument("--device", default="xpu:0", help="torch device (default %(default)s)")
    parser.add_argument("--latent", type=int, default=168, metavar="CELLS",
                        help="side of the latent; 168 is a picture of 1344 px (default %(default)s)")  # fmt: skip
    parser.add_argument("--rows", type=int, default=512,
                        help="query rows of a piece, as reported 512 (default %(default)s)")  # fmt: skip
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="float16")
    options = parser.parse_args(list(arguments))
    try:
        options.device = device_name(options.device)
    except ValueError as error:
        parser.error(str(error))
    low, high = LATENT_CELLS
    if not 0 < options.minutes <= LONGEST_MINUTES:
        parser.error(
            f"--minutes is {options.minutes:g}; give more than 0, up to {LONGEST_MINUTES:g}."
        )
    if not low <= options.latent <= high or options.rows < 1:
        parser.error(f"--latent is {options.latent} and --rows {options.rows}; give {low} to {high} "
                     "cells and at least 1 row.")  # fmt: skip
    return options


def main(
    arguments: Sequence[str],
    *,
    log: Path = LOG,
    ask: Callable[[str], str] = input,
    deadlines: Deadlines | None = None,
    job: Job | None = None,
) -> int:
    """Run the command; return its exit code.

    Args:
        log: the breadcrumb file. ask: asks the user. deadlines, job: replaceable, for tests.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace", line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    options = parse(arguments)
    try:
        boot = load("xpu.boot")
    except (ImportError, OSError) as error:
        print(
            f"The pack cannot be imported by {sys.executable} ({error}). Use ComfyUI's own Python."
        )
        return UNUSABLE
    before, damaged = stress_log.last_unfinished(log, boot)
    if damaged:
        print(f"{log} holds {damaged} damaged line(s), which are left out.")
    if before is not None:
        print(before.message)
        if before.kind == "running":
            return UNUSABLE
    job = job or Job(options.device, options.latent, options.latent, rows=options.rows,
                     dtype=options.dtype, seconds=options.minutes * 60)  # fmt: skip
    if not options.yes and not agreed(options, log, ask):
        print("Nothing was started.")
        return UNUSABLE
    try:
        stress_log.start_session(log, asdict(boot.current_owner()), job.device)
    except OSError as error:
        print(f"{log} cannot be written ({error}); without it a crash would leave no trace.")
        return UNUSABLE
    return watched(job, log, deadlines or Deadlines())


def agreed(options: argparse.Namespace, log: Path, ask: Callable[[str], str]) -> bool:
    """Say what will happen and ask for the user's word; False without a console to ask on."""
    side = options.latent * 8
    print(
        CONSENT.format(
            device=options.device, minutes=options.minutes, width=side, height=side, log=log
        )
    )
    try:
        return ask("Type yes to start: ").strip().lower() in ("yes", "y")
    except (EOFError, KeyboardInterrupt, OSError):
        print("There is nobody to ask; use --yes.")
        return False


def watched(job: Job, log: Path, deadlines: Deadlines) -> int:
    """Run the loop, end it if it is silent, and say what became of it."""
    parent = asdict(load("xpu.boot").current_owner())
    message = json.dumps({"job": asdict(job), "breadcrumbs": str(log), "parent": parent})
    env = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    env.pop("PYTHONSAFEPATH", None)  # it finds its modules beside itself
    command = [sys.executable, "-X", "faulthandler", str(LOOP), message]
    progress, code = Progress(), ANOMALY
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, env=env)
    try:
        ended = listen(process, progress, deadlines)
    except KeyboardInterrupt:
        ended, code = "stopped by the user", INTERRUPTED
    end(process, ended, deadlines)
    with contextlib.suppress(OSError):
        stress_log.end_session(log, ended)
    if progress.burst == 0 and ended.startswith("error"):
        print(f"{job.device} cannot be used here ({ended}). Run: python run.py doctor")
        return UNUSABLE
    print(progress.line())
    if ended == "done":
        print("Nothing went wrong. That is no proof that a longer run survives.")
        return FINE
    print(f"Stopped in burst {progress.burst}: {ended}")
    if code == ANOMALY:
        print("Report it with: python run.py doctor --report report.zip")
    return code


def listen(process: subprocess.Popen[bytes], progress: Progress, deadlines: Deadlines) -> str:
    """Follow the loop; return what ended it."""
    lines: queue.Queue[bytes | None] = queue.Queue()

    def pump() -> None:
        assert process.stdout is not None
        for row in iter(process.stdout.readline, b""):
            lines.put(row)
        lines.put(None)

    threading.Thread(target=pump, daemon=True).start()
    granted, said = deadlines.start_s, time.monotonic()
    while True:
        try:
            row = lines.get(timeout=granted)
        except queue.Empty:
            return f"silence: no answer for {granted:.0f} s and no error"
        if row is None:
            return f"death: the process ended by itself ({exit_text(process)})"
        take(row, progress)
        if progress.ended:
            return progress.ended
        first = len(progress.seconds) < 3
        granted = deadlines.first_s if first else max(
            deadlines.least_s, deadlines.factor * progress.usual_s
        )  # fmt: skip
        if time.monotonic() - said > 10.0:
            said = time.monotonic()
            print(f"  {progress.line()}")


def take(row: bytes, progress: Progress) -> None:
    """Note one line of the loop; what makes no sense is left out."""
    try:
        line: Any = json.loads(row)
        event = line["event"]
        if event == "ready":
            progress.launches = int(line["launches"])
            print(f"One burst makes at least {progress.launches} launches.")
        elif event == "before":
            progress.burst = int(line["burst"])
        elif event == "after":
            progress.seconds.append(float(line["seconds"]))
        elif event == "end":
            progress.ended = str(line["ended"])
    except (ValueError, KeyError, TypeError):
        return


def exit_text(process: subprocess.Popen[bytes]) -> str:
    """Return the exit code of a process that has closed its output, in words."""
    try:
        return str(load("xpu.probe_process").exit_words(process.wait(5.0)))
    except subprocess.TimeoutExpired:
        return "it closed its output"


def end(process: subprocess.Popen[bytes], ended: str, deadlines: Deadlines) -> None:
    """See that the loop is gone. It is ended once; one that stays is left behind, not waited for."""
    if ended == "done":
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(deadlines.exit_s)
    if process.poll() is None:
        process.kill()
        try:
            process.wait(deadlines.exit_s)
        except subprocess.TimeoutExpired:
            print(f"Process {process.pid} cannot be ended; restart the computer.")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
