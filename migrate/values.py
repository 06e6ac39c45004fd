"""One value of an old node after the other, moved to the new node's input, with what was noted."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .flow import Flow, Node, Source
from .new_nodes import NEW_NODES, Field
from .old_nodes import OLD_NODES
from .report import Report

Change = Callable[[Any], Any]
Translate = Callable[[Source | None], Source | None]


class Values:
    """Reads an old node's values; what is missing or unreadable takes the old default, noted.

    Attributes:
        moved: input whose value is a new node's now: (the node's id, its input).
    """

    def __init__(self, flow: Flow, node: Node, report: Report, translate: Translate) -> None:
        self.flow, self.node, self.report, self.translate = flow, node, report, translate
        self.widgets = {widget.name: widget for widget in OLD_NODES[node.kind].widgets}
        self.moved: dict[str, tuple[str, str]] = {}

    def note(self, kind: str, name: str, text: str) -> None:
        """Add a fact about one input of this node to the report."""
        self.report.add(kind, text, self.node.id, self.node.kind, name)

    def get(self, name: str) -> Any:
        """Return the constant of an input: stored, from a node that holds one, or the default."""
        widget, default = self.widgets[name], self.widgets[name].default
        source = self.flow.origin(self.node, name)
        if source is not None:
            known, value = self.flow.constant(source)
            if not known:
                return default
        elif name in self.node.values:
            value = self.node.values[name]
        else:
            return default
        value = _number(value) if widget.kind in ("int", "float") else value
        if not widget.fits(value):
            text = f"holds {value!r}, which it never could; the old default {default!r} is taken."
            self.note("to_do", name, text)
            return default
        return value

    def linked(self, name: str) -> bool:
        """Say whether an input's value comes from a node whose output is not known here."""
        source = self.flow.origin(self.node, name)
        return source is not None and not self.flow.constant(source)[0]

    def move(self, new: Node, field_name: str, name: str, change: Change | None = None) -> None:
        """Give a new node's widget the value of an old input, within the widget's bounds.

        A link stays a link, unless the value has to be changed on the way.
        """
        field = next(f for f in NEW_NODES[new.kind].widgets if f.name == field_name)
        self.moved.setdefault(name, (new.id, field_name))
        if self.linked(name):
            self._move_link(new, field, name, change is None)
            return
        value = self.get(name)
        new.values[field_name] = self.bounded(
            field, name, value if change is None else change(value)
        )

    def _move_link(self, new: Node, field: Field, name: str, same: bool) -> None:
        """Connect a new widget as the old input was, or note why that cannot be."""
        if not same:
            why = f"came over a link, and {field.name} counts differently here"
        elif self.widgets[name].kind == "int" and field.type == "FLOAT" and not self._float(name):
            why = f"came over a link of whole numbers, and {field.name} takes only FLOAT here"
            stored = _number(self.node.values.get(name))
            if self.widgets[name].fits(stored):
                new.values[field.name] = self.bounded(field, name, stored)
        else:
            source = self.translate(self.node.links[name])
            if source is not None:
                new.links[field.name] = source
                return
            why = "came over a link that cannot be followed"
        text = f"{why}: set it by hand. It is {new.values[field.name]!r} now."
        self.note("to_do", name, text)

    def _float(self, name: str) -> bool:
        """Say whether an input's link is known to bring FLOAT."""
        source = self.flow.origin(self.node, name)
        return source is not None and self.flow.type_of(source) == "FLOAT"

    def bounded(self, field: Field, name: str, value: Any) -> Any:
        """Return a value as the new widget takes it; noted when it had to be moved."""
        if field.low is None or field.high is None:
            return value
        whole = field.type == "INT"
        fitting = min(max(value, field.low), field.high)
        fitting = int(fitting) if whole else float(fitting)
        if fitting != value:
            text = f"is {value}; {field.name} goes from {field.low:g} to {field.high:g}: {fitting} set."
            self.note("means_other", name, text)
        return fitting

    def without_equal(self, *names: str, why: str) -> None:
        """Note inputs that have no equal here, where they were not left at their default."""
        for name in names:
            if name not in self.widgets or not self.given(name):
                continue
            value = "linked" if self.linked(name) else self.get(name)
            if value != self.widgets[name].default:
                self.note("no_equal", name, f"was {value!r}. {why}")

    def given(self, name: str) -> bool:
        """Say whether the old node had something of its own for this input."""
        return name in self.node.values or name in self.node.links

    def finish(self, extra: list[tuple[str, Any]]) -> None:
        """Note what was there and belonged to no input of the old node."""
        old = OLD_NODES[self.node.kind]
        for name, value in extra:
            if name == "widgets_values":
                text = f"held {value!r}, in an order not known here: set what differs from the defaults."
                self.note("to_do", name, text)
                continue
            self.note("ignored", name, f"held {value!r}, which belongs to no input of that node.")
        for name in [*self.node.values, *self.node.links]:
            if name not in old.names and name != "control_after_generate":
                value = self.node.values.get(name, "a link")
                self.note("ignored", name, f"({value!r}) is no input of that node, then or now.")


def _number(value: Any) -> Any:
    """Return what ComfyUI would read as a number; anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return value
    if isinstance(value, int):
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    if not math.isfinite(number):
        return str(value)
    return int(number) if number == int(number) and isinstance(value, str) else number
