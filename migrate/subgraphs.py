"""What of a subgraph is stored outside its nodes: widgets shown on its own node, ends, counters."""

from __future__ import annotations

from typing import Any, cast

from .old_nodes import COLOR_FIX, SAMPLERS, SEED_CONTROL
from .report import Report
from .workflow_format import wires

Moved = dict[tuple[str, str], tuple[str, str]]
"""(old node id, input) whose value a new node has now: (its id, its input)."""

SHOWN = "proxyWidgets"
"""Property of a subgraph's node: [node inside, widget] of each widget shown on it."""

INPUT, OUTPUT = -10, -20
"""Ids under which links name a subgraph's own inputs and outputs."""


def _list(value: object) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def rename_shown(
    nodes: list[Any], moved: dict[str, Moved], old: dict[str, dict[str, str]], report: Report
) -> None:
    """Let the nodes of subgraphs show the new widgets; note those that have no equal.

    Args:
        moved: by subgraph id.
        old: by subgraph id, the kinds of its old nodes by their id.
    """
    for node in nodes:
        properties = node.get("properties")
        if node.get("type") not in old or not isinstance(properties, dict):
            continue
        held = cast("dict[str, Any]", properties)
        shown = _list(held.get(SHOWN))
        if not shown:
            continue
        inside, kinds = moved[node["type"]], old[node["type"]]
        new = [_renamed(entry, inside, kinds) for entry in shown]
        held[SHOWN] = [entry for entry in new if entry is not None]
        stored = node.get("widgets_values")
        if isinstance(stored, list) and len(_list(stored)) == len(shown):  # one for each of them
            rows = zip(_list(stored), shown, new, strict=True)
            node["widgets_values"] = [_value(v, b, kinds) for v, b, e in rows if e is not None]
        for before, entry in zip(shown, new, strict=True):
            if entry is None:
                kind, name = kinds[str(before[0])], str(before[1])
                text = f"of {kind} was shown on this subgraph's node; it is set nowhere now."
                report.add("no_equal", text, str(node.get("id")), kind, name)


def _renamed(entry: Any, moved: Moved, kinds: dict[str, str]) -> Any:
    """Return an entry as it is now, or None when its widget is gone."""
    if not isinstance(entry, list) or len(_list(entry)) < 2:
        return entry
    number, name, *rest = _list(entry)
    if str(number) not in kinds:
        return entry
    to = moved.get((str(number), "seed" if name == SEED_CONTROL else str(name)))
    if to is None:
        return None
    return [to[0], SEED_CONTROL if name == SEED_CONTROL else to[1], *rest]


def _value(value: Any, before: Any, kinds: dict[str, str]) -> Any:
    """Return a stored value of a shown widget; samplers and colour fixes are named anew."""
    if not isinstance(value, str) or not isinstance(before, list) or len(_list(before)) < 2:
        return value
    number, name = _list(before)[:2]
    if str(number) in kinds and name == "sampler" and value in SAMPLERS:
        return SAMPLERS[value][0]
    if str(number) in kinds and name == "color_fix_type":
        return COLOR_FIX.get(value, value)
    return value


def number_ends(graph: dict[str, Any]) -> None:
    """Store at a subgraph's inputs and outputs the numbers of the links that they have now."""
    links = wires(graph)
    for side, holder, default in (
        ("inputs", "inputNode", INPUT),
        ("outputs", "outputNode", OUTPUT),
    ):
        box = graph.get(holder)
        given_id = cast("dict[str, Any]", box).get("id") if isinstance(box, dict) else None
        number = str(default if given_id is None else given_id)
        for place, given in enumerate(_list(graph.get(side))):
            if not isinstance(given, dict) or "linkIds" not in given:
                continue
            ends = [
                (w.number, w.source.node, w.source.slot)
                if side == "inputs"
                else (w.number, w.target, w.place)
                for w in links
            ]
            given["linkIds"] = [n for n, node, slot in ends if (node, slot) == (number, place)]


def raise_last_id(root: dict[str, Any], last: int) -> None:
    """Keep the root's counter of node ids ahead of those inside its subgraphs."""
    state = root.get("state")
    for holder, key in ((root, "last_node_id"), (state, "lastNodeId")):
        if isinstance(holder, dict) and isinstance(holder.get(key), int):
            held = cast("dict[str, Any]", holder)
            held[key] = max(held[key], last)
