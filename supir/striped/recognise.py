"""Decide whether a network is exactly what the striped walk computes.

Exact classes, no subclass: anything that could change the arithmetic (another block, a hook,
a replaced forward, another pack's attention) is a reason to leave the network alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch


def recognise(net: Any) -> str | None:
    """Return None if ``encode``/``decode`` may run ``net``, else the reason in words.

    Needs ComfyUI's classes; changes nothing.
    """
    host = _host()
    if type(net) is not host.Encoder and type(net) is not host.Decoder:
        return f"{type(net).__module__}.{type(net).__name__} is not ComfyUI's KL image network"
    if getattr(net, "carried", False):
        return "it runs over video frames (3-D convolutions)"
    for reason in _reasons(net):
        return reason
    for name, module in net.named_modules():
        if "forward" in vars(module):
            return f"the forward of {name or 'the network'} was replaced"
        if _hooked(module):
            return f"{name or 'the network'} carries a hook"
    return None


def _host() -> Any:
    """Return ComfyUI's building blocks; imported late, so that this package loads without it."""
    return import_module("..host_blocks", __package__)


def _reasons(net: Any) -> Iterator[str]:
    yield from _conv("conv_in", net.conv_in, 3)
    yield from _res("mid.block_1", net.mid.block_1)
    yield from _attn("mid.attn_1", net.mid.attn_1)
    yield from _res("mid.block_2", net.mid.block_2)
    up = type(net) is _host().Decoder
    side = "up" if up else "down"
    for i, level in enumerate(net.up if up else net.down):
        for j, block in enumerate(level.block):
            yield from _res(f"{side}.{i}.block.{j}", block)
        for j, block in enumerate(level.attn):
            yield from _attn(f"{side}.{i}.attn.{j}", block)
        if len(level.attn) not in (0, len(level.block)):
            yield f"{side}.{i} has {len(level.attn)} attentions for {len(level.block)} blocks"
    for i in range(net.num_resolutions):
        if up and i != 0:
            yield from _up(f"up.{i}.upsample", net.up[i].upsample)
        elif not up and i != net.num_resolutions - 1:
            yield from _down(f"down.{i}.downsample", net.down[i].downsample)
    yield from _norm("norm_out", net.norm_out)
    yield from _conv("conv_out", net.conv_out, 3)


def _conv(
    name: str, conv: Any, size: int, stride: int = 1, padding: int | None = None
) -> Iterator[str]:
    pad = size // 2 if padding is None else padding
    wanted = (size, size), (stride, stride), (pad, pad), (1, 1), 1, "zeros"
    if not isinstance(conv, torch.nn.Conv2d):
        yield f"{name} is a {type(conv).__name__}, not a 2-D convolution"
        return
    found = (
        conv.kernel_size,
        conv.stride,
        conv.padding,
        conv.dilation,
        conv.groups,
        conv.padding_mode,
    )
    if found != wanted:
        yield f"{name} is a convolution of another shape: {found} instead of {wanted}"


def _norm(name: str, norm: Any) -> Iterator[str]:
    if not isinstance(norm, torch.nn.GroupNorm):
        yield f"{name} is a {type(norm).__name__}, not a group norm"
    elif not norm.affine:
        yield f"{name} has no weight and bias"


def _res(name: str, block: Any) -> Iterator[str]:
    if type(block) is not _host().ResnetBlock:
        yield f"{name} is a {type(block).__name__}"
        return
    if hasattr(block, "temb_proj") or block.use_conv_shortcut:
        yield f"{name} has a time embedding or a 3x3 shortcut"
    if block.dropout.p > 0 and block.training:
        yield f"{name} applies dropout"
    yield from _norm(f"{name}.norm1", block.norm1)
    yield from _norm(f"{name}.norm2", block.norm2)
    yield from _conv(f"{name}.conv1", block.conv1, 3)
    yield from _conv(f"{name}.conv2", block.conv2, 3)
    if block.in_channels != block.out_channels:
        yield from _conv(f"{name}.nin_shortcut", block.nin_shortcut, 1)


def _attn(name: str, block: Any) -> Iterator[str]:
    host = _host()
    if type(block) is not host.AttnBlock:
        yield f"{name} is a {type(block).__name__}"
        return
    if block.optimized_attention not in host.VAE_ATTENTIONS:
        yield f"{name} uses an attention function that is not ComfyUI's"
    yield from _norm(f"{name}.norm", block.norm)
    for part in ("q", "k", "v", "proj_out"):
        yield from _conv(f"{name}.{part}", getattr(block, part), 1)


def _up(name: str, block: Any) -> Iterator[str]:
    if type(block) is not _host().VaeUpsample:
        yield f"{name} is a {type(block).__name__}"
    elif not block.with_conv or block.scale_factor != 2.0:
        yield f"{name} does not double the size with a convolution"
    else:
        yield from _conv(f"{name}.conv", block.conv, 3)


def _down(name: str, block: Any) -> Iterator[str]:
    if type(block) is not _host().VaeDownsample:
        yield f"{name} is a {type(block).__name__}"
    elif not block.with_conv:
        yield f"{name} averages instead of convolving"
    else:
        yield from _conv(f"{name}.conv", block.conv, 3, stride=2, padding=0)


def _hooked(module: Any) -> bool:
    """True when a forward hook is registered on the module."""
    return any(getattr(module, name, None) for name in ("_forward_hooks", "_forward_pre_hooks"))
