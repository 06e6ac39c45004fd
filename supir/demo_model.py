"""The bundled tiny model: its widths, and weights that are computed instead of stored.

It has the shape of SDXL and SUPIR in miniature and random weights, so it shows that the pipeline
runs; it restores nothing.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

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


def state(shapes: Mapping[str, Any], prefix: str) -> dict[str, torch.Tensor]:
    """Return demo weights for every parameter of a state dict, named ``prefix`` + its key."""
    return {key: tensor(prefix + key, tuple(value.shape)) for key, value in shapes.items()}
