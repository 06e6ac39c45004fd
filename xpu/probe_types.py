"""What a preflight is made of: checks, deadlines, a request, a verdict. Plain data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, cast

Status = Literal["ok", "skipped", "error", "wrong", "lost", "hang", "crash"]
VerdictStatus = Literal["healthy", "degraded", "retreat", "absent"]

OP_CLASSES: tuple[str, ...] = (
    "identity", "basics", "reductions", "index_cast", "dense", "norms", "attention", "allocation",
    "economics", "silence",
)  # fmt: skip
"""Name of each stage; stages 2 to 6 are classes of operations."""

CLASS_WORDS = {
    "identity": "finding the device",
    "basics": "copies and waiting",
    "reductions": "reductions",
    "index_cast": "indexing with a cast",
    "dense": "matrix products and convolutions",
    "norms": "norms, softmax and activations",
    "attention": "attention",
    "allocation": "large allocations",
    "economics": "measuring rates",
    "silence": "repeating and releasing memory",
}

QUICK_STAGES: tuple[tuple[int, ...], ...] = ((0,), (1, 2, 3))
"""What runs before the first job: is the device there, and do its simplest operations work."""

FULL_STAGES: tuple[tuple[int, ...], ...] = ((0,), (1, 2, 3), (4, 5, 6), (7, 8, 9))
"""The whole battery; each group has a child process of its own."""


def _no_texts() -> dict[str, str]:
    return {}


def _no_numbers() -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Check:
    """One thing that was tried on the device.

    status: ``ok``; ``skipped`` with the reason in text; ``error`` raised; ``wrong`` numbers;
        ``lost`` device state; ``hang`` no answer in time; ``crash`` the process ended.
    workaround: the way that gave right numbers after a failure: ``contiguous``, ``dtype``,
        ``cpu_block``, ``math`` or ``read_back``; tried: those attempted.
    numbers: what was measured.
    """

    stage: int
    name: str
    status: Status = "ok"
    dtype: str = ""
    text: str = ""
    workaround: str = ""
    tried: tuple[str, ...] = ()
    seconds: float = 0.0
    numbers: Mapping[str, Any] = field(default_factory=_no_numbers, hash=False)

    @property
    def op_class(self) -> str:
        """Return the class of operations this check belongs to."""
        return OP_CLASSES[self.stage]

    @property
    def failed(self) -> bool:
        """True unless it went well or was not run."""
        return self.status not in ("ok", "skipped")

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> Check:
        """Build a check from a line of the child or an entry of the cache; ignores other keys.

        Raises: ValueError or TypeError if it is not one.
        """
        known = {item.name for item in fields(cls)}
        values = {key: value for key, value in data.items() if key in known}
        values["stage"] = int(values.get("stage", -1))
        values["tried"] = tuple(str(way) for way in values.get("tried", ()))
        numbers: object = values.get("numbers", {})
        check = cls(**values)
        if not 0 <= check.stage < len(OP_CLASSES) or not isinstance(numbers, Mapping):
            raise ValueError(f"not a check: {str(data)[:200]}")
        return check


@dataclass(frozen=True)
class Deadlines:
    """Seconds granted before silence counts as a hang.

    start_s: until torch is imported. first_op_s: first operation of a child when torch holds
    kernels compiled for the device. compile_s: the same when it does not, and the first operation
    of every kind. op_s: any later operation. exit_s: until a killed process must be gone.
    Source of the defaults: up to 327 s for the first operation on a device without compiled
    kernels (intel/intel-extension-for-pytorch issue 721); the rest is our choice.
    """

    start_s: float = 120.0
    first_op_s: float = 60.0
    compile_s: float = 600.0
    op_s: float = 20.0
    exit_s: float = 10.0

    def scaled(self, factor: float) -> Deadlines:
        """Return deadlines multiplied by ``factor``, for a simulated device."""
        return Deadlines(**{f.name: getattr(self, f.name) * factor for f in fields(self)})


@dataclass(frozen=True)
class ProbeRequest:
    """What to probe, and how.

    device: torch device, for example ``xpu:0``.
    groups: stages per child process; the first holds stage 0.
    small: shapes for a simulated device instead of the job's.
    stand_in, stand_in_options: a Python file that puts another object in place of the device, see
        ``probe_child.py``; only a simulation sets it.
    """

    device: str = "xpu:0"
    groups: tuple[tuple[int, ...], ...] = FULL_STAGES
    deadlines: Deadlines = field(default_factory=Deadlines)
    small: bool = False
    stand_in: Path | None = None
    stand_in_options: Mapping[str, Any] = field(default_factory=_no_numbers, hash=False)

    @property
    def stages(self) -> frozenset[int]:
        """Return every stage asked for."""
        return frozenset(stage for group in self.groups for stage in group)


@dataclass
class Battery:
    """Everything the children said.

    complete: every stage asked for was run to its end.
    covered: torch holds kernels compiled for this device.
    """

    device: str
    stages: frozenset[int] = frozenset()
    checks: list[Check] = field(default_factory=lambda: list[Check]())
    warnings: list[str] = field(default_factory=lambda: list[str]())
    stderr: list[str] = field(default_factory=lambda: list[str]())
    libraries: list[str] = field(default_factory=lambda: list[str]())
    complete: bool = False
    covered: bool = True
    seconds: float = 0.0

    def number(self, key: str) -> float:
        """Return a measured number, 0 if it was not measured."""
        for check in self.checks:
            value = check.numbers.get(key)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                return float(value)
        return 0.0

    def word(self, key: str) -> str:
        """Return a text the checks reported, empty if there is none."""
        return next((str(c.numbers[key]) for c in self.checks if key in c.numbers), "")

    @property
    def properties(self) -> dict[str, Any]:
        """Return the device properties as read by the child, empty if they were not."""
        for check in self.checks:
            found = check.numbers.get("properties")
            if isinstance(found, dict):
                return cast("dict[str, Any]", found)
        return {}


@dataclass(frozen=True)
class Measured:
    """Numbers of one device; 0 and empty mean not measured.

    Rates in bytes or operations per second, times in seconds. allocated_bytes: largest single
    allocation that worked; refused_bytes: smallest that did not.
    """

    flops_per_s: float = 0.0
    bw_bytes_per_s: float = 0.0
    processor_flops_per_s: float = 0.0
    launch_s: float = 0.0
    sync_s: float = 0.0
    h2d_bytes_per_s: float = 0.0
    d2h_bytes_per_s: float = 0.0
    allocated_bytes: int = 0
    refused_bytes: int = 0
    fused_sdpa: str = "unknown"
    fused_max_dim_head: int = 0


@dataclass(frozen=True)
class RetreatOption:
    """One way to do the job without the device. minutes: None if it cannot be estimated."""

    target: str
    minutes: float | None
    note: str = ""

    @property
    def sentence(self) -> str:
        """Return the option in words."""
        cost = "time not known"
        if self.minutes is not None:
            cost = "about a minute" if self.minutes < 1.5 else f"about {self.minutes:.0f} minutes"
        return f"{self.target}: {cost}{'; ' + self.note if self.note else ''}"


@dataclass(frozen=True)
class Verdict:
    """The judgement of one device.

    criterion: stable word for what decided. reason: the same as a sentence with the values.
    action: what to do. broken: classes of operations that fail. workarounds: class to the way
    that works. dropped_dtypes: not to be used on this device. notes: what else is worth knowing.
    retreats: where to go instead, in order. complete: the whole battery was run.
    """

    status: VerdictStatus
    criterion: str
    reason: str
    action: str = ""
    broken: tuple[str, ...] = ()
    workarounds: Mapping[str, str] = field(default_factory=_no_texts, hash=False)
    dropped_dtypes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    retreats: tuple[RetreatOption, ...] = ()
    measured: Measured = field(default_factory=Measured)
    complete: bool = True
    device_name: str = ""
    host_device: str = "cpu"

    @property
    def for_risk(self) -> Literal["unknown", "healthy", "degraded", "retreat"]:
        """Return the word the risk rules take."""
        return "unknown" if self.status == "absent" else self.status

    def with_notes(self, *notes: str) -> Verdict:
        """Return the verdict with further notes."""
        return replace(self, notes=(*self.notes, *notes))
