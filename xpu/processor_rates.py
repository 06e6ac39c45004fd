"""How fast this processor is, for predictions where ComfyUI computes on the CPU.

Measured in a fraction of a second: a convolution as in the networks, a copy, and tiny operations.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

CHANNELS, SIDE = 64, 96
"""The measured 3x3 convolution: as wide as the narrowest level of the VAE's, on a small map."""

COPY_BYTES = 1 << 25
LAUNCHES = 200
REPEATS = 3


@dataclass(frozen=True)
class ProcessorRates:
    """Sustained rates with the threads torch uses now.

    Attributes:
        flops_per_s: float32 operations per second in a convolution.
        bw_bytes_per_s: bytes read and written per second in a copy.
        launch_s: seconds of an operation that computes next to nothing.
    """

    flops_per_s: float
    bw_bytes_per_s: float
    launch_s: float


@torch.inference_mode()
def measure_processor() -> ProcessorRates:
    """Measure, each figure as the best of ``REPEATS`` after one to warm up; takes about 0.1 s."""
    x = torch.ones(1, CHANNELS, SIDE, SIDE)
    weight = torch.ones(CHANNELS, CHANNELS, 3, 3)
    flops = 2 * 9 * CHANNELS * CHANNELS * SIDE * SIDE
    source = torch.ones(COPY_BYTES // 4)
    target = torch.empty_like(source)
    small = torch.ones(8)

    def launches() -> None:
        for _ in range(LAUNCHES):
            small.add_(1.0)

    return ProcessorRates(
        flops_per_s=flops / _best(lambda: torch.nn.functional.conv2d(x, weight, padding=1)),
        bw_bytes_per_s=2 * COPY_BYTES / _best(lambda: target.copy_(source)),
        launch_s=_best(launches) / LAUNCHES,
    )


def _best(action: Callable[[], object]) -> float:
    """Return the shortest of a few runs in seconds, never 0."""
    seconds: list[float] = []
    for _ in range(1 + REPEATS):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return max(min(seconds[1:]), 1e-9)
