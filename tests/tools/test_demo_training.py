"""The parts the demo model is trained with: pictures, damage, optimiser, rescaling."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.host


def test_a_drawn_picture_is_a_function_of_its_seed(tool):
    synth = tool("demo_synth")
    first = synth.picture(3, 96)
    assert first.dtype == np.uint8
    assert first.shape == (96, 96, 3)
    assert np.array_equal(first, synth.picture(3, 96))
    assert np.abs(first.astype(int) - synth.picture(4, 96)).mean() > 10.0


def test_damage_is_a_function_of_the_generator_and_keeps_the_size(tool):
    degrade, metrics = tool("demo_degrade"), tool("demo_metrics")
    clean = tool("demo_synth").picture(5, 96)[:, :80]
    strong = [degrade.degrade(clean, np.random.default_rng(n)) for n in (1, 1, 2)]
    assert all(one.shape == clean.shape for one in strong)
    assert np.array_equal(strong[0], strong[1])
    assert not np.array_equal(strong[0], strong[2])
    mild = [degrade.degrade(clean, np.random.default_rng(n), degrade.MILD) for n in range(8)]
    worse = [degrade.degrade(clean, np.random.default_rng(n)) for n in range(8)]
    kept = [np.mean([metrics.psnr(one, clean) for one in some]) for some in (mild, worse)]
    assert kept[0] > kept[1] + 1.0


def test_nothing_is_trained_on_that_is_judged_on(tool):
    data = tool("demo_data")
    trained = {*data.TRAIN_PHOTOS, *(f"{name}.png" for name in data.TRAIN_PANORAMAS)}
    assert not trained & set(data.TEST_PHOTOS)
    assert set(data.DEV_COLUMNS) <= trained
    assert len({data.DEV_SYNTHETIC_SEED, data.TEST_SYNTHETIC_SEED}) == 2
    assert min(data.DEV_SYNTHETIC_SEED, data.TEST_SYNTHETIC_SEED) > tool("train_demo").SYNTHETIC


def test_crops_are_of_the_size_asked_for_and_repeat(tool):
    data = tool("demo_data")
    rng = np.random.default_rng(0)
    pool = rng.integers(0, 256, (2, 64, 64, 3)).astype(np.uint8)
    photos = [rng.integers(0, 256, (70, 50, 3)).astype(np.uint8)]
    low, high = data.Crops(pool, photos, 4).pairs(5, 32)
    assert low.shape == high.shape == (5, 32, 32, 3)
    assert np.array_equal(high, data.Crops(pool, photos, 4).pairs(5, 32)[1])


def test_orthogonalise_brings_singular_values_near_one(tool):
    matrices = torch.randn(3, 24, 80, generator=torch.Generator().manual_seed(1))
    for one in (matrices, matrices.transpose(1, 2)):
        values = torch.linalg.svdvals(tool("demo_optim").orthogonalise(one))
        assert values.min() > 0.5
        assert values.max() < 1.4


def test_learning_rate_rises_holds_and_ends_at_zero(tool):
    rate = tool("demo_optim").rate
    assert rate(0.0) < 0.1
    assert rate(0.3) == 1.0
    assert rate(0.7) == pytest.approx(0.5)
    assert rate(1.0) == 0.0


def test_optimiser_goes_on_from_its_state(tool):
    """Two steps in one go are two steps with a stop between them."""
    optim = tool("demo_optim")

    def layer():
        torch.manual_seed(2)
        return torch.nn.Linear(20, 20)

    def step(trainer, module):
        module(torch.ones(1, 20)).square().sum().backward()
        trainer.step(1.0)

    with torch.inference_mode(False), torch.enable_grad():
        whole, first = layer(), layer()
        trainer = optim.Trainer([whole], 0.1, 0.1)
        step(trainer, whole)
        step(trainer, whole)
        begun = optim.Trainer([first], 0.1, 0.1)
        step(begun, first)
        second = layer()
        second.load_state_dict(first.state_dict())
        resumed = optim.Trainer([second], 0.1, 0.1)
        resumed.restore(begun.state())
        step(resumed, second)
    assert torch.equal(second.weight, whole.weight)
    assert torch.equal(second.bias, whole.bias)
    assert not torch.equal(first.weight, whole.weight)
    assert torch.equal(resumed.average[0], trainer.average[0])


def test_a_rescaled_adapter_gives_the_same_in_another_scale(tool):
    from supir_xpu.supir.adapters import ZeroSFT
    from supir_xpu.supir.layout import SftDims

    generator = torch.Generator().manual_seed(3)
    sft = ZeroSFT(SftDims(32, 32, 32, 16), operations=torch.nn, dtype=None, device="cpu")
    control, skip, decoder = (torch.randn(1, 32, 6, 6, generator=generator) for _ in range(3))
    with torch.no_grad():
        for parameter in sft.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        want = sft(control, skip, decoder, 1.0)
        tool("demo_scale").scale_adapter(sft, 0.25, multiplier_peak=5e4)
        got = sft(control, skip, decoder, 1.0)
    assert torch.allclose(got, 0.25 * want, rtol=1e-4, atol=1e-3)


def test_peaks_are_those_of_the_outputs(tool):
    scale = tool("demo_scale")
    double = torch.nn.Linear(1, 1)
    with torch.no_grad():
        double.weight.fill_(2.0)
        double.bias.fill_(0.0)
    found = scale.peaks(
        {"it": double}, lambda: [double(torch.full((1, 1), x)) for x in (1.0, -9.0)]
    )
    assert found == {"it": 18.0}
    assert not double._forward_hooks
    assert scale.factor(scale.HIGHEST) == 1.0
    assert scale.factor(3.0 * scale.HIGHEST) == 0.25


def test_whitened_latent_has_unit_covariance(tool):
    nets = tool("demo_nets")
    samples = torch.randn(4000, 4, generator=torch.Generator().manual_seed(4))
    mixed = samples @ torch.tensor([[2.0, 1, 0, 0], [0, 3, 1, 0], [0, 0, 1, 2], [0, 0, 0, 4]]) + 5.0
    vae = SimpleNamespace(
        quant_conv=torch.nn.Conv2d(8, 8, 1), post_quant_conv=torch.nn.Conv2d(4, 4, 1)
    )
    nets.Autoencoder.whiten(vae, mixed, 0.13025)
    with torch.no_grad():
        moments = torch.cat([mixed, torch.zeros(4000, 4)], 1)[..., None, None]
        found = vae.quant_conv(moments)
        back = vae.post_quant_conv(found[:, :4])[..., 0, 0]
    latent = 0.13025 * found[:, :4, 0, 0]
    assert torch.allclose(torch.cov(latent.T), torch.eye(4), atol=1e-3)
    assert latent.mean(0).abs().max() < 1e-3
    assert torch.allclose(back, mixed, atol=1e-3)
    assert bool((found[:, 4:] == nets.LOGVAR).all())
