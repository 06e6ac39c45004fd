"""SUPIR XPU: a ComfyUI node pack that restores and upscales pictures with SUPIR.

ComfyUI loads this file by path, under whatever name the folder has. Nothing of ComfyUI is
imported until it calls ``comfy_entrypoint``.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from comfy_api.latest import ComfyExtension

WEB_DIRECTORY = "./web"


async def comfy_entrypoint() -> ComfyExtension:
    """Return the extension with every node of the pack (called once by ComfyUI at start-up)."""
    try:
        from .nodes import SupirXpuExtension
    except Exception:  # ComfyUI logs one line without a traceback; say where it failed.
        logging.getLogger(__name__).exception("SUPIR XPU could not be loaded")
        raise
    return SupirXpuExtension()
