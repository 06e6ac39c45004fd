"""How one run executes on the device: planned attention, a bound on what is in flight, faults.

On anything but an Intel GPU this is inert: no callable is attached and no block is wrapped.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import comfy.model_management as mm
import torch

from ..supir.layer_run import LayerRun
from ..xpu.attention import AttentionReport, PlannedAttention
from ..xpu.chunking import AttentionLimits, Policy
from ..xpu.device import EventLike, host_region, make_event, release_cached_memory
from ..xpu.faults import FaultBudget, check_finite, refuse_if_lost, run_guarded
from ..xpu.governor import WINDOW_LAUNCHES, DutyCycle, Governor
from . import host
from .machine import Machine, machine

AROUND_ATTENTION = 12
"""Launches around one attention call in a transformer block (norm, projections, feed-forward half,
residual): at most 12, counted on meta tensors."""

LAYER_LAUNCHES = 14
"""Launches of a residual, up- or downsampling layer or the output head: at most 14, counted."""

CANCEL = (mm.InterruptProcessingException,)


class Execution:
    """The execution of one run. Make it with ``Execution.for_run``; None means: run plainly.

    Args:
        device: where it runs.
        window_launches: launches in one window of the governor; 0 switches it off.
        policy, limits: of attention, when the plan or a test fixes them.
        event_factory, release: what waits for the device and frees its cached memory.
    """

    def __init__(
        self,
        device: Machine,
        *,
        window_launches: int = 0,
        duty_cycle: DutyCycle | None = None,
        policy: Policy = "auto",
        limits: AttentionLimits | None = None,
        event_factory: Callable[[], EventLike] = make_event,
        release: Callable[[], None] | None = release_cached_memory,
    ) -> None:
        self.facts = device.now()
        self.release = release
        self.governor = Governor.for_facts(self.facts, window_launches, duty_cycle=duty_cycle)
        self.governor.event_factory = event_factory
        self.governor.check_cancel = host.check_cancel
        self.budget = FaultBudget()
        self.attention_report = AttentionReport()
        self.attention = PlannedAttention(
            self.facts,
            limits,
            policy=policy,
            governor=self.governor,
            budget=self.budget,
            report=self.attention_report,
            cancel_types=CANCEL,
            release=release,
        )

    @classmethod
    def for_run(cls, device: Machine | None = None, **options: Any) -> Execution | None:
        """Return an execution on an Intel GPU, None elsewhere.

        Raises: DeviceLostError when the device was lost earlier in this process.
        """
        device = device or machine()
        if not device.facts.is_xpu:
            return None
        refuse_if_lost()
        doubtful = device.profile.known_bad or device.profile.careful
        options.setdefault("window_launches", WINDOW_LAUNCHES if doubtful else 0)
        if (
            device.simulated
        ):  # facts from the user's settings on another device: nothing to wait for
            options.setdefault("event_factory", _NoEvent)
            options.setdefault("release", None)
        return cls(device, **options)

    def override(self, previous: Any = None) -> Callable[..., torch.Tensor]:
        """Return the run's value for the host's attention slot, chained to what is there."""
        planned = self.attention.as_override(previous)

        def attend(*args: Any, **kwargs: Any) -> torch.Tensor:
            result = planned(*args, **kwargs)
            self.governor.tick(AROUND_ATTENTION)
            return result

        return attend

    def run_layer(self, name: str, run: LayerRun, h: torch.Tensor) -> torch.Tensor:
        """Run one layer of a network; on a known fault, the way the fault table says.

        Args: run: ``run(h, device, dtype)`` gives the layer's result on another device or dtype.
        """
        on_cpu = partial(self._elsewhere, run, h, torch.device("cpu"), None)
        in_float = partial(self._elsewhere, run, h, None, torch.float32)
        variants: dict[Any, Callable[[int], torch.Tensor]] = {
            "contiguous": lambda _: run(h.contiguous(), None, None),
            "dtype": lambda _: in_float(),
            "cpu_block": lambda _: on_cpu(),
        }
        result = self.guard(name, lambda: run(h, None, None), variants)
        if not name.startswith("SpatialTransformer"):
            self.governor.tick(LAYER_LAUNCHES)
        return result

    def guard(
        self,
        name: str,
        run: Callable[[], torch.Tensor],
        variants: dict[Any, Callable[[int], torch.Tensor]] | None = None,
    ) -> torch.Tensor:
        """Run something; on a known fault, try the variants the fault table allows."""
        return run_guarded(
            name,
            run,
            variants or {},
            self.budget,
            self.attention_report.faults,
            cancel_types=CANCEL,
            release=self.release,
        )

    @staticmethod
    def _elsewhere(
        run: LayerRun, h: torch.Tensor, device: torch.device | None, dtype: torch.dtype | None
    ) -> torch.Tensor:
        with host_region():
            result = run(h, device, dtype)
        return result.to(device=h.device, dtype=h.dtype)

    def finish(self) -> None:
        """Wait for what was submitted; call at the end of a phase."""
        self.governor.finish()

    def lines(self) -> list[str]:
        """Return what happened in words, for the run report."""
        a, g = self.attention_report, self.governor.report
        policies = ", ".join(f"{n} {name}" for name, n in sorted(a.policies.items()))
        lines = [f"attention: {a.calls} calls in {a.pieces} pieces ({policies or 'none'})"]
        if self.governor.enabled:
            lines.append(
                f"in flight: at most {g.max_in_flight} of {self.governor.limit} launches, "
                f"{g.waits} waits"
            )
        return [*lines, *a.faults.lines()]


def check_stage(stage: str, tensor: torch.Tensor) -> None:
    """Raise NonFiniteError naming the stage when a result holds NaN or infinity."""
    check_finite(stage, tensor)


class _NoEvent:
    """An event of a device that runs nothing asynchronously."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...
