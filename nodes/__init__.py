"""The nodes of the pack: the one list of them, and what happens once when ComfyUI loads it."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from comfy_api.latest import ComfyExtension, io

from ..supir.errors import SettingsError
from ..xpu.device_profiles import ProfileError
from ..xpu.errors import FactsError
from . import host, old_prompts, prompt_guard, prompt_routes
from .attention import Attention
from .codec import Decode, Encode
from .color_fix import ColorFix
from .condition import Conditioning
from .custom import Guider, Sampler, Sigmas
from .demo import LoadDemo
from .first_stage import FirstStage
from .graph_judging import warm_up
from .journal import open_journal
from .load import LoadSUPIR
from .machine import machine
from .preflight import PreflightCheck
from .risk_nodes import Cooldown, RiskCheck
from .sample import Sample
from .tiles import Tiles
from .upscale import Upscale

log = logging.getLogger(__name__)

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
    Attention,
    RiskCheck,
    Cooldown,
    PreflightCheck,
]
"""Every node of the pack, in the order of the add-node menu."""


FOLDER = Path(__file__).resolve().parents[1].name
"""Name of the folder this pack lies in."""


class SupirXpuExtension(ComfyExtension):
    """What ComfyUI asks for nodes."""

    async def on_load(self) -> None:
        host.register_folders()
        if not host.serves_web_files(FOLDER):
            log.warning(
                "SUPIR XPU: ComfyUI serves no panel, badges, help pages or templates from the folder %r. "
                "Rename it to supir-xpu and restart ComfyUI; the nodes work either way.",
                FOLDER,
            )
        try:
            if machine().facts.is_xpu:
                open_journal()  # says at start-up what a crash interrupted
                threading.Thread(target=warm_up, args=(machine(),), daemon=True).start()
        except (SettingsError, ProfileError, FactsError) as e:
            log.warning("SUPIR XPU: %s Every run will say so until it is corrected.", e)
        instance = prompt_guard.server_instance()
        if instance is not None:
            prompt_guard.install(instance)
            prompt_routes.install(instance)
            old_prompts.install(instance, prompt_guard.node_classes())

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return NODES
