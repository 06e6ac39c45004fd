"""What a restoration asks for, planned: sizes, tiles, launches and memory before anything runs.

SDXL and SUPIR in 16 bit, 45 steps of restore_edm, cond and uncond in one batch, attention as one
fused kernel. Everything is computed by the planner the nodes judge runs with; nothing ran on a GPU.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import count_ops  # noqa: F401  (loads the pack under its fixed name)
from supir_xpu.supir.plan import DeviceRates, RunRequest, plan_run

TITLE = "Planned runs"
GIB = 2**30
SIDES_PX = (1024, 1536, 2048, 2944, 4096, 8192, 12288)
FREE_GIB = (8, 16)


def run() -> list[dict[str, Any]]:
    """Plan square pictures at several amounts of free device memory."""
    rows: list[dict[str, Any]] = []
    for side in SIDES_PX:
        for free in FREE_GIB:
            started = time.perf_counter()
            plan = plan_run(RunRequest(side, side), device=DeviceRates(free_bytes=free * GIB))
            milliseconds = (time.perf_counter() - started) * 1e3
            rows.append(
                {
                    "output px": f"{side}x{side}",
                    "free GiB": free,
                    "tile px": plan.tile_px or "untiled",
                    "tiles": plan.tiles,
                    "launches per step": f"{plan.launches_per_step:,}",
                    "live peak GiB": round(plan.live_peak_bytes / GIB, 2),
                    "VAE stripes in host memory GiB": round(plan.host_peak_bytes / GIB, 2),
                    "largest tensor GiB": round(plan.largest_tensor_bytes / GIB, 2),
                    "PFLOP": round(plan.flops_total / 1e15, 2),
                    "planned in ms": round(milliseconds, 1),
                }
            )
    return rows


if __name__ == "__main__":
    for row in run():
        print(row)
