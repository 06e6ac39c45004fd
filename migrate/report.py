"""What a conversion did, as data: one entry per fact the user should know."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

KINDS = {
    "to_do": "Connect or set by hand",
    "no_equal": "Has no equal here",
    "means_other": "Means something else here",
    "ignored": "Was not used",
    "converted": "Converted",
    "other_pack": "Left as it is",
}
"""Kinds of entries and their headings, most urgent first. The keys are stable."""


@dataclass(frozen=True)
class Entry:
    """One fact. ``node`` is the id in the new workflow, "" when it concerns all of it."""

    kind: str
    node: str
    old_type: str
    input: str
    text: str


@dataclass
class Report:
    """Every fact of one conversion.

    Attributes:
        format: ``workflow`` (saved by the front end) or ``prompt`` (API format).
        converted: old nodes that were replaced or merged.
    """

    format: str
    converted: int = 0
    entries: list[Entry] = field(default_factory=list[Entry])

    def add(self, kind: str, text: str, node: str = "", old_type: str = "", name: str = "") -> None:
        """Note a fact, once."""
        assert kind in KINDS
        entry = Entry(kind, node, old_type, name, text)
        if entry not in self.entries:
            self.entries.append(entry)

    def of(self, kind: str) -> list[Entry]:
        """Return the entries of a kind."""
        return [entry for entry in self.entries if entry.kind == kind]

    @property
    def complete(self) -> bool:
        """Whether the new workflow runs without anything connected or set by hand."""
        return not self.of("to_do")

    def text(self) -> str:
        """Return the report in words, most urgent first."""
        lines = [f"{self.converted} old node(s) converted."]
        for kind, heading in KINDS.items():
            entries = self.of(kind)
            if not entries:
                continue
            lines.append(f"{heading}:")
            for entry in entries:
                where = f"node {entry.node} ({entry.old_type})" if entry.node else ""
                where = f"{where}, {entry.input}" if where and entry.input else where or entry.input
                lines.append(f"  - {where}: {entry.text}" if where else f"  - {entry.text}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "format": self.format,
            "converted": self.converted,
            "complete": self.complete,
            "entries": [asdict(entry) for entry in self.entries],
            "text": self.text(),
        }
