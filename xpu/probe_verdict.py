"""The judgement of a preflight: what the checks mean, and where to go if the device cannot be used.

Pure: checks in, verdict out. One rule per function. The first rule that says retreat decides; if
none does, the first that says degraded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .faults import classify
from .probe_economics import DEFAULT_JOB_FLOPS, retreat_options, round_trip_costs
from .probe_facts import is_unsupported, measured_of
from .probe_identity import UPDATE, judge_identity
from .probe_types import CLASS_WORDS, Battery, Check, Measured, Verdict

JUDGED = ("reductions", "index_cast", "dense", "norms", "attention")
HALVES = ("bfloat16", "float16")

ABOVE_LIMIT = "(above the limit)"
"""Marks allocations larger than any plan asks for; that they fail is only worth a note."""

UNREPEATABLE = 1e-2
"""Repeats that differ by more than this part of the largest value are wrong, not rounding
(our choice: larger than one rounding of bfloat16, 4e-3)."""


@dataclass(frozen=True)
class _Case:
    battery: Battery
    measured: Measured
    seen_before: bool
    dropped: tuple[str, ...]
    failures: tuple[Check, ...]

    def first(self, *statuses: str) -> Check | None:
        """Return the first check that ended this way."""
        return next((c for c in self.battery.checks if c.status in statuses), None)

    def of(self, op_class: str) -> list[Check]:
        """Return the failures of one class."""
        return [check for check in self.failures if check.op_class == op_class]

    @property
    def broken(self) -> tuple[str, ...]:
        """Return the broken classes of operations."""
        return tuple(name for name in JUDGED if self.of(name))


def decide(
    battery: Battery,
    *,
    job_flops: float = DEFAULT_JOB_FLOPS,
    openvino_devices: Sequence[str] | None = None,
    seen_before: bool = False,
) -> Verdict:
    """Judge a device by what its children said.

    Args:
        job_flops: floating-point operations of the job at hand, for the minutes of a retreat.
        openvino_devices: devices OpenVINO lists, None if nobody asked.
        seen_before: this device was found by an earlier preflight.
    Returns: one verdict; ``criterion`` and ``reason`` say which rule decided.
    """
    dropped, failures = _drop_dtypes(battery)
    measured = measured_of(battery)
    case = _Case(battery, measured, seen_before, dropped, failures)
    verdicts = [found for rule in _RULES if (found := rule(case)) is not None]
    careful = [found for found in verdicts if found.status == "degraded"]
    decisive = [found for found in verdicts if found.status in ("retreat", "absent")]
    verdict = (decisive or careful or verdicts)[0]
    if verdict.status == "degraded":
        ways = {kind: way for found in reversed(careful) for kind, way in found.workarounds.items()}
        notes = (*verdict.notes, *(f"Also: {found.reason}" for found in careful[1:]))
        verdict = replace(verdict, workarounds=ways, notes=notes)
    options = ()
    if verdict.status == "retreat":
        options = retreat_options(measured, job_flops, openvino_devices)
    return replace(
        verdict,
        measured=measured,
        retreats=options,
        complete=battery.complete,
        device_name=str(battery.properties.get("name", "")),
        host_device=battery.word("host_device") or "cpu",
        broken=case.broken,
        dropped_dtypes=dropped if verdict.status == "degraded" else (),
        notes=(*verdict.notes, *_notes(case, verdict)),
    )


def _drop_dtypes(battery: Battery) -> tuple[tuple[str, ...], tuple[Check, ...]]:
    """Set aside failures confined to a half precision that another dtype does without."""
    failures = [check for check in battery.checks if check.failed]
    confined = [
        check
        for check in failures
        if check.dtype in HALVES
        and (check.workaround == "dtype" or (check.op_class == "index_cast" and check.tried))
        and check.status in ("error", "wrong")
    ]
    # A cast to a dtype has no other dtype to go to; it is confined if the dtype fails elsewhere too.
    bad = {c.dtype for c in confined if c.workaround == "dtype"}
    set_aside = [check for check in confined if check.dtype in bad]
    dropped = tuple(name for name in HALVES if name in bad)
    return dropped, tuple(check for check in failures if check not in set_aside)


def _identity(case: _Case) -> Verdict | None:
    """Is there a device at all, and can it be asked what it is?"""
    return judge_identity(case.battery, seen_before=case.seen_before)


def _hang(case: _Case) -> Verdict | None:
    check = case.first("hang")
    if check is None:
        return None
    return Verdict(
        "retreat", "hang",
        f"The device stopped answering in '{check.name}' ({CLASS_WORDS[check.op_class]}): "
        f"{check.text}. A device that fails in silence cannot be guarded, so one hang decides.",
        "Restart the computer before using the device again; do not end hanging programs "
        "repeatedly. Then update the Intel graphics driver.",
    )  # fmt: skip


def _crash(case: _Case) -> Verdict | None:
    check = case.first("crash")
    if check is None:
        return None
    if check.name == "device properties":
        return Verdict(
            "retreat", "crash",
            f"Asking for the device's properties ended the process ({check.text}). ComfyUI asks the "
            f"same at its start.",
            "Update torch; this is known of torch 2.10 with Level Zero V2 (pytorch issue 179891).",
        )  # fmt: skip
    return Verdict(
        "retreat", "crash",
        f"'{check.name}' ({CLASS_WORDS[check.op_class]}) ended the whole process ({check.text}); "
        f"nothing inside a process can work around that.",
        UPDATE,
    )  # fmt: skip


def _lost(case: _Case) -> Verdict | None:
    check = case.first("lost")
    if check is None:
        return None
    return Verdict(
        "retreat", "lost",
        f"The device was lost in '{check.name}' ({CLASS_WORDS[check.op_class]}): {check.text}.",
        UPDATE,
    )  # fmt: skip


def _basics(case: _Case) -> Verdict | None:
    failed = case.of("basics")
    if not failed:
        return None
    return Verdict(
        "retreat", "basics",
        f"Copying and waiting do not work: '{failed[0].name}' gave {_what(failed[0])}.",
        UPDATE,
    )  # fmt: skip


def _two_classes(case: _Case) -> Verdict | None:
    if len(case.broken) < 2:
        return None
    parts = [
        f"{CLASS_WORDS[name]} ('{case.of(name)[0].name}': {_what(case.of(name)[0])})"
        for name in case.broken
    ]
    return Verdict(
        "retreat", "classes",
        f"{len(parts)} classes of operations are broken: {' and '.join(parts)}. Mending one "
        f"operation after another would only uncover the next.",
        UPDATE,
    )  # fmt: skip


def _one_class(case: _Case) -> Verdict | None:
    if not case.broken:
        return None
    name = case.broken[0]
    failed = case.of(name)
    stuck = next((check for check in failed if not check.workaround), None)
    if stuck is not None:
        return Verdict(
            "retreat", "no-workaround",
            f"'{stuck.name}' ({CLASS_WORDS[name]}) gave {_what(stuck)}, and no way around it gives "
            f"right numbers (tried: {', '.join(stuck.tried) or 'nothing applies'}).",
            UPDATE,
        )  # fmt: skip
    ways = {check.workaround for check in failed}
    way = next(w for w in ("cpu_block", "dtype", "math", "contiguous") if w in ways)
    reason = f"'{failed[0].name}' ({CLASS_WORDS[name]}) gave {_what(failed[0])}"
    notes: tuple[str, ...] = ()
    if way == "cpu_block":
        costs = round_trip_costs(name, case.measured)
        if costs is None:
            notes = (
                "The cost of the workaround was not measured; run the whole battery (run.py doctor).",
            )
        elif not costs.is_worth_it:
            return Verdict("retreat", "economics", f"{reason}, and {costs.sentence}", UPDATE)
        else:
            notes = (costs.sentence,)
    words = _WAY_WORDS[way]
    return Verdict(
        "degraded", "workaround", f"{reason}; it works {words}, and is run that way.", UPDATE,
        workarounds={name: way}, notes=notes,
    )  # fmt: skip


_WAY_WORDS = {
    "contiguous": "on contiguous tensors",
    "dtype": "in another precision",
    "cpu_block": "on the processor",
    "math": "as exact attention in pieces",
    "read_back": "after one value was read back",
}


def _silence(case: _Case) -> Verdict | None:
    for check in case.of("silence"):
        name = f"'{check.name}' gave {_what(check)}"
        if check.workaround:
            return Verdict(
                "degraded", "workaround",
                f"{name}; it works {_WAY_WORDS[check.workaround]}, and is run that way.",
                "Keep models loaded between runs; use torch 2.11 or newer if it happens in a run.",
                workarounds={"silence": check.workaround},
            )  # fmt: skip
        error = float(check.numbers.get("error", 1.0))
        if error > UNREPEATABLE:
            return Verdict(
                "retreat", "silence",
                f"{name} without any error: results of this device cannot be trusted.", UPDATE,
            )  # fmt: skip
        return Verdict(
            "degraded", "unrepeatable",
            f"{name}: the same seed will not give the same picture bit for bit.", UPDATE,
        )  # fmt: skip
    return None


def _allocation(case: _Case) -> Verdict | None:
    refused, worked = case.measured.refused_bytes, case.measured.allocated_bytes
    below = [check for check in case.of("allocation") if ABOVE_LIMIT not in check.name]
    if not below:
        return None
    if worked == 0:
        return Verdict(
            "retreat", "allocation",
            f"No allocation worked, the smallest refused has {refused} bytes: "
            f"{below[-1].text}.",
            UPDATE,
        )  # fmt: skip
    return Verdict(
        "degraded", "allocation",
        f"A single allocation of {refused} bytes does not work ({below[-1].text}); "
        f"plans stay at {worked} bytes or less.",
        UPDATE, workarounds={"allocation": "smaller"},
    )  # fmt: skip


def _dtypes(case: _Case) -> Verdict | None:
    if not case.dropped:
        return None
    check = next(c for c in case.battery.checks if c.failed and c.dtype in case.dropped)
    return Verdict(
        "degraded", "dtype",
        f"{' and '.join(case.dropped)} fails ('{check.name}' gave {_what(check)}); another "
        f"precision gives right numbers, and is used.",
        UPDATE, workarounds={check.op_class: "dtype"},
    )  # fmt: skip


def _rest(case: _Case) -> Verdict | None:
    for name in ("economics", "identity"):
        for check in case.of(name):
            return Verdict(
                "degraded", "rates" if name == "economics" else "identity",
                f"'{check.name}' gave {_what(check)}.", UPDATE,
            )  # fmt: skip
    return None


def _unsupported(case: _Case) -> Verdict | None:
    if not is_unsupported(case.battery):
        return None
    name = case.battery.properties.get("name", "This device")
    return Verdict(
        "degraded", "unsupported",
        f"{name} is older than what PyTorch's XPU backend supports; what was tried works, but "
        f"nobody will mend what does not.",
        "Expect trouble; the processor or a supported Arc card is the safer choice.",
    )  # fmt: skip


def _healthy(case: _Case) -> Verdict | None:
    tried = sum(check.status == "ok" for check in case.battery.checks)
    return Verdict("healthy", "all-passed", f"All {tried} checks passed.")


_RULES: tuple[Callable[[_Case], Verdict | None], ...] = (
    _identity, _hang, _crash, _lost, _basics, _two_classes, _one_class, _silence, _allocation,
    _dtypes, _rest, _unsupported, _healthy,
)  # fmt: skip


def _what(check: Check) -> str:
    """Say how a check failed, with the known meaning of its text."""
    fault = classify(check.text) if check.status == "error" else None
    word = "wrong numbers" if check.status == "wrong" else "an error"
    meaning = f"; {fault.meaning}" if fault is not None else ""
    return f"{word} ({check.text}{meaning})"


def _notes(case: _Case, verdict: Verdict) -> list[str]:
    battery = case.battery
    notes: list[str] = []
    notes += [
        f"Skipped '{c.name}': {c.text}."
        for c in battery.checks
        if c.status == "skipped" and c.stage < 7
    ]
    above = [c for c in case.of("allocation") if c.failed]
    if above and verdict.criterion != "allocation":
        notes.append(
            f"{above[0].name.capitalize()} failed ({above[0].text}); plans never ask for 4 GiB or "
            f"more at once."
        )
    if not battery.covered:
        notes.append("torch holds no kernels compiled for this device; first uses take minutes.")
    if verdict.status in ("healthy", "degraded") and not battery.stages >= {4, 5, 6}:
        notes.append("Only the simplest operations were tried; run.py doctor tries all.")
    if verdict.status == "retreat" and is_unsupported(battery):
        notes.append("The device is older than what PyTorch's XPU backend supports.")
    return notes
