"""The one place where a request is planned and judged: by the compute nodes, the guard, the panel."""

from __future__ import annotations

from dataclasses import replace

from ..supir.plan import Networks, RunRequest
from ..xpu.auto_plan import Settings
from ..xpu.errors import RiskBlockedError
from ..xpu.risk import PlanNumbers
from . import host
from .guarded_run import Judged, judge_request
from .health import OVERRIDES, refusal
from .machine import Machine, machine
from .planning import attention_cost, plan_cached, plan_numbers, policy_of


def judge_run(
    request: RunRequest,
    networks: Networks,
    mode: str,
    *,
    loads_model: bool = False,
    may_tile: bool = True,
    only: tuple[str, ...] = (),
    device: Machine | None = None,
    starts: bool = False,
) -> Judged:
    """Plan and judge a run; ``request.tile_px`` is resolved (0 chooses by free memory).

    Args:
        loads_model: weights will move to the device. may_tile: ``auto`` may choose other tiles.
        only: names of the plan's phases that run; empty = all.
        starts: the run comes next, so a device that nobody has judged yet is tried first.
    Raises: RiskBlockedError; SettingsError and ShapeError naming the input that cannot work.
    """
    device = device or machine()
    if starts:
        require_usable(device, mode)
    facts, way = device.now(), device.workarounds.get("attention", "")
    cost = attention_cost(device.measured, networks.dtype_bytes, way)
    vae_cost = attention_cost(device.measured, networks.vae_dtype_bytes, way)
    asked = replace(request, stages=())
    first = plan_cached(asked, networks, facts, cost)

    def planner(settings: Settings) -> PlanNumbers:
        overlap = first.overlap_px if settings.tile_px == first.tile_px else settings.tile_px // 4
        sized = replace(request, tile_px=settings.tile_px or -1, tile_overlap_px=overlap)
        plan = plan_cached(sized, networks, facts, cost, vae_cost)
        return plan_numbers(plan, sized, facts, only, way)

    wanted = Settings(
        tile_px=first.tile_px,
        attention_policy=policy_of(facts, way),  # pyright: ignore[reportArgumentType]
        workspace_mb=request.workspace_bytes >> 20,
    )
    may_tile = may_tile and "sample" in request.stages
    return judge_request(
        planner, wanted, mode, loads_model=loads_model, may_tile=may_tile, device=device
    )


def judge_vae(
    width_px: int,
    height_px: int,
    images: int,
    networks: Networks,
    mode: str,
    workspace_mb: int = 0,
    only: tuple[str, ...] = ("encode_control", "decode_stage1", "encode_center"),
) -> Judged:
    """Judge a run of the VAE alone, on pictures of a size. Raises: RiskBlockedError."""
    request = vae_request(width_px, height_px, images, workspace_mb, only)
    return judge_run(request, networks, mode, may_tile=False, only=only, starts=True)


def require_usable(device: Machine, mode: str) -> None:
    """Have a device that nobody has judged yet tried; refuse one that must not be used.

    Takes seconds, once per process, and only on an Intel GPU. Cancellable.
    Raises: RiskBlockedError in the modes ``auto`` and ``block``; the cancel.
    """
    if device.health is None or not device.facts.is_xpu:
        return
    found = device.health.check(check_cancel=host.check_cancel, progress=host.tell_preflight)
    if found is None or found.verdict.status != "retreat" or mode in OVERRIDES:
        return
    raise RiskBlockedError(refusal(found.verdict, device.facts.name, device.facts.driver))


def vae_request(
    width_px: int, height_px: int, images: int, workspace_mb: int, only: tuple[str, ...]
) -> RunRequest:
    """Return what the planner is asked for a run of the VAE alone; it has no sampling tiles."""
    return RunRequest(
        width_px,
        height_px,
        images=images,
        workspace_bytes=workspace_mb << 20,
        tile_px=-1,
        stages=("decode",) if only == ("decode",) else ("first_stage",),
    )
