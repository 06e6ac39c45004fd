"""How one run executes on the device: planned attention, a bound on what is in flight, faults.

On anything but an Intel GPU this is inert: no callable is attached and no block is wrapped.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import comfy.model_management as mm
import torch

from ..supir.layer_run import LayerRun
from ..xpu.attention import AttentionReport, PlannedAttention
from ..xpu.chunking import AttentionLimits, Policy
from ..xpu.device import EventLike, host_region, make_event, release_cached_memory
from ..xpu.faults import (
    CATCHABLE,
    FaultBudget,
    check_finite,
    device_lost_reason,
    raise_known,
    refuse_if_lost,
    run_guarded,
)
from ..xpu.governor import FIRST_STALL_S, WINDOW_LAUNCHES, DutyCycle, Governor, StallWatch
from ..xpu.workarounds import Workarounds
from . import host
from .machine import Machine, machine
from .planning import forced_policy

AROUND_ATTENTION = 30
"""Most launches between two attention calls of a transformer (projection, feed-forward, norms,
queries, keys, values), every weight cast before its use; counted."""

CHAINED_TO = "supir_xpu_chained_to"
"""Attribute of our attention callables: the callable they were chained to, or None."""

LAYER_LAUNCHES = 30
"""Most launches of a layer without attention, or after the last attention of one; counted as above."""

AROUND_NETWORK = 48
"""Most launches of a sampler's step, a guider or the host before, between or after networks; counted."""

GOVERNED_STALL_S = 120.0
"""No progress for this long is reported while the governor bounds what is in flight: far more than
a window of launches takes, and than compiling the kernels of one layer."""

FREE_STALL_S = FIRST_STALL_S
"""The same without the governor, where one wait may last for everything submitted before it."""

CANCEL = (mm.InterruptProcessingException,)

log = logging.getLogger(__name__)


class Execution:
    """The execution of one run. Make it with ``Execution.for_run``; None means: run plainly.

    Args:
        device: where it runs. A degraded one is used with exactly the preflight's workarounds.
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
        self.facts, self._device = device.now(), device
        self.ways = _another_way(device)
        self._reads_back = device.workarounds.get("silence") == "read_back"
        self._last: weakref.ref[torch.Tensor] | None = None
        if policy == "auto":
            policy = forced_policy(device.workarounds.get("attention", ""))
        self.release = None if release is None else partial(self._release, release)
        self.released = False
        self.stalls: list[str] = []
        self._parted = self._can_part = False
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
            release=self.release,
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
        """Return the run's value for the host's attention slot, chained to what is there.

        What another execution of this pack put there is replaced, so no call is planned twice.
        """
        previous = getattr(previous, CHAINED_TO, previous)
        planned = self.attention.as_override(previous)

        def attend(*args: Any, **kwargs: Any) -> torch.Tensor:
            self.governor.tick(AROUND_ATTENTION)
            return planned(*args, **kwargs)

        setattr(attend, CHAINED_TO, previous)
        return attend

    def run_layer(self, name: str, run: LayerRun, h: torch.Tensor) -> torch.Tensor:
        """Run one layer of a network; on a known fault, the way the fault table says.

        Args: run: ``run(h, device, dtype)`` gives the layer's result on another device or dtype.
        """
        self._last = weakref.ref(h)
        on_cpu = partial(self._elsewhere, run, h, torch.device("cpu"), None)
        in_float = partial(self._elsewhere, run, h, None, torch.float32)
        variants: dict[Any, Callable[[int], torch.Tensor]] = {
            "contiguous": lambda _: run(h.contiguous(), None, None),
            "dtype": lambda _: in_float(),
            "cpu_block": lambda _: on_cpu(),
        }
        result = self.guard(
            name, lambda: run(h, None, None), variants, memory_outside=self._can_part
        )
        self.governor.tick(AROUND_NETWORK if name == "Sequential" else LAYER_LAUNCHES)
        return result

    def run_stripe_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Attend within a VAE, after the launches that made the queries."""
        self.governor.tick(LAYER_LAUNCHES)
        self._last = weakref.ref(q)
        return self.attention(q, k, v)

    def around_network(self) -> None:
        """Account for what a sampler, a guider or the host submitted around a network."""
        self.governor.tick(AROUND_NETWORK)

    def guard(
        self,
        name: str,
        run: Callable[[], torch.Tensor],
        variants: dict[Any, Callable[[int], torch.Tensor]] | None = None,
        memory_outside: bool = False,
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
            memory_outside=memory_outside,
        )

    def run_tile(
        self, together: Callable[[], torch.Tensor], apart: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Run the networks on one tile with what the host does around them.

        Args: apart: the same with every conditioning in a call of its own, which takes half the
            memory; all later tiles run so once it was needed.
        """

        def halved(_: int) -> torch.Tensor:
            self._parted, self._can_part = True, False
            return apart()

        self.around_network()
        try:
            self._can_part = not self._parted
            ways: dict[Any, Callable[[int], torch.Tensor]] = {}
            if self._can_part:
                ways["smaller"] = halved
            result = self.guard("tile", apart if self._parted else together, ways)
        finally:
            self._can_part = False
        self.around_network()
        return result

    @staticmethod
    def _elsewhere(
        run: LayerRun, h: torch.Tensor, device: torch.device | None, dtype: torch.dtype | None
    ) -> torch.Tensor:
        with host_region():
            result = run(h, device, dtype)
        return result.to(device=h.device, dtype=h.dtype)

    @contextmanager
    def phase(self, name: str, node: str = "") -> Generator[None]:
        """Run a phase: watched from the side, waited for, known faults turned into clear errors.

        Raises: DeviceLostError, DeviceMemoryError, DeviceFaultError instead of the driver's texts.
        """

        def on_stall(message: str) -> None:
            self.stalls.append(f"STALL in {name}: {message}")
            log.error("%s: %s", name, message)
            host.send_event("supir_xpu.stall", {"node": node, "phase": name, "message": message})

        pause = GOVERNED_STALL_S if self.governor.enabled else FREE_STALL_S
        ways = self.ways if self.ways.is_needed else nullcontext()
        with StallWatch(on_stall, FIRST_STALL_S, pause) as watch, ways:
            self.governor.on_tick = watch.beat
            try:
                yield
                self.governor.finish()
            except CATCHABLE as e:
                raise_known(name, e, self.attention_report.faults)
                raise
            finally:
                self.governor.on_tick = None
                self._note_loss()

    def beat(self) -> None:
        """Note that the run went on."""
        if self.governor.on_tick is not None:
            self.governor.on_tick()

    def check(self, stage: str, tensor: torch.Tensor) -> None:
        """Raise NonFiniteError naming the stage when a result holds NaN or infinity."""
        check_finite(stage, tensor, after_release=self.released)

    def _release(self, release: Callable[[], None]) -> None:
        self.released = True
        live = self._last() if self._reads_back and self._last is not None else None
        if live is not None and live.numel() > 0:
            live.reshape(-1)[:1].to("cpu", copy=True)
        release()

    def _note_loss(self) -> None:
        """After the device was lost, have the next process check it again."""
        reason = device_lost_reason()
        if reason is not None and self._device.health is not None:
            self._device.health.spoil(reason)

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
        return [*lines, *self.ways.lines(), *a.faults.lines(), *self.stalls]


def _another_way(device: Machine) -> Workarounds:
    """Return what runs the operations of a degraded device as the preflight found to be right."""
    verdict = device.verdict
    degraded = verdict is not None and verdict.status == "degraded"
    ways = dict(device.workarounds)
    if forced_policy(ways.get("attention", "")) != "auto":
        del ways["attention"]  # planned attention itself goes that way
    kind = mm.get_torch_device().type
    dropped = verdict.dropped_dtypes if verdict is not None and degraded else ()
    return Workarounds(ways, dropped, lambda t: t.device.type == kind)


def check_stage(stage: str, tensor: torch.Tensor, execution: Execution | None = None) -> None:
    """Raise NonFiniteError naming the stage when a result holds NaN or infinity."""
    if execution is None:
        check_finite(stage, tensor)
    else:
        execution.check(stage, tensor)


class _NoEvent:
    """An event of a device that runs nothing asynchronously."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...
