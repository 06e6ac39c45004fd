"""The pack in a real browser on a real ComfyUI, on the classic canvas and on Nodes 2.0."""

from __future__ import annotations

import json

import pytest
from supir_xpu.tests import old_workflows
from supir_xpu.tests.web.editor import example_workflows, read
from supir_xpu.tests.web.simulated_b70 import DRIVER

pytestmark = pytest.mark.web

MANY_STEPS = 8
"""More launches than the device's last crash lets through."""


def test_badges_follow_the_widgets(editor, demo):
    editor.load(demo())
    assert "64\u00d748 px" in editor.wait_badge("SUPIR_XPU_FirstStage", "64\u00d748 px")
    shown = editor.wait_badge("SUPIR_XPU_Sample", "risky")
    assert "< 1 s" in shown
    assert editor.badges("SUPIR_XPU_LoadDemo").count("|") == 0, "a badge without a plan"
    editor.type_into("SUPIR_XPU_FirstStage", "upscale_by", "2")
    editor.wait_badge("SUPIR_XPU_FirstStage", "128\u00d796 px")
    editor.wait_badge("SUPIR_XPU_Sample", "128\u00d796 px")
    assert editor.widget("SUPIR_XPU_FirstStage", "upscale_by") == 2
    editor.shot("badges")


def test_a_refused_run_is_told_marked_and_runs_with_the_safe_plan(editor, demo):
    editor.load(demo(steps=MANY_STEPS))
    editor.wait_badge("SUPIR_XPU_Sample", "blocked")
    panel = editor.panel()
    editor.run()
    toast = editor.toast("Not queued")
    assert "XPU_CRASHED_BEFORE" in toast.inner_text()
    assert "Apply the safe plan" in toast.inner_text()
    node = editor.node_id("SUPIR_XPU_Sample")
    editor.page.wait_for_function("(id) => !!app.lastNodeErrors?.[id]", arg=node)
    marked = "(id) => app.graph.nodes.find((n) => String(n.id) === id).has_errors === true"
    editor.page.wait_for_function(marked, arg=node)
    editor.close_dialogs()
    editor.shot("refused")

    apply = panel.get_by_role("button", name="Apply the safe plan")
    apply.focus()
    apply.press("Enter")
    editor.toast("The safe plan is set")
    assert editor.widget("SUPIR_XPU_Sample", "steps") < MANY_STEPS
    editor.wait_badge("SUPIR_XPU_Sample", "risky")
    apply.wait_for(state="detached")
    editor.server.post("/free", {"unload_models": True, "free_memory": True})  # and its cache
    editor.watch_run()
    editor.run()
    ended, said = editor.wait_run()
    assert ended == "execution_success"
    for words in (
        "First Stage: encoding (1 of 3)",
        "Sample: sampling (1 of 1)",
        "The device rests:",
    ):
        assert words in said
    panel.locator("[data-section=run]").wait_for(state="detached")
    editor.shot("ran")


def test_the_panel_tells_plan_device_and_history_and_shows_nodes(editor, demo):
    editor.load(demo())
    editor.wait_badge("SUPIR_XPU_Sample", "risky")
    panel = editor.panel()
    sample = panel.locator(f"[data-node='{editor.node_id('SUPIR_XPU_Sample')}']")
    sample.wait_for()
    assert "XPU_DRIVER" in panel.inner_text()
    assert "64\u00d748 px" in sample.inner_text()
    device = panel.locator("[data-section=device]", has_text="Arc(TM) Pro B70")
    device.wait_for()
    assert "supir_xpu.yaml" in device.inner_text(), "a simulated device is called one"
    assert "Sample 2944x2944 px" in panel.locator("[data-section=death]").inner_text()
    assert DRIVER in panel.locator("[data-section=history]").inner_text()
    sample.locator("summary").press("Enter")
    sample.get_by_role("button", name="Show node").press("Enter")
    selected = "() => Object.values(app.canvas.selected_nodes ?? {}).map((n) => n.type)"
    assert editor.page.evaluate(selected) == ["SUPIR_XPU_Sample"]
    editor.shot("panel")


def test_the_panel_is_readable_in_light_and_dark_and_speaks_other_languages(editor, demo):
    editor.load(demo())
    panel = editor.panel()
    panel.locator("[data-section=plan] .verdict").wait_for()
    set_setting = "([name, value]) => app.extensionManager.setting.set(name, value)"
    colors = {}
    for palette in ("light", "dark"):
        editor.page.evaluate(set_setting, ["Comfy.ColorPalette", palette])
        editor.page.wait_for_function(IS_READABLE)
        colors[palette] = editor.page.evaluate("() => (" + COLORS + ")().text")
        editor.shot(palette)
    assert colors["light"] != colors["dark"]
    editor.page.evaluate(set_setting, ["Comfy.Locale", "zh"])
    editor.page.evaluate("() => app.extensionManager.command.execute('SupirXpu.CheckPlan')")
    panel.get_by_role("button", name="重新检查").wait_for()
    editor.wait_badge("SUPIR_XPU_Sample", "有风险")
    editor.page.evaluate(set_setting, ["Comfy.Locale", "en"])


def test_the_server_is_asked_again_when_the_connection_is_back(editor, demo):
    editor.load(demo())
    editor.wait_badge("SUPIR_XPU_Sample", "64\u00d748 px")
    with editor.page.expect_response("**/supir_xpu/plan") as reply:
        editor.page.evaluate("() => comfyAPI.api.api.dispatchCustomEvent('reconnected')")
    assert reply.value.status == 200


def test_a_connected_input_is_not_said_to_be_set(editor, demo):
    editor.load(demo(steps=MANY_STEPS))
    editor.wait_badge("SUPIR_XPU_Sample", "blocked")
    editor.page.evaluate(
        """() => {
          const sample = app.graph.nodes.find((n) => n.type === 'SUPIR_XPU_Sample');
          const source = LiteGraph.createNode('PrimitiveNode');
          app.graph.add(source);
          const slot = sample.inputs.findIndex((i) => (i.widget?.name ?? i.name) === 'steps');
          source.connect(0, sample, slot);
          return app.extensionManager.command.execute('SupirXpu.CheckPlan');
        }"""
    )
    part = editor.panel().locator(".safe-plan")
    part.get_by_text("steps (connected)").wait_for()
    apply = part.get_by_role("button", name="Apply the safe plan")
    assert apply.is_disabled()
    editor.page.evaluate("() => app.extensionManager.command.execute('SupirXpu.ApplySafePlan')")
    editor.toast("Not set")
    assert editor.widget("SUPIR_XPU_Sample", "steps") == MANY_STEPS


def test_another_graph_is_not_shown_the_plan_of_the_one_before(editor, demo):
    editor.load(demo(steps=MANY_STEPS))
    editor.wait_badge("SUPIR_XPU_Sample", "blocked")
    apply = editor.panel().get_by_role("button", name="Apply the safe plan")
    apply.wait_for()
    held = []

    def hold(route):
        held.append(route)

    editor.page.route("**/supir_xpu/plan", hold)
    try:
        with editor.page.expect_request("**/supir_xpu/plan"):
            editor.load(demo())
        assert "blocked" not in editor.badges("SUPIR_XPU_Sample")
        apply.wait_for(state="detached")
    finally:
        for route in held:
            route.continue_()
        editor.page.unroute("**/supir_xpu/plan")
    editor.wait_badge("SUPIR_XPU_Sample", "risky")


def test_a_graph_of_unknown_size_is_not_called_safe(editor, demo):
    workflow = demo()
    image = next(n for n in workflow["nodes"] if n["type"] == "LoadImage")
    image["widgets_values"][0] = "not there.png"
    editor.load(workflow)
    verdict = editor.panel().locator(".verdict")
    verdict.get_by_text("not known").wait_for()


@pytest.mark.newest
def test_the_panel_outlives_the_server(editor, demo):
    editor.load(demo())
    part = editor.panel().locator("[data-section=plan]")
    editor.wait_badge("SUPIR_XPU_FirstStage", "64\u00d748 px")
    editor.zoom_to("SUPIR_XPU_FirstStage", 1.5)
    editor.server.stop()
    try:
        part.get_by_text("The server does not answer").wait_for()
        editor.type_into("SUPIR_XPU_FirstStage", "upscale_by", "2")
    finally:
        editor.server.restart()
    editor.wait_badge("SUPIR_XPU_FirstStage", "128\u00d796 px")
    editor.watch_run()
    editor.run()
    assert editor.wait_run()[0] == "execution_success"


def test_loading_the_page_again_keeps_the_widgets(editor, demo):
    editor.load(demo(steps=3, upscale_by=1.5))
    editor.wait_badge("SUPIR_XPU_FirstStage", "96\u00d772 px")
    before = editor.values()
    assert before[editor.node_id("SUPIR_XPU_Sample")][2] == 3
    kept = "(n) => Object.values(localStorage).concat(Object.values(sessionStorage))"
    editor.page.wait_for_function(
        kept + ".some((text) => text.includes('SUPIR_XPU_Sample') && text.includes(n))",
        arg="1.5",
    )
    editor.open()
    editor.page.wait_for_function(
        "() => app.graph.nodes.some((n) => n.type === 'SUPIR_XPU_Sample')"
    )
    assert editor.values() == before
    editor.wait_badge("SUPIR_XPU_FirstStage", "96\u00d772 px")


def test_an_old_workflow_is_converted_and_opened(editor, tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps(old_workflows.structure_a()), encoding="utf-8")
    part = editor.panel().locator("[data-section=convert]")
    part.wait_for()
    part.locator("input[type=file]").set_input_files(path)
    editor.toast("old.json was converted and opened")
    assert "old node(s) converted" in part.locator(".report").inner_text()
    types = editor.page.evaluate("() => app.graph.nodes.map((n) => n.type)")
    assert "SUPIR_XPU_Sample" in types
    assert not [name for name in types if name.startswith("SUPIR_") and "XPU" not in name]
    editor.close_dialogs()


@pytest.mark.parametrize("path", example_workflows(), ids=lambda path: path.stem)
def test_examples_open_completely_and_keep_their_values(editor, path):
    workflow = read(path)
    editor.load(workflow)
    assert len(editor.values()) == len(workflow["nodes"])
    missing = """() => { const all = (graph) => graph.nodes.flatMap((n) => n.subgraph ? all(n.subgraph)
      : LiteGraph.registered_node_types[n.type] ? [] : [n.type]); return all(app.graph); }"""
    assert editor.page.evaluate(missing) == []
    first = editor.values()
    for node in workflow["nodes"]:
        if node["type"].startswith("SUPIR_XPU_"):
            assert first[str(node["id"])] == node["widgets_values"], node["type"]
    editor.load(editor.page.evaluate("() => JSON.parse(JSON.stringify(app.graph.serialize()))"))
    again = editor.values()
    shows_text = {str(n["id"]) for n in workflow["nodes"] if n["type"] == "PreviewAny"}
    assert {k: v for k, v in again.items() if k not in shows_text} == {
        k: v for k, v in first.items() if k not in shows_text
    }  # the state of a text view is ComfyUI's own, and differs there
    editor.shot(f"example_{path.stem}")


def test_nothing_of_ours_complained(editor):
    """Comes last in each renderer: everything above was watched."""
    assert editor.asked.count("plan") >= 1
    assert editor.complaints == []


COLORS = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const panel = document.querySelector('.supir-xpu-panel');
  let element = panel;
  let back = [0, 0, 0, 0];
  while (element && !back[3]) {
    const found = parse(getComputedStyle(element).backgroundColor);
    back = found.length === 3 ? [...found, 1] : found;
    element = element.parentElement;
  }
  return { text: parse(getComputedStyle(panel).color), back };
}"""

IS_READABLE = (
    """() => {
  const light = (rgb) => rgb.slice(0, 3).map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const { text, back } = ("""
    + COLORS
    + """)();
  const [low, high] = [light(text), light(back)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05) >= 4.5;
}"""
)
"""Text and background of the panel are at least 4.5:1 apart (WCAG 2.2, 1.4.3)."""
