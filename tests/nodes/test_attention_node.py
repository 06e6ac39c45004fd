"""The Attention node on a MODEL that has nothing to do with SUPIR, run by the host's own sampler."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.host

TOLERANCE = 2e-3
"""Of latents up to about 275; measured up to 7e-4."""


@pytest.fixture(scope="module")
def case():
    from supir_xpu.tests.nodes import device_case

    return device_case


def host_run(demo, model):
    """What a KSampler does: no SUPIR anywhere."""
    import comfy.samplers

    guider = comfy.samplers.CFGGuider(model)
    guider.set_conds(demo.positive, demo.negative)
    guider.set_cfg(3.0)
    noise = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(5))
    return guider.sample(
        noise, torch.zeros_like(noise), comfy.samplers.ksampler("euler"),
        torch.tensor([14.6, 0.0]), disable_pbar=True, seed=5,
    )  # fmt: skip


def attach(model):
    from supir_xpu.nodes.attention import Attention

    return Attention.execute(model)


@pytest.mark.parametrize("kind", ["fused", "math", "bounded"])
def test_equal_picture_every_call_planned(demo, case, monkeypatch, kind):
    from dataclasses import replace

    want = host_run(demo, demo.model)
    spec = case.BAD if kind == "bounded" else replace(case.GOOD, sdpa=kind)
    with case.simulated(monkeypatch, spec) as run:
        node = attach(demo.model)
        got = host_run(demo, node.result[0])
    assert node.result[0] is not demo.model
    assert (got - want).abs().max() <= TOLERANCE
    (execution,) = run.executions
    assert execution.attention_report.calls == 22
    assert run.dev.max_depth <= execution.governor.limit or not execution.governor.enabled
    assert "Planned attention for Simulated" in str(node.ui.as_dict()["text"])


def test_chained_to_an_override_that_is_there(demo, case, monkeypatch):
    calls = []

    def other(func, *args, **kwargs):
        calls.append(1)
        return 2.0 * func(*args, **kwargs)

    model = demo.model.clone()
    model.model_options["transformer_options"]["optimized_attention_override"] = other
    want = host_run(demo, model)
    assert (want - host_run(demo, demo.model)).abs().max() > 1.0
    calls.clear()
    with case.simulated(monkeypatch) as run:
        got = host_run(demo, attach(model).result[0])
    assert len(calls) == run.executions[0].attention_report.chained == 22
    assert (got - want).abs().max() <= TOLERANCE


def test_before_a_supir_node_no_call_is_planned_twice(demo, case, monkeypatch):
    want = demo.run_latent(risk="off", steps=1)
    with case.simulated(monkeypatch) as run:
        model = attach(attach(demo.model).result[0]).result[0]
        got = demo.run_latent(risk="off", steps=1, model=model)
    counts = [e.attention_report.calls for e in run.executions]
    assert counts == [0, 0, 34]
    assert (got - want).abs().max() <= TOLERANCE


def test_every_sampling_has_its_own_fault_budget(demo, case, monkeypatch):
    with case.simulated(monkeypatch) as run:
        model = attach(demo.model).result[0]
        run.dev.inject("could not create a primitive", op="^scaled_dot", times=3)
        first = host_run(demo, model)
        (execution,) = run.executions
        assert execution.budget.counts["NO_PRIMITIVE"] == 3
        second = host_run(demo, model)
        assert execution.budget.counts.total() == 0
    assert (first - second).abs().max() <= TOLERANCE


def test_passed_through_off_an_intel_gpu(demo, case, monkeypatch):
    with case.simulated(monkeypatch, on=False) as run:
        node = attach(demo.model)
        assert node.result[0] is demo.model
        assert "passed through unchanged" in str(node.ui.as_dict()["text"])
    assert run.executions == []
