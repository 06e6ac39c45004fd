"""A simulated Intel GPU for the preflight's child process; loaded there by path.

Computes on the processor and fails as told. Says nothing about what a real driver does.

Options:
    faults: list of {"op": regex of the ATen operation, "action": "raise" | "hang" | "die" |
        "corrupt" | "slow", "text": message, "dtype": only with such an argument, "nth": from which
        time on}.
    count, count_error, start_error, compiled, properties, properties_action, warning, arch_list,
    memory ("refused"), free_bytes, largest_bytes, garbled_bytes, peak_bytes, nan_after_release,
    read_back_helps, copy_s, processor_s, silent_import.
"""

from __future__ import annotations

import contextlib
import faulthandler
import re
import time
import types
import warnings

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PROPERTIES = {
    "name": "Intel(R) Arc(TM) B580 Graphics",
    "driver_version": "1.6.33578",
    "uuid": "simulated-0001",
    "has_fp16": True,
    "has_fp64": True,
    "has_bfloat16_conversions": True,
    "is_integrated_gpu": False,
    "total_memory": 12 * 2**30,
}


def spin():
    while True:  # one core busy, no error, as the second report describes
        pass


class Faults(TorchDispatchMode):
    def __init__(self, faults, device):
        super().__init__()
        self.faults = faults
        self.device = device
        self.seen = [0] * len(faults)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.name()
        if self.device.on_host:
            if self.device.options.get("processor_s") and "conv" in name:
                time.sleep(self.device.options["processor_s"])
            return func(*args, **kwargs)
        for number, fault in enumerate(self.faults):
            if not re.search(fault["op"], name) or not self.fits(fault, args, kwargs):
                continue
            self.seen[number] += 1
            if self.seen[number] < fault.get("nth", 1):
                continue
            if fault["action"] == "corrupt":
                return damaged(func(*args, **kwargs), self.seen[number])
            act(fault)
        return func(*args, **kwargs)

    @staticmethod
    def fits(fault, args, kwargs):
        if "dtype" not in fault:
            return True
        wanted = getattr(torch, fault["dtype"])
        leaves = [*tree_leaves(args), *tree_leaves(kwargs)]
        return any(leaf is wanted or getattr(leaf, "dtype", None) is wanted for leaf in leaves)


def act(fault):
    action = fault["action"]
    if action == "raise":
        raise RuntimeError(fault["text"])
    if action == "hang":
        spin()
    if action == "die":
        faulthandler._sigsegv()
    if action == "slow":
        time.sleep(fault["seconds"])


def damaged(result, times):
    first = result[0] if isinstance(result, tuple) else result
    first.add_(0.5 * times)
    return result


def stand_in(base, options):
    kind = type(base)

    class Simulated(kind):
        on_host = False
        read = True
        poisoned = False

        def is_compiled(self):
            return self.options.get("compiled", True)

        def count(self):
            if "warning" in self.options:
                warnings.warn(self.options["warning"], stacklevel=1)
            if "count_error" in self.options:
                raise RuntimeError(self.options["count_error"])
            return self.options.get("count", 64)

        def start(self):
            if "start_error" in self.options:
                raise RuntimeError(self.options["start_error"])

        def arch_list(self):
            return self.options.get("arch_list", ["bmg", "dg2"])

        def properties(self):
            action = self.options.get("properties_action")
            if action:
                act({"action": action, "text": "invalid stoull argument"})
            return {**PROPERTIES, **self.options.get("properties", {})}

        def memory_info(self):
            if self.options.get("memory") == "refused":
                raise RuntimeError("The device doesn't support querying the available free memory.")
            return self.options.get("free_bytes", 10 * 2**30), 12 * 2**30

        def crawl(self, tensor):
            if tensor.ndim == 1 and tensor.numel() >= 2**14:  # as the rates are measured with
                time.sleep(self.options.get("copy_s", 0.0))

        def upload(self, tensor):
            self.crawl(tensor)
            self.read = self.poisoned = False
            with self.host():
                return tensor.clone()

        def download(self, tensor):
            self.crawl(tensor)
            self.read = True
            with self.host():
                copy = tensor.clone()
                if self.poisoned and copy.is_floating_point():
                    copy.fill_(float("nan"))
                size = self.options.get("garbled_bytes")
                if size and tensor.untyped_storage().nbytes() > size:
                    copy.zero_()
                return copy

        def synchronize(self):
            pass

        def event(self):
            return types.SimpleNamespace(record=lambda: None, synchronize=lambda: None)

        def empty_cache(self):
            helps = self.options.get("read_back_helps", True)
            if self.options.get("nan_after_release") and not (self.read and helps):
                self.poisoned = True

        def reset_peak(self):
            return 0

        def peak(self):
            return self.options.get("peak_bytes", 0)

        @contextlib.contextmanager
        def host(self):
            before, self.on_host = self.on_host, True
            try:
                yield
            finally:
                self.on_host = before

    device = Simulated("cpu", torch)
    device.options = options
    faults = list(options.get("faults", []))
    if "largest_bytes" in options:
        device.largest = options["largest_bytes"]
        real = torch.empty

        def empty(*args, **kwargs):
            if args and isinstance(args[0], int) and args[0] > device.largest:
                raise torch.OutOfMemoryError(
                    f"XPU out of memory. Tried to allocate {args[0]} bytes"
                )
            return real(*args, **kwargs)

        torch.empty = empty
    Faults(faults, device).__enter__()
    return device
