"""The search for a safe plan: it finds one for every reported crash, and never a worse one."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from supir_xpu.tests.xpu import report_jobs as report
from supir_xpu.xpu.auto_plan import (
    AutoRequest,
    NoSafePlanError,
    Settings,
    find_safe_plan,
    needed_waits,
)
from supir_xpu.xpu.history import Crash, History, JobSize
from supir_xpu.xpu.risk import JudgeSettings, PlanNumbers, Verdict, Waits, make_judge

NOW = 10_000.0
TILES = (0, 1536, 1024, 768)
POLICIES = ("fused", "fused_pieces", "math")
VAE = ((0, False, 256), (512, False, 0))


def search(name, *, gap=None, loads_model=False, images=1, history=None, **limits):
    """Run the search on one reported job, second runs ``gap`` seconds after a heavy job."""
    asked, latent, fp32 = report.JOBS[name]
    history = history or History(report.B70.driver)
    if gap is not None:
        history = replace(history, last_end=NOW - gap, last_heavy=True)
    how = JudgeSettings(loads_model=loads_model, novelty="off")
    request = AutoRequest(
        asked,
        tile_px=TILES,
        policies=POLICIES,
        vae=VAE,
        full_waits=needed_waits(report.PROFILE, history, NOW, how),
    )
    judge = make_judge(report.B70, report.PROFILE, history, NOW, how)

    def planner(wanted):
        return report.make_plan(wanted, latent, images=images, fp32=fp32)

    return find_safe_plan(request, planner, judge, **limits)


@pytest.mark.parametrize("name", list(report.JOBS))
@pytest.mark.parametrize("gap", [None, 0, 4])
@pytest.mark.parametrize("loads_model", [False, True])
@pytest.mark.parametrize("images", [1, 3])
def test_every_reported_job_gets_a_plan(name, gap, loads_model, images):
    """Below block, at the size that was asked for, with the waits that remove the waiting risks."""
    found = search(name, gap=gap, loads_model=loads_model, images=images)
    assert found.verdict.severity in ("ok", "warn")
    assert found.verdict.score < 6
    h, w = report.JOBS[name][1]
    assert (found.plan.output_width_px, found.plan.output_height_px) == (w * 8, h * 8)
    codes = {r.code for r in found.verdict.risks}
    assert not codes & {"XPU_GAP", "XPU_FRESH_LOAD", "XPU_BATCH_SETTLE", "XPU_VAE_TILE"}
    if gap is not None:
        rest = gap + found.waits.before_s
        assert rest >= 8
        assert rest + found.waits.after_load_s >= 30
        assert any("before the run" in change for change in found.changes) is (
            found.waits.before_s > 0
        )
    assert found.waits.after_load_s == (30 if loads_model else 0)
    assert found.waits_s == found.waits.total_s(images)
    assert any("attention: chunk_loop -> fused" in change for change in found.changes)


def test_what_is_ok_is_kept():
    request = AutoRequest(Settings(), tile_px=TILES, policies=POLICIES, full_waits=Waits(30, 30, 6))
    plan = PlanNumbers(512, 512, launches_total=1000, attention_policy="fused")
    judge = make_judge(
        report.B70, report.PROFILE, History(), NOW, JudgeSettings(novelty="off", loads_model=True)
    )
    found = find_safe_plan(request, lambda _: plan, judge)
    assert (found.settings, found.changes, found.waits_s) == (Settings(), (), 0)


def test_the_changes_say_everything_that_differs():
    found = search("A", gap=4, loads_model=True, images=2)
    text = "\n".join(found.changes)
    assert "attention: chunk_loop -> fused" in text
    assert "VAE: in tiles of 1024 px -> in stripes with a workspace of 256 MB" in text
    assert "waits 4 s before the run" in text
    assert "waits 30 s after loading the weights" in text
    assert "waits 6 s between images" in text


def test_only_what_may_change_is_changed():
    asked, latent, _ = report.JOBS["C"]
    judge = make_judge(report.B70, report.PROFILE, History(), NOW, JudgeSettings(novelty="off"))
    request = AutoRequest(asked, tile_px=TILES)
    seen = []

    def planner(wanted):
        seen.append(wanted)
        return report.make_plan(wanted, latent)

    with pytest.raises(NoSafePlanError) as caught:  # tiles alone do not make the loop safe
        find_safe_plan(request, planner, judge)
    assert {s.attention_policy for s in seen} == {"chunk_loop"}
    assert {s.vae_tile_px for s in seen} == {768}
    closest = caught.value.closest
    assert closest.verdict.severity == "block"
    for risk in closest.verdict.risks:
        assert risk.code in str(caught.value)


def test_no_wait_that_does_not_help():
    small = PlanNumbers(
        512, 512, images=4, attention_policy="fused", bytes_moved_total=130 * 75e9, launches_total=9
    )
    how = JudgeSettings(novelty="off", loads_model=True)
    history = History(last_end=NOW - 4)
    judge = make_judge(report.B70, report.PROFILE, history, NOW, how)
    waits = needed_waits(report.PROFILE, history, NOW, how)
    assert waits == Waits(4, 30, 6)
    found = find_safe_plan(AutoRequest(Settings(), full_waits=waits), lambda _: small, judge)
    assert found.waits == Waits(4, 30, 0)  # the images are short: nothing to rest from


@pytest.mark.parametrize(
    ("history", "how", "expected"),
    [
        (History(), JudgeSettings(), Waits(0, 0, 6)),
        (History(last_end=NOW - 3), JudgeSettings(), Waits(5, 0, 6)),
        (History(last_end=NOW - 9), JudgeSettings(), Waits(0, 0, 6)),
        (History(last_end=NOW - 3, last_heavy=True), JudgeSettings(), Waits(27, 0, 6)),
        (History(last_end=NOW, last_heavy=True), JudgeSettings(loads_model=True), Waits(8, 30, 6)),
        (History(), JudgeSettings(loaded_at=NOW - 10), Waits(20, 0, 6)),
        (History(last_end=NOW + 99), JudgeSettings(), Waits(8, 0, 6)),  # the clock was set back
    ],
)
def test_needed_waits(history, how, expected):
    assert needed_waits(report.PROFILE, history, NOW, how) == expected


def after_crash(name):
    """History of a machine that died in what the search had chosen for a job."""
    size = search(name).verdict.size
    crash = Crash("machine", size, "fused", report.B70.driver, "sample", NOW - 999, "boot 1")
    return History(report.B70.driver, crashes=(crash,))


def test_what_took_the_machine_down_is_not_planned_again():
    first, again = search("B"), search("B", history=after_crash("B"))
    assert first.settings.attention_policy == "fused"
    assert again.settings.attention_policy != "fused"
    assert again.verdict.severity == "warn"
    assert "XPU_CRASHES" in {r.code for r in again.verdict.risks}


def test_after_a_crash_the_same_job_is_refused_and_a_smaller_one_is_not():
    with pytest.raises(NoSafePlanError):
        search("C", history=after_crash("C"))
    smaller = search("E", history=after_crash("C"))
    assert smaller.settings.attention_policy == "fused"
    assert smaller.verdict.severity == "warn"


def test_a_lower_limit_is_kept_to():
    plain = search("C")
    assert plain.verdict.score < 6
    with pytest.raises(NoSafePlanError):
        search("C", limit=plain.verdict.score)


def table_judge(scores):
    """A judge that looks the verdict up: the score belongs to the tile."""

    def judge(plan, waits):
        score = scores[plan.tile_px]
        severity = "block" if score >= 6 else "warn" if score >= 3 else "ok"
        return Verdict(score, severity, (), JobSize(1, float(plan.steps)))

    return judge


@pytest.mark.parametrize(
    ("scores", "times", "tile"),
    [
        ((7, 2, 1), (1, 9, 20), 512),  # cheapest that is ok, not the safest
        ((7, 2, 1), (1, 20, 9), 256),
        ((7, 5, 4), (1, 9, 20), 256),  # none is ok: the lowest score
        ((7, 4, 4), (1, 20, 9), 256),  # equal scores: the cheaper one
        ((7, 4, 4), (1, 9, 9), 512),  # equal in all: the preferred one
        ((4, 4, 5), (9, 9, 1), 0),  # equal to what was asked: nothing is changed
        ((7, 6, 8), (1, 1, 1), None),
    ],
)
def test_order_of_plans(scores, times, tile):
    tiles = (0, 512, 256)
    by_tile = dict(zip(tiles, scores, strict=True))
    time = dict(zip(tiles, times, strict=True))
    request = AutoRequest(Settings(), tile_px=tiles)

    def planner(wanted):
        return PlanNumbers(64, 64, tile_px=wanted.tile_px, steps=time[wanted.tile_px])

    def run():
        return find_safe_plan(request, planner, table_judge(by_tile))

    if tile is None:
        with pytest.raises(NoSafePlanError) as caught:
            run()
        assert caught.value.closest.settings.tile_px == 512
    else:
        assert run().settings.tile_px == tile


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(list(report.JOBS)),
    latent=st.tuples(st.integers(64, 700), st.integers(64, 700)),
    steps=st.integers(1, 120),
    images=st.integers(1, 6),
    gap=st.one_of(st.none(), st.floats(0, 60)),
    loads_model=st.booleans(),
    crashes=st.lists(
        st.builds(
            Crash,
            kind=st.sampled_from(["machine", "process"]),
            size=st.builds(JobSize, st.integers(0, 10**6), st.floats(0, 2000)),
            policy=st.sampled_from(["fused", "math", "chunk_loop"]),
            driver=st.sampled_from([report.B70.driver, "older"]),
            phase=st.just("sample"),
            when=st.just(1.0),
            event=st.sampled_from("abc"),
        ),
        max_size=3,
    ),
    limit=st.sampled_from([2.0, 3.0, 5.0, 6.0]),
)
def test_never_above_the_limit(name, latent, steps, images, gap, loads_model, crashes, limit):
    asked = report.JOBS[name][0]
    last = None if gap is None else NOW - gap
    history = History(report.B70.driver, (), tuple(crashes), last, True)
    how = JudgeSettings(loads_model=loads_model)
    waits = needed_waits(report.PROFILE, history, NOW, how)
    request = AutoRequest(asked, TILES, POLICIES, VAE, full_waits=waits)
    judge = make_judge(report.B70, report.PROFILE, history, NOW, how)

    def planner(wanted):
        return report.make_plan(wanted, latent, images=images, steps=steps)

    def run():
        try:
            return find_safe_plan(request, planner, judge, limit=limit)
        except NoSafePlanError as e:
            closest = e.closest.verdict
            assert closest.score >= limit or closest.severity == "block"
            assert_nothing_below(request, planner, judge, limit)
            return None

    found = run()
    if found is not None:
        assert found.verdict.score < limit
        assert found.verdict.severity != "block"
        assert found.verdict == judge(found.plan, found.waits)
        assert found.plan == planner(found.settings)
        assert found == run()  # deterministic


def assert_nothing_below(request, planner, judge, limit):
    """Go through every allowed combination again."""
    for tile, policy, vae in itertools.product(TILES, POLICIES, VAE):
        verdict = judge(planner(Settings(tile, policy, *vae)), request.full_waits)
        assert verdict.score >= limit or verdict.severity == "block"
