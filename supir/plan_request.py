"""The plain data of a plan: what is asked, of which networks and device, and what comes out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from .guidance import GuidanceSettings
from .layout import SupirDims
from .plan_dims import UNetDims, supir_dims_for, unet_dims
from .plan_sampling import SamplingNumbers
from .prepare import Geometry
from .striped import KLLayout

Stage = Literal["first_stage", "sample", "decode"]
SDXL_UNET = unet_dims()
MIN_TILE_CELLS = 8
"""Side of the smallest tile in latent cells: two cells at the UNet's lowest resolution."""


class DeviceNumbers(Protocol):
    """What is known about the device; ``DeviceFacts`` fits. 0 = unknown."""

    @property
    def free_bytes(self) -> int: ...
    @property
    def bw_bytes_per_s(self) -> float: ...
    @property
    def flops_per_s(self) -> float: ...


@dataclass(frozen=True)
class DeviceRates:
    """``DeviceNumbers`` as plain numbers."""

    free_bytes: int = 0
    bw_bytes_per_s: float = 0.0
    flops_per_s: float = 0.0


@dataclass(frozen=True)
class Networks:
    """The networks of a run.

    Attributes:
        dtype_bytes, vae_dtype_bytes: element size of activations.
        weight_bytes: element size of the weights of UNet and SUPIR; 0 = ``dtype_bytes``.
    """

    unet: UNetDims = SDXL_UNET
    supir: SupirDims | None = field(default_factory=lambda: supir_dims_for(SDXL_UNET))
    vae: KLLayout = KLLayout()
    dtype_bytes: int = 2
    vae_dtype_bytes: int = 2
    weight_bytes: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class RunRequest:
    """One run, as asked; names and meaning are those of the node inputs.

    Attributes:
        width_px, height_px: of the picture that comes in.
        tile_px: 0 chooses, -1 never tiles.
        tokens, negative_tokens: text tokens of either conditioning; 0 = the same.
        workspace_bytes: of the VAE; 0 chooses.
        stages: what runs; the padding and latent size are those of a whole run in any case.
        latent_h, latent_w: cells of a latent that is there already; 0 = from the padded picture.
    """

    width_px: int
    height_px: int
    upscale_by: float = 1.0
    images: int = 1
    steps: int = 45
    sampler: str = "restore_edm"
    guidance: GuidanceSettings = field(default_factory=GuidanceSettings)
    s_churn: float = 5.0
    eta: float = 1.0
    tile_px: int = 0
    tile_overlap_px: int = 256
    has_center: bool = True
    tokens: int = 77
    negative_tokens: int = 0
    share_batch: bool = True
    workspace_bytes: int = 0
    stages: tuple[Stage, ...] = ("first_stage", "sample", "decode")
    latent_h: int = 0
    latent_w: int = 0


@dataclass(frozen=True)
class PhaseCost:
    """One phase over all pictures of the run. seconds: max(bytes / bandwidth, flops / rate)."""

    name: str
    launches: int
    flops: int
    bytes_moved: int
    largest_tensor_bytes: int
    live_peak_bytes: int
    seconds: float


@dataclass(frozen=True)
class Plan:
    """What a run will ask of the device.

    Attributes:
        geometry: output and padded size. latent_h, latent_w: in cells.
        tile_px: 0 = untiled. tiles: per picture.
        launches_per_step: of the most expensive step over all tiles of a picture.
        max_score_elements: most attention scores held at once in sampling.
        largest_tensor_bytes, live_peak_bytes: over all phases, weights excluded.
        host_peak_bytes: stripes of the VAE that wait in host memory.
        weight_bytes: all networks'. sampling: of one picture, None if not asked for.
        predicted_seconds: sum over phases; 0 where rates are unknown.
    """

    geometry: Geometry
    latent_h: int
    latent_w: int
    tile_px: int
    overlap_px: int
    tiles: int
    steps: int
    images: int
    phases: tuple[PhaseCost, ...]
    sampling: SamplingNumbers | None
    launches_per_step: int
    launches_total: int
    flops_total: int
    bytes_moved_total: int
    max_score_elements: int
    largest_tensor_bytes: int
    live_peak_bytes: int
    host_peak_bytes: int
    workspace_bytes: int
    weight_bytes: int
    predicted_seconds: float

    @property
    def output_width_px(self) -> int:
        """Width of the result."""
        return self.geometry.width_px

    @property
    def output_height_px(self) -> int:
        """Height of the result."""
        return self.geometry.height_px
