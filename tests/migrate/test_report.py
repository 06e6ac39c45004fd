"""Nothing is lost silently: what cannot come along is told, and what is shared stays active."""

from __future__ import annotations

import pytest
from supir_xpu.migrate import convert
from supir_xpu.tests import old_workflows as old

UPSCALE = "SUPIR_XPU_Upscale"
FILES = ["SUPIR-v0Q.ckpt", "sd_xl_base_1.0.safetensors"]


def told(report, kind, name=None):
    return [e for e in report.of(kind) if name is None or e.input == name]


def of_type(flow, kind):
    return [n for n in flow["nodes"] if n["type"] == kind]


def legacy_rows(*modes, files=FILES):
    """A saved workflow with one legacy node per mode, all of the same files."""
    canvas = old.Canvas()
    image = canvas.add("LoadImage", ["a.png", "image"])
    for mode in modes:
        node = canvas.add(
            "SUPIR_Upscale", [*files, 1, "fixed", "lanczos", 1.0, 9], mode=mode, image=(image, 0)
        )
        canvas.add("SaveImage", ["x"], images=(node, 0))
    return canvas.data


@pytest.mark.parametrize(("modes", "shared"), [((2, 0), 0), ((0, 4), 0), ((4, 2), 4), ((2,), 2)])
def test_a_shared_loader_is_active_as_soon_as_one_of_its_users_is(modes, shared):
    flow = convert(legacy_rows(*modes)).workflow
    for kind in ("CheckpointLoaderSimple", "SUPIR_XPU_LoadSUPIR"):
        (loader,) = of_type(flow, kind)
        assert loader["mode"] == shared
    assert [n["mode"] for n in of_type(flow, UPSCALE)] == list(modes)


def test_a_checkpoint_of_a_bypassed_and_an_active_loader_is_active():
    canvas = old.Canvas()
    for name, mode in (("A.ckpt", 4), ("B.ckpt", 0)):
        canvas.add("SUPIR_model_loader", [name, FILES[1], False, "auto"], mode=mode)
    (base,) = of_type(convert(canvas.data).workflow, "CheckpointLoaderSimple")
    assert base["mode"] == 0


@pytest.mark.parametrize("stored", [[], None])
@pytest.mark.parametrize("kind", ["SUPIR_model_loader", "SUPIR_model_loader_v2", "SUPIR_Upscale"])
def test_missing_file_names_are_to_be_chosen(kind, stored):
    canvas = old.Canvas()
    canvas.add(kind, stored)
    report = convert(canvas.data).report
    assert len(told(report, "to_do", "supir_name")) == 1
    assert len(told(report, "to_do", "ckpt_name")) == (kind != "SUPIR_model_loader_v2")


def test_missing_file_names_of_a_prompt_are_to_be_chosen():
    prompt = old.structure_d()
    for name in ("supir_model", "sdxl_model"):
        del prompt["2"]["inputs"][name]
    report = convert(prompt).report
    assert {e.input for e in report.of("to_do")} == {"supir_name", "ckpt_name"}


def test_a_text_encoder_without_a_file_name_is_to_be_chosen():
    flow = old.structure_c()
    of_type(flow, "CLIPLoader")[1]["widgets_values"] = []
    (note,) = convert(flow).report.of("to_do")
    assert note.input == "clip_name2"


def test_the_first_versions_row_keeps_its_files_and_names_the_rest():
    canvas = old.Canvas()
    canvas.add("SUPIR_Upscale", ["a.ckpt", "b.safetensors", 123, "fixed", 1.0, 512, 45])
    result = convert(canvas.data)
    (base,) = of_type(result.workflow, "CheckpointLoaderSimple")
    (supir,) = of_type(result.workflow, "SUPIR_XPU_LoadSUPIR")
    assert (supir["widgets_values"], base["widgets_values"]) == (["a.ckpt"], ["b.safetensors"])
    assert not told(result.report, "to_do", "ckpt_name")
    (rest,) = told(result.report, "to_do", "widgets_values")
    assert "[123, 'fixed', 1.0, 512, 45]" in rest.text


@pytest.mark.parametrize("kind", ["PrimitiveNode", "PrimitiveInt"])
def test_a_seed_from_a_primitive_keeps_what_becomes_of_it_and_the_primitive_is_told(
    kind, monkeypatch
):
    monkeypatch.setitem(old.OUTPUTS, "PrimitiveInt", ["INT:INT"])
    canvas = old.Canvas()
    number = canvas.add(kind, [99, "randomize"])
    canvas.add("SUPIR_Upscale", [*FILES, 1, "fixed", "lanczos", 1.0, 9], seed=(number, 0))
    result = convert(canvas.data)
    (new,) = of_type(result.workflow, UPSCALE)
    at = new["widgets_values"].index(99)
    assert new["widgets_values"][at + 1] == "randomize"
    assert told(result.report, "means_other", "seed")
    gone = "1 PrimitiveNode removed" if kind == "PrimitiveNode" else "nothing reads this"
    assert [e for e in result.report.of("converted") if gone in e.text]


def switch(prompt):
    """Add a node whose output is not known here."""
    prompt["any"] = {"class_type": "Anything", "inputs": {}}
    return prompt


def test_linked_tiling_and_resizing_are_told():
    linked = {"use_tiled_sampling": ["any", 0], "resize_method": ["any", 1], "scale_by": 2.0}
    prompt = old.structure_d(**linked, sampler_tile_size=768, sampler_tile_stride=512)
    report = convert(switch(prompt)).report
    (tiling,) = told(report, "to_do", "use_tiled_sampling")
    assert "tile_px to 768 and tile_overlap_px to 256" in tiling.text
    assert "lanczos" in told(report, "means_other", "resize_method")[0].text


def test_a_caption_before_a_linked_prompt_is_told_as_lost():
    prompt = switch(old.structure_e())
    prompt["5"]["inputs"].update(captions="a dog", positive_prompt=["any", 0])
    report = convert(prompt).report
    assert "'a dog'" in told(report, "to_do", "captions")[0].text
    assert not told(report, "converted", "captions")


def test_a_linked_sampler_keeps_the_tiles_and_claims_nothing_about_them():
    given = {"sampler": ["any", 0], "sampler_tile_size": 768, "sampler_tile_stride": 512}
    result = convert(switch(old.structure_e(**given)))
    inputs = result.workflow["6"]["inputs"]
    assert (inputs["tile_px"], inputs["tile_overlap_px"]) == (768, 256)
    assert told(result.report, "to_do", "sampler")
    assert "did not tile" not in result.report.text()


def test_whole_numbers_are_not_wired_into_a_float_input():
    result = convert(switch(old.structure_e(EDM_s_churn=["any", 0], cfg_scale_end=["any", 1])))
    inputs = result.workflow["6"]["inputs"]
    assert (inputs["s_churn"], inputs["cfg_end"]) == (5.0, ["any", 1])
    (note,) = result.report.of("to_do")
    assert note.input == "EDM_s_churn"


@pytest.mark.parametrize(("kind", "wired"), [("FLOAT", True), ("INT", False)])
def test_a_saved_link_is_kept_where_its_type_fits(kind, wired, monkeypatch):
    monkeypatch.setitem(old.OUTPUTS, "Numbers", [f"n:{kind}"])
    canvas = old.Canvas()
    number = canvas.add("Numbers", [])
    row = [*FILES, 1, "fixed", "lanczos", 1.0, 9, -1, 4, "p", "n", 7]
    canvas.add("SUPIR_Upscale", row, s_churn=(number, 0))
    result = convert(canvas.data)
    (new,) = of_type(result.workflow, UPSCALE)
    (churn,) = [i for i in new["inputs"] if i["name"] == "s_churn"]
    assert (churn["link"] is not None) == wired
    assert bool(told(result.report, "to_do", "s_churn")) != wired
    assert wired or 7.0 in new["widgets_values"]


def test_a_workflow_carried_for_saved_pictures_is_told_to_stay_old():
    body = {"prompt": old.structure_d(), "client_id": "me"}
    assert not told(convert(body).report, "ignored", "extra_pnginfo")
    body["extra_data"] = {"extra_pnginfo": {"workflow": old.structure_a()}}
    result = convert(body)
    assert "6 old node(s)" in told(result.report, "ignored", "extra_pnginfo")[0].text
    assert result.workflow["extra_data"] == body["extra_data"]


def test_a_bypassed_node_left_out_of_the_chain_and_removed_helpers_are_told(monkeypatch):
    monkeypatch.setitem(old.OUTPUTS, "LoraLoader", ["MODEL:MODEL", "CLIP:CLIP"])
    canvas = old.Canvas()
    base = canvas.add("CheckpointLoaderSimple", [FILES[1]])
    lora = canvas.add("LoraLoader", ["l", 1.0, 1.0], mode=4, model=(base, 0), clip=(base, 1))
    parts = {"model": (lora, 0), "clip": (lora, 1), "vae": (base, 2)}
    loader = canvas.add("SUPIR_model_loader_v2", FILES[:1], **parts)
    route = canvas.add("Reroute", [], **{"": (loader, 0)})
    canvas.add("SUPIR_conditioner", ["a", "b"], SUPIR_model=(route, 0))
    report = convert(canvas.data).report
    (left,) = report.of("ignored")
    assert (left.node, left.old_type) == (str(lora), "LoraLoader")
    assert [e for e in report.of("converted") if e.text.startswith("1 Reroute removed")]


def test_default_titles_become_the_new_ones_and_chosen_ones_stay():
    prompt = old.structure_e()
    prompt["6"]["_meta"] = {"title": "SUPIR Sampler"}
    prompt["7"]["_meta"] = {"title": "Mine"}
    new = convert(prompt).workflow
    assert new["6"]["_meta"]["title"] == "SUPIR Sample"
    assert new["7"]["_meta"]["title"] == "Mine"
