"""The walk over the host's UNet: equal to the host's own forward, and inside its wrapper chain."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.host


def network_inputs(height, width, batch=2, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randn(batch, 4, height, width, generator=g),
        torch.tensor([500.0] * batch),
        torch.randn(batch, 7, 64, generator=g),
        torch.randn(batch, 1600, generator=g),
    )


@pytest.mark.parametrize("size", [(16, 16), (13, 27), (8, 30), (9, 9)])
def test_plain_walk_equals_the_host_forward_bit_for_bit(demo, size):
    from supir_xpu.supir.unet_walk import PlainHooks, walk_unet

    unet = demo.model.model.diffusion_model
    x, t, context, y = network_inputs(*size)
    want = unet(x, t, context, y, transformer_options={})
    got = walk_unet(unet, PlainHooks(), x, t, context, y, None, {})
    assert torch.equal(got, want)


def test_plain_walk_honours_every_patch_and_controlnet_like_the_host(demo):
    from supir_xpu.supir.unet_walk import PlainHooks, walk_unet

    unet = demo.model.model.diffusion_model
    x, t, context, y = network_inputs(12, 20)
    seen = []

    def note(name, value):
        def patch(*args):
            options = args[-1]
            seen.append((name, options.get("block"), options.get("transformer_index")))
            return value(*args)

        return patch

    def options():
        return {
            "patches": {
                "emb_patch": [note("emb", lambda e, c, o: e * 1.1)],
                "input_block_patch": [note("in", lambda h, o: h * 1.01)],
                "input_block_patch_after_skip": [note("after", lambda h, o: h * 0.99)],
                "output_block_patch": [note("out", lambda h, s, o: (h * 1.02, s * 0.9))],
                "middle_patch": [lambda n, o: n * 1.03],
            }
        }

    def control():
        g = torch.Generator().manual_seed(5)
        widths = [(12, 20)] * 3 + [(6, 10)] * 3 + [(3, 5)] * 3
        make = [0.1 * torch.randn(2, 64, *hw, generator=g) for hw in widths]
        return {"output": make, "middle": [0.1 * torch.randn(2, 64, 3, 5, generator=g)]}

    want = unet(x, t, context, y, control=control(), transformer_options=options())
    host_seen, seen = list(seen), []
    seen_before = len(host_seen)
    assert seen_before > 20

    def run():
        return walk_unet(unet, PlainHooks(), x, t, context, y, control(), options())

    seen.clear()
    got = run()
    assert torch.equal(got, want)
    plain = unet(x, t, context, y, transformer_options={})
    assert not torch.equal(want, plain)


def test_wrapper_keeps_the_chain_in_both_orders(demo):
    from comfy.patcher_extension import WrappersMP
    from supir_xpu.supir.constants import WORK_KEY
    from supir_xpu.supir.injection import InjectedState, make_wrapper

    unet = demo.model.model.diffusion_model
    x, t, context, y = network_inputs(16, 16)
    hint = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(9))
    calls = []

    def other(executor, *args, **kwargs):
        calls.append("other")
        return executor(*args, **kwargs) * 2.0

    def run(order):
        wrappers = {"other": [other], WORK_KEY: [make_wrapper(demo.supir.patcher.model)]}
        options = {
            "wrappers": {WrappersMP.DIFFUSION_MODEL: {k: wrappers[k] for k in order}},
            WORK_KEY: {"state": InjectedState(hint, 1.0)},
        }
        return unet(x, t, context, y, transformer_options=options)

    alone = run([WORK_KEY])
    assert calls == []
    first, second = run([WORK_KEY, "other"]), run(["other", WORK_KEY])
    assert calls == ["other", "other"]
    assert torch.equal(first, alone * 2.0)
    assert torch.equal(second, alone * 2.0)
    plain = unet(x, t, context, y, transformer_options={})
    assert not torch.allclose(alone, plain, atol=1e-3)


def test_walk_without_state_or_at_scale_zero_is_the_host_forward(demo):
    from comfy.patcher_extension import WrappersMP
    from supir_xpu.supir.constants import WORK_KEY
    from supir_xpu.supir.injection import InjectedState, make_wrapper

    unet = demo.model.model.diffusion_model
    x, t, context, y = network_inputs(16, 16)
    want = unet(x, t, context, y, transformer_options={})
    wrappers = {WrappersMP.DIFFUSION_MODEL: {WORK_KEY: [make_wrapper(demo.supir.patcher.model)]}}
    assert torch.equal(unet(x, t, context, y, transformer_options={"wrappers": wrappers}), want)
    state = {"state": InjectedState(torch.zeros(1, 4, 16, 16), 0.0)}
    options = {"wrappers": wrappers, WORK_KEY: state}
    assert torch.equal(unet(x, t, context, y, transformer_options=options), want)


def test_control_net_sees_only_the_attention_callable(demo):
    from comfy.patcher_extension import WrappersMP
    from supir_xpu.supir.constants import WORK_KEY
    from supir_xpu.supir.injection import InjectedState, make_wrapper

    unet = demo.model.model.diffusion_model
    x, t, context, y = network_inputs(16, 16)
    calls = {"override": 0, "patch": 0, "replace": 0}

    def override(func, *args, **kwargs):
        calls["override"] += 1
        return func(*args, **kwargs)

    def attn1_patch(n, ctx, value, extra):
        calls["patch"] += 1
        return n, ctx, value

    def options(**extra):
        wrapper = make_wrapper(demo.supir.patcher.model)
        return {
            "wrappers": {WrappersMP.DIFFUSION_MODEL: {WORK_KEY: [wrapper]}},
            WORK_KEY: {"state": InjectedState(torch.zeros(1, 4, 16, 16), 1.0)},
            "optimized_attention_override": override,
            **extra,
        }

    unet(x, t, context, y, transformer_options=options())
    transformers = {"unet": 11, "control": 5}  # blocks of one self- and one cross-attention each
    cross_adapters = 2
    assert calls["override"] == 2 * sum(transformers.values()) + cross_adapters
    unet(x, t, context, y, transformer_options=options(patches={"attn1_patch": [attn1_patch]}))
    assert calls["patch"] == transformers["unet"], (
        "the control net must not see the model's patches"
    )
