#!/usr/bin/env python3
"""Compare attention policies: counted at true size, measured on this processor.

``run()`` returns one row per latent and policy with the launches, bytes and largest tensor of one
SDXL + SUPIR sampling step (cond and uncond together, bfloat16), counted on meta tensors, and rows
with processor seconds of single calls, and of what the execution adds to a block. No figure says anything about a GPU's speed.

    bench_attention.py [--comfy PATH] [--no-time] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from count_ops import count_with, host_policy, load_comfy, make_model, make_policy
from supir_xpu.xpu import counting
from supir_xpu.xpu.attention import PlannedAttention, limits_from_facts
from supir_xpu.xpu.device import DeviceFacts

DESCRIPTION = """\
Compare attention policies: counted at true size, measured on this processor.

`step` rows count one SDXL + SUPIR sampling step (cond and uncond together, bfloat16) on tensors
without data: launches; `gb_moved`, what operators read and write; the largest tensor; the most scores
of one attention call. Policies: *chunk loop* is the first crash report's, *host* ComfyUI's
sub-quadratic and split attention, *planned* this pack's, where the device has a fused kernel, an
unknown one, or none (*math*, scores in float32 or half precision). Other rows are processor seconds
here; `ours_to_this` is the pack's time over that policy's. Nothing says how fast a GPU is."""

LATENTS = ((64, 64), (168, 168), (184, 184), (240, 352), (368, 368))
WORKSPACE_MIB = 2048
FREE_MIB = 8192
"""What the host's functions believe is free; our workspace is a quarter of it."""

POLICIES = {
    "chunk loop": "chunk:512",
    "chunk loop, fp32 scores": "chunk:512:fp32",
    "host sub-quad": f"sub_quad:{FREE_MIB}",
    "host sub-quad, fp32 scores": f"sub_quad:{FREE_MIB}:fp32",
    "host split": f"split:{FREE_MIB}",
    "host split, fp32 scores": f"split:{FREE_MIB}:fp32",
    "planned, fused": f"planned:{WORKSPACE_MIB}",
    "planned, unknown kernel": f"planned:{WORKSPACE_MIB}:unknown",
    "planned, math, fp32 scores": f"planned:{WORKSPACE_MIB}:math",
    "planned, math, half scores": f"planned:{WORKSPACE_MIB}:math:half",
}
TIMED_TOKENS = (7056, 16384)
TIMED_REPEATS = 5
OVERHEAD_PAIRS = 60

Call = tuple[int, ...]


def count_call(shape: Call, attention: str) -> counting.Count:
    """Count one call as the UNet makes it: q, k, v head-split views, the result joined again."""
    batch, heads, n_query, n_key, dim_head = shape

    def split(tokens: int) -> torch.Tensor:
        t = torch.empty(batch, tokens, heads * dim_head, dtype=torch.bfloat16, device="meta")
        return t.view(batch, tokens, heads, dim_head).transpose(1, 2)

    q, k, v = split(n_query), split(n_key), split(n_key)
    mode = counting.CountOps()
    policy = make_policy(attention, mode)
    with torch.no_grad(), mode:
        policy(q, k, v).transpose(1, 2).reshape(batch, n_query, heads * dim_head)
    return mode.count


def step_rows(comfy: str | None) -> list[dict[str, Any]]:
    """Rows for one sampling step at every latent. Attention is counted once per shape of call."""
    model = make_model("supir", torch.bfloat16, comfy)
    rows: list[dict[str, Any]] = []
    for height, width in LATENTS:
        fused, shapes = count_with(model(height, width, 2), "fused", track_live=False)
        base = {shape: count_call(shape, "fused") for shape in shapes}
        for name, attention in POLICIES.items():
            launches, moved, largest = fused.launches, fused.bytes_moved, fused.largest[0]
            scores = 0
            for shape, times in shapes.items():
                found = count_call(shape, attention)
                launches += times * (found.launches - base[shape].launches)
                moved += times * (found.bytes_moved - base[shape].bytes_moved)
                largest = max(largest, found.largest[0])
                scores = max(scores, found.scores)
            rows.append({
                "kind": "step", "latent": f"{height}x{width}", "policy": name,
                "launches": launches, "gb_moved": round(moved / 1e9, 1),
                "largest_mib": round(largest / 2**20, 1), "scores_per_call": scores,
                "attention_calls": shapes.total(),
            })  # fmt: skip
    return rows


def timed_rows() -> list[dict[str, Any]]:
    """Processor seconds of one float32 call, interleaved; ratio of medians to ours."""
    rows: list[dict[str, Any]] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for tokens in TIMED_TOKENS:
            rows += _time_tokens(tokens)
    finally:
        torch.set_num_threads(threads)
    return rows


def _time_tokens(tokens: int) -> list[dict[str, Any]]:
    heads = 1 if tokens > 10000 else 2
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, tokens, heads, 64, generator=generator).transpose(1, 2) for _ in range(3)
    )
    facts = DeviceFacts("cpu")
    limits = limits_from_facts(facts, WORKSPACE_MIB * 2**20)
    ways: dict[str, Callable[..., torch.Tensor]] = {
        "planned, math": PlannedAttention(facts, limits, policy="math"),
        "host sub-quad": host_policy("sub_quad", FREE_MIB, False),
        "host split": host_policy("split", FREE_MIB, False),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    with torch.inference_mode():
        for _ in range(TIMED_REPEATS):
            for name, way in ways.items():
                started = time.process_time()
                way(q, k, v)
                taken[name].append(time.process_time() - started)
    ours = taken["planned, math"]
    return [
        {
            "kind": "time", "tokens": tokens, "heads": heads, "policy": name,
            "cpu_s": round(statistics.median(seconds), 3),
            "ours_to_this": round(statistics.median(a / b for a, b in zip(ours, seconds, strict=True)), 3),
        }
        for name, seconds in taken.items()
    ]  # fmt: skip


def overhead_rows(pairs: int = OVERHEAD_PAIRS) -> list[dict[str, Any]]:
    """Processor time that a run's execution adds to every block of the demo's networks.

    One call of UNet, control network and adapters at an 8 x 8 latent, with and without execution in
    turns; the kernel of both is the host's, and nobody waits for a device.
    """
    from bench_walk import make_bench, network_inputs
    from supir_xpu.nodes.execution import Execution
    from supir_xpu.nodes.machine import Machine
    from supir_xpu.xpu.device_profiles import load_profiles

    bench = make_bench()
    inputs = network_inputs((8, 8), 2)
    state = bench.injection.InjectedState(inputs[0][:1], 0.9)
    facts = DeviceFacts("xpu", family="battlemage", os="Windows", fused_sdpa="fused")
    place = Machine(facts, load_profiles().pick(facts), simulated=True)
    rows: list[dict[str, Any]] = []
    for name, window in (("planned, no window", 0), ("planned, window of 64", 64)):
        execution = Execution.for_run(place, window_launches=window)
        assert execution is not None
        calls = 0

        def count(layer: str, run: Any, h: Any, execution: Any = execution) -> Any:
            nonlocal calls
            calls += 1
            return execution.run_layer(layer, run, h)

        def options(run_layer: Any, attention: Any) -> dict[str, Any]:
            wrapper = bench.injection.make_wrapper(bench.nets, run_layer)
            made: dict[str, Any] = {
                "wrappers": {bench.wrapper_kind: {bench.work_key: [wrapper]}},
                bench.work_key: {"state": state},
            }
            if attention is not None:
                made[bench.injection.ATTENTION_OVERRIDE] = attention
            return made

        plain = options(None, None)
        ours = options(execution.run_layer, execution.override())
        with torch.inference_mode():
            bench.unet(*inputs, transformer_options=options(count, execution.override()))
            taken: dict[int, list[float]] = {0: [], 1: []}
            for turn in range(2 * pairs):
                started = time.process_time()
                bench.unet(*inputs, transformer_options=dict((plain, ours)[turn % 2]))
                taken[turn % 2].append(time.process_time() - started)
        added = [b - a for a, b in zip(taken[0], taken[1], strict=True)]
        rows.append({
            "kind": "overhead", "policy": name, "blocks": calls,
            "attention_calls": execution.attention_report.calls // (pairs + 1),
            "plain_ms": round(statistics.median(taken[0]) * 1e3, 2),
            "added_us_per_block": round(statistics.median(added) / calls * 1e6, 1),
        })  # fmt: skip
    return rows


def run(comfy: str | None = None, time_calls: bool = True) -> list[dict[str, Any]]:
    """Return every row.

    Args:
        comfy: path of a ComfyUI checkout; None takes COMFYUI_ROOT, or what is importable.
        time_calls: also measure processor time (about a minute).
    """
    comfy = comfy or os.environ.get("COMFYUI_ROOT")
    if comfy is not None:
        os.environ["COMFYUI_ROOT"] = comfy
    load_comfy(comfy)
    return step_rows(None) + (timed_rows() + overhead_rows() if time_calls else [])


def main(argv: list[str] | None = None) -> int:
    """Print the rows as a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfy", help="path of a ComfyUI checkout")
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    rows = run(args.comfy, not args.no_time)
    if args.json:
        print(json.dumps(rows, indent=1))
        return 0
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items() if key != "kind"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
