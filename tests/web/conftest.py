"""One real ComfyUI server and one real browser for all tests of this folder.

The server's device is simulated: facts in ``supir_xpu.yaml`` make the pack plan and judge as on an Arc
Pro B70, with shorter rests than the bundled profile; the arithmetic runs on this processor. Its
journal remembers a made-up crash, so that jobs small enough for a test are refused.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from supir_xpu.tests.web.simulated_b70 import B70, LARGEST_STEPS, remember_crash

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    from host_server import start_server

    base = tmp_path_factory.mktemp("web") / "comfy"
    (base / "user").mkdir(parents=True)
    (base / "user" / "supir_xpu.yaml").write_text(B70, encoding="utf-8")
    front_end = os.environ.get("COMFYUI_FRONT_END")
    extra = ("--front-end-root", front_end) if front_end else ()
    with start_server(os.environ["COMFYUI_ROOT"], ROOT, base, extra) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def crash(server, picture):
    """A crash of a job of ``2 * LARGEST_STEPS`` steps, as if found after the machine came back."""
    path = ROOT / "example_workflows" / "api" / "demo_restore.json"
    prompt = json.loads(path.read_text(encoding="utf-8"))
    kinds = {node["class_type"]: key for key, node in prompt.items()}
    prompt[kinds["LoadImage"]]["inputs"]["image"] = picture
    prompt[kinds["SUPIR_XPU_FirstStage"]]["inputs"]["upscale_by"] = 1.0
    prompt[kinds["SUPIR_XPU_Sample"]]["inputs"]["steps"] = LARGEST_STEPS
    plan = server.post("/supir_xpu/plan", {"prompt": prompt}).json()
    launches = plan["nodes"][kinds["SUPIR_XPU_Sample"]]["plan"]["launches_total"]
    remember_crash(server.base_dir / "user" / "supir_xpu_journal.sqlite3", 2 * launches)


@pytest.fixture(scope="module")
def browser():
    """The system's Chromium. Of module scope: Playwright occupies the thread's event loop."""
    import browser as tool
    from playwright.sync_api import sync_playwright

    path = tool.find_browser()
    assert path is not None, f"No browser was found: {tool.ADVICE}."
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield running
        running.close()


@pytest.fixture(scope="module", params=["canvas", "nodes2"])
def editor(request, server, browser):
    """ComfyUI's editor with one of its two renderers."""
    from supir_xpu.tests.web.editor import Editor

    with Editor(server, browser, request.param) as opened:
        yield opened


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Keep a picture of the page a test failed on."""
    report = yield
    editor = item.funcargs.get("editor") if hasattr(item, "funcargs") else None
    if report.when == "call" and report.failed and editor is not None:
        editor.shot(f"failed_{item.originalname}")
    return report


@pytest.fixture(scope="module")
def picture(server, tmp_path_factory):
    """The name of a picture of 64x48 px the server has."""
    path = tmp_path_factory.mktemp("picture") / "small.png"
    data = np.random.default_rng(0).integers(0, 255, (48, 64, 3), dtype=np.uint8)
    Image.fromarray(data).save(path)
    return server.upload(path)


@pytest.fixture(scope="module")
def seeds():
    """Seeds nobody used before, so that no run is answered from ComfyUI's cache."""
    return itertools.count(1000)


@pytest.fixture
def demo(picture, seeds):
    """The demo workflow as the editor saves it, small and quick; ``demo(steps=60)`` sets widgets."""
    path = ROOT / "example_workflows" / "demo_restore.json"

    def make(steps=2, upscale_by=1.0):
        workflow = json.loads(path.read_text(encoding="utf-8"))
        nodes = {node["type"]: node for node in workflow["nodes"]}
        nodes["LoadImage"]["widgets_values"][0] = picture
        nodes["SUPIR_XPU_FirstStage"]["widgets_values"][0] = upscale_by
        values = nodes["SUPIR_XPU_Sample"]["widgets_values"]
        values[:3] = [next(seeds), "fixed", steps]
        return workflow

    return make
