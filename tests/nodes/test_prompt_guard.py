"""The guard in this process: graphs, sizes, judgements, and bodies nobody should send.

Intel GPUs are simulated by their facts; nothing here runs on one.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import json
import os
import sys
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

pytestmark = pytest.mark.host

GIB = 1024**3


@pytest.fixture(scope="module")
def pack():
    """The pack's modules, with its nodes known to ComfyUI as after a start."""
    # ComfyUI's nodes put its comfy folder, which has a utils.py, in front of its utils folder.
    sys.path.insert(0, os.environ["COMFYUI_ROOT"])
    if not hasattr(sys.modules.get("utils"), "__path__"):
        sys.modules.pop("utils", None)
    importlib.import_module("utils.install_util")
    sys.path.pop(0)
    host_nodes = importlib.import_module("nodes")
    from supir_xpu import nodes

    names = ("graph", "graph_sizes", "graph_networks", "prompt_guard", "prompt_routes", "machine")
    names += ("journal", "graph_judging", "graph_jobs", "planning", "picture_file")
    made = {name: importlib.import_module(f"supir_xpu.nodes.{name}") for name in names}
    before = dict(host_nodes.NODE_CLASS_MAPPINGS)
    for node in nodes.NODES:
        host_nodes.NODE_CLASS_MAPPINGS[node.GET_SCHEMA().node_id] = node
    for name in ("nodes_images", "nodes_post_processing", "nodes_compositing", "nodes_latent"):
        _register(host_nodes, importlib.import_module(f"comfy_extras.{name}"))
    yield SimpleNamespace(**made, classes=host_nodes.NODE_CLASS_MAPPINGS)
    host_nodes.NODE_CLASS_MAPPINGS.clear()
    host_nodes.NODE_CLASS_MAPPINGS.update(before)


def _register(host_nodes, module):
    from comfy_api.latest import io

    for value in vars(module).values():
        if (
            isinstance(value, type)
            and issubclass(value, io.ComfyNode)
            and value is not io.ComfyNode
        ):
            try:
                host_nodes.NODE_CLASS_MAPPINGS[value.GET_SCHEMA().node_id] = value
            except (NotImplementedError, AttributeError):  # a base class
                continue


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    """ComfyUI's input folder with pictures in it."""
    import folder_paths

    folder = tmp_path / "input"
    folder.mkdir()
    monkeypatch.setattr(folder_paths, "input_directory", str(folder))
    monkeypatch.setattr(folder_paths, "output_directory", str(tmp_path / "output"))
    monkeypatch.setattr(folder_paths, "temp_directory", str(tmp_path / "temp"))
    Image.new("RGB", (300, 200)).save(folder / "p.png")
    return folder


@pytest.fixture
def b70(pack):
    """The device of the first crash report, simulated; nothing remembered."""
    from supir_xpu.xpu.device import DeviceFacts
    from supir_xpu.xpu.device_profiles import bundled_profiles
    from supir_xpu.xpu.journal import Journal

    facts = DeviceFacts(
        "xpu", family="battlemage", os="Windows", driver="32.0.101.8629",
        name="Intel(R) Arc(TM) Pro B70 Graphics",
        total_bytes=32 * GIB, free_bytes=28 * GIB, max_alloc_bytes=4 * GIB,
    )  # fmt: skip
    machine = pack.machine.Machine(facts, bundled_profiles().pick(facts), simulated=True)
    journal = Journal(None)
    pack.machine.set_machine(machine)
    pack.journal.set_journal(journal)
    yield SimpleNamespace(machine=machine, journal=journal, facts=facts)
    pack.machine.set_machine(None)
    pack.journal.set_journal(None)


def chain(*nodes, start=("LoadImage", {"image": "p.png"})):
    """A graph in which each node's first socket is fed by the one before it."""
    graph = {"0": {"class_type": start[0], "inputs": dict(start[1])}}
    for i, (kind, socket, inputs) in enumerate(nodes, 1):
        link = {} if socket is None else {socket: [str(i - 1), 0]}
        graph[str(i)] = {"class_type": kind, "inputs": {**link, **inputs}}
    return graph


def size_after(pack, graph, output=0):
    last = list(graph)[-1]
    graph = {**graph, "end": {"class_type": "End", "inputs": {"x": [last, output]}}}
    read = pack.graph.Graph.read(graph)
    sizes = pack.graph_sizes.Sizes(
        read, read.order(["end"]), lambda n: pack.graph_networks.vae_ratio(read, n)
    )
    return sizes.at("end", "x")


SCALES = [
    ("ImageScale", {"width": 640, "height": 480, "upscale_method": "area", "crop": "disabled"}),
    ("ImageScale", {"width": 0, "height": 77, "upscale_method": "area", "crop": "disabled"}),
    ("ImageScale", {"width": 77, "height": 0, "upscale_method": "area", "crop": "center"}),
    ("ImageScale", {"width": 0, "height": 0, "upscale_method": "area", "crop": "disabled"}),
    ("ImageScaleBy", {"scale_by": 0.33, "upscale_method": "area"}),
    ("ImageScaleToTotalPixels", {"megapixels": 0.2, "upscale_method": "area", "resolution_steps": 1}),
    ("ImageScaleToMaxDimension", {"largest_size": 123, "upscale_method": "area"}),
    ("ImageCrop", {"width": 90, "height": 500, "x": 20, "y": 30}),
    ("ImageCrop", {"width": 90, "height": 50, "x": 2000, "y": 3000}),
    ("ImagePadForOutpaint", {"left": 8, "top": 16, "right": 24, "bottom": 32, "feathering": 0}),
    ("ResizeAndPadImage", {"target_width": 222, "target_height": 111, "padding_color": "black",
                           "interpolation": "area"}),
    ("ImageRotate", {"rotation": "90 degrees"}),
    ("ImageRotate", {"rotation": "180 degrees"}),
    ("RepeatImageBatch", {"amount": 5}),
    ("ImageFromBatch", {"batch_index": 0, "length": 3}),
    ("ImageInvert", {}),
    ("ImageFlip", {"flip_method": "x-axis: vertically"}),
    ("SUPIR_XPU_ColorFix", {"method": "none"}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "inputs"), SCALES)
@pytest.mark.parametrize("start", [(300, 200, 1), (61, 97, 2)])
def test_sizes_are_those_of_the_node_itself(pack, kind, inputs, start):
    """The table against ComfyUI's own nodes, run on a picture."""
    import torch

    width, height, count = start
    empty = {"width": width, "height": height, "batch_size": count, "color": 0}
    graph = chain((kind, "image", inputs), start=("EmptyImage", empty))
    found = size_after(pack, graph)
    cls = pack.classes[kind]
    image = torch.zeros(count, height, width, 3)
    extra = {"reference": image} if kind == "SUPIR_XPU_ColorFix" else {}
    name = getattr(cls, "FUNCTION", "execute")
    run = getattr(cls() if name != "EXECUTE_NORMALIZED" else cls, name)
    if hasattr(cls, "define_schema"):
        run = cls.execute
    result = run(image=image, **inputs, **extra)
    tensor = (result.result if hasattr(result, "result") else result)[0]
    assert found == pack.graph_sizes.ImageSize(tensor.shape[2], tensor.shape[1], tensor.shape[0])


LATENTS = [
    ("LatentUpscale", {"width": 640, "height": 480, "upscale_method": "area", "crop": "disabled"}),
    ("LatentUpscale", {"width": 0, "height": 480, "upscale_method": "area", "crop": "disabled"}),
    ("LatentUpscale", {"width": 8, "height": 0, "upscale_method": "area", "crop": "disabled"}),
    ("LatentUpscaleBy", {"scale_by": 1.37, "upscale_method": "area"}),
    ("LatentCrop", {"width": 128, "height": 64, "x": 16, "y": 160}),
    ("LatentRotate", {"rotation": "270 degrees"}),
    ("LatentFlip", {"flip_method": "x-axis: vertically"}),
    ("RepeatLatentBatch", {"amount": 3}),
    ("LatentFromBatch", {"batch_index": 1, "length": 9}),
]


@pytest.mark.parametrize(("kind", "inputs"), LATENTS)
def test_latent_sizes_are_those_of_the_node_itself(pack, kind, inputs):
    import torch

    empty = {"width": 264, "height": 200, "batch_size": 2}
    found = size_after(pack, chain((kind, "samples", inputs), start=("EmptyLatentImage", empty)))
    cls = pack.classes[kind]
    result = getattr(cls(), cls.FUNCTION)(samples={"samples": torch.zeros(2, 4, 25, 33)}, **inputs)
    shape = result[0]["samples"].shape
    assert found == pack.graph_sizes.LatentSize(shape[3], shape[2], shape[0])


def test_our_own_nodes_pass_sizes_on_with_their_canvas(pack, pictures):
    graph = chain(("SUPIR_XPU_FirstStage", "image", {"upscale_by": 1.1}))
    assert size_after(pack, graph) == pack.graph_sizes.ImageSize(330, 220)
    latent = size_after(pack, graph, 1)
    assert (latent.width, latent.height) == (384 // 8, 256 // 8)
    graph = {**graph, "2": {"class_type": "SUPIR_XPU_Sample", "inputs": {"control": ["1", 1]}}}
    graph["3"] = {"class_type": "SUPIR_XPU_Decode", "inputs": {"latent": ["2", 0]}}
    assert size_after(pack, graph) == pack.graph_sizes.ImageSize(330, 220)
    graph["2b"] = {"class_type": "LatentUpscaleBy", "inputs": {"samples": ["2", 0], "scale_by": 2}}
    del graph["3"]
    graph["3"] = {"class_type": "SUPIR_XPU_Decode", "inputs": {"latent": ["2b", 0]}}
    assert size_after(pack, graph) == pack.graph_sizes.ImageSize(660, 440)


def test_the_demo_has_cells_of_its_own_size(pack, pictures):
    graph = {
        "demo": {"class_type": "SUPIR_XPU_LoadDemo", "inputs": {}},
        "rest": {"class_type": "SUPIR_XPU_Cooldown", "inputs": {"anything": ["demo", 2]}},
        **chain(("SUPIR_XPU_FirstStage", "image", {"upscale_by": 1.0, "vae": ["rest", 0]})),
    }
    latent = size_after(pack, graph, 1)
    assert (latent.width, latent.height) == (320 // 4, 256 // 4)


def test_unknown_nodes_links_and_files_make_a_size_unknown(pack, pictures):
    by = {"upscale_method": "area"}
    unknown = [
        chain(("ImageUpscaleWithModel", "image", {})),
        chain(("ImageScaleBy", "image", {**by, "scale_by": ["9", 0]})),
        chain(("ImageScaleBy", "image", {**by, "scale_by": "no number"})),
        chain(("ImageScaleBy", "image", {**by, "scale_by": float("nan")})),
        chain(start=("LoadImage", {"image": "absent.png"})),
        chain(start=("LoadImage", {"image": ["9", 0]})),
        chain(start=("LoadImage", {"image": 7})),
        {"0": {"class_type": "ImageInvert", "inputs": {"image": ["0", 0]}}},
        chain(("ImageInvert", None, {"image": ["0", 7]})),
    ]
    for graph in unknown:
        assert size_after(pack, graph) is None, graph
    primitive = {"class_type": "PrimitiveFloat", "inputs": {"value": 2.0}}
    graph = {"9": primitive, **unknown[1]}
    assert size_after(pack, graph) == pack.graph_sizes.ImageSize(600, 400)


@pytest.mark.parametrize(
    "name", ["../p.png", "..\\p.png", "/etc/hostname", "sub/../../secret.png", "a\0b.png",
             "//server/share/p.png", "secret.png [output]/../..", "", "."]
)  # fmt: skip
def test_no_picture_outside_comfyuis_folders_is_opened(pack, pictures, monkeypatch, name):
    Image.new("RGB", (11, 12)).save(pictures.parent / "secret.png")
    Image.new("RGB", (11, 12)).save(pictures.parent / "p.png")
    opened = []
    monkeypatch.setattr(pack.picture_file.Image, "open", lambda path: opened.append(path))
    assert size_after(pack, chain(start=("LoadImage", {"image": name}))) is None
    assert opened == []


def test_headers_of_turned_moving_and_damaged_pictures(pack, pictures):
    frames = [Image.new("RGB", (20, 10), (80 * i, 0, 0)) for i in range(3)]
    frames[0].save(pictures / "moving.gif", save_all=True, append_images=frames[1:])
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (20, 10)).save(pictures / "turned.jpg", exif=exif)
    Image.new("RGB", (20, 10)).save(pictures / "turned.png", exif=exif)
    (pictures / "broken.png").write_bytes((pictures / "p.png").read_bytes()[:20])
    (pictures / "text.png").write_text("no picture", encoding="utf-8")
    size = pack.graph_sizes.ImageSize

    def of(name):
        return size_after(pack, chain(start=("LoadImage", {"image": name})))

    assert of("moving.gif") == size(20, 10, None)
    assert of("turned.jpg") == size(10, 20)
    assert [of(name) for name in ("turned.png", "broken.png", "text.png")] == [None] * 3
    Image.new("RGB", (33, 44)).save(pictures / "p.png")
    assert of("p.png") == size(33, 44)  # a changed file is read again


# -- judgements ---------------------------------------------------------------------------------

SAMPLE = {
    "steps": 35, "sampler": "restore_edm", "cfg_start": 4.0, "cfg_end": 4.0, "control_start": 1.0,
    "control_end": 1.0, "restore_cfg": 4.0, "s_churn": 5.0, "s_noise": 1.003, "eta": 1.0,
    "tile_px": -1, "tile_overlap_px": 256, "risk": "block", "seed": 1,
}  # fmt: skip


def upscale(image="p.png", by=2.0, **changes):
    inputs = {**SAMPLE, "image": ["0", 0], "upscale_by": by, "model": ["c", 0], "clip": ["c", 1],
              "vae": ["c", 2], "supir": ["s", 0], "positive": "", "negative": "",
              "color_fix": "wavelet", **changes}  # fmt: skip
    return {
        "0": {"class_type": "LoadImage", "inputs": {"image": image}},
        "c": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "x.safetensors"}},
        "s": {"class_type": "SUPIR_XPU_LoadSUPIR", "inputs": {"supir_name": "x.safetensors"}},
        "u": {"class_type": "SUPIR_XPU_Upscale", "inputs": inputs},
        "out": {"class_type": "SaveImage", "inputs": {"images": ["u", 0], "filename_prefix": "x"}},
    }


def refused(pack, prompt, targets=None, **options):
    found = pack.prompt_guard.judge_prompt(prompt, targets, with_suggestion=True, **options)
    return [node.node_id for node in found.refused], found


def test_a_blocked_run_names_node_code_numbers_action_and_a_change_that_helps(pack, pictures, b70):
    prompt = upscale(by=24.0, steps=200)
    before = copy.deepcopy(prompt)
    ids, found = refused(pack, prompt)
    assert ids == ["u"]
    assert prompt == before
    answer = pack.prompt_guard.refusal(found, pack.prompt_guard.read_graph(prompt))
    assert set(answer) == {"error", "node_errors"}
    assert set(answer["error"]) == {"type", "message", "details", "extra_info"}
    node = answer["node_errors"]["u"]
    assert node["class_type"] == "SUPIR_XPU_Upscale"
    assert node["dependent_outputs"] == ["out"]
    codes = {e["extra_info"]["code"]: e for e in node["errors"]}
    launches = codes["XPU_LAUNCHES"]["extra_info"]
    assert launches["launches"] > 150_000
    assert launches["action"]
    assert launches["input_name"] in prompt["u"]["inputs"]
    assert json.loads(json.dumps(answer)) == answer
    assert found.suggestion
    for change in found.suggestion:
        prompt[change.node_id]["inputs"][change.input_name] = change.value
    assert refused(pack, prompt)[0] == []


@pytest.mark.parametrize(("mode", "want"), [("block", ["u"]), ("warn", []), ("off", [])])
def test_only_block_and_auto_refuse(pack, pictures, b70, mode, want):
    ids, found = refused(pack, upscale(by=24.0, steps=200, risk=mode))
    assert ids == want
    assert found.nodes[0].verdict.severity == "block"


def test_only_nodes_an_output_depends_on_count(pack, pictures, b70):
    prompt = upscale(by=24.0, steps=200)
    prompt["cheap"] = {"class_type": "PreviewImage", "inputs": {"images": ["0", 0]}}
    assert refused(pack, prompt)[0] == ["u"]
    assert refused(pack, prompt, ["cheap"])[0] == []
    assert refused(pack, prompt, ["cheap", "out"])[0] == ["u"]
    assert refused(pack, prompt, [])[0] == []
    del prompt["out"]
    assert refused(pack, prompt)[0] == []


def test_what_had_to_be_assumed_never_refuses(pack, pictures, b70):
    ids, found = refused(pack, upscale(by=24.0, steps=["0", 0]))
    assert ids == []
    assert found.nodes[0].assumes == ("steps 45",)
    ids, found = refused(pack, upscale(by=["0", 0]))
    assert (ids, found.unknown) == ([], ["u"])


@pytest.mark.parametrize(
    ("changes", "severity"),
    [
        ({"by": ["0", 0]}, "unknown"),
        ({"tile_px": 256, "tile_overlap_px": 256}, "block"),
        ({}, "ok"),
    ],
)
def test_the_total_is_ok_only_where_something_was_judged(pack, pictures, changes, severity):
    found = pack.prompt_guard.judge_prompt(upscale(**changes), None, plans=True)
    assert pack.prompt_routes.plan_dict(found)["total"]["severity"] == severity


def test_settings_that_cannot_work_are_refused_on_every_device(pack, pictures):
    Image.new("RGB", (3000, 10)).save(pictures / "wide.png")
    for prompt, name in (
        (upscale("wide.png", by=32.0), "upscale_by"),
        (upscale("wide.png", by=1e308), "upscale_by"),
        (upscale(tile_px=256, tile_overlap_px=256), "tile_overlap_px"),
    ):
        ids, found = refused(pack, prompt)
        assert ids == ["u"]
        error = pack.prompt_guard.refusal(found, pack.prompt_guard.read_graph(prompt))[
            "node_errors"
        ]["u"]["errors"][0]
        assert error["extra_info"] == {"code": "SETTINGS_INVALID", "input_name": name}
        assert found.suggestion or prompt["u"]["inputs"]["upscale_by"] == 1e308


@pytest.mark.parametrize(
    ("tile_px", "overlap_px", "wanted"),
    [
        (256, 256, {"tile_overlap_px": 128}),
        (512, 2048, {"tile_overlap_px": 256}),
        (1, 256, {"tile_px": 0}),
        (1, 0, {"tile_px": 0, "tile_overlap_px": 256}),
    ],
)
def test_tiles_that_cannot_work_get_the_mildest_change(pack, pictures, tile_px, overlap_px, wanted):
    _, found = refused(pack, upscale(tile_px=tile_px, tile_overlap_px=overlap_px))
    assert {change.input_name: change.value for change in found.suggestion} == wanted


def test_nothing_is_planned_on_other_devices(pack, pictures, monkeypatch):
    monkeypatch.setattr(pack.graph_judging, "judge_run", None)
    monkeypatch.setattr(sys.modules["supir_xpu.nodes.sample_request"], "plan_cached", None)
    ids, found = refused(pack, upscale(by=24.0, steps=1000, tile_px=0))
    assert ids == []
    assert found.nodes[0].judged is None


def test_a_plan_without_queueing_has_numbers_on_every_device(pack, pictures):
    found = pack.prompt_guard.judge_prompt(upscale(tile_px=0), None, plans=True)
    answer = json.loads(json.dumps(pack.prompt_routes.plan_dict(found)))
    assert answer["refused"] is False
    plan = answer["nodes"]["u"]["plan"]
    assert plan["output_px"] == [600, 400]
    assert plan["launches_total"] > 1000
    assert [p["name"] for p in plan["phases"]] == [
        "encode_control", "decode_stage1", "encode_center", "sample", "decode",
    ]  # fmt: skip


def test_a_crash_refuses_the_same_run_and_lets_a_smaller_one_through(pack, pictures, b70):
    from supir_xpu.xpu.journal import RunInfo

    prompt = upscale(by=4.0)
    _, found = refused(pack, prompt)
    judged = found.nodes[0].judged.result
    size = judged.verdict.size
    run = RunInfo("r", b70.facts.name, b70.facts.driver, "2", judged.plan.attention_policy, *size)
    b70.journal.open_phase(run, "sample")
    b70.journal._do(lambda db: db.execute("UPDATE phases SET boot_id='boot:before'"), None)
    (death,) = b70.journal.find_deaths()
    assert death.kind == "machine"
    ids, found = refused(pack, prompt)
    assert ids == ["u"]
    assert "XPU_CRASHED_BEFORE" in {r.code for r in found.nodes[0].verdict.risks}
    assert refused(pack, upscale(by=1.0, steps=4))[0] == []
    status = json.loads(json.dumps(pack.prompt_routes.status_dict(b70.machine)))
    assert status["last_death"]["phase"] == "sample"
    assert status["limits"]["crashed"][0]["launches"] == size.launches // 2
    assert status["history"]["crashes"][0]["kind"] == "machine"


CORE = {
    "0": {"class_type": "LoadImage", "inputs": {"image": "p.png"}},
    "c": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "x"}},
    "big": {"class_type": "ImageScaleBy",
            "inputs": {"image": ["0", 0], "scale_by": 8.0, "upscale_method": "area"}},
    "apply": {"class_type": "SUPIRApply",
              "inputs": {"model": ["c", 0], "vae": ["c", 2], "image": ["big", 0]}},
    "z": {"class_type": "VAEEncode", "inputs": {"pixels": ["big", 0], "vae": ["c", 2]}},
    "k": {"class_type": "KSampler",
          "inputs": {"model": ["apply", 0], "latent_image": ["z", 0], "steps": 45}},
    "d": {"class_type": "VAEDecode", "inputs": {"samples": ["k", 0], "vae": ["c", 2]}},
    "out": {"class_type": "SaveImage", "inputs": {"images": ["d", 0]}},
}  # fmt: skip


def test_supir_work_of_core_nodes_is_warned_about_or_refused_if_the_user_says_so(
    pack, pictures, b70
):
    from dataclasses import replace

    pack.classes.setdefault("SUPIRApply", SimpleNamespace())
    ids, found = refused(pack, CORE)
    assert ids == []
    assert {node.node_id for node in found.nodes} == {"apply", "z", "k", "d"}
    assert "k" in {node.node_id for node in found.warned}
    plain = copy.deepcopy(CORE)
    plain["k"]["inputs"]["model"] = ["c", 0]
    assert pack.prompt_guard.judge_prompt(plain, None).nodes == []  # no SUPIR in what runs
    pack.machine.set_machine(replace(b70.machine, guard_core="block"))
    assert "k" in refused(pack, CORE)[0]


def test_a_long_chain_and_a_cycle_are_walked(pack, pictures, b70):
    nodes = [("ImageInvert", "image", {})] * 3000
    graph = chain(*nodes)
    assert size_after(pack, graph) == pack.graph_sizes.ImageSize(300, 200)
    prompt = upscale()
    prompt["0"] = {"class_type": "ImageInvert", "inputs": {"image": ["u", 0]}}
    assert refused(pack, prompt)[0] == []


def test_renamed_nodes_are_judged_as_what_they_became(pack, pictures, b70, monkeypatch):
    class Manager:
        def apply_replacements(self, prompt):
            prompt["u"] = {**prompt["u"], "class_type": "SUPIR_XPU_Upscale"}

    prompt = upscale(by=24.0, steps=200)
    prompt["u"]["class_type"] = "OldUpscale"
    before = copy.deepcopy(prompt)
    assert pack.prompt_guard.judge_prompt(prompt, None) is None  # ComfyUI names what is missing
    server = SimpleNamespace(node_replace_manager=Manager())
    monkeypatch.setattr(pack.prompt_guard, "server_instance", lambda: server)
    ids, found = refused(pack, prompt)
    assert ids == ["u"]
    graph = pack.prompt_guard.read_graph(prompt)
    assert pack.prompt_guard.refusal(found, graph)["node_errors"]["u"]["dependent_outputs"]
    assert prompt == before


# -- bodies -------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
places = st.sampled_from(["0", "u", "c", "out"])


@settings(max_examples=150, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(node=places, key=st.sampled_from([*SAMPLE, "image", "upscale_by", "vae"]), value=json_values)
def test_any_value_in_any_input_is_judged_or_left_to_comfyui(pack, pictures, b70, node, key, value):
    prompt = upscale(tile_px=64, tile_overlap_px=0, steps=1)
    prompt[node]["inputs"][key] = value
    before = copy.deepcopy(prompt)
    found = pack.prompt_guard.judge_prompt(prompt, None)
    assert found is not None
    assert repr(prompt) == repr(before)


@settings(max_examples=150, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(body=json_values, part=json_values, key=st.sampled_from(["class_type", "inputs", "_meta"]))
def test_bodies_that_are_no_prompts_are_comfyuis_to_answer(pack, b70, body, part, key):
    check = pack.prompt_guard.check_body
    assert asyncio.run(check(body)) is None
    assert asyncio.run(check({"prompt": body})) is None
    broken = upscale()
    broken["u"][key] = part
    found = asyncio.run(check({"prompt": broken, "partial_execution_targets": part}))
    assert found is None or key == "_meta"


class Request:
    """As much of an aiohttp request as the guard reads."""

    charset = None

    charset = None

    def __init__(self, raw, path="/prompt", method="POST"):
        self.raw, self.path, self.method = raw, path, method

    async def read(self):
        return self.raw

    async def json(self):
        return json.loads(self.raw.decode("utf-8"))


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"SUPIR", b"\xff\xfeSUPIR", b'"SUPIR"', b"[" * 100_000 + b"SUPIR",
            b'{"prompt": "SUPIR"}', b'{"prompt": ["SUPIR"]}', b'{"prompt": {"1": "SUPIR"}}',
            b'{"prompt": {"1": {"class_type": "SUPIR"}}}', b"null SUPIR"]
)  # fmt: skip
def test_what_cannot_be_read_is_passed_on(pack, b70, raw):
    passed = []

    async def handler(request):
        passed.append(request)
        return "comfyui"

    assert asyncio.run(pack.prompt_guard.guard(Request(raw), handler)) == "comfyui"
    assert len(passed) == 1


def test_a_fault_of_the_guard_itself_is_logged_and_the_prompt_passed_on(
    pack, b70, pictures, monkeypatch, caplog
):
    def broken(*_, **__):
        raise RuntimeError("broken guard")

    monkeypatch.setattr(pack.prompt_guard, "judge_prompt", broken)

    async def handler(_):
        return "comfyui"

    raw = json.dumps({"prompt": upscale()}).encode()
    assert asyncio.run(pack.prompt_guard.guard(Request(raw), handler)) == "comfyui"
    assert "broken guard" in caplog.text


def test_other_requests_are_not_read(pack):
    async def handler(_):
        return "comfyui"

    for path, method in (("/prompt", "GET"), ("/queue", "POST"), ("/prompt/", "POST")):
        request = Request(None, path, method)
        request.read = None
        assert asyncio.run(pack.prompt_guard.guard(request, handler)) == "comfyui"


@pytest.mark.parametrize("key", ["zzz", "steps", "image"])
def test_an_output_number_no_float_can_hold_is_no_link(pack, pictures, b70, key):
    prompt = upscale(by=24.0, steps=200)
    prompt["u"]["inputs"][key] = ["0", 10**400]
    found = pack.prompt_guard.judge_prompt(prompt, None)
    assert [node.node_id for node in found.refused] == (["u"] if key == "zzz" else [])


@pytest.mark.parametrize("charset", ["utf-16", "utf-16-le", "utf-32", "cp037"])
def test_a_body_in_another_charset_is_judged_too(pack, b70, pictures, monkeypatch, charset):
    async def all_outputs(*_):
        return ["out"]

    monkeypatch.setattr(pack.prompt_guard, "queued_outputs", all_outputs)

    async def handler(_):
        return "comfyui"

    text = json.dumps({"prompt": upscale(by=24.0, steps=200)})
    request = Request(text.encode(charset))
    request.charset = charset

    async def read_json():
        return json.loads(request.raw.decode(charset))

    request.json = read_json
    answer = asyncio.run(pack.prompt_guard.guard(request, handler))
    assert answer != "comfyui"
    assert answer.status == 400


def test_a_graph_that_takes_too_long_is_left_to_its_nodes(pack, pictures, b70, monkeypatch):
    monkeypatch.setattr(pack.graph_judging, "JUDGE_SECONDS", -1.0)
    ids, found = refused(pack, upscale(by=24.0, steps=200))
    assert (ids, found.unknown, found.complete) == ([], ["u"], False)
    assert found.suggestion == []
    assert found.safe_plan == []


@pytest.mark.parametrize("editing", [True, False])
def test_a_graph_that_cannot_be_judged_yet_is_no_error_to_an_editor(
    pack, b70, monkeypatch, editing
):
    async def body(_):
        return {"prompt": {"1": {"class_type": "NotInstalled", "inputs": {}}}, "editing": editing}

    monkeypatch.setattr(pack.prompt_routes, "read_object", body)
    answer = asyncio.run(pack.prompt_routes.post_plan(None))
    assert answer.status == (200 if editing else 400)
    text = json.loads(answer.text)
    assert "installed" in (text["problem"] if editing else text["error"]["message"])


@pytest.mark.parametrize(
    ("folder", "served"),
    [("supir-xpu", True), ("SUPIR.XPU_1", True), ("supir xpu", False), ("SUPIR.XPU \u00fc", False)],
)
def test_folders_whose_web_files_comfyui_does_not_serve_are_known(pack, folder, served):
    assert importlib.import_module("supir_xpu.nodes.host").serves_web_files(folder) is served


def test_a_mistake_in_the_settings_refuses_the_prompt_at_the_door(pack, pictures, monkeypatch):
    def wrong():
        raise pack.prompt_guard.SettingsError("guard_core is 'blok'; set it to warn or block.")

    monkeypatch.setattr(pack.prompt_guard, "machine", wrong)
    answer = asyncio.run(pack.prompt_guard.check_body({"prompt": upscale()}))
    assert answer["error"]["type"] == "supir_xpu_settings"
    assert "blok" in answer["error"]["details"]
    other = {"out": {"class_type": "SaveImage", "inputs": {"images": ["0", 0]}}, **chain()}
    assert asyncio.run(pack.prompt_guard.check_body({"prompt": other})) is None
