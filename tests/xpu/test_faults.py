"""The fault list: recognised by text, answered in order, bounded."""

from __future__ import annotations

import re

import pytest
import torch
from supir_xpu.tests.simulated_device import DeviceSpec, SimulatedDevice
from supir_xpu.xpu import faults
from supir_xpu.xpu.attention import PlannedAttention
from supir_xpu.xpu.chunking import AttentionLimits
from supir_xpu.xpu.errors import (
    DeviceFaultError,
    DeviceLostError,
    DeviceMemoryError,
    NonFiniteError,
)
from supir_xpu.xpu.fault_table import FAULT_TABLE
from supir_xpu.xpu.faults import FaultBudget, FaultReport, classify, run_guarded

BACKEND = "level_zero backend failed with error: "

# row, text as it was reported, kind, first reaction
REPORTED = [
    (1, BACKEND + "45 (UR_RESULT_ERROR_INVALID_ARGUMENT)", "specific", "contiguous"),
    (2, BACKEND + "20 (UR_RESULT_ERROR_DEVICE_LOST)", "lost", None),
    (3, BACKEND + "39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)", "memory", "smaller"),
    (4, BACKEND + "40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)", "memory", "smaller"),
    (5, "XPU out of memory. Tried to allocate 128.00 GiB (GPU 0; 15.91 GiB)", "memory", "smaller"),
    (6, "XPU out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total of 15.91 GiB, of which "
        "15.12 GiB is free", "memory", "smaller"),
    (6, "Current platform can NOT allocate memory block with size larger than 4GB! Tried to "
        "allocate 6.00 GiB", "memory", "smaller"),
    (7, "could not create a primitive", "specific", "retry"),
    (7, "could not create a primitive descriptor for a convolution", "specific", "retry"),
    (8, "errcode -42, CL_INVALID_BINARY,src/gpu/intel/ocl/engine.cpp:269", "specific", "retry"),
    (9, "opencl error CL_OUT_OF_HOST_MEMORY", "specific", "retry"),
    (10, "could not execute a primitive", "specific", "retry"),
    (11, "onednn_verbose,v1,common,error,gpu,conv/jit,internal error", "specific", "contiguous"),
    (12, "Error during the build of OpenCL program. Build log:", "specific", "retry"),
    (13, "invalid stoull argument", "specific", "retry"),
    (15, "Required aspect fp64 is not supported on the device", "specific", "dtype"),
    (16, "Kernel is incompatible with all devices in devs", "specific", "cpu_block"),
    (17, "error: Double type is not supported on this platform.", "specific", "cpu_block"),
    (18, BACKEND + "29 (UR_RESULT_ERROR_INVALID_KERNEL_NAME)", "specific", "cpu_block"),
    (18, "No kernel named _ZTS11SumFunctorIfE was found", "specific", "cpu_block"),
    (19, BACKEND + "30 (UR_RESULT_ERROR_INVALID_KERNEL_ARGUMENT_INDEX)", "specific", "cpu_block"),
    (20, "The program was built for 1 devices", "platform", "cpu_block"),
    (20, "backend compiler failed build", "platform", "cpu_block"),
    (21, "L0 build module failed: ZE_RESULT_ERROR_MODULE_BUILD_FAILURE", "specific", "cpu_block"),
    (24, "process ended with exit code 0xC0000005", "lost", None),
    (24, "exit code -1073741819", "lost", None),
    (25, "Abort was called at 284 line in file:\n./shared/source/os_interface/linux/drm_neo.cpp",
        "lost", None),
    (25, "Segmentation fault from GPU at 0xff00000000, ctx_id: 1 banned: 1", "lost", None),
    (29, "xe 0000:03:00.0: [drm] Tile0: GT0: Engine reset: engine_class=ccs", "lost", None),
    (29, "xe: Timedout job: seqno=4294967169", "lost", None),
    (30, "There was no progress on the device for 20 s", "lost", None),
    (31, "BSOD 0xD1 in igdkmdnd64.sys", "lost", None),
    (31, "bugcheck was: 0x0000007e (0xffffffffc0000005)", "lost", None),
    (32, "VIDEO_SCHEDULER_INTERNAL_ERROR", "lost", None),
    (33, "all values are NaN after empty_cache", "silent", None),
    (37, "VAE decode produced NaN or infinite values", "silent", "dtype"),
    (38, "FlashAttentionForwardXPU only support headdim 64,96,128,192", "specific", "smaller"),
    (39, "No available kernel. Aborting execution.", "specific", "smaller"),
    (40, "The operator 'aten::_fft_r2c' is not currently implemented for the XPU device",
        "specific", "cpu_block"),
    (41, "AssertHandler::printMessage", "lost", None),
    (42, "The device doesn't support querying the available free memory", "benign", None),
    (43, "first operation still compiling", "benign", None),
    (44, "hang at interpreter exit", "benign", None),
]  # fmt: skip
ROWS = {*range(1, 22), 24, 25, *range(29, 34), *range(37, 45)}


@pytest.mark.parametrize(("row", "text", "kind", "first"), REPORTED)
def test_reported_texts_are_recognised(row, text, kind, first):
    for form in (text, RuntimeError(text), RuntimeError("Exception in worker\n" + text + "\n at")):
        fault = classify(form)
        assert fault is not None
        assert (fault.row, fault.kind) == (row, kind)
        assert (fault.reactions[0] if fault.reactions else None) == first
        assert fault.advice


def test_every_row_is_listed_and_every_listed_row_is_tried():
    assert {f.row for f in FAULT_TABLE} == ROWS
    assert {row for row, *_ in REPORTED} | {14} == ROWS
    assert len({f.code for f in FAULT_TABLE}) == len(FAULT_TABLE)


@pytest.mark.parametrize(
    ("number", "row"),
    [(20, 2), (29, 18), (30, 19), (39, 3), (40, 4), (45, 1), (-1, 2), (-2, 2), (-4, 3), (-5, 4),
     (-997, 4), (-30, 1), (-999, 14), (7, 14)],
)  # fmt: skip
def test_old_wrapper_numbers(number, row):
    text = f"Native API failed. Native API returns: {number} (PI_ERROR)"
    assert classify(RuntimeError(text)).row == row


@pytest.mark.parametrize(
    "text",
    ["mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)", "list index out of range",
     "error: 200 things", "expected scalar type Half but found Float", ""],
)  # fmt: skip
def test_ordinary_errors_are_not_faults(text):
    assert classify(RuntimeError(text)) is None


def test_memory_faults_the_host_does_not_know():
    for row, text, kind, _ in REPORTED:
        assert faults.is_memory_fault(RuntimeError(text)) == (kind == "memory"), row
    assert faults.is_memory_fault(torch.OutOfMemoryError("whatever"))
    assert faults.is_memory_fault(DeviceMemoryError("ours"))
    assert not faults.is_memory_fault(RuntimeError("shape mismatch"))


@pytest.fixture(autouse=True)
def fresh_process():
    faults.reset_device_lost()
    yield
    faults.reset_device_lost()


class Operation:
    """Fails with the given texts, one per attempt, then works."""

    def __init__(self, *texts, error=RuntimeError):
        self.texts, self.error, self.calls = list(texts), error, []

    def run(self, name="run"):
        self.calls.append(name)
        if self.texts:
            raise self.error(self.texts.pop(0))
        return "result"

    def variants(self, *names):
        return {name: (lambda n, name=name: self.run(f"{name}{n}")) for name in names}


ALL = ("contiguous", "smaller", "dtype", "cpu_block")
INVALID, PRIMITIVE = REPORTED[0][1], "could not create a primitive"
LOST, MEMORY, RESOURCES = REPORTED[1][1], REPORTED[2][1], REPORTED[3][1]


@pytest.mark.parametrize(
    ("texts", "calls"),
    [
        ([], ["run"]),
        ([PRIMITIVE], ["run", "run"]),
        ([PRIMITIVE] * 2, ["run", "run", "contiguous1"]),
        ([PRIMITIVE] * 3, ["run", "run", "contiguous1", "dtype1"]),
        ([PRIMITIVE] * 4, ["run", "run", "contiguous1", "dtype1", "cpu_block1"]),
        ([INVALID] * 3, ["run", "contiguous1", "dtype1", "cpu_block1"]),
        ([MEMORY] * 2, ["run", "smaller1", "smaller2"]),
        ([MEMORY] * 5, ["run", "smaller1", "smaller2", "smaller3", "smaller4", "cpu_block1"]),
        ([PRIMITIVE, MEMORY], ["run", "run", "smaller1"]),
        (["invalid stoull argument"], ["run", "run"]),
    ],
)
def test_reactions_come_in_the_tables_order(texts, calls):
    op, report = Operation(*texts), FaultReport()
    got = run_guarded("bmm", op.run, op.variants(*ALL), FaultBudget(), report)
    assert got == "result"
    assert op.calls == calls
    if texts:
        assert report.events[-1].outcome == "recovered"
    else:
        assert not report.events


def test_std_invalid_argument_arrives_as_value_error():
    op = Operation("invalid stoull argument", error=ValueError)
    assert run_guarded("conv", op.run, {}, FaultBudget(), FaultReport()) == "result"


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        (PRIMITIVE, DeviceFaultError, "oneDNN rejected.*tried: retry ×1.*driver"),
        (MEMORY, DeviceMemoryError, "memory ran out in conv.*tile_px"),
        ("invalid stoull argument", DeviceFaultError, "PYTORCH_ALLOC_CONF"),
        ("AssertHandler::printMessage", DeviceLostError, "Restart ComfyUI"),
    ],
)
def test_when_nothing_is_left_the_error_says_what_to_do(text, error, words):
    op, report = Operation(*[text] * 9), FaultReport()
    with pytest.raises(error, match=words) as caught:
        run_guarded("conv", op.run, {}, FaultBudget(), report)
    assert text in str(caught.value.__cause__)
    assert report.events[-1].reaction == "abort"


def test_an_unknown_error_passes_as_it_is():
    op = Operation("shape mismatch")
    with pytest.raises(RuntimeError, match="^shape mismatch$"):
        run_guarded("conv", op.run, op.variants(*ALL), FaultBudget(), FaultReport())
    assert op.calls == ["run"]


@pytest.mark.parametrize("base", [Exception, BaseException, RuntimeError])
def test_the_hosts_cancel_is_never_swallowed(base):
    cancel = type("InterruptProcessingException", (base,), {})
    op = Operation("error: 45 (UR_RESULT_ERROR_INVALID_ARGUMENT)", error=cancel)
    with pytest.raises(cancel):
        run_guarded("conv", op.run, op.variants(*ALL), FaultBudget(), FaultReport())
    assert op.calls == ["run"]
    assert faults.is_cancel(cancel())
    assert not faults.is_cancel(RuntimeError())

    class StopError(RuntimeError):
        pass

    op = Operation(PRIMITIVE, error=StopError)
    with pytest.raises(StopError):
        run_guarded("conv", op.run, {}, FaultBudget(), FaultReport(), cancel_types=(StopError,))


def test_a_lost_device_refuses_all_later_work():
    op, report = Operation(LOST), FaultReport()
    with pytest.raises(DeviceLostError, match="lost in conv.*Restart ComfyUI"):
        run_guarded("conv", op.run, op.variants(*ALL), FaultBudget(), report)
    assert op.calls == ["run"]
    assert faults.device_lost_reason() == "DEVICE_LOST in conv"
    later = Operation()
    with pytest.raises(DeviceLostError, match="earlier in this process"):
        run_guarded("bmm", later.run, {}, FaultBudget(), FaultReport())
    assert later.calls == []


def test_out_of_resources_twice_is_a_lost_device():
    op = Operation(RESOURCES, RESOURCES)
    with pytest.raises(DeviceLostError):
        run_guarded("conv", op.run, op.variants(*ALL), FaultBudget(), FaultReport())
    faults.reset_device_lost()
    op = Operation(RESOURCES)
    assert run_guarded("conv", op.run, op.variants(*ALL), FaultBudget(), FaultReport()) == "result"


def test_invalid_argument_in_two_kinds_of_operation_blames_the_platform():
    budget = FaultBudget()
    op = Operation(INVALID)
    run_guarded("sum:dim 1", op.run, op.variants(*ALL), budget, FaultReport())
    op = Operation(INVALID)
    run_guarded("sum:dim 2", op.run, op.variants(*ALL), budget, FaultReport())
    op = Operation(INVALID)
    with pytest.raises(DeviceFaultError, match=r"2 kinds of operation fail alike \(bmm, sum\)"):
        run_guarded("bmm", op.run, op.variants(*ALL), budget, FaultReport())


@pytest.mark.parametrize(("options", "words"), [({"total": 3}, "faults happened in this run"),
                                                ({"per_code": 3}, "it happened 4 times")])  # fmt: skip
def test_the_budget_ends_a_run(options, words):
    budget = FaultBudget(**options)
    for _ in range(3):
        op = Operation(PRIMITIVE)
        run_guarded("conv", op.run, {}, budget, FaultReport())
    with pytest.raises(DeviceFaultError, match=words):
        run_guarded("conv", Operation(PRIMITIVE).run, {}, budget, FaultReport())


def test_memory_is_released_before_a_memory_fault_is_answered():
    released = []
    op = Operation(MEMORY, MEMORY)
    run_guarded("conv", op.run, op.variants(*ALL), FaultBudget(), FaultReport(),
                release=lambda: released.append(len(op.calls)))  # fmt: skip
    assert released == [1, 2]


# ---------------------------------------------------------------- on the simulated device

LIMITS = AttentionLimits(4_000_000, 4_000_000, 10**13, fused="fused")
SAMPLE = [r for r in REPORTED if r[2] in ("specific", "memory", "platform")]


def undisturbed(dtype):
    g = torch.Generator().manual_seed(3)
    q = (torch.randn(1, 4, 200, 64, generator=g) / 2).to(dtype)
    return q, torch.nn.functional.scaled_dot_product_attention(q.double(), q.double(), q.double())


@pytest.mark.parametrize("times", [1, 0])
@pytest.mark.parametrize(("row", "text", "kind", "first"), SAMPLE)
def test_a_fault_in_attention_is_recovered(row, text, kind, first, times):
    """Once, and for good in the fused kernel: the result is right and the next run is clean."""
    q, expected = undisturbed(torch.bfloat16)
    if row in (4, 13) and times == 0:
        pytest_error = DeviceLostError if row == 4 else DeviceFaultError
    else:
        pytest_error = None
    with SimulatedDevice() as dev:
        dev.inject(text, op="scaled_dot", times=times)
        attend = PlannedAttention(dev.facts(), LIMITS)
        if pytest_error is not None:
            with pytest.raises(pytest_error):
                attend(q, q, q)
            return
        got = attend(q, q, q)
        events = list(attend.report.faults.events)
        again = attend(q, q, q)
    assert (got.double() - expected).abs().max() < 2e-2
    assert (again.double() - expected).abs().max() < 2e-2
    assert {e.row for e in events} == {row}
    assert events[0].reaction == first
    assert events[-1].outcome == "recovered"
    assert attend.report.faults.events == events, "the next call is clean"


@pytest.mark.parametrize(("row", "text", "kind", "first"), [r for r in REPORTED if r[2] == "lost"])
def test_a_lost_device_stops_attention(row, text, kind, first):
    q, _ = undisturbed(torch.float32)
    with SimulatedDevice() as dev:
        dev.inject(text, at_launch=2)
        attend = PlannedAttention(dev.facts(), LIMITS, policy="math")
        with pytest.raises(DeviceLostError):
            attend(q, q, q)
        launches = dev.launches
        with pytest.raises(DeviceLostError, match="earlier in this process"):
            attend(q, q, q)
    assert dev.launches == launches, "nothing was sent to a lost device"


def test_a_simulated_memory_limit_is_survived():
    q, expected = undisturbed(torch.float32)
    roomy = AttentionLimits(2**30, 2**30, 10**13, fused="math")
    with SimulatedDevice(DeviceSpec(total_bytes=1_500_000)) as dev:
        attend = PlannedAttention(dev.facts(), roomy)
        got = attend(q, q, q)
    assert (got.double() - expected).abs().max() < 2e-6
    assert attend.report.faults.events[-1].outcome == "recovered"


# ---------------------------------------------------------------- wrong numbers


def test_finite_numbers_pass():
    assert faults.find_nonfinite("step 1", torch.ones(3)) is None
    assert faults.find_nonfinite("step 1", torch.ones(0)) is None
    assert faults.find_nonfinite("step 1", torch.ones(3, dtype=torch.long)) is None
    faults.check_finite("step 1", torch.ones(3))


@pytest.mark.parametrize(
    ("dtype", "fill", "after", "words"),
    [
        (torch.float16, "inf", False, r"VAE decode produced.*1 of 6 in float16.*65504.*bfloat16"),
        (torch.bfloat16, "nan", False, r"bfloat16 has the range.*doctor"),
        (torch.float32, "all nan", True, r"all values are NaN after empty_cache.*torch 2\.11"),
    ],
)
def test_wrong_numbers_name_stage_and_cause(dtype, fill, after, words):
    t = torch.ones(2, 3, dtype=dtype)
    if fill == "all nan":
        t.fill_(float("nan"))
    else:
        t[1, 2] = float(fill)
    with pytest.raises(NonFiniteError, match=words) as caught:
        faults.check_finite("VAE decode", t, after_release=after)
    fault = classify(str(caught.value))
    assert fault.row == (33 if after else 37)


def test_patterns_compile_and_match_across_lines():
    for fault in FAULT_TABLE:
        re.compile(fault.pattern)
