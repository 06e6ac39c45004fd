"""What a verdict is made of: scores, seconds, modes, order, and silence on other devices."""

import inspect
import re
from dataclasses import replace

import pytest
from supir_xpu.tests.xpu.report_jobs import (
    B70,
    CUDA,
    GIB,
    NOW,
    PROFILE,
    SMALL,
    crash,
    report_plan,
    verdict,
)
from supir_xpu.xpu.errors import RiskBlockedError
from supir_xpu.xpu.history import History
from supir_xpu.xpu.risk import (
    CODES,
    RULES,
    JudgeSettings,
    PhaseNumbers,
    PlanNumbers,
    blocks,
    enforce,
    explain,
    predicted_seconds,
    rates,
    severity_of,
)


def remembering(*crashes):
    return History(B70.driver, crashes=crashes)


@pytest.mark.parametrize(
    ("score", "expected"),
    [(0, "ok"), (2.99, "ok"), (3, "warn"), (5.99, "warn"), (6, "block"), (20, "block")],
)
def test_severity_of_a_score(score, expected):
    assert severity_of(score) == expected


def test_seconds_are_the_longer_of_memory_and_arithmetic():
    plan = replace(SMALL, bytes_moved_total=100.0, flops_total=400.0)
    assert predicted_seconds(plan, 10, 100) == 10
    assert predicted_seconds(plan, 100, 10) == 40
    assert predicted_seconds(plan, 0, 10) == 40
    phases = (PhaseNumbers("a", 1, 400.0, 0.0), PhaseNumbers("b", 1, 0.0, 100.0))
    assert predicted_seconds(replace(plan, phases=phases), 10, 100) == 14
    assert predicted_seconds(replace(plan, phases=phases[:1]), 10, 100) == 10
    launched = replace(plan, launches_total=1000)
    assert predicted_seconds(launched, 10, 100, 0.001) == 10
    assert predicted_seconds(launched, 10, 100, 0.1) == pytest.approx(100)


def test_measured_rates_replace_the_profile():
    assert rates(B70, PROFILE) == (75e9, 30e12)
    assert rates(replace(B70, bw_bytes_per_s=1e9), PROFILE) == (1e9, 30e12)
    assert rates(replace(B70, flops_per_s=2e12), PROFILE) == (75e9, 2e12)


@pytest.mark.parametrize("mode", ["auto", "block", "warn", "off"])
def test_only_auto_and_block_refuse(mode):
    bad = verdict(report_plan("A"))
    assert bad.severity == "block"
    assert blocks(bad, mode) is (mode in ("auto", "block"))
    if not blocks(bad, mode):
        enforce(bad, mode)
        assert bad.risks  # switched off is still recorded
        return
    with pytest.raises(RiskBlockedError) as caught:
        enforce(bad, mode)
    for part in ("XPU_OUTPUT_SIZE", "885535", "1920 x 2816", "tile_px"):
        assert part in str(caught.value)
    enforce(verdict(SMALL), mode)


def test_risks_come_severest_first():
    order = {"block": 0, "warn": 1, "note": 2}
    found = [order[r.severity] for r in verdict(report_plan("A")).risks]
    assert found == sorted(found)


def test_other_devices_hear_about_size_and_memory_only():
    huge = PlanNumbers(
        0,
        64,
        images=9,
        launches_total=10**8,
        max_score_elements=2**40,
        largest_tensor_bytes=2**40,
        live_peak_bytes=2**40,
        bytes_moved_total=1e18,
        vae_tile_px=4096,
    )
    history = replace(remembering(crash(), crash(event="b")), last_end=NOW, busy=True)
    how = JudgeSettings(loads_model=True, novelty="score", preflight="retreat")
    found = verdict(huge, CUDA, history=history, how=how)
    assert {r.code for r in found.risks} == {"SIZE_INVALID", "MEMORY_FIT"}
    fine = replace(huge, output_width_px=64, live_peak_bytes=GIB)
    assert verdict(fine, CUDA, history=history, how=how).risks == ()
    everything = {r.code for r in verdict(huge, history=history, how=how).risks}
    assert len(everything) >= 12


def test_every_code_is_documented_and_used():
    text = "".join(inspect.getsource(rule) for rule in RULES)
    assert set(re.findall(r'"((?:XPU|SIZE|MEMORY)_[A-Z_]+)"', text)) == set(CODES)
    assert len(RULES) == len(CODES)


def test_every_message_has_numbers_and_an_action():
    how = JudgeSettings(loads_model=True, novelty="score", preflight="retreat")
    history = replace(remembering(crash(), crash(kind="process")), last_end=NOW)
    plan = replace(report_plan("A"), images=3, live_peak_bytes=2**40, max_score_elements=2**40)
    found = verdict(plan, history=history, how=how)
    assert len(found.risks) > 10
    for item in found.risks:
        assert item.message.endswith(".")
        assert item.action.endswith(".")
        assert item.code in explain(found)
