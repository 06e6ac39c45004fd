"""What each of our compute nodes in a graph will ask the planner, from constants and known sizes.

Owns the reading of widgets from an API prompt, with what had to be assumed. Judges nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..supir.constants import WORK_KEY
from ..supir.guidance import GuidanceSettings
from ..supir.plan import Networks, RunRequest
from ..supir.prepare import plan_geometry
from .graph import Graph
from .graph_networks import networks_of, vae_ratio
from .graph_sizes import ImageSize, LatentSize, Sizes
from .judging import vae_request
from .picture import size_to_plan
from .planning import layout_of_ratio
from .sample_request import SampleSettings, latent_ratio, sampling_request, tile_cells
from .types import Canvas


@dataclass(frozen=True)
class Job:
    """One compute node's run, as far as the graph tells.

    Attributes:
        mode: of its risk input. only: names of the plan's phases that run.
        assumes: what was not known and how it was taken, in words. A judgement that rests on
            something assumed never refuses a prompt.
    """

    request: RunRequest
    networks: Networks
    mode: str
    only: tuple[str, ...] = ()
    may_tile: bool = False
    loads_model: bool = False
    assumes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Context:
    """The graph a job is read from.

    Attributes:
        plans: whether the job will be planned; without it, nothing is asked about memory.
    """

    graph: Graph
    sizes: Sizes
    plans: bool = True

    def planned(self, settings: SampleSettings) -> SampleSettings:
        """Return the settings, untiled where tiles would be chosen for nothing."""
        if self.plans or settings.tile_px != 0:
            return settings
        return replace(settings, tile_px=-1)


@dataclass
class Widgets:
    """The widgets of a node; what is not known takes its default and is listed in ``assumes``."""

    graph: Graph
    node_id: str
    assumes: list[str] = field(default_factory=list[str])

    def number(self, name: str, default: float) -> float:
        """Return a number."""
        value = self.graph.number(self.node_id, name, default)
        if value is None:
            self.assumes.append(f"{name} {default:g}")
            return default
        return value

    def integer(self, name: str, default: int) -> int:
        """Return a whole number."""
        return int(self.number(name, default))

    def text(self, name: str, default: str) -> str:
        """Return a text."""
        value = self.graph.constant(self.node_id, name, default)
        if isinstance(value, str):
            return value
        self.assumes.append(f"{name} {default}")
        return default

    def settings(self) -> SampleSettings:
        """Return the sampling widgets; the defaults are the node's own."""
        plain = SampleSettings()
        g = GuidanceSettings()
        guidance = GuidanceSettings(
            self.number("cfg_start", g.cfg_start),
            self.number("cfg_end", g.cfg_end),
            self.number("control_start", g.control_start),
            self.number("control_end", g.control_end),
            self.number("restore_cfg", g.restore_cfg),
        )
        return SampleSettings(
            0,
            max(1, self.integer("steps", plain.steps)),
            self.text("sampler", plain.sampler),
            guidance,
            self.number("s_churn", plain.s_churn),
            self.number("s_noise", plain.s_noise),
            self.number("eta", plain.eta),
            self.integer("tile_px", plain.tile_px),
            self.integer("tile_overlap_px", plain.tile_overlap_px),
            plain.batch_seed,
            self.text("risk", plain.risk),
        )

    def count(self, images: int | None) -> int:
        """Return the length of a batch, at least; a longer one only makes a run larger."""
        return 1 if images is None else images


def meta_latent(size: LatentSize, images: int) -> dict[str, Any]:
    """Return a LATENT of a size without content, as the sampling nodes read sizes."""
    latent: dict[str, Any] = {
        "samples": torch.empty((images, 4, size.height, size.width), device="meta")
    }
    if size.canvas is not None:
        latent[WORK_KEY] = size.canvas
    return latent


def whole_run(
    size: ImageSize, upscale_by: float, settings: SampleSettings, networks: Networks, ratio: int
) -> RunRequest:
    """Return the request of First Stage, Sample and Decode together on pictures of a size.

    Raises: SettingsError, ShapeError naming the input that cannot work.
    """
    g = plan_geometry(size.width_px, size.height_px, upscale_by)
    canvas = Canvas(g.width_px, g.height_px, g.padded_width_px, g.padded_height_px, ratio=ratio)
    images = size.images or 1
    cells = LatentSize(g.padded_width_px // ratio, g.padded_height_px // ratio, images, canvas)
    latent = meta_latent(cells, images)
    tile = tile_cells(settings.tile_px, settings.tile_overlap_px, latent, networks)
    request = sampling_request([], [], latent, settings, tile)
    return replace(request, stages=("first_stage", "sample", "decode"))


def _first_stage(at: Context, node_id: str) -> Job | None:
    size, by = at.sizes.at(node_id, "image"), at.graph.number(node_id, "upscale_by", 2.0)
    if not isinstance(size, ImageSize) or by is None:
        return None
    only = ("encode_control", "decode_stage1", "encode_center")
    return _vae(at, node_id, size, by, 0, only)


def _encode(at: Context, node_id: str) -> Job | None:
    size = at.sizes.at(node_id, "image")
    if not isinstance(size, ImageSize):
        return None
    workspace = at.graph.integer(node_id, "workspace_mb", 0) or 0
    return _vae(at, node_id, size, 1.0, workspace, ("encode_control",))


def _decode(at: Context, node_id: str) -> Job | None:
    size, ratio = at.sizes.at(node_id, "latent"), vae_ratio(at.graph, node_id)
    if not isinstance(size, LatentSize):
        return None
    workspace = at.graph.integer(node_id, "workspace_mb", 0) or 0
    whole = (size.width * ratio, size.height * ratio)
    picture = ImageSize(*size_to_plan(*whole, size.canvas), size.images)
    return _vae(at, node_id, picture, 1.0, workspace, ("decode",))


def _vae(
    at: Context, node_id: str, size: ImageSize, by: float, workspace: int, only: tuple[str, ...]
) -> Job:
    widgets = Widgets(at.graph, node_id)
    g = plan_geometry(size.width_px, size.height_px, by)
    pixels = (g.width_px, g.height_px, widgets.count(size.images))
    mode = widgets.text("risk", "auto")
    request = vae_request(*pixels, workspace, only)
    networks = networks_of(at.graph, node_id)
    networks = Networks(vae=networks.vae, vae_dtype_bytes=networks.vae_dtype_bytes)
    return Job(request, networks, mode, only, assumes=tuple(widgets.assumes))


def _sample(at: Context, node_id: str) -> Job | None:
    size = at.sizes.at(node_id, "control")
    if not isinstance(size, LatentSize):
        return None
    widgets = Widgets(at.graph, node_id)
    settings = at.planned(widgets.settings())
    latent = meta_latent(size, widgets.count(size.images))
    layout = layout_of_ratio(latent_ratio(latent))
    networks = replace(networks_of(at.graph, node_id), vae=layout, vae_dtype_bytes=2)
    tile = tile_cells(settings.tile_px, settings.tile_overlap_px, latent, networks)
    request = sampling_request([], [], latent, settings, tile)
    return Job(request, networks, settings.risk, (), True, True, tuple(widgets.assumes))


def _upscale(at: Context, node_id: str) -> Job | None:
    return _whole(at, node_id, at.sizes.at(node_id, "image"))


def _risk_check(at: Context, node_id: str) -> Job | None:
    size = next(
        (s for n in ("image", "latent", "anything") if (s := at.sizes.at(node_id, n)) is not None),
        None,
    )
    if isinstance(size, LatentSize):
        ratio = vae_ratio(at.graph, node_id)
        canvas = size.canvas
        width, height = size.width * ratio, size.height * ratio
        if canvas is not None:
            width, height = canvas.width_px, canvas.height_px
        size = ImageSize(width, height, size.images)
    return _whole(at, node_id, size)


def _whole(at: Context, node_id: str, size: object) -> Job | None:
    by = at.graph.number(node_id, "upscale_by", 2.0)
    if not isinstance(size, ImageSize) or by is None:
        return None
    widgets = Widgets(at.graph, node_id)
    settings = at.planned(widgets.settings())
    networks = networks_of(at.graph, node_id)
    size = replace(size, images=widgets.count(size.images))
    request = whole_run(size, by, settings, networks, vae_ratio(at.graph, node_id))
    return Job(request, networks, settings.risk, (), True, True, tuple(widgets.assumes))


Reader = Callable[[Context, str], "Job | None"]
JOBS: dict[str, Reader] = {
    "SUPIR_XPU_FirstStage": _first_stage,
    "SUPIR_XPU_Encode": _encode,
    "SUPIR_XPU_Decode": _decode,
    "SUPIR_XPU_Sample": _sample,
    "SUPIR_XPU_Guider": _sample,
    "SUPIR_XPU_Upscale": _upscale,
    "SUPIR_XPU_RiskCheck": _risk_check,
}
"""How the job of each compute node is read; None where its size is not known."""
