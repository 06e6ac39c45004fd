"""What a subgraph keeps outside its nodes: shown widgets, the ends of its links, counters."""

from __future__ import annotations

from supir_xpu.migrate import convert
from supir_xpu.tests import old_workflows as old

KEYS = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")


def in_subgraph(inner, shown, stored=None):
    """A workflow whose one node is a subgraph: its picture comes in, its result goes out."""
    links = [dict(zip(KEYS, link, strict=True)) for link in inner["links"]]
    stage, decode = (
        next(n for n in inner["nodes"] if n["type"] == kind)
        for kind in ("SUPIR_first_stage", "SUPIR_decode")
    )
    for link in links:
        if link["target_id"] == stage["id"] and link["type"] == "IMAGE":
            link.update(origin_id=-10, origin_slot=0)
            coming = link["id"]
    leaving = dict(zip(KEYS, (99, decode["id"], 0, -20, 0, "IMAGE"), strict=True))
    graph = {
        "id": "u-1",
        "nodes": inner["nodes"],
        "links": [*links, leaving],
        "inputs": [{"name": "image", "type": "IMAGE", "linkIds": [coming]}],
        "outputs": [{"name": "image", "type": "IMAGE", "linkIds": [99]}],
        "inputNode": {"id": -10},
        "outputNode": {"id": -20},
        "state": {"lastNodeId": 30, "lastLinkId": 99},
    }
    host = {"id": 1, "type": "u-1", "inputs": [], "outputs": []}
    host["properties"] = {"proxyWidgets": shown}
    host["widgets_values"] = stored or []
    return {"nodes": [host], "links": [], "last_node_id": 1, "last_link_id": 0, "version": 0.4,
            "definitions": {"subgraphs": [graph]}}  # fmt: skip


def sampler_id(inner):
    return next(str(n["id"]) for n in inner["nodes"] if n["type"] == "SUPIR_sample")


def test_widgets_shown_on_the_subgraphs_node_have_their_new_names():
    inner = old.structure_c()
    run = sampler_id(inner)
    shown = [[run, "control_scale_end"], [run, "keep_model_loaded"], [run, "seed"]]
    shown += [[run, "control_after_generate"], ["1", "image"], ["-1", "x"], [run, "sampler"]]
    stored = [1.0, True, 9, "fixed", "a.png", 0, "RestoreDPMPP2MSampler"]
    result = convert(in_subgraph(inner, shown, stored))
    (host,) = result.workflow["nodes"]
    assert host["properties"]["proxyWidgets"] == [
        *([run, "control_end"], [run, "seed"], [run, "control_after_generate"]),
        *(["1", "image"], ["-1", "x"], [run, "sampler"]),
    ]
    assert host["widgets_values"] == [1.0, 9, "fixed", "a.png", 0, "restore_dpmpp_2m"]
    (gone,) = [e for e in result.report.of("no_equal") if "subgraph" in e.text]
    assert (gone.node, gone.old_type, gone.input) == ("1", "SUPIR_sample", "keep_model_loaded")


def test_the_ends_of_a_subgraph_name_the_links_it_has_now():
    result = convert(in_subgraph(old.structure_a(), []))
    (graph,) = result.workflow["definitions"]["subgraphs"]
    for side, end, number in (("inputs", "origin_id", -10), ("outputs", "target_id", -20)):
        held = [link["id"] for link in graph["links"] if link[end] == number]
        assert graph[side][0]["linkIds"] == held
        assert len(held) == 1


def test_a_node_made_inside_a_subgraph_raises_the_roots_counter():
    result = convert(in_subgraph(old.structure_b(), []))
    (graph,) = result.workflow["definitions"]["subgraphs"]
    largest = max(node["id"] for node in graph["nodes"])
    assert result.workflow["last_node_id"] == largest > 1
