"""What the panel applies and what it is told of phases; Intel GPUs are simulated by their facts."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.host


def numbers(**phases):
    from supir_xpu.xpu.risk import PhaseNumbers

    plan = tuple(PhaseNumbers(name, 1, 0.0, moved) for name, moved in phases.items())
    return SimpleNamespace(phases=plan)


@pytest.fixture
def event():
    return importlib.import_module("supir_xpu.nodes.phase_event").phase_event


def test_a_phase_tells_its_place_and_what_is_left(event):
    plan = numbers(encode_control=1.0, decode_stage1=2.0, encode_center=1.0, sample=5.0, decode=1.0)
    first = event("Upscale", plan, 100.0, "encode_control", [])
    assert (first["index"], first["count"], first["bar"]) == (0, 5, [0, 3])
    assert (first["planned_s"], first["remaining_s"]) == (10.0, 100.0)
    ended = ["encode_control", "decode_stage1", "encode_center"]
    sample = event("Upscale", plan, 100.0, "sample", ended)
    assert (sample["index"], sample["bar"]) == (3, [0, 1])
    assert (sample["planned_s"], sample["remaining_s"]) == (50.0, 60.0)
    assert (sample["node"], sample["phase"], sample["state"]) == ("Upscale", "sample", "start")


def test_a_phase_alone_has_the_bar_for_itself_and_an_unknown_one_no_prediction(event):
    assert event("Encode", numbers(encode_control=3.0), 7.0, "encode_control", [])["bar"] == [0, 1]
    strange = event("Sample", numbers(sample=3.0), 7.0, "other", ["sample"])
    assert (strange["index"], strange["count"]) == (1, 2)
    assert (strange["planned_s"], strange["remaining_s"]) == (0.0, 0.0)
    still = event("Sample", numbers(sample=0.0), 7.0, "sample", [])
    assert still["planned_s"] == 7.0, "without bytes, launches share out the time"


class Judge:
    """Judges a graph of one node by a function of its inputs."""

    def __init__(self, verdict):
        self.verdict = verdict
        self.graphs = []

    def __call__(self, graph, outputs, device, *, plans=None):
        self.graphs.append(graph)
        return judgement(graph, *self.verdict(graph.inputs("5")))


def judgement(graph, severity, changes=(), tile_px=0):
    from supir_xpu.nodes.graph_judging import GraphJudgement, NodeJudgement

    mode = graph.inputs("5")["risk"]
    result = SimpleNamespace(
        verdict=SimpleNamespace(severity=severity),
        changes=changes,
        settings=SimpleNamespace(tile_px=tile_px),
    )
    refuses = severity == "block" and mode in ("auto", "block")
    node = NodeJudgement("5", "SUPIR_XPU_Sample", SimpleNamespace(result=result), refuses=refuses)
    return GraphJudgement([node])


@pytest.fixture
def plan(monkeypatch):
    module = importlib.import_module("supir_xpu.nodes.safe_plan")
    graph_type = importlib.import_module("supir_xpu.nodes.graph").Graph

    def run(verdict, suggestion=(), **inputs):
        judge = Judge(verdict)
        monkeypatch.setattr(module, "judge_graph", judge)
        monkeypatch.setattr(module, "suggest", lambda *_: list(suggestion))
        values = {"risk": "auto", "steps": 50, "tile_px": 0, "tile_overlap_px": 256, **inputs}
        graph = graph_type({"5": {"class_type": "SUPIR_XPU_Sample", "inputs": values}})
        found = judge(graph, ["9"], None)
        changes = module.safe_plan(graph, ["9"], None, found)
        assert graph.inputs("5") == values, "the graph itself is not altered"
        return [(c.node_id, c.input_name, c.value) for c in changes]

    return run


def fewer(value):
    from supir_xpu.nodes.graph_judging import Change

    return [Change("5", "steps", value)]


def by_steps(inputs):
    return ("block" if inputs["steps"] > 30 else "ok",)


def test_nothing_is_changed_where_nothing_is_wrong(plan):
    assert plan(by_steps, steps=20) == []
    assert plan(lambda _: ("warn",)) == []


def test_a_refused_run_gets_the_guards_suggestion(plan):
    assert plan(by_steps, fewer(25)) == [("5", "steps", 25)]
    assert plan(by_steps) == [], "without a suggestion there is no safe plan"


@pytest.mark.parametrize("risk", ["warn", "off"])
def test_a_careless_run_is_set_to_auto_first(plan, risk):
    assert plan(by_steps, fewer(25), risk=risk) == [("5", "risk", "auto"), ("5", "steps", 25)]
    assert plan(by_steps, risk=risk) == [], "auto alone would be refused"
    assert plan(by_steps, risk=risk, steps=20) == []


def tiled(inputs):
    if inputs["risk"] == "auto":
        return "warn", ("tile_px: untiled -> 768 px, sampling in 9 tiles",), 768
    return ("block",)


def test_tiles_that_auto_chose_become_the_nodes_own(plan):
    tiles = [("5", "tile_px", 768), ("5", "tile_overlap_px", 192)]
    assert plan(tiled) == tiles
    assert plan(tiled, risk="off") == [("5", "risk", "auto"), *tiles]
    assert plan(tiled, tile_overlap_px=192) == tiles[:1]
    assert plan(lambda _: ("ok", ("tile_px: 512 px -> untiled",), 0), tile_px=512) == [
        ("5", "tile_px", -1)
    ]


def test_connected_inputs_stay_as_they_are(plan):
    assert plan(tiled, tile_px=["7", 0]) == [("5", "tile_overlap_px", 192)]
