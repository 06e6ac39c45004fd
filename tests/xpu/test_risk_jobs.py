"""The jobs of the first crash report, judged; and what no judgement may ever do."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from supir_xpu.tests.xpu.report_jobs import (
    ALCHEMIST,
    B70,
    CUDA,
    GIB,
    GOOD,
    JOBS,
    NOW,
    PROFILE,
    QUIET,
    crash,
    report_plan,
    verdict,
)
from supir_xpu.xpu.device import DeviceFacts
from supir_xpu.xpu.device_profiles import bundled_profiles
from supir_xpu.xpu.history import History, JobSize
from supir_xpu.xpu.risk import JudgeSettings, PlanNumbers, Waits, blocks, explain, make_judge

# -- the reported jobs (novelty off) -----------------------------------------------------------


def job(name, gap=None, how=QUIET, **changes):
    history = History(B70.driver, last_end=None if gap is None else NOW - gap, last_heavy=True)
    return verdict(report_plan(name, **changes), history=history, how=how)


@pytest.mark.parametrize(
    ("name", "score", "severity"),
    [
        ("A", 8, "block"),
        ("B", 3, "warn"),
        ("C", 7, "block"),
        ("D", 7, "block"),
        ("E", 5, "warn"),
        ("F", 7, "block"),
    ],
)
def test_reported_jobs(name, score, severity):
    found = job(name)
    assert (found.score, found.severity) == (score, severity)
    assert not blocks(job("B"), "block")


def test_reported_numbers_are_the_ones_of_the_report():
    sizes = {name: job(name).size for name in JOBS}
    assert sizes["A"].launches == 885_535
    assert sizes["F"].launches == 1_695_330
    assert 25 * 60 < sizes["A"].seconds < 29 * 60
    assert 66 * 60 < sizes["C"].seconds < 69 * 60
    assert 140 < sizes["E"].seconds < 150


def test_b_may_have_a_large_vae_tile_and_still_runs():
    found = verdict(replace(report_plan("B"), vae_tile_px=1024))
    assert (found.score, found.severity) == (5, "warn")


@pytest.mark.parametrize("gap", [0, 3, 5])
def test_second_run_of_e_is_blocked(gap):
    found = job("E", gap=gap)
    assert (found.score, found.severity) == (8, "block")


@pytest.mark.parametrize("name", list(JOBS))
def test_g_a_second_run_costs_three_points(name):
    assert job(name, gap=4).score == job(name).score + 3


@pytest.mark.parametrize("name", list(JOBS))
def test_h_settling_lowers_the_score_of_a_heavy_batch(name):
    rest = replace(QUIET, waits=Waits(per_image_s=6))
    hurried, settled = job(name, images=3), job(name, images=3, how=rest)
    assert hurried.score > settled.score


@pytest.mark.parametrize("name", list(JOBS))
def test_i_a_fresh_load_costs_one_point(name):
    assert job(name, how=replace(QUIET, loads_model=True)).score == job(name).score + 1


def test_unet_on_the_cpu_still_warns_nobody_off():
    """Only the VAE worked on the GPU, and the machine died: the one job the rules let through."""
    plan = PlanNumbers(1344, 1344, launches_total=1830, attention_policy="cpu", vae_tile_px=1024)
    found = verdict(plan)
    assert (found.score, found.severity) == (3, "warn")
    assert "No job on it is without risk" in explain(found)


# -- what may never happen ---------------------------------------------------------------------

sizes = st.integers(64, 8192)
plans = st.builds(
    PlanNumbers,
    output_width_px=sizes,
    output_height_px=sizes,
    tiles=st.sampled_from([1, 9]),
    steps=st.integers(1, 100),
    images=st.integers(1, 4),
    launches_total=st.integers(0, 3_000_000),
    attention_policy=st.sampled_from(["fused", "math", "chunk_loop", "unknown"]),
    max_score_elements=st.integers(0, 2**32),
    largest_tensor_bytes=st.integers(0, 8 * GIB),
    live_peak_bytes=st.integers(0, 64 * GIB),
    bytes_moved_total=st.floats(0, 3e14),
    flops_total=st.floats(0, 3e16),
    vae_tile_px=st.sampled_from([0, 512, 1024]),
    vae_untiled=st.booleans(),
)
devices = st.sampled_from([B70, GOOD, ALCHEMIST, DeviceFacts("xpu"), CUDA])
histories = st.builds(
    History,
    driver=st.just(B70.driver),
    clean=st.just((("fused", JobSize(100_000, 100.0)),)),
    crashes=st.sampled_from([(), (crash(300_000, 200.0),), (crash(), crash(kind="process"))]),
    last_end=st.one_of(st.none(), st.floats(NOW - 60, NOW)),
    last_heavy=st.booleans(),
)
judging = st.builds(
    JudgeSettings,
    loads_model=st.booleans(),
    novelty=st.sampled_from(["off", "note", "score"]),
    waits=st.builds(Waits, st.floats(0, 40), st.floats(0, 40), st.floats(0, 10)),
)


@settings(max_examples=150, deadline=None)
@given(plans, devices, histories, judging, st.data())
def test_more_of_anything_never_lowers_the_score(plan, facts, history, how, data):
    growing = {
        "output_width_px": st.integers(0, 4000),
        "output_height_px": st.integers(0, 4000),
        "launches_total": st.integers(0, 2_000_000),
        "max_score_elements": st.integers(0, 2**31),
        "largest_tensor_bytes": st.integers(0, 4 * GIB),
        "live_peak_bytes": st.integers(0, 32 * GIB),
        "bytes_moved_total": st.floats(0, 3e14),
        "flops_total": st.floats(0, 3e16),
        "steps": st.integers(0, 50),
    }
    more = {name: getattr(plan, name) + data.draw(by) for name, by in growing.items()}
    small = verdict(plan, facts, history=history, how=how)
    large = verdict(replace(plan, **more), facts, history=history, how=how)
    assert large.score >= small.score
    rank = ("ok", "warn", "block").index
    assert rank(large.severity) >= rank(small.severity)


@settings(max_examples=100, deadline=None)
@given(plans, devices, histories, judging, st.floats(0, 60), st.floats(0, 60))
def test_a_smaller_gap_never_lowers_the_score(plan, facts, history, how, one, two):
    short, long = sorted((one, two))
    near = verdict(plan, facts, history=replace(history, last_end=NOW - short), how=how)
    far = verdict(plan, facts, history=replace(history, last_end=NOW - long), how=how)
    assert near.score >= far.score


@settings(max_examples=100, deadline=None)
@given(plans, devices, histories, judging)
def test_the_judge_is_a_function(plan, facts, history, how):
    first = verdict(plan, facts, history=history, how=how)
    assert first == verdict(plan, facts, history=history, how=how)
    assert first.score == sum(r.points for r in first.risks)
    assert not blocks(first, "off")
    assert not blocks(first, "warn")
    profile = PROFILE if facts is B70 else bundled_profiles().pick(facts)
    again = make_judge(facts, profile, history, NOW, how)(plan, how.waits)
    assert again == first
