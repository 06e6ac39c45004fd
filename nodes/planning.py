"""From what hangs on a node's sockets to the numbers the planner and the judge work with."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

from ..supir.plan import (
    Attention,
    Networks,
    Plan,
    RunRequest,
    dims_from_unet,
    plan_run,
)
from ..supir.striped import KLLayout, describe, recognise
from ..xpu.attention import limits_from_facts
from ..xpu.chunking import Policy, plan_attention
from ..xpu.device import DeviceFacts
from ..xpu.risk import PhaseNumbers, PlanNumbers
from .types import SupirModel

plan_cached = lru_cache(maxsize=128)(plan_run)
"""``plan_run`` that remembers: a graph is judged when it is queued and again when it runs."""


def layout_of_ratio(ratio: int) -> KLLayout:
    """Return a KL layout whose cells cover ``ratio`` px: SDXL's for 8, one of as many levels else."""
    levels = max(1, round(math.log2(max(1, ratio))) + 1)
    base = KLLayout()
    return base if levels == len(base.ch_mult) else replace(base, ch_mult=(1,) * levels)


def layout_of_vae(vae: Any, ratio: int) -> KLLayout:
    """Return the layout of a VAE as its encoder's modules tell, or SDXL's where they do not."""
    encoder = getattr(vae.first_stage_model, "encoder", None)
    if encoder is None or recognise(encoder) is not None:
        return layout_of_ratio(ratio)
    steps = describe(encoder)
    width = int(encoder.conv_in.out_channels)
    mult = tuple(int(level.block[-1].out_channels) // width for level in encoder.down)
    layout = KLLayout(
        ch=width,
        ch_mult=mult,
        num_res_blocks=len(encoder.down[0].block),
        in_channels=int(encoder.conv_in.in_channels),
        out_channels=int(encoder.conv_in.in_channels),
        z_channels=int(encoder.conv_out.out_channels) // 2,
    )
    return layout if layout.encoder_steps() == tuple(steps) else layout_of_ratio(ratio)


def sample_networks(model: Any, supir: SupirModel, ratio: int) -> Networks:
    """Return the networks of a sampling run, read from the connected models' modules."""
    base = model.model
    return Networks(
        unet=dims_from_unet(base.diffusion_model),
        supir=supir.dims,
        vae=layout_of_ratio(ratio),
        dtype_bytes=base.get_dtype_inference().itemsize,
        weight_bytes=(base.get_dtype().itemsize, _element_bytes(supir.patcher.model)),
    )


def vae_networks(vae: Any, ratio: int) -> Networks:
    """Return the networks of a run of the VAE alone."""
    return Networks(vae=layout_of_vae(vae, ratio), vae_dtype_bytes=vae.vae_dtype.itemsize)


def _element_bytes(module: Any) -> int:
    widths = [p.element_size() for p in module.parameters() if p.ndim > 1]
    return max(set(widths), key=widths.count) if widths else 2


@lru_cache(maxsize=4)
def attention_cost(facts: DeviceFacts, dtype_bytes: int, way: str = "") -> Attention | None:
    """Return what one attention call costs on this device; None (one kernel) off an Intel GPU.

    Args: way: of attention on a degraded device, see ``forced_policy``.
    """
    if not facts.is_xpu:
        return None
    limits = limits_from_facts(facts)
    policy = forced_policy(way)

    @lru_cache(maxsize=4096)
    def cost(batch: int, heads: int, n_query: int, n_key: int, dim_head: int) -> Any:
        plan = plan_attention(batch, heads, n_query, n_key, dim_head, dtype_bytes, limits, policy)
        return plan if plan.policy == "math" else replace(plan, score_elements=0)

    return cost


def forced_policy(way: str) -> Policy:
    """Return the attention policy a degraded device's workaround asks for."""
    ways: dict[str, Policy] = {"math": "math", "cpu_block": "cpu"}
    return ways.get(way, "auto")


def policy_of(facts: DeviceFacts, way: str = "") -> str:
    """Return how attention will mostly run on this device, as the risk rules name it."""
    if facts.is_xpu and forced_policy(way) != "auto":
        return forced_policy(way)
    if not facts.is_xpu or facts.fused_sdpa == "fused":
        return "fused"
    return "math" if facts.fused_sdpa == "math" else "fused_pieces"


def plan_numbers(
    plan: Plan,
    request: RunRequest,
    facts: DeviceFacts,
    only: tuple[str, ...] = (),
    way: str = "",
) -> PlanNumbers:
    """Return a plan as the risk rules take it.

    Args:
        only: names of the phases that run; empty = all of the plan's.
        way: of attention on a degraded device.
    """
    phases = [p for p in plan.phases if not only or p.name in only]
    samples = "sample" in request.stages
    return PlanNumbers(
        output_width_px=plan.output_width_px,
        output_height_px=plan.output_height_px,
        latent_h=plan.latent_h,
        latent_w=plan.latent_w,
        tile_px=plan.tile_px if samples else 0,
        tiles=plan.tiles if samples else 1,
        steps=request.steps if samples else 0,
        images=plan.images,
        launches_per_step=plan.launches_per_step,
        launches_total=sum(p.launches for p in phases),
        attention_policy=policy_of(facts, way),  # pyright: ignore[reportArgumentType]
        max_score_elements=plan.max_score_elements,
        largest_tensor_bytes=max((p.largest_tensor_bytes for p in phases), default=0),
        live_peak_bytes=max((p.live_peak_bytes for p in phases), default=0),
        weight_bytes=plan.weight_bytes if samples else 0,
        flops_total=float(sum(p.flops for p in phases)),
        bytes_moved_total=float(sum(p.bytes_moved for p in phases)),
        phases=tuple(
            PhaseNumbers(p.name, p.launches, float(p.flops), float(p.bytes_moved)) for p in phases
        ),
    )
