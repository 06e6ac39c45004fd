"""The help page of every node: there, true to the node's inputs and outputs, and served."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.host

DOCS = Path(__file__).resolve().parents[2] / "web" / "docs"
FILES_ON_DISK = {"supir_name"}
"""Lists of files, whose entries no page can name."""


@pytest.fixture(scope="module")
def nodes(server):
    info = server.get("/object_info").json()
    return {name: node for name, node in info.items() if name.startswith("SUPIR_XPU_")}


def rows(page, heading):
    """The table below a heading: {name: description}; {} where the page says "None."."""
    section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert section, f"no section {heading}"
    return dict(re.findall(r"^\| `([^`]+)` \| (.+) \|$", section[1], re.MULTILINE))


def inputs_of(node):
    given = {**node["input"].get("required", {}), **node["input"].get("optional", {})}
    return {name: (kind, options) for name, (kind, options) in given.items()}


def number(value):
    """As a page writes it: 2 for 2.0, all digits of a seed."""
    return str(int(value)) if value == int(value) else str(value)


def pages(nodes):
    return {name: (DOCS / f"{name}.md").read_text(encoding="utf-8") for name in nodes}


def test_every_node_has_a_page_and_every_page_a_node(nodes):
    assert {path.stem for path in DOCS.glob("*.md")} == set(nodes)


def test_pages_name_exactly_the_inputs_and_outputs_of_their_nodes(nodes):
    for name, page in pages(nodes).items():
        assert set(rows(page, "Inputs")) == set(inputs_of(nodes[name])), name
        assert set(rows(page, "Outputs")) == set(nodes[name]["output_name"]), name
        for heading in ("When to use it", "Typical mistakes"):
            assert f"## {heading}\n" in page, name


def test_pages_mark_exactly_the_inputs_that_may_stay_empty(nodes):
    for name, page in pages(nodes).items():
        marked = {key for key, text in rows(page, "Inputs").items() if text.startswith("Optional")}
        assert marked == set(nodes[name]["input"].get("optional", {})), name


def test_pages_tell_ranges_defaults_and_choices_as_the_nodes_have_them(nodes):
    for name, page in pages(nodes).items():
        told = rows(page, "Inputs")
        for key, (kind, options) in inputs_of(nodes[name]).items():
            if kind in ("INT", "FLOAT"):
                numbers = set(re.findall(r"-?\d+(?:\.\d+)?", told[key]))
                wanted = [options["min"], options["max"]]
                wanted += [options["default"]] if key != "seed" else []
                for value in wanted:
                    assert number(value) in numbers, f"{name}.{key}: {value}"
            choices = kind if isinstance(kind, list) else options.get("options", [])
            for choice in () if key in FILES_ON_DISK else choices:
                assert f"`{choice}`" in told[key], f"{name}.{key}: {choice}"


def test_pages_are_served_where_the_front_end_looks_for_them(start_server_with, nodes):
    """In a folder of plain characters: ComfyUI serves nothing from one with spaces or umlauts."""
    with start_server_with(pack_name="supir-xpu") as server:
        for name in nodes:
            reply = server.get(f"/extensions/supir-xpu/docs/{name}.md")
            assert reply.status == 200, name
            assert reply.body == (DOCS / f"{name}.md").read_bytes()
        assert server.get("/extensions/supir-xpu/docs/Nothing.md").status == 404
