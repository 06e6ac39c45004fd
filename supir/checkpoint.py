"""Turn a SUPIR file of any published layout into a plan for loading it, and load by that plan.

Works on names and shapes alone until ``load_tensors``. Strict: every tensor the deduced network
has must be there, with the right shape, and nothing else behind the same prefixes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from safetensors import SafetensorError, safe_open

from .detect import identify
from .errors import CheckpointError
from .file_kinds import FileKind
from .key_layouts import KeyLayout, load_layouts
from .layout import HEAD_CHANNELS, AdapterDims, ControlDims, CrossDims, SupirDims
from .network_shapes import (
    adapter_kind,
    deduce_adapters,
    deduce_control,
    fit_adapters,
    list_adapters,
    list_control,
    list_encoder,
)
from .safetensors_header import read_header

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]

NORM_GROUPS = 32
"""Groups of every GroupNorm in SDXL and SUPIR: widths must be multiples of it."""

SCALE_NAMES = (
    "scaled_fp8",
    "scale_weight",
    "scale_input",
    "weight_scale",
    "weight_scale_2",
    "input_scale",
    "pre_quant_scale",
    "comfy_quant",
)
"""Last parts of the names under which quantised files keep scales (ComfyUI's QUANTIZATION.md and
its older scaled-fp8 files)."""

_AGAIN = (
    "Download SUPIR-v0Q or SUPIR-v0F again (fp16 .safetensors, about 2.7 GB, or the original), "
    "or choose another file in supir_name."
)


@dataclass(frozen=True)
class SupirFile:
    """What to read from a SUPIR file, under which names, and what network it makes.

    Attributes:
        control: name in the control encoder (``input_blocks.0.0.weight``) -> name in the file.
        adapters: name in the list of adapters (``0.zero_conv.weight``) -> name in the file.
        denoise_encoder: name in the VAE's encoder (``conv_in.weight``) -> name in the file; empty
            if the file brings none.
        ignored: every other tensor of the file, sorted: a whole SDXL checkpoint around SUPIR, and
            leftovers that no network uses.
        dims: widths and depths, deduced from shapes.
        layout: name of the layout in ``configs/layouts.yaml``.
    """

    control: dict[str, str]
    adapters: dict[str, str]
    denoise_encoder: dict[str, str]
    ignored: tuple[str, ...]
    dims: SupirDims
    layout: str


def plan_supir_file(shapes: Shapes, name: str) -> SupirFile:
    """Return how to load a SUPIR file.

    Args:
        shapes: every tensor name of the file with its shape.
        name: file name for messages.
    Raises: CheckpointError if the file is of another kind (saying which and where it belongs), or
        lacks tensors, has too many, or has shapes that do not fit together.
    """
    kind = identify(shapes)
    if kind is not FileKind.SUPIR:
        raise CheckpointError(
            f"{ascii(name)} is not a SUPIR model: it is {kind.title}. {kind.advice} "
            "For supir_name choose a SUPIR file, such as SUPIR-v0Q_fp16.safetensors."
        )
    layout_name, layout = _choose_layout(shapes)
    dropped = load_layouts().dropped
    control = _strip(shapes, layout.control, dropped)
    adapters = _strip(shapes, layout.adapters, dropped)
    encoder = _strip(shapes, layout.denoise_encoder, dropped)
    _refuse_scales((*control.values(), *adapters.values(), *encoder.values()), name)
    _require_parts(control, adapters, layout, name)

    control_dims = deduce_control(_select(shapes, control))
    _compare(shapes, control, list_control(control_dims), layout.control, name)
    adapter_dims = _plan_adapters(shapes, adapters, control_dims, layout.adapters, name)
    if encoder:
        expected = list_encoder(_select(shapes, encoder))
        _compare(shapes, encoder, expected, layout.denoise_encoder, name)
    _check_widths(control_dims, name)

    used = {*control.values(), *adapters.values(), *encoder.values()}
    return SupirFile(
        control=control,
        adapters=adapters,
        denoise_encoder=encoder,
        ignored=tuple(sorted(shapes.keys() - used)),
        dims=SupirDims(control_dims, adapter_dims),
        layout=layout_name,
    )


def load_tensors(path: str | os.PathLike[str], keys: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Return tensors of a safetensors file under new names, on the CPU.

    The file is mapped into memory: data is read when a tensor is first used, and the mapping lives
    as long as one of them does.

    Args:
        keys: new name -> name in the file, such as ``SupirFile.control``.
    Raises: CheckpointError if the file is gone, cut or changed since it was planned.
    """
    path = Path(path)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {new: file.get_tensor(old) for new, old in keys.items()}
    except (OSError, ValueError, RuntimeError, SafetensorError) as e:  # RuntimeError: torch's mmap
        read_header(path)  # raises the precise message where the header shows what is wrong
        raise CheckpointError(
            f"{ascii(path.name)} could not be loaded: {e}. It changed since it was examined, or "
            "this version of safetensors or torch does not know a type in it. Check that nothing "
            "is still writing to it, then run again."
        ) from e


def denoise_encoder_matches(encoder_shapes: Shapes, vae_encoder_shapes: Shapes) -> None:
    """Check that a denoise encoder can take the place of a VAE's encoder.

    Args:
        encoder_shapes: the denoise encoder, names as in ``SupirFile.denoise_encoder``.
        vae_encoder_shapes: the VAE's encoder under the same names (``conv_in.weight``).
    Raises: CheckpointError naming both if a tensor is missing on one side or differs in shape.
    """
    ours, theirs = _encoder_title(encoder_shapes), _encoder_title(vae_encoder_shapes)
    differing = [
        f"{key} is {_shape(encoder_shapes.get(key))} in the SUPIR file, "
        f"{_shape(vae_encoder_shapes.get(key))} in the VAE"
        for key in sorted(encoder_shapes.keys() | vae_encoder_shapes.keys())
        if encoder_shapes.get(key) != vae_encoder_shapes.get(key)
    ]
    if differing:
        raise CheckpointError(
            f"The SUPIR file's denoise encoder ({ours}) does not fit the encoder of the connected "
            f"VAE ({theirs}): {_first(differing)}. It replaces that encoder's weights, so both "
            "must be built alike. Connect an SDXL VAE to vae, or choose another file in supir_name."
        )


def _encoder_title(shapes: Shapes) -> str:
    shape = shapes.get("conv_in.weight")
    return f"{shape[0]} channels wide" if shape else "without conv_in"


def _choose_layout(shapes: Shapes) -> tuple[str, KeyLayout]:
    """Return the layout under whose prefixes most of the file's tensors are."""

    def count(item: tuple[str, KeyLayout]) -> int:
        prefixes = (item[1].control, item[1].adapters)
        return sum(key.startswith(prefixes) for key in shapes)

    return max(load_layouts().layouts.items(), key=count)


def _strip(shapes: Shapes, prefix: str, dropped: Iterable[str]) -> dict[str, str]:
    """Return the tensors behind a prefix: name without it -> name in the file."""
    skip = {prefix + name for name in dropped}
    cut = len(prefix)
    return {key[cut:]: key for key in shapes if key.startswith(prefix) and key not in skip}


def _select(shapes: Shapes, names: Mapping[str, str]) -> dict[str, Shape]:
    return {name: shapes[key] for name, key in names.items()}


def _require_parts(
    control: Mapping[str, str], adapters: Mapping[str, str], layout: KeyLayout, name: str
) -> None:
    for part, found, prefix in (
        ("control encoder", control, layout.control),
        ("adapters", adapters, layout.adapters),
    ):
        if not found:
            raise CheckpointError(
                f"{ascii(name)} holds a part of a SUPIR model but not its {part}: no tensor is "
                f"named {prefix}*. SUPIR needs control encoder and adapters from one file. {_AGAIN}"
            )


def _refuse_scales(keys: Iterable[str], name: str) -> None:
    scales = [key for key in keys if key.rpartition(".")[2] in SCALE_NAMES]
    if scales:
        raise CheckpointError(
            f"{ascii(name)} is a scaled (quantised) SUPIR file: it has {len(scales)} scale tensors "
            f"({_first(scales)}). Its weights mean nothing without them, and applying them is not "
            "supported. Choose a fp16, bf16, fp32 or plain fp8 SUPIR file in supir_name."
        )


def _plan_adapters(
    shapes: Shapes, names: Mapping[str, str], control: ControlDims, prefix: str, name: str
) -> tuple[AdapterDims, ...]:
    """Return the adapters' widths after checking that each fits the control encoder."""
    present = _select(shapes, names)
    fitting = fit_adapters(control)
    for i, expected in enumerate(fitting):
        if adapter_kind(present, i) not in (None, type(expected)):
            _refuse_adapters(f"{prefix}{i} should be {_describe(expected)} and is not", name)
    if adapter_kind(present, len(fitting)) is not None:
        features = len(control.feature_channels)
        _refuse_adapters(
            f"there is a {prefix}{len(fitting)}, but {features} control features need exactly "
            f"{len(fitting)} adapters, numbered from 0",
            name,
        )
    dims = deduce_adapters(present, control)
    _compare(shapes, names, list_adapters(dims), prefix, name)
    for i, (found, expected) in enumerate(zip(dims, fitting, strict=True)):
        if _describe(found) != _describe(expected):
            _refuse_adapters(
                f"{prefix}{i} is {_describe(found)}, where the control encoder of this file needs "
                f"{_describe(expected)}",
                name,
            )
    return dims


def _describe(dims: AdapterDims) -> str:
    """Return an adapter in words, without the hidden width, which is free."""
    if isinstance(dims, CrossDims):
        return (
            f"a ZeroCrossAttn from {dims.control_channels} control channels to "
            f"{dims.query_channels} decoder channels"
        )
    return (
        f"a ZeroSFT from {dims.control_channels} control channels to {dims.skip_channels} skip and "
        f"{dims.decoder_channels} decoder channels"
    )


def _refuse_adapters(what: str, name: str) -> NoReturn:
    raise CheckpointError(
        f"The adapters in {ascii(name)} do not fit its control encoder: {what}. The two parts come "
        f"from different models or one is damaged. {_AGAIN}"
    )


def _check_widths(control: ControlDims, name: str) -> None:
    """Raise for widths that SDXL's normalisation groups or attention heads cannot divide."""
    sizes = (control.in_channels, control.hint_channels, control.time_embed_dim)
    if 0 in (*sizes, control.adm_in_channels, control.context_dim, *control.feature_channels):
        raise CheckpointError(
            f"{ascii(name)} has tensors with a side of 0, so no such network exists. {_AGAIN}"
        )
    attended = {block.out_channels for block in control.blocks if block.depth}
    if control.middle_depth:
        attended.add(control.middle_channels)
    queries = (dims for dims in fit_adapters(control) if isinstance(dims, CrossDims))
    attended.update(dims.query_channels for dims in queries)
    for widths, unit, why in (
        (control.feature_channels, NORM_GROUPS, f"normalised in {NORM_GROUPS} groups"),
        (sorted(attended), HEAD_CHANNELS, f"attended to by heads of {HEAD_CHANNELS} channels"),
    ):
        bad = [width for width in widths if width % unit]
        if bad:
            raise CheckpointError(
                f"{ascii(name)} has layers {bad[0]} channels wide, which are {why}; {bad[0]} is "
                f"not a multiple of {unit}, so no such network exists. {_AGAIN}"
            )


def _compare(
    shapes: Shapes,
    names: Mapping[str, str],
    expected: Mapping[str, Shape],
    prefix: str,
    name: str,
) -> None:
    """Raise unless the tensors behind a prefix are exactly the expected ones."""
    missing = [prefix + key for key in expected if key not in names]
    extra = [key for short, key in names.items() if short not in expected]
    if missing or extra:
        lacks = f"lacks {_tensors(missing)}: {_first(missing)}" if missing else ""
        has = f"has {_tensors(extra)} too many: {_first(extra)}" if extra else ""
        raise CheckpointError(
            f"{ascii(name)} is an incomplete or altered SUPIR file: behind {prefix} it "
            f"{' and '.join(filter(None, (lacks, has)))}. A network with the sizes its other "
            f"tensors show has exactly {len(expected):,} there. {_AGAIN}"
        )
    wrong = [
        f"{prefix}{key} is {_shape(shapes[names[key]])} instead of {_shape(shape)}"
        for key, shape in expected.items()
        if shapes[names[key]] != shape
    ]
    if wrong:
        raise CheckpointError(
            f"{ascii(name)} has {_tensors(wrong)} of a shape that does not fit the rest of the "
            f"file: {_first(wrong)}. The file was damaged or put together from different models. "
            f"{_AGAIN}"
        )


def _tensors(items: list[str]) -> str:
    return f"{len(items):,} tensor{'' if len(items) == 1 else 's'}"


def _first(items: list[str], limit: int = 5) -> str:
    """Return the first few items in plain ASCII, and how many more there are."""
    shown = ", ".join(ascii(item)[1:-1] for item in items[:limit])
    more = len(items) - limit
    return f"{shown} and {more:,} more" if more > 0 else shown


def _shape(shape: Shape | None) -> str:
    if shape is None:
        return "absent"
    return "x".join(map(str, shape)) if shape else "a single number"
