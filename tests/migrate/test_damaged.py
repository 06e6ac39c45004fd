"""Files that are not as ComfyUI saves them: converted as far as they can be, or refused."""

from __future__ import annotations

import copy
import json
import random

import pytest
from supir_xpu.migrate import MigrateError, convert
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
