"""One child of the preflight: started clean, listened to, ended from outside.

Owns the child's environment, the deadlines and the kill. Runs in any thread and blocks only that
one. Judges nothing.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import site
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from .probe_types import CLASS_WORDS, OP_CLASSES, Check, Deadlines

log = logging.getLogger(__name__)

CHILD = Path(__file__).with_name("probe_child.py")

KEPT_VARIABLES = frozenset((
    "PATH", "SYSTEMROOT", "SYSTEMDRIVE", "WINDIR", "COMSPEC", "PATHEXT", "TEMP", "TMP", "TMPDIR",
    "HOME", "USERPROFILE", "APPDATA", "LOCALAPPDATA", "PROGRAMDATA", "PROGRAMFILES", "LANG",
    "NUMBER_OF_PROCESSORS", "PROCESSOR_ARCHITECTURE", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "VIRTUAL_ENV", "CONDA_PREFIX",
    "PYTHONHOME", "PYTHONPATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS",
    "ONEAPI_DEVICE_SELECTOR", "ZE_AFFINITY_MASK", "SYCL_CACHE_PERSISTENT", "SYCL_CACHE_DIR",
))  # fmt: skip
"""Variables a child inherits. Of those that steer the GPU's libraries, only which device is seen
and where compiled kernels are kept."""

GPU_PREFIXES = (
    "PYTORCH_", "TORCH_", "IPEX_", "SYCL_", "ZE_", "ZES_", "UR_", "ONEAPI_", "NEO_", "IGC_",
    "ONEDNN_", "DNNL_", "OVERRIDEDEFAULTFP64",
)  # fmt: skip

POLL_S = 0.05
DRAIN_S = 1.0
STDERR_LINES = 60
_left_behind: list[subprocess.Popen[bytes]] = []


@dataclass
class ChildOutcome:
    """What one child said and how it ended: ``done``, ``hang``, ``crash`` or ``failed``."""

    ended: str = "crash"
    checks: list[Check] = field(default_factory=lambda: list[Check]())
    warnings: list[str] = field(default_factory=lambda: list[str]())
    stderr: list[str] = field(default_factory=lambda: list[str]())
    libraries: list[str] = field(default_factory=lambda: list[str]())
    exit_code: int | None = None
    pid: int = 0


def child_environment(
    environ: Mapping[str, str], torch_folder: Path | None = None
) -> dict[str, str]:
    """Return the variables a child starts with.

    Args:
        torch_folder: where this process found torch. A user's own site folder is switched off in
            the child, so if torch lives there, it is named explicitly.
    """
    env = {key: value for key, value in environ.items() if key.upper() in KEPT_VARIABLES}
    env.update(PYTHONSAFEPATH="1", PYTHONDONTWRITEBYTECODE="1", PYTHONIOENCODING="utf-8")
    if torch_folder is not None and str(torch_folder.parent) == site.getusersitepackages():
        parts = [env.get("PYTHONPATH", ""), str(torch_folder.parent)]
        env["PYTHONPATH"] = os.pathsep.join(part for part in parts if part)
    return env


def left_out_variables(environ: Mapping[str, str]) -> list[str]:
    """Return names of set variables that steer the GPU's libraries but do not reach a child."""
    return sorted(
        key
        for key in environ
        if key.upper().startswith(GPU_PREFIXES) and key.upper() not in KEPT_VARIABLES
    )


def child_command(request: Mapping[str, Any], script: Path = CHILD) -> list[str]:
    """Return the command line of a child."""
    return [sys.executable, "-s", "-X", "faulthandler", str(script), json.dumps(dict(request))]


def run_child(
    command: Sequence[str],
    env: Mapping[str, str],
    deadlines: Deadlines,
    *,
    covered: bool = True,
    check_cancel: Callable[[], None] | None = None,
    progress: Callable[[str], None] | None = None,
) -> ChildOutcome:
    """Run one child to its end, or end it.

    Args:
        covered: torch holds compiled kernels for the device; else each first operation of a kind
            is granted ``compile_s``.
        check_cancel: called every 50 ms; raises to cancel. The child is ended first.
        progress: told each check before it runs, as ``class: check``.
    Returns: its checks; after a hang or a crash the last one says where.
    Raises: whatever check_cancel raises; OSError if the interpreter cannot be started.
    """
    flags = getattr(subprocess, "CREATE_NO_WINDOW", 0)
    process = subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(env),
        creationflags=flags,
    )
    listener = _Listener(process, deadlines, covered, progress)
    try:
        listener.listen(check_cancel)
    finally:
        listener.end()
    return listener.outcome


class _Listener:
    """Reads one child's lines and keeps its clock."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        deadlines: Deadlines,
        covered: bool,
        progress: Callable[[str], None] | None,
    ) -> None:
        self.outcome = ChildOutcome(pid=process.pid)
        self._process = process
        self._deadlines = deadlines
        self._covered = covered
        self._progress = progress
        self._lines: queue.Queue[tuple[str, bytes | None]] = queue.Queue()
        self._stage, self._name = 0, "starting torch"
        self._granted = deadlines.start_s
        self._since = time.monotonic()
        self._begun: set[int] = set()
        self._ended = 0.0
        self._readers = [
            self._read("out", process.stdout),
            self._read("err", process.stderr),
        ]

    def _read(self, kind: str, stream: IO[bytes] | None) -> threading.Thread:
        assert stream is not None

        def pump(source: IO[bytes]) -> None:
            for line in iter(lambda: source.readline(65536), b""):
                self._lines.put((kind, line))
            self._lines.put((kind, None))

        thread = threading.Thread(target=pump, args=(stream,), daemon=True)
        thread.start()
        return thread

    def listen(self, check_cancel: Callable[[], None] | None) -> None:
        """Take lines until the child is through, silent for too long, or gone."""
        closed = 0
        while self.outcome.ended == "crash" and closed < 2:
            if check_cancel is not None:
                check_cancel()
            try:
                kind, line = self._lines.get(timeout=POLL_S)
            except queue.Empty:
                if self._is_gone():
                    return
                if time.monotonic() - self._since > self._granted:
                    self._hang()
                continue
            if line is None:
                closed += 1
            elif kind == "err":
                self._hear(line)
            else:
                self._take(line)

    def _is_gone(self) -> bool:
        """True a second after the child ended; something it started may keep its pipes open."""
        if self._process.poll() is None:
            return False
        self._ended = self._ended or time.monotonic()
        return time.monotonic() - self._ended > DRAIN_S

    def _hear(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip()
        if text:
            self.outcome.stderr.append(text)
            del self.outcome.stderr[:-STDERR_LINES]

    def _take(self, line: bytes) -> None:
        try:
            data = json.loads(line)
            event = str(data["event"])
            if event == "result":
                self.outcome.checks.append(Check.from_mapping(data))
                self._await(f"what follows {data['name']}", self._deadlines.op_s)
            elif event == "start":
                self._start(int(data["stage"]), str(data["name"]))
            elif event == "warnings":
                self.outcome.warnings = [str(text) for text in data["texts"]]
            elif event == "libraries":
                self.outcome.libraries = [str(text) for text in data["texts"]]
            elif event in ("done", "failed"):
                self.outcome.ended = event
                if event == "failed":
                    self.outcome.stderr.append(str(data["text"]))
            elif event == "ready":
                self._await("preparing the checks", self._deadlines.start_s)
            elif event == "stage":
                self._stage = int(data["stage"])
        except (ValueError, KeyError, TypeError, IndexError) as e:
            log.debug("a line of the preflight child makes no sense (%s): %.200r", e, line)

    def _start(self, stage: int, name: str) -> None:
        first = stage > 0 and stage not in self._begun
        granted = self._deadlines.op_s
        if first and not self._covered:
            granted = self._deadlines.compile_s
        elif not self._begun:
            granted = self._deadlines.first_op_s
        self._begun.add(stage)
        self._stage = stage
        self._await(name, granted)
        if self._progress is not None:
            compiling = f", compiling kernels (up to {granted:.0f} s)"
            words = CLASS_WORDS[OP_CLASSES[stage]]
            self._progress(f"{words}: {name}{compiling if first and not self._covered else ''}")

    def _await(self, name: str, granted_s: float) -> None:
        self._name, self._granted, self._since = name, granted_s, time.monotonic()

    def _hang(self) -> None:
        self.outcome.ended = "hang"
        text = f"no answer for {self._granted:.3g} s and no error"
        self._last("hang", text, time.monotonic() - self._since)

    def _last(self, status: Any, text: str, seconds: float) -> None:
        self.outcome.checks.append(
            Check(self._stage, self._name, status, text=text, seconds=seconds)
        )

    def end(self) -> None:
        """Make sure that the child is gone and collected."""
        process, exit_s = self._process, self._deadlines.exit_s
        through = self.outcome.ended in ("done", "failed")
        try:
            process.wait(min(exit_s, 2.0) if through else 0.2)
        except subprocess.TimeoutExpired:
            process.kill()
        try:
            self.outcome.exit_code = process.wait(exit_s)
        except subprocess.TimeoutExpired:
            # Stuck inside the kernel driver. Nobody can end it; it is collected when it goes.
            _left_behind.append(process)
            self.outcome.stderr.append(
                f"process {process.pid} cannot be ended; restart the computer"
            )
            return
        for reader in self._readers:
            reader.join(1.0)
        while not self._lines.empty():
            kind, line = self._lines.get_nowait()
            if kind == "err" and line is not None:
                self._hear(line)
        for stream in (process.stdout, process.stderr):
            if stream is not None and not any(r.is_alive() for r in self._readers):
                stream.close()
        if self.outcome.ended == "crash":
            self._last("crash", f"the process ended: {exit_words(self.outcome.exit_code)}", 0.0)


def exit_words(code: int) -> str:
    """Return an exit code as a person and the fault table read it."""
    if code < 0 and code != -1073741819:
        try:
            return f"signal {signal.Signals(-code).name}"
        except ValueError:
            return f"exit code {code}"
    if code & 0xFFFFFFFF >= 0xC0000000:
        return f"exit code 0x{code & 0xFFFFFFFF:08X}"
    return f"exit code {code}"
