# Types of host_blocks.py for the checker, which does not see ComfyUI.
from typing import Any

AttnBlock: Any
Decoder: Any
Downsample: Any
Encoder: Any
ResBlock: Any
ResnetBlock: Any
SpatialTransformer: Any
TimestepEmbedSequential: Any
Upsample: Any
VaeDownsample: Any
VaeUpsample: Any
VAE_ATTENTIONS: tuple[Any, ...]
apply_control: Any
forward_timestep_embed: Any
optimized_attention: Any
timestep_embedding: Any
