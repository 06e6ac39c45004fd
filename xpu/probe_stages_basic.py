"""Preflight stages 0 to 3: identity, basics, reductions, indexing with a cast. Runs in the child."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .probe_child import Bench

Numbers = Mapping[str, Any]

SMALL_OPS = 100
"""Small operations, each waited for, in stage 1."""

HALVES = ("bfloat16", "float16")


def identity(bench: Bench) -> None:
    """Stage 0: is there such a device, and what is it. Measures the processor first."""
    bench.check("processor rate", lambda: _processor_rate(bench))
    bench.check("torch", lambda: _torch_facts(bench))
    if bench.check("device count", lambda: _count(bench)).get("devices", 0):
        bench.check("device properties", lambda: {"properties": bench.device.properties()})
        bench.check("free memory", lambda: _memory(bench))


def block_flops(size: int) -> float:
    """Return floating-point operations of ``block`` with ``size`` tokens."""
    side = 2 * 9 * 64 * 64 * size  # 3×3 convolution, 64 channels
    dense = 2 * 2 * size * 320 * 1280
    return float(side + dense + 4 * 5 * size * size * 64)


def block_inputs(bench: Bench, size: int) -> list[Any]:
    """Return the inputs of ``block``: tokens, two weights, image, kernel, on the processor."""
    edge = int(size**0.5)
    tensors = (
        bench.random(size, 320),
        bench.random(320, 1280) / 18.0,
        bench.random(1280, 320) / 36.0,
        bench.random(1, 64, edge, size // edge),
        bench.random(64, 64, 3, 3) / 24.0,
    )
    return list(tensors)


def block(torch: Any, inputs: list[Any]) -> Any:
    """Run one block like the model's: convolution, two linear layers, attention with 5 heads."""
    tokens, up, down, image, kernel = inputs
    image = torch.nn.functional.conv2d(image, kernel, padding=1)
    hidden = torch.nn.functional.gelu(tokens @ up) @ down
    heads = hidden.reshape(1, -1, 5, 64).transpose(1, 2)
    mixed = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
    return mixed, image


def seconds_of(run: Callable[[], object], wait: Callable[[], None], least_s: float) -> float:
    """Return seconds per call, after one call to warm up, over at least ``least_s``."""
    run()
    wait()
    calls = 0
    started = time.perf_counter()
    while True:
        run()
        calls += 1
        if calls & (calls - 1) == 0:  # wait at 1, 2, 4, 8, ... calls only
            wait()
            spent = time.perf_counter() - started
            if spent >= least_s or calls >= 4096:
                return spent / calls


def _processor_rate(bench: Bench) -> Numbers:
    size = bench.size(4096, 256)
    with bench.device.host():
        inputs = block_inputs(bench, size)
        least_s = 0.3 if not bench.small else 0.02
        seconds = seconds_of(lambda: block(bench.torch, inputs), lambda: None, least_s)
    return {
        "processor_block_s": seconds,
        "processor_flops_per_s": block_flops(size) / max(seconds, 1e-9),
        "threads": bench.torch.get_num_threads(),
    }


def _torch_facts(bench: Bench) -> Numbers:
    torch = bench.torch
    other = "cpu"
    if torch.cuda.is_available():  # what the host would pick instead
        other = "cuda"
    elif torch.backends.mps.is_available():
        other = "mps"
    folder = Path(str(torch.__file__)).parent
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "compiled": bench.device.is_compiled(),
        "arch_list": bench.device.arch_list(),
        "host_device": other,
        "torch_folder": str(folder),
    }


def _count(bench: Bench) -> Numbers:
    device = bench.device
    if not device.is_compiled():
        return {
            "devices": 0,
            "skipped": "this torch was built without XPU support (for an Intel GPU, install the build from https://download.pytorch.org/whl/xpu)",
        }
    devices = device.count()
    if devices == 0:
        device.start()  # raises the runtime's own reason, if it has one
        return {"devices": 0, "skipped": "the runtime lists no such device"}
    if device.index >= devices:
        return {"devices": 0, "wrong": f"{device.name} was asked for, {devices} listed"}
    return {"devices": devices}


def _memory(bench: Bench) -> Numbers:
    try:
        free, total = bench.device.memory_info()
    except (RuntimeError, AttributeError) as e:
        if isinstance(e, RuntimeError) and "querying the available free memory" not in str(e):
            raise
        return {"skipped": f"free memory is not reported ({e})"}
    return {"free_bytes": free, "total_bytes": total}


def basics(bench: Bench) -> None:
    """Stage 1: copies both ways, an event, many small operations each waited for."""
    numbers = bench.random(64, 64)
    bench.check("copy there and back", lambda: bench.compare(bench.upload(numbers), numbers))
    bench.check("event", lambda: _event(bench))
    bench.check(f"{SMALL_OPS} small operations", lambda: _small_ops(bench))


def _event(bench: Bench) -> Numbers:
    event = bench.device.event()
    if event is None:
        return {"skipped": "this device has no events"}
    event.record()
    event.synchronize()
    bench.device.synchronize()
    return {}


def _small_ops(bench: Bench) -> Numbers:
    value = bench.upload(bench.whole(16, 16))
    with bench.device.host():
        expected = bench.whole(16, 16) + float(SMALL_OPS)
    started = time.perf_counter()
    for _ in range(SMALL_OPS):
        value = value + 1.0
        bench.device.synchronize()
    seconds = (time.perf_counter() - started) / SMALL_OPS
    return {"op_and_sync_s": seconds, **bench.compare(value, expected)}


def reductions(bench: Bench) -> None:
    """Stage 2: sums over every dimension, contiguous and strided; exact, the values are whole."""
    for shape in ((2, 3, 4, 5), (1, 64, 64, 64)):
        values = bench.whole(*shape)
        word = "x".join(map(str, shape))
        for dim in range(len(shape)):
            _reduction(bench, f"sum over dim {dim} of {word}", values, lambda t, d=dim: t.sum(d))
    square = bench.whole(64, 48)
    _reduction(bench, "mean over dim 1 of 64x48", square, lambda t: t.mean(1), 1e-6)
    _reduction(bench, "largest over dim 0 of 64x48", square, lambda t: t.amax(0))
    _reduction(bench, "sum over dim 1 of a transposed 64x48", square, lambda t: t.t().sum(1))
    _reduction(bench, "sum over dim 0 of every second column", square, lambda t: t[:, ::2].sum(0))


def _reduction(
    bench: Bench, name: str, values: Any, run: Callable[[Any], Any], tolerance: float = 0.0
) -> None:
    def attempt(prepare: Callable[[Any], Any]) -> Numbers:
        with bench.device.host():
            expected = run(values)
        return bench.compare(prepare(bench.upload(values)), expected, tolerance)

    def on_processor(tensor: Any) -> Any:
        back = bench.device.download(tensor)
        with bench.device.host():
            result = run(back)
        return bench.upload(result)

    bench.check(
        name,
        lambda: attempt(run),
        dtype="float32",
        ways={
            "contiguous": lambda: attempt(lambda t: run(t.contiguous())),
            "cpu_block": lambda: attempt(on_processor),
        },
    )


def index_cast(bench: Bench) -> None:
    """Stage 3: indexing followed by a cast, and strided slices to every dtype; exact."""
    torch = bench.torch
    base = bench.random(6, 40, dtype=torch.float16)
    _cast(bench, "insert a dim, then to float32", base, lambda t: t[:, None, :].float())
    _cast(bench, "pick rows, then to float32", base, lambda t: t[[4, 0, 2]].float())
    for name in (*HALVES, "float32"):
        dtype = getattr(torch, name)
        _cast(
            bench,
            f"every second value, then to {name}",
            bench.random(6, 40),
            lambda t, d=dtype: t[:, ::2].to(d),
            name if name in HALVES else "",
        )


def _cast(bench: Bench, name: str, values: Any, run: Callable[[Any], Any], dtype: str = "") -> None:
    def attempt(prepare: Callable[[Any], Any]) -> Numbers:
        with bench.device.host():
            expected = run(values)
        return bench.compare(prepare(bench.upload(values)), expected)

    def on_processor(tensor: Any) -> Any:
        back = bench.device.download(tensor)
        with bench.device.host():
            result = run(back)
        return bench.upload(result)

    bench.check(
        name,
        lambda: attempt(run),
        dtype=dtype,
        ways={
            "contiguous": lambda: attempt(lambda t: run(t.contiguous()).contiguous()),
            "cpu_block": lambda: attempt(on_processor),
        },
    )


STAGES: dict[int, Callable[[Any], None]] = {
    0: identity,
    1: basics,
    2: reductions,
    3: index_cast,
}
