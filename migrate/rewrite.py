"""Replace the old nodes of one graph: loaders are taken apart, the rest is rewired to the parts.

The old pack bundles what ComfyUI keeps apart: its loader gives ``SUPIR_model`` (UNet, CLIP,
control) and ``SUPIR_VAE``. Here every node gets MODEL, CLIP, VAE and SUPIR themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .flow import BYPASSED, Flow, Node, Source
from .new_nodes import NEW_NODES
from .old_nodes import LOADERS, OLD_NODES, TITLES
from .report import Report
from .values import Values

Extra = dict[str, list[tuple[str, Any]]]
"""Stored values that belong to no input, by node id."""

OUTPUTS: dict[str, dict[int, int]] = {
    "SUPIR_first_stage": {1: 0, 2: 1},
    "SUPIR_encode": {0: 0},
    "SUPIR_conditioner": {0: 0, 1: 1},
    "SUPIR_sample": {0: 0},
    "SUPIR_decode": {0: 0},
    "SUPIR_tiles": {0: 0, 1: 1, 2: 2},
    "SUPIR_Upscale": {0: 0},
}
"""Old output: the new node's. The loaders' and first_stage's first are taken apart elsewhere."""

CENTER = 2
"""Output of our First Stage that holds what SUPIR_encode of its picture gave."""


@dataclass(frozen=True)
class Parts:
    """Where the parts of an old loader's bundles come from; None where nothing was connected."""

    model: Source | None
    clip: Source | None
    vae: Source | None
    supir: Source | None


class Rewrite:
    """One graph on its way. ``flow`` is read as it was until ``run`` puts the new nodes in.

    Attributes:
        moved: (old node id, input) whose value a new node has now: (its id, its input).
    """

    def __init__(
        self, flow: Flow, report: Report, extra: Extra, next_id: Callable[[], str]
    ) -> None:
        self.flow, self.report, self.extra, self.next_id = flow, report, extra, next_id
        self.made: dict[str, Node] = {}
        self.merged: dict[str, Source] = {}
        self.parts: dict[str, Parts] = {}
        self.checkpoints: dict[str, Node] = {}
        self.supir_files: dict[str, Node] = {}
        self.droppable: set[str] = set()
        self.read_before: set[str] = set()
        self.moved: dict[tuple[str, str], tuple[str, str]] = {}

    def run(self) -> None:
        """Replace every old node and rewire every link to one."""
        from . import chain, loaders, upscale  # the handlers use this class

        handlers = {**loaders.HANDLERS, **chain.HANDLERS, **upscale.HANDLERS}
        self.read_before = self._read()
        old = [node for node in self.flow.nodes.values() if node.kind in OLD_NODES]
        old.sort(key=lambda node: list(handlers).index(node.kind))
        for node in old:
            values = Values(self.flow, node, self.report, self.new_source)
            handlers[node.kind](self, node, values)
            values.finish(self.extra.get(node.id, []))
            self.moved.update({(node.id, name): to for name, to in values.moved.items()})
        self.report.converted += len(old)
        self._rewire({node.id for node in old})

    # Reading the old graph

    def loader(self, node: Node, name: str) -> Node | None:
        """Return the old loader a bundle comes from, or None."""
        source = self.flow.origin(node, name)
        for _ in range(len(self.flow.nodes)):
            found = None if source is None else self.flow.nodes.get(source.node)
            if found is None or source is None:
                return None
            if found.kind in LOADERS:
                return found
            if found.kind != "SUPIR_first_stage" or source.slot != 0:
                return None
            source = self.flow.origin(found, "SUPIR_VAE")
        return None

    def parts_for(self, node: Node, name: str) -> Parts:
        """Return the parts behind a bundle; noted when no old loader is at its other end."""
        loader = self.loader(node, name)
        if loader is not None and loader.id in self.parts:
            return self.parts[loader.id]
        self.report.add(
            "to_do",
            "does not come from an old loader in this graph. Connect the parts of Load Checkpoint and "
            "Load SUPIR by hand.",
            node.id,
            node.kind,
            name,
        )
        return Parts(None, None, None, None)

    def new_source(self, source: Source | None) -> Source | None:
        """Return what an output of the old graph is in the new one; None when it is gone."""
        if source is None:
            return None
        node = self.flow.nodes.get(source.node)
        if node is None or node.kind not in OLD_NODES:
            return source
        if node.kind in LOADERS:
            parts = self.parts.get(node.id)  # none yet: a loader fed by itself or a later one
            return None if parts is None else parts.supir if source.slot == 0 else parts.vae
        if node.id in self.merged:
            return self.merged[node.id]
        if node.kind == "SUPIR_first_stage" and source.slot == 0:
            loader = self.loader(node, "SUPIR_VAE")
            parts = None if loader is None else self.parts.get(loader.id)
            return None if parts is None else parts.vae
        slot = OUTPUTS[node.kind].get(source.slot)
        return None if slot is None else Source(node.id, slot)

    # Building the new one; every source given to a new node is one of the new graph

    def make(self, kind: str, near: Node, node_id: str = "", dx: float = 0, dy: float = 0) -> Node:
        """Add a new node with its defaults; without an id it is one more, beside ``near``."""
        new = NEW_NODES[kind]
        node = Node(
            node_id or self.next_id(),
            kind,
            {field.name: field.default for field in new.widgets},
            title=new.title,
            mode=near.mode,
            pos=(near.pos[0] + dx, near.pos[1] + dy),
            made=True,
        )
        self.made[node.id] = node
        return node

    def instead(self, kind: str, old: Node) -> Node:
        """Add the new node that takes an old one's place and id."""
        node = self.make(kind, old, old.id)
        node.raw = {
            k: old.raw[k] for k in ("id", "color", "bgcolor", "flags", "order") if k in old.raw
        }
        if old.title and old.title not in (old.kind, TITLES[old.kind]):
            node.title = old.title
        return node

    def connect(self, new: Node, **sources: Source | None) -> None:
        """Connect inputs of a new node; those without a source stay open."""
        new.links.update({name: s for name, s in sources.items() if s is not None})

    def require(self, new: Node, old: Node) -> None:
        """Note the sockets of a new node that nothing was found for."""
        described = NEW_NODES[new.kind]
        for slot in described.sockets:
            if slot.name not in new.links and slot.name not in described.optional:
                self.report.add(
                    "to_do",
                    f"is not connected: nothing in the old graph gives it. Connect a {slot.type}.",
                    new.id,
                    old.kind,
                    slot.name,
                )

    def checkpoint(self, name: str, near: Node, dy: float) -> Node:
        """Return the Load Checkpoint node of a file, one for each file."""
        if name not in self.checkpoints:
            node = self.make("CheckpointLoaderSimple", near, dx=-380, dy=dy)
            node.values["ckpt_name"] = name
            self.checkpoints[name] = node
        return self.shared(self.checkpoints[name], near)

    def shared(self, made: Node, user: Node) -> Node:
        """Return a made node several old ones use; it is active as soon as one of them is."""
        if user.mode == 0:
            made.mode = 0
        return made

    def need_file(self, new: Node, field_name: str, old: Node) -> None:
        """Note a file that no old node named, so that it has to be chosen."""
        if not new.values[field_name] and field_name not in new.links:
            text = "names no file, as the old node stored none: choose one."
            self.report.add("to_do", text, new.id, old.kind, field_name)

    def _rewire(self, old: set[str]) -> None:
        """Put the new nodes into the graph, and every remaining link onto them."""
        for node in self.flow.nodes.values():
            if node.id not in old:
                self._rewire_node(node)
        for leaving in self.flow.exits:
            leaving.source = self.new_source(leaving.source) or leaving.source
        order: dict[str, Node] = {}
        for node_id, node in self.flow.nodes.items():
            if node_id not in old:
                order[node_id] = node
            elif node_id in self.made:
                order[node_id] = self.made[node_id]
        order.update({i: n for i, n in self.made.items() if i not in order})
        self.flow.nodes.clear()
        self.flow.nodes.update(order)
        for node in self.made.values():
            self._drop_loose(node, old)
        for node_id in self.droppable - self._read():
            del self.flow.nodes[node_id]
        self._note_unread(self.flow.prune())

    def _read(self) -> set[str]:
        """Return the ids of the nodes that something in the graph reads."""
        read = {s.node for n in self.flow.nodes.values() for s in n.links.values()}
        return read | {leaving.source.node for leaving in self.flow.exits}

    def _drop_loose(self, node: Node, old: set[str]) -> None:
        """Take off links of a new node that end at itself or at an old node that is gone."""
        for name, source in list(node.links.items()):
            source = self.merged.get(source.node, source)
            node.links[name] = source
            gone = source.node in old and source.node not in self.flow.nodes
            if source.node == node.id or gone:
                del node.links[name]
                text = (
                    f"came from node {source.node}, in a circle: the link cannot be followed. Connect "
                    "it or set it by hand."
                )
                self.report.add("to_do", text, node.id, node.kind, name)

    def _note_unread(self, gone: list[Node]) -> None:
        """Note helper nodes that were removed, and what stays with nothing reading it."""
        kinds = [node.kind for node in gone]
        if kinds:
            counted = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
            text = f"{counted} removed: they only passed on what the new nodes get themselves."
            self.report.add("converted", text)
        for node_id in sorted(self.read_before - self._read()):
            node = self.flow.nodes.get(node_id)
            if node is None or node.made:
                continue
            if node_id in self.flow.constants:
                text = (
                    "gave its value to the new node, which holds it itself now; nothing reads this."
                )
                self.report.add("converted", text, node.id, node.kind)
            elif node_id in self.flow.passed and node.mode == BYPASSED:
                text = (
                    "was bypassed and is left out of the new chain; nothing reads it now. To use it "
                    "again, connect it by hand."
                )
                self.report.add("ignored", text, node.id, node.kind)

    def _rewire_node(self, node: Node) -> None:
        for name, source in list(node.links.items()):
            found = self.flow.nodes.get(source.node)
            if found is None or found.kind not in OLD_NODES:
                continue
            new = self.new_source(source)
            if new is None:
                del node.links[name]
                text = f"read an output of node {found.id} ({found.kind}) that is gone. Connect it by hand."
                self.report.add("to_do", text, node.id, node.kind, name)
                continue
            node.links[name] = new
