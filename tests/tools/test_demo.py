"""The demo: its workflow in both formats, its figures, its sheet, and the truth of its exit code."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
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
    for name in ("DEGRADED", "RESTORED", "SHEET", "LOG"):
        path = getattr(demo, name)
        monkeypatch.setattr(demo, name, tmp_path / "output" / path.name)
    return demo


def png(picture):
    packed = io.BytesIO()
    Image.fromarray(picture).save(packed, "PNG")
    return packed.getvalue()


class FakeServer:
    """A server that answers every prompt with its pictures, by the node that saves them."""

    def __init__(self, pictures, error):
        self.pictures, self.error = pictures, error
        self.base, self.uploaded, self.asked = "http://127.0.0.1:1", None, None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def upload(self, path):
        self.uploaded = Path(path)
        return "uploaded.png"

    def run(self, prompt, timeout, client_id):
        self.asked = prompt
        if self.error:
            raise self.error
        outputs = {node: {"images": [node] * count} for node, (count, _) in self.pictures.items()}
        return {"outputs": {**outputs, "3": {"text": ["plan: two tiles"]}}}

    def view(self, node):
        return self.pictures[node][1]


class FakeListener:
    """Hears every node take a second."""

    def __init__(self, server):
        self.server, self.client_id = server, "me"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    @property
    def timeline(self):
        timeline = sys.modules["host_events"].Timeline()
        for second, node in enumerate(self.server.asked):
            timeline.hear("executing", {"node": node}, second)
        timeline.hear("execution_success", {}, second + 1)
        return timeline


@pytest.fixture
def play(demo, monkeypatch):
    """Run the demo's main with a server that saves some pictures, or fails."""

    def play(restored=None, error=None, saved=1):
        original, _ = demo.make_pictures()
        restored = original if restored is None else restored
        saver, _ = demo.find_node(demo.read_prompt(), "SaveImage")
        pictures = {saver: (saved, png(restored)), demo.FIRST_STAGE: (1, png(original // 4))}
        server = FakeServer(pictures, error)

        def start_server(comfyui, root, scratch):
            Path(scratch).mkdir(parents=True)
            (Path(scratch) / "server.log").write_text("the log", encoding="utf-8")
            return server

        monkeypatch.setattr(demo, "Listener", FakeListener)
        monkeypatch.setattr(demo, "start_server", start_server)
        play.server = server
        return demo.main()

    return play


def test_success_writes_the_pictures_and_tells_all(demo, play, capsys):
    original, degraded = demo.make_pictures()
    height, width = original.shape[:2]
    assert play() == 0
    with Image.open(demo.RESTORED) as restored, Image.open(demo.SHEET) as sheet:
        assert restored.size == (width, height)
        assert sheet.width > 3 * width
        assert sheet.height > height
    assert demo.LOG.read_text(encoding="utf-8") == "the log"
    said = capsys.readouterr().out
    for part in (str(demo.RESTORED), str(demo.SHEET), "CPU", "Arc", "toy", "two tiles"):
        assert part in said
    assert "not SUPIR's quality" in said
    assert said.isascii()


def test_the_damaged_picture_is_what_is_sent(demo, play):
    assert play() == 0
    server, (_, degraded) = play.server, demo.make_pictures()
    assert server.uploaded == demo.DEGRADED
    with Image.open(demo.DEGRADED) as sent:
        assert np.array_equal(np.asarray(sent), degraded)
    assert demo.find_node(server.asked, "LoadImage")[1]["image"] == "uploaded.png"
    first, _ = demo.find_node(server.asked, "SUPIR_XPU_FirstStage")
    assert server.asked[demo.FIRST_STAGE]["inputs"]["images"] == [first, 0]


def test_damage_is_strong_and_the_same_every_time(demo, tool):
    original, degraded = demo.make_pictures()
    assert np.array_equal(degraded, demo.make_pictures()[1])
    assert degraded.shape == original.shape
    assert 15.0 < tool("demo_metrics").psnr(degraded, original) < 25.0


def test_figures_are_those_of_the_pictures(demo, play, capsys):
    assert play() == 0
    lines = capsys.readouterr().out.splitlines()
    figures = {
        name: next(line for line in lines if line.startswith(name)).split()[-4:]
        for name in ("degraded", "best plain filter", "first stage", "restored")
    }
    assert figures["restored"][2:] == ["1.000", "0.000"]  # the original itself came back
    psnr = {name: float(numbers[0]) for name, numbers in figures.items()}
    assert psnr["first stage"] < 12.0 < psnr["degraded"] < psnr["best plain filter"]
    assert psnr["restored"] > 90.0


def test_wrong_size_is_a_failure(demo, play, capsys):
    original, _ = demo.make_pictures()
    height, width = original.shape[:2]
    assert play(original[:, :-1]) == 1
    assert f"({width - 1}, {height})" in capsys.readouterr().err


def test_two_saved_pictures_are_a_failure(play, capsys):
    assert play(saved=2) == 1
    assert "saved 2 pictures" in capsys.readouterr().err


def test_failed_prompt_is_a_failure_and_leaves_no_old_picture(demo, play, capsys):
    assert play() == 0
    assert play(error=demo.PromptError("node 5 failed", {})) == 1
    assert not demo.RESTORED.exists()
    assert not demo.SHEET.exists()
    assert "node 5 failed" in capsys.readouterr().err


def test_scratch_is_deleted(demo, play, tmp_path):
    play(error=demo.ServerError("no"))
    assert list((tmp_path / ".cache").iterdir()) == []


def test_all_pictures_are_in_the_sheet(demo):
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    pictures = {str(c): np.full((20, 30, 3), c, np.uint8) for c in colours}
    shown = {colour for _, colour in demo.make_sheet(pictures).getcolors(1 << 20)}
    assert set(colours) <= shown


def test_a_workflow_that_enlarges_is_refused(demo, monkeypatch, tmp_path):
    prompt = json.loads(demo.WORKFLOW.read_text(encoding="utf-8"))
    demo.find_node(prompt, "SUPIR_XPU_FirstStage")[1]["upscale_by"] = 2.0
    monkeypatch.setattr(demo, "WORKFLOW", tmp_path / "w.json")
    demo.WORKFLOW.write_text(json.dumps(prompt), encoding="utf-8")
    with pytest.raises(demo.DemoError, match=r"upscale_by 2\.0"):
        demo.read_prompt()


def test_settings_of_the_workflow_bring_no_advice(demo):
    from supir_xpu.supir.presets import hint

    _, asked = demo.find_node(demo.read_prompt(), "SUPIR_XPU_Sample")
    assert hint(asked["steps"], asked["sampler"], max(asked["cfg_start"], asked["cfg_end"])) is None


class TestMetrics:
    """The figures of the demo, on pictures whose figures are known."""

    @pytest.fixture
    def metrics(self, tool):
        return tool("demo_metrics")

    @pytest.fixture
    def picture(self):
        rng = np.random.default_rng(1)
        return np.kron(rng.integers(40, 210, (12, 12, 3)), np.ones((8, 8, 1))).astype(np.uint8)

    def test_equal_pictures(self, metrics, picture):
        assert metrics.psnr(picture, picture) > 100.0
        assert metrics.ssim(picture, picture) == pytest.approx(1.0)
        assert metrics.gmsd(picture, picture) == 0.0
        assert metrics.colour_error(picture, picture) == 0.0

    def test_an_offset_of_ten(self, metrics, picture):
        assert metrics.psnr(picture + 10, picture) == pytest.approx(28.13, abs=0.01)  # 20 log 25.5
        assert metrics.colour_error(picture + 10, picture) == pytest.approx(10.0)
        assert metrics.gmsd(picture + 10, picture) == pytest.approx(0.0, abs=1e-9)
        assert 0.9 < metrics.ssim(picture + 10, picture) < 1.0

    def test_worse_is_worse(self, metrics, picture):
        rng = np.random.default_rng(2)
        noise = rng.normal(0.0, 1.0, picture.shape)
        noisy = [np.clip(picture + noise * s, 0, 255).astype(np.uint8) for s in (5, 15, 40)]
        for rule, sign in ((metrics.psnr, -1), (metrics.ssim, -1), (metrics.gmsd, 1)):
            found = [sign * rule(one, picture) for one in noisy]
            assert found == sorted(found)
            assert found[0] < found[2]

    def test_blur_keeps_the_mean_and_its_width_is_sigma(self, metrics):
        point = np.zeros((41, 41))
        point[20, 20] = 1.0
        blurred = metrics.smooth(point, 1.5)
        x = np.arange(41) - 20.0
        assert blurred.sum() == pytest.approx(1.0)
        assert (blurred.sum(0) * x**2).sum() == pytest.approx(1.5**2, rel=0.01)


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
