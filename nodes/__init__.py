"""The nodes of the pack: the one list of them, and what happens once when ComfyUI loads it."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from . import host
from .codec import Decode, Encode
from .color_fix import ColorFix
from .condition import Conditioning
from .custom import Guider, Sampler, Sigmas
from .demo import LoadDemo
from .first_stage import FirstStage
from .load import LoadSUPIR
from .sample import Sample
from .tiles import Tiles
from .upscale import Upscale

NODES: list[type[io.ComfyNode]] = [
    LoadSUPIR,
    LoadDemo,
    FirstStage,
    Tiles,
    Conditioning,
    Sample,
    Upscale,
    Guider,
    Sampler,
    Sigmas,
    Encode,
    Decode,
    ColorFix,
]
"""Every node of the pack, in the order of the add-node menu."""


class SupirXpuExtension(ComfyExtension):
    """What ComfyUI asks for nodes."""

    async def on_load(self) -> None:
        host.register_folders()

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return NODES
