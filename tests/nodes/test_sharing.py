"""One loaded MODEL and SUPIR over many runs: interleaved, failed, cancelled, chained, unchanged."""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.host


def latent(height=8, width=8, seed=1):
    g = torch.Generator().manual_seed(seed)
    return {"samples": torch.randn(1, 4, height, width, generator=g)}


def run(demo, size=(8, 8), **changes):
    control = latent(*size)
    args = {"steps": 2, "control": control, "center": control, "cfg_start": 2.0, "cfg_end": 3.0}
    return demo.run_latent(**{**args, "restore_cfg": 0.5, **changes})


def make_guider(demo, model=None, control=None, start=1.0, end=1.0, restore=0.5, tile=(-1, 0)):
    from supir_xpu.nodes.custom import Guider

    control = control or latent()
    return Guider.execute(
        model or demo.model, demo.supir, demo.positive, demo.negative, control,
        2.0, 3.0, start, end, restore, *tile, center=control,
    ).result[0]  # fmt: skip


LEVELS = torch.tensor([14.6146, 6.0, 1.0, 0.0])


def sample(guider, size=(8, 8), seed=5, callback=None, levels=LEVELS, start=None):
    import comfy.samplers
    from supir_xpu.nodes.sampler import start_noise

    noise = start_noise((1, 4, *size), seed)
    return guider.sample(
        noise if start is None else torch.zeros_like(noise),
        torch.zeros_like(noise) if start is None else start,
        comfy.samplers.sampler_object("euler"),
        levels,
        callback=callback,
        disable_pbar=True,
        seed=seed,
    )


def test_runs_with_other_settings_between_do_not_matter(demo):
    want = run(demo)
    others = [
        run(demo, control_start=0.3, control_end=0.1),
        run(demo, restore_cfg=0.0, cfg_start=5.0),
        run(demo, control_start=0.0, control_end=0.0),
        run(demo, size=(8, 12), tile_px=64, tile_overlap_px=16),
        run(demo, sampler="restore_dpmpp_2m"),
    ]
    assert all(o.shape != want.shape or not torch.equal(o, want) for o in others)
    assert torch.equal(run(demo), want)


def test_guiders_interleaved_step_by_step(demo):
    """Both carry on from where they were, level by level in turn, as if each were alone."""
    makers = [
        lambda: make_guider(demo),
        lambda: make_guider(demo, control=latent(seed=3), start=0.4, end=0.2, restore=0.0),
    ]

    def step(guider, x, i):
        return sample(guider, levels=LEVELS[i : i + 2], start=x)

    def alone(guider):
        x = latent(seed=9)["samples"] * 14.0
        for i in range(3):
            x = step(guider, x, i)
        return x

    want = [alone(make()) for make in makers]
    guiders, states = [make() for make in makers], [latent(seed=9)["samples"] * 14.0] * 2
    for i in range(3):
        states = [step(g, x, i) for g, x in zip(guiders, states, strict=True)]
    assert not torch.equal(*want)
    for got, wanted in zip(states, want, strict=True):
        assert torch.equal(got, wanted)


def test_one_guider_object_used_again_and_at_once_by_two_samplers(demo):
    guider = make_guider(demo)
    want, other = sample(guider), sample(guider, seed=6)
    assert not torch.equal(want, other)
    assert torch.equal(sample(guider), want)
    twin = copy.copy(guider)
    assert torch.equal(sample(twin, seed=6), other)
    assert torch.equal(sample(guider), want)


@pytest.mark.parametrize("sampler", ["restore_edm", "restore_dpmpp_2m"])
def test_seeds_of_64_bits(demo, sampler):
    """Every seed works and repeats. The starting noise is the host's: its generator, and so the
    noise, knows the lower 32 bits of a seed."""
    from comfy_extras.nodes_custom_sampler import Noise_RandomNoise
    from supir_xpu.nodes.sampler import start_noise

    seeds = [0, 1, 2**31, 2**32 + 7, 2**63 - 3, 2**63 + 11, 2**64 - 1]
    results = [demo.digest(run(demo, seed=s, sampler=sampler, steps=3)) for s in seeds]
    assert len(set(results)) == len(seeds)
    again = [demo.digest(run(demo, seed=s, sampler=sampler, steps=3)) for s in seeds[-2:]]
    assert again == results[-2:]
    for seed in seeds:
        want = Noise_RandomNoise(seed).generate_noise(latent())
        assert torch.equal(start_noise((1, 4, 8, 8), seed), want)


class Failure:
    """Raises an error when a network is called for the n-th time."""

    def __init__(self, module, n, error):
        self.left, self.error = n, error
        self.handle = module.register_forward_pre_hook(self)

    def __call__(self, module, args):
        self.left -= 1
        if self.left == 0:
            raise self.error

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.handle.remove()


def places(demo):
    supir, unet = demo.supir.patcher.model, demo.model.model.diffusion_model
    return {
        "control network": supir.control_model.middle_block[1],
        "adapter": supir.project_modules[3],
        "unet": unet.output_blocks[4][0],
    }


@pytest.mark.parametrize("place", ["control network", "adapter", "unet"])
@pytest.mark.parametrize("kind", ["memory", "cancel"])
def test_a_smaller_run_after_a_failure_is_like_a_first_run(demo, place, kind):
    import comfy.model_management as mm

    memory = torch.OutOfMemoryError("Tried to allocate 20.00 GiB")
    error = memory if kind == "memory" else mm.InterruptProcessingException()
    small, large = run(demo), run(demo, size=(8, 12), tile_px=64, tile_overlap_px=16)
    for n in (1, 3):
        with Failure(places(demo)[place], n, error), pytest.raises(type(error)) as caught:
            run(demo, size=(8, 12), tile_px=64, tile_overlap_px=16)
        assert caught.value is error, "the host must see the error itself to free memory"
        assert torch.equal(run(demo), small)
    if kind == "memory":
        ask = getattr(mm, "is_oom", lambda e: isinstance(e, mm.OOM_EXCEPTION))  # older hosts
        assert ask(error)
        mm.unload_all_models()  # what the host does after it
    assert torch.equal(run(demo), small)
    again = run(demo, size=(8, 12), tile_px=64, tile_overlap_px=16)
    assert torch.equal(again, large)


def test_a_failed_load_is_not_remembered(demo, tmp_path, monkeypatch):
    import folder_paths
    from supir_xpu.nodes import load
    from supir_xpu.supir.errors import CheckpointError

    folder = tmp_path / "supir"
    folder.mkdir()
    folders = {"supir": ([str(folder)], {".safetensors"})}
    monkeypatch.setattr(folder_paths, "folder_names_and_paths", folders)
    monkeypatch.setattr(folder_paths, "filename_list_cache", {})
    from supir_xpu.nodes.demo import demo_supir_path

    name, good = "one.safetensors", Path(demo_supir_path()).read_bytes()
    path = folder / name
    for damaged in (good[:5000], good[: len(good) // 2], b"", good[:8] + b"x" * 100):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError):
            load.LoadSUPIR.execute(name)
        assert isinstance(load.LoadSUPIR.validate_inputs(name), str)
        assert load.list_supir_files() == [load.NOTHING_FOUND]
        path.write_bytes(good)
        supir = load.LoadSUPIR.execute(name).result[0]
        assert load.LoadSUPIR.validate_inputs(name) is True
        assert load.list_supir_files() == [name]
    assert torch.equal(run(demo, supir=supir), run(demo))

    def broken(*args):
        raise OSError("the disk went away")

    with monkeypatch.context() as patch:
        patch.setattr(load, "load_tensors", broken)
        with pytest.raises(OSError, match="the disk went away"):
            load.LoadSUPIR.execute(name)
    assert torch.equal(run(demo, supir=load.LoadSUPIR.execute(name).result[0]), run(demo))


def flat(value):
    """A comparable picture of nested options: containers by content, everything else by identity."""
    if isinstance(value, dict):
        return {str(key): flat(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [flat(one) for one in value]
    return id(value) if value is not None else None


def snapshot(patcher):
    names = ("model_options", "patches", "object_patches", "wrappers", "callbacks")
    names += ("additional_models", "injections", "hook_patches", "attachments")
    state = {name: flat(getattr(patcher, name)) for name in names}
    digest = hashlib.sha256()
    for key, value in sorted(patcher.model.state_dict().items()):
        digest.update(key.encode("utf-8") + value.contiguous().view(torch.uint8).numpy().tobytes())
    return {**state, "weights": digest.hexdigest(), "uuid": patcher.patches_uuid}


def test_model_and_supir_are_unchanged_by_runs(demo):
    import comfy.model_management as mm

    model = demo.model.clone()
    model.add_wrapper_with_key("diffusion_model", "other", lambda ex, *a, **k: ex(*a, **k))
    model.set_model_sampler_post_cfg_function(lambda args: args["denoised"])
    model.set_model_attn2_patch(lambda n, context, value, extra: (n, context, value))
    model.set_model_patch_replace(lambda q, k, v, extra: q, "attn1", "middle", 0)
    before = snapshot(model), snapshot(demo.supir.patcher)
    run(demo, model=model)
    run(demo, model=model, size=(8, 12), tile_px=64, tile_overlap_px=16)
    sample(make_guider(demo, model))
    cancel = mm.InterruptProcessingException()
    with Failure(places(demo)["unet"], 2, cancel), pytest.raises(type(cancel)):
        run(demo, model=model)
    assert (snapshot(model), snapshot(demo.supir.patcher)) == before


def wrappers_of(guider):
    from supir_xpu.supir.constants import WORK_KEY

    return {
        kind: len(guider.model_patcher.get_wrappers(kind, WORK_KEY))
        for kind in ("diffusion_model", "prepare_sampling")
    }


def test_guiders_in_a_row_and_a_model_that_already_runs_supir(demo):
    calls = []
    net = demo.supir.patcher.model.control_model
    first = make_guider(demo)
    want = sample(first)
    second = make_guider(demo, first.model_patcher)
    third = make_guider(demo, second.model_patcher.clone())
    handle = net.register_forward_pre_hook(lambda module, args: calls.append(args[0].shape[0]))
    try:
        for guider in (second, third):
            calls.clear()
            assert wrappers_of(guider) == {"diffusion_model": 1, "prepare_sampling": 1}
            assert len(guider.model_patcher.get_additional_models()) == 1
            assert torch.equal(sample(guider), want)
            assert calls == [2, 2, 2], "the control network runs once per network call"
    finally:
        handle.remove()
    assert torch.equal(sample(first), want)


def test_a_model_that_carries_supir_is_plain_in_any_other_sampler(demo):
    import comfy.samplers

    def plain(model):
        guider = comfy.samplers.CFGGuider(model)
        guider.set_conds(demo.positive, demo.negative)
        guider.set_cfg(3.0)
        return sample(guider)

    carrying = make_guider(demo).model_patcher
    assert torch.equal(plain(carrying), plain(demo.model))
    off = make_guider(demo, carrying, start=0.0, end=0.0, restore=0.0)
    assert wrappers_of(off) == {"diffusion_model": 0, "prepare_sampling": 1}
    assert off.model_patcher.get_additional_models() == []
