"""A graph in either of ComfyUI's formats as the same data: nodes, constants, links.

Follows links through what only passes them on. Knows nothing about SUPIR.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

REROUTES = frozenset({"Reroute", "Reroute (rgthree)"})
SETTERS = frozenset({"SetNode"})
GETTERS = frozenset({"GetNode"})
FRONT_END_CONSTANT = "PrimitiveNode"
PASSING = REROUTES | SETTERS | GETTERS | {FRONT_END_CONSTANT}
"""Nodes of the front end (and of two widespread packs) that only pass on what they get."""

BYPASSED = 4
"""Mode of a node the front end routes around: an output gives the first input of its type."""


def whole(value: object, default: int = 0) -> int:
    """Return a number from a file as a whole one; the default for anything that is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return default
    return int(value)


@dataclass(frozen=True)
class Source:
    """One output of one node. Node ids are text here, as in API prompts."""

    node: str
    slot: int


@dataclass
class Node:
    """One node.

    Attributes:
        values: constants by input name; of foreign nodes in saved workflows, which do not name
            them, only ``raw["widgets_values"]`` is known.
        links: what each connected input reads.
        slots: saved workflows: position of each input among the node's inputs.
        raw: the node as it was read.
        made: whether the conversion made it, so that it is written from its values.
    """

    id: str
    kind: str
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    links: dict[str, Source] = field(default_factory=dict[str, Source])
    slots: dict[str, int] = field(default_factory=dict[str, int])
    raw: dict[str, Any] = field(default_factory=dict[str, Any])
    title: str = ""
    mode: int = 0
    pos: tuple[float, float] = (0.0, 0.0)
    made: bool = False

    @property
    def widgets(self) -> Any:
        """Return the stored widget values of a saved node, a list or an object."""
        return self.raw.get("widgets_values")


@dataclass
class Exit:
    """A link of a subgraph to the outside: what it reads, and the link as it was read."""

    source: Source
    raw: dict[str, Any]


@dataclass
class Flow:
    """A graph. ``passed`` collects the passing nodes that links were followed through.

    ``constants`` collects the nodes whose constant was taken.
    """

    nodes: dict[str, Node]
    exits: list[Exit] = field(default_factory=list[Exit])
    passed: set[str] = field(default_factory=set[str])
    constants: set[str] = field(default_factory=set[str])

    def follow(self, source: Source) -> Source:
        """Return where a link really comes from, through nodes that only pass it on."""
        seen: set[str] = set()
        while source.node not in seen:
            seen.add(source.node)
            node = self.nodes.get(source.node)
            before = None if node is None else self._behind(node, source.slot)
            if node is None or before is None:
                return source
            self.passed.add(node.id)
            source = before
        return source

    def origin(self, node: Node, name: str) -> Source | None:
        """Return where an input's link really comes from, or None when it has none."""
        source = node.links.get(name)
        return None if source is None else self.follow(source)

    def constant(self, source: Source) -> tuple[bool, Any]:
        """Return (known, value) of what a link brings, for nodes that hold one constant."""
        node = self.nodes.get(source.node)
        if node is None or not node.kind.startswith("Primitive"):
            return False, None
        if "value" in node.values:
            self.constants.add(node.id)
            return True, node.values["value"]
        stored = node.widgets
        if isinstance(stored, list) and stored:
            self.constants.add(node.id)
            if node.kind == FRONT_END_CONSTANT:
                self.passed.add(node.id)
            return True, stored[0]
        return False, None

    def type_of(self, source: Source) -> str | None:
        """Return the stored type of an output, or None where it is not known (API prompts)."""
        node = self.nodes.get(source.node)
        outputs: Any = None if node is None else node.raw.get("outputs")
        if not isinstance(outputs, list) or source.slot >= len(outputs):
            return None
        kind = outputs[source.slot].get("type")
        return kind if isinstance(kind, str) else None

    def prune(self) -> list[Node]:
        """Remove the passing nodes that were followed and that nothing reads now; return them."""
        gone: list[Node] = []
        while True:
            read = {s.node for n in self.nodes.values() for s in n.links.values()}
            read |= {leaving.source.node for leaving in self.exits}
            names = {_name(n) for n in self.nodes.values() if n.kind in GETTERS}
            idle = [
                node.id
                for node in self.nodes.values()
                if node.id in self.passed
                and node.kind in PASSING
                and node.id not in read
                and not (node.kind in SETTERS and _name(node) in names)
            ]
            if not idle:
                return gone
            gone += [self.nodes.pop(node_id) for node_id in idle]

    def _behind(self, node: Node, slot: int) -> Source | None:
        if node.kind in REROUTES or node.kind in SETTERS:
            return next(iter(node.links.values()), None)
        if node.kind in GETTERS:
            for setter in self.nodes.values():
                if setter.kind in SETTERS and _name(setter) == _name(node) and setter.links:
                    self.passed.add(setter.id)
                    return next(iter(setter.links.values()))
            return None
        if node.mode == BYPASSED:
            return _bypass(node, slot)
        return None


def _name(node: Node) -> str:
    """Return the name under which a Set or Get node keeps its value."""
    stored = node.widgets
    return str(stored[0]) if isinstance(stored, list) and stored else ""


def _bypass(node: Node, slot: int) -> Source | None:
    """Return what a bypassed node's output gives: its first connected input of that type."""
    outputs, inputs = node.raw.get("outputs") or [], node.raw.get("inputs") or []
    try:
        kind = outputs[slot]["type"]
        for name, place in node.slots.items():
            if name in node.links and inputs[place].get("type") == kind:
                return node.links[name]
    except (LookupError, TypeError, AttributeError):  # not stored as the front end stores it
        return None
    return None
