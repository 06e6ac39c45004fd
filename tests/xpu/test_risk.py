"""Every rule below, at and above its threshold."""

from dataclasses import replace

import pytest
from supir_xpu.tests.xpu.report_jobs import (
    ALCHEMIST,
    B70,
    GIB,
    GOOD,
    GOOD_PROFILE,
    NOW,
    PROFILE,
    QUIET,
    SMALL,
    crash,
    verdict,
)
from supir_xpu.xpu.device import DeviceFacts
from supir_xpu.xpu.device_profiles import bundled_profiles
from supir_xpu.xpu.history import History, JobSize
from supir_xpu.xpu.risk import (
    JudgeSettings,
    PlanNumbers,
    Waits,
)


def risk(code, *args, **kwargs):
    found = [r for r in verdict(*args, **kwargs).risks if r.code == code]
    assert len(found) <= 1
    return found[0] if found else None


def points(code, *args, **kwargs):
    found = risk(code, *args, **kwargs)
    return found.points if found else 0


def severity(code, *args, **kwargs):
    found = risk(code, *args, **kwargs)
    return found.severity if found else None


def seconds(value):
    """A plan that takes this long on the B70 profile."""
    return replace(SMALL, bytes_moved_total=value * PROFILE.bw_bytes_per_s)


# -- the rules ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("launches", "expected"),
    [(149_999, 0), (150_000, 1), (599_999, 1), (600_000, 2), (999_999, 2), (1_000_000, 3)],
)
def test_launches(launches, expected):
    assert points("XPU_LAUNCHES", replace(SMALL, launches_total=launches)) == expected


@pytest.mark.parametrize(
    ("time", "expected"),
    [(119.9, 0), (120.1, 1), (359.9, 1), (360.1, 2), (1199.9, 2), (1200.1, 3)],
)
def test_busy_time(time, expected):
    assert points("XPU_BUSY_TIME", seconds(time)) == expected


def test_long_jobs_alone_block_only_where_machines_died():
    plan = replace(seconds(5000), launches_total=5_000_000)
    assert verdict(plan).severity == "block"
    good = verdict(plan, GOOD, GOOD_PROFILE)
    assert (good.score, good.severity) == (5, "warn")


@pytest.mark.parametrize(
    ("tile", "whole", "side", "expected"),
    [
        (1023, False, 512, 0),
        (1024, False, 512, 2),
        (2048, False, 512, 2),
        (0, True, 1000, 0),  # exactly 1 Mpix
        (0, True, 1001, 2),
        (0, False, 4000, 0),  # striped
    ],
)
def test_vae_tile(tile, whole, side, expected):
    plan = PlanNumbers(
        side, side, vae_tile_px=tile, vae_untiled=whole, attention_policy="fused", tiles=4
    )
    assert points("XPU_VAE_TILE", plan) == expected


@pytest.mark.parametrize(
    ("width", "height", "expected"),
    [
        (1791, 1791, None),
        (1792, 64, "warn"),
        (2048, 64, "warn"),
        (2049, 64, "block"),
        (1999, 2000, "warn"),
        (2048, 2048, "warn"),
        (1791, 2233, "block"),
    ],
)
def test_output_size(width, height, expected):
    plan = PlanNumbers(width, height, attention_policy="chunk_loop")
    assert severity("XPU_OUTPUT_SIZE", plan) == expected
    assert severity("XPU_OUTPUT_SIZE", replace(plan, attention_policy="unknown")) == expected
    assert severity("XPU_OUTPUT_SIZE", replace(plan, attention_policy="fused")) is None
    assert severity("XPU_OUTPUT_SIZE", replace(plan, tiles=4)) is None
    assert severity("XPU_OUTPUT_SIZE", plan, GOOD, GOOD_PROFILE) is None


@pytest.mark.parametrize(
    ("scores", "policy", "expected"),
    [
        (2**30, "math", None),
        (2**30 + 1, "math", "block"),
        (2**30 + 1, "chunk_loop", "block"),
        (2**30 + 1, "fused", None),
        (2**30 + 1, "fused_pieces", None),
    ],
)
def test_scores(scores, policy, expected):
    plan = replace(SMALL, max_score_elements=scores, attention_policy=policy)
    assert severity("XPU_SCORES", plan) == expected


@pytest.mark.parametrize(
    ("facts", "size", "expected"),
    [
        (ALCHEMIST, 4 * GIB - 1, None),
        (ALCHEMIST, 4 * GIB, "block"),
        (ALCHEMIST, 4 * GIB + 1, "block"),
        (B70, 4 * GIB - 1, None),
        (B70, 4 * GIB, "warn"),
        (replace(B70, max_alloc_bytes=2 * GIB), 2 * GIB - 1, None),
        (replace(B70, max_alloc_bytes=2 * GIB), 2 * GIB, "block"),
        (replace(B70, max_alloc_bytes=0), 4 * GIB, "warn"),
    ],
)
def test_alloc_limit(facts, size, expected):
    assert severity("XPU_ALLOC_LIMIT", replace(SMALL, largest_tensor_bytes=size), facts) == expected


@pytest.mark.parametrize(
    ("peak", "weights", "total", "expected"),
    [
        (9 * GIB - 1, 0, 10 * GIB, None),
        (9 * GIB, 0, 10 * GIB, None),
        (9 * GIB + 1, 0, 10 * GIB, "block"),
        (5 * GIB, 4 * GIB, 10 * GIB, None),
        (5 * GIB, 4 * GIB + 1, 10 * GIB, "note"),
        (99 * GIB, 0, 0, None),  # size of the memory not known
    ],
)
def test_memory(peak, weights, total, expected):
    plan = replace(SMALL, live_peak_bytes=peak, weight_bytes=weights)
    assert severity("MEMORY_FIT", plan, replace(B70, total_bytes=total)) == expected


@pytest.mark.parametrize(("side", "expected"), [(0, "block"), (1, None)])
def test_size(side, expected):
    assert severity("SIZE_INVALID", PlanNumbers(side, 64)) == expected


@pytest.mark.parametrize(
    ("facts", "guc", "expected"),
    [
        (B70, "", 1),
        (replace(B70, driver="32.0.101.8724"), "", 1),
        (replace(B70, driver="32.0.101.9000"), "", 0),
        (GOOD, "70.64", 1),
        (GOOD, "70.65", 0),
        (ALCHEMIST, "", 0),
        (DeviceFacts("xpu"), "", 1),
    ],
)
def test_driver(facts, guc, expected):
    assert (
        points("XPU_DRIVER", facts=facts, profile=bundled_profiles().pick(facts, guc)) == expected
    )


@pytest.mark.parametrize(
    ("preflight", "expected"),
    [
        ("unknown", "block"),
        ("pending", "warn"),
        ("degraded", "warn"),
        ("healthy", "warn"),
        ("retreat", "block"),
    ],
)
def test_unsupported(preflight, expected):
    facts = DeviceFacts("xpu", family="xe-lp", name="Iris Xe")
    found = verdict(facts=facts, how=replace(QUIET, preflight=preflight))
    assert (found.score, found.severity) == (4, expected)


def test_preflight_retreat_blocks_any_xpu():
    assert severity("XPU_PREFLIGHT", how=replace(QUIET, preflight="retreat")) == "block"
    assert severity("XPU_PREFLIGHT", how=replace(QUIET, preflight="degraded")) is None
    assert severity("XPU_PREFLIGHT", how=replace(QUIET, preflight="pending")) is None


def test_preflight_reasons_are_in_the_risk():
    how = replace(
        QUIET,
        preflight="retreat",
        preflight_reason="It hung in sum.",
        preflight_action="Update it.",
    )
    (risk,) = [r for r in verdict(how=how).risks if r.code == "XPU_PREFLIGHT"]
    assert risk.message.endswith("It hung in sum.")
    assert risk.action == "Update it."


def test_measured_launch_and_wait_costs_count_in_the_predicted_time():
    plan = replace(SMALL, launches_total=100_000, flops_total=0.0, bytes_moved_total=0.0, phases=())
    slow = replace(B70, launch_s=1e-3, sync_s=64e-3)
    assert verdict(plan).size.seconds == 0
    assert PROFILE.known_bad
    assert verdict(plan, slow).size.seconds == pytest.approx(200)  # every 64th launch is waited for
    fine = replace(PROFILE, known_bad=False, careful=False)
    assert verdict(plan, slow, profile=fine).size.seconds == pytest.approx(100)


def test_unknown_device_is_told_so():
    found = risk("XPU_UNKNOWN", facts=DeviceFacts("xpu", name="Arc X9"))
    assert found.severity == "note"
    assert "Arc X9" in found.message
    assert risk("XPU_UNKNOWN") is None


@pytest.mark.parametrize(
    ("gap", "heavy", "before", "expected"),
    [
        (0, False, 0, 3),
        (7.9, False, 0, 3),
        (8, False, 0, 0),
        (8, True, 0, 1),
        (29.9, True, 0, 1),
        (30, True, 0, 0),
        (3, False, 5, 0),
        (3, False, 4.9, 3),
        (3, True, 27, 0),
        (-50, False, 0, 3),  # the clock was set back
        (-50, False, 8, 0),
    ],
)
def test_gap(gap, heavy, before, expected):
    history = History(last_end=NOW - gap, last_heavy=heavy)
    how = replace(QUIET, waits=Waits(before_s=before))
    assert points("XPU_GAP", history=history, how=how) == expected
    assert points("XPU_GAP", facts=GOOD, profile=GOOD_PROFILE, history=history, how=how) == 0


def test_gap_counts_work_of_another_process():
    assert points("XPU_GAP", history=History(busy=True)) == 3
    assert points("XPU_GAP", history=History()) == 0


def test_rest_after_loading_is_rest_after_a_heavy_job():
    history = History(last_end=NOW - 10, last_heavy=True)
    for load, expected in ((True, 0), (False, 1)):
        how = replace(QUIET, loads_model=load, waits=Waits(after_load_s=20))
        assert points("XPU_GAP", history=history, how=how) == expected


@pytest.mark.parametrize(
    ("images", "side", "rest", "expected"),
    [(1, 2000, 0, 0), (2, 2000, 0, 3), (2, 2000, 5.9, 3), (2, 2000, 6, 0), (2, 1791, 0, 0)],
)
def test_batch_settle(images, side, rest, expected):
    plan = PlanNumbers(side, 64, images=images, attention_policy="fused")
    how = replace(QUIET, waits=Waits(per_image_s=rest))
    assert points("XPU_BATCH_SETTLE", plan, how=how) == expected


@pytest.mark.parametrize(("each", "expected"), [(59, 0), (60.1, 3)])
def test_batch_settle_counts_long_images(each, expected):
    assert points("XPU_BATCH_SETTLE", replace(seconds(2 * each), images=2)) == expected


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (JudgeSettings(novelty="off"), 0),
        (JudgeSettings(novelty="off", loads_model=True), 1),
        (JudgeSettings(novelty="off", loads_model=True, waits=Waits(after_load_s=29.9)), 1),
        (JudgeSettings(novelty="off", loads_model=True, waits=Waits(after_load_s=30)), 0),
        (JudgeSettings(novelty="off", loaded_at=NOW - 29.9), 1),
        (JudgeSettings(novelty="off", loaded_at=NOW - 30), 0),
        (JudgeSettings(novelty="off", loaded_at=NOW - 20, waits=Waits(before_s=10)), 0),
    ],
)
def test_fresh_load(how, expected):
    assert points("XPU_FRESH_LOAD", how=how) == expected


def remembering(*crashes):
    return History(B70.driver, crashes=crashes)


@pytest.mark.parametrize(
    ("launches", "time", "expected"),
    [
        (500, 50.1, "block"),
        (499, 50.1, None),
        (500, 49.9, None),
        (1000, 100.1, "block"),
        (10**6, 10.0, None),  # many launches, little time: not that job
    ],
)
def test_crashed_before(launches, time, expected):
    plan = replace(seconds(time), launches_total=launches)
    assert severity("XPU_CRASHED_BEFORE", plan, history=remembering(crash())) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "block"),
        ({"policy": "unknown"}, "block"),
        ({"policy": "math"}, None),
        ({"driver": "older"}, "warn"),
        ({"clean_after": 2}, "block"),
        ({"clean_after": 3}, "warn"),
        ({"clean_after": 6}, "note"),
        ({"driver": "older", "clean_elsewhere": 3}, "note"),
        ({"driver": "older", "clean_after": 99}, "warn"),
        ({"kind": "process"}, None),
        ({"device_at_work": False}, None),
    ],
)
def test_crashed_before_softens_and_never_vanishes(changes, expected):
    plan = replace(seconds(101), launches_total=1000)
    assert severity("XPU_CRASHED_BEFORE", plan, history=remembering(crash(**changes))) == expected


def test_crashes_count_two_points_each():
    one, two = crash(), crash(event="boot 2")
    assert points("XPU_CRASHES", history=remembering()) == 0
    assert points("XPU_CRASHES", history=remembering(one)) == 2
    assert points("XPU_CRASHES", history=remembering(one, one)) == 2  # one event
    assert points("XPU_CRASHES", history=remembering(one, two)) == 4
    assert points("XPU_CRASHES", history=remembering(replace(one, clean_after=3))) == 1
    assert points("XPU_CRASHES", history=remembering(replace(one, driver="older"))) == 1


def test_ended_processes_are_half_crashes_and_notes():
    ends = [crash(kind="process", event=f"process {n}") for n in range(9)]
    for count, expected in ((0, 0), (1, 1), (2, 2), (9, 2)):
        history = remembering(*ends[:count])
        assert points("XPU_ENDED_BEFORE", history=history) == expected
        assert severity("XPU_ENDED_BEFORE", history=history) == ("note" if count else None)


@pytest.mark.parametrize(
    ("mode", "expected"), [("off", None), ("note", ("note", 0)), ("score", ("note", 1))]
)
def test_new_size(mode, expected):
    how = replace(QUIET, novelty=mode)
    plan = replace(seconds(10), launches_total=1000)
    for clean in ((999, 11.0), (1001, 9.0)):
        history = History(clean=(("fused", JobSize(*clean)),))
        found = risk("XPU_NEW_SIZE", plan, history=history, how=how)
        assert (found and (found.severity, found.points)) == expected
    for policy, known in (("fused", True), ("math", False)):
        history = History(clean=((policy, JobSize(1000, 10.1)),))
        found = risk("XPU_NEW_SIZE", plan, history=history, how=how)
        assert (found is None) is (known or mode == "off")
