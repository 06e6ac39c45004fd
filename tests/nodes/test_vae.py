"""The VAE front: the host's results, in our memory, with the host's patches and casts."""

from __future__ import annotations

import copy
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.host
MIB = 1 << 20


@pytest.fixture(scope="module")
def codec():
    import supir_xpu.nodes.vae as module

    return module


def fill(net, seed=5):
    generator = torch.Generator().manual_seed(seed)
    for name, value in net.named_parameters():
        noise = torch.randn(value.shape, generator=generator)
        if value.ndim > 1:
            value.copy_(noise / value[0].numel() ** 0.5)
        else:
            value.copy_(noise * 0.1 + ("norm" in name and name.endswith("weight")))


@pytest.fixture
def vae():
    """ComfyUI's VAE object around a KL autoencoder of 32 channels, ratio 4."""
    import comfy.sd
    from comfy.ldm.models.autoencoder import AutoencoderKL

    dd = {"double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3}
    dd |= {"ch": 32, "ch_mult": [1, 2, 2], "num_res_blocks": 1, "attn_resolutions": []}
    config = {"params": {"ddconfig": dd, "embed_dim": 4}}
    model = AutoencoderKL(**config["params"])
    fill(model)
    made = comfy.sd.VAE(sd=model.state_dict(), config=config, dtype=torch.float32)
    made.downscale_ratio = made.upscale_ratio = 4
    return made


def image(batch=1, height=60, width=45, channels=3):
    return torch.rand(batch, height, width, channels, generator=torch.Generator().manual_seed(2))


def close(found, wanted):
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    assert (found - wanted).abs().max().item() <= 2e-5 * max(1.0, wanted.std().item())


@pytest.fixture
def striped_only(codec, monkeypatch):
    """Make stripes of two rows, and fail if the host's whole-network forward is used."""
    from comfy.ldm.modules.diffusionmodules.model import Decoder, Encoder

    monkeypatch.setattr(codec, "MIN_WORKSPACE_BYTES", 12000)

    def forbidden(*args, **kwargs):
        raise AssertionError("the untiled network ran")

    def use():
        for cls in (Encoder, Decoder):
            monkeypatch.setattr(cls, "forward", forbidden)

    return use


@pytest.mark.parametrize(
    "shape", [(1, 60, 45, 3), (2, 31, 33, 3), (1, 32, 32, 4), (1, 4, 4, 3), (1, 9, 200, 3)]
)
def test_equals_the_host(codec, vae, striped_only, shape):
    pixels = image(*shape)
    latent = vae.encode(pixels)
    decoded = vae.decode(latent)
    striped_only()
    found, note = codec.encode_image(vae, pixels)
    assert note is None
    close(found, latent)
    found, note = codec.decode_latent(vae, latent)
    assert note is None
    close(found, decoded)
    assert 0 <= found.min() <= found.max() <= 1


def test_fits_in_the_workspace_bit_identical(codec, vae):
    pixels = image()
    latent = vae.encode(pixels)
    assert torch.equal(codec.encode_image(vae, pixels, workspace_mb=1024)[0], latent)
    found = codec.decode_latent(vae, latent, workspace_mb=1024)[0]
    assert torch.equal(found, vae.decode(latent))


def test_engine_without_quant_convolutions(codec, vae, striped_only):
    from comfy.ldm.models.autoencoder import AutoencodingEngine, DiagonalGaussianRegularizer

    old = vae.first_stage_model
    model = AutoencodingEngine.__new__(AutoencodingEngine)
    torch.nn.Module.__init__(model)
    model.encoder, model.decoder = old.encoder, old.decoder
    model.regularization = DiagonalGaussianRegularizer()
    vae.first_stage_model = model.eval()
    vae.patcher = type(vae.patcher)(model, vae.device, torch.device("cpu"))
    latent = vae.encode(image())
    decoded = vae.decode(latent)
    striped_only()
    close(codec.encode_image(vae, image())[0], latent)
    close(codec.decode_latent(vae, latent)[0], decoded)


def test_does_not_change_its_arguments(codec, vae):
    pixels = image()
    latent = codec.encode_image(vae, pixels)[0]
    kept = latent.clone()
    codec.decode_latent(vae, latent)
    assert torch.equal(pixels, image())
    assert torch.equal(latent, kept)


def test_weight_patches_of_a_clone_are_in_effect_and_stay_there(codec, vae, striped_only):
    plain = vae.encode(image())
    patched = copy.copy(vae)
    patched.patcher = vae.patcher.clone()
    generator = torch.Generator().manual_seed(9)
    encoder = vae.first_stage_model.encoder
    patches = {
        f"encoder.{name}": (torch.randn(value.shape, generator=generator) * 0.05,)
        for name, value in encoder.named_parameters()
    }
    assert len(patched.patcher.add_patches(patches)) == len(patches)
    wanted = patched.encode(image())
    assert (wanted - plain).abs().max() > 0.01
    striped_only()
    for _ in range(2):  # in any order
        close(codec.encode_image(patched, image())[0], wanted)
        close(codec.encode_image(vae, image())[0], plain)


@pytest.mark.parametrize("kind", ["encode", "decode"])
def test_casts_as_often_as_the_host(codec, vae, kind, striped_only, monkeypatch):
    import comfy.ops

    model = vae.first_stage_model.to(torch.bfloat16)
    for module in model.modules():
        if hasattr(module, "weight"):
            module.comfy_cast_weights = True
    data = image() if kind == "encode" else torch.randn(1, 4, 15, 11)
    casts, returned = Counter(), Counter()
    cast, uncast = comfy.ops.cast_bias_weight, comfy.ops.uncast_bias_weight

    def counted_cast(module, *args, **kwargs):
        casts[id(module)] += 1
        return cast(module, *args, **kwargs)

    def counted_uncast(module, *args):
        returned[id(module)] += 1
        return uncast(module, *args)

    monkeypatch.setattr(comfy.ops, "cast_bias_weight", counted_cast)
    monkeypatch.setattr(comfy.ops, "uncast_bias_weight", counted_uncast)
    reference = getattr(vae, kind)(data)
    by_host = Counter(casts)
    assert len(by_host) > 30
    casts.clear()
    returned.clear()
    striped_only()
    function = codec.encode_image if kind == "encode" else codec.decode_latent
    close(function(vae, data)[0], reference)
    assert casts == by_host
    assert returned == casts


def test_asks_the_host_for_our_own_memory(codec, vae, monkeypatch):
    import comfy.model_management as mm

    asked = []
    load = mm.load_models_gpu

    def record(models, memory_required=0, **kwargs):
        asked.append((models, memory_required))
        return load(models, memory_required=memory_required, **kwargs)

    monkeypatch.setattr(mm, "load_models_gpu", record)
    latent = torch.zeros(1, 4, 64, 48)
    codec.decode_latent(vae, latent, workspace_mb=1)
    codec.encode_image(vae, image(1, 256, 192), workspace_mb=1)
    assert [models for models, _ in asked] == [[vae.patcher]] * 2
    maps = 4 * 64 * 256 * 192  # two 32-channel maps in fp32
    for _, size in asked:
        assert maps < size < 1.4 * maps + 4 * MIB
    assert asked[0][1] < vae.memory_used_decode(latent.shape, vae.vae_dtype) / 20


@pytest.mark.parametrize("kind", ["encode", "decode"])
def test_progress_and_cancel_at_every_stripe(codec, vae, kind, striped_only):
    import comfy.model_management as mm

    striped_only()
    function = codec.encode_image if kind == "encode" else codec.decode_latent
    data = image(2, 16, 8) if kind == "encode" else torch.randn(2, 4, 4, 2)
    seen = []
    wanted, _ = function(vae, data, progress=lambda *at: seen.append(at))
    assert seen == [(k + 1, len(seen)) for k in range(len(seen))]
    assert len(seen) > 40
    state = {name: dict(vars(m)) for name, m in vae.first_stage_model.named_modules()}
    for stop_at in range(1, len(seen) // 2 + 2):  # all of item 0, and the start of item 1

        def cancel(done, total, stop_at=stop_at):
            assert done <= stop_at  # the stripe after the cancel does not run
            mm.interrupt_current_processing(done == stop_at)

        with pytest.raises(mm.InterruptProcessingException):
            function(vae, data, progress=cancel)
    mm.interrupt_current_processing(False)
    assert {n: dict(vars(m)) for n, m in vae.first_stage_model.named_modules()} == state
    assert torch.equal(function(vae, data)[0], wanted)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda vae: setattr(vae, "format_encoded", lambda x: x), "not that of an image"),
        (lambda vae: setattr(vae, "encode", vae.encode), "was replaced"),
        (
            lambda vae: vae.first_stage_model.encoder.register_forward_hook(lambda *a: None),
            "hook",
        ),
        (
            lambda vae: setattr(
                vae, "__class__", type("Own", (type(vae),), {"encode": lambda s, p: p})
            ),
            "its own encode",
        ),
    ],
)
def test_unknown_vae_takes_the_host_path_and_says_why(codec, vae, change, reason):
    change(vae)
    found, note = codec.encode_image(vae, image())
    assert reason in note
    assert torch.equal(found, vae.encode(image()))


def test_batch_normalised_latents_are_left_to_the_host(codec, vae, monkeypatch):
    import comfy.sd

    vae.first_stage_model.bn = torch.nn.BatchNorm2d(4)
    monkeypatch.setattr(comfy.sd.VAE, "encode", lambda self, pixels: pixels)
    found, note = codec.encode_image(vae, image())
    assert "batch-normalised" in note
    assert torch.equal(found, image())


def test_another_packs_attention_on_the_patcher_is_respected(codec, vae):
    other = copy.copy(vae)
    other.patcher = vae.patcher.clone()
    other.patcher.add_object_patch("decoder.mid.attn_1.optimized_attention", lambda q, k, v: v)
    latent = torch.randn(1, 4, 8, 8)
    found, note = codec.decode_latent(other, latent)
    assert "attention function" in note
    assert torch.equal(found, other.decode(latent))
    assert codec.decode_latent(vae, latent)[1] is None


def test_too_small_a_picture_is_refused_before_loading(codec, vae, monkeypatch):
    import comfy.model_management as mm
    from supir_xpu.supir.errors import ShapeError

    monkeypatch.setattr(mm, "load_models_gpu", lambda *a, **k: pytest.fail("loaded"))
    with pytest.raises(ShapeError, match="too small"):
        codec.encode_image(vae, image(1, 3, 40))


# ---- budgets on a device that is not here: its memory figures are simulated ----------------


@pytest.fixture
def device(monkeypatch):
    """Simulate an accelerator with a given number of free bytes."""
    import comfy.model_management as mm

    def free(size):
        monkeypatch.setattr(mm, "get_free_memory", lambda *a, **k: size)
        monkeypatch.setattr(mm, "extra_reserved_memory", lambda: 0)
        return SimpleNamespace(device=torch.device("xpu"))

    return free


@pytest.mark.parametrize(
    ("gib", "least_mib", "most_mib"),
    [(1.0, 256, 256), (2.7, 256, 400), (3.2, 500, 700), (24, 1024, 1024)],
)
def test_workspace_follows_free_memory(codec, device, gib, least_mib, most_mib):
    from supir_xpu.supir import striped

    steps, free = striped.KLLayout().decoder_steps(), int(gib * (1 << 30))
    limits = codec.choose_budgets(device(free), steps, (256, 256), striped.Limits(0, 2))
    assert least_mib * MIB <= limits.workspace_bytes <= most_mib * MIB
    plan = striped.plan_steps(steps, 256, 256, limits)
    assert plan.live_peak_bytes <= free
    assert (plan.host_peak_bytes > 0) == (gib < 2)


def test_given_workspace_is_kept(codec, device):
    from supir_xpu.supir import striped

    steps = striped.KLLayout().decoder_steps()
    limits = codec.choose_budgets(device(1 << 33), steps, (64, 64), striped.Limits(64 * MIB, 2))
    assert limits == striped.Limits(64 * MIB, 2)


def test_out_of_memory_is_retried_with_stripes_in_host_memory(codec, vae, monkeypatch):
    wanted = codec.decode_latent(vae, torch.ones(1, 4, 8, 8))[0]
    real, tried = codec.striped.decode, []

    def failing(net, z, options):
        tried.append(options)
        if len(tried) == 1:
            raise torch.OutOfMemoryError("out of device memory")
        return real(net, z, options)

    monkeypatch.setattr(codec.striped, "decode", failing)
    close(codec.decode_latent(vae, torch.ones(1, 4, 8, 8))[0], wanted)
    assert tried[0].store_budget_bytes is None
    assert tried[1].store_budget_bytes == 0
    assert tried[1].workspace_bytes == 64 * MIB
