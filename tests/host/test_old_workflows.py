"""Old SUPIR workflows at the real server: converted ones run, old prompts run, packs coexist."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from PIL import Image
from supir_xpu.migrate import convert
from supir_xpu.migrate.new_nodes import NEW_NODES
from supir_xpu.tests import archive
from supir_xpu.tests import old_workflows as old
from supir_xpu.tests.host.ui_graph import to_prompt, widgets_of, with_demo_model

pytestmark = pytest.mark.host


@pytest.fixture(scope="module")
def info(server):
    return server.get("/object_info").json()


def finish(server, prompt, picture, **changed):
    """Run a converted prompt on the demo model; return the saved picture."""
    prompt = with_demo_model(prompt)
    for node in prompt.values():
        if node["class_type"] == "LoadImage":
            node["inputs"]["image"] = picture
        node["inputs"].update({k: v for k, v in changed.items() if k in node["inputs"]})
    entry = server.run(prompt, timeout=300)
    (save,) = [i for i, node in prompt.items() if node["class_type"] == "SaveImage"]
    (image,) = entry["outputs"][save]["images"]
    return Image.open(io.BytesIO(server.view(image)))


@pytest.mark.parametrize(
    "flow",
    [
        old.structure_a(foreign=False, side=96, steps=3),
        old.structure_b(foreign=False, side=96, steps=3, tile=64),
        old.structure_c(side=96, steps=3, tile=64),
    ],
    ids=["a: lightning", "b: tiles and captions", "c: separate text encoders"],
)
def test_shared_workflows_run_when_converted(server, info, make_picture, flow):
    result = convert(flow)
    assert result.report.complete, result.report.text()
    prompt = to_prompt(result.workflow, info)
    image = finish(server, prompt, server.upload(make_picture(60, 50)))
    assert image.size == (96, 96)
    assert np.asarray(image).std() > 0


@pytest.mark.parametrize("make", [old.structure_d, old.structure_e], ids=["d: legacy", "e: split"])
def test_converted_prompts_run(server, make_picture, make):
    result = convert(make(steps=3))
    image = finish(server, result.workflow, server.upload(make_picture(60, 50)))
    assert image.size == (60, 50)


def test_the_table_of_nodes_is_what_the_nodes_declare(info):
    for kind, new in NEW_NODES.items():
        described = info[kind]
        widgets = widgets_of(described)
        assert [f.name for f in new.widgets] == [name for name, _ in widgets], kind
        for field, (name, options) in zip(new.widgets, widgets, strict=True):
            if kind.startswith("SUPIR_XPU_") and name != "supir_name":
                assert field.default == options["default"], f"{kind}.{name}"
                assert (field.low, field.high) == (options.get("min"), options.get("max")), name
                assert list(field.options) == options.get("options", []), f"{kind}.{name}"
        sockets = {
            name: spec[0]
            for part in ("required", "optional")
            for name, spec in described["input"].get(part, {}).items()
            if name not in dict(widgets)
        }
        assert {s.name: s.type for s in new.sockets} == sockets, kind
        assert set(new.optional) == set(described["input"].get("optional", {})) & set(sockets)
        assert [s.type for s in new.outputs] == described["output"], kind
        assert [s.name for s in new.outputs] == described["output_name"], kind


def refusal(server, prompt):
    reply = server.post("/prompt", {"prompt": prompt})
    return reply.status, reply.body.decode("utf-8")


@pytest.mark.parametrize("make", [old.structure_d, old.structure_e])
def test_old_prompts_reach_validation_as_our_nodes_without_meta(server, make):
    """The files do not exist here, so that is what the answer must be about."""
    status, text = refusal(server, make())
    assert status == 400, text
    assert "sd_xl_base_1.0.safetensors" in text
    assert "SUPIR_XPU_LoadSUPIR" in text
    assert "models/supir" in text


def test_an_old_prompt_queued_as_it_is_runs(server, make_picture, tmp_path):
    """The demo model stands where the old loader's MODEL, CLIP and VAE came from."""
    prompt = old.structure_e(steps=3)
    demo = {"class_type": "SUPIR_XPU_LoadDemo", "inputs": {}}
    prompt = {**prompt, "base": demo}
    prompt["1"]["inputs"]["image"] = server.upload(make_picture(60, 50))
    warm = {"base": demo, "a": {"class_type": "PreviewAny", "inputs": {"source": ["base", 3]}}}
    server.run(warm, timeout=120)  # writes the demo's SUPIR file
    (made,) = (server.base_dir / "temp" / "supir_xpu").glob("*.safetensors")
    folder = server.base_dir / "models" / "supir"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "old-prompt-test.safetensors"
    file.write_bytes(made.read_bytes())
    try:
        prompt["2"]["inputs"]["supir_model"] = r"SUPIR\old-prompt-test.safetensors"
        entry = server.run(prompt, timeout=300)
    finally:
        file.unlink()
    assert len(entry["outputs"]["8"]["images"]) == 1


def test_prompts_that_cannot_be_converted_are_answered_not_dropped(server):
    broken = {"1": {"class_type": "SUPIR_decode", "inputs": {}},
              "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0]}}}  # fmt: skip
    for prompt in (broken, {**broken, "3": {"inputs": {}}}):
        status, text = refusal(server, prompt)
        assert status == 400, text
    assert "vae" in refusal(server, broken)[1]


def test_what_comfyui_itself_can_replace_is_registered(server):
    told = server.get("/node_replacements").json()
    ours = {name: told[name] for name in old.OLD_OUTPUTS if name in told}
    assert {name: entries[0]["new_node_id"] for name, entries in ours.items()} == {
        "SUPIR_encode": "SUPIR_XPU_Encode",
        "SUPIR_decode": "SUPIR_XPU_Decode",
    }
    for name, entries in ours.items():
        for mapping in entries[0]["input_mapping"]:
            assert mapping["old_id"] in old.OLD_NODES[name].sockets


def test_the_route_converts_both_formats_and_refuses_by_kind(server):
    for data in (old.structure_a(), old.structure_e()):
        reply = server.post("/supir_xpu/convert", data)
        assert reply.status == 200, reply.body
        answer = reply.json()
        assert set(answer) == {"workflow", "report"}
        assert answer["workflow"] == convert(data).workflow
        assert answer["report"]["converted"] == 6
    for data, code in (([1], "not_a_workflow"), ({"nodes": []}, "no_old_nodes")):
        reply = server.post("/supir_xpu/convert", data)
        assert reply.status == 400
        assert reply.json()["error"]["extra_info"]["code"] == code


def test_the_route_refuses_what_is_no_json_or_too_large(server):
    import urllib.error
    import urllib.request

    def send(body):
        request = urllib.request.Request(server.base + "/api/supir_xpu/convert", body)
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=60)
        with caught.value as answer:
            return answer.code, json.loads(answer.read())["error"]["type"]

    assert send(b"\xff{") == (400, "supir_xpu_not_json")
    assert send(b"[" * 100_000) == (400, "supir_xpu_not_json")
    assert send(b" " * ((16 << 20) + 1)) == (413, "supir_xpu_too_large")


OLD_PACK = """
class Old:
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"supir_model": ("STRING",), "sdxl_model": ("STRING",), "image": ("IMAGE",)}}
    RETURN_TYPES = ("IMAGE",)
    FUNCTION = "run"
    CATEGORY = "SUPIR"
    def run(self, supir_model, sdxl_model, image):
        return (image,)
NODE_CLASS_MAPPINGS = {"SUPIR_Upscale": Old}
"""


def test_the_archive_in_an_awkward_folder_beside_the_old_pack(
    start_server_with, tmp_path, make_picture
):
    """What the registry publishes loads; the old nodes run as before, and nothing is replaced."""
    from supir_xpu.nodes import NODES

    folder = tmp_path / "comfy" / "custom_nodes" / "z_old_pack"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(OLD_PACK, encoding="utf-8")
    published = archive.unpack(tmp_path / "archive")
    with start_server_with(pack_name="a p.ack é 名 1.0", pack_root=published) as server:
        known = server.get("/object_info").json()
        assert {n.define_schema().node_id for n in NODES} <= set(known)
        assert not set(old.OLD_OUTPUTS) & set(server.get("/node_replacements").json())
        prompt = old.structure_d()
        for extra in ("seed", "scale_by", "steps"):
            prompt["2"]["inputs"].pop(extra)
        prompt["1"]["inputs"]["image"] = server.upload(make_picture(20, 10))
        entry = server.run(prompt, timeout=120)
        assert len(entry["outputs"]["3"]["images"]) == 1
        assert server.post("/supir_xpu/convert", old.structure_d()).status == 200
