"""The connectors through which control features reach the UNet: ZeroSFT and ZeroCrossAttn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .layout import HEAD_CHANNELS, AdapterDims, CrossDims, SftDims

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]
"""attention(q, k, v, heads) on [B, tokens, heads * 64], scaled by 1 / 8."""

GROUPS = 32
"""Groups of every GroupNorm in the SDXL family."""


class ZeroSFT(nn.Module):
    """Modulate decoder and skip activation by a control feature; replaces the UNet's concat.

    Source: SUPIR (Yu et al. 2024), figure 3; SPADE (Park et al. 2019) for the modulation.
    """

    def __init__(
        self, dims: SftDims, *, operations: Any, dtype: torch.dtype | None, device: Any
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        joined = dims.skip_channels + dims.decoder_channels
        hidden = dims.hidden_channels
        self.param_free_norm = operations.GroupNorm(GROUPS, joined, **options)
        self.mlp_shared = nn.Sequential(
            operations.Conv2d(dims.control_channels, hidden, 3, padding=1, **options), nn.SiLU()
        )
        self.zero_mul = operations.Conv2d(hidden, joined, 3, padding=1, **options)
        self.zero_add = operations.Conv2d(hidden, joined, 3, padding=1, **options)
        self.zero_conv = operations.Conv2d(dims.control_channels, dims.skip_channels, 1, **options)

    def forward(
        self,
        control: torch.Tensor,
        skip: torch.Tensor,
        decoder: torch.Tensor | None,
        control_scale: float,
    ) -> torch.Tensor:
        """Return k * modulated + (1 - k) * [decoder | skip].

        Args:
            control: [B, Cc, h, w] control feature.
            skip: [B, Cs, h, w] encoder skip, or the middle block's output.
            decoder: [B, Cd, h, w] decoder activation; None at the middle block.
            control_scale: k; 0 gives the plain concatenation, 1 the full modulation.
        Returns: [B, Cd + Cs, h, w].
        """
        joined = skip + self.zero_conv(control)
        if decoder is not None:
            joined = torch.cat([decoder, joined], dim=1)
        shared = self.mlp_shared(control)
        normed = self.param_free_norm(joined)
        out = torch.addcmul(normed + self.zero_add(shared), normed, self.zero_mul(shared))
        if control_scale == 1.0:
            return out
        raw = skip if decoder is None else torch.cat([decoder, skip], dim=1)
        return torch.lerp(raw, out, control_scale)


class _CrossAttention(nn.Module):
    """Projections of one cross-attention; parameter names are the checkpoint's."""

    def __init__(
        self, dims: CrossDims, *, operations: Any, dtype: torch.dtype | None, device: Any
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        width = dims.query_channels // HEAD_CHANNELS * HEAD_CHANNELS
        self.heads = dims.query_channels // HEAD_CHANNELS
        self.to_q = operations.Linear(dims.query_channels, width, bias=False, **options)
        self.to_k = operations.Linear(dims.control_channels, width, bias=False, **options)
        self.to_v = operations.Linear(dims.control_channels, width, bias=False, **options)
        self.to_out = nn.Sequential(operations.Linear(width, dims.query_channels, **options))


class ZeroCrossAttn(nn.Module):
    """Let the decoder look at a control feature before it is upsampled."""

    def __init__(
        self, dims: CrossDims, *, operations: Any, dtype: torch.dtype | None, device: Any
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        self.attn = _CrossAttention(dims, operations=operations, **options)
        self.norm1 = operations.GroupNorm(GROUPS, dims.query_channels, **options)
        self.norm2 = operations.GroupNorm(GROUPS, dims.control_channels, **options)

    def forward(
        self,
        control: torch.Tensor,
        x: torch.Tensor,
        control_scale: float,
        attention: Attention,
    ) -> torch.Tensor:
        """Return x + k * attention(query = x, keys and values = control).

        Args:
            control: [B, Cc, h, w]; x: [B, Cq, h, w]; control_scale: k.
            attention: the run's attention callable.
        """
        height, width = x.shape[-2:]
        queries = self.norm1(x).flatten(2).transpose(1, 2)  # BCHW -> BNC
        context = self.norm2(control).flatten(2).transpose(1, 2)
        attn = self.attn
        out = attention(attn.to_q(queries), attn.to_k(context), attn.to_v(context), attn.heads)
        out = attn.to_out(out).transpose(1, 2).unflatten(2, (height, width))  # BNC -> BCHW
        return torch.add(x, out, alpha=control_scale)


def build_adapters(
    dims: tuple[AdapterDims, ...], *, operations: Any, dtype: torch.dtype | None, device: Any
) -> nn.ModuleList:
    """Return the adapters in checkpoint order (``project_modules.0`` first)."""
    options: dict[str, Any] = {"operations": operations, "dtype": dtype, "device": device}
    return nn.ModuleList(
        ZeroSFT(one, **options) if isinstance(one, SftDims) else ZeroCrossAttn(one, **options)
        for one in dims
    )
