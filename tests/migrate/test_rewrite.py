"""What becomes of graphs: wires, values, and what the report says about each."""

from __future__ import annotations

import copy
import json

import pytest
from supir_xpu.migrate import MigrateError, convert
from supir_xpu.tests import old_workflows as old


def by_type(workflow, kind):
    """The only node of a type."""
    (found,) = [n for n in workflow["nodes"] if n["type"] == kind]
    return found


def sources(workflow, kind):
    """What each connected input of a node reads: {input: (type, output)}."""
    links = {link[0]: link for link in workflow["links"]}
    types = {n["id"]: n["type"] for n in workflow["nodes"]}
    node = by_type(workflow, kind)
    wired = [(i["name"], links[i["link"]]) for i in node["inputs"] if i["link"] is not None]
    return {name: (types[link[1]], link[2]) for name, link in wired}


def check_saved(workflow):
    """Links, inputs and outputs of a saved workflow say the same."""
    nodes = {n["id"]: n for n in workflow["nodes"]}
    assert len(nodes) == len(workflow["nodes"])
    numbers = [link[0] for link in workflow["links"]]
    assert len(set(numbers)) == len(numbers)
    assert max(numbers) <= workflow["last_link_id"]
    assert max(nodes) <= workflow["last_node_id"]
    for number, origin, slot, target, place, kind in workflow["links"]:
        output = nodes[origin]["outputs"][slot]
        assert number in output["links"]
        assert nodes[target]["inputs"][place]["link"] == number
        assert kind == output["type"]
    held = [i["link"] for n in nodes.values() for i in n["inputs"] if i["link"] is not None]
    given = [k for n in nodes.values() for o in n["outputs"] for k in o["links"]]
    assert sorted(held) == sorted(given) == sorted(numbers)


def notes(report, kind, name=None):
    return [e for e in report.of(kind) if name is None or e.input == name]


BASE = "CheckpointLoaderSimple"
STAGE, RUN = "SUPIR_XPU_FirstStage", "SUPIR_XPU_Sample"
LOAD, WORDS = "SUPIR_XPU_LoadSUPIR", "SUPIR_XPU_Conditioning"


@pytest.mark.parametrize("make", [old.structure_a, old.structure_b, old.structure_c])
def test_shared_workflows_lose_every_old_node_and_leave_nothing_to_do(make):
    before = make()
    kept = copy.deepcopy(before)
    result = convert(before)
    assert before == kept, "the input was changed"
    check_saved(result.workflow)
    kinds = [n["type"] for n in result.workflow["nodes"]]
    assert not [k for k in kinds if k in old.OLD_OUTPUTS]
    assert result.report.complete, result.report.text()
    assert result.report.converted == sum(n["type"] in old.OLD_OUTPUTS for n in kept["nodes"])
    for key in ("groups", "extra", "version", "config"):
        assert result.workflow[key] == kept[key]
    json.dumps(result.report.as_dict())


def test_a_bundles_over_set_get_and_reroute_nodes():
    result = convert(old.structure_a())
    flow = result.workflow
    assert sources(flow, STAGE) == {
        "vae": (BASE, 2),
        "supir": (LOAD, 0),
        "image": ("ImageResize+", 0),
    }
    assert sources(flow, WORDS) == {"clip": (BASE, 1)}
    assert sources(flow, RUN) == {
        **{"model": (BASE, 0), "supir": (LOAD, 0), "control": (STAGE, 1), "center": (STAGE, 2)},
        **{"positive": (WORDS, 0), "negative": (WORDS, 1)},
    }
    assert sources(flow, "SUPIR_XPU_Decode") == {"vae": (BASE, 2), "latent": (RUN, 0)}
    assert sources(flow, "ColorMatch")["image_target"] == ("SUPIR_XPU_Decode", 0)
    assert not {"SetNode", "GetNode", "Reroute"} & {n["type"] for n in flow["nodes"]}
    run = by_type(flow, RUN)
    assert run["title"] == "My sampler"
    assert run["widgets_values"] == [
        *(174277455657960, "fixed", 10, "restore_dpmpp_2m", 2.0, 1.5, 1.0, 0.9, 1.0, 5.0, 1.003),
        *(1.0, 0, 256, "auto", "increment"),
    ]
    assert notes(result.report, "means_other", "restore_cfg")
    assert notes(result.report, "means_other", "control_scale_start")
    assert {e.input for e in notes(result.report, "other_pack")} == {
        *("ImageResize+", "ColorMatch", "Image Comparer (rgthree)"),
    }


def test_b_linked_tile_sizes_win_over_stored_ones_and_setters_may_be_sources():
    flow = convert(old.structure_b()).workflow
    assert by_type(flow, BASE)["widgets_values"] == ["SDXL/juggernautXL_v8Rundiffusion.safetensors"]
    assert sources(flow, "SUPIR_XPU_Tiles") == {"image": (STAGE, 0), "latent": (STAGE, 1)}
    assert by_type(flow, "SUPIR_XPU_Tiles")["widgets_values"] == [768, 384]
    run = sources(flow, RUN)
    assert run["tile_px"] == ("SUPIR_XPU_Tiles", 1)
    assert run["tile_overlap_px"] == ("SUPIR_XPU_Tiles", 2)
    assert run["center"] == (STAGE, 2)
    assert sources(flow, WORDS)["captions"] == ("MoondreamQueryCaptions", 0)
    assert sources(flow, "SetNode") == {"IMAGE": (STAGE, 0)}
    assert by_type(flow, RUN)["widgets_values"][4:9] == [4.0, 7.5, 1.0, 1.0, -1.0]


def test_c_two_clip_files_become_one_loader_and_encode_serves_twice():
    result = convert(old.structure_c())
    flow = result.workflow
    clip = by_type(flow, "DualCLIPLoader")["widgets_values"]
    assert clip[0].startswith("clip-vit-large")
    assert clip[1].startswith("CLIP-ViT-bigG")
    assert clip[2:] == ["sdxl", "default"]
    assert "CLIPLoader" not in {n["type"] for n in flow["nodes"]}
    run = sources(flow, RUN)
    assert run["control"] == run["center"] == (STAGE, 2)
    values = by_type(flow, RUN)["widgets_values"]
    assert values[1] == "randomize"
    assert values[12:14] == [1024, 512]
    assert notes(result.report, "ignored", "captions")[0].text.count("green hair") == 1
    assert notes(result.report, "no_equal", "high_vram")
    assert notes(result.report, "no_equal", "keep_model_loaded")


def test_d_the_legacy_prompt_with_few_inputs():
    result = convert(old.structure_d())
    prompt = result.workflow
    assert prompt["2"]["class_type"] == "SUPIR_XPU_Upscale"
    inputs = prompt["2"]["inputs"]
    assert inputs["upscale_by"] == 1.0
    assert inputs["restore_cfg"] == -1.0
    assert inputs["control_start"] == inputs["control_end"] == 1.0
    assert prompt[inputs["model"][0]]["inputs"] == {"ckpt_name": "sd_xl_base_1.0.safetensors"}
    assert prompt[inputs["supir"][0]]["class_type"] == LOAD
    assert prompt["3"]["inputs"]["images"] == ["2", 0]
    assert result.report.complete


def test_d_resizing_captions_ramps_and_tiles_of_the_legacy_node():
    inputs = {"resize_method": "area", "scale_by": 2.0, "captions": "a cat", "a_prompt": "sharp"}
    inputs |= {"cfg_scale": 7.0, "cfg_scale_start": 0.0, "control_scale": 0.8}
    inputs |= {"control_scale_start": 0.5, "use_tiled_sampling": True, "sampler_tile_size": 768}
    inputs |= {"sampler_tile_stride": 512, "color_fix_type": "AdaIn", "batch_size": 4}
    result = convert(old.structure_d(**inputs))
    prompt = result.workflow
    new = prompt["2"]["inputs"]
    scale = prompt[new["image"][0]]
    assert scale["class_type"] == "ImageScaleBy"
    assert scale["inputs"] == {"image": ["1", 0], "upscale_method": "area", "scale_by": 2.0}
    assert new["upscale_by"] == 1.0
    assert new["positive"] == "a cat, sharp"
    assert (new["cfg_start"], new["cfg_end"]) == (7.0, 7.0)
    assert (new["control_start"], new["control_end"]) == (0.5, 0.8)
    assert (new["tile_px"], new["tile_overlap_px"]) == (768, 256)
    assert new["color_fix"] == "adain"
    assert notes(result.report, "no_equal", "batch_size")
    assert notes(result.report, "means_other", "cfg_scale_start")


def test_d_with_linked_captions_becomes_the_chain_and_its_readers_read_its_end():
    prompt = old.structure_d(captions=["9", 0])
    prompt["9"] = {"class_type": "PrimitiveString", "inputs": {"value": "a cat"}}
    result = convert(prompt)
    kinds = {n["class_type"]: n["inputs"] for n in result.workflow.values()}
    assert kinds[WORDS]["captions"] == ["9", 0]
    assert kinds["SUPIR_XPU_ColorFix"]["method"] == "wavelet"
    assert result.workflow["3"]["inputs"]["images"] == ["2", 0]
    assert result.workflow["2"]["class_type"] == "SUPIR_XPU_ColorFix"
    assert result.report.complete


def test_e_inputs_that_never_existed_are_named():
    given = {"cfg_scale": 4, "min_cfg_scale": 2, "sampler": "DPMPP2M", "steps": "many"}
    report = convert(old.structure_e(**given)).report
    assert {e.input for e in report.of("ignored")} == {"cfg_scale", "min_cfg_scale"}
    to_do = {e.input: e.text for e in report.of("to_do")}
    assert set(to_do) == {"sampler", "steps"}
    assert "'DPMPP2M'" in to_do["sampler"]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"steps": 4000}, {"steps": 1000}),
        ({"EDM_s_churn": 40}, {"s_churn": 40.0}),
        ({"sampler": "TiledRestoreEDMSampler", "sampler_tile_size": 512,
          "sampler_tile_stride": 640}, {"tile_px": 512, "tile_overlap_px": 0}),
        ({"sampler": "TiledRestoreDPMPP2MSampler"}, {"tile_px": 1024, "tile_overlap_px": 512}),
        ({"seed": 2**64 - 1}, {"seed": 2**64 - 1}),
        ({"seed": "77"}, {"seed": 77}),
        ({"restore_cfg": 2.5}, {"restore_cfg": 2.5}),
    ],
)  # fmt: skip
def test_values_in_and_out_of_our_ranges(given, wanted):
    result = convert(old.structure_e(**given))
    inputs = result.workflow["6"]["inputs"]
    assert {name: inputs[name] for name in wanted} == wanted
    moved = [e for e in result.report.of("means_other") if e.node and e.input in given]
    assert bool(moved) == (given.get("steps") == 4000 or "sampler_tile_stride" in given
                           or "restore_cfg" in given)  # fmt: skip


def test_the_exponents_direction_and_the_pixel_range_are_told():
    report = convert(old.structure_e(restore_cfg=2.0)).report
    (told,) = notes(report, "means_other", "restore_cfg")
    assert "smaller value pulls harder" in told.text
    assert notes(report, "means_other", "pixel range")


def test_what_cannot_be_wired_is_left_open_and_named():
    prompt = old.structure_e()
    prompt["2"]["inputs"].pop("clip")
    prompt["6"]["inputs"]["latents"] = ["empty", 0]
    prompt["empty"] = {"class_type": "EmptyLatentImage", "inputs": {"width": 64}}
    result = convert(prompt)
    assert "clip" not in result.workflow["5"]["inputs"]
    assert [(e.node, e.input) for e in result.report.of("to_do")] == [("5", "clip")]
    assert result.workflow["6"]["inputs"]["center"] == ["empty", 0]
    assert notes(result.report, "means_other", "latents")


def test_a_bundle_of_an_unknown_node_is_named_and_other_nodes_lose_no_wire_silently():
    prompt = old.structure_e()
    prompt["3"]["inputs"]["SUPIR_VAE"] = ["magic", 0]
    prompt["magic"] = {"class_type": "Anything Everywhere", "inputs": {}}
    prompt["look"] = {"class_type": "Inspect", "inputs": {"any": ["3", 0], "model": ["2", 0]}}
    result = convert(prompt)
    assert {(e.node, e.input) for e in result.report.of("to_do")} >= {
        *(("3", "SUPIR_VAE"), ("3", "vae"), ("look", "any")),
    }
    assert result.workflow["look"]["inputs"] == {"model": ["2", 0]}


def test_an_unknown_node_of_the_old_pack_stays_and_is_named():
    flow = old.structure_a()
    flow["nodes"][14]["type"] = "SUPIR_teleport"
    report = convert(flow).report
    (left,) = report.of("to_do")
    assert (left.node, left.old_type) == ("15", "SUPIR_teleport")


def test_without_a_first_stage_encode_stays_an_encode():
    prompt = old.structure_e()
    prompt["4"]["inputs"].update(SUPIR_VAE=["2", 1], image=["1", 0])
    prompt["5"]["inputs"]["latents"] = ["4", 0]
    del prompt["3"]
    new = convert(prompt).workflow
    assert new["4"]["class_type"] == "SUPIR_XPU_Encode"
    assert new["6"]["inputs"]["control"] == new["6"]["inputs"]["center"] == ["4", 0]


def test_values_from_primitive_nodes_are_taken():
    flow = old.structure_c()
    size = {**flow["nodes"][0], "id": 50, "type": "PrimitiveNode", "widgets_values": [640, "fixed"]}
    size |= {"inputs": [], "outputs": [{"name": "INT", "type": "INT", "links": [90]}]}
    run = next(n for n in flow["nodes"] if n["type"] == "SUPIR_sample")
    place = len(run["inputs"])
    run["inputs"].append(
        {"name": "sampler_tile_stride", "type": "INT", "link": 90, "widget": {"name": "x"}}
    )
    flow["nodes"].append(size)
    flow["links"].append([90, 50, 0, run["id"], place, "INT"])
    new = convert(flow).workflow
    assert by_type(new, RUN)["widgets_values"][12:14] == [1024, 384]
    assert "PrimitiveNode" not in {n["type"] for n in new["nodes"]}


def test_muted_nodes_stay_muted_and_bypassed_ones_are_walked_through():
    flow = old.structure_b(foreign=False)
    for node in flow["nodes"]:
        if node["type"] == "SUPIR_decode":
            node["mode"] = 2
    new = convert(flow).workflow
    assert by_type(new, "SUPIR_XPU_Decode")["mode"] == 2
    bypassed = old.structure_a()
    lora = {"id": 60, "type": "LoraLoader", "mode": 4, "pos": [0, 0], "widgets_values": []}
    lora["inputs"] = [{"name": "model", "type": "MODEL", "link": 91}]
    lora["outputs"] = [{"name": "MODEL", "type": "MODEL", "links": [2]}]
    bypassed["nodes"].append(lora)
    base = by_type(bypassed, BASE)["id"]
    bypassed["links"].append([91, base, 0, 60, 0, "MODEL"])
    for link in bypassed["links"]:
        if link[1] == base and link[5] == "MODEL" and link[0] != 91:
            link[1:3] = [60, 0]
    assert sources(convert(bypassed).workflow, RUN)["model"] == (BASE, 0)


def test_subgraphs_and_links_stored_as_objects():
    inner = old.structure_a(foreign=False)
    keys = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")
    links = [dict(zip(keys, link, strict=True)) for link in inner["links"]]
    decode = by_type(inner, "SUPIR_decode")
    links.append({**dict.fromkeys(keys, 0), "id": 99, "origin_id": decode["id"], "target_id": -20})
    decode["outputs"][0]["links"].append(99)
    graph = {"id": "u-1", "name": "inner", "nodes": inner["nodes"], "links": links,
             "state": {"lastNodeId": 20, "lastLinkId": 99}}  # fmt: skip
    outer = {"nodes": [{"id": 1, "type": "u-1", "inputs": [], "outputs": []}], "links": [],
             "last_node_id": 1, "last_link_id": 0, "version": 0.4,
             "definitions": {"subgraphs": [graph]}}  # fmt: skip
    result = convert(outer)
    (new,) = result.workflow["definitions"]["subgraphs"]
    assert not [n for n in new["nodes"] if n["type"] in old.OLD_OUTPUTS]
    leaving = next(link for link in new["links"] if link["target_id"] == -20)
    assert leaving["origin_id"] == by_type(new, "SUPIR_XPU_Decode")["id"]
    assert all(isinstance(link, dict) for link in new["links"])
    assert new["state"]["lastLinkId"] >= max(link["id"] for link in new["links"])


@pytest.mark.parametrize(
    ("data", "code"),
    [
        ([], "not_a_workflow"),
        ("text", "not_a_workflow"),
        (None, "not_a_workflow"),
        ({}, "not_a_workflow"),
        ({"nodes": "x"}, "not_a_workflow"),
        ({"nodes": [{"id": 1}]}, "not_a_workflow"),
        ({"1": {"class_type": 5}}, "not_a_workflow"),
        ({"nodes": [], "links": []}, "no_old_nodes"),
        ({"1": {"class_type": "LoadImage", "inputs": {}}}, "no_old_nodes"),
        ({"1": {"class_type": "SUPIR_XPU_Sample", "inputs": {}}}, "no_old_nodes"),
        ({"1": {"class_type": "SUPIRApply", "inputs": {}}}, "no_old_nodes"),
        ({"nodes": [], "links": [], "extra": {"groupNodes": {
            "a": {"nodes": [{"type": "SUPIR_sample"}]}}}}, "grouped"),
        ({"nodes": [{"id": k, "type": "SUPIR_tiles"} for k in range(20_001)]}, "too_large"),
    ],
)  # fmt: skip
def test_what_is_no_old_workflow_is_refused_by_kind(data, code):
    with pytest.raises(MigrateError) as caught:
        convert(data)
    assert caught.value.code == code
    assert str(caught.value).endswith(".") or code == "no_old_nodes"


def test_a_request_body_keeps_its_other_keys():
    body = {"prompt": old.structure_d(), "client_id": "me", "extra_data": {"a": 1}}
    new = convert(body).workflow
    assert (new["client_id"], new["extra_data"]) == ("me", {"a": 1})
    assert new["prompt"]["2"]["class_type"] == "SUPIR_XPU_Upscale"


@pytest.mark.parametrize("view", [{"scale": 1}, {"offset": [1]}, {"offset": "x"}, [], None])
def test_a_stored_view_without_both_its_parts_is_dropped(view):
    flow = old.structure_a()
    flow["extra"] = {"ds": view, "kept": 1}
    assert convert(flow).workflow["extra"] == {"kept": 1}
