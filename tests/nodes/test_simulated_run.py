"""Real node runs of the tiny model on a simulated Intel GPU, with nothing going wrong.

Everything here is simulated over CPU tensors or counted; no figure is one of a real GPU.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytestmark = pytest.mark.host

ATTENTIONS_PER_CALL = 34
"""Of the tiny model: UNet 22, control network 10, adapters 2."""

TOLERANCE = 5e-4
"""Of latents up to about 140; measured up to 3.1e-4 (math, whole: 0)."""

TILED = {"tile_px": 48, "tile_overlap_px": 16}
KINDS = {
    "fused": {},
    "unknown": {"sdpa": "unknown"},
    "math": {"sdpa": "math"},
    "bounded": {"family": "battlemage", "os": "Windows", "driver": "32.0.101.8629"},
}


@pytest.fixture(scope="module")
def case():
    from supir_xpu.tests.nodes import device_case

    return device_case


@pytest.fixture(scope="module")
def plain(demo):
    """Plain CPU results, each made once."""
    made = {}

    def get(**changes):
        key = tuple(sorted(changes.items()))
        if key not in made:
            made[key] = demo.run_latent(risk="off", steps=1, **changes)
        return made[key]

    return get


def watch_gaps(monkeypatch, launches):
    """Note (launches since the tick before, launches the tick reports) of every tick."""
    from supir_xpu.xpu.governor import Governor

    gaps, real, last = [], Governor.tick, [launches()]

    def tick(self, reported):
        gaps.append((launches() - last[0], reported))
        last[0] = launches()
        real(self, reported)

    monkeypatch.setattr(Governor, "tick", tick)
    return gaps


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("sampler", "tiles"),
    [(name, tiles) for name in ("restore_edm", "restore_dpmpp_2m") for tiles in ({}, TILED)],
)
def test_same_latent_all_attention_planned_queue_bounded(
    demo, case, plain, monkeypatch, kind, sampler, tiles
):
    want = plain(sampler=sampler, **tiles)
    spec = replace(case.GOOD, **KINDS[kind])
    with case.simulated(monkeypatch, spec) as run:
        gaps = watch_gaps(monkeypatch, lambda: run.dev.launches)
        report = demo.run(risk="off", steps=1, sampler=sampler, **tiles)
    error = (report.result[0]["samples"] - want).abs().max().item()
    assert error <= TOLERANCE, error
    (execution,) = run.executions
    calls = ATTENTIONS_PER_CALL * (4 if tiles else 1)
    assert execution.attention_report.calls == calls
    assert f"attention: {calls} calls" in case.flat(report)
    assert torch.float64 not in run.dev.dtypes
    governor = execution.governor
    assert governor.enabled == (kind == "bounded")
    if not governor.enabled:
        assert governor.report.events == governor.report.launches == 0
        return
    wrong = [(actual, said) for actual, said in gaps if actual > said]
    assert not wrong, wrong
    assert 0 < governor.report.largest_tick <= governor.window_launches
    assert run.dev.max_depth <= governor.limit
    assert governor.report.waits > 0


def test_vae_same_picture_planned_bounded_and_exact_launches(demo, case, monkeypatch):
    want = demo.decode(demo.vae, demo.control, risk="off").result[0]
    latent = demo.encode(demo.vae, demo.image, risk="off").result[0]["samples"]
    for kind in KINDS:
        with case.simulated(monkeypatch, replace(case.GOOD, **KINDS[kind])) as run:
            gaps = watch_gaps(monkeypatch, lambda run=run: run.dev.launches)
            decoded = demo.decode(demo.vae, demo.control, risk="off")
            encoded = demo.encode(demo.vae, demo.image, risk="off")
        monkeypatch.undo()
        assert (decoded.result[0] - want).abs().max() <= 1e-5
        assert (encoded.result[0]["samples"] - latent).abs().max() <= 1e-4
        planned = [case.numbers(r)["plan"]["launches_total"] for r in (decoded, encoded)]
        assert run.codings == planned
        assert [e.attention_report.calls for e in run.executions] == [1, 1]
        governor = run.executions[0].governor
        if governor.enabled:
            assert not [gap for gap in gaps if gap[0] > gap[1]]
            assert run.dev.max_depth <= governor.limit


@pytest.mark.parametrize("kind", ["fused", "math"])
@pytest.mark.parametrize("sampler", ["restore_edm", "restore_dpmpp_2m"])
def test_launches_of_the_run_equal_the_plan(demo, case, monkeypatch, kind, sampler):
    """On the CPU every operator of the loop counts, so the host's part is added to the plan."""
    import comfy.k_diffusion.sampling as k_sampling
    from supir_xpu.nodes import judging
    from supir_xpu.tests.supir.test_plan_sampling import HostTree

    plans, plan_numbers = [], judging.plan_numbers
    tree = k_sampling.torchsde.BrownianTree

    def noted(plan, *args):
        plans.append(plan)
        return plan_numbers(plan, *args)

    class Quiet:
        @staticmethod
        def BrownianTree(*args, **kwargs):  # noqa: N802
            return HostTree(tree, *args, **kwargs)

    monkeypatch.setattr(judging, "plan_numbers", noted)
    monkeypatch.setattr(k_sampling, "torchsde", Quiet)
    spec = replace(case.GOOD, allows_random=True, has_fp64=True, **KINDS[kind])
    with case.simulated(monkeypatch, spec, everything=True) as run:
        report = demo.run(risk="off", steps=2, sampler=sampler)
    sampling = plans[-1].sampling
    total = case.numbers(report)["plan"]["launches_total"]
    assert total == sampling.launches
    assert run.loops == [total + sampling.host_launches]


def test_nothing_is_added_where_nothing_goes_wrong(demo, case, monkeypatch):
    """With and without the execution: the same launches, when the host too attends in one kernel."""
    from comfy.ldm.modules.attention import attention_pytorch

    model = demo.model.clone()
    options = model.model_options["transformer_options"]
    options["optimized_attention_override"] = lambda func, *a, **k: attention_pytorch(*a, **k)
    counts = []
    for on in (False, True):
        with case.simulated(monkeypatch, on=on) as run:
            demo.run(risk="off", steps=1, model=demo.model if on else model)
        assert len(run.executions) == on
        counts += run.loops
        ops = dict(run.dev.ops)
    assert counts[0] == counts[1], ops


def test_off_an_intel_gpu_nothing_is_attached(demo, case, monkeypatch):
    from supir_xpu.nodes.attention import Attention
    from supir_xpu.nodes.execution import Execution

    with case.simulated(monkeypatch, on=False) as run:
        assert Execution.for_run() is None
        assert Attention.execute(demo.model).result[0] is demo.model
        report = demo.run(risk="off", steps=1)
    assert case.numbers(report)["execution"] == []
    assert run.executions == []


@pytest.mark.newest
def test_true_size_every_attention_call_is_planned_and_every_tick_an_upper_bound(case, monkeypatch):
    """SDXL and SUPIR at their true widths on meta tensors: 210 calls per step."""
    from comfy.patcher_extension import WrappersMP
    from supir_xpu.nodes import execution as module
    from supir_xpu.supir.constants import WORK_KEY
    from supir_xpu.supir.injection import InjectedState, make_wrapper
    from supir_xpu.tests.supir.plan_case import make_nets
    from supir_xpu.xpu.counting import CountOps

    def meta(*shape, dtype=torch.bfloat16):
        return torch.empty(*shape, dtype=dtype, device="meta")

    for weights, cast in ((torch.bfloat16, False), (torch.float16, True)):
        nets = make_nets({}, weights, cast=cast)
        mode = CountOps(track_live=False)
        execution = module.Execution.for_run(case.place(case.BAD))
        execution.governor.event_factory = _Event
        wrapper = make_wrapper(nets.supir, execution.run_layer)
        options = {
            "optimized_attention_override": execution.override(),
            WORK_KEY: {"state": InjectedState(meta(1, 4, 16, 16), 0.9)},
            "wrappers": {WrappersMP.DIFFUSION_MODEL: {WORK_KEY: [wrapper]}},
        }
        inputs = meta(2, 4, 16, 16), meta(2, dtype=torch.float32), meta(2, 77, 2048), meta(2, 2816)
        with monkeypatch.context() as patch:
            gaps = watch_gaps(patch, lambda mode=mode: mode.count.launches)
            with mode:
                nets.unet(*inputs, transformer_options=options)
        assert execution.attention_report.calls == 210
        assert not [gap for gap in gaps if gap[0] > gap[1]]
        assert max(said for _, said in gaps) <= execution.governor.window_launches


class _Event:
    def record(self): ...

    def synchronize(self): ...
