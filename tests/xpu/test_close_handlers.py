"""Ending a process on purpose is never a crash, and no signal is swallowed."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from supir_xpu.xpu import close_handlers
from supir_xpu.xpu.boot import process_start
from supir_xpu.xpu.close_handlers import install_close_handlers
from supir_xpu.xpu.journal import Journal

XPU = Path(close_handlers.__file__).parent

CHILD = """
import sys, types, signal, threading
pack = types.ModuleType("jx"); pack.__path__ = [sys.argv[1]]; sys.modules["jx"] = pack
from jx.journal import Journal, RunInfo
from jx.close_handlers import install_close_handlers
if sys.argv[3] == "own":
    signal.signal(signal.SIGTERM, lambda *_: (print("own handler", flush=True), sys.exit(7)))
journal = Journal(sys.argv[2])
install_close_handlers(journal.close_open_rows)
run = RunInfo("r", "dev", "1", "2", "fused", 10, 1.0)
journal.open_phase(run, "sample")
print("open", flush=True)
if sys.argv[3] != "exit":
    threading.Event().wait(60)
"""


def start(path, how):
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", CHILD, str(XPU), str(path), how],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout.readline() == "open\n"
    return child


@pytest.mark.parametrize("how", ["default", "own", "exit"])
def test_a_graceful_end_is_no_death(tmp_path, how):
    child = start(tmp_path / "j.db", how)
    if how != "exit":
        child.terminate()
    out, _ = child.communicate(timeout=30)
    if how == "own":
        assert (child.returncode, out) == (7, "own handler\n")
    elif how == "default" and os.name == "posix":
        assert child.returncode == -signal.SIGTERM  # ended by the signal, as without a handler
    journal = Journal(tmp_path / "j.db")
    if os.name == "posix" or how == "exit":
        assert journal.find_deaths() == []
    journal.close()


def test_a_kill_is_a_death(tmp_path):
    child = start(tmp_path / "j.db", "default")
    child.kill()
    child.communicate()
    assert process_start(child.pid) is None
    journal = Journal(tmp_path / "j.db")
    assert [(d.kind, d.phase) for d in journal.find_deaths()] == [("process", "sample")]
    journal.close()


def test_previous_handler_runs_and_comes_back():
    calls = []
    before = signal.signal(signal.SIGTERM, lambda *_: calls.append("previous"))
    try:
        mine = signal.getsignal(signal.SIGTERM)
        remove = install_close_handlers(lambda: calls.append("closed"))
        signal.raise_signal(signal.SIGTERM)
        assert calls == ["closed", "previous"]
        remove()
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_ignored_signal_stays_ignored():
    calls = []
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        remove = install_close_handlers(lambda: calls.append("closed"))
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.01)
        assert calls == []
        remove()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_another_thread_may_install(caplog):
    before = signal.getsignal(signal.SIGTERM)
    removers = []
    thread = threading.Thread(target=lambda: removers.append(install_close_handlers(lambda: None)))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before
    removers[0]()


def test_console_events_close_and_are_passed_on():
    """A simulated kernel32: the same callback object Windows would be given."""
    registered, calls = [], []

    class Kernel:
        @staticmethod
        def SetConsoleCtrlHandler(callback, add):  # noqa: N802  (Windows' name)
            (registered.append if add else registered.remove)(callback)
            return 1

    class Windows:
        WinDLL = staticmethod(lambda _name: Kernel)
        WINFUNCTYPE = staticmethod(ctypes.CFUNCTYPE)

    remove = close_handlers._install_console(lambda: calls.append("closed"), Windows)
    answers = {event: registered[0](event) for event in (0, 1, 2, 5, 6)}
    assert answers == dict.fromkeys((0, 1, 2, 5, 6), 0)  # never claims an event for itself
    assert calls == ["closed"] * 3
    remove()
    assert registered == []
