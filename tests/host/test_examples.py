"""The example workflows: both formats agree, look tidy, and run on the real server."""

from __future__ import annotations

import io
import json
from itertools import combinations
from pathlib import Path

import pytest
from PIL import Image
from supir_xpu.tests.host.ui_graph import to_prompt, with_demo_model

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "example_workflows"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
REAL = [name for name in NAMES if name != "demo_restore"]
PICTURE = (40, 30)
TITLE_HEIGHT = 30
"""What the front end draws above a node's position."""


def load(name, folder=FOLDER):
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def info(server):
    return server.get("/object_info").json()


def test_there_are_the_examples_people_ask_for():
    assert set(NAMES) >= {
        *("restore_photo", "upscale_4k_tiled", "low_vram", "portrait_captions_per_tile"),
        *("custom_sampler", "batch_of_pictures", "demo_restore"),
    }
    assert sorted(path.stem for path in (FOLDER / "api").glob("*.json")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_each_has_a_small_thumbnail_and_a_note(name):
    path = FOLDER / f"{name}.jpg"
    assert path.stat().st_size <= 60_000
    with Image.open(path) as picture:
        assert (picture.format, picture.size) == ("JPEG", (512, 384))
    notes = [n for n in load(name)["nodes"] if n["type"] == "MarkdownNote"]
    assert len(notes[0]["widgets_values"][0]) > 100


def box(node):
    (x, y), (width, height) = node["pos"], node["size"]
    return x, y - TITLE_HEIGHT, x + width, y + height


@pytest.mark.parametrize("name", REAL)
def test_no_node_covers_another_and_each_is_in_a_group(name):
    flow = load(name)
    for one, other in combinations(flow["nodes"], 2):
        a, b = box(one), box(other)
        apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
        assert apart, f"{one['title']} and {other['title']}"
    for node in flow["nodes"]:
        if node["type"] == "MarkdownNote":
            continue
        x, y, right, bottom = box(node)
        groups = [g["bounding"] for g in flow["groups"]]
        inside = [g for g in groups if g[0] <= x and g[1] <= y and right <= g[0] + g[2]]
        assert any(bottom <= g[1] + g[3] for g in inside), node["title"]


@pytest.mark.parametrize("name", REAL)
def test_every_file_a_loader_names_says_where_it_comes_from(name):
    named = 0
    for node in load(name)["nodes"]:
        files = [v for v in node["widgets_values"] if str(v).endswith((".safetensors", ".ckpt"))]
        models = node["properties"].get("models", [])
        assert [model["name"] for model in models] == files
        for model in models:
            assert model["url"].startswith("https://huggingface.co/")
            assert model["url"].endswith("/" + model["name"])
            wanted = "supir" if node["type"] == "SUPIR_XPU_LoadSUPIR" else "checkpoints"
            assert model["directory"] == wanted
        named += len(models)
    assert named == 2


@pytest.mark.host
def test_the_folders_of_the_files_are_known_to_the_server(server):
    assert {"supir", "checkpoints"} <= set(server.get("/models").json())


@pytest.mark.host
def test_every_node_of_the_pack_is_in_an_example(info):
    used = {node["type"] for name in NAMES for node in load(name)["nodes"]}
    assert {name for name in info if name.startswith("SUPIR_XPU_")} - used == set()


@pytest.mark.host
@pytest.mark.parametrize("name", NAMES)
def test_the_prompt_is_what_the_front_end_would_send(name, info):
    prompt = load(name, FOLDER / "api")
    told = {i: {k: n[k] for k in ("class_type", "inputs")} for i, n in prompt.items()}
    assert to_prompt(load(name), info) == told
    titles = {str(node["id"]): node["title"] for node in load(name)["nodes"]}
    assert {i: n["_meta"]["title"] for i, n in prompt.items()}.items() <= titles.items()


def small(prompt, picture):
    """Make a prompt cheap: a small picture, two steps, tiles of 128 px. Returns the result's size."""
    factor = 1.0
    for node in prompt.values():
        inputs, kind = node["inputs"], node["class_type"]
        if kind == "LoadImage":
            inputs["image"] = picture
        if "steps" in inputs:
            inputs["steps"] = 2
        if isinstance(inputs.get("tile_px"), int) and inputs["tile_px"] > 0:
            inputs.update(tile_px=128, tile_overlap_px=64)
        if kind == "ImageScale":
            inputs.update(width=96, height=96)
        if kind in ("SUPIR_XPU_FirstStage", "SUPIR_XPU_Upscale"):
            factor = inputs["upscale_by"]
    start = (96, 96) if "ImageScale" in {n["class_type"] for n in prompt.values()} else PICTURE
    return tuple(round(side * factor) for side in start)


@pytest.mark.host
@pytest.mark.parametrize("name", NAMES)
def test_it_runs_and_saves_pictures_of_the_size_it_promises(name, server, make_picture):
    prompt = with_demo_model(load(name, FOLDER / "api"))
    size = small(prompt, server.upload(make_picture(*PICTURE)))
    entry = server.run(prompt, timeout=300)
    saves = [i for i, node in prompt.items() if node["class_type"] == "SaveImage"]
    for node_id in saves:
        images = entry["outputs"][node_id]["images"]
        assert len(images) == (2 if name == "batch_of_pictures" else 1)
        for image in images:
            assert Image.open(io.BytesIO(server.view(image))).size == size
    previews = [i for i, node in prompt.items() if node["class_type"] == "PreviewImage"]
    for node_id in previews:
        assert len(entry["outputs"][node_id]["images"]) == 4


@pytest.mark.host
def test_the_server_lists_them_as_templates(server):
    listed = server.get("/workflow_templates").json()
    (ours,) = [names for names in listed.values() if "restore_photo" in names]
    assert set(ours) >= set(NAMES)
