"""The counting rule, and the true-size counts it gives for one sampling step."""

from __future__ import annotations

import pytest
import torch
from supir_xpu.xpu.counting import count


def test_traffic_reads_operands_and_writes_results():
    a, b = torch.ones(4, 8), torch.ones(8, 2)
    out = torch.empty(4, 2)
    cases = [
        (lambda: a @ b, 4 * (32 + 16 + 8)),
        (lambda: torch.mm(a, b, out=out), 4 * (32 + 16 + 8)),
        (lambda: out.copy_(torch.empty(4, 2)), 4 * (8 + 8)),
        (lambda: out.mul_(2.0), 4 * (8 + 8)),
        (lambda: out.fill_(2.0), 4 * 8),
        (lambda: a.view(32)[3:5].reshape(2, 1), 0),
    ]
    for run, moved in cases:
        assert count(run)[0].bytes_moved == moved


def test_arithmetic():
    x, w = torch.ones(2, 3, 8, 8), torch.ones(5, 3, 3, 3)
    found, _ = count(lambda: torch.nn.functional.conv2d(x, w, padding=1))
    assert found.flops == 2 * (2 * 5 * 8 * 8) * (3 * 3 * 3)
    q = torch.ones(2, 3, 10, 4)
    found, _ = count(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q))
    assert found.flops == 4 * 2 * 3 * 10 * 10 * 4
    assert found.attention == {(2, 3, 10, 10, 4): 1}


def test_peak_of_live_bytes():
    def run():
        a = torch.zeros(1000)
        b = a + 1
        del a
        return (b + 1).sum()

    found, _ = count(run)
    assert found.live.peak == 8004  # b, b + 1 and the sum
    assert found.largest == (4000, "zeros", (1000,))


@pytest.fixture(scope="module")
def bench():
    """The benchmark's functions; ComfyUI's choice of attention is put back afterwards."""
    from comfy.cli_args import args
    from comfy.ldm.modules import attention
    from comfy.ldm.supir import supir_modules
    from supir_xpu.tools import bench_attention

    kept = (attention.optimized_attention, supir_modules.optimized_attention)
    flag = args.use_pytorch_cross_attention
    yield bench_attention
    attention.optimized_attention, supir_modules.optimized_attention = kept
    args.use_pytorch_cross_attention = flag


@pytest.fixture(scope="module")
def step(bench):
    """One true-size SDXL + SUPIR step at 368x368, counted call by call."""

    model = bench.make_model("supir")
    fused, shapes = bench.count_with(model(368, 368, 2), "fused", track_live=False)
    base = {shape: bench.count_call(shape, "fused") for shape in shapes}

    def with_policy(attention):
        found = {shape: bench.count_call(shape, attention) for shape in shapes}
        launches = sum(n * (found[s].launches - base[s].launches) for s, n in shapes.items())
        moved = sum(n * (found[s].bytes_moved - base[s].bytes_moved) for s, n in shapes.items())
        scores = max(c.scores for c in found.values())
        return fused.launches + launches, fused.bytes_moved + moved, scores

    return shapes, with_policy


@pytest.mark.host
@pytest.mark.core_supir
def test_targets_at_the_largest_latent(step):
    shapes, with_policy = step
    assert shapes.total() == 210
    assert with_policy("fused")[0] == 2628
    loop = with_policy("chunk:512:fp32")
    assert loop[0] == 48438
    planned = with_policy("planned:2048")
    assert planned[0] <= 2800
    math = with_policy("planned:2048:math")
    assert math[0] <= 0.4 * loop[0]
    assert math[1] <= 0.68 * loop[1]
    assert math[2] <= 2**28


@pytest.mark.host
@pytest.mark.core_supir
def test_counting_call_by_call_equals_counting_the_step(bench):
    model = bench.make_model("supir")
    for attention in ("planned:64:math",):
        whole, shapes = bench.count_with(model(64, 64, 2), attention, track_live=False)
        fused, _ = bench.count_with(model(64, 64, 2), "fused", track_live=False)
        parts = fused.launches
        for shape, n in shapes.items():
            ours = bench.count_call(shape, attention).launches
            parts += n * (ours - bench.count_call(shape, "fused").launches)
        assert whole.launches == parts
