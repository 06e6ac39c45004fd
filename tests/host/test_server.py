"""The pack in the real ComfyUI server, driven through its API."""

from __future__ import annotations

import json
import threading
import time

import numpy as np
import pytest

pytestmark = pytest.mark.host

NODE_IDS = {
    "SUPIR_XPU_LoadSUPIR",
    "SUPIR_XPU_LoadDemo",
    "SUPIR_XPU_FirstStage",
    "SUPIR_XPU_Tiles",
    "SUPIR_XPU_Conditioning",
    "SUPIR_XPU_Sample",
    "SUPIR_XPU_Upscale",
    "SUPIR_XPU_Guider",
    "SUPIR_XPU_Sampler",
    "SUPIR_XPU_Sigmas",
    "SUPIR_XPU_Encode",
    "SUPIR_XPU_Decode",
    "SUPIR_XPU_ColorFix",
    "SUPIR_XPU_Preflight",
}


def test_every_node_is_registered_with_tooltips_on_every_input(server):
    info = server.get("/object_info").json()
    ours = {name: node for name, node in info.items() if name.startswith("SUPIR_XPU_")}
    assert set(ours) >= NODE_IDS
    for name, node in ours.items():
        assert node["category"].startswith("SUPIR XPU"), name
        assert node["description"], name
        for kind in ("required", "optional"):
            for input_name, (_, options) in node["input"].get(kind, {}).items():
                assert options.get("tooltip"), f"{name}.{input_name} has no tooltip"
    sample = ours["SUPIR_XPU_Sample"]["input"]["required"]
    assert sample["seed"][1]["max"] == 2**64 - 1


@pytest.mark.parametrize(
    ("width", "height", "mode"),
    [
        (64, 64, "RGB"),
        (31, 2000, "RGB"),
        (100, 70, "L"),
        (1, 1, "RGB"),
        pytest.param(1001, 777, "RGB", marks=pytest.mark.newest),
    ],
)
def test_the_saved_picture_has_exactly_the_size_of_the_input(
    server, workflow, make_picture, saved, width, height, mode
):
    workflow.set("LoadImage", image=server.upload(make_picture(width, height, mode)))
    tiles = {"tile_px": 256, "tile_overlap_px": 64} if width > 1000 else {}
    workflow.set("SUPIR_XPU_Sample", steps=1 if tiles else 2, **tiles)
    (image,) = saved(server.run(workflow.prompt, timeout=600))
    assert image.size == (width, height)
    assert np.asarray(image).std() > 0 or (width, height) == (1, 1)


def test_transparency_is_scaled_along_and_put_back(server, workflow, make_picture, saved):
    name = server.upload(make_picture(60, 45, "RGBA"))
    workflow.set("LoadImage", image=name).set("SUPIR_XPU_FirstStage", upscale_by=1.5)
    load = workflow.node("LoadImage")
    workflow.insert_after("LoadImage", "alpha", "JoinImageWithAlpha", "image", alpha=[load, 1])
    (image,) = saved(server.run(workflow.prompt, timeout=300))
    assert image.mode == "RGBA"
    assert image.size == (90, 68)
    assert np.asarray(image)[..., 3].std() > 10


def test_preflight_runs_alone_and_names_the_device_where_there_is_no_intel_gpu(server):
    prompt = {
        "check": {
            "class_type": "SUPIR_XPU_Preflight",
            "inputs": {"refresh": False},
            "_meta": {"title": "Preflight"},
        }
    }
    entry = server.run(prompt, timeout=60)
    (text,) = entry["outputs"]["check"]["text"]
    assert "the processor (CPU)" in text
    assert "\n" not in text
    preflight = server.get("/supir_xpu/status").json()["preflight"]
    assert preflight["status"] is None


def test_a_batch_gives_as_many_pictures_and_the_first_is_the_single_one(
    server, workflow, make_picture, saved
):
    workflow.set("LoadImage", image=server.upload(make_picture(64, 48)))
    single = saved(server.run(workflow.copy(), timeout=300))
    workflow.insert_after("LoadImage", "batch", "RepeatImageBatch", "image", amount=3)
    batch = saved(server.run(workflow.prompt, timeout=300))
    assert [image.size for image in batch] == [(64, 48)] * 3
    assert np.array_equal(np.asarray(batch[0]), np.asarray(single[0]))
    assert not np.array_equal(np.asarray(batch[1]), np.asarray(batch[0]))


def test_a_missing_supir_file_is_refused_at_queue_time_with_what_to_do(server, workflow):
    from host_server import PromptError

    demo = workflow.node("SUPIR_XPU_LoadDemo")
    workflow.prompt["load"] = {
        "class_type": "SUPIR_XPU_LoadSUPIR",
        "inputs": {"supir_name": "SUPIR-v0Q.safetensors"},
        "_meta": {"title": "Load SUPIR"},
    }
    for node in workflow.prompt.values():
        for name, value in node["inputs"].items():
            if value == [demo, 3]:
                node["inputs"][name] = ["load", 0]
    with pytest.raises(PromptError) as caught:
        server.run(workflow.prompt)
    assert caught.value.status == 400
    text = json.dumps(caught.value.body)
    assert "models/supir" in text
    assert "Kijai/SUPIR_pruned" in text


def test_an_error_in_a_run_shows_our_message_and_the_next_run_works(
    server, workflow, make_picture, saved
):
    from host_server import PromptError

    workflow.set("LoadImage", image=server.upload(make_picture(300, 300, seed=1)))
    broken = workflow.copy()
    broken[workflow.node("SUPIR_XPU_Sample")]["inputs"].update(tile_px=64, tile_overlap_px=64)
    with pytest.raises(PromptError, match="tile_overlap_px is 64 and tile_px is 64"):
        server.run(broken, timeout=300)
    assert saved(server.run(workflow.prompt, timeout=300))[0].size == (300, 300)


def test_cancel_between_steps_and_the_next_run_is_like_a_first_run(
    server, workflow, make_picture, saved
):
    workflow.set("LoadImage", image=server.upload(make_picture(96, 96, seed=2)))
    want = np.asarray(saved(server.run(workflow.copy(), timeout=300))[0])
    long = workflow.copy()
    long[workflow.node("SUPIR_XPU_Sample")]["inputs"].update(steps=1000, seed=99)
    prompt_id = server.queue(long)
    ended = {}
    waiter = threading.Thread(target=lambda: ended.update(server.wait(prompt_id, 300)))
    waiter.start()
    time.sleep(3)
    server.interrupt()
    waiter.join(60)
    kinds = [kind for kind, _ in ended["status"]["messages"]]
    assert "execution_interrupted" in kinds
    server.post("/free", {"unload_models": True, "free_memory": True})
    again = workflow.copy()
    image = saved(server.run(again, timeout=300))[0]
    assert np.array_equal(np.asarray(image), want)


def test_progress_and_previews_arrive_while_sampling(server, workflow, make_picture):
    from host_events import Listener

    workflow.set("LoadImage", image=server.upload(make_picture(64, 64, seed=3)))
    workflow.set("SUPIR_XPU_Sample", steps=6, seed=77)
    node = workflow.node("SUPIR_XPU_Sample")
    with Listener(server) as heard:
        server.run(workflow.prompt, timeout=300, client_id=heard.client_id)
        time.sleep(0.5)
    ours = [step for step in heard.timeline.steps if step.node == node]
    assert ours, "the sampler reported no step"
    assert ours[-1].value == ours[-1].total == 6


def test_same_prompt_again_is_cached_and_another_seed_is_not(server, workflow, make_picture):
    workflow.set("LoadImage", image=server.upload(make_picture(64, 64, seed=4)))
    workflow.set("SUPIR_XPU_Sample", seed=2**64 - 1)
    server.run(workflow.copy(), timeout=300)
    node = workflow.node("SUPIR_XPU_Sample")

    def cached(entry):
        return next(d["nodes"] for k, d in entry["status"]["messages"] if k == "execution_cached")

    assert node in cached(server.run(workflow.copy(), timeout=300))
    workflow.set("SUPIR_XPU_Sample", seed=0)
    assert node not in cached(server.run(workflow.copy(), timeout=300))


def test_nothing_was_logged_as_failed(server):
    log = server.log_path.read_text(encoding="utf-8", errors="replace")
    assert "(IMPORT FAILED)" not in log  # ComfyUI's words about packs; its own files differ
    assert "SUPIR XPU could not be loaded" not in log
