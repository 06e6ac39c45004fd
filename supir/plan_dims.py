"""The host's UNet as plain numbers: what the plan walks instead of a network.

Owns the description and the ways to get it: from a configuration, or from the modules of a UNet,
of which only structure and widths are read. Holds no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .errors import ModelError
from .layout import HEAD_CHANNELS, BlockDims, ControlDims, SupirDims
from .network_shapes import fit_adapters

EMBED_FACTOR = 4
"""Width of the time embedding as a multiple of the model's (latent diffusion)."""


@dataclass(frozen=True)
class LayerDims:
    """One layer of a UNet block: convolution, residual block, transformer, down- or upsampling.

    ``depth`` is the number of transformer blocks; 0 for every other kind.
    """

    kind: Literal["conv", "res", "transformer", "down", "up"]
    in_channels: int
    out_channels: int
    depth: int = 0


Block = tuple[LayerDims, ...]


@dataclass(frozen=True)
class UNetDims:
    """Widths and depths of an SDXL UNet.

    Attributes:
        model_channels, time_embed_dim: widths of the first convolution and of the embedding.
        adm_in_channels: width of the size-and-pooled-text vector; context_dim: of a text token.
        input_blocks, output_blocks, middle: layers in running order.
        head_channels: width of one attention head.
        linear_projection: transformers project with linear layers (SDXL), not 1x1 convolutions.
    """

    in_channels: int
    out_channels: int
    model_channels: int
    time_embed_dim: int
    adm_in_channels: int
    context_dim: int
    input_blocks: tuple[Block, ...]
    middle: Block
    output_blocks: tuple[Block, ...]
    head_channels: int = HEAD_CHANNELS
    linear_projection: bool = True


def unet_dims(
    model_channels: int = 320,
    channel_mult: Sequence[int] = (1, 2, 4),
    num_res_blocks: Sequence[int] = (2, 2, 2),
    transformer_depth: Sequence[int] = (0, 0, 2, 2, 10, 10),
    transformer_depth_output: Sequence[int] = (0, 0, 0, 2, 2, 2, 10, 10, 10),
    transformer_depth_middle: int = 10,
    context_dim: int = 2048,
    adm_in_channels: int = 2816,
    in_channels: int = 4,
    out_channels: int = 4,
    num_head_channels: int = HEAD_CHANNELS,
    use_linear_in_transformer: bool = True,
) -> UNetDims:
    """Return the dims of a UNet with this configuration; the defaults are SDXL's.

    Args: names and meaning as in the host's UNet configuration; depths are listed in building
        order, those of the output blocks from the highest resolution down.
    Source: Podell et al. 2023, SDXL base 1.0 configuration.
    """
    depths, width = list(transformer_depth), model_channels
    inputs: list[Block] = [(LayerDims("conv", in_channels, width),)]
    skips = [width]
    for level, mult in enumerate(channel_mult):
        if level:
            inputs.append((LayerDims("down", width, width),))
            skips.append(width)
        for _ in range(num_res_blocks[level]):
            inputs.append(_res(width, model_channels * mult, depths.pop(0)))
            width = model_channels * mult
            skips.append(width)
    last = LayerDims("res", width, width)
    middle = (*_res(width, width, transformer_depth_middle), last)
    depths = list(transformer_depth_output)
    outputs: list[Block] = []
    for level, mult in reversed(list(enumerate(channel_mult))):
        for i in range(num_res_blocks[level] + 1):
            block = _res(width + skips.pop(), model_channels * mult, depths.pop())
            width = model_channels * mult
            if level and i == num_res_blocks[level]:
                block = (*block, LayerDims("up", width, width))
            outputs.append(block)
    return UNetDims(
        in_channels=in_channels,
        out_channels=out_channels,
        model_channels=model_channels,
        time_embed_dim=EMBED_FACTOR * model_channels,
        adm_in_channels=adm_in_channels,
        context_dim=context_dim,
        input_blocks=tuple(inputs),
        middle=middle,
        output_blocks=tuple(outputs),
        head_channels=num_head_channels,
        linear_projection=use_linear_in_transformer,
    )


def _res(channels_in: int, channels_out: int, depth: int) -> Block:
    res = LayerDims("res", channels_in, channels_out)
    return (res, LayerDims("transformer", channels_out, channels_out, depth)) if depth else (res,)


def dims_from_unet(unet: Any) -> UNetDims:
    """Return the dims of a host UNet, read from its modules' attributes, never from weights.

    Works for quantised layers, whose tensors do not show their widths.

    Raises: ModelError for a UNet with layers SDXL does not have.
    """
    inputs = tuple(_read_block(block) for block in unet.input_blocks)
    middle = _read_block(unet.middle_block)
    outputs = tuple(_read_block(block) for block in unet.output_blocks)
    first = next((t for b in unet.input_blocks for t in b if _is_transformer(t)), None)
    if first is None:
        first = next((t for t in unet.middle_block if _is_transformer(t)), None)
    if first is None:
        raise ModelError(
            "The connected MODEL has no attention over text, so it is no SDXL UNet. Connect an "
            "SDXL base checkpoint to model."
        )
    block = first.transformer_blocks[0]
    return UNetDims(
        in_channels=inputs[0][0].in_channels,
        out_channels=int(unet.out[2].out_channels),
        model_channels=int(unet.model_channels),
        time_embed_dim=int(unet.time_embed[0].out_features),
        adm_in_channels=int(unet.label_emb[0][0].in_features),
        context_dim=int(block.attn2.to_k.in_features),
        input_blocks=inputs,
        middle=middle,
        output_blocks=outputs,
        head_channels=int(block.d_head),
        linear_projection=bool(first.use_linear),
    )


def _is_transformer(layer: Any) -> bool:
    return hasattr(layer, "transformer_blocks")


def _read_block(layers: Any) -> Block:
    return tuple(_read_layer(layer) for layer in layers)


def _read_layer(layer: Any) -> LayerDims:
    """Tell layers apart by what they are made of, so that this file needs no host class."""
    if _is_transformer(layer):
        width = int(layer.in_channels)
        return LayerDims("transformer", width, width, len(layer.transformer_blocks))
    if hasattr(layer, "in_layers"):
        return LayerDims("res", int(layer.channels), int(layer.out_channels))
    if hasattr(layer, "op") and hasattr(layer.op, "stride"):
        return LayerDims("down", int(layer.channels), int(layer.out_channels))
    if hasattr(layer, "conv") and hasattr(layer, "use_conv"):
        return LayerDims("up", int(layer.channels), int(layer.out_channels))
    if hasattr(layer, "kernel_size"):
        return LayerDims("conv", int(layer.in_channels), int(layer.out_channels))
    raise ModelError(
        f"The connected MODEL contains a {type(layer).__name__}, which SDXL's UNet does not have, "
        "so the run cannot be planned. Connect an SDXL base checkpoint to model."
    )


def supir_dims_for(unet: UNetDims) -> SupirDims:
    """Return the dims of the SUPIR network that belongs to a UNet: its encoder half and adapters.

    Lets a run be planned before a SUPIR file is read. Source: SUPIR (Yu et al. 2024), figure 3.
    """
    blocks: list[BlockDims] = []
    for block in unet.input_blocks[1:]:
        layer, depth = block[0], sum(one.depth for one in block)
        kind = "down" if layer.kind == "down" else "res"
        blocks.append(BlockDims(kind, layer.in_channels, layer.out_channels, depth))
    control = ControlDims(
        in_channels=unet.in_channels,
        hint_channels=unet.in_channels,
        model_channels=unet.model_channels,
        time_embed_dim=unet.time_embed_dim,
        adm_in_channels=unet.adm_in_channels,
        context_dim=unet.context_dim,
        blocks=tuple(blocks),
        middle_channels=unet.middle[0].out_channels,
        middle_depth=sum(one.depth for one in unet.middle),
        linear_projection=unet.linear_projection,
    )
    return SupirDims(control, fit_adapters(control))
