"""The crash journal of this ComfyUI: one per process, in its user folder, opened when needed."""

from __future__ import annotations

import logging
import os
import threading

import folder_paths

from ..xpu.close_handlers import install_close_handlers
from ..xpu.journal import Death, Journal

log = logging.getLogger(__name__)

JOURNAL_FILE = "supir_xpu_journal.sqlite3"

_journal: Journal | None = None
_lock = threading.Lock()
_deaths: list[Death] = []


def journal_path() -> str:
    """Return where the journal lies, or would lie."""
    return os.path.join(folder_paths.get_user_directory(), JOURNAL_FILE)


def open_journal() -> Journal:
    """Return the journal, opening it once; what died since the last start is found and said."""
    global _journal
    with _lock:
        if _journal is None:
            _journal = Journal(journal_path())
            _find_deaths(_journal)
            if threading.current_thread() is threading.main_thread():
                install_close_handlers(_journal.close_open_rows)
        return _journal


def _find_deaths(journal: Journal) -> None:
    try:
        _deaths.extend(journal.find_deaths())
        for death in _deaths:
            log.warning("SUPIR XPU: %s", death.message)
    except Exception:  # whatever the file holds, a report may not keep the pack from loading
        log.warning("SUPIR XPU: what a crash interrupted cannot be reported.", exc_info=True)


def forget_crashes(device: str | None) -> int:
    """Drop what was learned about one device, or about all; makes no journal where there is none.

    Returns the number of crashes dropped. Raises: ForgetError, see ``Journal.forget``.
    """
    with _lock:
        nothing = _journal is None and not os.path.lexists(journal_path())
    return 0 if nothing else open_journal().forget(device)


def deaths_found() -> list[Death]:
    """Return what was found dead when this process opened the journal."""
    return list(_deaths)


def set_journal(value: Journal | None) -> None:
    """Put another journal in place (None: open anew); for simulation."""
    global _journal
    with _lock:
        _journal = value
        _deaths.clear()
