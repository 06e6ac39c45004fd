"""What a workaround on the processor costs, and how long a job takes elsewhere. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .probe_types import Measured, RetreatOption

STEP_FLOPS = 20.3e12
"""One sampling step of SDXL with SUPIR at latent 128 × 128, cond and uncond together. Counted on
meta tensors (docs/xpu.md, section 6)."""

DEFAULT_JOB_FLOPS = 35 * STEP_FLOPS
"""35 steps at 1024 × 1024 px, when no job is at hand."""

WORTH = 0.8
"""A workaround must leave the device below this part of the processor's time (docs/xpu.md 5d)."""

ASSUMED_CARD_FLOPS_PER_S = 10e12
"""Sustained rate of a supported card, assumed and not measured (docs/xpu.md 5a)."""


@dataclass(frozen=True)
class RoundTrips:
    """What one class sends to the processor in one step at latent 128 × 128, half precision.

    calls: round trips. down_bytes, up_bytes: copied to and from the processor. flops: computed
    there.
    """

    calls: int
    down_bytes: float
    up_bytes: float
    flops: float = 0.0


ROUND_TRIPS = {
    # Counted: calls per step of docs/xpu.md 1.6. Bytes of the norms: 5(d) there. Attention: q, k, v
    # down and the result up, 15 calls of 2 × 4,096 × 640 and 91 of 2 × 1,024 × 1,280. Reductions
    # and casts: two over the latent, 40 of activations of 2 × 4,096 × 640.
    "reductions": RoundTrips(2, 1.0e6, 1.0e5),
    "index_cast": RoundTrips(40, 4.2e8, 4.2e8),
    "norms": RoundTrips(393, 1.9e9, 1.9e9),
    "attention": RoundTrips(210, 1.9e9, 6.4e8, 1.6e12),
    "dense": RoundTrips(1226, 8.0e9, 8.0e9, 18.7e12),
}


@dataclass(frozen=True)
class Costs:
    """Seconds per step: the device with the workaround, and the processor alone."""

    device_s: float
    trips_s: float
    processor_s: float

    @property
    def is_worth_it(self) -> bool:
        """True if the device with its workaround clearly beats the processor."""
        return self.device_s + self.trips_s < WORTH * self.processor_s

    @property
    def sentence(self) -> str:
        """Return the comparison in words."""
        verb = "beats" if self.is_worth_it else "does not beat"
        return (
            f"one step takes {self.device_s:.2f} s on the device and {self.trips_s:.2f} s for the "
            f"way over the processor, which {verb} {WORTH:.0%} of the {self.processor_s:.2f} s of "
            f"the processor alone (estimated from measured rates, latent 128x128)."
        )


def round_trip_costs(op_class: str, measured: Measured) -> Costs | None:
    """Return what running one class on the processor costs, None if rates are not known."""
    trips = ROUND_TRIPS[op_class]
    rates = (
        measured.flops_per_s,
        measured.processor_flops_per_s,
        measured.d2h_bytes_per_s,
        measured.h2d_bytes_per_s,
    )
    if min(rates) <= 0:
        return None
    device, processor, down, up = rates
    trips_s = trips.calls * (measured.sync_s + measured.launch_s)
    trips_s += trips.down_bytes / down + trips.up_bytes / up + trips.flops / processor
    return Costs((STEP_FLOPS - trips.flops) / device, trips_s, STEP_FLOPS / processor)


def retreat_options(
    measured: Measured, job_flops: float, openvino_devices: Sequence[str] | None = None
) -> tuple[RetreatOption, ...]:
    """Return where to go instead, in order, with minutes for the job.

    Args:
        job_flops: floating-point operations of the job.
        openvino_devices: devices OpenVINO lists, None if nobody asked.
    """
    rate = measured.processor_flops_per_s
    processor = job_flops / rate / 60 if rate > 0 else None
    outside = "outside this pack, through the openvino package"
    gpu = f"{outside}; only if it lists the device"
    if openvino_devices is not None:
        lists = any(name.upper().startswith("GPU") for name in openvino_devices)
        gpu = f"{outside}, which lists {'' if lists else 'no '}GPU"
    return (
        RetreatOption("OpenVINO on the GPU", None, gpu),
        RetreatOption("OpenVINO on the processor", processor, f"{outside}; estimated as for torch"),
        RetreatOption("torch on the processor", processor, "start ComfyUI with --cpu"),
        RetreatOption(
            "a supported Arc card",
            job_flops / ASSUMED_CARD_FLOPS_PER_S / 60,
            f"at an assumed {ASSUMED_CARD_FLOPS_PER_S / 1e12:.0f} TFLOP/s",
        ),
    )
