"""Deduce SUPIR's widths and depths from tensor shapes, and say which tensors such a network has.

Two halves that check each other: ``deduce_*`` reads numbers from the shapes that are there,
``list_*`` writes down every tensor a network of those numbers consists of. Whatever a file lacks
or has beyond that is found by comparing, not by trusting the deduction.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from .layout import AdapterDims, BlockDims, ControlDims, CrossDims, SftDims

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]

MAX_INDEX = 255
"""Largest block, transformer or adapter number taken seriously; SDXL's largest is 11."""

SFT_HIDDEN = 128
"""Hidden width of a ZeroSFT whose own tensors do not tell it (published value)."""

_SFT_PARTS = ("mlp_shared.", "param_free_norm.", "zero_add.", "zero_mul.", "zero_conv.")
_CROSS_PARTS = ("attn.", "norm1.", "norm2.")
_RES_PARTS = ("in_layers.", "emb_layers.", "out_layers.", "skip_connection.")


def deduce_control(shapes: Shapes) -> ControlDims:
    """Return the control encoder's widths and depths.

    Args:
        shapes: tensors of the control encoder, names without prefix. Some may be missing: a number
            none of the rest tells is 0, and ``list_control`` still names every tensor.
    """
    model_channels = _read(shapes, "input_blocks.0.0.", "input_hint_block.0.")
    blocks: list[BlockDims] = []
    width = model_channels
    for i in range(1, _count(shapes, "input_blocks.")):
        block = _deduce_block(shapes, f"input_blocks.{i}.", width)
        blocks.append(block)
        width = block.out_channels
    middle = "middle_block.1."
    plain_middle = _starts(shapes, *(middle + part for part in _RES_PARTS))
    projections = (s for k, s in shapes.items() if k.endswith(".proj_in.weight"))
    contexts = (s for k, s in shapes.items() if k.endswith(".attn2.to_k.weight") and len(s) == 2)
    return ControlDims(
        in_channels=_side(shapes, "input_blocks.0.0.weight", 1),
        hint_channels=_side(shapes, "input_hint_block.0.weight", 1),
        model_channels=model_channels,
        time_embed_dim=_read(shapes, "time_embed.0.", "time_embed.2."),
        adm_in_channels=_side(shapes, "label_emb.0.0.weight", 1),
        context_dim=next(contexts, (0, 0))[1],
        blocks=tuple(blocks),
        middle_channels=width,
        middle_depth=0 if plain_middle else max(1, _count(shapes, f"{middle}transformer_blocks.")),
        linear_projection=len(next(projections, (0, 0))) == 2,
    )


def _deduce_block(shapes: Shapes, prefix: str, width: int) -> BlockDims:
    if _starts(shapes, f"{prefix}0.op."):
        out = _read(shapes, f"{prefix}0.op.")
        return BlockDims("down", width, out or width)
    res = f"{prefix}0."
    out = _read(
        shapes,
        f"{res}in_layers.2.",
        f"{res}emb_layers.1.",
        f"{res}out_layers.0.",
        f"{res}out_layers.3.",
    )
    depth = 0
    if _starts(shapes, f"{prefix}1."):
        depth = max(1, _count(shapes, f"{prefix}1.transformer_blocks."))
    return BlockDims("res", width, out or width, depth)


def deduce_adapters(shapes: Shapes, control: ControlDims) -> tuple[AdapterDims, ...]:
    """Return the adapters, in the order of their numbers.

    Their kinds and number follow from the control encoder (``fit_adapters``); each one's widths
    are read from its own tensors, and taken from the control encoder where they are missing.
    """
    found: list[AdapterDims] = []
    for i, fitting in enumerate(fit_adapters(control)):
        prefix = f"{i}."
        if adapter_kind(shapes, i) not in (None, type(fitting)):
            fitting = _other_kind(fitting)
        if isinstance(fitting, CrossDims):
            query = _read(shapes, f"{prefix}norm1.", f"{prefix}attn.to_out.0.")
            source = _read(shapes, f"{prefix}norm2.")
            found.append(
                CrossDims(query or fitting.query_channels, source or fitting.control_channels)
            )
            continue
        joined = _read(
            shapes,
            f"{prefix}param_free_norm.",
            f"{prefix}zero_add.",
            f"{prefix}zero_mul.",
        )
        skip = _read(shapes, f"{prefix}zero_conv.") or fitting.skip_channels
        source = _side(shapes, f"{prefix}mlp_shared.0.weight", 1)
        found.append(
            SftDims(
                control_channels=source or fitting.control_channels,
                skip_channels=skip,
                decoder_channels=joined - skip if joined else fitting.decoder_channels,
                hidden_channels=_read(shapes, f"{prefix}mlp_shared.0.") or SFT_HIDDEN,
            )
        )
    return tuple(found)


def adapter_kind(shapes: Shapes, index: int) -> type[AdapterDims] | None:
    """Return what adapter ``index`` is by its tensor names; None if none of them tells."""
    if _starts(shapes, *(f"{index}.{part}" for part in _SFT_PARTS)):
        return SftDims
    if _starts(shapes, *(f"{index}.{part}" for part in _CROSS_PARTS)):
        return CrossDims
    return None


def _other_kind(dims: AdapterDims) -> AdapterDims:
    if isinstance(dims, CrossDims):
        return SftDims(dims.control_channels, dims.control_channels, 0, SFT_HIDDEN)
    return CrossDims(dims.skip_channels, dims.control_channels)


def fit_adapters(control: ControlDims) -> tuple[AdapterDims, ...]:
    """Return the adapters that a control encoder of these dims needs, in checkpoint order.

    Feature j of the encoder meets, in the mirrored decoder, the skip of the same width. Walking
    the features upwards: one ZeroSFT each, and before that of a ``down`` feature a ZeroCrossAttn,
    which sits behind the same decoder block, the one that upsamples. The middle block's comes last
    and has no decoder activation to join.

    Source: SUPIR's published network; golden README section 3.
    """
    widths = control.feature_channels[:-1]
    kinds = ("res", *(block.kind for block in control.blocks))
    levels = _level_widths(control)
    adapters: list[AdapterDims] = []
    for j, width in enumerate(widths):
        last = j + 1 == len(widths)
        decoder = control.middle_channels if last else levels[j + 1]
        if kinds[j] == "down":
            adapters.append(CrossDims(levels[j], width))
        adapters.append(SftDims(width, width, decoder, SFT_HIDDEN))
    middle = control.middle_channels
    return (*adapters, SftDims(middle, middle, 0, SFT_HIDDEN))


def _level_widths(control: ControlDims) -> list[int]:
    """Return, per feature before the middle, the width of the decoder block that takes it.

    A ``down`` feature, and the first convolution's, belongs to the residual blocks that follow it.
    """
    widths: list[int] = []
    level = control.middle_channels
    for block in reversed(control.blocks):
        if block.kind == "res":
            level = block.out_channels
        widths.append(level)
    return [level, *reversed(widths)]


def list_control(dims: ControlDims) -> dict[str, Shape]:
    """Return every tensor of a control encoder with its shape."""
    width, embed = dims.model_channels, dims.time_embed_dim
    tensors: dict[str, Shape] = {}
    _add(tensors, "input_blocks.0.0", (width, dims.in_channels, 3, 3))
    _add(tensors, "input_hint_block.0", (width, dims.hint_channels, 3, 3))
    for name, inner in (("time_embed", width), ("label_emb.0", dims.adm_in_channels)):
        _add(tensors, f"{name}.0", (embed, inner))
        _add(tensors, f"{name}.2", (embed, embed))
    for i, block in enumerate(dims.blocks, start=1):
        prefix = f"input_blocks.{i}."
        channels_in, channels_out = block.in_channels, block.out_channels
        if block.kind == "down":
            _add(tensors, f"{prefix}0.op", (channels_out, channels_in, 3, 3))
            continue
        _add_res(tensors, f"{prefix}0.", channels_in, channels_out, embed)
        if block.depth:
            _add_transformer(tensors, f"{prefix}1.", channels_out, block.depth, dims)
    middle = dims.middle_channels
    _add_res(tensors, "middle_block.0.", middle, middle, embed)
    if dims.middle_depth:
        _add_transformer(tensors, "middle_block.1.", middle, dims.middle_depth, dims)
    _add_res(tensors, f"middle_block.{2 if dims.middle_depth else 1}.", middle, middle, embed)
    return tensors


def list_adapters(adapters: Iterable[AdapterDims]) -> dict[str, Shape]:
    """Return every tensor of the adapters with its shape, named ``<number>.<rest>``."""
    tensors: dict[str, Shape] = {}
    for i, dims in enumerate(adapters):
        source = dims.control_channels
        if isinstance(dims, CrossDims):
            query = dims.query_channels
            tensors[f"{i}.attn.to_q.weight"] = (query, query)
            tensors[f"{i}.attn.to_k.weight"] = (query, source)
            tensors[f"{i}.attn.to_v.weight"] = (query, source)
            _add(tensors, f"{i}.attn.to_out.0", (query, query))
            _add(tensors, f"{i}.norm1", (query,))
            _add(tensors, f"{i}.norm2", (source,))
            continue
        joined = dims.skip_channels + dims.decoder_channels
        _add(tensors, f"{i}.mlp_shared.0", (dims.hidden_channels, source, 3, 3))
        _add(tensors, f"{i}.param_free_norm", (joined,))
        _add(tensors, f"{i}.zero_mul", (joined, dims.hidden_channels, 3, 3))
        _add(tensors, f"{i}.zero_add", (joined, dims.hidden_channels, 3, 3))
        _add(tensors, f"{i}.zero_conv", (dims.skip_channels, source, 1, 1))
    return tensors


def list_encoder(shapes: Shapes) -> dict[str, Shape]:
    """Return every tensor a denoise encoder has whose levels and widths these shapes show.

    The encoder of a KL VAE: levels of residual blocks with a strided convolution between them, and
    a middle of two residual blocks around one attention. Source: the published config of SDXL's
    VAE (golden README section 12).
    """
    width = _read(shapes, "conv_in.", "down.0.block.0.norm1.")
    tensors: dict[str, Shape] = {}
    _add(tensors, "conv_in", (width, _side(shapes, "conv_in.weight", 1), 3, 3))
    levels = max(1, _count(shapes, "down."))
    for level in range(levels):
        for i in range(max(1, _count(shapes, f"down.{level}.block."))):
            prefix = f"down.{level}.block.{i}."
            sources = (f"{prefix}{part}." for part in ("conv1", "norm2", "conv2"))
            out = _read(shapes, *sources) or width
            _add_vae_res(tensors, prefix, width, out)
            width = out
        if level + 1 < levels:
            _add(tensors, f"down.{level}.downsample.conv", (width, width, 3, 3))
    _add_vae_res(tensors, "mid.block_1.", width, width)
    _add(tensors, "mid.attn_1.norm", (width,))
    for part in ("q", "k", "v", "proj_out"):
        _add(tensors, f"mid.attn_1.{part}", (width, width, 1, 1))
    _add_vae_res(tensors, "mid.block_2.", width, width)
    _add(tensors, "norm_out", (width,))
    _add(tensors, "conv_out", (_read(shapes, "conv_out."), width, 3, 3))
    return tensors


def _add(tensors: dict[str, Shape], name: str, weight: Shape) -> None:
    """Add a layer's weight and its bias, which is as long as the weight's first side."""
    tensors[f"{name}.weight"] = weight
    tensors[f"{name}.bias"] = weight[:1]


def _add_res(
    tensors: dict[str, Shape], prefix: str, channels_in: int, channels_out: int, embed: int
) -> None:
    _add(tensors, f"{prefix}in_layers.0", (channels_in,))
    _add(tensors, f"{prefix}in_layers.2", (channels_out, channels_in, 3, 3))
    _add(tensors, f"{prefix}emb_layers.1", (channels_out, embed))
    _add(tensors, f"{prefix}out_layers.0", (channels_out,))
    _add(tensors, f"{prefix}out_layers.3", (channels_out, channels_out, 3, 3))
    if channels_in != channels_out:
        _add(tensors, f"{prefix}skip_connection", (channels_out, channels_in, 1, 1))


def _add_vae_res(
    tensors: dict[str, Shape], prefix: str, channels_in: int, channels_out: int
) -> None:
    _add(tensors, f"{prefix}norm1", (channels_in,))
    _add(tensors, f"{prefix}conv1", (channels_out, channels_in, 3, 3))
    _add(tensors, f"{prefix}norm2", (channels_out,))
    _add(tensors, f"{prefix}conv2", (channels_out, channels_out, 3, 3))
    if channels_in != channels_out:
        _add(tensors, f"{prefix}nin_shortcut", (channels_out, channels_in, 1, 1))


def _add_transformer(
    tensors: dict[str, Shape], prefix: str, channels: int, depth: int, dims: ControlDims
) -> None:
    square = (channels, channels)
    projection = square if dims.linear_projection else (*square, 1, 1)
    _add(tensors, f"{prefix}norm", (channels,))
    _add(tensors, f"{prefix}proj_in", projection)
    _add(tensors, f"{prefix}proj_out", projection)
    for i in range(depth):
        block = f"{prefix}transformer_blocks.{i}."
        for attention, source in (("attn1", channels), ("attn2", dims.context_dim)):
            tensors[f"{block}{attention}.to_q.weight"] = square
            tensors[f"{block}{attention}.to_k.weight"] = (channels, source)
            tensors[f"{block}{attention}.to_v.weight"] = (channels, source)
            _add(tensors, f"{block}{attention}.to_out.0", square)
        _add(tensors, f"{block}ff.net.0.proj", (8 * channels, channels))  # value and gate, 4x each
        _add(tensors, f"{block}ff.net.2", (channels, 4 * channels))
        for norm in ("norm1", "norm2", "norm3"):
            _add(tensors, f"{block}{norm}", (channels,))


def _side(shapes: Shapes, key: str, axis: int) -> int:
    shape = shapes.get(key, ())
    return shape[axis] if axis < len(shape) else 0


def _read(shapes: Shapes, *layers: str) -> int:
    """Return the outputs of the first layer whose weight or bias is there; 0 if none is."""
    for layer in layers:
        size = _side(shapes, f"{layer}weight", 0) or _side(shapes, f"{layer}bias", 0)
        if size:
            return size
    return 0


def _starts(shapes: Shapes, *prefixes: str) -> bool:
    return any(key.startswith(prefixes) for key in shapes)


def _count(shapes: Shapes, prefix: str) -> int:
    """Return one more than the largest number behind a prefix; gaps are for the caller to find."""
    number = re.compile(re.escape(prefix) + r"(0|[1-9][0-9]{0,2})\.")
    found = (number.match(key) for key in shapes)
    numbers = [int(match[1]) for match in found if match]
    return max((n for n in numbers if n <= MAX_INDEX), default=-1) + 1
