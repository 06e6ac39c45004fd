"""Run a long command (pip) so that a person sees it working, without the noise."""

from __future__ import annotations

import queue
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

SILENCE_SECONDS = 15.0
NOISE = ("Requirement already satisfied", "  Preparing", "  Installing build", "  Getting requirem")
CHANGES = ("Installing collected packages", "Attempting uninstall")


def run_visibly(
    command: Sequence[str],
    env: dict[str, str],
    say: Callable[[str], None] = print,
    silence_seconds: float = SILENCE_SECONDS,
) -> tuple[int, bool]:
    """Run a command, pass its lines on, and say every 15 s of silence that it still works.

    Returns: its exit code, and whether its words showed that it began to change packages.
    """
    started = time.monotonic()
    process = subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**env, "PYTHONIOENCODING": "utf-8", "PYTHONUNBUFFERED": "1"},
        encoding="utf-8",
        errors="replace",
    )
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_pump, args=(process, lines), daemon=True).start()
    changing = False
    try:
        while True:
            try:
                line = lines.get(timeout=silence_seconds)
            except queue.Empty:
                say(f"  ... still working ({time.monotonic() - started:.0f} s)")
                continue
            if line is None:
                return process.wait(), changing
            changing = changing or line.strip().startswith(CHANGES)
            if line.strip() and not line.startswith(NOISE):
                say("  " + line.rstrip())
    finally:
        if process.poll() is None:  # Ctrl-C reached us: it reached the child too; let it clean up
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _pump(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)
