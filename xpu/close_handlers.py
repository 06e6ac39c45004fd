"""Tell the journal when this process is being ended on purpose.

Owns signal and console handlers on Linux, Windows and macOS. A handler closes the open rows and
then lets happen what would have happened without it; no signal is ever swallowed. Standard library
only; what belongs to one system is used where that system is found.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_log = logging.getLogger(__name__)

# Signals that end a process from outside. Ctrl-C is left alone: Python raises KeyboardInterrupt,
# and the phase that was open closes itself.
_NAMES = ("SIGTERM", "SIGBREAK", "SIGHUP")

# Console control events: 2 window closed, 5 logging off, 6 shutting down. Source: Windows API,
# HandlerRoutine. 0 and 1 (Ctrl-C, Ctrl-Break) reach Python as signals.
_CONSOLE_EVENTS = (2, 5, 6)

_console_handlers: list[object] = []  # ctypes callbacks must outlive the process's last event


def install_close_handlers(close: Callable[[], None]) -> Callable[[], None]:
    """Call ``close`` when the process is ended by a signal, a console event or its own exit.

    Args:
        close: closes the journal's open rows as ``cancel``. Called at most once per ending; it must
            be quick, since Windows allows about five seconds.
    Returns: a function that takes the handlers out again (signals only if still ours on top).
    Signals can only be handled from the main thread; elsewhere the other handlers are installed.
    """
    undo: list[Callable[[], None]] = []
    if threading.current_thread() is threading.main_thread():
        undo.extend(u for name in _NAMES if (u := _install_signal(name, close)) is not None)
    else:
        _log.debug("signal handlers not installed: not in the main thread")
    if sys.platform == "win32":
        undo.append(_install_console(close))
    atexit.register(close)
    undo.append(lambda: atexit.unregister(close))

    def remove() -> None:
        for step in undo:
            step()

    return remove


def _install_signal(name: str, close: Callable[[], None]) -> Callable[[], None] | None:
    number: int | None = getattr(signal, name, None)
    if number is None:
        return None
    previous = signal.getsignal(number)
    # Ignored: the process goes on, so nothing may be closed. None: set by other than Python code,
    # which could not be called from here.
    if previous is signal.SIG_IGN or previous is None:
        return None

    def handle(received: int, frame: FrameType | None) -> None:
        close()
        if callable(previous):
            previous(received, frame)
            return
        signal.signal(received, signal.SIG_DFL)
        signal.raise_signal(received)

    signal.signal(number, handle)

    def remove() -> None:
        if signal.getsignal(number) is handle:
            signal.signal(number, previous)

    return remove


def _install_console(close: Callable[[], None], windows: Any = None) -> Callable[[], None]:
    """Windows calls the handler in a thread of its own and ends the process when it returns."""
    api: Any = windows or ctypes
    kernel = api.WinDLL("kernel32")

    def handle(event: int) -> bool:
        if event in _CONSOLE_EVENTS:
            close()
        return False  # not handled: the next handler, and at last Windows itself, gets it too

    callback = api.WINFUNCTYPE(ctypes.c_int, ctypes.c_uint32)(handle)
    _console_handlers.append(callback)
    kernel.SetConsoleCtrlHandler(callback, True)

    def remove() -> None:
        kernel.SetConsoleCtrlHandler(callback, False)

    return remove
