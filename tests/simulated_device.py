"""An Intel GPU simulated over CPU tensors, for tests.

Counts launches and queue depth, enforces memory, single-allocation, float64 and random-number rules,
and fails, stalls, corrupts or dies at a chosen launch. Says nothing about speed, and nothing about
what a real driver does: it is simulated.

    with SimulatedDevice(DeviceSpec(total_bytes=2**30)) as dev:
        dev.inject("error: 45 (UR_RESULT_ERROR_INVALID_ARGUMENT)", op="bmm", nth=3)
        run()
    assert dev.launches == ...

By default every CPU tensor is on the device. After ``adopt`` only adopted tensors and what is
computed from them are, so that host work (schedules, noise, image files) is left out; ``to_host``
takes a tensor off again. Work in ``host_region`` is never on the device.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import types
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from supir_xpu.xpu import counting
from supir_xpu.xpu.device import DeviceFacts, in_host_region
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
RANDOM = ("randn", "rand", "randint", "randperm", "normal", "bernoulli", "uniform", "multinomial")
OOM_TEXT = (
    "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY): {wanted} more "
    "bytes wanted, {live} of {total} in use"
)
ALLOC_TEXT = (
    "XPU out of memory. Tried to allocate {wanted} bytes. The largest block is {limit} bytes"
)
FP64_TEXT = "Required aspect fp64 is not supported on the device"


@dataclass(frozen=True)
class DeviceSpec:
    """What the device is. ``sdpa`` says whether attention runs fused or as a score matrix."""

    total_bytes: int = 8 * GIB
    max_alloc_bytes: int = 4 * GIB
    has_fp64: bool = False
    allows_random: bool = False
    sdpa: str = "fused"
    family: str = "battlemage"
    driver: str = "32.0.101.8629"
    os: str = "Windows"
    max_queue: int = 0
    flops_per_s: float = 10e12


class SimulatedHang(BaseException):
    """Raised in the stalled thread when the test interrupts the stall."""


class QueueOverflowError(AssertionError):
    """More launches were in flight than the spec allows."""


@dataclass
class Injection:
    """What happens at one launch: the launch with this number, or the nth whose name matches."""

    action: str  # "raise", "hang", "die", "corrupt"
    at_launch: int = 0
    op: str = ""
    nth: int = 1
    times: int = 1
    text: str = ""
    error: type[BaseException] = RuntimeError
    code: int = 1
    seen: int = 0
    done: int = 0

    def due(self, launch: int, name: str) -> bool:
        if self.times and self.done >= self.times:
            return False
        if self.at_launch:
            hit = launch >= self.at_launch
        else:
            if not re.search(self.op, name):
                return False
            self.seen += 1
            hit = self.seen >= self.nth
        self.done += hit
        return hit


@dataclass
class SimulatedEvent:
    device: SimulatedDevice
    position: int = -1

    def record(self) -> None:
        self.position = self.device.launches

    def synchronize(self) -> None:
        assert self.position >= 0, "an event was waited for that was never recorded"
        self.device.completed = max(self.device.completed, self.position)
        self.device.syncs += 1


@dataclass
class Residents:
    """Storages that are on the device."""

    refs: dict[int, StorageWeakRef] = field(default_factory=dict)

    def add(self, t: torch.Tensor) -> None:
        storage = t.untyped_storage()
        self.refs[storage._cdata] = StorageWeakRef(storage)

    def drop(self, t: torch.Tensor) -> None:
        self.refs.pop(t.untyped_storage()._cdata, None)

    def has(self, t: torch.Tensor) -> bool:
        ref = self.refs.get(t.untyped_storage()._cdata)
        return ref is not None and not ref.expired()


class SimulatedDevice(TorchDispatchMode):
    """See the module's text. Counters are plain attributes."""

    def __init__(self, spec: DeviceSpec | None = None) -> None:
        super().__init__()
        self.spec = spec or DeviceSpec()
        self.ops: dict[str, int] = {}
        self.launches = 0
        self.completed = 0
        self.max_depth = 0
        self.syncs = 0
        self.largest = 0
        self.max_scores = 0
        self.dtypes: set[torch.dtype] = set()
        self.live = counting.LiveBytes()
        self.injections: list[Injection] = []
        self.hanging = threading.Event()
        self._resume = threading.Event()
        self._interrupted = False
        self._residents: Residents | None = None

    # ------------------------------------------------------------- what tests set up

    def inject(
        self, text: str, *, at_launch: int = 0, op: str = "", nth: int = 1, times: int = 1,
        error: type[BaseException] = RuntimeError,
    ) -> Injection:  # fmt: skip
        """Raise ``error(text)``; times 0 means every time from then on."""
        return self._plan(Injection("raise", at_launch, op, nth, times, text, error))

    def corrupt(
        self, *, at_launch: int = 0, op: str = "", nth: int = 1, times: int = 1
    ) -> Injection:
        """Fill the result with NaN without any error."""
        return self._plan(Injection("corrupt", at_launch, op, nth, times))

    def hang(self, at_launch: int) -> Injection:
        """Stop answering; ``release`` goes on, ``interrupt`` raises SimulatedHang there."""
        return self._plan(Injection("hang", at_launch))

    def die(self, at_launch: int, code: int = 0xD1) -> Injection:
        """End this process at once, as a machine that crashes. For child processes."""
        return self._plan(Injection("die", at_launch, code=code))

    def _plan(self, injection: Injection) -> Injection:
        assert injection.at_launch or injection.op or injection.action == "hang", "say when"
        self.injections.append(injection)
        return injection

    def adopt(self, *things: torch.Tensor | torch.nn.Module) -> None:
        """Put tensors, or a module's weights, on the device; the rest is then on the host."""
        self._residents = self._residents or Residents()
        for thing in things:
            if isinstance(thing, torch.nn.Module):
                parts = [*thing.parameters(), *thing.buffers()]
            else:
                parts = [thing]
            for t in parts:
                self._residents.add(t)

    def to_host(self, t: torch.Tensor) -> torch.Tensor:
        """Take a tensor off the device, as a read back would; waits for the queue."""
        self.synchronize()
        if self._residents is not None:
            self._residents.drop(t)
        return t

    def is_on_device(self, t: torch.Tensor) -> bool:
        return self._residents is None or self._residents.has(t)

    # ------------------------------------------------------------- what the pack is given

    def event(self) -> SimulatedEvent:
        return SimulatedEvent(self)

    def synchronize(self) -> None:
        self.completed = self.launches
        self.syncs += 1

    def release(self) -> None:
        self._resume.set()

    def interrupt(self) -> None:
        self._interrupted = True
        self._resume.set()

    def facts(self, **changes: object) -> DeviceFacts:
        """Facts of this device, as a probe would report them."""
        facts = DeviceFacts(
            kind="xpu",
            family=self.spec.family,
            os=self.spec.os,
            driver=self.spec.driver,
            torch_version=torch.__version__,
            name=f"Simulated {self.spec.family}",
            total_bytes=self.spec.total_bytes,
            free_bytes=self.spec.total_bytes,
            max_alloc_bytes=self.spec.max_alloc_bytes,
            dtypes=("float32", "float16", "bfloat16"),
            has_fp64=self.spec.has_fp64,
            fused_sdpa=self.spec.sdpa,
            flops_per_s=self.spec.flops_per_s,
            sources={"kind": "simulated"},
        )
        return replace(facts, **changes)

    def torch_module(self) -> types.SimpleNamespace:
        """An object shaped like torch whose xpu is this device."""
        properties = types.SimpleNamespace(
            name="Intel(R) Arc(TM) B580 Graphics (simulated)",
            total_memory=self.spec.total_bytes,
            driver_version=self.spec.driver,
            has_fp16=True,
            has_fp64=self.spec.has_fp64,
            has_bfloat16_conversions=True,
            architecture=0x500400400,
            is_integrated_gpu=False,
        )
        xpu = types.SimpleNamespace(
            get_device_properties=lambda device=None: properties,
            mem_get_info=lambda device=None: (self.free_bytes, self.spec.total_bytes),
            memory_reserved=lambda device=None: self.live.current,
            synchronize=lambda device=None: self.synchronize(),
            Event=self.event,
        )
        return types.SimpleNamespace(__version__=torch.__version__, xpu=xpu)

    @property
    def free_bytes(self) -> int:
        self.live.sweep()
        return self.spec.total_bytes - self.live.current

    @property
    def depth(self) -> int:
        return self.launches - self.completed

    # ------------------------------------------------------------- the device itself

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = counting.op_name(func)
        if in_host_region():
            return func(*args, **kwargs)
        parts = counting.decomposed(self, func, args, kwargs)
        if parts is not NotImplemented:
            return parts
        operands = [*counting.tensors((args, kwargs))]
        if self._residents is not None and not any(self._residents.has(t) for t in operands):
            return func(*args, **kwargs)
        if counting.is_fused_attention(name) and self.spec.sdpa == "math":
            return self._unfused(func, args, kwargs)
        self._check_random(name, kwargs)
        launch = counting.is_launch(func)
        due = self._before(name) if launch else []
        if name == "_local_scalar_dense":
            self.synchronize()
        result = func(*args, **kwargs)
        self._after(func, name, result)
        for injection in due:
            if injection.action == "corrupt":
                for t in counting.tensors(result):
                    if t.is_floating_point():
                        t.fill_(float("nan"))
        return result

    def _unfused(self, func, args, kwargs):
        names = [a.name for a in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        q, k, v = args[:3]
        if given.get("enable_gqa"):
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        with self:
            math = torch.ops.aten._scaled_dot_product_attention_math
            return math(q, k, v, given.get("attn_mask"), scale=given.get("scale"))[0]

    def _check_random(self, name: str, kwargs: dict) -> None:
        if self.spec.allows_random or not name.startswith(RANDOM):
            return
        if self._residents is None and kwargs.get("generator") is None:
            return  # without adopt, plain host noise cannot be told from device noise
        raise AssertionError(f"random numbers were drawn on the device by {name}")

    def _before(self, name: str) -> list[Injection]:
        number = self.launches + 1
        due = [i for i in self.injections if i.due(number, name)]
        for injection in due:
            if injection.action == "raise":
                raise injection.error(injection.text)
            if injection.action == "die":
                os._exit(injection.code & 0xFF)
            if injection.action == "hang":
                self.hanging.set()
                self._resume.wait()
                if self._interrupted:
                    raise SimulatedHang
        self.launches = number
        self.ops[name] = self.ops.get(name, 0) + 1
        self.max_depth = max(self.max_depth, self.depth)
        if self.spec.max_queue and self.depth > self.spec.max_queue:
            raise QueueOverflowError(f"{self.depth} launches in flight at {name}")
        return due

    def _after(self, func, name: str, result: object) -> None:
        fresh = not counting.is_view(func)
        written = any(r.alias_info is not None for r in func._schema.returns)
        for t in counting.tensors(result):
            if self._residents is not None:
                self._residents.add(t)
            if not fresh:
                continue
            if t.dtype == torch.float64 and not self.spec.has_fp64:
                raise RuntimeError(FP64_TEXT)
            self.dtypes.add(t.dtype)
            if name in counting.SOFTMAX:
                self.max_scores = max(self.max_scores, t.numel())
            if not written:
                self._allocate(t)

    def _allocate(self, t: torch.Tensor) -> None:
        size = t.untyped_storage().nbytes()
        self.largest = max(self.largest, size)
        if size > self.spec.max_alloc_bytes:
            text = ALLOC_TEXT.format(wanted=size, limit=self.spec.max_alloc_bytes)
            raise torch.OutOfMemoryError(text)
        if self.live.current + size > self.spec.total_bytes:
            self.live.sweep()
        if self.live.current + size > self.spec.total_bytes:
            raise RuntimeError(
                OOM_TEXT.format(wanted=size, live=self.live.current, total=self.spec.total_bytes)
            )
        self.live.born(t)


CHILD_HEAD = """
import importlib.util, os, sys
root = {root!r}
spec = importlib.util.spec_from_file_location(
    "supir_xpu", os.path.join(root, "__init__.py"), submodule_search_locations=[root])
pack = importlib.util.module_from_spec(spec)
sys.modules["supir_xpu"] = pack
spec.loader.exec_module(pack)
from supir_xpu.tests.simulated_device import *
import torch
"""


def run_child(code: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run Python code in a child process with the pack and this module imported."""
    return subprocess.run(
        [sys.executable, "-s", "-c", CHILD_HEAD.format(root=str(ROOT)) + code],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=timeout_s,
        check=False,
    )
