"""The child process of the preflight: run by path, asks one device, answers in JSON lines.

Imports torch and the standard library only; loads its siblings by path, so no package and no
ComfyUI is ever imported. Owns the protocol and the thin layer over the device. Decides nothing:
the parent keeps the deadlines and reads the answers.

    python -s -X faulthandler probe_child.py '{"device": "xpu:0", "stages": [1, 2], ...}'

The request may name a ``stand_in``: the path of a Python file whose ``stand_in(device, options)``
gets the ``Device`` and returns the object to use instead. It exists so that a device can be
simulated; nothing in the product sets it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import sys
import time
import types
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

STAGE_FILES = {
    0: "probe_stages_basic", 1: "probe_stages_basic", 2: "probe_stages_basic",
    3: "probe_stages_basic", 4: "probe_stages_math", 5: "probe_stages_math",
    6: "probe_stages_math", 7: "probe_stages_cost", 8: "probe_stages_cost", 9: "probe_stages_cost",
}  # fmt: skip

PROPERTIES = (
    "name", "platform_name", "vendor", "device_id", "driver_version", "version", "type", "uuid",
    "architecture", "total_memory", "max_compute_units", "gpu_eu_count", "max_work_group_size",
    "has_fp16", "has_fp64", "has_bfloat16_conversions", "is_integrated_gpu",
    "has_subgroup_matrix_multiply_accumulate", "has_subgroup_2d_block_io",
)  # fmt: skip

SELF_END_S = 10.0
"""A child whose parent is gone ends itself this long after its deadline (seconds, our choice)."""

TEXT_LIMIT = 600


class LostError(RuntimeError):
    """The device's state is gone; nothing after it in this process means anything."""


class Device:
    """What the checks use of one torch device. A missing answer raises, as the runtime does."""

    def __init__(self, name: str, torch: Any) -> None:
        self.name = name
        self.torch = torch
        self.module: Any = torch.get_device_module(name)

    @property
    def is_host(self) -> bool:
        """True when the device is the processor itself."""
        return self.name.split(":")[0] == "cpu"

    @property
    def index(self) -> int:
        """Number of the device among those of its kind."""
        return int(self.name.partition(":")[2] or 0)

    def is_compiled(self) -> bool:
        """True if this torch was built for the kind of device."""
        return bool(getattr(self.module, "_is_compiled", lambda: True)())

    def count(self) -> int:
        """Return how many devices of this kind there are."""
        return int(self.module.device_count())

    def start(self) -> None:
        """Initialise the runtime, so that its own message comes up if it cannot."""
        getattr(self.module, "init", lambda: None)()

    def arch_list(self) -> list[str]:
        """Return the architectures this torch was compiled for."""
        return list(getattr(self.module, "get_arch_list", list)())

    def properties(self) -> dict[str, Any]:
        """Return the device's properties; this call can end the process (pytorch issue 179891)."""
        if self.is_host:
            return {"name": "cpu", "driver_version": "", "type": "cpu"}
        found = self.module.get_device_properties(self.index)
        return {key: getattr(found, key) for key in PROPERTIES if hasattr(found, key)}

    def memory_info(self) -> tuple[int, int]:
        """Return (free, total) bytes."""
        free, total = self.module.mem_get_info(self.index)
        return int(free), int(total)

    def upload(self, tensor: Any) -> Any:
        """Copy a tensor to the device."""
        return tensor.to(self.name, copy=True)

    def download(self, tensor: Any) -> Any:
        """Copy a tensor to the host."""
        return tensor.to("cpu", copy=True)

    def synchronize(self) -> None:
        """Wait until everything submitted is finished."""
        self.module.synchronize()

    def event(self) -> Any:
        """Return a new event, or None where there is no such thing."""
        return None if self.is_host else self.module.Event()

    def empty_cache(self) -> None:
        """Give cached blocks back to the driver."""
        getattr(self.module, "empty_cache", lambda: None)()

    def reset_peak(self) -> int:
        """Start a new peak of allocated bytes; return what is allocated now, -1 if not known."""
        if not hasattr(self.module, "reset_peak_memory_stats"):
            return -1
        self.module.reset_peak_memory_stats()
        return int(self.module.memory_allocated())

    def peak(self) -> int:
        """Return the peak of allocated bytes since ``reset_peak``."""
        return int(self.module.max_memory_allocated())

    def host(self) -> contextlib.AbstractContextManager[None]:
        """Return a context around reference work on the processor."""
        return contextlib.nullcontext()


class Bench:
    """Runs checks one by one, tells the parent before and after each."""

    def __init__(self, device: Device, request: Mapping[str, Any], out: TextIO) -> None:
        self.device = device
        self.torch = device.torch
        self.small = bool(request.get("small"))
        self.facts: Mapping[str, Any] = request.get("facts", {})
        self.seconds = float(request.get("longest_s", 600.0))
        self.stage = 0
        self._lost = re.compile(str(request.get("lost_pattern") or "(?!)"), re.I | re.S)
        self._out = out

    def size(self, full: int, small: int) -> int:
        """Return a size of the job, or a small one for a simulated device."""
        return small if self.small else full

    def random(self, *shape: int, dtype: Any = None, seed: int = 0) -> Any:
        """Return normally distributed numbers, on the processor."""
        with self.device.host():
            generator = self.torch.Generator().manual_seed(seed)
            values = self.torch.randn(shape, generator=generator)
            return values if dtype is None else values.to(dtype)

    def whole(self, *shape: int, seed: int = 0) -> Any:
        """Return float32 whole numbers -8 to 8: sums of them are exact in any order."""
        with self.device.host():
            generator = self.torch.Generator().manual_seed(seed)
            return self.torch.randint(-8, 9, shape, generator=generator).float()

    def upload(self, tensor: Any) -> Any:
        """Copy a tensor to the device."""
        return self.device.upload(tensor)

    def say(self, event: str, **values: Any) -> None:
        """Send one line to the parent."""
        self._out.write(json.dumps({"event": event, **values}, default=str) + "\n")
        self._out.flush()

    def check(
        self,
        name: str,
        run: Callable[[], Mapping[str, Any]],
        *,
        dtype: str = "",
        ways: Mapping[str, Callable[[], Mapping[str, Any]]] | None = None,
    ) -> Mapping[str, Any]:
        """Run one check; if it fails, look for a way around it.

        Args:
            run: does the work and returns numbers; ``wrong`` among them is the text of a mismatch,
                ``skipped`` the reason for not running.
            ways: name of a workaround to the same check done that way; the first that gives right
                numbers is reported.
        Returns: the numbers of ``run``, empty if it raised.
        Raises: LostError once the device is lost.
        """
        started = time.perf_counter()
        status, text, numbers = self._attempt(name, run)
        tried: list[str] = []
        works = ""
        for way, other in (ways or {}).items() if status in ("error", "wrong") else ():
            tried.append(way)
            if self._attempt(f"{name}, {way}", other)[0] == "ok":
                works = way
                break
        self.say(
            "result",
            stage=self.stage,
            name=name,
            status=status,
            dtype=dtype,
            text=text,
            workaround=works,
            tried=tried,
            seconds=time.perf_counter() - started,
            numbers=numbers,
        )
        return numbers

    def _attempt(
        self, name: str, run: Callable[[], Mapping[str, Any]]
    ) -> tuple[str, str, dict[str, Any]]:
        self.say("start", stage=self.stage, name=name)
        faulthandler.dump_traceback_later(self.seconds + SELF_END_S, exit=True)
        try:
            numbers = dict(run())
        except Exception as e:  # whatever the runtime raises is the answer the parent wants
            text = f"{type(e).__name__}: {e}"[:TEXT_LIMIT]
            if self._lost.search(text):
                self.say("result", stage=self.stage, name=name, status="lost", text=text)
                raise LostError(text) from e
            return "error", text, {}
        finally:
            faulthandler.cancel_dump_traceback_later()
        for status in ("wrong", "skipped"):
            if status in numbers:
                return status, str(numbers.pop(status))[:TEXT_LIMIT], numbers
        return "ok", "", numbers

    def compare(self, result: Any, expected: Any, tolerance: float = 0.0) -> dict[str, Any]:
        """Bring a device tensor to the host and ``judge`` it."""
        return self.judge(self.device.download(result), expected, tolerance)

    def judge(self, found: Any, expected: Any, tolerance: float = 0.0) -> dict[str, Any]:
        """Compare two host tensors.

        Args:
            tolerance: largest difference as a part of the largest expected value; 0 means equal.
        Returns: ``error``, the relative difference, and ``wrong`` if it is too large.
        """
        with self.device.host():
            if found.shape != expected.shape:
                return {"wrong": f"shape {tuple(found.shape)} instead of {tuple(expected.shape)}"}
            found, expected = found.double(), expected.double()
            bad = int((~self.torch.isfinite(found)).sum())
            if bad:
                return {"wrong": f"{bad} of {found.numel()} values are NaN or infinite"}
            scale = max(float(expected.abs().max()), 1e-30)
            error = float((found - expected).abs().max()) / scale
        if error > tolerance:
            return {
                "error": error,
                "wrong": f"differs from the processor's result by {error:.2e} of the largest "
                f"value; allowed is {tolerance:.0e}",
            }
        return {"error": error}


def load_file(path: Path) -> types.ModuleType:
    """Run a Python file as a module, without any search path."""
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules[path.stem] = module
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), module.__dict__)
    return module


def run(request: Mapping[str, Any], out: TextIO) -> None:
    """Carry out one request."""
    # A spinning thread cannot be interrupted from Python, and the parent may be gone.
    faulthandler.dump_traceback_later(
        float(request.get("longest_s", 600.0)) + SELF_END_S, exit=True
    )
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        import torch

        device = Device(str(request["device"]), torch)
        if request.get("stand_in"):
            plug_in = load_file(Path(request["stand_in"]))
            device = plug_in.stand_in(device, request.get("stand_in_options", {}))
        bench = Bench(device, request, out)
        bench.say("ready", torch=str(torch.__version__), pid=os.getpid())
        files = {
            name: load_file(Path(__file__).with_name(f"{name}.py"))
            for name in sorted({STAGE_FILES[0], *(STAGE_FILES[s] for s in request["stages"])})
        }
        faulthandler.cancel_dump_traceback_later()
        with torch.inference_mode(), contextlib.suppress(LostError):
            for stage in request["stages"]:
                bench.stage = int(stage)
                bench.say("stage", stage=bench.stage)
                files[STAGE_FILES[bench.stage]].STAGES[bench.stage](bench)
                bench.say("warnings", texts=[str(w.message)[:TEXT_LIMIT] for w in heard][:20])
            libraries = load_file(Path(__file__).with_name("probe_libraries.py"))
            bench.say("libraries", texts=libraries.loaded_libraries())
    bench.say("done")


def main() -> None:
    """Answer on the real standard output; whatever libraries print goes to standard error."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        run(json.loads(sys.argv[1]), out)
    except (ImportError, OSError) as e:  # OSError: a library of torch did not load
        out.write(json.dumps({"event": "failed", "text": f"{type(e).__name__}: {e}"}) + "\n")
    out.flush()
    sys.stderr.flush()
    os._exit(0)  # the runtime may deadlock when the interpreter ends (pytorch issue 126259)


if __name__ == "__main__":
    main()
