"""One real ComfyUI server for all tests of this folder, with the pack in an awkwardly named folder."""

from __future__ import annotations

import copy
import io
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

PACK_NAME = "süpir xpu 1.0 (テスト)"


def start(base, *extra_args, pack_name=PACK_NAME, pack_root=ROOT):
    """Start a server with the front end its version asks for, threads as ComfyUI chooses them."""
    from host_server import start_server

    front_end = os.environ.get("COMFYUI_FRONT_END")
    if front_end:
        extra_args = ("--front-end-root", front_end, *extra_args)
    alone = "PYTEST_XDIST_WORKER" not in os.environ  # else the other test process needs a core
    free = alone and os.environ.get("SUPIR_XPU_TEST_THREADS")
    env = {"OMP_NUM_THREADS": None} if free else {}
    root = os.environ["COMFYUI_ROOT"]
    return start_server(root, pack_root, base, extra_args, pack_name=pack_name, env=env)


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    with start(tmp_path_factory.mktemp("comfy dir")) as running:
        yield running


@pytest.fixture
def start_server_with(tmp_path):
    """``with start_server_with("--cache-none") as server``: one more server, with other flags."""
    return lambda *extra_args, **options: start(tmp_path / "comfy", *extra_args, **options)


class Workflow:
    """The demo workflow as an API prompt, with short names for its nodes."""

    def __init__(self):
        path = ROOT / "example_workflows" / "api" / "demo_restore.json"
        self.prompt = json.loads(path.read_text(encoding="utf-8"))

    def node(self, class_type):
        return next(k for k, v in self.prompt.items() if v["class_type"] == class_type)

    def set(self, class_type, **inputs):
        self.prompt[self.node(class_type)]["inputs"].update(inputs)
        return self

    def insert_after(self, class_type, new_id, new_class, input_name, **inputs):
        """Put a node between a node's first output and everything that reads it."""
        source = [self.node(class_type), 0]
        for node in self.prompt.values():
            for name, value in node["inputs"].items():
                if value == source:
                    node["inputs"][name] = [new_id, 0]
        node = {"class_type": new_class, "inputs": {input_name: source, **inputs}}
        self.prompt[new_id] = {**node, "_meta": {"title": new_class}}
        return self

    def copy(self):
        return copy.deepcopy(self.prompt)


@pytest.fixture
def workflow():
    flow = Workflow()
    flow.set("SUPIR_XPU_FirstStage", upscale_by=1.0)
    quick = {"steps": 1, "cfg_start": 1.0, "cfg_end": 1.0, "seed": 5}
    flow.set("SUPIR_XPU_Sample", **quick)
    return flow


@pytest.fixture
def make_picture(tmp_path):
    def make(width, height, mode="RGB", seed=0):
        channels = {"RGB": 3, "RGBA": 4, "L": 1}[mode]
        rng = np.random.default_rng(seed)
        data = rng.integers(0, 255, (height, width, channels), dtype=np.uint8)
        path = tmp_path / f"picture_{mode}_{width}x{height}_{seed}.png"
        Image.fromarray(data[..., 0] if mode == "L" else data, mode).save(path)
        return path

    return make


@pytest.fixture
def saved(server):
    """Return the saved pictures of a history entry as PIL images."""

    def read(entry):
        images = [i for out in entry["outputs"].values() for i in out.get("images", [])]
        return [Image.open(io.BytesIO(server.view(i))) for i in images if i["type"] == "output"]

    return read
