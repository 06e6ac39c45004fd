"""Simulated devices and what the preflight must say of each."""

from __future__ import annotations

from dataclasses import dataclass, field

from supir_xpu.xpu.probe_types import Deadlines

ERROR_45 = "level_zero backend failed with error: 45 (UR_RESULT_ERROR_INVALID_ARGUMENT)"
SHORT = Deadlines(start_s=600.0, first_op_s=300.0, compile_s=600.0, op_s=3.0, exit_s=30.0)
"""For a planted hang: short for single operations only, a busy machine may take its time to start."""

LONG = Deadlines().scaled(10.0)
"""Where nothing is to hang; a busy machine is no hang."""


def fails(op: str, action: str = "raise", **more):
    return {"op": op, "action": action, "text": ERROR_45, **more}


@dataclass
class Case:
    """A device, and what the preflight must say: status, criterion, words, broken, workarounds."""

    stages: tuple
    options: dict
    status: str
    criterion: str
    words: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    ways: dict = field(default_factory=dict)
    deadlines: Deadlines = LONG
    kept: bool = True
    dropped: tuple[str, ...] = ()
    real: bool = False
    note: str = ""


CASES = {
    "the second report's machine": Case(
        (0, 2, 3),
        {"faults": [fails("aten::sum"), fails(r"aten::to\.", dtype="float32")]},
        "retreat",
        "classes",
        ("2 classes", "reductions", "indexing with a cast", "error: 45", "sum over dim 0"),
        ("reductions", "index_cast"),
        real=True,
    ),
    "spins in silence": Case(
        ((0,), (2,)),
        {"faults": [fails("aten::sum", "hang")]},
        "retreat",
        "hang",
        ("stopped answering in 'sum over dim 0 of 2x3x4x5'", "reductions", "3 s"),
        ("reductions",),
        deadlines=SHORT,
        real=True,
    ),
    "segfault in the property query": Case(
        (0, 1),
        {"properties_action": "die"},
        "retreat",
        "crash",
        ("device's properties ended the process",),
        real=True,
    ),
    "properties raise": Case(
        (0,),
        {"properties_action": "raise"},
        "retreat",
        "identity",
        ("properties cannot be read", "invalid stoull argument"),
        kept=False,
    ),
    "row 34: softmax, wrong numbers": Case(
        (0, 5),
        {"faults": [fails("softmax", "corrupt")], "processor_s": 0.5},
        "degraded",
        "workaround",
        ("softmax over 64", "wrong numbers", "on the processor"),
        ("norms",),
        {"norms": "cpu_block"},
    ),
    "the way over the processor is too slow": Case(
        (0, 5),
        {"faults": [fails("group_norm")], "copy_s": 0.3},
        "retreat",
        "economics",
        ("group norm", "does not beat 80%"),
        ("norms",),
    ),
    "row 35: fused attention, wrong numbers": Case(
        (0, 6),
        {"faults": [fails("scaled_dot_product", "corrupt")]},
        "degraded",
        "workaround",
        ("attention", "wrong numbers", "exact attention in pieces"),
        ("attention",),
        {"attention": "math"},
    ),
    "row 36: wrong numbers beyond 4 GiB": Case(
        ((0,), (7,)),
        {"garbled_bytes": 4 * 2**20},
        "healthy",
        "all-passed",
        (),
        note="(above the limit) failed (the first or last bytes did not come back as written)",
    ),
    "wrong numbers in smaller tensors": Case(
        ((0,), (7,)),
        {"garbled_bytes": 3 * 2**20},
        "degraded",
        "allocation",
        ("did not come back as written", f"plans stay at {20 * (2**20 // 10)} bytes"),
        ways={"allocation": "smaller"},
    ),
    "row 33: NaN after empty_cache, reading back helps": Case(
        (0, 9),
        {"nan_after_release": True},
        "degraded",
        "workaround",
        ("after releasing the cache", "NaN", "read back"),
        ways={"silence": "read_back"},
    ),
    "NaN after empty_cache whatever one does": Case(
        (0, 9),
        {"nan_after_release": True, "read_back_helps": False},
        "retreat",
        "silence",
        ("after releasing the cache", "cannot be trusted"),
    ),
    "the same work gives other numbers": Case(
        (0, 9),
        {"faults": [fails("matmul", "corrupt", nth=2)]},
        "retreat",
        "silence",
        ("matmul, 3 times", "the same work gave other numbers"),
    ),
    "row 22: several devices": Case(
        (0, 1),
        {
            "count_error": "level_zero backend failed with error: 2147483646 (UR_RESULT_ERROR_UNKNOWN)"
        },
        "retreat",
        "several-devices",
        ("2147483646",),
        kept=False,
    ),
    "row 27: no driver": Case(
        (0, 1),
        {"count": 0, "start_error": "No XPU devices are available."},
        "retreat",
        "no-driver",
        ("No XPU devices are available",),
        kept=False,
    ),
    "row 28: unsupported architecture": Case(
        (0, 1, 2, 3),
        {
            "properties": {"name": "Intel(R) Iris(R) Xe Graphics"},
            "warning": "Iris Xe is not officially supported by PyTorch XPU",
        },
        "degraded",
        "unsupported",
        ("Iris(R) Xe", "older than"),
    ),
    "one dtype does not work": Case(
        (0, 3, 4, 5),
        {"faults": [fails("aten::", dtype="bfloat16")], "memory": "refused"},
        "degraded",
        "dtype",
        ("bfloat16 fails", "another precision"),
        dropped=("bfloat16",),
    ),
    "the device is lost": Case(
        (0, 2, 3),
        {"faults": [fails("aten::sum") | {"text": "error: 20 (UR_RESULT_ERROR_DEVICE_LOST)"}]},
        "retreat",
        "lost",
        ("was lost in 'sum over dim 0", "DEVICE_LOST"),
        ("reductions",),
    ),
    "waiting fails": Case(
        (0, 1),
        {"faults": [fails("aten::add")]},
        "retreat",
        "basics",
        ("100 small operations",),
    ),
}
