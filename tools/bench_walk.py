"""What the walk over the UNet costs, next to the host's own forward and the host's SUPIR parts.

The demo model's width, fp32 on the CPU, one thread, the same weights on both sides. Work is counted
as operators that are neither views nor allocations; time is process CPU time of pairs that take
turns. ComfyUI's SUPIR is assembled from its parts, as its own class is of one width only.

The counts and bytes say what a device would be asked to do; the times are this processor's.
"""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from benchmark_table import Row
from the_pack import load_with_host

TITLE = "UNet walk and SUPIR step"
DESCRIPTION = """\
The demo model's width, fp32 on the CPU, one thread, the same weights on both sides. Launches are
operators that are neither views nor allocations; they and the bytes say what a device would be
asked to do, the times are this processor's (process CPU time of pairs that take turns). "Reference"
is the host's own forward for the plain walk, and the host's SUPIR, assembled from its parts, for
SUPIR. Where the operators differ: ours copies the hint once for each conditioning (repeat), adds it
out of place, lets the cross adapters scale and add in one operator (mul), and at scale 1 does not
mix with the unmodified skips, which would return the modified ones (lerp, cat)."""
LATENT = (64, 64)
TINY_LATENT = (8, 8)
PAIRS = 24
TINY_PAIRS = 120
WARM_UP = 3
RESAMPLES = 4000
SCALES = (1.0, 0.9)
SEED = 20

Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Bench:
    """The pack's modules and the networks under test."""

    counting: Any
    injection: Any
    work_key: str
    wrapper_kind: str
    model: Any
    nets: Any

    @property
    def unet(self) -> Any:
        return self.model.model.diffusion_model


def make_bench() -> Bench:
    """Load the demo's UNet and its SUPIR networks in fp32, with layers as a loaded file has them."""
    load_with_host("supir.striped")
    import comfy.ops
    import folder_paths
    from comfy.patcher_extension import WrappersMP
    from supir_xpu.nodes import demo
    from supir_xpu.supir import injection
    from supir_xpu.supir.constants import WORK_KEY
    from supir_xpu.xpu import counting

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        folder_paths.set_temp_directory(folder)
        weights = demo.load_demo_supir().patcher.model.state_dict()
        weights = {key: value.float().clone() for key, value in weights.items()}
    options = {"operations": comfy.ops.manual_cast, "dtype": torch.float32, "device": "cpu"}
    nets = injection.SupirNets(demo.demo_dims(), **options)
    nets.load_state_dict(weights, strict=True)
    kind = WrappersMP.DIFFUSION_MODEL
    model = demo.load_demo_model()
    return Bench(counting, injection, WORK_KEY, kind, model, nets.requires_grad_(False))


def network_inputs(size: tuple[int, int], batch: int) -> tuple[torch.Tensor, ...]:
    """x, timesteps, context and y of one call for a batch of pictures or conditionings."""
    generator = torch.Generator().manual_seed(SEED)
    return (
        torch.randn(batch, 4, *size, generator=generator),
        torch.full((batch,), 500.0),
        torch.randn(batch, 77, 64, generator=generator),
        torch.randn(batch, 1600, generator=generator),
    )


def host_call(bench: Bench, inputs: tuple[torch.Tensor, ...]) -> Call:
    """The host's own forward."""
    return lambda: bench.unet(*inputs, transformer_options={})


def walk_call(bench: Bench, inputs: tuple[torch.Tensor, ...]) -> Call:
    """The walk with nothing injected."""
    hooks = bench.injection.PlainHooks
    return lambda: bench.injection.walk_unet(bench.unet, hooks(), *inputs, None, {})


def our_call(
    bench: Bench, inputs: tuple[torch.Tensor, ...], hint: torch.Tensor, scale: float
) -> Call:
    """The UNet with SUPIR as the Sample node runs it, the attention kernel the host's."""
    wrapper = bench.injection.make_wrapper(bench.nets)
    state = bench.injection.InjectedState(hint, scale)
    options = {
        "wrappers": {bench.wrapper_kind: {bench.work_key: [wrapper]}},
        bench.work_key: {"state": state},
    }
    return lambda: bench.unet(*inputs, transformer_options=dict(options))


def core_call(
    bench: Bench, inputs: tuple[torch.Tensor, ...], hint: torch.Tensor, scale: float
) -> Call | None:
    """The UNet with ComfyUI's SUPIR on the same weights; None if this ComfyUI has none."""
    try:
        from comfy.ldm.supir.supir_patch import SUPIRPatch
    except ModuleNotFoundError:
        return None
    parts = core_parts(bench)

    class Patcher:
        """What the host's patch asks of a patcher."""

        model = parts

    model = bench.model.clone()
    SUPIRPatch(Patcher, parts.project_modules, hint, scale, scale).register(model)
    options = model.model_options["transformer_options"]
    return lambda: bench.unet(*inputs, transformer_options=dict(options))


def core_parts(bench: Bench) -> torch.nn.Module:
    """ComfyUI's control network and adapters at the demo's width, holding our weights."""
    import comfy.ops
    from comfy.ldm.supir.supir_modules import GLVControl, ZeroCrossAttn, ZeroSFT

    dims = bench.nets.dims.control
    width = dims.model_channels
    options = {"operations": comfy.ops.manual_cast, "dtype": torch.float32, "device": "cpu"}
    control = GLVControl(
        model_channels=width,
        channel_mult=(1, 1, 1),
        transformer_depth=(1, 1, dims.middle_depth),
        context_dim=dims.context_dim,
        adm_in_channels=dims.adm_in_channels,
        **options,
    )
    adapters: list[torch.nn.Module] = []
    for one in bench.nets.dims.adapters:
        if hasattr(one, "skip_channels"):
            sizes = (one.control_channels, one.skip_channels, one.decoder_channels)
            adapters.append(ZeroSFT(*sizes, **options))
        else:
            adapters.append(ZeroCrossAttn(one.control_channels, one.query_channels, **options))
    parts = torch.nn.Module()
    parts.control_model = control
    parts.project_modules = torch.nn.ModuleList(adapters)
    parts.load_state_dict(bench.nets.state_dict(), strict=True)
    return parts.requires_grad_(False)


def difference(ours: Counter[str], theirs: Counter[str]) -> str:
    """Operators that one side calls more often, in words."""
    names = sorted({*ours, *theirs})
    changed = {name: ours[name] - theirs[name] for name in names if ours[name] != theirs[name]}
    return ", ".join(f"{name} {by:+d}" for name, by in changed.items()) or "the same operators"


def row(what: str, ours: object, reference: object, unit: str, note: str) -> Row:
    return {"what": what, "ours": ours, "reference": reference, "unit": unit, "note": note}


def count_rows(bench: Bench, what: str, reference: str, ours: Call, theirs: Call) -> list[Row]:
    """Launches and peak live bytes of both, and how far their results are apart."""
    count = bench.counting.count
    (mine, result), (other, expected) = count(ours), count(theirs)
    note = f"against {reference}: {difference(mine.ops, other.ops)}"
    gap = float((result - expected).abs().max())
    mib = [round(c.live.peak / 2**20, 2) for c in (mine, other)]
    return [
        row(f"{what}: launches", mine.launches, other.launches, "operators", note),
        row(f"{what}: peak live", *mib, "MiB", "tensors made during the call, weights excluded"),
        row(f"{what}: result", f"{gap:.1e}", 0, "largest difference", ""),
    ]


def cpu_seconds(call: Call) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started


def pairs(first: Call, second: Call, count: int) -> list[tuple[float, float]]:
    """CPU seconds of both, taking turns; who starts alternates."""
    for _ in range(WARM_UP):
        first(), second()
    measured: list[tuple[float, float]] = []
    gc.collect()
    gc.disable()
    try:
        for i in range(count):
            if i % 2:
                late, early = cpu_seconds(second), cpu_seconds(first)
                measured.append((early, late))
            else:
                measured.append((cpu_seconds(first), cpu_seconds(second)))
    finally:
        gc.enable()
    return measured


def interval(values: list[float]) -> tuple[float, float, float]:
    """The median with its 95 % bootstrap interval: (lower, median, upper)."""
    generator = torch.Generator().manual_seed(SEED)
    picks = torch.randint(len(values), (RESAMPLES, len(values)), generator=generator)
    medians = torch.tensor(values, dtype=torch.float64)[picks].quantile(0.5, dim=1)
    lower, upper = medians.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return lower, statistics.median(values), upper


def block_row(bench: Bench) -> Row:
    """What the walk adds or saves per block, on a latent so small that little else counts."""
    inputs = network_inputs(TINY_LATENT, 1)
    unet = bench.unet
    blocks = len(unet.input_blocks) + 1 + len(unet.output_blocks)
    taken = pairs(walk_call(bench, inputs), host_call(bench, inputs), TINY_PAIRS)
    ours, theirs = (statistics.median(side) * 1e6 / blocks for side in zip(*taken, strict=True))
    low, mid, high = interval([(a - b) * 1e6 / blocks for a, b in taken])
    note = f"difference {mid:+.1f} µs (95 % interval {low:+.1f} to {high:+.1f}), {TINY_PAIRS} pairs"
    what = f"plain walk, {TINY_LATENT[0]}x{TINY_LATENT[1]} latent: time"
    return row(what, round(ours, 1), round(theirs, 1), "µs per block", note)


def ratio_row(what: str, ours: Call, theirs: Call) -> Row:
    """Seconds of both, and the ratio of the pairs with its interval."""
    taken = pairs(ours, theirs, PAIRS)
    mine, other = (round(statistics.median(side) * 1e3, 1) for side in zip(*taken, strict=True))
    low, mid, high = interval([a / b for a, b in taken])
    note = f"ratio {mid:.3f} (95 % interval {low:.3f} to {high:.3f}), {PAIRS} pairs"
    return row(f"{what}: time", mine, other, "ms", note)


def run() -> list[Row]:
    """Measure everything; one row per figure."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            return _rows(make_bench())
    finally:
        torch.set_num_threads(threads)


def _rows(bench: Bench) -> list[Row]:
    inputs = network_inputs(LATENT, 2)
    size = f"{LATENT[0]}x{LATENT[1]} latent"
    walk, host = walk_call(bench, inputs), host_call(bench, inputs)
    rows = count_rows(bench, f"plain walk, {size}", "the host's forward", walk, host)
    rows += [block_row(bench), ratio_row(f"plain walk, {size}", walk, host)]
    generator = torch.Generator().manual_seed(SEED + 1)
    hint = torch.randn(1, 4, *LATENT, generator=generator)
    for scale in SCALES:
        what = f"SUPIR at scale {scale:g}, {size}"
        ours, core = our_call(bench, inputs, hint, scale), core_call(bench, inputs, hint, scale)
        if core is None:
            rows.append(row(what, "", "", "", "this ComfyUI has no SUPIR of its own"))
            continue
        rows += count_rows(bench, what, "ComfyUI's SUPIR", ours, core)
        rows.append(ratio_row(what, ours, core))
    return rows


if __name__ == "__main__":
    from benchmark_table import show

    print(show(TITLE, run()))
