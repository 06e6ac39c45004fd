"""SUPIR work that ComfyUI's own nodes do in a graph: what it would ask of an Intel GPU.

Those nodes run the whole picture at once and let ComfyUI choose the attention, so their plans are
estimates from ours at the same size. They are warned about, and refused only if the user says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..supir.plan import Networks, RunRequest
from ..xpu.auto_plan import Settings
from ..xpu.risk import PlanNumbers
from .graph import MAX_LINKS, Graph
from .graph_networks import known_networks, vae_ratio
from .graph_sizes import ImageSize, LatentSize, Sizes
from .guarded_run import Judged, judge_request
from .machine import Machine
from .planning import attention_cost, plan_cached, plan_numbers

APPLY = "SUPIRApply"
SAMPLERS = {"KSampler": "model", "KSamplerAdvanced": "model", "SamplerCustom": "model"}
SAMPLERS["CFGGuider"] = "model"
VAE_NODES = {
    "VAEEncode": "pixels",
    "VAEEncodeTiled": "pixels",
    "VAEDecode": "samples",
    "VAEDecodeTiled": "samples",
}
CORE_NODES = (APPLY, *SAMPLERS, *VAE_NODES)


@dataclass(frozen=True)
class CoreJob:
    """The work of one node of ComfyUI's.

    Attributes:
        vae_tile_px: edge of the VAE's overlapped tiles; 0 = the whole picture.
    """

    request: RunRequest
    only: tuple[str, ...] = ()
    samples: bool = False
    vae_tile_px: int = 0


def supir_source(graph: Graph, node_id: str) -> str | None:
    """Return the SUPIRApply node a MODEL comes through, or None."""
    at = node_id
    for _ in range(MAX_LINKS):
        link = graph.link(at, "model")
        if link is None:
            return None
        at = link[0]
        if graph.kind(at) == APPLY:
            return at
    return None


def core_job(graph: Graph, node_id: str, sizes: Sizes) -> CoreJob | None:
    """Return the SUPIR work of one of ComfyUI's nodes, or None when there is none or no size."""
    kind = graph.kind(node_id)
    if kind == APPLY:
        size = sizes.at(node_id, "image")
        if not isinstance(size, ImageSize):
            return None
        pixels = (size.width_px, size.height_px)
        return CoreJob(RunRequest(*pixels, images=size.images or 1, stages=("first_stage",)))
    if kind in VAE_NODES:
        return _vae_job(graph, node_id, sizes)
    source = supir_source(graph, node_id)
    if source is None:
        return None
    size = sizes.at(node_id, "latent_image") or sizes.at(source, "image")
    if isinstance(size, LatentSize):
        size = ImageSize(size.width * 8, size.height * 8, size.images)
    if not isinstance(size, ImageSize):
        return None
    steps = graph.integer(node_id, "steps", 20) or 1
    request = RunRequest(
        size.width_px, size.height_px, images=size.images or 1, steps=max(1, steps), tile_px=-1
    )
    return CoreJob(replace(request, stages=("sample",)), samples=True)


def _vae_job(graph: Graph, node_id: str, sizes: Sizes) -> CoreJob | None:
    kind = graph.kind(node_id)
    size = sizes.at(node_id, VAE_NODES[kind])
    if isinstance(size, LatentSize):
        ratio = vae_ratio(graph, node_id)
        size = ImageSize(size.width * ratio, size.height * ratio, size.images)
    if not isinstance(size, ImageSize):
        return None
    tile = graph.integer(node_id, "tile_size", 512) or 512 if kind.endswith("Tiled") else 0
    stage = "decode" if "Decode" in kind else "first_stage"
    only = ("decode",) if stage == "decode" else ("encode_control",)
    request = RunRequest(
        size.width_px, size.height_px, images=size.images or 1, tile_px=-1, stages=(stage,)
    )
    return CoreJob(request, only, vae_tile_px=tile)


def judge_core(job: CoreJob, device: Machine) -> Judged:
    """Judge it as it would run: whole, with attention nobody planned. Never raises for a risk."""
    facts = device.now()
    networks: Networks = known_networks(demo=False)
    request = replace(job.request, tile_px=-1)
    cost = attention_cost(device.measured, networks.dtype_bytes)

    def planner(_: Settings) -> PlanNumbers:
        plan = plan_numbers(
            plan_cached(request, networks, facts, cost, cost), request, facts, job.only
        )
        if job.samples:
            return replace(plan, attention_policy="unknown")
        whole = job.vae_tile_px == 0
        return replace(plan, vae_untiled=whole, vae_tile_px=job.vae_tile_px)

    return judge_request(planner, Settings(), "warn", may_tile=False, device=device)
