"""Find the cheapest plan that is safe, and say what was changed to get there.

Owns the search of ``risk = auto`` over tile size, attention policy, VAE settings and waits. It
knows no model and no rule: plans come from the caller's planner, verdicts from the caller's judge.
Deterministic: same inputs, same answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from .device_profiles import Profile
from .errors import RiskBlockedError
from .history import History
from .risk import JudgeFn, explain
from .risk_types import BLOCK_AT, JudgeSettings, PlanNumbers, Policy, Verdict, Waits


@dataclass(frozen=True)
class Settings:
    """The settings a plan is made from; each name but the policy is a node input.

    tile_px: sampling tile edge, 0 untiled. attention_policy: how attention is carried out.
    vae_tile_px: overlapped VAE tile, 0 for striped or whole. vae_untiled: whole picture at once.
    workspace_mb: bound of the striped VAE's workspace, 0 lets the VAE decide.
    """

    tile_px: int = 0
    attention_policy: Policy = "fused"
    vae_tile_px: int = 0
    vae_untiled: bool = False
    workspace_mb: int = 0


@dataclass(frozen=True)
class AutoRequest:
    """What was asked, and what may be changed.

    Args:
        settings: as asked. Each tuple lists alternatives in order of preference; an empty one
            keeps what was asked.
        vae: (vae_tile_px, vae_untiled, workspace_mb).
        waits: idle time as asked. full_waits: idle time that removes every waiting risk.
    """

    settings: Settings
    tile_px: tuple[int, ...] = ()
    policies: tuple[Policy, ...] = ()
    vae: tuple[tuple[int, bool, int], ...] = ()
    waits: Waits = Waits()
    full_waits: Waits = Waits()


@dataclass(frozen=True)
class AutoResult:
    """A plan below the limit. ``changes`` says in words what differs from what was asked."""

    settings: Settings
    plan: PlanNumbers
    verdict: Verdict
    changes: tuple[str, ...]
    waits: Waits

    @property
    def waits_s(self) -> float:
        """Return the idle seconds of the whole run."""
        return self.waits.total_s(self.plan.images)


class NoSafePlanError(RiskBlockedError):
    """No allowed plan is below the limit. ``closest`` is the best of those that are not."""

    def __init__(self, closest: AutoResult, tried: int) -> None:
        super().__init__(
            f"None of {tried} plans for this result is safe enough. The best one "
            f"({_describe(closest.settings)}):\n{explain(closest.verdict)}"
        )
        self.closest = closest


Planner = Callable[[Settings], PlanNumbers]


def needed_waits(profile: Profile, history: History, now: float, settings: JudgeSettings) -> Waits:
    """Return the shortest waits that remove the gap, fresh-load and batch risks of a run.

    The longer rest after a heavy job counts the rest after loading too. The search drops what
    does not help a given plan, such as rests between images of a batch that is not heavy. A last
    end after ``now`` counts as now; the journal moves such an end to the present when it is first
    read, so the gap is kept once and then passes.
    """
    elapsed = float("inf") if history.last_end is None else max(0.0, now - history.last_end)
    before, after_load = max(0.0, profile.gap_s - elapsed), 0.0
    if settings.loads_model:
        after_load = profile.load_settle_s
    elif settings.loaded_at is not None:
        before = max(before, profile.load_settle_s - max(0.0, now - settings.loaded_at))
    if history.last_heavy and profile.gap_s > 0:
        before = max(before, profile.heavy_gap_s - elapsed - after_load)
    return Waits(before, after_load, profile.image_settle_s)


def find_safe_plan(
    request: AutoRequest,
    planner: Planner,
    judge_fn: JudgeFn,
    *,
    limit: float = BLOCK_AT,
) -> AutoResult:
    """Return the cheapest plan that scores ok, else the lowest score below ``limit``.

    Cost is predicted busy time plus waits. What was asked is kept if it is ok as it stands.
    Guarantees: the result's score is below ``limit`` and its severity is not ``block``.
    Raises: NoSafePlanError if no allowed plan is; its text lists the reasons of the closest one.
    """
    asked = _result(request, request.settings, request.waits, planner(request.settings), judge_fn)
    if asked.verdict.severity == "ok" and not _is_above(asked.verdict, limit):
        return asked
    found = [asked]
    for settings in _candidates(request):
        plan = asked.plan if settings == request.settings else planner(settings)
        found.append(_result(request, settings, request.full_waits, plan, judge_fn))
    best = min(enumerate(found), key=lambda item: _order(item[1], item[0], limit))[1]
    if _is_above(best.verdict, limit):
        raise NoSafePlanError(best, len(found))
    return best


def _is_above(verdict: Verdict, limit: float) -> bool:
    return verdict.severity == "block" or verdict.score >= limit


def _order(result: AutoResult, index: int, limit: float) -> tuple[int, float, float, int]:
    """Sort key: ok by cost, then warned by score and cost, then the rest; equal ones in order."""
    verdict = result.verdict
    cost = verdict.size.seconds + result.waits_s
    if _is_above(verdict, limit):
        return 2, verdict.score, cost, index
    if verdict.severity == "ok":
        return 0, 0.0, cost, index
    return 1, verdict.score, cost, index


def _candidates(request: AutoRequest) -> list[Settings]:
    asked = request.settings
    tiles = _first(asked.tile_px, request.tile_px)
    policies = _first(asked.attention_policy, request.policies)
    vae = _first((asked.vae_tile_px, asked.vae_untiled, asked.workspace_mb), request.vae)
    return [
        Settings(tile, policy, vae_tile, untiled, workspace)
        for tile in tiles
        for policy in policies
        for vae_tile, untiled, workspace in vae
    ]


def _first(asked: object, others: tuple[object, ...]) -> list[Any]:
    return list(dict.fromkeys((asked, *others)))


def _result(
    request: AutoRequest, settings: Settings, waits: Waits, plan: PlanNumbers, judge_fn: JudgeFn
) -> AutoResult:
    verdict = judge_fn(plan, waits)
    for name in ("per_image_s", "after_load_s", "before_s"):
        # A wait that lowers no score is not worth its time.
        shorter = replace(waits, **{name: getattr(request.waits, name)})
        without = judge_fn(plan, shorter)
        if without.score <= verdict.score:
            waits, verdict = shorter, without
    changes = (*_setting_changes(request.settings, settings, plan), *_wait_changes(request, waits))
    return AutoResult(settings, plan, verdict, changes, waits)


def _setting_changes(asked: Settings, used: Settings, plan: PlanNumbers) -> list[str]:
    changes: list[str] = []
    if used.tile_px != asked.tile_px:
        tiled = f"{plan.tiles} tiles per image" if plan.tiles > 1 else "one piece"
        changes.append(f"tile_px: {_px(asked.tile_px)} -> {_px(used.tile_px)}, sampling in {tiled}")
    if used.attention_policy != asked.attention_policy:
        changes.append(f"attention: {asked.attention_policy} -> {used.attention_policy}")
    if _vae(used) != _vae(asked):
        changes.append(f"VAE: {_vae(asked)} -> {_vae(used)}")
    return changes


def _wait_changes(request: AutoRequest, used: Waits) -> list[str]:
    asked = request.waits
    texts = (
        (asked.before_s, used.before_s, "before the run"),
        (asked.after_load_s, used.after_load_s, "after loading the weights"),
        (asked.per_image_s, used.per_image_s, "between images"),
    )
    return [f"waits {new:.0f} s {when}" for old, new, when in texts if new != old]


def _describe(settings: Settings) -> str:
    return (
        f"tile_px {_px(settings.tile_px)}, attention {settings.attention_policy}, VAE "
        f"{_vae(settings)}"
    )


def _vae(settings: Settings) -> str:
    if settings.vae_untiled:
        return "in one piece"
    if settings.vae_tile_px > 0:
        return f"in tiles of {settings.vae_tile_px} px"
    room = f"{settings.workspace_mb} MB" if settings.workspace_mb else "automatic size"
    return f"in stripes with a workspace of {room}"


def _px(tile_px: int) -> str:
    return f"{tile_px} px" if tile_px > 0 else "untiled"
