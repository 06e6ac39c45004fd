"""The one line of contact with ComfyUI's networks: its UNet, VAE and attention building blocks.

Everything else in this package receives what it needs as an argument.
"""

from comfy.ldm.modules.attention import SpatialTransformer, optimized_attention
from comfy.ldm.modules.diffusionmodules.model import (
    AttnBlock,
    Decoder,
    Encoder,
    ResnetBlock,
    normal_attention,
    pytorch_attention,
    xformers_attention,
)
from comfy.ldm.modules.diffusionmodules.model import Downsample as VaeDownsample
from comfy.ldm.modules.diffusionmodules.model import Upsample as VaeUpsample
from comfy.ldm.modules.diffusionmodules.openaimodel import (
    Downsample,
    ResBlock,
    TimestepEmbedSequential,
    Upsample,
    apply_control,
    forward_timestep_embed,
)
from comfy.ldm.modules.diffusionmodules.util import timestep_embedding

VAE_ATTENTIONS = (normal_attention, pytorch_attention, xformers_attention)
"""The attention functions ComfyUI's AttnBlock may hold; each computes plain softmax attention."""

__all__ = [
    "VAE_ATTENTIONS",
    "AttnBlock",
    "Decoder",
    "Downsample",
    "Encoder",
    "ResBlock",
    "ResnetBlock",
    "SpatialTransformer",
    "TimestepEmbedSequential",
    "Upsample",
    "VaeDownsample",
    "VaeUpsample",
    "apply_control",
    "forward_timestep_embed",
    "optimized_attention",
    "timestep_embedding",
]
