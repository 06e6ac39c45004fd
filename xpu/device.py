"""What is known about one compute device, as plain numbers.

Owns ``DeviceFacts`` and every contact with ``torch.xpu``; no other file names it. Facts come from
the runtime, from a YAML file, or from a measurement; each carries its source. Never decides
anything: planning, risk and reactions read the facts.
"""

from __future__ import annotations

import contextlib
import platform
import re
import threading
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from .errors import FactsError
from .facts_checks import checked

GIB = 1024**3

MAX_SINGLE_ALLOC_BYTES = 4 * GIB
"""Largest single allocation ever asked of an XPU. Source: the 4 GiB cap of Alchemist-class devices
(intel/intel-extension-for-pytorch issue 325) and wrong addressing beyond it (ComfyUI PR 409)."""

FREE_MARGIN = 0.10
"""Part of the total kept back when the runtime cannot report free memory: other processes and the
desktop are invisible then."""

SUPPORTED_FAMILIES = ("alchemist", "meteor-lake", "battlemage", "lunar-lake", "panther-lake", "pvc")
UNSUPPORTED_FAMILIES = ("xe-lp", "pre-xe")
FUSED_EVIDENCE = ("unknown", "fused", "math")
KINDS = ("xpu", "cpu", "cuda", "mps", "npu", "mlu", "privateuseone")
"""Torch device types a host may compute on."""

_FAMILY_NAMES = (
    (r"Data Center GPU Max", "pvc"),
    (r"Iris.{0,4} Xe|UHD Graphics|DG1", "xe-lp"),
    (r"HD Graphics|Iris.{0,4} (Plus|Pro)", "pre-xe"),
    (r"Arc.{0,6}(Pro )?B\d{2,3}\b", "battlemage"),
    (r"Arc.{0,6}(Pro )?A\d{2,3}M?\b", "alchemist"),
    (r"Arc.{0,6}1[34]0V\b", "lunar-lake"),
    (r"Arc.{0,6}B3[67]0|Panther", "panther-lake"),
    (r"Arc.{0,6}(1[34]0T|Graphics)", "meteor-lake"),
)


@dataclass(frozen=True)
class DeviceFacts:
    """One device as seen when a run starts.

    kind: ``xpu``, ``cpu``, ``cuda``, ``mps`` or another torch device type, see KINDS.
    family: one of SUPPORTED_FAMILIES, UNSUPPORTED_FAMILIES or ``unknown``.
    total_bytes, free_bytes: device memory; 0 means unknown.
    headroom_bytes: part of free_bytes left to other processes.
    max_alloc_bytes: largest single allocation to ask for; 0 means no known limit.
    dtypes: names of the dtypes that work without emulation.
    fused_sdpa: evidence whether scaled_dot_product_attention runs as one kernel without a score
        matrix: ``fused``, ``math`` or ``unknown``.
    fused_max_dim_head: widest head the fused kernel takes.
    bw_bytes_per_s, flops_per_s: sustained rates; launch_s, sync_s: seconds one launch costs, and
        one wait on top of it. 0 means unknown.
    sources: for each fact, where it comes from.
    """

    kind: str
    family: str = "unknown"
    os: str = ""
    driver: str = ""
    torch_version: str = ""
    name: str = ""
    total_bytes: int = 0
    free_bytes: int = 0
    headroom_bytes: int = 0
    max_alloc_bytes: int = 0
    dtypes: tuple[str, ...] = ("float32",)
    has_fp64: bool = False
    is_integrated: bool = False
    fused_sdpa: str = "unknown"
    fused_max_dim_head: int = 512
    bw_bytes_per_s: float = 0.0
    flops_per_s: float = 0.0
    launch_s: float = 0.0
    sync_s: float = 0.0
    sources: Mapping[str, str] = field(
        default_factory=lambda: cast("dict[str, str]", {}), hash=False
    )

    @property
    def is_xpu(self) -> bool:
        """True for an Intel GPU driven through torch.xpu."""
        return self.kind == "xpu"

    @property
    def is_supported(self) -> bool:
        """False for an Intel GPU older than what PyTorch's XPU backend is validated on."""
        return self.family not in UNSUPPORTED_FAMILIES

    @property
    def usable_bytes(self) -> int:
        """Free memory minus headroom, never negative."""
        return max(0, self.free_bytes - self.headroom_bytes)


class EventLike(Protocol):
    """The part of a device event that bounded submission needs."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...


_host = threading.local()


@contextlib.contextmanager
def host_region() -> Generator[None, None, None]:
    """Mark work that runs on the host processor on purpose.

    Launch counters skip it, because nothing in it is submitted to a device.
    """
    _host.depth = getattr(_host, "depth", 0) + 1
    try:
        yield
    finally:
        _host.depth -= 1


def in_host_region() -> bool:
    """Return whether the calling thread is inside ``host_region``."""
    return getattr(_host, "depth", 0) > 0


def make_event() -> EventLike:
    """Return a new event of the current XPU."""
    return cast("EventLike", torch.xpu.Event())


def synchronize() -> None:
    """Wait for every stream of the current XPU."""
    torch.xpu.synchronize()


def release_cached_memory(live: torch.Tensor | None = None) -> None:
    """Give unused cached blocks back to the driver.

    Reads one element of ``live`` back first: results have turned into NaN after empty_cache on
    Arc A under Windows unless something was read (pytorch issue 197520). Call at job borders or
    after a memory fault only.
    """
    if live is not None and live.numel() > 0:
        live.reshape(-1)[:1].to("cpu")
    torch.xpu.empty_cache()


def device_identity(device: torch.device | str, torch_module: Any = torch) -> tuple[str, str]:
    """Return (uuid or else name, driver version) of an XPU, as the preflight's child reads them.

    Empty texts if it cannot be asked.
    """
    properties = _ask(lambda: torch_module.xpu.get_device_properties(device), "properties", {})
    name = device_key(getattr(properties, "uuid", ""), getattr(properties, "name", ""))
    return name, str(getattr(properties, "driver_version", "") or "")


def device_key(uuid: object, name: object) -> str:
    """Return what tells one device from another: its uuid, or its name if that has no text form."""
    text = str(uuid or "")
    return text if text and not text.startswith("<") else str(name or "")


def classify_family(name: str, architecture: int = 0, properties: object = None) -> str:
    """Return the family of an Intel GPU, or ``unknown``.

    Args:
        name: device name as the driver reports it.
        architecture: SYCL architecture number, 0 if unknown. Bits 8 and up are the graphics IP
            version: major << 22 | minor << 14 | revision.
        properties: object with torch's device properties, for the last resort.
    Source: SYCL extension sycl_ext_oneapi_device_architecture; the last resort (matrix engine and
    2-D block reads) is a rule of thumb.
    """
    if architecture > 0:
        family = _family_of_version((architecture >> 30) & 0x3FF, (architecture >> 22) & 0xFF)
        if family != "unknown":
            return family
    for pattern, family in _FAMILY_NAMES:
        if re.search(pattern, name):
            return family
    matrix = getattr(properties, "has_subgroup_matrix_multiply_accumulate", None)
    blocks = getattr(properties, "has_subgroup_2d_block_io", None)
    if matrix is True and blocks is False:
        return "alchemist"
    return "xe-lp" if matrix is False and blocks is False else "unknown"


def _family_of_version(major: int, minor: int) -> str:
    if 0 < major < 12:
        return "pre-xe"
    if major == 12:
        if minor < 55:
            return "xe-lp"
        if minor < 60:
            return "alchemist"
        return "pvc" if minor < 70 else "meteor-lake"
    if major == 20:
        return "lunar-lake" if minor >= 4 else "battlemage"
    return "panther-lake" if major == 30 else "unknown"


def probe_facts(
    device: torch.device | str,
    *,
    torch_module: Any = torch,
    memory: tuple[int, int] | None = None,
    properties: object = None,
    ask_properties: bool = True,
) -> DeviceFacts:
    """Ask the runtime about one device.

    Args:
        device: any torch device.
        torch_module: torch, or an object shaped like it.
        memory: (free, total) bytes from the host's own helpers; wins over the runtime's answer.
        properties: device properties read earlier, for example by a child process.
        ask_properties: False leaves ``get_device_properties`` alone. That call can end the process
            with a segmentation fault on Battlemage with Level Zero V2 (pytorch issue 179891), which
            no ``try`` catches; preflight asks in a child process and passes ``properties``.
    Never raises for a missing or broken XPU: what cannot be asked stays unknown, with the reason in
    ``sources``.
    """
    device = torch.device(device)
    sources: dict[str, str] = {}
    common: dict[str, Any] = {
        "kind": device.type,
        "os": platform.system(),
        "torch_version": str(torch_module.__version__),
        "sources": sources,
    }
    if memory is not None:
        common["free_bytes"], common["total_bytes"] = memory
        sources["free_bytes"] = sources["total_bytes"] = "the host's memory helper"
    if device.type != "xpu":
        common.update(dtypes=("float32", "bfloat16", "float16"), has_fp64=device.type != "mps")
        return DeviceFacts(**common)
    xpu = torch_module.xpu
    if properties is None and ask_properties:
        properties = _ask(lambda: xpu.get_device_properties(device), "properties", sources)
    common.update(_property_facts(xpu, device, properties, sources))
    if memory is None:
        common.update(_memory_facts(xpu, device, properties, sources))
    return DeviceFacts(**common)


def _ask(question: Any, key: str, sources: dict[str, str]) -> Any:
    """Return the answer, or None with the reason noted."""
    try:
        return question()
    except (RuntimeError, AssertionError, AttributeError, ValueError, TypeError) as e:
        sources[key] = f"unknown: {type(e).__name__}: {e}"
        return None


def _property_facts(
    xpu: Any, device: torch.device, properties: object, sources: dict[str, str]
) -> dict[str, Any]:
    name = str(getattr(properties, "name", "") or "")
    architecture = int(getattr(properties, "architecture", 0) or 0)
    family = classify_family(name, architecture, properties)
    sources["family"] = "SYCL architecture number" if architecture else "device name"
    dtypes = ["float32"]
    if getattr(properties, "has_fp16", True):
        dtypes.append("float16")
    bf16 = getattr(properties, "has_bfloat16_conversions", None)
    if bf16 is None:  # the default call answers True for every device, emulation included
        bf16 = _ask(lambda: xpu.is_bf16_supported(including_emulation=False), "dtypes", sources)
    if bf16:
        dtypes.append("bfloat16")
    integrated = getattr(properties, "is_integrated_gpu", None)
    if integrated is None:
        integrated = family in ("meteor-lake", "lunar-lake", "panther-lake", *UNSUPPORTED_FAMILIES)
    sources["max_alloc_bytes"] = "policy: no single allocation of 4 GiB or more on any XPU"
    return {
        "name": name,
        "family": family,
        "driver": str(getattr(properties, "driver_version", "") or ""),
        "dtypes": tuple(dtypes),
        "has_fp64": bool(getattr(properties, "has_fp64", False)),
        "is_integrated": bool(integrated),
        "max_alloc_bytes": MAX_SINGLE_ALLOC_BYTES,
    }


def _memory_facts(
    xpu: Any, device: torch.device, properties: object, sources: dict[str, str]
) -> dict[str, Any]:
    """Free and total bytes; the free query is refused on integrated GPUs and some virtual machines."""
    total = int(getattr(properties, "total_memory", 0) or 0)
    answer = _ask(lambda: xpu.mem_get_info(device), "free_bytes", sources)
    if answer is not None:
        sources["free_bytes"] = sources["total_bytes"] = "torch.xpu.mem_get_info"
        return {"free_bytes": int(answer[0]), "total_bytes": int(answer[1])}
    reserved = _ask(lambda: xpu.memory_reserved(device), "reserved_bytes", sources)
    free = max(0, total - int(reserved or 0))
    sources["total_bytes"] = "device property total_memory"
    sources["free_bytes"] = "total minus reserved; other processes are invisible"
    return {
        "free_bytes": free,
        "total_bytes": total,
        "headroom_bytes": min(free, int(total * FREE_MARGIN)),
    }


_WORDS = {
    "fused_sdpa": FUSED_EVIDENCE,
    "family": (*SUPPORTED_FAMILIES, *UNSUPPORTED_FAMILIES, "unknown"),
    "kind": KINDS,
}


def facts_from_mapping(mapping: Mapping[str, object]) -> DeviceFacts:
    """Build facts from plain data.

    Args:
        mapping: field names of DeviceFacts to values; ``kind`` is required.
    Raises: FactsError naming the key that is unknown, missing, of the wrong type or out of range.
    """
    known = {item.name: str(item.type) for item in fields(DeviceFacts)}
    if "kind" not in mapping:
        raise FactsError("The device description has no key 'kind'. Add kind: xpu (or cpu, cuda).")
    values: dict[str, Any] = {}
    for key, value in mapping.items():
        if key not in known:
            raise FactsError(
                f"The device description has an unknown key '{key}'. Known keys: "
                f"{', '.join(sorted(known))}."
            )
        values[key] = checked(key, value, known[key], _WORDS.get(key))
    return DeviceFacts(**values)


def load_facts(path: str | Path) -> DeviceFacts:
    """Read facts from a YAML file.

    Raises: FactsError naming the file and the key.
    """
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        data = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (OSError, OmegaConfBaseException, yaml.YAMLError, ValueError) as e:
        raise FactsError(f"The device description {path} cannot be read: {e}") from e
    if not isinstance(data, dict):
        raise FactsError(f"The device description {path} is not a list of 'key: value' lines.")
    try:
        return facts_from_mapping(
            {str(k): v for k, v in cast("dict[object, object]", data).items()}
        )
    except FactsError as e:
        raise FactsError(f"{path}: {e}") from e
