"""SUPIR beside what other packs put on a MODEL: weights, cfg functions, wrappers, attention."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.host

CALLS = 2  # network calls of a two-step run whose cond and uncond share a batch
TILES = {"tile_px": 64, "tile_overlap_px": 16}
TRANSFORMERS = 11  # in the demo UNet, each with one self- and one cross-attention


def latent(height=8, width=8, seed=1):
    g = torch.Generator().manual_seed(seed)
    return {"samples": torch.randn(1, 4, height, width, generator=g)}


def run(demo, model=None, size=(8, 8), **changes):
    control = latent(*size)
    args = {"steps": 2, "control": control, "center": control, "cfg_start": 2.0, "cfg_end": 3.0}
    args["restore_cfg"] = 0.0  # it would replace the whole first step
    return demo.run_latent(**{**args, "model": model or demo.model, **changes})


def differs(a, b):
    return (a - b).abs().max().item() > 1e-2


@pytest.fixture
def control_calls(demo):
    """Shapes the control network was called with."""
    seen = []
    net = demo.supir.patcher.model.control_model
    handle = net.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape)))
    yield seen
    handle.remove()


def test_lora_reaches_the_unet_and_only_the_unet(demo):
    import comfy.sd

    g = torch.Generator().manual_seed(8)
    keys = ["input_blocks.4.1.transformer_blocks.0.attn1.to_q", "middle_block.1.proj_in"]
    lora, deltas = {}, {}
    for key in keys:
        up, down = torch.randn(64, 4, generator=g), 0.2 * torch.randn(4, 64, generator=g)
        name = "lora_unet_" + key.replace(".", "_")
        lora |= {f"{name}.lora_up.weight": up, f"{name}.lora_down.weight": down}
        deltas[key] = 0.5 * up @ down
    plain = run(demo)
    patched, _ = comfy.sd.load_lora_for_models(demo.model, None, lora, 0.5, 0.0)
    got = run(demo, patched)
    assert differs(got, plain)
    assert torch.equal(run(demo), plain), "the LoRA must be gone with its MODEL"
    unet, saved = demo.model.model.diffusion_model, {}
    try:
        for key, delta in deltas.items():
            weight = unet.get_submodule(key).weight
            saved[key] = weight.clone()
            weight.data += delta
        want = run(demo)
    finally:
        for key, value in saved.items():
            unet.get_submodule(key).weight.data.copy_(value)
    assert (got - want).abs().max() < 1e-3
    assert torch.equal(run(demo), plain)


def test_rescaling_cfg_function_gets_the_ramped_scale(demo):
    scales = []

    def rescale(factor):
        def cfg(args):
            scales.append(args["cond_scale"])
            cond, uncond = args["cond"], args["uncond"]
            out = uncond + args["cond_scale"] * (cond - uncond)
            return out * (1 - factor + factor * cond.std() / out.std())

        model = demo.model.clone()
        model.set_model_sampler_cfg_function(cfg)
        return model

    plain = run(demo, s_churn=0.0)
    neutral = run(demo, rescale(0.0), s_churn=0.0)
    assert (neutral - plain).abs().max() < 1e-4
    first, second = scales
    assert first == pytest.approx(2.0, abs=1e-4)
    assert second == pytest.approx(3.0 - 1.0 * float(demo_levels(2)[1]) / 14.6146, abs=1e-6)
    assert differs(run(demo, rescale(0.7), s_churn=0.0), plain)


def demo_levels(steps):
    from supir_xpu.supir.sigmas import ddpm_sigmas

    return ddpm_sigmas(steps)


@pytest.mark.parametrize("size", [(8, 8), (8, 12)])
def test_perturbed_attention_runs_the_network_with_control_on_the_same_tile(
    demo, control_calls, size
):
    """As PAG: a post-cfg function that asks the network once more, self-attention switched off."""
    import comfy.samplers
    from comfy.model_patcher import set_model_options_patch_replace

    def perturbed(scale):
        def post_cfg(args):
            options = set_model_options_patch_replace(
                args["model_options"].copy(), lambda q, k, v, extra: v, "attn1", "middle", 0
            )
            (weak,) = comfy.samplers.calc_cond_batch(
                args["model"], [args["cond"]], args["input"], args["sigma"], options
            )
            return args["denoised"] + scale * (args["cond_denoised"] - weak)

        model = demo.model.clone()
        model.set_model_sampler_post_cfg_function(post_cfg)
        return model

    tiles = 1 if size == (8, 8) else 2
    plain = run(demo, size=size, **TILES)
    assert control_calls == [(2, 4, 8, 8)] * CALLS * tiles
    control_calls.clear()
    neutral = run(demo, perturbed(0.0), size=size, **TILES)
    assert control_calls == [(2, 4, 8, 8), (1, 4, 8, 8)] * CALLS * tiles
    assert torch.equal(neutral, plain)
    assert differs(run(demo, perturbed(3.0), size=size, **TILES), plain)


def test_pre_cfg_function(demo):
    def with_factor(factor):
        def pre_cfg(args):
            cond, uncond = args["conds_out"]
            assert cond.shape == args["input"].shape
            return [cond, uncond + factor * (cond - uncond)]

        model = demo.model.clone()
        model.set_model_sampler_pre_cfg_function(pre_cfg)
        return model

    plain = run(demo)
    assert (run(demo, with_factor(0.0)) - plain).abs().max() < 1e-6
    alone = run(demo, cfg_start=1.0, cfg_end=1.0)  # uncond = cond leaves cond alone
    assert (run(demo, with_factor(1.0)) - alone).abs().max() < 1e-3
    assert differs(alone, plain)


def test_model_function_wrapper(demo, control_calls):
    def with_factor(factor):
        def wrapper(apply_model, args):
            return factor * apply_model(args["input"], args["timestep"], **args["c"])

        model = demo.model.clone()
        model.set_model_unet_function_wrapper(wrapper)
        return model

    plain = run(demo)
    assert torch.equal(run(demo, with_factor(1.0)), plain)
    assert len(control_calls) == 2 * CALLS
    assert differs(run(demo, with_factor(0.9)), plain)


@pytest.mark.parametrize("order", ["before", "after"])
def test_second_diffusion_model_wrapper_on_either_side(demo, control_calls, order):
    calls = []

    def other(executor, x, *args, **kwargs):
        calls.append(x.shape)
        return 0.9 * executor(x, *args, **kwargs)

    model = demo.model.clone()
    if order == "before":
        model.add_wrapper_with_key("diffusion_model", "other", other)
        got = run(demo, model)
    else:
        from supir_xpu.nodes import custom
        from supir_xpu.nodes.sampler import make_sampler, schedule, start_noise

        control = latent()
        guider = custom.Guider.execute(
            model, demo.supir, demo.positive, demo.negative, control,
            2.0, 3.0, 1.0, 0.9, 0.0, -1, 64, center=control,
        ).result[0]  # fmt: skip
        guider.model_patcher.add_wrapper_with_key("diffusion_model", "other", other)
        sampler = make_sampler("restore_edm", 5.0, 1.003, 1.0)
        zero = torch.zeros(1, 4, 8, 8)
        got = guider.sample(
            start_noise((1, 4, 8, 8), 7), zero, sampler, schedule("restore_edm", 2), seed=7
        )
    assert calls == [(2, 4, 8, 8)] * CALLS
    assert len(control_calls) == CALLS
    assert differs(got, run(demo))
    unwrapped = demo.model.clone()
    unwrapped.add_wrapper_with_key(
        "apply_model", "check", lambda executor, *args, **kwargs: executor(*args, **kwargs)
    )
    assert torch.equal(run(demo, unwrapped), run(demo))


@pytest.mark.parametrize("tiles", [{}, {"tile_px": 64, "tile_overlap_px": 16}])
def test_wrappers_around_every_stage_of_sampling(demo, tiles):
    """Every kind is called as often as the host would call it, and can change the result."""
    count = 1 if not tiles else 2
    size = (8, 8 if not tiles else 12)
    expected = {
        "outer_sample": 1,
        "prepare_sampling": 1,
        "sampler_sample": 1,
        "predict_noise": 2,
        "calc_cond_batch": 2 * count,
        "apply_model": 2 * count,
        "diffusion_model": 2 * count,
    }
    seen = dict.fromkeys(expected, 0)

    def counting(kind):
        def wrapper(executor, *args, **kwargs):
            seen[kind] += 1
            return executor(*args, **kwargs)

        return wrapper

    model = demo.model.clone()
    for kind in expected:
        model.add_wrapper_with_key(kind, "other", counting(kind))
    plain = run(demo, size=size, **tiles)
    assert torch.equal(run(demo, model, size=size, **tiles), plain)
    assert seen == expected
    for kind in ("outer_sample", "sampler_sample", "predict_noise", "apply_model"):
        halved = demo.model.clone()
        halved.add_wrapper_with_key(kind, "other", lambda ex, *a, **k: 0.5 * ex(*a, **k))
        assert differs(run(demo, halved, size=size, **tiles), plain), kind


def attention(q, k, v, extra):
    """What a pack that replaces attention computes: here the same attention."""
    heads = extra["n_heads"]
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))  # BND -> BHNd
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    return out.transpose(1, 2).flatten(2)


def with_replaced(demo, replace, places, kind="attn2"):
    model = demo.model.clone()
    for place in places:
        model.set_model_patch_replace(replace, kind, *place)
    return model


def test_image_prompt_attention_reaches_the_unet_but_not_the_control_net(demo):
    places = [("input", 4), ("input", 5, 0), ("middle", 0), ("output", 3, 0)]
    calls = []

    def image_prompt(weight):
        def replace(q, k, v, extra):
            calls.append((*extra["block"], extra["block_index"]))
            return attention(q, k, v, extra) + weight * q.mean()

        return with_replaced(demo, replace, places)

    plain = run(demo)
    neutral = run(demo, image_prompt(0.0))
    assert sorted(set(calls)) == [
        ("input", 4, 0),
        ("input", 5, 0),
        ("middle", 0, 0),
        ("output", 3, 0),
    ]
    assert len(calls) == 4 * CALLS, "the control net runs the same blocks and must not call this"
    assert (neutral - plain).abs().max() < 1e-3
    assert differs(run(demo, image_prompt(20.0)), plain)


def test_control_net_is_given_nothing_but_the_attention_callable(demo):
    given = []
    net = demo.supir.patcher.model.control_model
    handle = net.register_forward_pre_hook(
        lambda module, args, kwargs: given.extend(
            set(one) for one in (*args, *kwargs.values()) if isinstance(one, dict)
        ),
        with_kwargs=True,
    )
    model = with_replaced(demo, attention, [("input", 4)])
    model.set_model_attn1_patch(lambda n, context, value, extra: (n, context, value))
    model.model_options["transformer_options"]["of_another_pack"] = object()
    try:
        run(demo, model)
    finally:
        handle.remove()
    assert len(given) == CALLS
    for keys in given:
        assert keys <= {"optimized_attention_override"}


def test_replaced_attention_is_counted_and_reported(demo):
    from supir_xpu.supir.injection import replaced_attention

    def count(model):
        options = model.model_options["transformer_options"]
        return replaced_attention(model.model.diffusion_model, options)

    assert count(demo.model) == 0
    assert "replaced by another pack" not in demo.run(steps=1).ui["text"][0]
    model = with_replaced(demo, attention, [("input", 4), ("input", 5, 0), ("input", 4, 0)])
    assert count(model) == 2, "a block named twice is replaced once"
    model.set_model_attn1_replace(attention, "middle", 0)
    model.set_model_attn1_replace(attention, "input", 1)  # a block without attention
    model.set_model_attn1_replace(attention, "output", 3, 1)  # a depth the block does not have
    assert count(model) == 3
    text = demo.run(model=model, steps=1).ui["text"][0]
    assert "3 attention calls per step are replaced by another pack" in text


def test_the_count_is_the_number_of_calls_that_miss_the_attention_callable(demo):
    from supir_xpu.supir.injection import replaced_attention

    calls = []

    def override(func, *args, **kwargs):
        calls.append(None)
        return func(*args, **kwargs)

    def counted(model):
        calls.clear()
        model.model_options["transformer_options"]["optimized_attention_override"] = override
        run(demo, model, steps=1)
        return len(calls)

    every = counted(demo.model.clone())
    assert every > 2 * TRANSFORMERS, "the control net's attention goes through the callable too"
    places = [("output", i) for i in range(9)]
    model = with_replaced(demo, attention, places)
    for place in places[:4]:
        model.set_model_patch_replace(attention, "attn1", *place)
    options = model.model_options["transformer_options"]
    missed = replaced_attention(model.model.diffusion_model, options)
    assert missed == 6 + 4, "six output blocks hold attention; four of them are replaced twice"
    assert every - counted(model) == missed
