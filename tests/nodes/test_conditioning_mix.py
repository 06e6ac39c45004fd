"""ControlNets, masks, step ranges, long prompts and hooks on the conditioning, whole and in tiles."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.host

TILES = {"tile_px": 64, "tile_overlap_px": 16}
WIDE = (8, 12)
LEFT, RIGHT = slice(0, 8), slice(4, 12)  # columns of the two tiles of a WIDE latent


def latent(height=8, width=8, seed=1):
    g = torch.Generator().manual_seed(seed)
    return {"samples": torch.randn(1, 4, height, width, generator=g)}


def run(demo, size=(8, 8), **changes):
    control = latent(*size)
    args = {"steps": 2, "control": control, "center": control, "cfg_start": 2.0, "cfg_end": 3.0}
    args["restore_cfg"] = 0.0  # it would replace the whole first step
    return demo.run_latent(**{**args, **changes})


def differs(a, b):
    return (a - b).abs().max().item() > 1e-2


def close(a, b):
    return (a - b).abs().max().item() < 1e-3


def prompt(demo, text):
    return demo.condition([demo.clip], [text], [""]).result[0]


def with_extra(conds, **extra):
    return [[cond, {**given, **extra}] for cond, given in conds]


class Hints(torch.nn.Module):
    """A ControlNet in miniature: adds the hint, averaged per cell, to middle block and skips."""

    dtype = torch.float32

    def __init__(self, gain):
        super().__init__()
        self.gain, self.seen = gain, []

    def forward(self, x, hint, timesteps, context, **extra):
        self.seen.append(hint[:1].clone())
        cells = torch.nn.functional.avg_pool2d(hint.mean(1, keepdim=True), 8)
        levels = [self.gain * cells]
        for _ in range(2):
            levels.append(torch.nn.functional.avg_pool2d(levels[-1], 2))
        output = [level.repeat(1, 64, 1, 1) for level in levels for _ in range(3)]
        return {"input": [], "middle": [output[-1].clone()], "output": output}


def control_net(hint, gain=20.0, previous=None, mask=None, **settings):
    import comfy.controlnet

    net = comfy.controlnet.ControlNet(
        Hints(gain), load_device=torch.device("cpu"), concat_mask=mask is not None
    )
    extra = [] if mask is None else [mask]
    net.set_cond_hint(hint, 1.0, settings.get("percent", (0.0, 1.0)), extra_concat=extra)
    return net.set_previous_controlnet(previous)


def controlled(demo, net):
    extra = {"control": net, "control_apply_to_uncond": False}
    return {
        "positive": with_extra(demo.positive, **extra),
        "negative": with_extra(demo.negative, **extra),
    }


def hint_picture(height=64, width=96, seed=30):
    return torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(seed))


def node_guider(demo, control, tiles, **conds):
    from supir_xpu.nodes.custom import Guider

    prompts = {"positive": demo.positive, "negative": demo.negative, **conds}
    return Guider.execute(
        demo.model, demo.supir, prompts["positive"], prompts["negative"], control,
        2.0, 2.0, 1.0, 1.0, 4.0, *tiles, center=control,
    ).result[0]  # fmt: skip


def test_every_tile_sees_its_own_part_of_the_control_latent(demo):
    seen, net = [], demo.supir.patcher.model.control_model
    handle = net.register_forward_pre_hook(lambda module, args: seen.append(args[2][:1].clone()))
    try:
        run(demo, WIDE, **TILES)
    finally:
        handle.remove()
    whole = demo.model.get_model_object("latent_format").process_in(latent(*WIDE)["samples"])
    assert len(seen) == 4
    for got, columns in zip(seen, [LEFT, RIGHT] * 2, strict=True):
        assert torch.equal(got, whole[..., columns])


@pytest.mark.parametrize("tiles", [{}, TILES])
def test_chain_of_controlnets_counts_every_net(demo, tiles):
    size = WIDE if tiles else (8, 8)
    pictures = [hint_picture(64, size[1] * 8, seed) for seed in (30, 31)]

    def chain(*gains):
        net = None
        for picture, gain in zip(pictures, gains, strict=True):
            net = control_net(picture, gain, net)
        return run(demo, size, **tiles, **controlled(demo, net))

    none = run(demo, size, **tiles)
    assert torch.equal(chain(0.0, 0.0), none)
    both, first, second = chain(20.0, 20.0), chain(20.0, 0.0), chain(0.0, 20.0)
    for a, b in ((both, none), (both, first), (both, second), (first, second)):
        assert differs(a, b)
    assert torch.equal(both, chain(20.0, 20.0))


@pytest.mark.parametrize("given", [(64, 96), (50, 90), (128, 192)])
def test_every_tile_sees_its_own_part_of_every_hint(demo, given):
    import comfy.utils

    pictures = [hint_picture(*given, seed=seed) for seed in (30, 31)]
    first = control_net(pictures[0])
    last = control_net(pictures[1], previous=first)
    run(demo, WIDE, **TILES, **controlled(demo, last))
    for net, picture in ((first, pictures[0]), (last, pictures[1])):
        whole = comfy.utils.common_upscale(picture, 96, 64, "nearest-exact", "center")
        want = [whole[..., 0:64], whole[..., 32:96]] * 2
        assert len(net.control_model.seen) == 4
        for got, wanted in zip(net.control_model.seen, want, strict=True):
            assert torch.equal(got, wanted)
        assert net.cond_hint is None
        assert net.timestep_range is None, "the host frees what a run prepared"
        assert torch.equal(net.cond_hint_original, picture)


def test_the_mask_of_an_inpainting_controlnet_is_cut_like_its_hint(demo):
    mask = torch.rand(1, 1, 64, 96, generator=torch.Generator().manual_seed(33))
    net = control_net(hint_picture(), mask=mask)
    run(demo, WIDE, **TILES, **controlled(demo, net))
    seen = net.control_model.seen
    assert [tuple(one.shape) for one in seen] == [(1, 4, 64, 64)] * 4
    for got, part in zip(seen, [mask[..., 0:64], mask[..., 32:96]] * 2, strict=True):
        assert torch.equal(got[:, 3:], part)


@pytest.mark.parametrize("tiles", [{}, TILES])
def test_a_controlnet_acts_only_in_its_step_range(demo, tiles):
    net = control_net(hint_picture(), percent=(0.0, 0.3))
    early = run(demo, WIDE, **tiles, **controlled(demo, net))
    assert len(net.control_model.seen) == (2 if tiles else 1), "the first of two steps only"
    assert differs(early, run(demo, WIDE, **tiles))
    assert differs(early, run(demo, WIDE, **tiles, **controlled(demo, control_net(hint_picture()))))


def test_tiled_copies_are_freed_after_a_run_and_after_a_failure(demo):
    import comfy.samplers

    net, control = control_net(hint_picture()), latent(*WIDE)
    guider = node_guider(demo, control, (64, 16), **controlled(demo, net))
    held = []
    real = guider._cropper.crop

    def crop(*args):
        held.append(real(*args))
        return held[-1]

    guider._cropper.crop = crop
    args = (control["samples"], comfy.samplers.sampler_object("euler"))
    levels = torch.tensor([14.6, 3.0, 0.0])
    guider.sample(torch.randn(1, 4, *WIDE), *args, levels, disable_pbar=True, seed=1)
    assert len({id(one) for one in held}) == 2
    assert all(one.cond_hint is None for one in held)
    assert guider._cropper._copies == {}
    held.clear()
    net.control_model.register_forward_hook(lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        guider.sample(torch.randn(1, 4, *WIDE), *args, levels, disable_pbar=True, seed=1)
    assert held
    assert guider._cropper._copies == {}


def halves(demo, a, b, height=8, width=16):
    mask = torch.zeros(1, height, width)
    mask[..., : width // 2] = 1.0
    settings = {"mask_strength": 1.0, "set_area_to_bounds": False}
    return with_extra(a, mask=mask, **settings) + with_extra(b, mask=1.0 - mask, **settings)


@pytest.mark.parametrize("tiles", [{}, TILES])
def test_masked_prompts(demo, tiles):
    a, b = prompt(demo, "red stone"), prompt(demo, "green leaf")
    size = (8, 16)
    ones = with_extra(a, mask=torch.ones(1, 8, 16), mask_strength=1.0)
    only_a = run(demo, size, **tiles, positive=a)
    assert close(run(demo, size, **tiles, positive=ones), only_a)
    split = run(demo, size, **tiles, positive=halves(demo, a, b))
    only_b = run(demo, size, **tiles, positive=b)
    swapped = run(demo, size, **tiles, positive=halves(demo, b, a))
    for other in (only_a, only_b, swapped):
        assert differs(split, other)
    default = with_extra(b, default=True)
    masked_a = halves(demo, a, b)[:1]
    assert close(run(demo, size, **tiles, positive=masked_a + default), split)


def test_a_tile_inside_one_mask_is_that_prompt_alone(demo):
    a, b = prompt(demo, "red stone"), prompt(demo, "green leaf")
    size, once = (8, 16), {"steps": 1, **TILES}
    split = run(demo, size, **once, positive=halves(demo, a, b))
    only_a, only_b = (run(demo, size, **once, positive=one) for one in (a, b))
    assert close(split[..., :6], only_a[..., :6])
    assert close(split[..., 14:], only_b[..., 14:])
    assert differs(only_a[..., :6], only_b[..., :6])


@pytest.mark.parametrize("tiles", [{}, TILES])
def test_prompts_limited_to_steps(demo, tiles):
    a, b = prompt(demo, "red stone"), prompt(demo, "green leaf")
    settings = {**tiles, "s_churn": 0.0}  # a range is compared with the level asked at

    def switched(first, second):
        early = with_extra(first, start_percent=0.0, end_percent=0.4)
        late = with_extra(second, start_percent=0.4, end_percent=1.0)
        return run(demo, WIDE, **settings, positive=early + late)

    only_a, only_b = (run(demo, WIDE, **settings, positive=one) for one in (a, b))
    assert torch.equal(switched(a, a), only_a)
    both = switched(a, b)
    for other in (only_a, only_b, switched(b, a)):
        assert differs(both, other)


def test_areas_are_refused_in_words(demo):
    from supir_xpu.supir.errors import SettingsError

    area = with_extra(demo.positive, area=(8, 8, 0, 0))
    bounds = with_extra(demo.positive, mask=torch.ones(1, 8, 8), set_area_to_bounds=True)
    for conds in (area, bounds):
        with pytest.raises(SettingsError, match="positive is limited to an area"):
            run(demo, positive=conds)
        with pytest.raises(SettingsError, match="negative is limited to an area"):
            run(demo, negative=conds)


@pytest.mark.parametrize("tiles", [{}, TILES])
def test_noise_mask_in_the_sample_node(demo, tiles):
    mask = torch.zeros(1, 1, *WIDE)
    mask[..., 6:] = 1.0
    control, center = latent(*WIDE), latent(*WIDE, seed=2)
    settings = {**tiles, "steps": 3, "center": center}
    out = run(demo, WIDE, **settings, control={**control, "noise_mask": mask})
    assert (out - center["samples"])[..., :6].abs().max() < 1e-4
    free = run(demo, WIDE, **settings, control=control)
    assert differs(out[..., 6:], center["samples"][..., 6:])
    assert differs(out[..., 6:], free[..., 6:])


@pytest.mark.parametrize("tiles", [(-1, 0), (64, 16)])
@pytest.mark.parametrize("sampler", ["euler", "dpmpp_2m_sde", "heun", "uni_pc", "ddim"])
def test_noise_mask_with_host_samplers(demo, sampler, tiles):
    """The unmasked area stays as well as the sampler keeps it without SUPIR (uni_pc: nearly)."""
    import comfy.samplers

    control, mask = latent(*WIDE), torch.zeros(1, 1, *WIDE)
    mask[..., 6:] = 1.0
    plain = comfy.samplers.CFGGuider(demo.model)
    plain.set_conds(demo.positive, demo.negative)

    def sampled(guider):
        return guider.sample(
            torch.randn(1, 4, *WIDE, generator=torch.Generator().manual_seed(3)),
            control["samples"],
            comfy.samplers.sampler_object(sampler),
            torch.tensor([14.6146, 5.0, 1.0, 0.0]),
            denoise_mask=mask,
            disable_pbar=True,
            seed=3,
        )

    out, alone = sampled(node_guider(demo, control, tiles)), sampled(plain)
    assert (out - alone)[..., :6].abs().max() < 1e-4
    assert (out - control["samples"])[..., :6].abs().max() < 0.05
    assert differs(out[..., 6:], control["samples"][..., 6:])
    assert differs(out[..., 6:], alone[..., 6:])


@pytest.mark.parametrize("tiles", [{}, TILES])
def test_prompts_longer_than_one_chunk(demo, tiles):
    words = " ".join(f"stone{i % 7} leaf{i % 5}" for i in range(120))
    longer, cut = prompt(demo, words), prompt(demo, words[:150])
    assert longer[0][0].shape[1] >= 3 * 77
    whole = run(demo, WIDE, **tiles, positive=longer)
    assert torch.isfinite(whole).all()
    assert differs(whole, run(demo, WIDE, **tiles, positive=cut))
    mixed = run(demo, WIDE, **tiles, positive=longer, negative=longer)
    assert close(mixed, run(demo, WIDE, **tiles, positive=longer, cfg_start=1.0, cfg_end=1.0))


def test_lora_hook_on_the_conditioning_is_the_lora_on_the_model(demo):
    import comfy.hooks
    import comfy.sd

    g = torch.Generator().manual_seed(8)
    name = "lora_unet_middle_block_1_proj_in"
    lora = {
        f"{name}.lora_up.weight": torch.randn(64, 4, generator=g),
        f"{name}.lora_down.weight": 0.3 * torch.randn(4, 64, generator=g),
    }
    plain = run(demo)
    patched, _ = comfy.sd.load_lora_for_models(demo.model, None, lora, 0.7, 0.0)
    want = run(demo, model=patched)
    hooks = comfy.hooks.create_hook_lora(lora, 0.7, 0.0)
    got = run(
        demo,
        positive=with_extra(demo.positive, hooks=hooks),
        negative=with_extra(demo.negative, hooks=hooks),
    )
    assert differs(got, plain)
    assert close(got, want)
    assert torch.equal(run(demo), plain)
