"""ComfyUI's editor in a real browser, as the tests use it. Waits for conditions, never for a time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
SHOTS = ROOT / "output" / "web"
DOCS = ROOT / "docs" / "screenshots"
DOCS_VARIABLE = "SUPIR_XPU_DOCS_SCREENSHOTS"
"""Set to 1 to renew the pictures of the README from the newest host."""

MOST_DOCS_BYTES = 150_000
TIMEOUT_MS = 120_000
"""For every wait: a page takes 5 s to load, and many times that where others use the processor."""

OURS = ("/extensions/supir-xpu/", "supir_xpu")
SIZE = {"width": 1400, "height": 900}

READY = """() => !!(window.app?.extensionManager?.workflow?.activeWorkflow?.changeTracker
  && window.app.graph?.nodes?.length && window.LiteGraph?.registered_node_types?.SUPIR_XPU_Sample
  && window.app.extensionManager.getSidebarTabs().some((tab) => tab.id === 'supir-xpu'))"""

BADGES = """(type) => app.graph.nodes.filter((n) => n.type === type).flatMap((n) => n.badges
  .map((b) => (typeof b === 'function' ? b() : b).text).filter(Boolean)).join(' | ')"""


class Editor:
    """One page. ``renderer`` is ``canvas`` or ``nodes2``.

    Attributes:
        complaints: console errors, failed requests and exceptions that name this pack.
    """

    def __init__(self, server: Any, browser: Any, renderer: str) -> None:
        self.server = server
        self.renderer = renderer
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page: Any = browser.new_page(viewport=SIZE)
        self.page.set_default_timeout(TIMEOUT_MS)
        self.page.on("console", self._on_console)
        self.page.on("pageerror", self._on_page_error)
        self.page.on("response", self._on_response)
        self.version = server.get("/system_stats").json()["system"]["comfyui_version"]

    def __enter__(self) -> Editor:
        for name, value in (
            ("Comfy.TutorialCompleted", True),  # else the template browser covers the page
            ("Comfy.VueNodes.Enabled", self.renderer == "nodes2"),
            ("Comfy.Locale", "en"),
            ("Comfy.ColorPalette", "dark"),
        ):
            self.set(name, value)
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.page.close()

    def set(self, name: str, value: Any) -> None:
        """Set one of the user's settings on the server; a page shows it after loading."""
        reply = self.server.post(f"/settings/{name}", value)
        assert reply.status == 200, reply

    def open(self) -> None:
        """Load the page and wait until it can be worked with."""
        self.page.goto(self.server.base, wait_until="domcontentloaded")
        self.page.wait_for_function(READY)

    def load(self, workflow: dict[str, Any]) -> None:
        """Open a workflow as if from a file, in place of the one on screen."""
        self.page.evaluate("(w) => app.loadGraphData(w)", workflow)
        self.close_dialogs()
        if "SUPIR_XPU_Sample" in {node["type"] for node in workflow["nodes"]}:
            self.zoom_to("SUPIR_XPU_Sample")

    def close_dialogs(self) -> None:
        """Close what ComfyUI put in front of the graph."""
        dialogs = self.page.locator(".p-dialog-mask")
        while dialogs.count():
            self.page.keyboard.press("Escape")
            self.page.wait_for_timeout(50)

    def values(self) -> dict[str, Any]:
        """Return widgets_values of every node as a saved workflow has them, by node id."""
        nodes = self.page.evaluate("() => app.graph.serialize().nodes")
        return {str(node["id"]): node.get("widgets_values") for node in nodes}

    def widget(self, node_type: str, name: str) -> Any:
        """Return the value of a widget of the first node of a type."""
        code = """([type, name]) => app.graph.nodes.find((n) => n.type === type)
            .widgets.find((w) => w.name === name).value"""
        return self.page.evaluate(code, [node_type, name])

    def badges(self, node_type: str) -> str:
        """Return the texts of a node's badges, as the front end holds them."""
        return self.page.evaluate(BADGES, node_type)

    def wait_badge(self, node_type: str, words: str) -> str:
        """Wait until a node's badges hold some words; on Nodes 2.0 also until they are on screen."""
        code = f"([type, words]) => ({BADGES})(type).includes(words)"
        self.page.wait_for_function(code, arg=[node_type, words])
        if self.renderer == "nodes2":
            node_id = self.node_id(node_type)
            self.page.locator(f"[data-node-id='{node_id}']", has_text=words).wait_for()
        return self.badges(node_type)

    def node_id(self, node_type: str) -> str:
        """Return the id of the first node of a type."""
        code = "(type) => String(app.graph.nodes.find((n) => n.type === type).id)"
        return self.page.evaluate(code, node_type)

    def type_into(self, node_type: str, name: str, text: str) -> None:
        """Enter a number into a widget as a user does in this renderer."""
        if self.renderer == "nodes2":
            node = self.page.locator(f"[data-node-id='{self.node_id(node_type)}']")
            box = node.get_by_label(name, exact=True).locator("input").first
            box.fill(text)
            box.press("Enter")
            return
        x, y = self.page.evaluate(
            """([type, name]) => {
              const node = app.graph.nodes.find((n) => n.type === type);
              const widget = node.widgets.find((w) => w.name === name);
              const at = [node.pos[0] + node.size[0] / 2, node.pos[1] + widget.last_y + 10];
              const box = app.canvas.canvas.getBoundingClientRect();
              const [x, y] = app.canvas.ds.convertOffsetToCanvas(at);
              return [x + box.left, y + box.top];
            }""",
            [node_type, name],
        )
        self.page.mouse.dblclick(x, y)
        box = self.page.locator(".graphdialog input")
        box.fill(text)
        box.press("Enter")

    def run(self) -> None:
        """Queue the workflow with the front end's own shortcut."""
        self.page.evaluate("() => document.activeElement?.blur()")
        self.page.keyboard.press("Control+Enter")

    def panel(self) -> Any:
        """Open our panel if it is closed, and return it."""
        self.page.evaluate(
            """() => { const tabs = app.extensionManager.sidebarTab;
              if (tabs.activeSidebarTabId !== 'supir-xpu') tabs.toggleSidebarTab('supir-xpu'); }"""
        )
        panel = self.page.locator(".supir-xpu-panel")
        panel.wait_for()
        return panel

    def watch_run(self) -> None:
        """Start to note what the panel says about a run, and how the run ends."""
        self.page.evaluate(
            """() => {
              const api = window.comfyAPI.api.api;
              const seen = (window.supirSeen = { said: [], ended: [] });
              const note = () => {
                const text = document.querySelector('.supir-xpu-panel [data-section=run]')?.innerText;
                if (text && seen.said.at(-1) !== text) seen.said.push(text);
              };
              const panel = document.querySelector('.supir-xpu-panel');
              new MutationObserver(note).observe(panel, { childList: true, subtree: true });
              for (const name of ['execution_success', 'execution_error', 'execution_interrupted'])
                api.addEventListener(name, () => seen.ended.push(name));
            }"""
        )

    def wait_run(self) -> tuple[str, str]:
        """Wait for the end of a watched run; return how it ended and all the panel said."""
        self.page.wait_for_function("() => window.supirSeen.ended.length > 0")
        seen = self.page.evaluate("() => window.supirSeen")
        return seen["ended"][0], "\n".join(seen["said"])

    def toast(self, words: str) -> Any:
        """Wait for a short message that holds some words."""
        toast = self.page.locator(".p-toast-message", has_text=words).first
        toast.wait_for()
        return toast

    def zoom_to(self, node_type: str, scale: float = 0.85) -> None:
        """Bring a node to the middle, large enough for the canvas to draw text."""
        self.page.evaluate(
            """([type, scale]) => {
              const node = app.graph.nodes.find((n) => n.type === type);
              app.canvas.ds.scale = scale;
              app.canvas.centerOnNode(node);
              app.canvas.setDirty(true, true);
              return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
            }""",
            [node_type, scale],
        )

    def shot(self, name: str) -> None:
        """Keep a picture of the page under output/web, and of the chosen ones for the README."""
        SHOTS.mkdir(parents=True, exist_ok=True)
        path = SHOTS / f"{self.version}_{self.renderer}_{name}.png"
        self.page.screenshot(path=path)
        if os.environ.get(DOCS_VARIABLE) and (self.renderer, name) in IN_README:
            DOCS.mkdir(parents=True, exist_ok=True)
            small = Image.open(path).convert("RGB").quantize(128)
            target = DOCS / f"{name}.png"
            small.save(target, optimize=True)
            assert target.stat().st_size <= MOST_DOCS_BYTES, target

    def _on_console(self, message: Any) -> None:
        where = message.location.get("url", "")
        if where.startswith("http") and not where.startswith(self.server.base):
            return  # the front end's own questions to other sites, which may name our nodes
        text = f"{message.text} {where}".lower()
        if message.type == "error" and any(name in text for name in OURS):
            self.complaints.append(f"{message.text} ({where})")

    def _on_page_error(self, error: Any) -> None:
        if any(name in f"{error} {error.stack}".lower() for name in OURS):
            self.complaints.append(f"{error}\n{error.stack}")

    def _on_response(self, response: Any) -> None:
        if "/supir_xpu/" in response.url:
            self.asked.append(response.url.rpartition("/")[2])


IN_README = {("canvas", "refused"), ("canvas", "panel"), ("canvas", "badges")}
"""Renderer and name of the pictures the README shows."""


def example_workflows() -> list[Path]:
    """Return the example workflows ComfyUI lists for this pack."""
    return sorted((ROOT / "example_workflows").glob("*.json"))


def read(path: Path) -> dict[str, Any]:
    """Return a workflow file."""
    return json.loads(path.read_text(encoding="utf-8"))
