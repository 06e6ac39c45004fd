"""Saved workflows: nodes with values by position and links by number, with subgraphs.

Links are arrays in the root graph of version 0.4, and objects in version 1 and in subgraphs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from .errors import MigrateError
from .flow import Exit, Flow, Node, Source, whole
from .new_nodes import NEW_NODES
from .old_nodes import OLD_NODES, SEED_CONTROL, read_values
from .report import Report
from .rewrite import Extra

OLD_PACK = ("comfyui-supir", "kijai/comfyui-supir")
CORE = "comfy-core"


def is_workflow(data: dict[str, Any]) -> bool:
    """Say whether an object is a saved workflow: nodes that have types, and links."""
    nodes = data.get("nodes")
    if not isinstance(nodes, list) or not isinstance(data.get("links", []), list):
        return False
    return all(isinstance(n, dict) and isinstance(n.get("type"), str) for n in _list(nodes))


def graphs(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the root graph and the graphs of its subgraphs."""
    definitions = workflow.get("definitions")
    inner = definitions.get("subgraphs") if isinstance(definitions, dict) else None
    found = [g for g in _list(inner) if isinstance(g, dict) and is_workflow(g)]
    return [workflow, *found]


def _list(value: object) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


class Wire:
    """A link as stored in either form."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        keys = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")
        given = raw if isinstance(raw, list) else [raw.get(key) for key in keys]
        row = [*cast("list[Any]", given), *[None] * len(keys)]
        number, origin, slot, target, place, kind = row[: len(keys)]
        self.number = whole(number, -1)
        self.source = Source(str(origin), whole(slot, -1))
        self.target, self.place = str(target), whole(place, -1)
        self.type = kind if isinstance(kind, str) else "*"


def wires(graph: dict[str, Any]) -> list[Wire]:
    """Return the readable links of a graph; the front end drops the others too."""
    wires = [Wire(raw) for raw in _list(graph.get("links")) if isinstance(raw, (list, dict))]
    return [wire for wire in wires if min(wire.number, wire.source.slot, wire.place) >= 0]


def read(graph: dict[str, Any]) -> tuple[Flow, Extra]:
    """Read a graph, and what its old nodes stored beyond their inputs.

    Raises: MigrateError for two nodes of one id.
    """
    nodes: dict[str, Node] = {}
    extra: Extra = {}
    for raw in _list(graph["nodes"]):
        node = _read_node(raw)
        if node.id in nodes:
            first = nodes[node.id].kind
            raise MigrateError(
                "duplicate_ids",
                f"Two nodes of one graph have the id {node.id}: {first} and {node.kind}. Links cannot "
                "tell them apart: open the file in ComfyUI, save it, and convert that.",
            )
        nodes[node.id] = node
        if node.kind in OLD_NODES:
            stored = read_values(node.kind, raw.get("widgets_values"))
            node.values, extra[node.id] = stored.values, stored.left
    exits: list[Exit] = []
    for wire in wires(graph):
        target = nodes.get(wire.target)
        if target is None:
            if wire.source.node in nodes:
                exits.append(Exit(wire.source, wire.raw))
            continue
        name = next((n for n, place in target.slots.items() if place == wire.place), None)
        if name is not None:
            target.links[name] = wire.source
    return Flow(nodes, exits), extra


def _read_node(raw: dict[str, Any]) -> Node:
    node = Node(str(raw.get("id")), raw["type"], raw=raw)
    node.title = str(raw.get("title") or "")
    mode = raw.get("mode")
    node.mode = mode if isinstance(mode, int) else 0
    node.pos = _position(raw.get("pos"))
    for side in ("inputs", "outputs"):  # what is no entry keeps its place
        raw[side] = [e if isinstance(e, dict) else {} for e in _list(raw.get(side))]
    for place, given in enumerate(raw["inputs"]):
        name = given.get("name")
        name = str(name) if name is not None else f"input {place}"
        node.slots[name if name not in node.slots else f"{name} {place}"] = place
    return node


def _position(pos: object) -> tuple[float, float]:
    """Return a position, stored as a list or as an object with keys 0 and 1."""
    given: Any = pos
    try:
        if isinstance(given, dict):
            return float(given["0"]), float(given["1"])
        return float(given[0]), float(given[1])
    except (LookupError, TypeError, ValueError):
        return 0.0, 0.0


def write(graph: dict[str, Any], flow: Flow) -> None:
    """Put a converted graph back: new nodes, and every link numbered and typed anew where changed."""
    raws = {node.id: _written(node) if node.made else node.raw for node in flow.nodes.values()}
    graph["nodes"] = list(raws.values())
    before = {(w.source, w.target, w.place): w for w in wires(graph)}
    as_objects = any(isinstance(w.raw, dict) for w in before.values()) or graph.get("version") == 1
    numbers = [wire.number for wire in before.values()]
    state = graph.get("state")
    last = max(
        [*numbers, whole(graph.get("last_link_id")), _state_of(state, "lastLinkId")], default=0
    )
    links: list[Any] = []
    for raw in raws.values():
        for slot in _list(raw.get("outputs")):
            slot["links"] = []
        for given in _list(raw.get("inputs")):
            given["link"] = None
    for target, place, source in _ends(flow, raws):
        kept = before.get((source, target, place))
        number = None if kept is None else kept.number
        if number is None:
            last += 1
            number = last
        outputs = _list(raws[source.node].get("outputs")) if source.node in raws else []
        kind = outputs[source.slot].get("type") if source.slot < len(outputs) else None
        kind = kind or (kept.type if kept is not None else "*")
        row = [number, _id(raws, source.node), source.slot, _id(raws, target), place, kind]
        links.append(_link_object(row, kept) if as_objects else row)
        raws[target]["inputs"][place]["link"] = number
        if source.slot < len(outputs):
            outputs[source.slot]["links"].append(number)
    for leaving in flow.exits:
        links.append(_leave(leaving, raws))
    graph["links"] = links
    _count(graph, state, last, flow)
    _clean_bends(graph, links)
    _clean_view(graph)


def _ends(flow: Flow, raws: dict[str, Any]) -> list[tuple[str, int, Source]]:
    """Return every link as (target, place among its inputs, source)."""
    ends: list[tuple[str, int, Source]] = []
    for node in flow.nodes.values():
        slots = node.slots
        if node.made:
            slots = {given["name"]: k for k, given in enumerate(raws[node.id]["inputs"])}
        ends += [(node.id, slots[name], source) for name, source in node.links.items()]
    return ends


def _link_object(row: list[Any], kept: Wire | None) -> dict[str, Any]:
    keys = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")
    rest = kept.raw if kept is not None and isinstance(kept.raw, dict) else {}
    return {**rest, **dict(zip(keys, row, strict=True))}


def _leave(leaving: Exit, raws: dict[str, Any]) -> Any:
    """Return the stored link of a subgraph's output, from where it now comes."""
    origin, slot = _id(raws, leaving.source.node), leaving.source.slot
    number = Wire(leaving.raw).number
    outputs = _list(raws[leaving.source.node].get("outputs")) if leaving.source.node in raws else []
    if slot < len(outputs):
        outputs[slot]["links"].append(number)
    if isinstance(leaving.raw, list):
        return [number, origin, slot, *cast("list[Any]", leaving.raw)[3:]]
    return {**leaving.raw, "origin_id": origin, "origin_slot": slot}


def _id(raws: dict[str, Any], node_id: str) -> Any:
    """Return a node id as it is stored: numbers stay numbers."""
    if node_id in raws:
        return raws[node_id]["id"]
    return int(node_id) if node_id.lstrip("-").isdecimal() else node_id


def _state_of(state: object, key: str) -> int:
    value: Any = state.get(key) if isinstance(state, dict) else 0
    return value if isinstance(value, int) else 0


def largest_id(ids: Iterable[str]) -> int:
    """Return the largest node id that is a number, 0 without one."""
    return max((int(i) for i in ids if i.isdecimal() and len(i) < 16), default=0)


def _count(graph: dict[str, Any], state: Any, last_link: int, flow: Flow) -> None:
    """Keep the front end's counters ahead of every number in use."""
    pairs = (
        ("last_node_id", "lastNodeId", largest_id(flow.nodes)),
        ("last_link_id", "lastLinkId", last_link),
    )
    for key, name, value in pairs:
        if isinstance(graph.get(key), int):
            graph[key] = max(graph[key], value)
        if isinstance(state, dict) and isinstance(state.get(name), int):
            state[name] = max(state[name], value)


def _clean_view(graph: dict[str, Any]) -> None:
    """Drop a stored view that is not whole: the front end reads both of its parts or fails."""
    extra = graph.get("extra")
    if not isinstance(extra, dict):
        return
    held = cast("dict[str, Any]", extra)
    view = held.get("ds")
    offset = cast("dict[str, Any]", view).get("offset") if isinstance(view, dict) else None
    numbers = _list(offset) if isinstance(offset, list) else []
    if len(numbers) != 2 or not all(isinstance(n, (int, float)) for n in numbers):
        held.pop("ds", None)


def _clean_bends(graph: dict[str, Any], links: list[Any]) -> None:
    """Drop bends (native reroutes) from links that are gone."""
    there = {Wire(raw).number for raw in links}
    for holder in (graph, graph.get("extra")):
        if not isinstance(holder, dict):
            continue
        held = cast("dict[str, Any]", holder)
        extensions = held.get("linkExtensions")
        if isinstance(extensions, list):
            held["linkExtensions"] = [
                e for e in _list(extensions) if not isinstance(e, dict) or e.get("id") in there
            ]
        for bend in _list(held.get("reroutes")):
            if isinstance(bend, dict) and isinstance(bend.get("linkIds"), list):
                bend["linkIds"] = [n for n in bend["linkIds"] if n in there]


def _written(node: Node) -> dict[str, Any]:
    """Return a new node as the front end stores it."""
    new = NEW_NODES[node.kind]
    inputs: list[dict[str, Any]] = [
        {
            "name": s.name,
            "type": s.type,
            "link": None,
            **({"shape": 7} if s.name in new.optional else {}),
        }
        for s in new.sockets
    ]
    stored: list[Any] = []
    for field in new.widgets:
        widget = {"name": field.name}
        inputs.append({"name": field.name, "type": field.type, "widget": widget, "link": None})
        stored.append(node.values[field.name])
        if field.name == "seed":
            stored.append(node.values.get(SEED_CONTROL, "fixed"))
    outputs = [{"name": s.name, "type": s.type, "links": []} for s in new.outputs]
    return {
        "id": node.raw.get("id", int(node.id) if node.id.isdecimal() else node.id),
        "type": node.kind,
        "pos": list(node.pos),
        "size": list(new.size),
        "flags": {},
        "order": 0,
        **{k: v for k, v in node.raw.items() if k != "id"},
        "mode": node.mode,
        "title": node.title,
        "inputs": inputs,
        "outputs": outputs,
        "properties": {"Node name for S&R": node.kind},
        "widgets_values": stored,
    }


def grouped_old_nodes(workflow: dict[str, Any]) -> int:
    """Return how many old nodes are inside group nodes, which hold them as definitions."""
    extra = workflow.get("extra")
    groups = extra.get("groupNodes") if isinstance(extra, dict) else None
    held = list(cast("dict[str, Any]", groups).values()) if isinstance(groups, dict) else []
    inner = [n for g in held if isinstance(g, dict) for n in _list(g.get("nodes"))]
    return sum(isinstance(n, dict) and n.get("type") in OLD_NODES for n in inner)


def note_leftovers(flows: list[Flow], report: Report) -> None:
    """Note what belongs to the old pack and could not be converted, and nodes of other packs."""
    others: dict[str, str] = {}
    for node in (n for flow in flows for n in flow.nodes.values() if not n.made):
        properties = node.raw.get("properties")
        held = cast("dict[str, Any]", properties) if isinstance(properties, dict) else {}
        pack = str(held.get("cnr_id") or held.get("aux_id") or "")
        if pack.lower() in OLD_PACK or _looks_old(node.kind):
            text = "is of the old pack, but none of its known nodes: it stays as it is."
            report.add("to_do", text, node.id, node.kind)
        elif pack and pack != CORE:
            others.setdefault(node.kind, pack)
    for kind, pack in others.items():
        report.add("other_pack", f"belongs to {pack}, which is still needed for it.", name=kind)


def _looks_old(kind: str) -> bool:
    return kind.startswith("SUPIR_") and not kind.startswith("SUPIR_XPU_")
