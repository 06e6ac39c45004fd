"""Time, memory and error of the striped VAE against the untiled network and the host's tiling.

Random weights of the SDXL VAE's width, fp32 on the CPU, one thread, process CPU time, a workspace of
64 MiB. Methods take turns within a round, and ratios are those of a round, so that a slow moment of
the machine hits all of them; the host's tiling is slow and takes part in the first round alone. Peak
resident bytes above the loaded model are taken in a process per case.

Run as

    python tools/bench_vae.py --comfyui PATH [--long] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from the_pack import load_with_host

WORKSPACE_MIB = 64
HOST_TILED = "host tiled"
ROUNDS = 5
PEAK_PX = 768
PEAK_ENV = {  # give freed memory back at once, so that the peak is that of live tensors
    "MALLOC_MMAP_THRESHOLD_": "262144",
    "MALLOC_TRIM_THRESHOLD_": "262144",
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
}


def make_net(
    kind: str,
    ch: int = 128,
    ch_mult: tuple[int, ...] = (1, 2, 4, 4),
    num_res_blocks: int = 2,
    seed: int = 0,
) -> Any:
    """Build ComfyUI's Encoder (kind "encode") or Decoder with seeded random weights."""
    from comfy.ldm.modules.diffusionmodules.model import Decoder, Encoder

    cls = Encoder if kind == "encode" else Decoder
    net = cls(
        ch=ch,
        out_ch=3,
        ch_mult=ch_mult,
        num_res_blocks=num_res_blocks,
        attn_resolutions=[],
        in_channels=3,
        resolution=256,
        z_channels=4,
        double_z=True,
    ).eval()
    fill(net, seed)
    return net


def fill(net: Any, seed: int) -> None:
    """Give every parameter a seeded random value that keeps activations of order one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in net.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            if value.ndim > 1:
                value.copy_(noise / value[0].numel() ** 0.5)
            elif "norm" in name:
                value.copy_(noise * 0.2 + name.endswith("weight"))
            else:
                value.copy_(noise * 0.1)


@contextmanager
def lend(module: Any, like: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Lend weights that are where they are needed."""
    bias = module.bias
    yield module.weight.to(like), None if bias is None else bias.to(like)


def make_input(kind: str, px: int) -> torch.Tensor:
    """Return a picture (or latent) whose content differs from region to region."""
    generator = torch.Generator().manual_seed(1)
    channels, side = (3, px) if kind == "encode" else (4, px // 8)
    x = torch.randn(1, channels, side, side, generator=generator)
    ramp = torch.linspace(0.1, 2.0, side)
    return x * ramp * ramp[:, None]


def methods(kind: str, net: Any, workspace_mib: int) -> dict[str, Callable[[torch.Tensor], Any]]:
    """Return the functions compared, by name."""
    striped = load_with_host("supir.striped")
    run = getattr(striped, kind)

    def by_stripes(polyphase: bool) -> Callable[[torch.Tensor], torch.Tensor]:
        options = striped.StripeOptions(workspace_mib * striped.MIB, lend, polyphase=polyphase)
        return lambda x: run(net, x, options)

    found: dict[str, Callable[[torch.Tensor], Any]] = {"untiled": net}
    found["striped"] = by_stripes(False)
    if kind == "decode":
        found["striped+polyphase"] = by_stripes(True)
    found[HOST_TILED] = lambda x: host_tiled(kind, net, x)
    return found


def host_tiled(kind: str, net: Any, x: torch.Tensor) -> torch.Tensor:
    """Blend three passes of tiles as the host's VAE.decode_tiled_ / encode_tiled_ do by default."""
    import comfy.utils

    side, overlap, scale, channels = (64, 16, 8, 3) if kind == "decode" else (512, 64, 1 / 8, 8)
    out = 0.0
    for tile in ((side // 2, side * 2), (side * 2, side // 2), (side, side)):
        out = out + comfy.utils.tiled_scale(
            x, net, *tile, overlap, upscale_amount=scale, out_channels=channels
        )
    return out / 3.0


def time_methods(kind: str, px: int, rounds: int) -> list[dict[str, Any]]:
    """Time every method on one picture, in turn, and compare it with the untiled result."""
    net, x = make_net(kind), make_input(kind, px)
    compared = methods(kind, net, WORKSPACE_MIB)
    seconds: dict[str, list[float]] = {name: [] for name in compared}
    results: dict[str, torch.Tensor] = {}
    for turn in range(rounds):
        for name, function in compared.items():
            if turn and name == HOST_TILED:
                continue
            start = time.process_time()
            results[name] = function(x)
            seconds[name].append(time.process_time() - start)
    reference = results["untiled"]
    rows: list[dict[str, Any]] = []
    for name, result in results.items():
        error = (result - reference).abs()
        pairs = zip(seconds[name], seconds["untiled"], strict=False)
        ratios = sorted(taken / untiled for taken, untiled in pairs)
        rows.append(
            {
                "job": kind,
                "px": px,
                "method": name,
                "rounds": len(ratios),
                "cpu_s": round(statistics.median(seconds[name]), 2),
                "to_untiled": round(statistics.median(ratios), 3),
                "lowest to highest": f"{ratios[0]:.3f} to {ratios[-1]:.3f}",
                "max_error": f"{error.max().item():.1e}",
                "mean_error": f"{error.mean().item():.1e}",
                "std": round(reference.std().item(), 3),
            }
        )
    return rows


def resident_bytes() -> int:
    """Return the highest resident size of this process so far."""
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss would start at what the parent process held
        lines = status.read_text(encoding="ascii").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        return psutil.Process().memory_info().peak_wset
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def measure_peak(kind: str, px: int, method: str) -> dict[str, Any]:
    """Run one case in a process of its own; return its peak above the loaded model."""
    command = [sys.executable, str(Path(__file__).resolve()), "--case", kind, str(px), method]
    done = subprocess.run(
        command,
        env={**os.environ, **PEAK_ENV},
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def run_case(kind: str, px: int, method: str) -> dict[str, Any]:
    """Measure the peak of one method in this process."""
    torch.set_num_threads(1)
    with torch.inference_mode():
        net = make_net(kind)
        function = methods(kind, net, WORKSPACE_MIB)[method]
        function(make_input(kind, 64))  # kernels, pools and imports are not the method's
        before = resident_bytes()
        function(make_input(kind, px))
    return {"job": kind, "px": px, "method": method, "peak_bytes": resident_bytes() - before}


def run(
    long: bool = False, rounds: int = ROUNDS, report: Callable[[Any], Any] = id
) -> list[dict[str, Any]]:
    """Return one row per method and picture: time, error; then one per peak.

    Args:
        long: times at 512 and 768 px too, and the peak of the host's tiling; half an hour more.
        rounds: turns every method takes.
        report: called with each row as soon as it is known.
    """
    load_with_host("supir.striped")
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []

    def add(found: list[dict[str, Any]]) -> None:
        rows.extend(found)
        for row in found:
            report(row)

    with torch.inference_mode():
        for kind in ("decode", "encode"):
            time_methods(kind, 64, 1)  # warm up
        for px in (384, 512, 768) if long else (384,):
            for kind in ("decode", "encode"):
                add(time_methods(kind, px, rounds))
    untiled = 0
    for name in ("untiled", "striped", "striped+polyphase", *([HOST_TILED] if long else [])):
        row = measure_peak("decode", PEAK_PX, name)
        untiled = untiled or row["peak_bytes"]
        add([{**row, "to_untiled": round(row["peak_bytes"] / untiled, 3)}])
    return rows


def main() -> None:
    """Print the rows, one JSON object a line."""
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--comfyui", help="folder of ComfyUI; default: COMFYUI_ROOT")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--case", nargs=3, metavar=("JOB", "PX", "METHOD"), help="one peak")
    chosen = parser.parse_args()
    if chosen.comfyui:
        os.environ["COMFYUI_ROOT"] = chosen.comfyui
    if "COMFYUI_ROOT" not in os.environ:
        parser.error("ComfyUI was not named. Pass --comfyui PATH or set COMFYUI_ROOT.")
    if chosen.case:
        load_with_host("supir.striped")
        kind, px, method = chosen.case
        print(json.dumps(run_case(kind, int(px), method)))
        return
    run(chosen.long, chosen.rounds, lambda row: print(json.dumps(row), flush=True))


if __name__ == "__main__":
    main()
