"""A KL encoder or decoder as a flat list of steps, from a module or from its configuration.

Knows names and channel counts only; sizes are the plan's business, tensors the walk's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

NORM_GROUPS = 32  # Normalize() of the latent-diffusion autoencoder


class Kind(str, Enum):
    """What a step computes."""

    CONV_IN = "conv_in"
    RES = "res"
    ATTN = "attn"
    UP = "up"
    DOWN = "down"
    OUT = "out"


@dataclass(frozen=True)
class Step:
    """One block of the network.

    Args:
        name: dotted path of the block inside the network ("" for the output stage, which is
            ``norm_out``, SiLU and ``conv_out``).
        cin, cout: channels in and out.
        groups: groups of its group norms, 0 where it has none.
    """

    kind: Kind
    name: str
    cin: int
    cout: int
    groups: int = 0

    @property
    def shortcut(self) -> bool:
        """True when a residual block maps its input through a 1x1 convolution."""
        return self.kind is Kind.RES and self.cin != self.cout


@dataclass(frozen=True)
class KLLayout:
    """Widths and depths of a KL autoencoder. The defaults are the VAE of SD 1.x, 2.x and SDXL.

    Source: Rombach et al. 2022, autoencoder configuration ``kl-f8``.
    """

    ch: int = 128
    ch_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    in_channels: int = 3
    out_channels: int = 3
    z_channels: int = 4
    double_z: bool = True

    def encoder_steps(self) -> tuple[Step, ...]:
        """Return the encoder's steps in running order."""
        steps = [Step(Kind.CONV_IN, "conv_in", self.in_channels, self.ch)]
        width = self.ch
        for level, mult in enumerate(self.ch_mult):
            for block in range(self.num_res_blocks):
                steps.append(_res(f"down.{level}.block.{block}", width, self.ch * mult))
                width = self.ch * mult
            if level != len(self.ch_mult) - 1:
                steps.append(Step(Kind.DOWN, f"down.{level}.downsample", width, width))
        steps += _mid(width)
        moments = self.z_channels * (2 if self.double_z else 1)
        return (*steps, Step(Kind.OUT, "", width, moments, NORM_GROUPS))

    def decoder_steps(self) -> tuple[Step, ...]:
        """Return the decoder's steps in running order."""
        width = self.ch * self.ch_mult[-1]
        steps = [Step(Kind.CONV_IN, "conv_in", self.z_channels, width), *_mid(width)]
        for level in reversed(range(len(self.ch_mult))):
            for block in range(self.num_res_blocks + 1):
                steps.append(
                    _res(f"up.{level}.block.{block}", width, self.ch * self.ch_mult[level])
                )
                width = self.ch * self.ch_mult[level]
            if level != 0:
                steps.append(Step(Kind.UP, f"up.{level}.upsample", width, width))
        return (*steps, Step(Kind.OUT, "", width, self.out_channels, NORM_GROUPS))


def describe(net: Any) -> tuple[Step, ...]:
    """List the steps of a recognised encoder or decoder, widths read from its layers."""
    first = net.conv_in
    steps = [Step(Kind.CONV_IN, "conv_in", first.in_channels, first.out_channels)]
    if hasattr(net, "up"):
        steps += _mid_of(net)
        for level in reversed(range(net.num_resolutions)):
            steps += _level_of(f"up.{level}", net.up[level])
            if level != 0:
                conv = net.up[level].upsample.conv
                name = f"up.{level}.upsample"
                steps.append(Step(Kind.UP, name, conv.in_channels, conv.out_channels))
    else:
        for level in range(net.num_resolutions):
            steps += _level_of(f"down.{level}", net.down[level])
            if level != net.num_resolutions - 1:
                conv = net.down[level].downsample.conv
                name = f"down.{level}.downsample"
                steps.append(Step(Kind.DOWN, name, conv.in_channels, conv.out_channels))
        steps += _mid_of(net)
    last = net.conv_out
    out = Step(Kind.OUT, "", last.in_channels, last.out_channels, net.norm_out.num_groups)
    return (*steps, out)


def _res(name: str, cin: int, cout: int) -> Step:
    return Step(Kind.RES, name, cin, cout, NORM_GROUPS)


def _mid(width: int) -> list[Step]:
    attn = Step(Kind.ATTN, "mid.attn_1", width, width, NORM_GROUPS)
    return [_res("mid.block_1", width, width), attn, _res("mid.block_2", width, width)]


def _res_of(name: str, block: Any) -> Step:
    conv1 = block.conv1
    return Step(Kind.RES, name, conv1.in_channels, conv1.out_channels, block.norm1.num_groups)


def _attn_of(name: str, block: Any) -> Step:
    q = block.q
    return Step(Kind.ATTN, name, q.in_channels, block.proj_out.out_channels, block.norm.num_groups)


def _mid_of(net: Any) -> list[Step]:
    return [
        _res_of("mid.block_1", net.mid.block_1),
        _attn_of("mid.attn_1", net.mid.attn_1),
        _res_of("mid.block_2", net.mid.block_2),
    ]


def _level_of(prefix: str, level: Any) -> list[Step]:
    steps: list[Step] = []
    for i, block in enumerate(level.block):
        steps.append(_res_of(f"{prefix}.block.{i}", block))
        if len(level.attn) > 0:
            steps.append(_attn_of(f"{prefix}.attn.{i}", level.attn[i]))
    return steps
