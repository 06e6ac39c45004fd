"""Files that are not as ComfyUI saves them: converted as far as they can be, or refused."""

from __future__ import annotations

import copy
import json
import random

import pytest
from supir_xpu.migrate import MigrateError, convert
from supir_xpu.migrate.old_nodes import OLD_NODES
from supir_xpu.migrate.report import KINDS
from supir_xpu.tests import old_workflows as old


@pytest.mark.parametrize("drop", ["inputs", "outputs", "widgets_values", "pos", "properties"])
def test_saved_nodes_that_lack_a_part_convert_as_far_as_they_can(drop):
    flow = old.structure_a()
    for node in flow["nodes"]:
        node.pop(drop)
    result = convert(flow)
    assert result.report.converted == 6
    json.dumps(result.workflow)
    assert set(KINDS) >= {e.kind for e in result.report.entries}


@pytest.mark.parametrize("loop", ["Reroute", "SetNode"])
def test_cycles_end(loop):
    flow = old.structure_a()
    (node,) = [n for n in flow["nodes"] if n["type"] == loop]
    for link in flow["links"]:
        if link[3] == node["id"]:
            link[1:3] = [node["id"], 0]
    assert convert(flow).report.of("to_do")


ODD = [None, "", [], {}, 0, -1, 2**70, 1.5, float("inf"), float("nan"), True, "x", [None], {"a": 1}]


def places(data, path=()):
    """Every position in nested lists and objects."""
    pairs = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in pairs:
        yield (*path, key)
        if isinstance(value, (dict, list)):
            yield from places(value, (*path, key))


@pytest.mark.parametrize("seed", range(5))
def test_damaged_files_are_converted_or_refused_never_a_crash(seed):
    rng, converted = random.Random(seed), 0
    makers = (old.structure_a, old.structure_b, old.structure_c, old.structure_d, old.structure_e)
    for _ in range(60):
        data = makers[seed]()
        if "extra" in data:
            data["extra"]["linkExtensions"] = [{"id": 1, "parentId": 2}, {"id": 999}]
        for _ in range(rng.choice([1, 2, 5])):
            *path, last = rng.choice(list(places(data)))
            target = data
            for key in path:
                target = target[key]
            if rng.random() < 0.25:
                del target[last]
            else:
                target[last] = copy.deepcopy(rng.choice(ODD))
        try:
            result = convert(data)
        except MigrateError:
            continue
        converted += 1
        json.dumps([result.workflow, result.report.as_dict()])
    assert converted > 20


@pytest.mark.parametrize("kind", sorted(old.OLD_OUTPUTS))
def test_an_old_node_that_reads_itself_is_named(kind):
    """Every input of every old node, linked or not, reads the node's own first output."""
    for name in sorted(OLD_NODES[kind].names):
        prompt = {"a": {"class_type": kind, "inputs": {name: ["a", 0]}}}
        result = convert(prompt)
        assert not result.report.complete, name
        assert ["a", 0] not in result.workflow["a"]["inputs"].values(), name


@pytest.mark.parametrize("slot", [0, 1])
def test_a_saved_loader_in_a_circle_is_named(slot):
    flow = old.structure_a()
    loader = next(n for n in flow["nodes"] if n["type"] == "SUPIR_model_loader_v2")
    for link in flow["links"]:
        if link[3] == loader["id"]:
            link[1:3] = [loader["id"], slot]
    result = convert(flow)
    assert {e.input for e in result.report.of("to_do")} >= {"model", "clip", "vae"}
    there = {n["id"] for n in result.workflow["nodes"]}
    assert {end for link in result.workflow["links"] for end in (link[1], link[3])} <= there


@pytest.mark.parametrize("seed", range(4))
def test_links_between_any_old_nodes_convert_and_end_at_other_nodes_that_exist(seed):
    rng = random.Random(seed)
    for _ in range(60):
        prompt = rng.choice([old.structure_d, old.structure_e])()
        olds = [node_id for node_id, node in prompt.items() if node["class_type"] in OLD_NODES]
        for _ in range(rng.choice([1, 3, 9])):
            node = prompt[rng.choice(olds)]
            name = rng.choice(sorted(OLD_NODES[node["class_type"]].names))
            node["inputs"][name] = [rng.choice(olds), rng.choice([0, 1, 2])]
        new = convert(prompt).workflow
        for node_id, node in new.items():
            read = {v[0] for v in node["inputs"].values() if isinstance(v, list)}
            assert read <= set(new) - {node_id}, prompt


def test_values_json_cannot_hold_become_null_and_are_named():
    prompt = old.structure_e(cfg_scale_end=float("inf"))
    prompt["8"]["inputs"]["quality"] = [float("nan"), {"a": float("-inf")}]
    result = convert(prompt)
    json.dumps(result.workflow, allow_nan=False)
    assert result.workflow["8"]["inputs"]["quality"] == [None, {"a": None}]
    (told,) = [e for e in result.report.of("to_do") if "NaN" in e.text]
    assert "3 value(s)" in told.text
    assert "8.inputs.quality.1.a" in told.text


def test_two_nodes_of_one_id_are_refused_by_name():
    flow = old.structure_a()
    flow["nodes"][3]["id"] = flow["nodes"][2]["id"]
    with pytest.raises(MigrateError, match="CheckpointLoaderSimple and SUPIR_model_loader_v2") as e:
        convert(flow)
    assert e.value.code == "duplicate_ids"
