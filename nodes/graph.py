"""An API graph as data: nodes, links, constants, and what depends on what. Read only.

Knows ComfyUI's shape of a prompt and nothing about what nodes do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

Link = tuple[str, int]
MAX_LINKS = 1000
"""Longest chain that is followed from a loader to a node (our choice; real graphs have tens)."""


class Graph:
    """An API prompt, read only. Make it with ``Graph.read``."""

    def __init__(self, nodes: Mapping[str, Mapping[str, Any]]) -> None:
        self.nodes = nodes

    @classmethod
    def read(cls, prompt: object) -> Graph | None:
        """Return the graph, or None when a node is not shaped as ComfyUI needs it."""
        if not isinstance(prompt, dict) or not prompt:
            return None
        for node in cast("dict[object, Any]", prompt).values():
            if not isinstance(node, dict) or not isinstance(node.get("class_type"), str):
                return None
            if not isinstance(node.get("inputs"), dict):
                return None
        return cls(cast("Mapping[str, Mapping[str, Any]]", prompt))

    def kind(self, node_id: str) -> str:
        """Return the class of a node; empty for an id that is not there."""
        node = self.nodes.get(node_id)
        return "" if node is None else str(node["class_type"])

    def inputs(self, node_id: str) -> Mapping[str, Any]:
        """Return the inputs of a node; none for an id that is not there."""
        node = self.nodes.get(node_id)
        return {} if node is None else node["inputs"]

    def link(self, node_id: str, name: str) -> Link | None:
        """Return (node, output) an input is connected to, or None when it holds a constant."""
        return as_link(self.inputs(node_id).get(name))

    def constant(self, node_id: str, name: str, default: Any = None) -> Any:
        """Return the constant of an input, ``default`` when it is absent, None when not known.

        Follows links to ComfyUI's primitive nodes.
        """
        for _ in range(MAX_LINKS):
            inputs = self.inputs(node_id)
            if name not in inputs:
                return default
            value = inputs[name]
            link = as_link(value)
            if link is None:
                wrapped = isinstance(value, dict) and "__value__" in value
                return value["__value__"] if wrapped else value
            node_id, name = link[0], "value"
            if not self.kind(node_id).startswith("Primitive"):
                return None
        return None

    def number(self, node_id: str, name: str, default: float | None = None) -> float | None:
        """Return a number as ComfyUI would read it, or None when it is not known."""
        value = self.constant(node_id, name, default)
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            return None
        return number if math.isfinite(number) else None

    def integer(self, node_id: str, name: str, default: int | None = None) -> int | None:
        """Return a whole number, or None when it is not known."""
        number = self.number(node_id, name, default)
        return None if number is None else int(number)

    def order(self, targets: Iterable[str]) -> list[str]:
        """Return what the targets depend on and themselves, sources first; cycles are cut."""
        done: dict[str, None] = {}
        seen: set[str] = set()
        for target in targets:
            stack: list[tuple[str, bool]] = [(target, False)]
            while stack:
                node_id, left = stack.pop()
                if left:
                    done[node_id] = None
                elif node_id not in seen and node_id in self.nodes:
                    seen.add(node_id)
                    stack.append((node_id, True))
                    links = map(as_link, self.inputs(node_id).values())
                    stack.extend((link[0], False) for link in links if link is not None)
        return list(done)


MOST_OUTPUTS = 1 << 20
"""Output numbers above this are no node's; ComfyUI refuses them itself."""


def as_link(value: object) -> Link | None:
    """Return (node, output) when a value is a link as ComfyUI recognises one."""
    if not isinstance(value, list) or len(cast("list[object]", value)) != 2:
        return None
    source, index = cast("list[object]", value)
    if not isinstance(source, str) or not isinstance(index, (int, float)):
        return None
    return (source, int(index)) if abs(index) <= MOST_OUTPUTS else None  # NaN is no link either
