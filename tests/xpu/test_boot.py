"""Boot ids, process start times, and what counts as proof that a process is gone."""

import os
import subprocess
import sys
import time
import types

import pytest
from supir_xpu.xpu import boot
from supir_xpu.xpu.boot import Owner, current_owner, is_alive, process_start, same_boot

HERE = Owner("linux:one", 100, "ticks:5", "pid:[1]")


def test_this_process_knows_itself():
    owner = current_owner()
    assert owner.pid == os.getpid()
    assert owner.boot_id == boot.read_boot_id() != ""
    assert owner.started == process_start(os.getpid())
    assert is_alive(owner, owner, process_start)


def test_boot_id_can_be_injected():
    assert current_owner("test:7").boot_id == "test:7"


def test_start_of_a_child_and_of_nobody():
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        started = process_start(child.pid)
        assert started
        assert started == process_start(child.pid) != process_start(os.getpid())
        child.kill()
        deadline = time.monotonic() + 10
        while process_start(child.pid) is not None:  # not collected yet, and dead all the same
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        child.kill()
        child.communicate()
    assert process_start(child.pid) is None


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("linux:x", "linux:x", True),
        ("linux:x", "linux:y", False),
        ("time:1000.0", "time:1005.0", True),
        ("time:1000.0", "time:1005.1", False),
        ("time:1000.0", "windows:1000", False),
        ("time:1000.0", "time:soon", False),
        ("windows:41", "windows:42", False),
    ],
)
def test_same_boot(a, b, same):
    assert same_boot(a, b) is same
    assert same_boot(b, a) is same


@pytest.mark.parametrize(
    ("owner", "start", "alive"),
    [
        (Owner("linux:one", 7, "ticks:9", "pid:[1]"), "ticks:9", True),
        (Owner("linux:one", 7, "ticks:9", "pid:[1]"), "ticks:8", False),  # the number was reused
        (Owner("linux:one", 7, "ticks:9", "pid:[1]"), None, False),
        (Owner("linux:one", 7, "ticks:9", "pid:[1]"), "", True),  # it exists, start not readable
        (Owner("linux:one", 7, "", "pid:[1]"), "ticks:9", True),
        (Owner("linux:one", 7, "", "pid:[1]"), None, False),
        (Owner("linux:one", 7, "ticks:9", "pid:[2]"), None, True),  # another container
        (Owner("linux:two", 7, "ticks:9", "pid:[1]"), "ticks:9", False),  # another boot
        (Owner("time:50", 7, "filetime:9", "pid:[1]"), "filetime:9", True),  # the clock was set
        (Owner("time:50", 7, "filetime:9", "pid:[1]"), "filetime:8", False),
    ],
)
def test_alive_only_without_proof_of_the_contrary(owner, start, alive):
    assert is_alive(owner, HERE, lambda _pid: start) is alive


def test_unreadable_boot_id_becomes_the_boot_time(monkeypatch):
    def fail():
        raise OSError("no such file")

    for reader in ("_linux_boot_id", "_windows_boot_counter", "_macos_boot_uuid"):
        monkeypatch.setattr(boot, reader, fail)
    first, second = boot.read_boot_id(), boot.read_boot_id()
    assert first.startswith("time:")
    assert same_boot(first, second)
    assert float(first[5:]) < time.time()


def test_windows_counter_is_read_from_the_registry(monkeypatch):
    class Key:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            return False

    asked = []
    fake = types.ModuleType("winreg")
    fake.HKEY_LOCAL_MACHINE = "HKLM"
    fake.OpenKey = lambda root, path: asked.append((root, path)) or Key()
    fake.QueryValueEx = lambda _key, name: (41, 4) if name == "BootId" else None
    monkeypatch.setitem(sys.modules, "winreg", fake)
    monkeypatch.setattr(sys, "platform", "win32")
    assert boot.read_boot_id() == "windows:41"
    assert asked[0][0] == "HKLM"
    assert asked[0][1].endswith("PrefetchParameters")


class FakeKernel:
    """The five functions of Windows' kernel32 that are used, with settable answers."""

    def __init__(self, handle=1, exit_code=259, created=12345):
        def open_process(_access, _inherit, _pid):
            return handle

        def exit_code_of(_handle, out):
            out._obj.value = exit_code
            return 1

        def times(_handle, creation, *_others):
            creation._obj.value = created
            return 1 if created else 0

        def close(_handle):
            self.closed = True

        self.closed = False
        self.OpenProcess = open_process
        self.GetExitCodeProcess = exit_code_of
        self.GetProcessTimes = times
        self.CloseHandle = close


@pytest.mark.parametrize(
    ("kernel", "error", "expected"),
    [
        (FakeKernel(), 0, "filetime:12345"),
        (FakeKernel(exit_code=1), 0, None),
        (FakeKernel(created=0), 0, ""),
        (FakeKernel(handle=None), 87, None),
        (FakeKernel(handle=None), 5, ""),  # access denied: it exists
    ],
)
def test_windows_process_start(monkeypatch, kernel, error, expected):
    monkeypatch.setattr(boot.ctypes, "WinDLL", lambda *_a, **_k: kernel, raising=False)
    monkeypatch.setattr(boot.ctypes, "get_last_error", lambda: error, raising=False)
    assert boot._windows_process_start(7) == expected
    assert kernel.closed is bool(kernel.OpenProcess(0, 0, 0))


def test_macos_structure_has_the_size_of_the_system_header():
    import ctypes

    assert ctypes.sizeof(boot._ProcBsdInfo) == 136
    assert boot._ProcBsdInfo.start_sec.offset == 120
