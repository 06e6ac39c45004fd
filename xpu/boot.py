"""Who is writing: which boot of this machine, which process, and is that process still alive.

Owns boot ids and process start times on Linux, Windows and macOS. Standard library only; what
belongs to one system is imported where it is used. Asks the system nothing at import.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_log = logging.getLogger(__name__)

BOOT_TIME_TOLERANCE_S = 5.0
"""Two boot times this close are one boot: the wall clock is set while the machine runs
(seconds; our choice, larger than the step of a time service, smaller than any reboot)."""

UNKNOWN = ""
"""A start time that could not be read. It never counts as proof that a process is gone."""


@dataclass(frozen=True)
class Owner:
    """One process of one boot. ``started`` tells a process from a later one with its number.

    ``space`` names the process-id namespace (containers on Linux); empty where there is one only.
    """

    boot_id: str
    pid: int
    started: str
    space: str = ""


def current_owner(boot_id: str | None = None) -> Owner:
    """Describe this process. ``boot_id`` replaces what the system says (for tests)."""
    pid = os.getpid()
    return Owner(boot_id or read_boot_id(), pid, process_start(pid) or UNKNOWN, _pid_space())


def same_boot(a: str, b: str) -> bool:
    """Tell whether two boot ids name one boot; boot *times* may differ by a few seconds."""
    if a == b:
        return True
    if not (a.startswith("time:") and b.startswith("time:")):
        return False
    try:
        return abs(float(a[5:]) - float(b[5:])) <= BOOT_TIME_TOLERANCE_S
    except ValueError:
        return False


def is_alive(owner: Owner, here: Owner, start_of: Callable[[int], str | None]) -> bool:
    """Tell whether ``owner`` may still be running, seen from the process ``here``.

    False only on proof: another boot, no process with that number, or one that started at
    another time. What cannot be read counts as alive.
    """
    if not same_boot(owner.boot_id, here.boot_id):
        # Boot times drift when the clock is set. A creation time that is a date settles it: the
        # very process is still there.
        dated = owner.boot_id.startswith("time:") and not owner.started.startswith("ticks:")
        return dated and owner.started != UNKNOWN and start_of(owner.pid) == owner.started
    if owner.space != here.space:  # another container: its process numbers mean nothing here
        return True
    started = start_of(owner.pid)
    if started is None:
        return False
    return UNKNOWN in (started, owner.started) or started == owner.started


def read_boot_id() -> str:
    """Return an id that is the same until the machine restarts, and different afterwards.

    Linux: ``/proc/sys/kernel/random/boot_id``. Windows: the boot counter of the prefetcher, else
    the boot time. macOS: ``kern.bootsessionuuid``. Anything else: the boot time.
    """
    readers: dict[str, Callable[[], str]] = {
        "linux": _linux_boot_id,
        "win32": _windows_boot_counter,
        "darwin": _macos_boot_uuid,
    }
    reader = readers.get(sys.platform)
    if reader is not None:
        try:
            return reader()
        except (OSError, ValueError, AttributeError) as e:
            _log.debug("boot id not readable (%s); using the boot time", e)
    return f"time:{time.time() - _uptime_s():.1f}"


def process_start(pid: int) -> str | None:
    """Return when process ``pid`` started, as text to compare; None if there is no such process.

    ``UNKNOWN`` if the process exists but its start cannot be read.
    """
    if sys.platform == "win32":
        return _windows_process_start(pid)
    if sys.platform == "darwin":
        return _macos_process_start(pid)
    return _linux_process_start(pid)


def _pid_space() -> str:
    if not sys.platform.startswith("linux"):
        return ""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _linux_boot_id() -> str:
    text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    if not text:
        raise ValueError("boot_id is empty")
    return f"linux:{text}"


def _linux_process_start(pid: int) -> str | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError:
        return UNKNOWN
    # The name in brackets may hold spaces and brackets. After it: field 3 (state), field 22
    # (start time in clock ticks since boot). Source: proc(5).
    fields = stat.rpartition(")")[2].split()
    if len(fields) < 20:
        return UNKNOWN
    if fields[0] in ("Z", "X", "x"):  # ended, only its exit code is left
        return None
    return f"ticks:{fields[19]}"


def _uptime_s() -> float:
    if sys.platform == "win32":
        ticks = ctypes.WinDLL("kernel32").GetTickCount64
        ticks.restype = ctypes.c_uint64
        return float(ticks()) / 1000.0
    if sys.platform.startswith("linux"):
        # CLOCK_BOOTTIME (7) counts the time asleep too. Source: clock_gettime(2).
        return time.clock_gettime(7)
    return time.monotonic()


def _windows_boot_counter() -> str:
    import winreg

    # The counter rises by one at every start of the system, and not on sleep or hibernation.
    path = r"SYSTEM\CurrentControlSet\Control\Session Manager\Memory Management\PrefetchParameters"
    open_key = getattr(winreg, "OpenKey")  # noqa: B009  (absent from the types of other systems)
    query = getattr(winreg, "QueryValueEx")  # noqa: B009
    with open_key(getattr(winreg, "HKEY_LOCAL_MACHINE"), path) as key:  # noqa: B009
        value, _kind = query(key, "BootId")
    return f"windows:{int(value)}"


def _windows_process_start(pid: int) -> str | None:
    kernel = getattr(ctypes, "WinDLL")("kernel32", use_last_error=True)  # noqa: B009
    kernel.OpenProcess.restype = ctypes.c_void_p
    kernel.OpenProcess.argtypes = [ctypes.c_uint32, ctypes.c_int, ctypes.c_uint32]
    kernel.CloseHandle.argtypes = [ctypes.c_void_p]
    kernel.GetProcessTimes.argtypes = [ctypes.c_void_p] + [ctypes.c_void_p] * 4
    kernel.GetExitCodeProcess.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    handle = kernel.OpenProcess(0x1000, 0, pid)  # PROCESS_QUERY_LIMITED_INFORMATION
    if not handle:
        # ERROR_INVALID_PARAMETER (87): no such process. Anything else: it exists, not for us.
        return None if getattr(ctypes, "get_last_error")() == 87 else UNKNOWN  # noqa: B009
    try:
        code = ctypes.c_uint32()
        if kernel.GetExitCodeProcess(handle, ctypes.byref(code)) and code.value != 259:
            return None  # not STILL_ACTIVE: only a handle keeps the number in use
        times = [ctypes.c_uint64() for _ in range(4)]
        if not kernel.GetProcessTimes(handle, *[ctypes.byref(t) for t in times]):
            return UNKNOWN
        return f"filetime:{times[0].value}"  # creation, 100 ns since 1601
    finally:
        kernel.CloseHandle(handle)


def _macos_boot_uuid() -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_size_t(64)
    buffer = ctypes.create_string_buffer(size.value)
    if libc.sysctlbyname(b"kern.bootsessionuuid", buffer, ctypes.byref(size), None, 0) != 0:
        raise OSError(ctypes.get_errno(), "kern.bootsessionuuid is not readable")
    return f"macos:{buffer.value.decode('ascii')}"


class _ProcBsdInfo(ctypes.Structure):
    """macOS ``struct proc_bsdinfo``. Source: the system header sys/proc_info.h."""

    _fields_ = [
        ("numbers", ctypes.c_uint32 * 12),
        ("comm", ctypes.c_char * 16),
        ("name", ctypes.c_char * 32),
        ("more", ctypes.c_uint32 * 6),
        ("start_sec", ctypes.c_uint64),
        ("start_usec", ctypes.c_uint64),
    ]


def _macos_process_start(pid: int) -> str | None:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        pass  # it exists and belongs to somebody else
    try:
        libproc = ctypes.CDLL("/usr/lib/libproc.dylib")
    except OSError:
        return UNKNOWN
    info = _ProcBsdInfo()
    wanted = ctypes.sizeof(info)
    # 3 = PROC_PIDTBSDINFO. Source: sys/proc_info.h.
    got = libproc.proc_pidinfo(pid, 3, ctypes.c_uint64(0), ctypes.byref(info), wanted)
    if got != wanted:
        return UNKNOWN
    if info.numbers[1] == 5:  # SZOMB: ended, not yet collected
        return None
    return f"epoch:{info.start_sec}.{info.start_usec:06d}"
