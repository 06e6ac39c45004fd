"""What a saved picture remembers, seeds, failures that must not stick, and little memory."""

from __future__ import annotations

import copy
import io
import json
import shutil

import numpy as np
import pytest
from PIL import Image

pytestmark = pytest.mark.host


def pixels(image):
    return np.asarray(image)


def cached_nodes(entry):
    return next(d["nodes"] for k, d in entry["status"]["messages"] if k == "execution_cached")


def error_of(entry):
    return next((d for k, d in entry["status"]["messages"] if k == "execution_error"), None)


def test_the_picture_holds_the_graph_and_the_graph_makes_the_same_picture(
    server, workflow, make_picture, saved
):
    workflow.set("LoadImage", image=server.upload(make_picture(70, 50, seed=11)))
    workflow.set("SUPIR_XPU_Sample", seed=2**63 + 12345, cfg_start=1.5, s_noise=1.0031)
    sent = workflow.copy()
    graph = {"nodes": [{"id": 5, "type": "SUPIR_XPU_Sample"}], "links": [], "version": 0.4}
    extra = {"extra_pnginfo": {"workflow": graph}}
    reply = server.post("/prompt", {"prompt": sent, "client_id": "x", "extra_data": extra})
    assert reply.status == 200, reply.body
    (image,) = saved(server.wait(reply.json()["prompt_id"], 120))
    remembered = json.loads(image.text["prompt"])
    assert json.loads(image.text["workflow"]) == graph
    assert {i: (n["class_type"], n["inputs"]) for i, n in remembered.items()} == {
        i: (n["class_type"], n["inputs"]) for i, n in sent.items()
    }
    server.post("/free", {"unload_models": True, "free_memory": True})
    entry = server.run(remembered, timeout=120)
    assert workflow.node("SUPIR_XPU_Sample") not in cached_nodes(entry)
    (again,) = saved(entry)
    assert again.tobytes() == image.tobytes()
    assert again.text["prompt"] == image.text["prompt"]


def test_seeds_of_64_bits_arrive_whole(server, workflow, make_picture, saved):
    workflow.set("LoadImage", image=server.upload(make_picture(64, 64, seed=12)))
    made = {}
    # Their low 32 bits differ, as these are all that torch's CPU generator is seeded with. Through
    # a 64-bit float, the second and the fourth would be those of 0.
    for seed in (0, 2**53 + 1, 2**53 + 2, 2**64 - 1, 2**64 - 2):
        workflow.set("SUPIR_XPU_Sample", seed=seed)
        (image,) = saved(server.run(workflow.copy(), timeout=120))
        assert (
            json.loads(image.text["prompt"])[workflow.node("SUPIR_XPU_Sample")]["inputs"]["seed"]
            == seed
        )
        made[seed] = image.tobytes()
    assert len(set(made.values())) == 5, "a 64-bit seed was rounded on its way"


@pytest.mark.parametrize("seed", [2**64, -1])
def test_seeds_out_of_range_are_refused(server, workflow, make_picture, seed):
    workflow.set("LoadImage", image=server.upload(make_picture(64, 64, seed=12)))
    workflow.set("SUPIR_XPU_Sample", seed=seed)
    reply = server.post("/prompt", {"prompt": workflow.prompt})
    assert reply.status == 400
    assert "seed" in reply.body.decode("utf-8")


@pytest.fixture
def with_file(server, workflow, make_picture):
    """Put LoadSUPIR of a named file into the workflow, and give the good file and its folder."""
    first = workflow.copy()  # Load SUPIR Demo writes its file when it runs
    first[workflow.node("LoadImage")]["inputs"]["image"] = server.upload(
        make_picture(64, 64, seed=10)
    )
    server.run(first, timeout=120)
    (good,) = (server.base_dir / "temp").rglob("SUPIR-demo-*.safetensors")
    folder = server.base_dir / "models" / "supir"
    folder.mkdir(parents=True, exist_ok=True)
    demo = workflow.node("SUPIR_XPU_LoadDemo")

    def use(name):
        workflow.prompt["file"] = {
            "class_type": "SUPIR_XPU_LoadSUPIR",
            "inputs": {"supir_name": name},
        }
        for node in workflow.prompt.values():
            for key, value in node["inputs"].items():
                if value == [demo, 3]:
                    node["inputs"][key] = ["file", 0]
        return folder / name

    use.good = good
    return use


def test_a_damaged_file_is_refused_and_works_once_it_is_repaired_under_its_name(
    server, workflow, make_picture, saved, with_file
):
    from host_server import PromptError

    workflow.set("LoadImage", image=server.upload(make_picture(64, 64, seed=13)))
    (want,) = saved(server.run(workflow.copy(), timeout=120))
    path = with_file("SUPIR-mended.safetensors")
    path.write_bytes(with_file.good.read_bytes()[:100_000])
    with pytest.raises(PromptError, match=r"SUPIR-mended\.safetensors") as caught:
        server.run(workflow.copy(), timeout=120)
    assert caught.value.status == 400, "a damaged file is found before anything runs"
    shutil.copyfile(with_file.good, path)
    (image,) = saved(server.run(workflow.copy(), timeout=120))
    assert np.array_equal(pixels(image), pixels(want))
    path.unlink()


def test_a_load_that_failed_while_running_is_not_remembered(
    server, workflow, make_picture, saved, with_file
):
    """A pickle is read only when it runs, so its failure comes from the run itself."""
    import torch
    from safetensors.torch import load_file

    workflow.set("LoadImage", image=server.upload(make_picture(64, 64, seed=14)))
    (want,) = saved(server.run(workflow.copy(), timeout=120))
    path = with_file("SUPIR-mended.ckpt")
    path.write_bytes(b"\x80\x04this is no checkpoint")
    entry = server.wait(server.queue(workflow.copy()), 120)
    error = error_of(entry)
    assert error["node_type"] == "SUPIR_XPU_LoadSUPIR"
    assert error["exception_type"].endswith("supir.errors.CheckpointError")
    assert "SUPIR-mended.ckpt" in error["exception_message"]
    torch.save(load_file(with_file.good), path)
    (image,) = saved(server.run(workflow.copy(), timeout=120))
    assert np.array_equal(pixels(image), pixels(want))
    path.unlink()


def test_a_changed_file_is_loaded_again_and_an_unchanged_one_is_not(
    server, workflow, make_picture, saved, with_file
):
    from safetensors.torch import load_file, save_file

    workflow.set("LoadImage", image=server.upload(make_picture(64, 64, seed=15)))
    path = with_file("SUPIR-changing.safetensors")
    shutil.copyfile(with_file.good, path)
    (first,) = saved(server.run(workflow.copy(), timeout=120))
    workflow.set("SUPIR_XPU_Sample", seed=6)
    assert "file" in cached_nodes(server.run(workflow.copy(), timeout=120))
    tensors = load_file(path)
    tensors = {k: v * 0.5 if "project_modules" in k else v for k, v in tensors.items()}
    save_file({**tensors, "supir_xpu_test.note": tensors[next(iter(tensors))][:1].clone()}, path)
    workflow.set("SUPIR_XPU_Sample", seed=5)
    entry = server.run(workflow.copy(), timeout=120)
    assert "file" not in cached_nodes(entry)
    assert not np.array_equal(pixels(saved(entry)[0]), pixels(first))
    path.unlink()


def test_two_runs_with_one_loaded_supir_do_not_affect_each_other(
    server, workflow, make_picture, saved
):
    """One prompt with two Sample nodes: each picture is what its settings give alone."""
    workflow.set("LoadImage", image=server.upload(make_picture(64, 64, seed=16)))
    names = ["SUPIR_XPU_Sample", "SUPIR_XPU_Decode", "SUPIR_XPU_ColorFix", "SaveImage"]
    ids = [workflow.node(name) for name in names]
    other = {"control_start": 0.0, "control_end": 0.0, "restore_cfg": -1.0, "tile_px": 32}
    other |= {"tile_overlap_px": 0, "sampler": "restore_dpmpp_2m", "steps": 2}
    alone = [saved(server.run(workflow.copy(), timeout=120))[0]]
    second = workflow.copy()
    second[ids[0]]["inputs"].update(other)
    alone.append(saved(server.run(second, timeout=120))[0])
    assert not np.array_equal(pixels(alone[0]), pixels(alone[1]))

    server.post("/free", {"unload_models": True, "free_memory": True})
    both = workflow.copy()
    for node_id in ids:
        node = copy.deepcopy(second[node_id])
        for key, value in node["inputs"].items():
            if isinstance(value, list) and value[0] in ids:
                node["inputs"][key] = [value[0] + "b", value[1]]
        both[node_id + "b"] = node
    entry = server.run(both, timeout=120)
    got = [saved({"outputs": {i: entry["outputs"][i]}})[0] for i in (ids[-1], ids[-1] + "b")]
    for image, want in zip(got, alone, strict=True):
        assert np.array_equal(pixels(image), pixels(want))


def read_png(server, entry):
    (ref,) = [i for out in entry["outputs"].values() for i in out.get("images", [])]
    return Image.open(io.BytesIO(server.view(ref)))


@pytest.mark.newest
def test_a_server_that_keeps_nothing_makes_the_same_picture(
    server, start_server_with, workflow, make_picture, saved
):
    picture = make_picture(64, 64, seed=17)
    workflow.set("LoadImage", image=server.upload(picture))
    (want,) = saved(server.run(workflow.copy(), timeout=120))
    with start_server_with("--cache-none", "--disable-smart-memory") as other:
        workflow.set("LoadImage", image=other.upload(picture))
        for _ in range(2):
            got = read_png(other, other.run(workflow.copy(), timeout=120))
            assert np.array_equal(pixels(got), pixels(want))


LOW_MEMORY = """
import comfy.model_management as mm
mm.vram_state = mm.VRAMState.NO_VRAM
mm.is_device_cpu = lambda device: False
mm.get_free_memory = lambda dev=None, torch_free_too=False: (2**20, 2**20) if torch_free_too else 2**20
NODE_CLASS_MAPPINGS = {}
"""
"""ComfyUI refuses --novram and --lowvram together with --cpu. This sets what --novram sets, in a
server where the CPU plays an accelerator with 1 MiB free."""


def test_weights_that_stay_offloaded_make_the_same_picture_up_to_rounding(
    server, start_server_with, tmp_path, workflow, make_picture, saved
):
    picture = make_picture(64, 64, seed=18)
    workflow.set("LoadImage", image=server.upload(picture))
    workflow.set("SUPIR_XPU_Sample", steps=2, cfg_start=2.0, tile_px=-1)
    (want,) = saved(server.run(workflow.copy(), timeout=120))
    packs = tmp_path / "comfy" / "custom_nodes"
    packs.mkdir(parents=True)
    (packs / "low_memory.py").write_text(LOW_MEMORY, encoding="utf-8")
    with start_server_with() as other:
        workflow.set("LoadImage", image=other.upload(picture))
        got = read_png(other, other.run(workflow.copy(), timeout=120))
        log = other.log_path.read_text(encoding="utf-8", errors="replace")
    assert log.count("loaded partially") >= 4, "text encoder, VAE, UNet and SUPIR stay offloaded"
    gap = np.abs(pixels(got).astype(int) - pixels(want).astype(int))
    assert gap.max() <= 1, "stripes follow the free memory, which may round the last bit otherwise"
