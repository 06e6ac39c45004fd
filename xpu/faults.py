"""Known faults of the XPU stack: recognised by text, answered by a table, bounded by a budget.

Owns classification, the reaction engine and the process-wide "device lost" flag. Knows no operator and
no model: what a reaction does is handed in by whoever runs the operator.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from .device import host_region
from .errors import (
    DeviceError,
    DeviceFaultError,
    DeviceLostError,
    DeviceMemoryError,
    NonFiniteError,
)
from .fault_table import CODE_OF_NUMBER, FAULT_TABLE, RESTART, Fault, Reaction

log = logging.getLogger(__name__)
T = TypeVar("T")

_PATTERNS = tuple((re.compile(f.pattern, re.IGNORECASE | re.DOTALL), f) for f in FAULT_TABLE)
_BY_CODE = {f.code: f for f in FAULT_TABLE}


def fault_by_code(code: str) -> Fault:
    """Return the row with this code. Raises KeyError if there is none."""
    return _BY_CODE[code]


def classify(problem: BaseException | str) -> Fault | None:
    """Return the table row that an exception or a log text matches, or None."""
    text = problem if isinstance(problem, str) else f"{type(problem).__name__}: {problem}"
    for pattern, fault in _PATTERNS:
        match = pattern.search(text)
        if match is None:
            continue
        if fault.code == "NATIVE_API":
            return _BY_CODE.get(CODE_OF_NUMBER.get(int(match.group(1)), ""), fault)
        return fault
    if isinstance(problem, (torch.OutOfMemoryError, DeviceMemoryError)):
        return _BY_CODE["OUT_OF_MEMORY"]
    return None


def is_memory_fault(problem: BaseException | str) -> bool:
    """True for every form of "out of memory", also those torch does not type as such."""
    fault = classify(problem)
    return fault is not None and fault.kind == "memory"


def is_cancel(problem: BaseException) -> bool:
    """True for the host's cancel, whatever it derives from (Exception before ComfyUI 0.20)."""
    names = {cls.__name__ for cls in type(problem).__mro__}
    return bool(names & {"InterruptProcessingException", "KeyboardInterrupt", "SystemExit"})


class _Lost:
    """The process-wide flag; one device context per process, so one flag."""

    reason: str | None = None
    lock = threading.Lock()


def device_lost_reason() -> str | None:
    """Return why XPU work is refused in this process, or None."""
    return _Lost.reason


def mark_device_lost(reason: str) -> None:
    """Refuse XPU work in this process from now on. The first reason is kept."""
    with _Lost.lock:
        _Lost.reason = _Lost.reason or reason


def reset_device_lost() -> None:
    """Forget the loss. Only for a simulated device: a real one needs a new process."""
    with _Lost.lock:
        _Lost.reason = None


def refuse_if_lost() -> None:
    """Raise DeviceLostError if the device was lost earlier in this process."""
    reason = device_lost_reason()
    if reason is not None:
        raise DeviceLostError(
            f"The GPU was lost earlier in this process ({reason}), so no work is sent to it. {RESTART}"
        )


@dataclass
class FaultEvent:
    """One fault that happened: which row, in which operation, what was done, what came of it."""

    row: int
    code: str
    op: str
    reaction: str
    outcome: str
    text: str


@dataclass
class FaultReport:
    """Everything that happened in a run, in order."""

    events: list[FaultEvent] = field(default_factory=lambda: list[FaultEvent]())

    def add(self, fault: Fault, op: str, reaction: str, outcome: str, text: str) -> None:
        """Append one event and log it."""
        self.events.append(FaultEvent(fault.row, fault.code, op, reaction, outcome, text[:400]))
        log.warning("%s in %s: %s (%s)", fault.code, op, reaction, outcome)

    def lines(self) -> list[str]:
        """Return one sentence per event."""
        return [f"{e.code} in {e.op}: {e.reaction}, {e.outcome}" for e in self.events]


@dataclass
class FaultBudget:
    """How much trouble one run may have before it stops.

    total: faults of every kind. per_code: faults of one kind. platform_ops: operation kinds that
    may report INVALID_ARGUMENT or KERNEL_MISSING; with more, the platform is at fault, not the
    operation. resources: OUT_OF_RESOURCES beyond this count means the device was reset.
    """

    total: int = 64
    per_code: int = 32
    platform_ops: int = 1
    resources: int = 1
    counts: Counter[str] = field(default_factory=lambda: Counter[str]())
    ops: dict[str, set[str]] = field(default_factory=lambda: dict[str, set[str]]())

    def spend(self, fault: Fault, op: str) -> str:
        """Count a fault. Return "" or why the run must stop."""
        self.counts[fault.code] += 1
        self.ops.setdefault(fault.code, set()).add(op.split(":")[0])
        if fault.code in ("INVALID_ARGUMENT", "KERNEL_MISSING"):
            ops = self.ops[fault.code]
            if len(ops) > self.platform_ops:
                return f"{len(ops)} kinds of operation fail alike ({', '.join(sorted(ops))})"
        if self.counts[fault.code] > self.per_code:
            return f"it happened {self.counts[fault.code]} times in this run"
        if self.counts.total() > self.total:
            return f"{self.counts.total()} faults happened in this run"
        return ""

    def reset(self) -> None:
        """Start over, for another run."""
        self.counts.clear()
        self.ops.clear()

    def is_reset(self, fault: Fault) -> bool:
        """True when a repeated OUT_OF_RESOURCES must be read as a lost device."""
        return fault.code == "OUT_OF_RESOURCES" and self.counts[fault.code] > self.resources


MAX_SMALLER = 4
"""Times a call may be halved before the next reaction is tried."""

# std::invalid_argument arrives as ValueError, a missing operator as NotImplementedError.
CATCHABLE = (RuntimeError, ValueError, MemoryError)


def run_guarded(
    op: str,
    run: Callable[[], T],
    variants: Mapping[Reaction, Callable[[int], T]],
    budget: FaultBudget,
    report: FaultReport,
    *,
    cancel_types: tuple[type[BaseException], ...] = (),
    release: Callable[[], None] | None = None,
    memory_outside: bool = False,
) -> T:
    """Run an operation; on a known fault, try the table's reactions in order.

    Args:
        op: name for the report; the part before ":" is the kind of operation.
        run: the operation.
        variants: other ways to get the same result; called with the attempt number, 1 and up.
            ``retry`` needs none.
        release: called before another attempt after a memory fault.
        memory_outside: a guard around this one does more about memory; leave it to that one.
    Returns: what ``run`` or the first working variant returns.
    Raises: DeviceLostError, also when the device was lost before; DeviceMemoryError or
        DeviceFaultError when no reaction is left; anything unknown, and the host's cancel, as is.
    """
    refuse_if_lost()
    ways: dict[Reaction, Callable[[int], T]] = {"retry": lambda _: run(), **variants}
    used: Counter[str] = Counter()
    attempt, tried = run, "none"
    while True:
        try:
            result = attempt()
        except CATCHABLE as e:
            if is_cancel(e) or isinstance(e, (*cancel_types, DeviceLostError)) or _is_final(e):
                raise
            fault = classify(e)
            if fault is None:
                raise
            if tried != "none":
                report.add(fault, op, tried, "failed", str(e))
            again = isinstance(e, DeviceMemoryError)  # counted already, by a guard inside
            stop = "" if again else budget.spend(fault, op)
            if fault.kind == "lost" or (not again and budget.is_reset(fault)):
                _lose(fault, op, e, report)
            outside = memory_outside and fault.kind == "memory"
            reaction = None if stop or outside else _next_reaction(fault, ways, used)
            if reaction is None:
                report.add(fault, op, "abort", stop or "no reaction left", str(e))
                if isinstance(e, NonFiniteError):
                    raise
                raise _give_up(fault, op, stop, used, e) from e
            used[reaction] += 1
            if fault.kind == "memory" and release is not None:
                release()
            report.add(fault, op, reaction, "trying", str(e))
            attempt, tried = _bound(ways[reaction], used[reaction]), reaction
            continue
        if tried != "none":
            report.events[-1].outcome = "recovered"
        return result


def _is_final(error: BaseException) -> bool:
    """True when another guard has tried every way around a fault already."""
    return isinstance(error, DeviceFaultError) and not isinstance(error, NonFiniteError)


def raise_known(op: str, error: BaseException, report: FaultReport) -> None:
    """Raise the device error that a known fault outside every guard stands for.

    For what surrounds a whole phase, where nothing can be done otherwise any more: loading, copies
    between host and device, waits. Returns for anything that is no known fault, for the host's
    cancel, and for errors that say already what to do.
    Raises: DeviceLostError, DeviceMemoryError, DeviceFaultError.
    """
    if is_cancel(error) or isinstance(error, DeviceError) or not isinstance(error, CATCHABLE):
        return
    fault = classify(error)
    if fault is None or fault.kind == "benign":
        return
    if fault.kind == "lost":
        _lose(fault, op, error, report)
    report.add(fault, op, "abort", "not recoverable here", str(error))
    raise _give_up(fault, op, "", Counter(), error) from error


def _bound(way: Callable[[int], T], number: int) -> Callable[[], T]:
    return lambda: way(number)


def _next_reaction(
    fault: Fault, ways: Mapping[Reaction, object], used: Counter[str]
) -> Reaction | None:
    for reaction in fault.reactions:
        most = MAX_SMALLER if reaction == "smaller" else 1
        if reaction in ways and used[reaction] < most:
            return reaction
    if fault.kind == "memory" and "cpu_block" in ways and not used["cpu_block"]:
        return "cpu_block"
    return None


def _lose(fault: Fault, op: str, error: BaseException, report: FaultReport) -> None:
    reason = f"{fault.code} in {op}"
    mark_device_lost(reason)
    report.add(fault, op, "abort", "device lost", str(error))
    raise DeviceLostError(
        f"The GPU was lost in {op}: {fault.meaning} ({error}). Results on it cannot be trusted and "
        f"no further work is sent to it. {fault.advice if fault.kind == 'lost' else RESTART}"
    ) from error


def _give_up(
    fault: Fault, op: str, stop: str, used: Counter[str], error: BaseException
) -> DeviceFaultError | DeviceMemoryError:
    tried = ", ".join(f"{name} ×{n}" for name, n in used.items()) or "nothing applies"
    why = f"stopped because {stop}" if stop else f"no way around it is left (tried: {tried})"
    if fault.kind == "memory":
        return DeviceMemoryError(
            f"Device memory ran out in {op}: {error}; {why}. Set a smaller tile_px or close other "
            f"programs that use the GPU."
        )
    return DeviceFaultError(f"{op} failed: {fault.meaning} ({error}); {why}. {fault.advice}")


def find_nonfinite(
    stage: str, tensor: torch.Tensor, *, after_release: bool = False
) -> NonFiniteError | None:
    """Return an error naming the stage and the likely cause if the tensor has NaN or infinity.

    Args:
        stage: name for the message, for example "step 1" or "VAE decode".
        after_release: cached memory was released since the input was last read.
    Costs one reduction and one read from the device.
    """
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return None
    if bool(torch.isfinite(tensor).all().item()):
        return None
    with host_region():
        values = tensor.detach().to("cpu", torch.float32)
        bad = int((~torch.isfinite(values)).sum())
        all_nan = bool(torch.isnan(values).all())
    dtype = str(tensor.dtype).replace("torch.", "")
    if all_nan and after_release:
        cause = f"all values are NaN after empty_cache: {_BY_CODE['NAN_AFTER_RELEASE'].meaning}"
        advice = _BY_CODE["NAN_AFTER_RELEASE"].advice
    elif tensor.dtype == torch.float16:
        cause = "float16 overflows above 65504"
        advice = (
            "Run this stage in bfloat16 or float32 (for the VAE: start ComfyUI with --bf16-vae)."
        )
    else:
        cause = (
            f"{dtype} has the range, so a kernel returned wrong numbers or the input was damaged"
        )
        advice = (
            "Check the connected pictures, masks, prompts and model files; on an Intel GPU run "
            "`python run.py doctor`, and update the driver if it reports wrong numbers."
        )
    return NonFiniteError(
        f"{stage} produced NaN or infinite values: {bad} of {tensor.numel()} in {dtype}. Likely "
        f"cause: {cause}. {advice}"
    )


def check_finite(stage: str, tensor: torch.Tensor, *, after_release: bool = False) -> None:
    """Raise NonFiniteError if the tensor has NaN or infinity."""
    error = find_nonfinite(stage, tensor, after_release=after_release)
    if error is not None:
        raise error
