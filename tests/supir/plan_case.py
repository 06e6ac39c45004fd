"""True-size and narrow networks on the meta device, and the count of one call of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from supir_xpu.supir.plan import UNetDims, plan_step, supir_dims_for, unet_dims
from supir_xpu.xpu.attention import PlannedAttention
from supir_xpu.xpu.chunking import AttentionLimits, plan_attention
from supir_xpu.xpu.counting import Count, CountOps, nbytes
from supir_xpu.xpu.device import DeviceFacts

NARROW = {
    "model_channels": 64,
    "channel_mult": (1, 1, 1),
    "transformer_depth": (0, 0, 1, 1, 1, 1),
    "transformer_depth_output": (0, 0, 0, 1, 1, 1, 1, 1, 1),
    "transformer_depth_middle": 1,
    "context_dim": 64,
    "adm_in_channels": 1600,
}
SHALLOW = {  # SDXL's widths, one transformer block where it has two or ten
    key: value for key, value in NARROW.items() if key.startswith("transformer_depth")
}
LIMITS = AttentionLimits(2**34, 2**33, 5 * 10**12, max_scores=2**30, fused="fused")


def attention_cost(policy: str, dtype_bytes: int, limits: AttentionLimits = LIMITS) -> Any:
    """The cost of a call as the attention planner tells it."""

    def cost(batch, heads, n_query, n_key, dim_head):
        return plan_attention(batch, heads, n_query, n_key, dim_head, dtype_bytes, limits, policy)

    return cost


def planned(mode: CountOps, policy: str, limits: AttentionLimits = LIMITS) -> Any:
    """The pack's attention with a kernel that, as a device's does, keeps the layout of its input.

    The meta device's own gives another layout, which would count a copy no device makes.
    """

    def kernel(q, k, v, attn_mask=None, scale=None):
        batch, heads, n, d = q.shape
        out = torch.empty(batch, n, heads, d, dtype=q.dtype, device=q.device).transpose(1, 2)
        mode.count.add(
            "scaled_dot_product_attention",
            sum(map(nbytes, (q, k, v, out))),
            4 * batch * heads * n * k.shape[2] * d,
        )
        return out

    facts = DeviceFacts("xpu", fused_sdpa="fused")
    return PlannedAttention(facts, limits, policy=policy, kernel=kernel).as_override()


@dataclass
class Nets:
    """A UNet and its SUPIR networks on the meta device, and what the plan knows of them."""

    dims: UNetDims
    unet: Any
    supir: Any
    weights: torch.dtype

    def count(
        self, height: int, width: int, batch: int, scale: float, policy: str,
        dtype: torch.dtype, tokens: int = 77, track_live: bool = True,
    ) -> Count:  # fmt: skip
        """Count the real networks' call through the host's wrapper chain."""
        from comfy.patcher_extension import WrappersMP
        from supir_xpu.supir.constants import WORK_KEY
        from supir_xpu.supir.injection import InjectedState, make_wrapper

        def meta(*shape, dtype=dtype):
            return torch.empty(*shape, dtype=dtype, device="meta")

        mode = CountOps(track_live)
        options = {
            "optimized_attention_override": planned(mode, policy),
            WORK_KEY: {
                "state": InjectedState(meta(1, 4, height, width, dtype=torch.float32), scale)
            },
            "wrappers": {WrappersMP.DIFFUSION_MODEL: {WORK_KEY: [make_wrapper(self.supir)]}},
        }
        x = meta(batch, 4, height, width)
        context = meta(batch, tokens, self.dims.context_dim)
        y = meta(batch, self.dims.adm_in_channels)
        with mode:
            self.unet(x, meta(batch, dtype=torch.float32), context, y, transformer_options=options)
        return mode.count

    def plan(self, height, width, batch, scale, policy, dtype, tokens=77):
        """The plan of the same call."""
        same = self.weights == dtype
        return plan_step(
            self.dims, supir_dims_for(self.dims), height, width, batch, tokens, dtype.itemsize,
            scale, attention_cost(policy, dtype.itemsize),
            weight_bytes=(0, 0) if same else (self.weights.itemsize,) * 2,
        )  # fmt: skip


def make_nets(config: dict[str, Any], weights: torch.dtype, cast: bool = False) -> Nets:
    """Build the networks of a configuration."""
    import comfy.ops
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
    from supir_xpu.supir.injection import SupirNets

    ops = comfy.ops.manual_cast if cast else comfy.ops.disable_weight_init
    full = {
        "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 320,
        "num_res_blocks": [2, 2, 2], "channel_mult": [1, 2, 4], "num_classes": "sequential",
        "adm_in_channels": 2816, "use_spatial_transformer": True, "legacy": False,
        "num_heads": -1, "num_head_channels": 64, "transformer_depth": [0, 0, 2, 2, 10, 10],
        "transformer_depth_middle": 10, "context_dim": 2048, "use_linear_in_transformer": True,
        "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10],
        **{k: list(v) if isinstance(v, tuple) else v for k, v in config.items()},
    }  # fmt: skip
    unet = UNetModel(**full, dtype=weights, device="meta", operations=ops).eval()
    dims = unet_dims(**config)
    supir = SupirNets(supir_dims_for(dims), operations=ops, dtype=weights, device="meta").eval()
    return Nets(dims, unet, supir, weights)
