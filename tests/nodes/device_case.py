"""The nodes on a simulated Intel GPU: what a host would move there is moved, the rest stays.

ComfyUI's own device is the CPU, so every copy to the device is a copy that does nothing. Here the
places where the host copies are marked: models when they are loaded, the sampler's inputs, the
conditionings, what enters a VAE.
"""

from __future__ import annotations

import importlib
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import comfy.samplers
import torch
from supir_xpu.nodes import execution, guider, host, sampler
from supir_xpu.nodes.machine import Machine
from supir_xpu.supir import striped
from supir_xpu.supir.striped import moments
from supir_xpu.tests.simulated_device import DeviceSpec, SimulatedDevice
from supir_xpu.xpu.counting import tensors
from supir_xpu.xpu.device_profiles import load_profiles
from supir_xpu.xpu.faults import reset_device_lost

machine = importlib.import_module("supir_xpu.nodes.machine")  # a function there has its name

GOOD = DeviceSpec(os="Linux", driver="25.40", family="pvc")
"""A device without a record of crashes: no window."""

BAD = DeviceSpec()
"""The driver of the first crash report: bounded by the governor."""


@dataclass
class Case:
    """One simulated device under the nodes.

    Attributes:
        loops: launches of each sampling loop. codings: of each encode or decode of a picture.
        executions: those the nodes made, in order. events: what was sent to the client.
    """

    dev: SimulatedDevice
    everything: bool = False
    loops: list[int] = field(default_factory=list)
    codings: list[int] = field(default_factory=list)
    executions: list[Any] = field(default_factory=list)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def adopt(self, *things: Any) -> None:
        if not self.everything:
            self.dev.adopt(*things)

    @contextmanager
    def counting(self, into: list[int]) -> Generator[None]:
        before = self.dev.launches
        yield
        into.append(self.dev.launches - before)


def place(spec: DeviceSpec, on: bool = True) -> Machine:
    """The machine of a spec, as the nodes know it."""
    facts = SimulatedDevice(spec).facts()
    if not on:
        facts = replace(facts, kind="cpu")
    return Machine(facts, load_profiles().pick(facts), simulated=True)


def flat(report: Any) -> str:
    """The report a node shows, as one text."""
    return "\n".join(report.ui["text"])


def numbers(report: Any) -> dict[str, Any]:
    """The report a node shows, as JSON values."""
    return report.ui["supir_xpu"][0]


@contextmanager
def simulated(
    monkeypatch: Any,
    spec: DeviceSpec = GOOD,
    *,
    on: bool = True,
    everything: bool = False,
    counted: bool = True,
) -> Generator[Case]:
    """Run what is inside on a simulated device.

    Args: on: False counts with it, but has the pack believe in a CPU.
        everything: every tensor is on the device, also the host's own.
        counted: False leaves the device out, which is faster; only its facts are there.
    """
    dev = SimulatedDevice(spec)
    case = Case(dev, everything)
    case.adopt()
    with monkeypatch.context() as patch:
        patch.setattr(machine, "_machine", place(spec, on))
        patch.setattr(execution, "_NoEvent", dev.event)
        patch.setattr(moments, "on_cpu", lambda t: False)
        patch.setattr(host, "WAIT_SLICE_S", 0.001)
        patch.setattr(host, "send_event", lambda name, data: case.events.append((name, data)))
        patch.setattr(host, "wait", lambda seconds, why: None)
        _mark_uploads(patch, case)
        _mark_codings(patch, case)
        made = execution.Execution.__init__

        def note(self: Any, *args: Any, **kwargs: Any) -> None:
            made(self, *args, **kwargs)
            case.executions.append(self)

        patch.setattr(execution.Execution, "__init__", note)
        reset_device_lost()
        try:
            with dev if counted else nullcontext():
                yield case
        finally:
            reset_device_lost()


def _mark_uploads(patch: Any, case: Case) -> None:
    inner = comfy.samplers.CFGGuider.inner_sample
    conds = comfy.samplers.process_conds
    dev = case.dev

    def inner_sample(
        self: Any,
        noise: Any,
        latent: Any,
        device: Any,
        sampler: Any,
        sigmas: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        case.adopt(self.inner_model, noise, latent, sigmas)
        for patcher in self.model_patcher.get_nested_additional_models():
            case.adopt(patcher.model)
        inputs = getattr(self, "inputs", None)
        if inputs is not None:
            case.adopt(*(t for t in (inputs.hint, inputs.center) if t is not None))
        out = inner(self, noise, latent, device, sampler, sigmas, *args, **kwargs)
        return dev.to_host(out.clone())

    def process_conds(*args: Any, **kwargs: Any) -> Any:
        out = conds(*args, **kwargs)
        for cond in (c for row in out.values() for c in row):
            case.adopt(*tensors([getattr(v, "cond", None) for v in cond["model_conds"].values()]))
        return out

    patch.setattr(comfy.samplers.CFGGuider, "inner_sample", inner_sample)
    patch.setattr(comfy.samplers, "process_conds", process_conds)
    for name in ("sample_edm", "sample_dpmpp_2m"):
        patch.setattr(sampler, name, _counted(getattr(sampler, name), case))


def _counted(function: Any, case: Case) -> Any:
    def loop(*args: Any, **kwargs: Any) -> Any:
        with case.counting(case.loops):
            return function(*args, **kwargs)

    return loop


def _mark_codings(patch: Any, case: Case) -> None:
    def marked(function: Any) -> Any:
        def run(net: Any, x: torch.Tensor, options: Any) -> torch.Tensor:
            x = x.clone()
            case.adopt(net, x)
            with case.counting(case.codings):
                return function(net, x, options)

        return run

    for name in ("encode", "decode"):
        patch.setattr(striped, name, marked(getattr(striped, name)))


__all__ = ["BAD", "GOOD", "Case", "flat", "guider", "numbers", "simulated"]
