"""Preflight stages 4 to 6: dense layers, norms, attention. Runs in the child.

Every result is compared with the processor's, made from the same rounded inputs in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .probe_child import Bench

Numbers = Mapping[str, Any]
Op = Callable[..., Any]

TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 3e-2}
"""Largest difference as a part of the largest value (our choice: several roundings of the dtype;
a wrong kernel is off by far more)."""

ATTENTION_TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 3e-2}

FUSED_PART = 0.5
"""Extra memory below this part of one score matrix means that no score matrix was made."""

SAMPLED_ROWS = 48
"""Query rows whose result is recomputed on the processor; rows of attention are independent."""


def _usable(bench: Bench) -> list[str]:
    """Return the dtypes to test: those the device has without emulation, float32 first."""
    known = bench.facts.get("dtypes") or ("float32", "bfloat16", "float16")
    return [name for name in ("float32", "bfloat16", "float16") if name in known]


def _op(
    bench: Bench,
    name: str,
    inputs: list[Any],
    run: Op,
    dtype: str,
    tolerance: float,
    prepare: Callable[[Any], Any] = lambda t: t,
) -> None:
    """Check one operation in one dtype, with the usual ways around a failure."""
    torch = bench.torch
    with bench.device.host():
        rounded = [t.to(getattr(torch, dtype)) for t in inputs]
        expected = run(*[t.float() for t in rounded])

    def compare(made: Callable[[list[Any]], Any], *, widen: bool = False) -> Numbers:
        with bench.device.host():  # a model in another dtype is loaded so, not cast on the device
            given = [t.float() for t in rounded] if widen else rounded
        return bench.compare(made([bench.upload(t) for t in given]), expected, tolerance)

    def on_processor(tensors: list[Any]) -> Any:
        back = [bench.device.download(t) for t in tensors]
        with bench.device.host():
            result = run(*[t.float() for t in back])
        return bench.upload(result)

    ways: dict[str, Callable[[], Numbers]] = {
        "contiguous": lambda: compare(lambda ts: run(*[t.contiguous() for t in ts])),
    }
    if dtype != "float32":
        ways["dtype"] = lambda: compare(lambda ts: run(*ts), widen=True)
    ways["cpu_block"] = lambda: compare(on_processor)
    bench.check(
        f"{name} {dtype}",
        lambda: compare(lambda ts: run(*[prepare(t) for t in ts])),
        dtype=dtype,
        ways=ways,
    )


def dense(bench: Bench) -> None:
    """Stage 4: matmul, batched matmul, convolutions, contiguous and channels-last."""
    torch = bench.torch
    functional = torch.nn.functional
    edge = bench.size(640, 96)
    side = bench.size(64, 16)
    for dtype in _usable(bench):
        limit = TOLERANCE[dtype]
        _op(
            bench,
            "matmul",
            [bench.random(edge, edge), bench.random(edge, edge, seed=1)],
            torch.matmul,
            dtype,
            limit,
        )
        batch = [bench.random(8, 64, side), bench.random(8, side, 64, seed=1)]
        _op(bench, "batched matmul", batch, torch.bmm, dtype, limit)
        for kernel in (3, 1):
            image = [bench.random(2, 64, side, side), bench.random(64, 64, kernel, kernel, seed=1)]
            run = _convolution(functional, kernel // 2)
            for layout in ("contiguous", "channels last"):
                name = f"convolution {kernel}x{kernel} {layout}"
                _op(bench, name, image, run, dtype, limit, _layout(torch, layout))


def _convolution(functional: Any, padding: int) -> Op:
    return lambda image, kernel: functional.conv2d(image, kernel, padding=padding)


def _layout(torch: Any, layout: str) -> Callable[[Any], Any]:
    if layout == "contiguous":
        return lambda t: t
    return lambda t: t.to(memory_format=torch.channels_last)


def norms(bench: Bench) -> None:
    """Stage 5: softmax at the job's widths in float32, group and layer norm, activations."""
    functional = bench.torch.nn.functional
    widths = [64, 77, 129, 513, 1025]  # 2^k + 1: rows were wrong there (torch-xpu-ops issue 4772)
    for width in [*widths, bench.size(7056, 2049), bench.size(33856, 4097)]:
        rows = [bench.random(32, width) * 4.0]
        _op(bench, f"softmax over {width}", rows, lambda t: t.softmax(-1), "float32", 1e-5)
    side = bench.size(64, 16)
    for dtype in _usable(bench):
        limit = TOLERANCE[dtype]
        image = [bench.random(2, 320, side, side)]
        tokens = [bench.random(2, side * 16, 320)]
        _op(bench, "group norm", image, lambda t: functional.group_norm(t, 32), dtype, limit)
        _op(bench, "layer norm", tokens, lambda t: functional.layer_norm(t, (320,)), dtype, limit)
        _op(bench, "silu", image, functional.silu, dtype, limit)
        _op(bench, "gelu", tokens, functional.gelu, dtype, limit)


def attention(bench: Bench) -> None:
    """Stage 6: attention at the job's shapes; the memory it takes tells fused from math."""
    middle, large = bench.size(1764, 196), bench.size(7056, 441)
    for dtype in [name for name in _usable(bench) if name != "float32"] or ["float32"]:
        _attention(bench, dtype, 20, middle, middle, 64)
        _attention(bench, dtype, 10, large, large, 64)
        _attention(bench, dtype, 10, large, 77, 64)
        _attention(bench, dtype, 1, middle, middle, 512)


def _attention(bench: Bench, dtype: str, heads: int, tokens: int, keys: int, width: int) -> None:
    torch = bench.torch
    batch = 2 if heads > 1 else 1
    element = getattr(torch, dtype)
    q = bench.random(batch, heads, tokens, width, dtype=element)
    k = bench.random(batch, heads, keys, width, dtype=element, seed=1)
    v = bench.random(batch, heads, keys, width, dtype=element, seed=2)
    with bench.device.host():
        step = max(1, tokens // SAMPLED_ROWS)
        rows = torch.cat((torch.arange(0, tokens, step), torch.tensor([tokens - 1])))
        scores = (q[:, :, rows].float() * width**-0.5) @ k.float().transpose(-1, -2)
        expected = scores.softmax(-1) @ v.float()

    def compare(run: Op, *, widen: bool = False) -> Numbers:
        with bench.device.host():
            given = [t.float() for t in (q, k, v)] if widen else [q, k, v]
        tensors = [bench.upload(t) for t in given]
        before = bench.device.reset_peak()
        result = run(*tensors)
        bench.device.synchronize()
        extra = bench.device.peak() - before if before >= 0 else -1
        found = bench.device.download(result)
        with bench.device.host():
            sampled = found[:, :, rows]
            finite = bool(torch.isfinite(found).all())
        numbers = dict(bench.judge(sampled, expected, ATTENTION_TOLERANCE[dtype]))
        if not finite:
            numbers["wrong"] = "some values are NaN or infinite"
        scores_bytes = batch * heads * tokens * keys * q.element_size()
        output_bytes = q.numel() * q.element_size()
        numbers["kernel"] = _kernel(extra, output_bytes, scores_bytes, keys)
        numbers.update(dim_head=width, extra_bytes=extra, scores_bytes=scores_bytes)
        return numbers

    fused = torch.nn.functional.scaled_dot_product_attention
    ways: dict[str, Callable[[], Numbers]] = {"math": lambda: compare(_math_pieces(torch))}
    if dtype != "float32":
        ways["dtype"] = lambda: compare(fused, widen=True)
    ways["cpu_block"] = lambda: compare(_on_processor(bench, fused))
    name = f"attention {heads} heads, {tokens} x {keys}, width {width}, {dtype}"
    bench.check(name, lambda: compare(fused), dtype=dtype, ways=ways)


def _kernel(extra: int, output_bytes: int, scores_bytes: int, keys: int) -> str:
    """Name what ran: 77 keys say nothing, their score matrix is smaller than the output."""
    if extra < 0 or keys < 128:
        return "unknown"
    return "fused" if extra - output_bytes < FUSED_PART * scores_bytes else "math"


def _math_pieces(torch: Any, rows: int = 512) -> Op:
    """Return exact attention in pieces of queries, softmax in float32."""

    def run(q: Any, k: Any, v: Any) -> Any:
        scale = q.shape[-1] ** -0.5
        out = torch.empty_like(q)
        for start in range(0, q.shape[2], rows):
            scores = ((q[:, :, start : start + rows] * scale) @ k.transpose(-1, -2)).float()
            out[:, :, start : start + rows] = scores.softmax(-1).to(v.dtype) @ v
        return out

    return run


def _on_processor(bench: Bench, run: Op) -> Op:
    def moved(*tensors: Any) -> Any:
        back = [bench.device.download(t) for t in tensors]
        with bench.device.host():
            result = run(*[t.float() for t in back])
        return bench.upload(result)

    return moved


STAGES: dict[int, Callable[[Any], None]] = {4: dense, 5: norms, 6: attention}
