"""The Guider node with every host sampler and schedule, and against the Sample and Upscale nodes."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.host

OFF = {"control_start": 0.0, "control_end": 0.0, "restore_cfg": 0.0, "cfg_start": 3.0}
DEFAULTS = {
    "cfg_start": 2.0,
    "cfg_end": 3.0,
    "control_start": 1.0,
    "control_end": 0.9,
    "restore_cfg": 4.0,
    "tile_px": -1,
    "tile_overlap_px": 64,
}
TILES = {"tile_px": 64, "tile_overlap_px": 16}
SEED = 2**64 - 3


def latent(height=8, width=8, batch=1, seed=1):
    g = torch.Generator().manual_seed(seed)
    return {"samples": torch.randn(batch, 4, height, width, generator=g)}


def make(demo, control, **changes):
    """The Guider node's output; control of random content, 8 px per cell."""
    from supir_xpu.nodes.custom import Guider

    args = {"model": demo.model, "supir": demo.supir, **DEFAULTS, **changes}
    prompts = {"positive": demo.positive, "negative": demo.negative}
    return Guider.execute(**{**prompts, "control": control, "center": control, **args}).result[0]


def plain(demo, cfg):
    import comfy.samplers

    guider = comfy.samplers.CFGGuider(demo.model)
    guider.set_conds(demo.positive, demo.negative)
    guider.set_cfg(cfg)
    return guider


def sample(guider, samples, sigmas, sampler="euler", seed=SEED, noise=None, **more):
    import comfy.samplers
    from supir_xpu.nodes.sampler import start_noise

    if sampler == "dpm_adaptive":  # at its default tolerance it takes over a hundred steps
        sampler = comfy.samplers.ksampler(sampler, {"rtol": 0.5, "atol": 0.5})
    elif isinstance(sampler, str):
        sampler = comfy.samplers.sampler_object(sampler)
    noise = start_noise(tuple(samples.shape), seed) if noise is None else noise
    start = torch.zeros_like(samples)
    return guider.sample(noise, start, sampler, sigmas, disable_pbar=True, seed=seed, **more)


def sigmas_of(demo, scheduler="simple", steps=2):
    import comfy.samplers

    return comfy.samplers.calculate_sigmas(
        demo.model.get_model_object("model_sampling"), scheduler, steps
    )


def sampler_names():
    import comfy.samplers

    names = comfy.samplers.SAMPLER_NAMES
    assert len(names) > 30
    assert {"euler", "dpmpp_2m", "euler_cfg_pp", "uni_pc", "ddim", "dpm_adaptive"} <= set(names)
    return names


def test_every_host_sampler_is_finite_repeatable_steered_and_alone_with_supir_off(demo):
    control, levels = latent(), sigmas_of(demo)
    guider, off = make(demo, control), make(demo, control, **OFF)
    for name in sampler_names():
        first = sample(guider, control["samples"], levels, name)
        assert torch.isfinite(first).all(), name
        assert torch.equal(first, sample(guider, control["samples"], levels, name)), name
        alone = sample(plain(demo, 3.0), control["samples"], levels, name)
        assert not torch.allclose(first, alone, atol=1e-3), name
        assert torch.equal(sample(off, control["samples"], levels, name), alone), name


def test_host_samplers_run_on_tiles(demo):
    control, levels = latent(8, 12), sigmas_of(demo)
    tiled = make(demo, control, **TILES)
    assert len(tiled.inputs.tiles()) == 2
    guided = [name for name in sampler_names() if name.endswith("cfg_pp")]
    assert len(guided) >= 5
    for name in (*guided, "heun", "dpmpp_sde", "uni_pc", "lcm"):
        got = sample(tiled, control["samples"], levels, name)
        assert got.shape == control["samples"].shape, name
        assert torch.isfinite(got).all(), name


def test_a_sampler_that_asks_for_the_uncond_gets_the_blended_whole(demo):
    """What the cfg_pp samplers do: they read both estimates from a post-cfg function of their own."""
    import comfy.samplers
    from comfy.model_patcher import set_model_options_post_cfg_function

    control, seen, on_tiles = latent(8, 12), [], []

    def ask(model, x, sigmas, extra_args, callback, disable):
        def note(args):
            seen.append(args)
            return args["denoised"] + 1.0

        options = extra_args["model_options"].copy()
        options = set_model_options_post_cfg_function(options, note, disable_cfg1_optimization=True)
        return model(x, sigmas[:1], **{**extra_args, "model_options": options})

    def on_model(args):
        on_tiles.append(args["input"].shape)
        return args["denoised"]

    model = demo.model.clone()
    model.set_model_sampler_post_cfg_function(on_model)
    sampler, levels = comfy.samplers.KSAMPLER(ask), sigmas_of(demo)
    guider = make(demo, control, model=model, **TILES)
    got = sample(guider, control["samples"], levels, sampler)
    assert on_tiles == [(1, 4, 8, 8)] * 2, "post-cfg functions of the MODEL run on every tile"
    (args,) = seen
    cond, uncond = args["cond_denoised"], args["uncond_denoised"]
    assert cond.shape == uncond.shape == args["input"].shape == (1, 4, 8, 12)
    scale = args["cond_scale"]
    assert scale == pytest.approx(2.0, abs=1e-4)
    assert (args["denoised"] - (uncond + scale * (cond - uncond))).abs().max() < 1e-4
    assert not torch.allclose(cond, uncond, atol=1e-3)
    without = sample(guider, control["samples"], levels, "euler")
    assert without.shape == got.shape


def test_every_host_schedule(demo):
    import comfy.samplers

    control = latent()
    names = comfy.samplers.SCHEDULER_NAMES
    assert len(names) > 5
    guider, off = make(demo, control), make(demo, control, **OFF)
    for name in names:
        levels = sigmas_of(demo, name)
        first = sample(guider, control["samples"], levels)
        assert torch.isfinite(first).all(), name
        assert torch.equal(first, sample(guider, control["samples"], levels)), name
        alone = sample(plain(demo, 3.0), control["samples"], levels)
        assert torch.equal(sample(off, control["samples"], levels), alone), name
        assert not torch.allclose(first, alone, atol=1e-3), name


@pytest.mark.parametrize(
    ("sampler", "kind"), [("restore_edm", "ddpm"), ("restore_dpmpp_2m", "karras")]
)
@pytest.mark.parametrize("tiles", [{"tile_px": -1}, {"tile_px": 64, "tile_overlap_px": 32}])
def test_single_nodes_with_random_noise_are_the_sample_node_bit_for_bit(demo, sampler, kind, tiles):
    from comfy_extras.nodes_custom_sampler import Noise_RandomNoise
    from supir_xpu.nodes.custom import Sampler, Sigmas

    control, center = latent(12, 10), latent(12, 10, seed=2)
    settings = {**DEFAULTS, **tiles}
    if sampler == "restore_dpmpp_2m":  # the Sample node ignores these with it
        settings |= {"control_start": 0.9, "restore_cfg": 0.0}
    guider = make(demo, control, center=center, **settings)
    levels = Sigmas.execute(demo.model, 3, kind).result[0]
    chosen = Sampler.execute(sampler, 5.0, 1.003, 1.0).result[0]
    zero = {"samples": torch.zeros_like(control["samples"])}
    noise = Noise_RandomNoise(SEED).generate_noise(zero)
    got = sample(guider, zero["samples"], levels, chosen, noise=noise)
    want = demo.run_latent(
        control=control, center=center, seed=SEED, steps=3, sampler=sampler, **settings
    )
    assert torch.equal(got, want)


def test_whole_batch_through_the_guider_equals_its_pictures(demo):
    control = latent(batch=2)
    levels = sigmas_of(demo)
    noise = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(4))
    both = sample(make(demo, control), control["samples"], levels, noise=noise)
    for k in range(2):
        one = {"samples": control["samples"][k : k + 1]}
        got = sample(make(demo, one), one["samples"], levels, noise=noise[k : k + 1])
        assert (got - both[k : k + 1]).abs().max() < 1e-4
    other = sample(make(demo, latent(batch=2, seed=9)), control["samples"], levels, noise=noise)
    assert (other - both).abs().max() > 1e-2


def test_cond_and_uncond_one_by_one_equal_the_shared_batch(demo):
    from dataclasses import replace

    from supir_xpu.nodes.guider import SupirGuider

    control, levels = latent(), sigmas_of(demo)
    rows = []

    def count(executor, x, *args, **kwargs):
        rows.append(x.shape[0])
        return executor(x, *args, **kwargs)

    model = demo.model.clone()
    model.add_wrapper_with_key("diffusion_model", "count", count)
    shared = make(demo, control, model=model)
    want = sample(shared, control["samples"], levels)
    assert rows == [2, 2]
    rows.clear()
    apart = SupirGuider(model, demo.supir, replace(shared.inputs, share_batch=False))
    apart.set_conds(demo.positive, demo.negative)
    got = sample(apart, control["samples"], levels)
    assert rows == [1, 1, 1, 1]
    assert (got - want).abs().max() < 1e-4


def test_uncond_is_skipped_at_scale_one_unless_a_patch_asks_for_it(demo):
    control, rows = latent(), []

    def count(executor, x, *args, **kwargs):
        rows.append(x.shape[0])
        return executor(x, *args, **kwargs)

    model = demo.model.clone()
    model.add_wrapper_with_key("diffusion_model", "count", count)
    one = {"cfg_start": 1.0, "cfg_end": 1.0}
    sample(make(demo, control, model=model, **one), control["samples"], sigmas_of(demo))
    assert rows == [1, 1]
    rows.clear()
    model.disable_model_cfg1_optimization()
    sample(make(demo, control, model=model, **one), control["samples"], sigmas_of(demo))
    assert rows == [2, 2]


def test_foreign_samplers_are_placed_on_the_schedule_by_their_level(demo):
    """A two-stage sampler asks between the levels; the nearest entry tells where it stands."""
    from supir_xpu.nodes.guider import step_call

    levels = torch.tensor([14.0, 7.0, 1.0, 0.04, 0.0])
    options = {"transformer_options": {"sample_sigmas": levels}}
    for asked, step in ((14.0, 0), (13.0, 0), (10.6, 0), (10.4, 1), (3.9, 2), (0.3, 3), (0.01, 3)):
        call = step_call(asked, options)
        want = (step, float(levels[step]), asked, float(levels[step + 1]))
        assert (call.step, call.sigma, call.sigma_hat, call.sigma_next) == want
    told = {"step": 9, "sigma": 5.0, "sigma_next": 4.0}
    call = step_call(5.5, {"transformer_options": {"supir_xpu": told, "sample_sigmas": levels}})
    assert (call.step, call.sigma, call.sigma_hat, call.sigma_next) == (9, 5.0, 5.5, 4.0)


def test_churn_noise_goes_on_where_the_starting_noise_ended():
    from supir_xpu.nodes.sampler import sample_edm

    x, sigma, sigma_next, s_noise = latent()["samples"], 2.0, 1.0, 1.1
    sigma_hat = sigma * 2.0**0.5  # the most churn there is
    out = sample_edm(
        lambda x, sigma, **kwargs: torch.zeros_like(x),
        x,
        torch.tensor([sigma, sigma_next]),
        {"seed": SEED},
        s_churn=100.0,
        s_noise=s_noise,
    )
    noisy = out * sigma_hat / sigma_next  # towards 0 the step only scales
    noise = (noisy - x) / (s_noise * (sigma_hat**2 - sigma**2) ** 0.5)
    generator = torch.Generator("cpu").manual_seed(SEED)
    start, churn = (torch.randn(x.shape, generator=generator) for _ in range(2))
    assert (noise - churn).abs().max() < 1e-5
    assert (noise - start).abs().max() > 1.0


@pytest.mark.parametrize("sampler", ["restore_edm", "restore_dpmpp_2m"])
def test_upscale_is_the_chain_of_single_nodes_bit_for_bit(demo, sampler):
    from supir_xpu.nodes.upscale import Upscale

    image = torch.rand(1, 30, 45, 3, generator=torch.Generator().manual_seed(5))
    settings = {
        **DEFAULTS,
        "seed": SEED,
        "steps": 2,
        "sampler": sampler,
        "s_churn": 5.0,
        "s_noise": 1.003,
        "eta": 1.0,
        "tile_px": 64,
        "tile_overlap_px": 32,
        "risk": "auto",
    }
    prompts = {"positive": "sharp", "negative": "blurry"}
    models = {"model": demo.model, "clip": demo.clip, "vae": demo.vae, "supir": demo.supir}
    got = Upscale.execute(
        **models, image=image, upscale_by=1.5, **prompts, **settings, color_fix="wavelet"
    ).result[0]
    stage1, control, center = demo.first_stage(demo.vae, demo.supir, image, 1.5).result
    out = demo.run(control=control, center=center, **settings).result[0]
    want = demo.color_fix(demo.decode(demo.vae, out).result[0], stage1, "wavelet").result[0]
    assert got.shape == (1, 45, 68, 3)
    assert torch.equal(got, want)
