"""The conversion of a whole file: which format it is, its graphs, and what is noted once."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from . import prompt_format, subgraphs, workflow_format
from .errors import MigrateError
from .flow import Flow, whole
from .old_nodes import OLD_NODES
from .report import Report
from .rewrite import Rewrite

MOST_NODES = 20_000
"""Nodes above which a file is refused (our choice; real workflows have hundreds)."""


@dataclass(frozen=True)
class Converted:
    """A new workflow in the format of the old one, and what was done."""

    workflow: dict[str, Any]
    report: Report


def convert(data: object) -> Converted:
    """Convert a saved workflow, an API prompt, or the body of a request to ``/prompt``.

    The input is not changed. Raises: MigrateError when there is nothing that can be converted.
    """
    if not isinstance(data, dict):
        raise MigrateError("not_a_workflow", f"{_what(data)} {EXPECTED}")
    try:
        return _convert(cast("dict[str, Any]", data))
    except RecursionError as e:
        raise MigrateError("not_a_workflow", f"This JSON is nested too deep; it {EXPECTED}") from e


def _convert(given: dict[str, Any]) -> Converted:
    odd: list[str] = []
    data = _finite(given, "", odd)
    wrapped = data.get("prompt")
    if workflow_format.is_workflow(data):
        done = _convert_workflow(data)
    elif isinstance(wrapped, dict) and prompt_format.is_prompt(wrapped):
        inner = _convert_prompt(cast("dict[str, Any]", wrapped))
        done = Converted({**data, "prompt": inner.workflow}, inner.report)
        _note_embedded(data, done.report)
    elif prompt_format.is_prompt(data):
        done = _convert_prompt(data)
    else:
        raise MigrateError("not_a_workflow", f"This JSON object {EXPECTED}")
    if odd:
        text = (
            f"{len(odd)} value(s) were NaN or infinite, which JSON does not have; null stands there "
            f"now. Set them: {', '.join(odd[:MOST_NAMED])}{', ...' if len(odd) > MOST_NAMED else ''}."
        )
        done.report.add("to_do", text)
    return done


MOST_NAMED = 5
"""Positions that one entry of the report names."""


def _finite(value: Any, where: str, odd: list[str]) -> Any:
    """Return a copy with null for what JSON has no number for; ``odd`` gets its positions."""
    if isinstance(value, dict):
        pairs = cast("dict[str, Any]", value).items()
        return {k: _finite(v, f"{where}.{k}" if where else str(k), odd) for k, v in pairs}
    if isinstance(value, list):
        items = enumerate(cast("list[Any]", value))
        return [_finite(v, f"{where}.{k}" if where else str(k), odd) for k, v in items]
    if isinstance(value, float) and not math.isfinite(value):
        odd.append(where)
        return None
    return copy.deepcopy(value)


def _note_embedded(body: dict[str, Any], report: Report) -> None:
    """Note a workflow that a request carries for the files it saves: it is not what runs."""
    found: Any = body
    for key in ("extra_data", "extra_pnginfo", "workflow"):
        found = cast("dict[str, Any]", found).get(key) if isinstance(found, dict) else None
    if not isinstance(found, dict) or not workflow_format.is_workflow(found):
        return
    every = [node for graph in workflow_format.graphs(found) for node in graph["nodes"]]
    count = sum(node["type"] in OLD_NODES for node in every)
    if count:
        text = (
            f"holds a workflow with {count} old node(s), which ComfyUI writes into the saved pictures. "
            "It stays as it is: convert the workflow's own file and send that."
        )
        report.add("ignored", text, name="extra_pnginfo")


EXPECTED = (
    "is neither a workflow saved by ComfyUI (an object with nodes and links) nor an API prompt "
    "(nodes by id, each with class_type and inputs). Give a file from Save, Export or Export (API)."
)


def _what(data: object) -> str:
    return f"This JSON holds a {type(data).__name__}, which"


def old_nodes_in(kinds: Mapping[str, str]) -> list[str]:
    """Return the ids of the nodes whose kind is one of the old wrapper's."""
    return [node_id for node_id, kind in kinds.items() if kind in OLD_NODES]


def _convert_prompt(prompt: dict[str, Any]) -> Converted:
    flow = prompt_format.read(prompt)
    report = Report("prompt")
    _require([flow])
    ids = _counter(flow.nodes)
    Rewrite(flow, report, {}, ids).run()
    workflow_format.note_leftovers([flow], report)
    _note_general(report)
    return Converted(prompt_format.write(prompt, flow), report)


def _convert_workflow(workflow: dict[str, Any]) -> Converted:
    report = Report("workflow")
    graphs = workflow_format.graphs(workflow)
    read = [(graph, *workflow_format.read(graph)) for graph in graphs]
    _require([flow for _, flow, _ in read], workflow_format.grouped_old_nodes(workflow))
    every = {node_id: None for _, flow, _ in read for node_id in flow.nodes}
    ids = _counter(every, whole(workflow.get("last_node_id")))
    moved: dict[str, subgraphs.Moved] = {}
    old: dict[str, dict[str, str]] = {}
    for graph, flow, extra in read:
        kinds = {i: n.kind for i, n in flow.nodes.items()}
        here = {i: kinds[i] for i in old_nodes_in(kinds)}
        if here:
            rewrite = Rewrite(flow, report, extra, ids)
            rewrite.run()
            workflow_format.write(graph, flow)
            subgraphs.number_ends(graph)
            moved[str(graph.get("id"))], old[str(graph.get("id"))] = rewrite.moved, here
    for graph, _, _ in read:
        subgraphs.rename_shown(graph["nodes"], moved, old, report)
    numbers = [n.id for _, flow, _ in read for n in flow.nodes.values()]
    subgraphs.raise_last_id(workflow, workflow_format.largest_id(numbers))
    grouped = workflow_format.grouped_old_nodes(workflow)
    if grouped:
        text = (
            f"{grouped} old node(s) are inside group nodes: ungroup them with the old pack first."
        )
        report.add("to_do", text)
    workflow_format.note_leftovers([flow for _, flow, _ in read], report)
    _note_general(report)
    return Converted(workflow, report)


def _require(flows: list[Flow], grouped: int = 0) -> None:
    """Refuse what holds no old node, or more nodes than anyone's workflow."""
    total = sum(len(flow.nodes) for flow in flows)
    if total > MOST_NODES:
        raise MigrateError(
            "too_large", f"It has {total} nodes; more than {MOST_NODES} are not converted at once."
        )
    kinds = {f"{k}.{i}": n.kind for k, f in enumerate(flows) for i, n in f.nodes.items()}
    if old_nodes_in(kinds):
        return
    if grouped:
        raise MigrateError(
            "grouped",
            f"Its {grouped} old SUPIR node(s) are inside group nodes. Open it with the old pack, "
            "ungroup them (right click, Convert to nodes), save, and convert that.",
        )
    ours = sum(kind.startswith("SUPIR_XPU_") for kind in kinds.values())
    done = f" It has {ours} node(s) of SUPIR XPU already." if ours else ""
    raise MigrateError(
        "no_old_nodes",
        f"None of its {total} node(s) belongs to the older SUPIR wrapper (ComfyUI-SUPIR), so there is "
        f"nothing to convert.{done}",
    )


def _counter(taken: Mapping[str, Any], last: int = 0) -> Callable[[], str]:
    """Return a function that gives node ids nothing has."""
    state = [max(last, workflow_format.largest_id(taken))]

    def next_id() -> str:
        state[0] += 1
        return str(state[0])

    return next_id


def _note_general(report: Report) -> None:
    """Note what is different for every converted workflow."""
    report.add(
        "means_other",
        "The old pack gave SUPIR's VAE pictures of the range 0 to 1; here, as in the original, they are "
        "-1 to 1. Contrast and colour differ, and settings tuned there may need another look.",
        name="pixel range",
    )
    report.add(
        "means_other",
        "Noise is drawn on the CPU here, so that a seed gives the same picture on every device; it is "
        "not the picture the old pack made with it.",
        name="seed",
    )
    report.add(
        "means_other",
        "Sizes are exact here. The old pack stretched pictures to a multiple of 32 or 64 px and back.",
        name="size",
    )
