"""What the pack answers over HTTP: a judgement without queueing, what is known, and forgetting.

Every answer is JSON of the same numbers the nodes work with. Opens no path a request names, except
pictures through ComfyUI's own check (``picture_file.py``).
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import asdict
from typing import Any, cast

from aiohttp import web

from ..supir.errors import SettingsError
from ..xpu.device_profiles import ProfileError
from ..xpu.errors import FactsError
from ..xpu.history import CLEAN_RUNS_PER_HALVING, Crash, History
from ..xpu.journal import Death, ForgetError
from ..xpu.risk import BLOCK_AT, CODES, RANK, WARN_AT
from ..xpu.risk_rules_history import CRASHED_FRACTION
from .graph_judging import GraphJudgement
from .health import no_verdict
from .journal import deaths_found, forget_crashes, open_journal
from .machine import Machine, machine, settings_path
from .prompt_guard import (
    SETTINGS_ERROR,
    change_dict,
    judge_prompt,
    server_instance,
    suggestion_text,
)

NO_PROMPT = (
    'The body has no prompt ComfyUI could run. Send {"prompt": {...}} with a graph in API format '
    "whose nodes are all installed."
)
NO_CONFIRM = (
    'Nothing was forgotten: forgetting crashes lifts limits that protect this machine. Send {"confirm": '
    'true} to do it, with "device" for one device only.'
)


def install(instance: Any) -> None:
    """Add the routes to ComfyUI's server; they answer under ``/api`` too."""
    routes = instance.routes
    routes.post("/supir_xpu/plan")(post_plan)
    routes.get("/supir_xpu/status")(get_status)
    routes.post("/supir_xpu/forget")(post_forget)


async def read_object(request: web.Request) -> dict[str, Any] | None:
    """Return a request's JSON object, or None when it holds something else."""
    try:
        body: object = await request.json()
    except (ValueError, LookupError, RecursionError):
        return None
    return cast("dict[str, Any]", body) if isinstance(body, dict) else None


def problem(kind: str, text: str, status: int = 400) -> web.Response:
    """Return an error in ComfyUI's shape."""
    error = {"type": kind, "message": text, "details": "", "extra_info": {}}
    return web.json_response({"error": error, "node_errors": {}}, status=status)


async def post_plan(request: web.Request) -> web.Response:
    """Judge a prompt as the guard does, on any device, without queueing it.

    With ``"editing": true`` a graph that cannot be judged yet is no error: the answer is 200 with
    ``problem`` (the browser's console lists every other status as one).
    """
    body = await read_object(request)
    editing = body is not None and body.get("editing") is True
    prompt = None if body is None else body.get("prompt")
    targets = None if body is None else body.get("partial_execution_targets")
    try:
        machine()
    except (SettingsError, ProfileError, FactsError) as e:
        return not_judged(SETTINGS_ERROR, str(e), editing)
    found = await asyncio.to_thread(judge_prompt, prompt, targets, with_suggestion=True, plans=True)
    if found is None:
        return not_judged("supir_xpu_no_prompt", NO_PROMPT, editing)
    return web.json_response(plan_dict(found))


def not_judged(kind: str, text: str, editing: bool) -> web.Response:
    """Return why there is no judgement: as an error, or quietly to an editor."""
    return web.json_response({"problem": text}) if editing else problem(kind, text)


def plan_dict(found: GraphJudgement) -> dict[str, Any]:
    """Return the judgement of a graph as JSON values."""
    return {
        "refused": bool(found.refused),
        "nodes": {node.node_id: node.as_dict() for node in found.nodes},
        "size_unknown": found.unknown,
        "suggestion": [change_dict(change) for change in found.suggestion],
        "suggestion_text": suggestion_text(found.suggestion),
        "safe_plan": [change_dict(change) for change in found.safe_plan],
        "total": total_dict(found),
    }


LOOKS_ONLY = ("SUPIR_XPU_RiskCheck",)
"""Nodes that are judged as if they ran what they look at, and run nothing."""


def total_dict(found: GraphJudgement) -> dict[str, Any]:
    """Return the sums over the nodes that will compute, and the severest verdict of all.

    The verdict is ``block`` for what is refused, and ``unknown`` where nothing could be judged.
    """
    judged = [n.judged.result for n in found.nodes if n.judged and n.kind not in LOOKS_ONLY]
    severities = [n.verdict.severity for n in found.nodes if n.verdict]
    nothing = "unknown" if found.unknown else "ok"
    severity = max(severities, key=RANK.__getitem__, default=nothing)
    return {
        "seconds": sum(result.verdict.size.seconds for result in judged),
        "launches": sum(result.plan.launches_total for result in judged),
        "waits_s": sum(result.waits_s for result in judged),
        "severity": "block" if found.refused else severity,
    }


async def get_status(_: web.Request) -> web.Response:
    """Tell device, profile, limits, and what the journal remembers."""
    try:
        device = machine()
    except (SettingsError, ProfileError, FactsError) as e:
        return web.json_response({"problem": str(e), "settings": {"path": settings_path()}})
    return web.json_response(await asyncio.to_thread(status_dict, device))


def status_dict(device: Machine) -> dict[str, Any]:
    """Return what is known, as JSON values. The journal is read on an Intel GPU only."""
    facts, profile = device.now(), device.profile
    path = settings_path()
    history = History(facts.driver)
    journal: dict[str, Any] = {"path": None, "in_memory": True, "problem": None}
    deaths: list[Death] = []
    if facts.is_xpu:
        book = open_journal()
        history, deaths = book.history(facts.name, facts.driver), book.deaths()
        journal = {
            "path": None if book.path is None else str(book.path),
            "in_memory": book.in_memory,
            "problem": book.problem,
        }
    return {
        "device": {**asdict(facts), "sources": dict(facts.sources)},
        "simulated": device.simulated,
        "profile": {**asdict(profile), "sources": dict(profile.sources)},
        "limits": limits_dict(device, history),
        "last_death": death_dict(deaths[0]) if deaths else None,
        "deaths": [death_dict(death) for death in deaths],
        "found_at_start": [death_dict(death) for death in deaths_found()],
        "history": history_dict(history),
        "journal": journal,
        "preflight": no_verdict() if device.health is None else device.health.as_dict(),
        "settings": {
            "path": path,
            "found": os.path.isfile(path),
            "guard_core": device.guard_core,
            "problem": device.settings_problem,
        },
        "codes": CODES,
        "routes": our_routes(),
    }


def our_routes() -> list[str]:
    """Return the paths of the pack's own routes, so that the panel asks for none that is not there."""
    paths = {str(getattr(route, "path", "")) for route in getattr(server_instance(), "routes", ())}
    return sorted(path for path in paths if path.startswith("/supir_xpu/"))


def limits_dict(device: Machine, history: History) -> dict[str, Any]:
    """Return from where jobs are warned about and refused on this device."""
    profile, facts = device.profile, device.facts
    crashed = [c for c in history.crashes if c.kind == "machine" and c.weight(history.driver) > 0]
    return {
        "warn_at": WARN_AT,
        "block_at": BLOCK_AT,
        "memory_bytes": int(facts.total_bytes * profile.memory_fraction),
        "single_tensor_bytes": int(profile.alloc_limit_bytes),
        "gap_s": profile.gap_s,
        "heavy_gap_s": profile.heavy_gap_s,
        "load_settle_s": profile.load_settle_s,
        "image_settle_s": profile.image_settle_s,
        "crashed": [
            {
                "policy": crash.policy,
                "launches": int(crash.size.launches * CRASHED_FRACTION),
                "seconds": crash.size.seconds * CRASHED_FRACTION,
                "weight": crash.weight(history.driver),
            }
            for crash in crashed
        ],
        "clean_runs_per_halving": CLEAN_RUNS_PER_HALVING,
    }


def history_dict(history: History) -> dict[str, Any]:
    """Return what was learned on this device: clean runs, crashes, and when it last worked."""
    clean = [{"policy": p, "launches": s.launches, "seconds": s.seconds} for p, s in history.clean]
    return {
        "clean": clean,
        "crashes": [crash_dict(crash, history.driver) for crash in history.crashes],
        "last_end": history.last_end,
        "last_heavy": history.last_heavy,
        "busy_elsewhere": history.busy,
    }


def crash_dict(crash: Crash, driver: str) -> dict[str, Any]:
    """Return a remembered crash as JSON values."""
    return {
        "kind": crash.kind,
        "phase": crash.phase,
        "launches": crash.size.launches,
        "seconds": crash.size.seconds,
        "policy": crash.policy,
        "driver": crash.driver,
        "when": crash.when,
        "weight": crash.weight(driver),
        "clean_runs_since": crash.clean_after,
    }


def death_dict(death: Death) -> dict[str, Any]:
    """Return a death as JSON values."""
    run = death.run
    return {
        "kind": death.kind,
        "phase": death.phase,
        "step": death.step,
        "launches": death.launches,
        "planned_launches": run.launches,
        "planned_seconds": run.seconds,
        "policy": run.policy,
        "device": run.device,
        "driver": run.driver,
        "summary": run.summary,
        "when": death.when,
        "message": death.message,
    }


def is_text(value: str) -> bool:
    """Say whether a string can be stored: JSON may hold halves of surrogate pairs."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


async def post_forget(request: web.Request) -> web.Response:
    """Drop what was learned from crashes, on the user's explicit word only."""
    body = await read_object(request) if request.content_type == "application/json" else None
    if body is None or body.get("confirm") is not True:
        return problem("supir_xpu_not_confirmed", NO_CONFIRM)
    device = body.get("device")
    if device is not None and (not isinstance(device, str) or not is_text(device)):
        return problem("supir_xpu_not_confirmed", NO_CONFIRM)
    try:
        gone = await asyncio.to_thread(forget_crashes, device)
    except ForgetError as e:
        return problem("supir_xpu_not_forgotten", str(e), 503)
    return web.json_response({"forgotten": gone})
