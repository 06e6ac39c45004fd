"""The widget values with which a judged graph would run safely, for *apply the safe plan*.

Owns which inputs are changed to what; the judging is ``graph_judging.py``'s. Alters no prompt.
"""

from __future__ import annotations

import copy

from .graph import Graph
from .graph_judging import Change, GraphJudgement, NodeJudgement, judge_graph, suggest
from .machine import Machine

CARELESS = ("warn", "off")
"""Risk modes in which a run is let through that should not be."""


def safe_plan(
    graph: Graph, outputs: list[str], device: Machine, found: GraphJudgement
) -> list[Change]:
    """Return the inputs to change so that nothing in the graph is refused or would be.

    A node that runs whatever is found is set to ``auto`` where the finding is ``block``; what is
    refused then gets the change the guard suggests; tiles that ``auto`` chose instead of those
    asked for become the node's own. Inputs that are connected stay as they are.

    Returns: changes in that order; none when there is nothing to change or no safe plan was found.
    """
    if not found.complete:
        return []
    changes = [
        Change(node.node_id, "risk", "auto")
        for node in found.nodes
        if _is_careless(graph, node) and graph.link(node.node_id, "risk") is None
    ]
    judged = _judge_with(graph, changes, outputs, device) if changes else found
    if judged.refused:
        changed = _with(graph, changes)
        more = found.suggestion if not changes else []
        more = more or suggest(changed, outputs, device, judged.refused)
        if not more:
            return []
        changes += more
        judged = _judge_with(graph, changes, outputs, device)
    return changes + [tile for node in judged.nodes for tile in _tiles(graph, node)]


def _is_careless(graph: Graph, node: NodeJudgement) -> bool:
    if not node.ours or node.verdict is None or node.verdict.severity != "block":
        return False
    return graph.inputs(node.node_id).get("risk") in CARELESS


def _with(graph: Graph, changes: list[Change]) -> Graph:
    nodes = copy.deepcopy(dict(graph.nodes))
    for change in changes:
        nodes[change.node_id]["inputs"][change.input_name] = change.value  # type: ignore[index]
    return Graph(nodes)


def _judge_with(
    graph: Graph, changes: list[Change], outputs: list[str], device: Machine
) -> GraphJudgement:
    return judge_graph(_with(graph, changes), outputs, device, plans=True)


def _tiles(graph: Graph, node: NodeJudgement) -> list[Change]:
    """Return the tile widgets of a node whose tiles ``auto`` changed."""
    if not node.ours or node.judged is None:
        return []
    result = node.judged.result
    if not any(change.startswith("tile_px") for change in result.changes):
        return []
    tile_px = result.settings.tile_px
    values = {"tile_px": tile_px or -1}
    if tile_px:
        values["tile_overlap_px"] = tile_px // 4
    inputs = graph.inputs(node.node_id)
    return [
        Change(node.node_id, name, value)
        for name, value in values.items()
        if name in inputs and graph.link(node.node_id, name) is None and inputs[name] != value
    ]
