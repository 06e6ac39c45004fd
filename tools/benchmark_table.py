"""Rows of a benchmark: printing them, and keeping them in docs/benchmarks.md."""

from __future__ import annotations

import datetime
import itertools
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADLINE = """\
# Benchmarks

Each section is written by `python run.py bench NAME --write` (*Full size*: `bench --full --write`), on
the machine it names.
"""


Row = dict[str, Any]
"""One line of results, by column. Rows of one benchmark may have different columns."""


def figure(what: str, value: float, unit: str) -> Row:
    """A row that holds one measured figure."""
    return {"figure": what, "value": round(value, 2), "unit": unit}


def show(title: str, rows: list[Row]) -> str:
    """The rows as aligned text."""
    blocks = [title]
    for columns, cells in _tables(rows):
        lines = [columns, *cells]
        widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
        for line in lines:
            words = (word.ljust(width) for word, width in zip(line, widths, strict=True))
            blocks.append("  " + "  ".join(words).rstrip())
    return "\n".join(blocks)


def section(title: str, text: str, rows: list[Row]) -> str:
    """The rows as a section of Markdown."""
    blocks = [f"## {title}\n", text]
    for columns, cells in _tables(rows):
        blocks += ["", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        blocks += [f"| {' | '.join(line)} |" for line in cells]
    return "\n".join(blocks) + "\n"


def _tables(rows: list[Row]) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Neighbouring rows with the same columns: (columns, cells as text)."""
    for columns, group in itertools.groupby(rows, key=lambda row: list(row)):
        yield columns, [[str(value) for value in row.values()] for row in group]


def put_section(path: Path, title: str, new: str) -> None:
    """Replace the section of that title in a Markdown file, or append it."""
    old = path.read_text(encoding="utf-8") if path.exists() else HEADLINE
    pattern = re.compile(rf"^## {re.escape(title)}\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
    if pattern.search(old):
        text = pattern.sub(lambda _: new + "\n", old).rstrip("\n") + "\n"
    else:
        text = old.rstrip("\n") + "\n\n" + new
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")


def machine() -> str:
    """This machine in one line, with the date."""
    import psutil
    import torch

    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{cpu_name()}, {os.cpu_count()} logical cores, {memory:.0f} GiB of memory, "
        f"{platform.system()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"{datetime.date.today().isoformat()}"
    )


def cpu_name() -> str:
    """The processor's name where the system tells it, else its architecture."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()
