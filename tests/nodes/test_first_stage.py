"""First Stage, Encode, Decode, Color Fix: sizes, transparency, batches, and the denoise encoder."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.host


def picture(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("height", "width", "factor"),
    [(64, 64, 1.0), (1, 1, 1.0), (31, 200, 1.0), (77, 101, 1.5), (50, 130, 0.5), (3, 90, 1.0)],
)
def test_every_size_comes_back_exactly(demo, height, width, factor):
    stage1, control, center = demo.first_stage(
        demo.vae, demo.supir, picture(1, height, width, 3), factor
    ).result
    want = (max(1, round(height * factor)), max(1, round(width * factor)))
    assert tuple(stage1.shape) == (1, *want, 3)
    latent = control["samples"].shape
    assert latent == center["samples"].shape
    assert all(side * 4 % 64 == 0 for side in latent[-2:])
    assert tuple(demo.decode(demo.vae, control).result[0].shape) == (1, *want, 3)


@pytest.mark.parametrize(("channels", "out"), [(1, 3), (2, 4), (3, 3), (4, 4)])
def test_grey_rgb_and_transparent_pictures(demo, channels, out):
    image = picture(2, 20, 30, channels)
    stage1, control, _ = demo.first_stage(demo.vae, demo.supir, image, 2.0).result
    assert tuple(stage1.shape) == (2, 40, 60, out)
    decoded = demo.decode(demo.vae, control).result[0]
    assert tuple(decoded.shape) == (2, 40, 60, out)
    if out == 4:
        small = image[..., -1:].movedim(-1, 1)
        want = torch.nn.functional.interpolate(small, scale_factor=2, mode="bicubic")[:, 0]
        assert (decoded[..., 3] - want).abs().mean() < 0.05
        assert torch.equal(decoded[..., 3], stage1[..., 3])


def test_a_batch_equals_its_pictures_one_by_one(demo):
    image = picture(3, 40, 50, 3)
    whole = demo.first_stage(demo.vae, demo.supir, image, 1.0).result
    for k in range(3):
        single = demo.first_stage(demo.vae, demo.supir, image[k : k + 1], 1.0).result
        assert torch.equal(whole[0][k : k + 1], single[0])
        for a, b in zip(whole[1:], single[1:], strict=True):
            assert torch.equal(a["samples"][k : k + 1], b["samples"])


def test_control_is_the_denoise_encoders_and_the_vae_is_untouched(demo):
    from dataclasses import replace

    other = {k: v.float() * 1.1 for k, v in demo.supir.denoise_encoder.items()}
    image = picture(1, 64, 64, 3)
    before = demo.encode(demo.vae, image).result[0]["samples"]
    own = demo.first_stage(demo.vae, demo.supir, image, 1.0).result[1]["samples"]
    changed = replace(demo.supir, denoise_encoder=other)
    moved = demo.first_stage(demo.vae, changed, image, 1.0).result[1]["samples"]
    assert not torch.allclose(own, moved, atol=1e-3)
    assert (own - before).abs().max() < 0.05, "the demo's denoise encoder is its encoder in fp16"
    assert torch.equal(demo.encode(demo.vae, image).result[0]["samples"], before)


def test_a_file_without_denoise_encoder_uses_the_vaes_and_says_so(demo):
    from dataclasses import replace

    image = picture(1, 64, 64, 3)
    bare = replace(demo.supir, denoise_encoder=None)
    out = demo.first_stage(demo.vae, bare, image, 1.0)
    assert "no denoise encoder" in out.ui["text"][0]
    assert torch.equal(out.result[1]["samples"], demo.encode(demo.vae, image).result[0]["samples"])


def test_encode_then_decode_keeps_the_size(demo):
    latent = demo.encode(demo.vae, picture(1, 33, 47, 4)).result[0]
    assert tuple(demo.decode(demo.vae, latent).result[0].shape) == (1, 33, 47, 4)


def test_a_resized_latent_is_cut_in_proportion(demo):
    latent = demo.encode(demo.vae, picture(1, 33, 47, 3)).result[0]
    bigger = {
        **latent,
        "samples": torch.nn.functional.interpolate(latent["samples"], scale_factor=2),
    }
    assert tuple(demo.decode(demo.vae, bigger).result[0].shape) == (1, 66, 94, 3)


def test_the_plan_of_a_decode_names_the_picture_that_comes_out(demo):
    latent = demo.encode(demo.vae, picture(1, 40, 50, 3)).result[0]
    plan = demo.decode(demo.vae, latent).ui["supir_xpu"][0]["plan"]
    assert plan["output_px"] == [50, 40]
    assert plan["latent"] == [16, 16]


def test_a_tiny_picture_keeps_a_pixel_when_its_latent_is_made_smaller(demo):
    latent = demo.encode(demo.vae, picture(1, 1, 1, 3)).result[0]
    latent["samples"] = latent["samples"][..., ::4, ::4]
    assert tuple(demo.decode(demo.vae, latent).result[0].shape) == (1, 1, 1, 3)


def test_a_reshaped_latent_is_decoded_whole_and_says_so(demo):
    latent = demo.encode(demo.vae, picture(1, 33, 70, 3)).result[0]
    turned = {**latent, "samples": latent["samples"].transpose(2, 3).contiguous()}
    out = demo.decode(demo.vae, turned)
    assert tuple(out.result[0].shape) == (1, 128, 64, 3)
    assert "reshaped" in out.ui["text"][0]


def test_transparency_follows_the_pictures_of_a_cut_batch(demo):
    image = picture(3, 20, 20, 4)
    for k in range(3):
        image[k, ..., 3] = 0.1 + 0.4 * k
    latent = demo.encode(demo.vae, image).result[0]
    last = {**latent, "samples": latent["samples"][2:], "batch_index": [2]}
    assert abs(demo.decode(demo.vae, last).result[0][..., 3].mean().item() - 0.9) < 1e-3
    joined = {**latent, "samples": latent["samples"][:2]}
    out = demo.decode(demo.vae, joined)
    assert out.result[0].shape[-1] == 3
    assert "transparency is left out" in out.ui["text"][0]


def test_a_mask_of_the_picture_is_padded_not_stretched(demo):
    image = picture(1, 65, 65, 3)
    _, control, center = demo.first_stage(demo.vae, demo.supir, image, 1.0).result
    mask = torch.zeros(1, 1, 65, 65)
    mask[..., 33:] = 1.0
    out = demo.run_latent(control={**control, "noise_mask": mask}, center=center, steps=2)
    changed = ((out - center["samples"]).abs().amax((0, 1, 2)) > 1e-3).nonzero().flatten()
    assert 8 <= changed[0] <= 9, "the right half of a picture of 16 cells begins at cell 8"


def test_color_fix_moves_the_mean_color_to_the_reference(demo):
    image = picture(2, 40, 40, 3) * 0.3
    reference = 0.6 + 0.2 * picture(1, 40, 40, 3, seed=4)
    far = (image.mean((0, 1, 2)) - reference.mean((0, 1, 2))).abs().max()
    for method in ("wavelet", "adain"):
        fixed = demo.color_fix(image, reference, method).result[0]
        near = (fixed.mean((0, 1, 2)) - reference.mean((0, 1, 2))).abs().max()
        assert near < 0.1 * far
        assert fixed.min() >= 0.0
        assert fixed.max() <= 1.0
    assert torch.equal(demo.color_fix(image, reference, "none").result[0], image)


def test_color_fix_takes_a_reference_of_another_size_and_keeps_alpha(demo):
    image = picture(1, 40, 40, 4)
    fixed = demo.color_fix(image, picture(1, 20, 25, 3), "wavelet").result[0]
    assert tuple(fixed.shape) == (1, 40, 40, 4)
    assert torch.equal(fixed[..., 3], image[..., 3])
