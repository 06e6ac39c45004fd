"""True-size SDXL and SUPIR files with random weights, written without holding them in memory.

Names and shapes are the published ones: UNet, VAE and SUPIR from the key list in tests/parity, the
two text encoders from ComfyUI's own configuration files. The weights mean nothing; they are scaled
so that activations stay finite.
"""

from __future__ import annotations

import gzip
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import torch

Shapes = dict[str, tuple[int, ...]]

CLIP_L = "conditioner.embedders.0.transformer.text_model."
CLIP_G = "conditioner.embedders.1.model."
EMBEDDING_STD = 0.02
LOGIT_SCALE = 4.6052
"""log(100), the value CLIP models end their training with."""

BLOCK_VALUES = 1 << 23
BYTES_PER_VALUE = 2


def key_list(path: Path) -> tuple[Shapes, Shapes]:
    """Shapes of SDXL's UNet and VAE, and of SUPIR's own tensors, from supir_v0_keys.json.gz."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        content = json.load(file)
    base = {name: tuple(shape) for name, shape in content["sdxl_base"].items()}
    return base, {name: tuple(shape) for name, shape in content["supir"].items()}


def clip_l_shapes(config: dict[str, int]) -> Shapes:
    """SDXL's first text encoder, as transformers names it, from ``sd1_clip_config.json``."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    shapes: Shapes = {
        f"{CLIP_L}embeddings.token_embedding.weight": (config["vocab_size"], width),
        f"{CLIP_L}embeddings.position_embedding.weight": (config["max_position_embeddings"], width),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"{CLIP_L}encoder.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= _affine(f"{at}self_attn.{name}", width, width)
        shapes |= _affine(f"{at}mlp.fc1", inner, width) | _affine(f"{at}mlp.fc2", width, inner)
        shapes |= _affine(f"{at}layer_norm1", width) | _affine(f"{at}layer_norm2", width)
    return shapes | _affine(f"{CLIP_L}final_layer_norm", width)


def clip_g_shapes(config: dict[str, int]) -> Shapes:
    """SDXL's second text encoder, as OpenCLIP names it, from ``clip_config_bigg.json``."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    shapes: Shapes = {
        f"{CLIP_G}token_embedding.weight": (config["vocab_size"], width),
        f"{CLIP_G}positional_embedding": (config["max_position_embeddings"], width),
        f"{CLIP_G}text_projection": (width, config["projection_dim"]),
        f"{CLIP_G}logit_scale": (),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"{CLIP_G}transformer.resblocks.{layer}."
        shapes[f"{at}attn.in_proj_weight"] = (3 * width, width)
        shapes[f"{at}attn.in_proj_bias"] = (3 * width,)
        shapes |= _affine(f"{at}attn.out_proj", width, width)
        shapes |= _affine(f"{at}mlp.c_fc", inner, width) | _affine(f"{at}mlp.c_proj", width, inner)
        shapes |= _affine(f"{at}ln_1", width) | _affine(f"{at}ln_2", width)
    return shapes | _affine(f"{CLIP_G}ln_final", width)


def text_encoder_shapes(comfyui: Path) -> Shapes:
    """Both text encoders of SDXL at the sizes that the ComfyUI in ``comfyui`` builds."""
    folder = comfyui / "comfy"
    small = json.loads((folder / "sd1_clip_config.json").read_text(encoding="utf-8"))
    large = json.loads((folder / "clip_config_bigg.json").read_text(encoding="utf-8"))
    return clip_l_shapes(small) | clip_g_shapes(large)


def file_bytes(shapes: Shapes) -> int:
    """Size of the values of such a file (the header comes on top: below 1 MB)."""
    return sum(math.prod(shape) for shape in shapes.values()) * BYTES_PER_VALUE


def write_random(path: Path, shapes: Shapes, seed: int) -> None:
    """Write a float16 safetensors file with random values, at most 16 MB of them at a time."""
    header: dict[str, object] = {}
    offset = 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * BYTES_PER_VALUE
        header[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode("utf-8")
    text += b" " * (-len(text) % 8)
    noise = torch.randn(BLOCK_VALUES, generator=torch.Generator().manual_seed(seed)).half()
    position = 0
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for name, shape in shapes.items():
            position = _write_tensor(file, name, shape, noise, position)


def value_scale(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation for one tensor.

    Matrices and convolutions: 0 and 1/sqrt(fan in), so an activation keeps its size. Vectors:
    weights (of norms) 1, biases 0.
    """
    if not shape:
        return LOGIT_SCALE, 0.0
    if "embedding" in name:
        return 0.0, EMBEDDING_STD
    if len(shape) == 1:
        return (1.0, 0.0) if name.endswith("weight") else (0.0, 0.0)
    return 0.0, math.prod(shape[1:]) ** -0.5


def _write_tensor(
    file: BinaryIO, name: str, shape: tuple[int, ...], noise: torch.Tensor, position: int
) -> int:
    """Write one tensor; return where the next one goes on reading the noise."""
    mean, std = value_scale(name, shape)
    for start, count in _pieces(math.prod(shape), position):
        values = noise[start : start + count] * std + mean
        file.write(values.numpy().tobytes())
        position = (start + count) % BLOCK_VALUES
    return position


def _pieces(values: int, position: int) -> Iterator[tuple[int, int]]:
    """Cut ``values`` into runs of the noise block, which is read round and round."""
    while values:
        count = min(values, BLOCK_VALUES - position)
        yield position, count
        values -= count
        position = (position + count) % BLOCK_VALUES


def _affine(name: str, rows: int, columns: int | None = None) -> Shapes:
    """Weight and bias of a linear layer, or of a norm if there are no columns."""
    weight = (rows,) if columns is None else (rows, columns)
    return {f"{name}.weight": weight, f"{name}.bias": (rows,)}
