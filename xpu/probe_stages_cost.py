"""Preflight stages 7 to 9: allocation limit, rates, silence. Runs in the child."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .probe_child import Bench

Numbers = Mapping[str, Any]

SIZES_TENTHS_GIB = (41, 39, 20, 10, 5)
"""Single allocations tried, in tenths of a GiB: above and below the 4 GiB cap of Alchemist-class
devices, then smaller."""

SPARE = 1.5
"""Free memory must be this many times the allocation, else it is not tried: over-committing hangs
some machines (invoke-ai/InvokeAI PR 9401)."""

REPEATS = 3


def allocation(bench: Bench) -> None:
    """Stage 7: the largest single allocation that can be written and read at both ends."""
    unit = bench.size(2**30 // 10, 2**20 // 10)
    free = int(bench.facts.get("free_bytes") or 0)
    for tenths in SIZES_TENTHS_GIB:
        if tenths > 40 and bench.facts.get("is_integrated"):
            continue
        size = tenths * unit
        word = f"{size} bytes" if bench.small else f"{size / 2**30:.2f} GiB"
        numbers = bench.check(
            f"allocate {word}{' (above the limit)' if tenths > 40 else ''}",
            lambda size=size: _allocate(bench, size, free),
        )
        if tenths < 40 and numbers.get("allocated"):
            return  # the smaller ones can only work too


def _allocate(bench: Bench, size: int, free: int) -> Numbers:
    if free < SPARE * size:
        return {"skipped": f"{free} bytes are known to be free", "size": size}
    torch = bench.torch
    tensor = torch.empty(size, dtype=torch.uint8, device=bench.device.name)
    marks = bench.whole(64).to(torch.uint8)
    there = bench.upload(marks)
    tensor[:64] = there
    tensor[-64:] = there.flip(0)
    head = bench.compare(tensor[:64], marks)
    with bench.device.host():
        mirrored = marks.flip(0)
    tail = bench.compare(tensor[-64:], mirrored)
    del tensor
    bench.device.synchronize()
    if "wrong" in head or "wrong" in tail:
        return {"wrong": "the first or last bytes did not come back as written", "size": size}
    return {"allocated": size, "size": size}


def economics(bench: Bench) -> None:
    """Stage 8: what a block, a byte, a launch, a wait and a copy cost."""
    bench.check("block rate", lambda: _block(bench))
    bench.check("memory rate", lambda: _bandwidth(bench))
    bench.check("launch and wait", lambda: _latency(bench))
    bench.check("copy rates", lambda: _copies(bench))


def _block(bench: Bench) -> Numbers:
    basic = sys.modules["probe_stages_basic"]  # loaded by the child
    size = bench.size(4096, 256)
    known = bench.facts.get("dtypes") or ("float32",)
    dtype = next((d for d in ("bfloat16", "float16") if d in known and not bench.small), "float32")
    element = getattr(bench.torch, dtype)
    inputs = [bench.upload(t.to(element)) for t in basic.block_inputs(bench, size)]
    seconds = basic.seconds_of(
        lambda: basic.block(bench.torch, inputs), bench.device.synchronize, _least(bench)
    )
    flops = basic.block_flops(size) / max(seconds, 1e-9)
    return {"block_s": seconds, "flops_per_s": flops, "block_dtype": dtype}


def _least(bench: Bench) -> float:
    return 0.02 if bench.small else 0.3


def _bandwidth(bench: Bench) -> Numbers:
    basic = sys.modules["probe_stages_basic"]
    count = bench.size(2**25, 2**16)
    a = bench.upload(bench.whole(2**16).repeat(count // 2**16))
    seconds = basic.seconds_of(lambda: a + a, bench.device.synchronize, _least(bench))
    return {"bw_bytes_per_s": 3 * 4 * count / max(seconds, 1e-9)}  # two reads, one write


def _latency(bench: Bench) -> Numbers:
    a = bench.upload(bench.whole(16))
    count = bench.size(500, 50)
    bench.device.synchronize()
    started = time.perf_counter()
    for _ in range(count):
        a = a + 1.0
    launched = time.perf_counter()
    bench.device.synchronize()
    for _ in range(count):
        a = a + 1.0
        bench.device.synchronize()
    waited = time.perf_counter()
    launch_s = (launched - started) / count
    return {"launch_s": launch_s, "sync_s": max((waited - launched) / count - launch_s, 0.0)}


def _copies(bench: Bench) -> Numbers:
    count = bench.size(2**24, 2**14)
    with bench.device.host():
        here = bench.torch.ones(count)
    rates: dict[str, float] = {}
    there = bench.upload(here)
    for key, run in (
        ("h2d_bytes_per_s", lambda: bench.upload(here)),
        ("d2h_bytes_per_s", lambda: bench.device.download(there)),
    ):
        run()
        bench.device.synchronize()
        started = time.perf_counter()
        for _ in range(3):
            run()
        bench.device.synchronize()
        rates[key] = 3 * 4 * count / max(time.perf_counter() - started, 1e-9)
    return rates


def silence(bench: Bench) -> None:
    """Stage 9: the same work gives the same bits, and releasing the cache damages nothing."""
    functional = bench.torch.nn.functional
    edge = bench.size(512, 64)
    tokens = bench.size(1764, 196)
    known = bench.facts.get("dtypes") or ("float32",)
    dtype = next((d for d in ("bfloat16", "float16") if d in known), "float32")
    element = getattr(bench.torch, dtype)
    matrix = bench.random(edge, edge, dtype=element)
    heads = bench.random(2, 10, tokens, 64, dtype=element)
    image = bench.random(2, 64, 32, 32, dtype=element)
    kernel = bench.random(64, 64, 3, 3, dtype=element)
    _repeat(bench, "matmul", [matrix], lambda t: t @ t)
    _repeat(bench, "softmax", [matrix], lambda t: t.float().softmax(-1))
    _repeat(bench, "convolution", [image, kernel], lambda i, k: functional.conv2d(i, k, padding=1))
    _repeat(bench, "attention", [heads], lambda t: functional.scaled_dot_product_attention(t, t, t))
    bench.check(
        "result after releasing the cache",
        lambda: _after_release(bench, read_first=False),
        ways={"read_back": lambda: _after_release(bench, read_first=True)},
    )


def _repeat(bench: Bench, name: str, inputs: list[Any], run: Callable[..., Any]) -> None:
    def attempt() -> Numbers:
        tensors = [bench.upload(t) for t in inputs]
        first = bench.device.download(run(*tensors))
        for _ in range(REPEATS - 1):
            again = bench.compare(run(*tensors), first)
            if "wrong" in again:
                text = (
                    f"the same work gave other numbers (difference {again.get('error', 1.0):.1e})"
                )
                return {"wrong": text, **{k: v for k, v in again.items() if k == "error"}}
        return {}

    bench.check(f"{name}, {REPEATS} times", attempt)


def _after_release(bench: Bench, *, read_first: bool) -> Numbers:
    """Source of the failure looked for: pytorch issue 197520, all values NaN after empty_cache."""
    values = bench.whole(256, 256)
    with bench.device.host():
        expected = (values + 1.0) * 2.0 - values
    there = bench.upload(values)
    result = (there + 1.0) * 2.0 - there
    bench.device.synchronize()
    if read_first:
        bench.device.download(result.reshape(-1)[:1])
    bench.device.empty_cache()
    return bench.compare(result, expected)


STAGES: dict[int, Callable[[Any], None]] = {7: allocation, 8: economics, 9: silence}
