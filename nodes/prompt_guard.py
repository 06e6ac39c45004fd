"""The guard at the door: judges a prompt when it is queued, and refuses it with reasons.

Owns the middleware on ComfyUI's ``/prompt`` and the shape of its answer. What it lets through
reaches ComfyUI byte for byte as it came; what it cannot read is ComfyUI's to answer.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import inspect
import logging
import sys
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

from aiohttp import web

from ..supir.errors import SettingsError
from ..xpu.device_profiles import ProfileError
from ..xpu.errors import FactsError
from .graph import Graph
from .graph_jobs import JOBS
from .graph_judging import Change, GraphJudgement, NodeJudgement, judge_graph, suggest
from .machine import machine
from .old_prompts import convert_prompt
from .safe_plan import safe_plan

log = logging.getLogger(__name__)

PATHS = ("/prompt", "/api/prompt")
LARGEST_BODY = 32 << 20
"""Bytes above which a body is not read here (our choice; graphs have kilobytes). Every node judges
itself again when it runs."""

MARKS = (b"SUPIR", b"\\u")
"""A body without one of these has no node of ours: names are ASCII, or written with escapes."""

ERROR_TYPE = "supir_xpu_risk"
SETTINGS_ERROR = "supir_xpu_settings"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer 400 to a prompt that must not be queued; pass on everything else."""
    if request.method != "POST" or request.path not in PATHS:
        return await handler(request)
    raw = await request.read()  # kept by the request; too large a body fails here as it does there
    refusal: dict[str, Any] | None = None
    if len(raw) <= LARGEST_BODY and may_name_ours(raw, request.charset):
        try:
            refusal = await check_body(await request.json())
        except (ValueError, LookupError, RecursionError):
            pass  # no JSON, or in a charset nobody knows: ComfyUI answers
        except Exception:  # the guard must never stand between the user and ComfyUI
            log.exception("SUPIR XPU: the prompt was not judged before queueing")
    if refusal is not None:
        return web.json_response(refusal, status=400)
    return await handler(request)


def may_name_ours(raw: bytes, charset: str | None) -> bool:
    """Say quickly whether a body can hold a SUPIR node; only bodies that can are read twice."""
    bytes_are_letters = charset is None or charset.lower() in ("utf-8", "utf8", "us-ascii", "ascii")
    return not bytes_are_letters or any(mark in raw for mark in MARKS)


async def check_body(body: object) -> dict[str, Any] | None:
    """Return the refusal of a request's body, or None to let it through; tells of warnings."""
    if not isinstance(body, dict):
        return None
    data = cast("dict[str, Any]", body)
    prompt, targets = data.get("prompt"), data.get("partial_execution_targets")
    problem = settings_problem(prompt)
    if problem:
        return refused_whole(SETTINGS_ERROR, problem)
    found = await asyncio.to_thread(judge_prompt, prompt, targets)
    graph = read_graph(prompt)
    if found is None or graph is None:
        return None
    if found.refused:
        queued = await queued_outputs(prompt, targets)
        if not queued:
            return None  # ComfyUI refuses it by itself
        found = await asyncio.to_thread(judge_prompt, prompt, queued, with_suggestion=True)
    if found is None:
        return None
    if found.refused:
        for node in found.refused:
            log.warning("SUPIR XPU: refused to queue node %s: %s", node.node_id, reason(node))
        tell(data.get("client_id"), found)
        return refusal(found, graph)
    warn(found, data.get("client_id"))
    return None


def settings_problem(prompt: object) -> str:
    """Return why no run of this prompt could start, whatever it holds; an empty text if it may.

    A mistake in the user's settings, or facts that contradict each other, fail every compute node.
    """
    try:
        machine()
    except (SettingsError, ProfileError, FactsError) as e:
        graph = read_graph(prompt)
        ours = graph is not None and any(graph.kind(node_id) in JOBS for node_id in graph.nodes)
        return str(e) if ours else ""
    return ""


def refused_whole(kind: str, text: str) -> dict[str, Any]:
    """Return the answer to a prompt that is refused for what is no node's fault."""
    error = {
        "type": kind,
        "message": "SUPIR XPU did not queue this prompt",
        "details": text,
        "extra_info": {},
    }
    return {"error": error, "node_errors": {}}


def judge_prompt(
    prompt: object, targets: object, *, with_suggestion: bool = False, plans: bool | None = None
) -> GraphJudgement | None:
    """Judge an API prompt; None when it is not shaped as one, or the device is not known."""
    graph = read_graph(prompt)
    if graph is None:
        return None
    try:
        device = machine()
    except (SettingsError, ProfileError, FactsError):
        return None  # every run says what is wrong with the user's settings
    outputs = output_nodes(graph, targets)
    found = judge_graph(graph, outputs, device, plans=plans)
    if with_suggestion and found.refused:
        found.suggestion = suggest(graph, outputs, device, found.refused)
    if with_suggestion and plans:
        found.safe_plan = safe_plan(graph, outputs, device, found)
    return found


def read_graph(prompt: object) -> Graph | None:
    """Return the graph ComfyUI would run: nodes that were renamed replaced, on a copy."""
    graph = Graph.read(prompt)
    if graph is None:
        return None
    known = node_classes()
    if all(graph.kind(node_id) in known for node_id in graph.nodes):
        return graph
    replaced = replace_nodes(graph)
    if replaced is None or any(replaced.kind(n) not in known for n in replaced.nodes):
        return None  # ComfyUI names the missing node
    return replaced


def replace_nodes(graph: Graph) -> Graph | None:
    """Return a copy with old SUPIR nodes converted and ComfyUI's registered replacements applied."""
    changed = copy.deepcopy(dict(graph.nodes))
    found = convert_prompt(changed, node_classes())
    changed = changed if found is None else found[0]
    manager = getattr(server_instance(), "node_replace_manager", None)
    if manager is None:
        return None if found is None else Graph.read(changed)
    try:
        manager.apply_replacements(changed)
    except (KeyError, TypeError, AttributeError, IndexError):  # a node it cannot read
        return None
    return Graph.read(changed)


def output_nodes(graph: Graph, targets: object) -> list[str]:
    """Return the output nodes that will run, chosen as ComfyUI chooses them."""
    known = node_classes()
    found: list[str] = []
    for node_id in graph.nodes:
        if getattr(known[graph.kind(node_id)], "OUTPUT_NODE", False) is not True:
            continue
        try:
            if targets is None or node_id in cast("list[str]", targets):
                found.append(node_id)
        except TypeError:  # not a list: ComfyUI answers
            return []
    return found


async def queued_outputs(prompt: object, targets: object) -> list[str]:
    """Return the outputs ComfyUI itself would queue, by its own check of a copy; [] if none."""
    changed = copy.deepcopy(cast("dict[str, Any]", prompt))
    found = convert_prompt(changed, node_classes())
    changed = changed if found is None else found[0]
    manager = getattr(server_instance(), "node_replace_manager", None)
    try:
        if manager is not None:
            manager.apply_replacements(changed)
        validate = importlib.import_module("execution").validate_prompt
        answer: Any = validate(str(uuid.uuid4()), changed, targets)
        answer = await answer if inspect.isawaitable(answer) else answer
    except Exception:  # its own checks raise on graphs it answers with an error
        log.debug("ComfyUI's check of the prompt failed", exc_info=True)
        return []
    return list(answer[2]) if answer[0] else []


def refusal(found: GraphJudgement, graph: Graph) -> dict[str, Any]:
    """Return the answer to a refused prompt, in the shape of ComfyUI's own refusals."""
    changes = [change_dict(change) for change in found.suggestion]
    words = suggestion_text(found.suggestion)
    details = "\n".join(f"Node {node.node_id}: {reason(node)}" for node in found.refused)
    extra = {"suggestion": changes, "nodes": [node.as_dict() for node in found.refused]}
    error = {
        "type": ERROR_TYPE,
        "message": "SUPIR XPU did not queue this prompt",
        "details": f"{details}\n{words}" if words else details,
        "extra_info": extra,
    }
    outputs = output_nodes(graph, None)
    depends = {output: set(graph.order([output])) for output in outputs}
    node_errors = {
        node.node_id: {
            "class_type": node.kind,
            "dependent_outputs": [o for o in outputs if node.node_id in depends[o]],
            "errors": node_errors_of(node, graph),
        }
        for node in found.refused
    }
    return {"error": error, "node_errors": node_errors}


def node_errors_of(node: NodeJudgement, graph: Graph) -> list[dict[str, Any]]:
    """Return one error per reason, each with code, numbers, what to do, and the input."""
    inputs = graph.inputs(node.node_id)
    if node.verdict is None:
        name = node.input
        extra: dict[str, Any] = {"code": "SETTINGS_INVALID", "input_name": name}
        return [_error("SETTINGS_INVALID", node.error, "", name, extra)]
    size, errors = node.verdict.size, list[dict[str, Any]]()
    for risk in node.verdict.risks:
        if risk.severity != "block" and risk.points <= 0:
            continue
        name = risk.input if risk.input in inputs else "risk"
        extra = {
            "input_name": name,
            "code": risk.code,
            "severity": risk.severity,
            "points": risk.points,
            "score": node.verdict.score,
            "launches": size.launches,
            "seconds": size.seconds,
            "action": risk.action,
        }
        errors.append(_error(risk.code, risk.message, risk.action, name, extra))
    return errors


def _error(code: str, message: str, action: str, name: str, extra: Any) -> dict[str, Any]:
    details = f"{name} - {message} {action}".strip()
    return {"type": code, "message": f"[{code}]", "details": details, "extra_info": extra}


def reason(node: NodeJudgement) -> str:
    """Return in words why a node is refused or warned about."""
    return node.error or (node.judged.text if node.judged else "")


def in_short(node: NodeJudgement) -> str:
    """Return a verdict in one line; the node itself shows all of it when it runs."""
    verdict = node.verdict
    if verdict is None:
        return node.error
    codes = ", ".join(risk.code for risk in verdict.risks if risk.points or risk.severity != "note")
    size = verdict.size
    return (
        f"{verdict.severity}, {verdict.score:g} points ({codes}) for {size.launches} launches and "
        f"{size.seconds:.0f} s"
    )


def change_dict(change: Change) -> dict[str, Any]:
    """Return a change as JSON values."""
    return {
        "node_id": change.node_id,
        "input_name": change.input_name,
        "value": change.value,
    }


def suggestion_text(changes: list[Change]) -> str:
    """Return changes in words; an empty text for none."""
    if not changes:
        return ""
    parts = [f"{c.input_name} to {c.value} on node {c.node_id}" for c in changes]
    return f"It would be queued with: set {', '.join(parts)}."


def warn(found: GraphJudgement, client_id: object) -> None:
    """Tell log and client what a prompt that is queued should be known for."""
    if not found.warned:
        return
    for node in found.warned:
        log.warning("SUPIR XPU: node %s (%s): %s", node.node_id, node.kind, in_short(node))
    tell(client_id, found)


def tell(client_id: object, found: GraphJudgement) -> None:
    """Send a judgement to the client that queued, for a message beside ComfyUI's own answer."""
    instance = server_instance()
    if instance is not None and isinstance(client_id, str):
        data = {
            "warnings": [node.as_dict() for node in found.warned],
            "refused": [{**node.as_dict(), "reason": reason(node)} for node in found.refused],
            "suggestion": [change_dict(change) for change in found.suggestion],
            "suggestion_text": suggestion_text(found.suggestion),
        }
        instance.send_sync("supir_xpu.guard", data, client_id)


def server_instance() -> Any:
    """Return ComfyUI's running server, or None outside of one."""
    server = getattr(sys.modules.get("server"), "PromptServer", None)
    return getattr(server, "instance", None)


def node_classes() -> Mapping[str, Any]:
    """Return every node class ComfyUI has loaded, by name."""
    return importlib.import_module("nodes").NODE_CLASS_MAPPINGS


def install(instance: Any) -> None:
    """Put the guard in front of ``/prompt``, once."""
    if guard not in instance.app.middlewares:
        instance.app.middlewares.append(guard)
