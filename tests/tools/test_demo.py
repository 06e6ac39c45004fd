"""The demo: its workflow in both formats, its sheet, and that its exit code says the truth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

pytestmark = pytest.mark.host
WORKFLOWS = Path(__file__).resolve().parents[2] / "example_workflows"


@pytest.fixture
def demo(tool, tmp_path, monkeypatch):
    demo = tool("demo")
    monkeypatch.setenv("COMFYUI_ROOT", str(tmp_path))
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    monkeypatch.setattr(demo, "OUTPUT", tmp_path / "output")
    for name in ("RESTORED", "SHEET", "LOG"):
        path = getattr(demo, name)
        monkeypatch.setattr(demo, name, tmp_path / "output" / path.name)
    return demo


class FakeServer:
    """A server that answers every prompt with one picture."""

    def __init__(self, picture):
        self.picture = picture

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.fixture
def play(demo, monkeypatch, tmp_path):
    """Run the demo's main over a picture of some size, or an error."""

    def play(size=None, error=None):
        def restore(server, prompt):
            if error:
                raise error
            Image.linear_gradient("L").resize(size).save(tmp_path / "p.png")
            timeline = demo.Timeline()
            for second, node in enumerate(prompt):
                timeline.hear("executing", {"node": node}, second)
            entry = {"outputs": {"3": {"text": ["plan: two tiles"]}}}
            return (tmp_path / "p.png").read_bytes(), entry, timeline

        def start_server(comfyui, root, scratch):
            Path(scratch).mkdir(parents=True)
            (Path(scratch) / "server.log").write_text("the log", encoding="utf-8")
            return FakeServer(None)

        monkeypatch.setattr(demo, "restore", restore)
        monkeypatch.setattr(demo, "start_server", start_server)
        return demo.main()

    return play


def wanted_size(demo):
    prompt = json.loads(demo.WORKFLOW.read_text(encoding="utf-8"))
    with Image.open(demo.PHOTO) as photo:
        return demo.expected_size(
            photo.size, demo.find_node(prompt, "SUPIR_XPU_FirstStage")[1]["upscale_by"]
        )


def test_success_writes_both_pictures_and_tells_all(demo, play, capsys):
    width, height = wanted_size(demo)
    assert play((width, height)) == 0
    with Image.open(demo.RESTORED) as restored, Image.open(demo.SHEET) as sheet:
        assert restored.size == (width, height)
        assert sheet.width > 2 * width
        assert sheet.height > height
    assert demo.LOG.read_text(encoding="utf-8") == "the log"
    said = capsys.readouterr().out
    for part in (str(demo.RESTORED), str(demo.SHEET), "CPU", "Arc", "random weights", "two tiles"):
        assert part in said
    assert "no restoration" in said
    assert said.isascii()


def test_wrong_size_is_a_failure(demo, play, capsys):
    width, height = wanted_size(demo)
    assert play((width + 1, height)) == 1
    assert f"({width + 1}, {height})" in capsys.readouterr().err


def test_failed_prompt_is_a_failure_and_leaves_no_old_picture(demo, play, capsys):
    assert play(wanted_size(demo)) == 0
    assert play(error=demo.PromptError("node 5 failed", {})) == 1
    assert not demo.RESTORED.exists()
    assert not demo.SHEET.exists()
    assert "node 5 failed" in capsys.readouterr().err


def test_scratch_is_deleted(demo, play, tmp_path):
    play(error=demo.ServerError("no"))
    assert list((tmp_path / ".cache").iterdir()) == []


def test_both_pictures_are_in_the_sheet(demo):
    photo, restored = Image.new("RGB", (30, 20), "red"), Image.new("RGB", (60, 40), "blue")
    colours = {colour for _, colour in demo.make_sheet(photo, restored).getcolors(1 << 20)}
    assert {(255, 0, 0), (0, 0, 255)} <= colours


def test_a_workflow_with_two_savers_is_refused(demo):
    prompt = {i: {"class_type": "SaveImage", "inputs": {}} for i in "12"}
    with pytest.raises(demo.DemoError, match="2 nodes"):
        demo.find_node(prompt, "SaveImage")


def schema_inputs(class_type: str) -> list[tuple[str, bool, list]]:
    """(name, is it a widget, extra widget values after it) in the order of the front end."""
    from supir_xpu.nodes import NODES

    import nodes as host_nodes

    own = {node.define_schema().node_id: node for node in NODES}
    kinds = own.get(class_type) or host_nodes.NODE_CLASS_MAPPINGS[class_type]
    spec = kinds.INPUT_TYPES()
    found = []
    for name, (kind, *options) in {**spec["required"], **spec.get("optional", {})}.items():
        options = options[0] if options else {}
        widget = isinstance(kind, list) or kind in ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
        widget = widget and not options.get("forceInput")
        extra = ["control"] if options.get("control_after_generate") else []
        extra += ["upload"] if options.get("image_upload") else []
        found.append((name, widget, extra))
    return found


def to_api(workflow: dict) -> dict:
    """What the front end makes of a workflow file: an API prompt."""
    links = {link[0]: [str(link[1]), link[2]] for link in workflow["links"]}
    prompt = {}
    for node in workflow["nodes"]:
        if node["type"] == "MarkdownNote":
            continue
        values, inputs = list(node["widgets_values"]), {}
        for name, is_widget, extra in schema_inputs(node["type"]):
            if is_widget:
                inputs[name] = values.pop(0)
                del values[: len(extra)]
        assert values == [], f"{node['type']} has {len(values)} widget values too many"
        inputs |= {i["name"]: links[i["link"]] for i in node["inputs"] if i["link"] is not None}
        meta = {"title": node["title"]}
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs, "_meta": meta}
    return prompt


def test_both_formats_of_the_workflow_are_the_same():
    workflow = json.loads((WORKFLOWS / "demo_restore.json").read_text(encoding="utf-8"))
    twin = json.loads((WORKFLOWS / "api" / "demo_restore.json").read_text(encoding="utf-8"))
    assert to_api(workflow) == twin


def test_the_workflow_file_is_consistent():
    workflow = json.loads((WORKFLOWS / "demo_restore.json").read_text(encoding="utf-8"))
    nodes = {node["id"]: node for node in workflow["nodes"]}
    assert workflow["last_node_id"] == max(nodes)
    assert workflow["last_link_id"] == max(link[0] for link in workflow["links"])
    for number, source, out_slot, target, in_slot, kind in workflow["links"]:
        output, given = nodes[source]["outputs"][out_slot], nodes[target]["inputs"][in_slot]
        assert number in output["links"]
        assert given["link"] == number
        assert output["type"] == given["type"] == kind
    used = [n for node in nodes.values() for out in node["outputs"] for n in out["links"]]
    assert sorted(used) == sorted(link[0] for link in workflow["links"])


def test_timeline_takes_nodes_apart(tool):
    timeline = tool("host_events").Timeline()
    for kind, data, now in (
        ("executing", {"node": "1"}, 1.0),
        ("executing", {"node": "2"}, 3.0),
        ("progress", {"node": "2", "value": 1, "max": 2}, 4.0),
        ("progress", {"node": "2", "value": 2, "max": 2}, 6.5),
        ("executing", {"node": None}, 7.0),
        ("execution_success", {}, 7.0),
    ):
        timeline.hear(kind, data, now)
    assert timeline.seconds_per_node() == {"1": 2.0, "2": 4.0}
    assert timeline.seconds_per_step("2") == [1.0, 2.5]
