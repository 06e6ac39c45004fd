"""Make the trained networks fit half precision without changing what they compute.

Training lets activations grow where a group norm takes their scale away again. Here their scale is
moved into the weights around them, so that 16-bit numbers (up to 65504) hold them with room to spare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import demo_nets
import torch
from torch import nn

HIGHEST = 2000.0
"""Largest activation wanted on the calibration pictures."""

SHIFTS = (
    (10, None),
    (9, None),
    (8, 7),
    (6, None),
    (5, None),
    (4, 3),
    (2, None),
    (1, None),
    (0, None),
)
"""Adapters of the UNet's output blocks in order: ZeroSFT before, ZeroCrossAttn inside."""

MIDDLE = 11
"""The ZeroSFT after the middle block."""


def scale(layers: Iterable[nn.Module], weight: float, bias: float) -> None:
    """Multiply the weights and the biases of layers."""
    for layer in layers:
        layer.weight.mul_(weight)  # pyright: ignore[reportCallIssue]
        if layer.bias is not None:
            layer.bias.mul_(bias)  # pyright: ignore[reportCallIssue]


def peaks(modules: dict[str, nn.Module], run: Callable[[], object]) -> dict[str, float]:
    """Return the largest magnitude each module puts out during ``run``."""
    found = dict.fromkeys(modules, 0.0)

    def watch(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
            found[name] = max(found[name], float(output.abs().max()))

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in modules.items()]
    run()
    for handle in handles:
        handle.remove()
    return found


def factor(peak: float) -> float:
    """Return what brings a peak down to HIGHEST; a power of two, at most 1."""
    shrink = 1.0
    while peak * shrink > HIGHEST:
        shrink /= 2.0
    return shrink


def scale_adapter(sft: nn.Module, out: float, multiplier_peak: float) -> None:
    """Multiply what a ZeroSFT gives by ``out``, and keep its multiplier within HIGHEST.

    out * (n (1 + m) + a) = n' (1 + m') + a' with n' = k out n, m' = (1 + m) / k - 1, a' = out a.
    """
    k = 1.0 / factor(multiplier_peak)
    scale([sft.param_free_norm], k * out, k * out)
    scale([sft.zero_add], out, out)
    scale([sft.zero_mul], 1.0 / k, 1.0)
    sft.zero_mul.bias.copy_((sft.zero_mul.bias + 1.0) / k - 1.0)


@torch.no_grad()
def fit_restorer(net: demo_nets.Restorer, run: Callable[[], object]) -> None:
    """Bring the UNet's output blocks and their adapters into range; ``run`` calls the network."""
    adapters, blocks = net.nets.project_modules, net.unet.output_blocks
    watched: dict[str, nn.Module] = {}
    for n in (MIDDLE, *(first for first, _ in SHIFTS)):
        watched |= {f"sft {n}": adapters[n], f"mul {n}": adapters[n].zero_mul}
    for n, block in enumerate(blocks):
        watched |= {f"block {n} {i}": layer for i, layer in enumerate(block)}
    found = peaks(watched, run)
    scale_adapter(adapters[MIDDLE], factor(found[f"sft {MIDDLE}"]), found[f"mul {MIDDLE}"])
    for n, (before, inside) in enumerate(SHIFTS):
        res, *others = blocks[n]
        up = others.pop() if inside is not None else None
        came = factor(found[f"sft {before}"])
        scale_adapter(adapters[before], came, found[f"mul {before}"])
        stream = factor(max(found[f"block {n} {i}"] for i in range(1 + len(others))))
        scale([res.skip_connection], stream / came, stream)
        scale([res.out_layers[3], *(layer.proj_out for layer in others)], stream, stream)
        if up is not None:
            scale([adapters[inside].attn.to_out[0]], stream, stream)
            left = factor(found[f"block {n} {1 + len(others)}"])
            scale([up.conv], left / stream, left)


@torch.no_grad()
def fit_decoder(vae: demo_nets.Autoencoder, run: Callable[[], object]) -> None:
    """Bring the VAE decoder's last level, which ends in a group norm, into range."""
    upsample, last = vae.decoder.up[1].upsample.conv, vae.decoder.up[0].block
    found = peaks({"stream": upsample, "end": last[-1]}, run)
    shrink = factor(max(found.values()))
    scale([upsample, *(block.conv2 for block in last)], shrink, shrink)
