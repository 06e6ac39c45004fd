"""The rules of the preflight as a table: checks in, verdict out. Nothing is run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from supir_xpu.xpu.device import DeviceFacts
from supir_xpu.xpu.probe_economics import (
    STEP_FLOPS,
    WORTH,
    retreat_options,
    round_trip_costs,
)
from supir_xpu.xpu.probe_facts import apply_measured, child_facts, is_covered, is_unsupported
from supir_xpu.xpu.probe_types import Battery, Check, Measured, Verdict
from supir_xpu.xpu.probe_verdict import decide

ARC = {"name": "Intel(R) Arc(TM) B580 Graphics", "uuid": "u", "driver_version": "1.6"}
IRIS = {"name": "Intel(R) Iris(R) Xe Graphics"}
RATES = Check(
    8,
    "rates",
    numbers={
        "flops_per_s": 10e12,
        "processor_flops_per_s": 1e11,
        "h2d_bytes_per_s": 8e9,
        "d2h_bytes_per_s": 8e9,
        "sync_s": 1e-4,
        "launch_s": 1e-5,
    },
)


def battery(*checks: Check, properties=ARC, **more) -> Battery:
    base = [
        Check(0, "torch", numbers={"host_device": "cuda", "arch_list": ["bmg", "dg2"]}),
        Check(0, "device count", numbers={"devices": 1}),
        Check(0, "device properties", numbers={"properties": properties}),
    ]
    values = {"stages": frozenset(range(10)), "complete": True, **more}
    return Battery("xpu:0", checks=[*base, *checks], **values)


def bad(stage: int, way: str = "", status="wrong", dtype: str = "float32", **more) -> Check:
    return Check(
        stage,
        f"op {stage}",
        status,
        dtype,
        "text",
        way,
        tuple(filter(None, ["contiguous", way])),
        **more,
    )


@pytest.mark.parametrize(
    ("checks", "status", "criterion"),
    [
        ([], "healthy", "all-passed"),
        ([bad(2, status="hang")], "retreat", "hang"),
        ([bad(6, status="hang")], "retreat", "hang"),
        ([bad(4, status="crash")], "retreat", "crash"),
        ([bad(4, status="lost")], "retreat", "lost"),
        ([bad(1)], "retreat", "basics"),
        ([bad(1, "cpu_block")], "retreat", "basics"),
        # one class: by its workaround; two classes: retreat, whatever the workarounds
        ([bad(2, "contiguous")], "degraded", "workaround"),
        ([bad(2, "contiguous"), bad(2, "contiguous")], "degraded", "workaround"),
        ([bad(2, "contiguous"), bad(2)], "retreat", "no-workaround"),
        ([bad(2)], "retreat", "no-workaround"),
        ([bad(2, "contiguous"), bad(3, "contiguous")], "retreat", "classes"),
        ([bad(2, "contiguous"), bad(5, "contiguous")], "retreat", "classes"),
        ([bad(3, "contiguous"), bad(5, "contiguous")], "retreat", "classes"),
        ([bad(6, "math"), bad(4, "contiguous")], "retreat", "classes"),
        ([bad(6, "math")], "degraded", "workaround"),
        # a workaround on the processor is judged by its cost
        ([bad(2, "cpu_block"), RATES], "degraded", "workaround"),
        ([bad(4, "cpu_block"), RATES], "retreat", "economics"),
        ([bad(2, "cpu_block")], "degraded", "workaround"),
        # one dtype
        ([bad(4, "dtype", dtype="bfloat16")], "degraded", "dtype"),
        (
            [bad(4, "dtype", dtype="bfloat16"), bad(5, "dtype", dtype="bfloat16")],
            "degraded",
            "dtype",
        ),
        ([bad(4, "dtype", dtype="bfloat16"), bad(3, "contiguous")], "degraded", "workaround"),
        # silence
        ([bad(9, "read_back")], "degraded", "workaround"),
        ([bad(9, numbers={"error": 0.5})], "retreat", "silence"),
        ([bad(9)], "retreat", "silence"),
        ([bad(9, numbers={"error": 1e-3})], "degraded", "unrepeatable"),
        ([bad(8, status="error")], "degraded", "rates"),
        # what says retreat is not hidden by what says degraded
        ([bad(2, "contiguous"), bad(9)], "retreat", "silence"),
        ([bad(4, "dtype", dtype="bfloat16"), bad(2)], "retreat", "no-workaround"),
    ],
)
def test_rules(checks, status, criterion):
    verdict = decide(battery(*checks))
    assert (verdict.status, verdict.criterion) == (status, criterion), verdict.reason
    assert verdict.reason.endswith(".")
    assert verdict.action or status == "healthy"
    assert bool(verdict.retreats) is (status == "retreat")
    assert verdict.for_risk == status


def test_several_workarounds_at_once():
    checks = (bad(6, "math"), bad(9, "read_back"), bad(4, "dtype", dtype="bfloat16"))
    verdict = decide(battery(*checks))
    assert verdict.status == "degraded"
    assert dict(verdict.workarounds) == {
        "attention": "math",
        "silence": "read_back",
        "dense": "dtype",
    }
    assert verdict.dropped_dtypes == ("bfloat16",)
    assert sum(note.startswith("Also: ") for note in verdict.notes) == 2


def test_the_reason_names_both_classes_and_the_meaning():
    text = "level_zero backend failed with error: 45 (UR_RESULT_ERROR_INVALID_ARGUMENT)"
    first, second = (replace(bad(n, status="error"), text=text) for n in (2, 3))
    reason = decide(battery(first, second)).reason
    for word in ("reductions", "indexing with a cast", "error: 45", "dtype was rejected"):
        assert word in reason


@pytest.mark.parametrize(
    ("count", "seen", "status", "criterion", "action"),
    [
        (Check(0, "device count", "skipped", text="none listed"), False, "absent", "absent", ""),
        (Check(0, "device count", "skipped", text="none"), True, "retreat", "vanished", "Restart"),
        (
            Check(0, "device count", "error", text="2147483646 (UR_RESULT_ERROR_UNKNOWN)"),
            False,
            "retreat",
            "several-devices",
            "--oneapi-device-selector",
        ),
        (
            Check(0, "device count", "error", text="XPU device count is zero"),
            False,
            "retreat",
            "vanished",
            "Restart",
        ),
        (
            Check(0, "device count", "error", text="Failed to initialize XPU devices"),
            False,
            "retreat",
            "no-driver",
            "driver",
        ),
        (
            Check(0, "device count", "error", text="No XPU devices are available"),
            True,
            "retreat",
            "vanished",
            "Restart",
        ),
        (Check(0, "device count", "error", text="odd"), False, "retreat", "enumeration", "Update"),
        (
            Check(0, "device count", "wrong", text="xpu:3 was asked for, 1 listed"),
            False,
            "retreat",
            "no-such-device",
            "Choose",
        ),
        (
            Check(0, "starting torch", "crash", text="exit code 0xC0000005"),
            False,
            "retreat",
            "import",
            "Reinstall torch",
        ),
    ],
)
def test_enumeration(count, seen, status, criterion, action):
    verdict = decide(Battery("xpu:0", checks=[count]), seen_before=seen)
    assert (verdict.status, verdict.criterion) == (status, criterion)
    assert action in verdict.action
    assert count.text in verdict.reason


def test_an_unsupported_device_is_never_better_than_degraded():
    for checks, expected in (((), "degraded"), ((bad(1),), "retreat")):
        assert decide(battery(*checks, properties=IRIS)).status == expected
    warned = battery(warnings=["X is not officially supported by PyTorch XPU"])
    assert is_unsupported(warned)
    assert decide(warned).criterion == "unsupported"
    assert not is_unsupported(battery())
    assert any("older" in note for note in decide(battery(bad(2), properties=IRIS)).notes)


def test_a_short_battery_says_so():
    short = decide(battery(stages=frozenset(range(4))))
    assert any("simplest operations" in note for note in short.notes)
    assert not any("simplest" in note for note in decide(battery()).notes)


def test_costs_at_the_border():
    """One class on the processor is worth it exactly while it stays below 80 % of its time."""
    measured = Measured(
        flops_per_s=10e12,
        processor_flops_per_s=1e12,
        h2d_bytes_per_s=1e12,
        d2h_bytes_per_s=1e12,
    )
    costs = round_trip_costs("norms", measured)
    assert costs.device_s == pytest.approx(STEP_FLOPS / 10e12)
    assert costs.trips_s == pytest.approx(2 * 1.9e9 / 1e12)
    room = WORTH * STEP_FLOPS / 1e12 - costs.device_s - costs.trips_s
    for part, worth in ((0.99, True), (1.01, False)):
        slower = round_trip_costs("norms", replace(measured, sync_s=part * room / 393))
        assert slower.is_worth_it is worth
    assert round_trip_costs("norms", replace(measured, d2h_bytes_per_s=0.0)) is None


def test_minutes_of_a_retreat():
    options = retreat_options(Measured(processor_flops_per_s=1e11), 60e11 * 7)
    assert [option.minutes for option in options] == [None, 7.0, 7.0, pytest.approx(0.07)]
    assert "about 7 minutes" in options[2].sentence
    assert all(o.minutes is None for o in retreat_options(Measured(), 1e12)[:3])
    assert "lists no GPU" in retreat_options(Measured(), 1.0, ["CPU"])[0].note
    assert "lists GPU" in retreat_options(Measured(), 1.0, ["CPU", "GPU.0"])[0].note


@pytest.mark.parametrize(
    ("name", "arch_list", "covered"),
    [
        ("Intel(R) Arc(TM) B580 Graphics", ["pvc", "bmg", "dg2"], True),
        ("Intel(R) Arc(TM) A770 Graphics", ["pvc", "bmg", "ats-m150"], True),
        ("Intel(R) Arc(TM) A770 Graphics", ["pvc", "bmg"], False),
        ("Intel(R) Iris(R) Xe Graphics", ["pvc", "bmg", "dg2"], False),
        ("Something New", ["pvc"], False),
        ("Intel(R) Arc(TM) B580 Graphics", [], False),
    ],
)
def test_which_devices_torch_was_compiled_for(name, arch_list, covered):
    checks = [
        Check(0, "torch", numbers={"arch_list": arch_list}),
        Check(0, "device properties", numbers={"properties": {"name": name}}),
    ]
    assert is_covered(Battery("xpu:0", checks=checks)) is covered
    assert is_covered(Battery("cpu", checks=checks))


def test_what_later_children_are_told():
    card = battery(properties={**ARC, "is_integrated_gpu": False, "total_memory": 8 * 2**30})
    assert child_facts(card)["free_bytes"] == 4 * 2**30
    assert (
        child_facts(battery(Check(0, "free memory", numbers={"free_bytes": 7})))["free_bytes"] == 7
    )
    shared = battery(properties={**IRIS, "is_integrated_gpu": True, "total_memory": 2**34})
    assert child_facts(shared)["free_bytes"] == 0  # shared with the host: nothing large is tried
    weak = battery(properties={**ARC, "has_bfloat16_conversions": False})
    assert child_facts(weak)["dtypes"] == ["float32", "float16"]


FACTS = DeviceFacts(
    kind="xpu",
    max_alloc_bytes=4 * 2**30,
    dtypes=("float32", "float16", "bfloat16"),
    flops_per_s=1.0,
    sources={"flops_per_s": "a guess", "name": "driver"},
)


def test_measured_facts_replace_guesses():
    verdict = Verdict(
        "degraded",
        "x",
        "y",
        dropped_dtypes=("bfloat16",),
        measured=Measured(
            flops_per_s=5e12,
            bw_bytes_per_s=2e11,
            launch_s=1e-5,
            sync_s=4e-5,
            fused_sdpa="fused",
            fused_max_dim_head=64,
            allocated_bytes=2 * 2**30,
            refused_bytes=3 * 2**30,
        ),
    )
    facts = apply_measured(FACTS, verdict)
    assert (facts.flops_per_s, facts.bw_bytes_per_s) == (5e12, 2e11)
    assert (facts.launch_s, facts.sync_s) == (1e-5, 4e-5)
    assert (facts.fused_sdpa, facts.fused_max_dim_head) == ("fused", 64)
    assert facts.max_alloc_bytes == 2 * 2**30
    assert facts.dtypes == ("float32", "float16")
    assert facts.sources["flops_per_s"] == facts.sources["max_alloc_bytes"] == "preflight"
    assert facts.sources["name"] == "driver"


def test_what_was_not_measured_changes_nothing():
    assert apply_measured(FACTS, Verdict("healthy", "x", "y")) is FACTS
    above = Measured(allocated_bytes=int(3.9 * 2**30), refused_bytes=int(4.1 * 2**30))
    assert apply_measured(FACTS, Verdict("healthy", "x", "y", measured=above)) is FACTS


def test_wrong_fused_attention_is_recorded_as_math():
    """The execution layer then takes exact attention in pieces: the workaround that was tested."""
    wrong = Check(6, "attention", "wrong", "float16", "t", "math", ("math",))
    good = Check(6, "attention 2", numbers={"kernel": "fused", "dim_head": 64})
    verdict = decide(battery(good, wrong))
    assert dict(verdict.workarounds) == {"attention": "math"}
    assert apply_measured(FACTS, verdict).fused_sdpa == "math"
