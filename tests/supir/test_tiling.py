"""Tiles: every cell covered, never empty, equal in size; wrong combinations named."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from supir_xpu.supir.errors import SettingsError, ShapeError
from supir_xpu.supir.prepare import pad, plan_geometry
from supir_xpu.supir.tiling import Window, blend_weights, starts, windows

sides = st.integers(1, 640)  # cells of pictures up to 5120 px


@settings(max_examples=80, deadline=None)
@given(height=sides, width=sides, tile=st.integers(1, 700), data=st.data())
def test_windows_cover_every_cell_with_positive_weight(height, width, tile, data):
    # Full coverage is separable, so both sides are checked as intervals.
    overlap = data.draw(st.integers(max(0, tile - 60), tile - 1) | st.integers(0, tile // 2))
    if (height // max(1, tile - overlap)) * (width // max(1, tile - overlap)) > 4000:
        overlap = tile // 4
    places = windows(height, width, tile, overlap)
    assert places
    shape = (min(tile, height), min(tile, width))
    for side, low, high in ((height, 0, 1), (width, 2, 3)):
        spans = sorted({(w[low], w[high]) for w in places})
        assert spans[0][0] == 0
        assert spans[-1][1] == side
        for (_, end), (start, _) in zip(spans, spans[1:], strict=False):
            assert start <= end, "a gap between two tiles"
    assert all((w.bottom - w.top, w.right - w.left) == shape for w in places)
    assert len(set(places)) == len(places)
    assert places == sorted(places, key=lambda w: (w.top, w.left)), "reading order"
    assert blend_weights(*shape).min() > 0


@pytest.mark.parametrize(
    ("size", "tile", "stride", "want"),
    [
        (64, 128, 64, [0]),  # a 512 px side with tile 1024, stride 512: used to give no tile at all
        (64, 64, 32, [0]),
        (65, 64, 32, [0, 1]),
        (100, 64, 32, [0, 32, 36]),
        (128, 64, 64, [0, 64]),
        (1, 1, 1, [0]),
    ],
)
def test_starts(size, tile, stride, want):
    assert starts(size, tile, stride) == want


@pytest.mark.parametrize(("tile", "overlap"), [(64, 64), (64, 65), (64, -1)])
def test_an_overlap_that_cannot_advance_names_the_input(tile, overlap):
    with pytest.raises(SettingsError, match="tile_overlap_px"):
        windows(100, 100, tile, overlap)


def test_one_cell_less_than_the_tile_is_allowed():
    assert len(windows(70, 64, 64, 63)) == 7


def test_a_tile_of_nothing_names_the_input():
    with pytest.raises(SettingsError, match="tile_px"):
        windows(100, 100, 0, 0)


def test_weights_are_symmetric_and_the_originals_are_half_a_cell_off():
    exact = blend_weights(16, 16)
    assert torch.equal(exact, exact.flip(0))
    assert torch.equal(exact, exact.flip(1))
    original = blend_weights(16, 16, row_offset=0.0)
    assert not torch.equal(original, original.flip(0))
    assert torch.equal(original, original.flip(1))


def test_a_crop_is_a_view():
    x = torch.zeros(1, 4, 10, 10)
    Window(2, 5, 3, 9).crop(x).add_(1.0)
    assert x.sum() == 4 * 3 * 6


@settings(max_examples=200, deadline=None)
@given(width=st.integers(1, 5000), height=st.integers(1, 5000), factor=st.floats(0.01, 8.0))
def test_geometry_is_the_rounded_target_on_a_grid_of_64(width, height, factor):
    size = plan_geometry(width, height, factor)
    assert size.width_px == max(1, round(width * factor))
    assert size.height_px == max(1, round(height * factor))
    for padded, side in (
        (size.padded_width_px, size.width_px),
        (size.padded_height_px, size.height_px),
    ):
        assert padded % 64 == 0
        assert 0 <= padded - side < 64


@settings(max_examples=100, deadline=None)
@given(height=st.integers(1, 130), width=st.integers(1, 130))
def test_padding_keeps_the_picture_and_invents_no_value(height, width):
    image = torch.rand(1, 1, height, width)
    tall, wide = -(-height // 64) * 64, -(-width // 64) * 64
    out = pad(image, tall, wide)
    assert tuple(out.shape) == (1, 1, tall, wide)
    assert torch.equal(out[..., :height, :width], image)
    assert out.min() >= image.min()
    assert out.max() <= image.max()


@pytest.mark.parametrize(
    ("args", "says", "error"),
    [
        ((0, 5, 1.0), "image is 0x5", ShapeError),
        ((5, 5, 0.0), "upscale_by is 0", SettingsError),
        ((5, 5, float("nan")), "upscale_by is nan", SettingsError),
        ((5, 5, float("inf")), "upscale_by is inf", SettingsError),
        ((12000, 10, 8.0), "Lower upscale_by", SettingsError),
    ],
)
def test_sizes_that_cannot_work_name_the_input(args, says, error):
    with pytest.raises(error, match=says):
        plan_geometry(*args)
