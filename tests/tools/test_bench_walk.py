"""The walk's benchmark: what it counts is true, and its statistics are what they claim."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch


@pytest.fixture
def bench_walk(tool, monkeypatch):
    module = tool("bench_walk")
    monkeypatch.setattr(module, "PAIRS", 2)
    monkeypatch.setattr(module, "TINY_PAIRS", 2)
    monkeypatch.setattr(module, "LATENT", (16, 16))
    return module


def test_the_interval_holds_the_median_and_narrows_with_more_values(bench_walk):
    generator = torch.Generator().manual_seed(1)
    few = (1.0 + 0.1 * torch.randn(20, generator=generator)).tolist()
    low, mid, high = bench_walk.interval(few)
    assert low < mid < high
    wide = high - low
    many = (1.0 + 0.1 * torch.randn(2000, generator=generator)).tolist()
    low, mid, high = bench_walk.interval(many)
    assert high - low < wide / 4
    # The median of n normal values has the deviation 1.2533 * sigma / sqrt(n).
    assert high - low == pytest.approx(2 * 1.96 * 1.2533 * 0.1 / 2000**0.5, rel=0.3)
    assert bench_walk.interval([3.0] * 5) == (3.0, 3.0, 3.0)


def test_pairs_alternate_who_starts_and_keep_their_places(bench_walk, monkeypatch):
    calls, spent = [], {"first": 1.0, "second": 2.0}
    monkeypatch.setattr(bench_walk, "cpu_seconds", lambda call: spent[call()])

    def call(name):
        return lambda: calls.append(name) or name

    taken = bench_walk.pairs(call("first"), call("second"), 4)
    assert taken == [(1.0, 2.0)] * 4
    assert calls[2 * bench_walk.WARM_UP :] == [
        *("first", "second", "second", "first", "first", "second", "second", "first")
    ]


@pytest.mark.host
def test_the_walk_adds_no_work_to_the_host_and_supir_none_to_its_parts(bench_walk):
    rows = {row["what"]: row for row in bench_walk.run()}
    launches = rows["plain walk, 16x16 latent: launches"]
    assert launches["ours"] == launches["reference"] > 400
    assert launches["note"].endswith("the same operators")
    assert float(rows["plain walk, 16x16 latent: result"]["ours"]) == 0.0
    assert "pairs" in rows["plain walk, 8x8 latent: time"]["note"]
    if not (Path(os.environ["COMFYUI_ROOT"]) / "comfy" / "ldm" / "supir").is_dir():
        assert rows["SUPIR at scale 1, 16x16 latent"]["note"].startswith("this ComfyUI has no")
        return
    expected = {
        1.0: "add +1, add_ -1, cat -9, lerp -10, mul -2, repeat +1",
        0.9: "add +1, add_ -1, mul -2, repeat +1",
    }
    for scale, operators in expected.items():
        what = f"SUPIR at scale {scale:g}, 16x16 latent"
        counted = rows[f"{what}: launches"]
        assert counted["ours"] <= counted["reference"]
        assert counted["note"] == f"against ComfyUI's SUPIR: {operators}"
        assert float(rows[f"{what}: result"]["ours"]) < 1e-4
        assert rows[f"{what}: peak live"]["ours"] <= rows[f"{what}: peak live"]["reference"]
        assert "ratio" in rows[f"{what}: time"]["note"]
