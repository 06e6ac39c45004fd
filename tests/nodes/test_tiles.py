"""Tiles and captions: reading order, sizes that agree with the sampler, one caption per tile."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.host


@pytest.fixture
def wide(demo):
    """A picture of 200x90 px: canvas 256x128, latent 64x32 cells of 4 px."""
    image = torch.rand(1, 90, 200, 3, generator=torch.Generator().manual_seed(2))
    return demo.first_stage(demo.vae, demo.supir, image, 1.0).result


def tiles(stage1, control, tile_px, overlap_px):
    from supir_xpu.nodes.tiles import Tiles

    return Tiles.execute(stage1, control, tile_px, overlap_px).result


def test_tiles_are_cut_in_reading_order_and_tell_their_resolved_size(wide):
    stage1, control, _ = wide
    cut, tile_px, overlap_px, count = tiles(stage1, control, 100, 40)
    assert (tile_px, overlap_px) == (100, 40)
    assert count == cut.shape[0] == 2 * 4
    assert tuple(cut.shape[1:]) == (100, 100, 3)
    assert torch.equal(cut[0, :90], stage1[0, :90, :100])
    assert torch.equal(cut[1, :90], stage1[0, :90, 60:160])


def test_untiled_gives_the_whole_canvas_and_minus_one(wide):
    stage1, control, _ = wide
    for asked in (-1, 0, 4096):
        cut, tile_px, _, count = tiles(stage1, control, asked, 0)
        assert (tile_px, count) == (-1, 1)
        assert tuple(cut.shape) == (1, 128, 256, 3)


def test_a_tile_larger_than_one_side_is_clamped_to_it(wide):
    stage1, control, _ = wide
    cut, tile_px, _, count = tiles(stage1, control, 160, 32)
    assert count == 2
    assert tile_px == 160
    assert tuple(cut.shape[1:]) == (128, 160, 3)


def test_picture_and_latent_must_belong_together(demo, wide):
    from supir_xpu.supir.errors import ShapeError

    with pytest.raises(
        ShapeError, match="image is 64x64 px, but latent belongs to a picture of 200x90"
    ):
        tiles(demo.image, wide[1], 100, 40)


def sample_tiled(demo, wide, captions, batch=1):
    _, control, center = wide
    if batch > 1:
        control, center = (
            {**latent, "samples": latent["samples"].repeat(batch, 1, 1, 1)}
            for latent in (control, center)
        )
    positive, _ = demo.condition([demo.clip], ["photo"], ["x"], captions).result
    settings = {"steps": 2, "tile_px": 128, "tile_overlap_px": 0, "restore_cfg": 0.0}
    return demo.run_latent(control=control, center=center, positive=positive, **settings)


def test_one_caption_per_tile_reaches_its_tile_alone(demo, wide):
    same = sample_tiled(demo, wide, [["a cat", "a cat"]])
    shared = sample_tiled(demo, wide, "a cat")
    assert torch.equal(same, shared)
    other = sample_tiled(demo, wide, ["a cat", "a red brick wall"])
    assert torch.equal(other[..., :32], shared[..., :32])
    assert not torch.equal(other[..., 32:], shared[..., 32:])


def test_captions_per_picture_and_per_tile_of_every_picture(demo, wide):
    # Two pictures and two tiles: two captions count as one per picture.
    per_picture = sample_tiled(demo, wide, ["a cat", "a red brick wall"], batch=2)
    first, second = sample_tiled(demo, wide, "a cat"), per_picture[1:]
    assert torch.equal(per_picture[:1], first)
    assert not torch.equal(second, first)
    every = sample_tiled(demo, wide, ["a cat", "a cat", "a red brick wall", "a red brick wall"], 2)
    assert torch.equal(every, per_picture)


def test_captions_of_different_lengths_share_one_conditioning(demo):
    long = " ".join(["very"] * 90)
    positive, _ = demo.condition([demo.clip], ["x"], ["y"], ["short", long]).result
    cond, extra = positive[0]
    assert cond.shape[0] == extra["pooled_output"].shape[0] == 2
    alone, _ = demo.condition([demo.clip], ["x"], ["y"], [long]).result
    assert torch.equal(cond[1:], alone[0][0])


@pytest.mark.parametrize("captions", [None, "", [], [[]]])
def test_no_caption_is_the_prompt_alone(demo, captions):
    positive, _ = demo.condition([demo.clip], ["sharp"], ["blurry"], captions).result
    assert torch.equal(positive[0][0], demo.positive[0][0])
