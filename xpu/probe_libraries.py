"""Which libraries of the GPU's software stack this process has loaded. Runs in the child.

Standard library only. Names files without their folders, so that no home path leaves the child.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

STACK = re.compile(
    r"^(lib)?(ze_|sycl|ur_|pi_|umf|OpenCL|igc|igdrcl|iga|ocloc|dnnl|mkl_sycl|torch_xpu|c10_xpu|ccl"
    r"|svml|intelocl)",
    re.IGNORECASE,
)
"""Level Zero, SYCL, unified runtime, OpenCL, graphics compiler, oneDNN and torch's XPU part."""


def loaded_libraries() -> list[str]:
    """Return ``name version`` of each loaded library of the stack, sorted; empty if unknown."""
    try:
        paths = _windows_paths() if sys.platform == "win32" else _linux_paths()
    except (OSError, AttributeError, ValueError):
        return []
    return sorted(f"{path.name} {_version(path)}".strip() for path in stack_files(paths))


def stack_files(paths: Iterable[Path]) -> set[Path]:
    """Keep the libraries that belong to the GPU's software stack."""
    return {path for path in paths if STACK.match(path.name)}


def _linux_paths() -> set[Path]:
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    fields = (line.split(maxsplit=5) for line in maps.splitlines())
    # The name as loaded may be a link; the file behind it carries the version.
    return {Path(f[5]).resolve() for f in fields if len(f) == 6 and ".so" in f[5]}


def _windows_paths() -> set[Path]:
    loader: Any = getattr(ctypes, "WinDLL")  # noqa: B009  (absent from the types of other systems)
    kernel = loader("kernel32", use_last_error=True)
    kernel.GetCurrentProcess.restype = ctypes.c_void_p
    kernel.K32EnumProcessModules.argtypes = [ctypes.c_void_p] * 2 + [
        ctypes.c_uint32,
        ctypes.c_void_p,
    ]
    kernel.GetModuleFileNameW.argtypes = [ctypes.c_void_p, ctypes.c_wchar_p, ctypes.c_uint32]
    modules = (ctypes.c_void_p * 4096)()
    needed = ctypes.c_uint32()
    size = ctypes.sizeof(modules)
    process = kernel.GetCurrentProcess()
    if not kernel.K32EnumProcessModules(process, modules, size, ctypes.byref(needed)):
        raise OSError("the loaded modules cannot be listed")
    found: set[Path] = set()
    count = min(needed.value, size) // ctypes.sizeof(ctypes.c_void_p)
    for module in modules[:count]:
        name = ctypes.create_unicode_buffer(1024)
        if kernel.GetModuleFileNameW(module, name, 1024):
            found.add(Path(name.value))
    return found


def _version(path: Path) -> str:
    if sys.platform != "win32":
        return ""
    try:
        return _windows_version(str(path))
    except (OSError, AttributeError, ValueError):
        return ""


def _windows_version(path: str) -> str:
    library: Any = getattr(ctypes, "WinDLL")("version")  # noqa: B009
    size = library.GetFileVersionInfoSizeW(ctypes.c_wchar_p(path), None)
    if not size:
        return ""
    data = ctypes.create_string_buffer(size)
    if not library.GetFileVersionInfoW(ctypes.c_wchar_p(path), 0, size, data):
        return ""
    block, length = ctypes.c_void_p(), ctypes.c_uint32()
    root = ctypes.c_wchar_p("\\")
    if not library.VerQueryValueW(data, root, ctypes.byref(block), ctypes.byref(length)):
        return ""
    # VS_FIXEDFILEINFO: signature, structure version, file version high and low.
    words = ctypes.cast(block, ctypes.POINTER(ctypes.c_uint32))
    high, low = words[2], words[3]
    return f"{high >> 16}.{high & 0xFFFF}.{low >> 16}.{low & 0xFFFF}"


def mixed_versions(libraries: Iterable[str]) -> list[str]:
    """Return a warning for each library that is loaded more than once.

    Args:
        libraries: as ``loaded_libraries`` returns them.
    Two copies of one library usually come from two installations and fail in odd ways.
    """
    by_stem: dict[str, list[str]] = {}
    for entry in libraries:
        stem = re.split(r"\.(?:so|dll)", entry.split(" ")[0], flags=re.IGNORECASE)[0]
        stem = re.sub(r"(?<=sycl)\d+$", "", stem.lower())  # sycl7 and sycl8 are one library
        by_stem.setdefault(stem, []).append(entry)
    return [
        f"{stem} is loaded {len(entries)} times ({', '.join(entries)}): two installations are mixed"
        for stem, entries in sorted(by_stem.items())
        if len(entries) > 1
    ]
