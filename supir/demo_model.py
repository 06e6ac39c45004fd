"""The bundled demo model: its widths and its weights.

SDXL and SUPIR in miniature, trained on a small set of pictures (docs/demo_model.md): it takes noise
and JPEG blocks out of a picture and invents nothing. The text encoder's weights are computed, all
others are read from one file beside this module, in which every matrix and convolution is stored in
8 bits with one scale per output row.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from .errors import CheckpointError

WEIGHTS_FILE = Path(__file__).parent / "weights" / "demo.safetensors"
WEIGHTS_SHA256 = "83c6c8c91a8be1fe0c30b5cc195fc5e7b78b6a3a24cbde76164e029ca6ba7331"
"""Checksum of the file; tools/train_demo.py prints it when it writes one."""

COMPUTED = "demo.clip."
"""Start of the names of weights that are computed; all others are in the file."""

SCALE = ".scale"
"""What is added to a tensor's key for the scales of its rows."""

_AGAIN = "Install the pack again, or update it, so that the file is the published one."

VAE_RATIO = 4
"""Pixels per latent cell of the demo VAE."""

VAE_CONFIG: dict[str, Any] = {
    "double_z": True,
    "z_channels": 4,
    "resolution": 256,
    "in_channels": 3,
    "out_ch": 3,
    "ch": 64,
    "ch_mult": [1, 1, 1],
    "num_res_blocks": 1,
    "attn_resolutions": [],
    "dropout": 0.0,
}

TEXT_WIDTH = 64
"""Width of the demo text encoder: context and pooled vector."""

TEXT_CONFIG: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": TEXT_WIDTH,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "hidden_act": "quick_gelu",
    "eos_token_id": 49407,
    "max_position_embeddings": 77,
    "vocab_size": 49408,
}

SIZE_EMBEDDING = 6 * 256
"""SDXL's size vector: six numbers of 256 channels each."""

UNET_CONFIG: dict[str, Any] = {
    "image_size": 32,
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 64,
    "num_res_blocks": [2, 2, 2],
    "channel_mult": [1, 1, 1],
    "transformer_depth": [0, 0, 1, 1, 1, 1],
    "transformer_depth_output": [0, 0, 0, 1, 1, 1, 1, 1, 1],
    "transformer_depth_middle": 1,
    "context_dim": TEXT_WIDTH,
    "num_heads": -1,
    "num_head_channels": 64,
    "use_spatial_transformer": True,
    "use_linear_in_transformer": True,
    "legacy": False,
    "num_classes": "sequential",
    "adm_in_channels": TEXT_WIDTH + SIZE_EMBEDDING,
    "use_temporal_attention": False,
}


def tensor(key: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the demo weight of a parameter: a function of its name and shape alone, float32.

    Convolutions, linear layers and embeddings: uniform with variance 1 / fan-in. Norm weights: 1.
    Biases: 0. The same on every platform (PCG64 raw output, seeded with the CRC-32 of the name).
    """
    if len(shape) < 2:
        fill = 1.0 if key.endswith("weight") and shape else 0.0
        return torch.full(shape, fill)
    fan_in = math.prod(shape[1:])
    count = math.prod(shape)
    raw = np.random.PCG64(zlib.crc32(key.encode("utf-8"))).random_raw(count)
    unit = (raw >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)
    values = unit * np.float32(math.sqrt(3.0 / fan_in))
    return torch.from_numpy(values.reshape(shape))


def computed(shapes: Mapping[str, Any], prefix: str) -> dict[str, torch.Tensor]:
    """Return computed weights for every parameter of a state dict, named ``prefix`` + its key."""
    return {key: tensor(prefix + key, tuple(value.shape)) for key, value in shapes.items()}


def quantise(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights as the file holds them.

    Tensors of two or more dimensions: int8 with one fp16 scale per output row under key + ``.scale``,
    value = integer * scale. Vectors: fp16.
    """
    stored: dict[str, torch.Tensor] = {}
    for key, value in weights.items():
        if value.ndim < 2:
            stored[key] = value.half().contiguous()
            continue
        rows = value.float().flatten(1)
        scale = (rows.abs().amax(1) / 127.0).clamp(min=1e-7).half()
        levels = (rows / scale.float()[:, None]).round().clamp(-127.0, 127.0)
        stored[key] = levels.to(torch.int8).view(value.shape).contiguous()
        stored[key + SCALE] = scale
    return stored


@lru_cache(maxsize=1)
def read_file(path: Path = WEIGHTS_FILE, sha256: str = WEIGHTS_SHA256) -> dict[str, torch.Tensor]:
    """Return the tensors of the weight file. Raises: CheckpointError when it is not the published one."""
    try:
        content = path.read_bytes()
    except OSError as e:
        raise CheckpointError(
            f"The demo model's weights {path} cannot be read: {e.strerror or e}. {_AGAIN}"
        ) from e
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise CheckpointError(
            f"The demo model's weights {path} are damaged: {len(content):,} bytes with the checksum "
            f"{found[:16]}... where {sha256[:16]}... belongs. {_AGAIN}"
        )
    return safetensors.torch.load(content)


def trained(shapes: Mapping[str, Any], prefix: str) -> dict[str, torch.Tensor]:
    """Return the file's weights for every parameter of a state dict, named ``prefix`` + its key, float32.

    Raises: CheckpointError when the file does not hold exactly these tensors behind the prefix.
    """
    stored = read_file()
    behind = {key.removeprefix(prefix) for key in stored if key.startswith(prefix)}
    names = {key for key in behind if not key.endswith(SCALE)}
    odd = sorted(names ^ set(shapes))
    odd += [key for key in names & set(shapes) if stored[prefix + key].shape != shapes[key].shape]
    if odd:
        raise CheckpointError(
            f"The demo model's weights {WEIGHTS_FILE} do not fit its networks: {len(odd)} tensors "
            f"behind {prefix} are missing, too many or of another shape, {odd[0]} first. {_AGAIN}"
        )
    weights: dict[str, torch.Tensor] = {}
    for key in shapes:
        value = stored[prefix + key].float()
        if key + SCALE in behind:
            scale = stored[prefix + key + SCALE].float()
            value = value * scale.view(-1, *[1] * (value.ndim - 1))
        weights[key] = value
    return weights


def state(shapes: Mapping[str, Any], prefix: str) -> dict[str, torch.Tensor]:
    """Return the demo's weights for every parameter of a state dict, named ``prefix`` + its key.

    Raises: CheckpointError when the file of weights is missing, damaged or another one.
    """
    return (computed if prefix.startswith(COMPUTED) else trained)(shapes, prefix)
