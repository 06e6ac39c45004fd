"""``run.py smoke``: its table and its exit code, with a stand-in for the server."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace

import pytest
from PIL import Image


class StandIn:
    """A server that offers nodes and restores a picture, or fails as told."""

    def __init__(self, smoke, nodes, size=(64, 64), fails=None):
        self.smoke, self.nodes, self.size, self.fails = smoke, nodes, size, fails
        self.prompt = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def get(self, path):
        assert path == "/object_info"
        return SimpleNamespace(json=lambda: dict.fromkeys([*self.nodes, "KSampler"], {}))

    def upload(self, path):
        with Image.open(path) as image:
            assert image.size == (64, 64)
        return "uploaded.png"

    def run(self, prompt, timeout):
        self.prompt = prompt
        if self.fails:
            raise self.fails
        return {"outputs": {"8": {"images": [{"filename": "a.png"}]}}}

    def view(self, ref):
        buffer = io.BytesIO()
        Image.new("RGB", self.size, "red").save(buffer, "PNG")
        return buffer.getvalue()


@pytest.fixture
def smoke(tool):
    return tool("smoke")


@pytest.fixture
def start(smoke, monkeypatch):
    """Make every start of a server give the stand-in for its folder's name, or raise its error."""
    servers = {}

    def start_server(folder, root, scratch):
        server = servers[folder.name]
        if isinstance(server, Exception):
            raise server
        return server

    monkeypatch.setattr(smoke, "start_server", start_server)
    return servers


def test_node_ids_are_read_from_the_source(smoke):
    ids = smoke.node_ids()
    assert {"SUPIR_XPU_LoadSUPIR", "SUPIR_XPU_Sample", "SUPIR_XPU_ColorFix"} <= ids
    assert all(one.startswith("SUPIR_XPU_") for one in ids)


def test_all_well(smoke, start, capsys):
    start["a"] = start["b"] = StandIn(smoke, smoke.node_ids())
    assert smoke.main(["0.1=/x/a", "0.2=/x/b"]) == 0
    table = capsys.readouterr().out.split("Smoke test")[1]
    assert table.count(" ok") == 2
    inputs = {n["class_type"]: n["inputs"] for n in start["a"].prompt.values()}
    assert inputs["LoadImage"]["image"] == "uploaded.png"
    assert inputs["SUPIR_XPU_Sample"]["steps"] == 1
    assert inputs["SUPIR_XPU_FirstStage"]["upscale_by"] == 1.0


def test_each_failure_is_told_and_the_others_still_run(smoke, start, tool, capsys):
    errors = tool("host_server")
    ids = smoke.node_ids()
    start["dead"] = errors.ServerError("it died\nwith a long log")
    start["lacks"] = StandIn(smoke, ids - {"SUPIR_XPU_Sample"})
    start["refuses"] = StandIn(smoke, ids, fails=errors.PromptError("refused", {}, 400))
    start["small"] = StandIn(smoke, ids, size=(64, 32))
    start["late"] = StandIn(smoke, ids, fails=TimeoutError("too late"))
    start["good"] = StandIn(smoke, ids)
    assert smoke.main([f"{name}=/x/{name}" for name in start]) == 1
    table = capsys.readouterr().out.split("Smoke test")[1]
    lines = [line for line in table.splitlines() if line.startswith("  ") and "result" not in line]
    rows = {line.split()[0]: line for line in lines}
    assert "it died with a long log" in rows["dead"]
    assert "Not registered: SUPIR_XPU_Sample." in rows["lacks"]
    assert "refused" in rows["refuses"]
    assert "(64, 32)" in rows["small"]
    assert "too late" in rows["late"]
    assert rows["good"].endswith("ok")


def test_nothing_to_try_is_no_success(smoke):
    assert smoke.main([]) == 1


def test_the_prompt_is_the_example_workflow(smoke):
    prompt, example = smoke.small_prompt(), json.loads(smoke.WORKFLOW.read_text(encoding="utf-8"))
    assert {i: n["class_type"] for i, n in prompt.items()} == {
        i: n["class_type"] for i, n in example.items()
    }
