"""What the front end sends for a saved workflow: a small reading of it, from /object_info alone."""

from __future__ import annotations

from typing import Any

from supir_xpu.migrate.workflow_format import read

WIDGET_TYPES = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
FRONT_END_ONLY = ("Note", "MarkdownNote", "Reroute", "SetNode", "GetNode", "PrimitiveNode")
DEMO = "demo"
"""Id of the demo loader that takes the place of the loaders of files."""

DEMO_OUTPUTS = {
    "CheckpointLoaderSimple": {0: 0, 1: 1, 2: 2},
    "DualCLIPLoader": {0: 1},
    "SUPIR_XPU_LoadSUPIR": {0: 3},
}


def widgets_of(description: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return (name, options) of a node's widgets in the order they are stored."""
    found = []
    for part in ("required", "optional"):
        for name, spec in description["input"].get(part, {}).items():
            options = spec[1] if len(spec) > 1 else {}
            is_widget = isinstance(spec[0], list) or spec[0] in WIDGET_TYPES
            if is_widget and not options.get("forceInput"):
                found.append((name, options))
    return found


def to_prompt(workflow: dict[str, Any], info: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the API prompt of a saved workflow."""
    flow, _ = read(workflow)
    prompt: dict[str, dict[str, Any]] = {}
    for node in flow.nodes.values():
        if node.kind in FRONT_END_ONLY or node.mode in (2, 4):
            continue
        inputs: dict[str, Any] = {}
        stored = list(node.raw["widgets_values"])
        for name, options in widgets_of(info[node.kind]):
            inputs[name] = stored.pop(0)
            if options.get("control_after_generate"):
                stored.pop(0)
        for name in node.links:
            source = flow.origin(node, name)
            inputs[name] = [source.node, source.slot]
        prompt[node.id] = {"class_type": node.kind, "inputs": inputs}
    return prompt


def with_demo_model(prompt: dict[str, Any]) -> dict[str, Any]:
    """Return a prompt that gets everything it loads from the bundled demo model."""
    new = {DEMO: {"class_type": "SUPIR_XPU_LoadDemo", "inputs": {}}}
    for node_id, node in prompt.items():
        if node["class_type"] in DEMO_OUTPUTS:
            continue
        inputs = dict(node["inputs"])
        for name, value in inputs.items():
            if isinstance(value, list) and prompt[value[0]]["class_type"] in DEMO_OUTPUTS:
                inputs[name] = [DEMO, DEMO_OUTPUTS[prompt[value[0]]["class_type"]][value[1]]]
        new[node_id] = {**node, "inputs": inputs}
    return new
