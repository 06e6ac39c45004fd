"""Against ComfyUI's own SUPIR parts on the same weights: equal where both compute the same thing.

Where they differ, the test states the original's formula and that ours is that value.
"""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.host, pytest.mark.core_supir]

WIDTH = 64
SIGMA_MAX = 14.6146


def seeded(seed, height=16, width=16):
    return torch.randn(1, 4, height, width, generator=torch.Generator().manual_seed(seed))


HINT, CENTER = seeded(21), seeded(22)


@pytest.fixture(scope="module")
def core(demo):
    """The host's control network and adapters at the demo's width, with the demo's weights."""
    import comfy.model_patcher
    import comfy.ops
    from comfy.ldm.supir.supir_modules import GLVControl, ZeroCrossAttn, ZeroSFT

    options = {"dtype": torch.float32, "device": "cpu", "operations": comfy.ops.manual_cast}

    class Parts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.control_model = GLVControl(
                model_channels=WIDTH,
                channel_mult=(1, 1, 1),
                transformer_depth=(1, 1, 1),
                context_dim=64,
                adm_in_channels=1600,
                **options,
            )
            joins = [ZeroSFT(WIDTH, WIDTH, WIDTH, **options) for _ in range(9)]
            joins.append(ZeroSFT(WIDTH, WIDTH, 0, **options))
            for at in (6, 3):
                joins.insert(at, ZeroCrossAttn(WIDTH, WIDTH, **options))
            self.project_modules = torch.nn.ModuleList(joins)

    with torch.inference_mode():
        parts = Parts()
        weights = demo.supir.patcher.model.state_dict()
        parts.load_state_dict({k: v.float() for k, v in weights.items()}, strict=True)
        parts.requires_grad_(False)
        return comfy.model_patcher.CoreModelPatcher(
            parts, load_device=torch.device("cpu"), offload_device=torch.device("cpu")
        )


class TwoLatents:
    """Stands for the VAE of the host's node: it encodes first the input, then the decoded input."""

    def __init__(self):
        self.latents = [HINT, CENTER]

    def encode(self, image):
        return self.latents.pop(0)

    def decode(self, latent):
        return torch.zeros(1, 128, 128, 3)


def core_guider(demo, core, start=1.0, end=1.0, restore_cfg=0.0, cfg=3.0, model=None):
    """A plain guider over the MODEL of the host's own node."""
    import comfy.samplers
    from comfy_extras.nodes_model_patch import SUPIRApply

    steered = SUPIRApply.execute(
        model=model or demo.model,
        model_patch=core,
        vae=TwoLatents(),
        image=torch.zeros(1, 128, 128, 3),
        strength_start=start,
        strength_end=end,
        restore_cfg=restore_cfg,
        restore_cfg_s_tmin=0.05,
    ).result[0]
    guider = comfy.samplers.CFGGuider(steered)
    guider.set_conds(demo.positive, demo.negative)
    guider.set_cfg(cfg)
    return guider


def our_guider(demo, start=1.0, end=1.0, restore_cfg=0.0, cfg=3.0, model=None):
    from supir_xpu.nodes.custom import Guider

    return Guider.execute(
        model or demo.model, demo.supir, demo.positive, demo.negative, {"samples": HINT},
        cfg, cfg, start, end, restore_cfg, -1, 64, center={"samples": CENTER},
    ).result[0]  # fmt: skip


def sample(guider, sampler, levels):
    import comfy.samplers

    if isinstance(sampler, str):
        sampler = comfy.samplers.sampler_object(sampler)
    zero = torch.zeros_like(HINT)
    return guider.sample(seeded(7), zero, sampler, levels, disable_pbar=True, seed=7)


def ask(guider, sigma_hat, **told):
    """The guider's denoised estimate of one fixed latent at one level, in the model's scale."""
    import comfy.samplers

    def once(model, x, sigmas, extra_args, callback, disable):
        options = extra_args["model_options"]
        inner = options["transformer_options"]
        if told:
            inner = {**inner, "supir_xpu": {"step": 0, **told}}
        args = {**extra_args, "model_options": {**options, "transformer_options": inner}}
        return model(seeded(8) * sigma_hat, torch.tensor([sigma_hat]), **args)

    levels = torch.tensor([sigma_hat, 0.0])
    out = sample(guider, comfy.samplers.KSAMPLER(once), levels)
    return guider.model_patcher.get_model_object("latent_format").process_in(out)


def weight_of(guider, without, sigma_hat, **told):
    """How far an estimate is pulled to CENTER: restored = D - weight * (D - center)."""
    scale = guider.model_patcher.get_model_object("latent_format").process_in
    plain = ask(without, sigma_hat, **told)
    restored = ask(guider, sigma_hat, **told)
    away = plain - scale(CENTER)
    weight = float(((plain - restored) * away).sum() / (away * away).sum())
    assert (plain - weight * away - restored).abs().max() < 1e-4
    return weight


def table_levels(steps):
    """Levels that are entries of the noise table, where quantising changes nothing."""
    from supir_xpu.supir.sigmas import ddpm_sigmas

    return ddpm_sigmas(steps)


@pytest.mark.parametrize("restore_cfg", [0.0, 4.0])
@pytest.mark.parametrize("ends", [(1.0, 1.0), (0.4, 0.9)])
def test_euler_without_churn_agrees_with_the_hosts_supir(demo, core, restore_cfg, ends):
    from supir_xpu.nodes.sampler import make_sampler

    levels = table_levels(4)
    want = sample(core_guider(demo, core, *ends, restore_cfg), "euler", levels)
    ours = our_guider(demo, *ends, restore_cfg)

    def apart(got):
        """Largest difference relative to the largest value."""
        return float((got - want).abs().max() / want.abs().max())

    assert apart(sample(ours, "euler", levels)) < 1e-5
    own_sampler = make_sampler("restore_edm", 0.0, 1.003, 1.0)
    assert apart(sample(ours, own_sampler, levels)) < 1e-5
    off = sample(our_guider(demo, 0.0, 0.0, 0.0), "euler", levels)
    assert apart(off) > 1e-2, "both networks must matter"
    other = sample(our_guider(demo, *ends, 0.0 if restore_cfg else 4.0), "euler", levels)
    assert apart(other) > 1e-2, "restoration must matter"


def test_restoration_follows_the_level_before_churn(demo, core):
    """Original: (sigma_i / 14.6146) ** restore_cfg. The host's node uses the churned level."""
    sigma, sigma_hat = 5.0, 6.0
    told = {"sigma": sigma, "sigma_next": 3.0}
    ours = weight_of(our_guider(demo, restore_cfg=0.5), our_guider(demo), sigma_hat, **told)
    assert ours == pytest.approx((sigma / SIGMA_MAX) ** 0.5, abs=1e-5)
    theirs = weight_of(core_guider(demo, core, restore_cfg=0.5), core_guider(demo, core), sigma_hat)
    assert theirs == pytest.approx((sigma_hat / SIGMA_MAX) ** 0.5, abs=1e-5)


@pytest.mark.parametrize(
    ("sigma", "sigma_next", "ours_restores", "core_restores"),
    [(1.0, 0.04, False, True), (0.5, 0.05, False, True), (1.0, 0.051, True, True),
     (0.04, 0.03, False, False), (1.0, 0.0, False, True)],
)  # fmt: skip
def test_restoration_stops_by_the_next_level(
    demo, core, sigma, sigma_next, ours_restores, core_restores
):
    """Original: only while sigma_{i+1} > 0.05. The host's node compares the level it is at."""
    told = {"sigma": sigma, "sigma_next": sigma_next}
    weight = (sigma / SIGMA_MAX) ** 0.25
    ours = weight_of(our_guider(demo, restore_cfg=0.25), our_guider(demo), sigma, **told)
    assert ours == pytest.approx(weight if ours_restores else 0.0, abs=1e-5)
    theirs = weight_of(core_guider(demo, core, restore_cfg=0.25), core_guider(demo, core), sigma)
    assert theirs == pytest.approx(weight if core_restores else 0.0, abs=1e-5)


def network_call(demo, make, sigma_hat):
    """(input, timestep) of the UNet when a guider is asked at one level."""
    seen = []

    def note(executor, x, timesteps, *args, **kwargs):
        seen.append((x[:1].clone(), float(timesteps[0])))
        return executor(x, timesteps, *args, **kwargs)

    model = demo.model.clone()
    model.add_wrapper_with_key("diffusion_model", "note", note)
    ask(make(model=model), sigma_hat)
    return seen[0]


@pytest.mark.parametrize("sigma", [0.035, 14.59, 20.0])
def test_the_network_is_told_the_nearest_table_entry(demo, core, sigma):
    """Original: idx = argmin |sigma - table|, c_in = 1 / sqrt(table[idx] ** 2 + 1).

    The host scales by the level itself and takes the entry nearest in the logarithm.
    """
    table = demo.model.get_model_object("model_sampling").sigmas.float()
    index = int((table - sigma).abs().argmin())
    log_index = int((table.log() - torch.tensor(sigma).log()).abs().argmin())
    x = seeded(8) * sigma
    got, timestep = network_call(demo, lambda model: our_guider(demo, model=model), sigma)
    assert timestep == index
    level = float(table[index])
    assert abs(level - sigma) > 1e-4
    assert (got - x / (level**2 + 1) ** 0.5).abs().max() < 1e-5
    got, timestep = network_call(demo, lambda model: core_guider(demo, core, model=model), sigma)
    assert timestep == log_index
    assert (got - x / (sigma**2 + 1) ** 0.5).abs().max() < 1e-5
    if sigma == 0.035:
        assert (index, log_index) == (0, 1)


def scales_at(nets, run):
    """Control scales the adapter after the middle block is called with."""
    seen = []

    def note(module, args, kwargs):
        seen.append(kwargs.get("control_scale", args[3] if len(args) > 3 else None))

    handle = nets.project_modules[-1].register_forward_pre_hook(note, with_kwargs=True)
    try:
        run()
    finally:
        handle.remove()
    return seen


def test_the_control_ramp_follows_the_level_before_churn(demo, core):
    """Original: sigma_i / 14.6146 * (start - end) + end. The host's node uses the churned level."""
    told = {"sigma": 5.0, "sigma_next": 3.0}
    ours = our_guider(demo, 1.0, 0.2)
    (got,) = scales_at(demo.supir.patcher.model, lambda: ask(ours, 6.0, **told))
    assert got == pytest.approx(0.2 + 0.8 * 5.0 / SIGMA_MAX, abs=1e-6)
    theirs = core_guider(demo, core, 1.0, 0.2)
    (got,) = scales_at(core.model, lambda: ask(theirs, 6.0))
    assert got == pytest.approx(0.2 + 0.8 * 6.0 / SIGMA_MAX, abs=1e-6)


def test_attention_of_the_hosts_adapters_misses_the_attention_callable(demo, core):
    """Ours goes through it: control network, both cross-attention adapters and the UNet."""
    calls = []

    def override(func, *args, **kwargs):
        calls.append(None)
        return func(*args, **kwargs)

    def counted(make):
        calls.clear()
        model = demo.model.clone()
        model.model_options["transformer_options"]["optimized_attention_override"] = override
        ask(make(model), 3.0)
        return len(calls)

    unet, control, adapters = 2 * 11, 2 * 5, 2
    assert counted(lambda model: our_guider(demo, model=model)) == unet + control + adapters
    assert counted(lambda model: core_guider(demo, core, model=model)) == unet


def test_both_on_one_model_is_refused_in_words(demo, core):
    from supir_xpu.supir.errors import ModelError

    steered = core_guider(demo, core).model_patcher
    with pytest.raises(ModelError, match="Connect the MODEL from before that patch"):
        ask(our_guider(demo, model=steered), 3.0)
