"""API prompts: nodes by id, each with class_type and inputs; a link is [node id, output]."""

from __future__ import annotations

from typing import Any, cast

from .flow import Flow, Node, Source, whole
from .new_nodes import NEW_NODES


def is_prompt(data: object) -> bool:
    """Say whether an object is an API prompt."""
    if not isinstance(data, dict) or not data:
        return False
    nodes = list(cast("dict[str, Any]", data).values())
    shaped = [isinstance(n, dict) and isinstance(n.get("class_type"), str) for n in nodes]
    return all(shaped)


def read(prompt: dict[str, Any]) -> Flow:
    """Read a prompt. Inputs that are absent stay absent."""
    nodes: dict[str, Node] = {}
    for node_id, raw in prompt.items():
        node = Node(node_id, raw["class_type"], raw=raw)
        meta = raw.get("_meta")
        if isinstance(meta, dict):
            node.title = str(cast("dict[str, Any]", meta).get("title", ""))
        given = raw.get("inputs")
        for name, value in (
            cast("dict[str, Any]", given) if isinstance(given, dict) else {}
        ).items():
            source = as_source(value)
            if source is not None:
                node.links[name] = source
            elif isinstance(value, dict) and "__value__" in value:  # ComfyUI's wrapped constant
                node.values[name] = value["__value__"]
            else:
                node.values[name] = value
        nodes[node_id] = node
    return Flow(nodes)


def as_source(value: object) -> Source | None:
    """Return the output a value names, if it is a link as ComfyUI reads links."""
    if not isinstance(value, list):
        return None
    pair = cast("list[object]", value)
    if len(pair) != 2 or not isinstance(pair[0], str):
        return None
    slot = whole(pair[1], -1)
    return None if slot < 0 else Source(pair[0], slot)


def write(prompt: dict[str, Any], flow: Flow) -> dict[str, Any]:
    """Return the prompt of a converted graph; foreign nodes keep all but their links."""
    written: dict[str, Any] = {}
    for node in flow.nodes.values():
        if node.made:
            written[node.id] = _written(node)
            continue
        raw = dict(prompt[node.id])
        inputs = raw.get("inputs")
        if isinstance(inputs, dict):
            raw["inputs"] = {
                name: _link(node.links[name]) if name in node.links else value
                for name, value in cast("dict[str, Any]", inputs).items()
                if name in node.links or as_source(value) is None
            }
        written[node.id] = raw
    return written


def _written(node: Node) -> dict[str, Any]:
    new = NEW_NODES[node.kind]
    inputs: dict[str, Any] = {
        slot.name: _link(node.links[slot.name]) for slot in new.sockets if slot.name in node.links
    }
    for field in new.widgets:
        linked = node.links.get(field.name)
        inputs[field.name] = node.values[field.name] if linked is None else _link(linked)
    return {"class_type": node.kind, "inputs": inputs, "_meta": {"title": node.title}}


def _link(source: Source) -> list[Any]:
    return [source.node, source.slot]
