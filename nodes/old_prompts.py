"""Old workflows at the server: prompts with nodes of the older SUPIR wrapper, and its replacements.

Inert while the older wrapper (ComfyUI-SUPIR) is installed. Touches no file.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Any, cast

from aiohttp import ClientPayloadError, web
from aiohttp.http_exceptions import BadHttpMessage
from comfy_api.latest import io

from ..migrate import OLD_NODES, MigrateError, Report, convert, old_nodes_in

log = logging.getLogger(__name__)

LARGEST_BODY = 16 << 20
"""Bytes above which a workflow is not converted over HTTP (our choice; workflows have kilobytes)."""

ONE_TO_ONE: dict[str, tuple[str, list[str], list[tuple[str, str]]]] = {
    "SUPIR_encode": (
        "SUPIR_XPU_Encode",
        ["use_tiled_vae", "encoder_tile_size", "encoder_dtype"],
        [("vae", "SUPIR_VAE"), ("image", "image")],
    ),
    "SUPIR_decode": (
        "SUPIR_XPU_Decode",
        ["use_tiled_vae", "decoder_tile_size", "decoder_dtype"],
        [("vae", "SUPIR_VAE"), ("latent", "latents")],
    ),
}
"""Old node: (ours, its stored values in order, inputs). Only nodes every socket of which has its
place in ours: ComfyUI replaces one node at a time, and would lose what the others are connected
to, such as the MODEL, CLIP and VAE of the old loader. Whole graphs are for ``migrate``."""


def replacements() -> list[io.NodeReplace]:
    """Return what ComfyUI's own node replacement can do without losing a connection."""
    return [
        io.NodeReplace(
            new_node_id=new,
            old_node_id=old,
            old_widget_ids=widgets,
            input_mapping=[{"new_id": ours, "old_id": theirs} for ours, theirs in inputs],
            output_mapping=[{"new_idx": 0, "old_idx": 0}],
        )
        for old, (new, widgets, inputs) in ONE_TO_ONE.items()
    ]


def is_old_pack_here(known: Mapping[str, Any]) -> bool:
    """Say whether any node of the older wrapper is installed."""
    return any(kind in known for kind in OLD_NODES)


def convert_prompt(
    prompt: object, known: Mapping[str, Any]
) -> tuple[dict[str, Any], Report] | None:
    """Return an API prompt with its old nodes converted, or None when there is nothing to convert.

    Args: known: every installed node class. With the older wrapper among them its nodes run.
    """
    if not isinstance(prompt, dict) or is_old_pack_here(known):
        return None
    nodes = cast("dict[str, Any]", prompt)
    kinds = {
        node_id: node["class_type"]
        for node_id, node in nodes.items()
        if isinstance(node, dict) and isinstance(node.get("class_type"), str)
    }
    if not old_nodes_in(kinds):
        return None
    try:
        converted = convert(nodes)
    except MigrateError:  # not shaped as a prompt: ComfyUI answers
        return None
    except Exception:  # a prompt must never fail here: ComfyUI answers for the old nodes
        log.exception("SUPIR XPU: a prompt of the older SUPIR nodes could not be converted.")
        return None
    return converted.workflow, converted.report


def complete(prompt: dict[str, Any]) -> None:
    """Give old nodes that are left what ComfyUI's replacement reads without asking.

    It raises KeyError, which answers HTTP 500, for a node without ``_meta`` or a mapped input
    (0.16.3 to 0.30.0).
    """
    for node in prompt.values():
        kind = node.get("class_type") if isinstance(node, dict) else None
        if not isinstance(kind, str) or kind not in ONE_TO_ONE:
            continue
        if isinstance(node.get("inputs"), dict):
            node.setdefault("_meta", {})
            for _, theirs in ONE_TO_ONE[kind][2]:
                node["inputs"].setdefault(theirs, None)


class PromptHandler:
    """ComfyUI's on-prompt handler: it runs before replacement and validation."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        self.known = known

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        """Convert a prompt with old nodes; every other request passes as it is."""
        prompt: object = data.get("prompt")
        if not isinstance(prompt, dict) or is_old_pack_here(self.known):
            return data
        found = convert_prompt(prompt, self.known)
        if found is None:
            complete(cast("dict[str, Any]", prompt))
            return data
        new, report = found
        log.warning("SUPIR XPU: a prompt of the older SUPIR nodes was converted. %s", report.text())
        return {**data, "prompt": new}


def install(instance: Any, known: Mapping[str, Any]) -> None:
    """Register handler and route, and, once every pack is loaded, the replacements."""
    instance.add_on_prompt_handler(PromptHandler(known))
    instance.routes.post("/supir_xpu/convert")(post_convert)
    manager = getattr(instance, "node_replace_manager", None)
    if manager is None:  # a ComfyUI without node replacement: prompts are converted all the same
        return

    async def when_all_are_loaded(_: web.Application) -> None:
        if not is_old_pack_here(known):
            for replacement in replacements():
                manager.register(replacement)

    instance.app.on_startup.append(when_all_are_loaded)


async def post_convert(request: web.Request) -> web.Response:
    """Convert the workflow in the body: answers ``{workflow, report}``, or why it cannot be."""
    if (request.content_length or 0) > LARGEST_BODY:
        return refused("too_large", TOO_LARGE, 413)
    try:
        raw = await request.content.read(LARGEST_BODY + 1)
        while len(raw) <= LARGEST_BODY and not request.content.at_eof():
            raw += await request.content.read(LARGEST_BODY + 1 - len(raw))
    except (ClientPayloadError, BadHttpMessage, web.RequestPayloadError) as e:
        text = f"The body cannot be unpacked ({e}). Send it as its Content-Encoding says, or without one."
        return refused("not_json", text, 400)
    if len(raw) > LARGEST_BODY:
        return refused("too_large", TOO_LARGE, 413)
    return await asyncio.to_thread(convert_body, raw)


def convert_body(raw: bytes) -> web.Response:
    """Return the answer to a body: JSON of a saved workflow or an API prompt."""
    try:
        data: object = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return refused("not_json", "The body is no JSON. Send the text of a workflow file.", 400)
    try:
        converted = convert(data)
    except MigrateError as e:
        return refused(e.code, str(e), 413 if e.code == "too_large" else 400)
    return web.json_response({"workflow": converted.workflow, "report": converted.report.as_dict()})


TOO_LARGE = (
    f"The body has more than {LARGEST_BODY >> 20} MiB, which no workflow has. Convert the file with "
    "python run.py convert."
)


def refused(code: str, text: str, status: int) -> web.Response:
    """Return an error in ComfyUI's shape, its type ``supir_xpu_<code>``."""
    kind = f"supir_xpu_{code}"
    error = {"type": kind, "message": text, "details": "", "extra_info": {"code": code}}
    return web.json_response({"error": error, "node_errors": {}}, status=status)
