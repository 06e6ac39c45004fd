"""What one run costs, before anything is loaded: a pure function of sizes, settings and layouts.

Puts the plans of the VAE, of the tiles and of the sampling together. ``Plan`` holds plain numbers;
the risk layer judges them, the nodes show them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

from .errors import SettingsError
from .plan_dims import UNetDims, dims_from_unet, supir_dims_for, unet_dims
from .plan_guider import DPMPP, SamplingRequest
from .plan_memory import TileChoice, choose_tile, tile_memory_bytes
from .plan_network import StepNumbers, plan_step
from .plan_request import (
    MIN_TILE_CELLS,
    SDXL_UNET,
    DeviceNumbers,
    DeviceRates,
    Networks,
    PhaseCost,
    Plan,
    RunRequest,
    Stage,
)
from .plan_sampling import SamplingNumbers, plan_sampling
from .plan_tape import Attention, AttentionCost, AttentionNumbers, fused_attention
from .plan_vae import (
    VaeNumbers,
    cell_px,
    choose_workspace,
    decoder_steps,
    encoder_steps,
    fit_limits,
    plan_vae,
)
from .prepare import Geometry, plan_geometry
from .sigmas import ddpm_sigmas, karras_sigmas
from .tiling import windows

__all__ = [
    "MIN_TILE_CELLS",
    "SDXL_UNET",
    "Attention",
    "AttentionCost",
    "AttentionNumbers",
    "DeviceNumbers",
    "DeviceRates",
    "Networks",
    "PhaseCost",
    "Plan",
    "RunRequest",
    "SamplingNumbers",
    "SamplingRequest",
    "Stage",
    "StepNumbers",
    "TileChoice",
    "UNetDims",
    "choose_tile",
    "choose_workspace",
    "dims_from_unet",
    "fused_attention",
    "plan_run",
    "plan_sampling",
    "plan_step",
    "supir_dims_for",
    "tile_memory_bytes",
    "unet_dims",
]


def plan_run(
    request: RunRequest,
    networks: Networks | None = None,
    device: DeviceNumbers | None = None,
    attention: Attention | None = None,
    vae_attention: Attention | None = None,
) -> Plan:
    """Plan a whole run.

    Args:
        networks: SDXL with SUPIR unless given.
        device: free memory decides automatic sizes, rates the predicted time.
        attention, vae_attention: cost of one call of the UNet's and of the VAE's attention;
            None = one fused kernel.
    Raises: SettingsError, ShapeError naming the input that cannot work.
    """
    nets, facts = networks or Networks(), device or DeviceRates()
    geometry = plan_geometry(request.width_px, request.height_px, request.upscale_by)
    cell = cell_px(nets.vae)
    latent_h = request.latent_h or geometry.padded_height_px // cell
    latent_w = request.latent_w or geometry.padded_width_px // cell
    weights = weight_bytes(nets)
    tile = _tile(request, nets, _spare(facts.free_bytes, weights), latent_h, latent_w, attention)
    phases: list[PhaseCost] = []
    vaes: list[VaeNumbers] = []
    for name, vae in _vae_phases(request, nets, geometry, facts.free_bytes, vae_attention):
        phases.append(_phase(name, vae, request.images, facts))
        vaes.append(vae)
    sampling: SamplingNumbers | None = None
    if "sample" in request.stages:
        asked = _sampling_request(request, nets, tile, latent_h, latent_w, cell)
        sampling = plan_sampling(asked, nets.unet, nets.supir, attention)
        at = len(phases) - ("decode" in request.stages)
        phases.insert(at, _phase("sample", sampling, request.images, facts))
    return Plan(
        geometry=geometry,
        latent_h=latent_h,
        latent_w=latent_w,
        tile_px=tile.tile_px,
        overlap_px=tile.overlap_px,
        tiles=tile.tiles,
        steps=request.steps,
        images=request.images,
        phases=tuple(phases),
        sampling=sampling,
        launches_per_step=sampling.launches_per_step if sampling else 0,
        launches_total=sum(p.launches for p in phases),
        flops_total=sum(p.flops for p in phases),
        bytes_moved_total=sum(p.bytes_moved for p in phases),
        max_score_elements=sampling.max_score_elements if sampling else 0,
        largest_tensor_bytes=max((p.largest_tensor_bytes for p in phases), default=0),
        live_peak_bytes=max((p.live_peak_bytes for p in phases), default=0),
        host_peak_bytes=max((v.host_peak_bytes for v in vaes), default=0),
        workspace_bytes=max((v.workspace_bytes for v in vaes), default=0),
        weight_bytes=weights,
        predicted_seconds=sum(p.seconds for p in phases),
    )


class _Cost(Protocol):
    """What every phase's numbers have."""

    @property
    def launches(self) -> int: ...
    @property
    def flops(self) -> int: ...
    @property
    def bytes_moved(self) -> int: ...
    @property
    def largest_tensor_bytes(self) -> int: ...
    @property
    def live_peak_bytes(self) -> int: ...


def _phase(name: str, cost: _Cost, images: int, facts: DeviceNumbers) -> PhaseCost:
    moved, flops = cost.bytes_moved * images, cost.flops * images
    by_memory = moved / facts.bw_bytes_per_s if facts.bw_bytes_per_s > 0 else 0.0
    by_arithmetic = flops / facts.flops_per_s if facts.flops_per_s > 0 else 0.0
    return PhaseCost(
        name,
        cost.launches * images,
        flops,
        moved,
        cost.largest_tensor_bytes,
        cost.live_peak_bytes,
        max(by_memory, by_arithmetic),
    )


def _spare(free_bytes: int, weights: int) -> int:
    """Memory for activations: beside the weights, or half, as the host can leave weights out."""
    return max(free_bytes - weights, free_bytes // 2)


def _tile(
    request: RunRequest,
    nets: Networks,
    free_bytes: int,
    latent_h: int,
    latent_w: int,
    attention: Attention | None,
) -> TileChoice:
    cell = cell_px(nets.vae)
    if request.tile_px == 0:
        return choose_tile(
            free_bytes,
            latent_h,
            latent_w,
            nets.unet,
            nets.supir if request.guidance.uses_control else None,
            2 if request.share_batch else 1,
            max(request.tokens, request.negative_tokens),
            nets.dtype_bytes,
            cell,
            request.tile_overlap_px,
            attention,
            nets.weight_bytes,
        )
    tile, overlap = request.tile_px // cell, request.tile_overlap_px // cell
    if request.tile_px < 0 or tile >= max(latent_h, latent_w):
        return TileChoice(0, 0, 1, 0, True)
    if tile < MIN_TILE_CELLS:
        raise SettingsError(
            f"tile_px is {request.tile_px}, which is {tile} latent cells; the UNet needs at least "
            f"{MIN_TILE_CELLS} ({MIN_TILE_CELLS * cell} px). Raise tile_px, or set 0 to let it be "
            "chosen."
        )
    tiles = len(windows(latent_h, latent_w, tile, overlap))
    return TileChoice(tile * cell, overlap * cell, tiles, 0, True)


def _sampling_request(
    request: RunRequest, nets: Networks, tile: TileChoice, height: int, width: int, cell: int
) -> SamplingRequest:
    dpmpp = request.sampler == DPMPP
    levels = karras_sigmas(request.steps) if dpmpp else ddpm_sigmas(request.steps)
    return SamplingRequest(
        height=height,
        width=width,
        sigmas=tuple(float(s) for s in levels),
        sampler=request.sampler,
        guidance=request.guidance,
        s_churn=request.s_churn,
        eta=request.eta,
        tile=tile.tile_px // cell,
        overlap=tile.overlap_px // cell,
        has_center=request.has_center,
        tokens=request.tokens,
        negative_tokens=request.negative_tokens,
        dtype_bytes=nets.dtype_bytes,
        share_batch=request.share_batch,
        weight_bytes=nets.weight_bytes,
    )


def _vae_phases(
    request: RunRequest,
    nets: Networks,
    geometry: Geometry,
    free_bytes: int,
    attention: Attention | None,
) -> list[tuple[str, VaeNumbers]]:
    """Encodes and decodes in running order, by name."""
    height, width = geometry.padded_height_px, geometry.padded_width_px
    names: list[str] = []
    if "first_stage" in request.stages:
        names += ["encode_control", "decode_stage1", "encode_center"]
    if "decode" in request.stages:
        names.append("decode")
    if not names:
        return []
    limits = fit_limits(
        free_bytes, height, width, nets.vae, nets.vae_dtype_bytes, request.workspace_bytes
    )
    cell = cell_px(nets.vae)
    phases: list[tuple[str, VaeNumbers]] = []
    made: dict[bool, VaeNumbers] = {}
    for name in names:
        encodes = name.startswith("encode")
        if encodes not in made:
            steps = encoder_steps(nets.vae) if encodes else decoder_steps(nets.vae)
            size = (height, width) if encodes else (height // cell, width // cell)
            made[encodes] = plan_vae(steps, *size, limits, attention)
        phases.append((name, made[encodes]))
    return phases


@lru_cache(maxsize=16)
def weight_bytes(networks: Networks) -> int:
    """Return the bytes of all weights of UNet, SUPIR and VAE (one VAE encoder, one decoder)."""
    size, own = MIN_TILE_CELLS, networks.dtype_bytes
    unet = plan_step(networks.unet, None, size, size, 1, 1, own).parameters
    supir = 0
    if networks.supir is not None:
        supir = plan_step(networks.unet, networks.supir, size, size, 1, 1, own).parameters - unet
    limits = fit_limits(0, 64, 64, networks.vae, networks.vae_dtype_bytes)
    vae = plan_vae(encoder_steps(networks.vae), 64, 64, limits).parameters
    vae += plan_vae(decoder_steps(networks.vae), size, size, limits).parameters
    of_unet, of_supir = (width or own for width in networks.weight_bytes)
    return unet * of_unet + supir * of_supir + vae * networks.vae_dtype_bytes
