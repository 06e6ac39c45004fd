"""Which networks a node of a graph will run, before any of them is loaded.

Our demo model is recognised by its loader; everything else is planned as SDXL with SUPIR, the only
kind of model the nodes accept.
"""

from __future__ import annotations

from functools import lru_cache

import comfy.model_management as mm
import torch

from ..supir import demo_model
from ..supir.plan import Networks, unet_dims
from ..supir.striped import KLLayout
from .demo import demo_dims
from .graph import MAX_LINKS, Graph
from .planning import layout_of_ratio
from .sample_request import DEFAULT_RATIO

DEMO = "SUPIR_XPU_LoadDemo"
PASSES_ON: dict[str, str] = {
    "SUPIR_XPU_RiskCheck": "anything",
    "SUPIR_XPU_Cooldown": "anything",
    "SUPIR_XPU_Preflight": "anything",
}
UNET_DTYPES = [torch.float16, torch.bfloat16, torch.float32]
VAE_DTYPES = [torch.bfloat16, torch.float32]
"""What ComfyUI chooses from for SDXL's UNet and for a KL VAE."""

_NOT_DIMS = (
    *("image_size", "num_heads", "use_spatial_transformer"),
    *("legacy", "num_classes", "use_temporal_attention"),
)


def uses_demo(graph: Graph, node_id: str, *names: str) -> bool:
    """Say whether one of these inputs is fed by the demo's loader, through any nodes between."""
    for name in names:
        at, socket = node_id, name
        for _ in range(MAX_LINKS):
            link = graph.link(at, socket)
            if link is None:
                break
            at = link[0]
            kind = graph.kind(at)
            if kind == DEMO:
                return True
            socket = PASSES_ON.get(kind, name)
    return False


def vae_ratio(graph: Graph, node_id: str) -> int:
    """Return the pixels per latent cell of the VAE connected to a node."""
    return demo_model.VAE_RATIO if uses_demo(graph, node_id, "vae") else DEFAULT_RATIO


def networks_of(graph: Graph, node_id: str) -> Networks:
    """Return the networks a node will run, as far as the graph tells."""
    return known_networks(uses_demo(graph, node_id, "model", "supir", "vae"))


def known_networks(demo: bool) -> Networks:
    """Return the demo's networks or SDXL's with SUPIR, in the dtypes ComfyUI would choose."""
    device = mm.get_torch_device()
    stored = mm.unet_dtype(device=device, supported_dtypes=UNET_DTYPES)
    runs = mm.unet_manual_cast(stored, device, UNET_DTYPES) or stored
    vae = mm.vae_dtype(device, VAE_DTYPES)
    return _networks(demo, runs.itemsize, vae.itemsize, stored.itemsize)


@lru_cache(maxsize=8)
def _networks(demo: bool, dtype_bytes: int, vae_dtype_bytes: int, stored_bytes: int) -> Networks:
    half = torch.float16.itemsize  # published SUPIR files and the demo's
    sizes = (dtype_bytes, vae_dtype_bytes, (stored_bytes, half))
    if not demo:
        networks = Networks(vae=layout_of_ratio(DEFAULT_RATIO))
        return Networks(networks.unet, networks.supir, networks.vae, *sizes)
    config = {k: v for k, v in demo_model.UNET_CONFIG.items() if k not in _NOT_DIMS}
    vae = demo_model.VAE_CONFIG
    layout = KLLayout(
        ch=vae["ch"], ch_mult=tuple(vae["ch_mult"]), num_res_blocks=vae["num_res_blocks"]
    )
    return Networks(unet_dims(**config), demo_dims(), layout, *sizes)
