"""The guard as an API client meets it, on real servers.

One server has a simulated device: facts in ``supir_xpu.yaml`` make the pack plan, judge and record as
on an Arc Pro B70; the arithmetic runs on this processor. Its profile is made stricter and its rest
shorter than the bundled one, so that the tiny model reaches the limits.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
import urllib.request
from pathlib import Path

import pytest

pytestmark = pytest.mark.host

ROOT = Path(__file__).resolve().parents[2]
GAP_S = 1.5
STRICT_B70 = f"""
facts:
  kind: xpu
  family: battlemage
  os: Windows
  driver: "32.0.101.8629"
  name: Intel(R) Arc(TM) Pro B70 Graphics
  total_bytes: 34359738368
  free_bytes: 30064771072
  max_alloc_bytes: 4294967296
profiles:
  battlemage-windows-known-bad:
    base_points: 5
    gap_s: {GAP_S}
    heavy_gap_s: {GAP_S}
    load_settle_s: 0
    image_settle_s: 0
"""
MANY_STEPS = 250


def launch(base, *args):
    from host_server import start_server

    front_end = os.environ.get("COMFYUI_FRONT_END")
    if front_end:
        args = ("--front-end-root", front_end, *args)
    return start_server(os.environ["COMFYUI_ROOT"], ROOT, base, args)


@pytest.fixture(scope="module")
def strict(tmp_path_factory):
    base = tmp_path_factory.mktemp("strict") / "comfy"
    (base / "user").mkdir(parents=True)
    (base / "user" / "supir_xpu.yaml").write_text(STRICT_B70, encoding="utf-8")
    with launch(base) as server:
        yield server


def rows(server, sql):
    path = server.base_dir / "user" / "supir_xpu_journal.sqlite3"
    db = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=5)
    try:
        return db.execute(sql).fetchall()
    finally:
        db.close()


@pytest.fixture
def small(strict, workflow, make_picture):
    workflow.set("LoadImage", image=strict.upload(make_picture(64, 64)))
    return workflow


def test_a_refused_prompt_tells_why_and_runs_with_the_suggested_change(strict, small):
    node = small.node("SUPIR_XPU_Sample")
    small.set("SUPIR_XPU_Sample", steps=MANY_STEPS)
    reply = strict.post("/prompt", {"prompt": small.prompt})
    assert reply.status == 400
    body = reply.json()
    assert set(body["node_errors"]) == {node}
    found = body["node_errors"][node]
    assert found["class_type"] == "SUPIR_XPU_Sample"
    assert found["dependent_outputs"] == [small.node("SaveImage")]
    extra = {e["extra_info"]["code"]: e["extra_info"] for e in found["errors"]}
    assert {"XPU_DRIVER", "XPU_LAUNCHES"} <= set(extra)
    launches = extra["XPU_LAUNCHES"]
    assert launches["launches"] >= 150_000
    assert launches["score"] >= 6
    assert launches["action"]
    assert launches["input_name"] == "steps"
    assert "XPU_LAUNCHES" in body["error"]["details"]
    assert strict.post("/api/prompt", {"prompt": small.prompt}).status == 400
    changes = body["error"]["extra_info"]["suggestion"]
    assert changes
    for change in changes:
        small.prompt[change["node_id"]]["inputs"][change["input_name"]] = change["value"]
    strict.run(small.prompt, timeout=300)


def test_a_prompt_that_is_let_through_is_not_altered(strict, small):
    small.set("SUPIR_XPU_Sample", seed=71)
    sent = small.copy()
    entry = strict.run(small.prompt, timeout=300)
    assert entry["prompt"][2] == sent


def test_off_never_refuses_and_always_records(strict, small):
    before = rows(strict, "SELECT COUNT(*) FROM phases WHERE phase='sample'")[0][0]
    for node in small.prompt.values():
        if "risk" in node["inputs"]:
            node["inputs"]["risk"] = "off"
    small.set("SUPIR_XPU_Sample", steps=MANY_STEPS, seed=72)
    prompt_id = strict.queue(small.prompt)
    end = time.monotonic() + 120
    while rows(strict, "SELECT COUNT(*) FROM phases WHERE phase='sample'")[0][0] == before:
        assert time.monotonic() < end, strict.log_tail()
        time.sleep(0.05)
    strict.cancel(prompt_id)
    strict.wait(prompt_id, 60)
    last = rows(strict, "SELECT result, planned FROM phases WHERE phase='sample' ORDER BY id")[-1]
    assert last[0] == "cancel"
    assert last[1] >= 150_000


def test_jobs_in_the_queue_rest_between_each_other_and_say_so(strict, small):
    first_id = rows(strict, "SELECT COALESCE(MAX(id), 0) FROM phases")[0][0]
    ids = []
    for seed in (81, 82, 83):
        small.set("SUPIR_XPU_Sample", seed=seed)
        ids.append(strict.queue(small.copy()))
    entries = [strict.wait(prompt_id, 300) for prompt_id in ids]
    assert [e["status"]["status_str"] for e in entries] == ["success"] * 3
    sql = f"SELECT run_id, MIN(opened), MAX(closed) FROM phases WHERE id>{first_id} GROUP BY run_id ORDER BY 2"
    runs = rows(strict, sql)
    assert len(runs) >= 3
    for before, after in zip(runs, runs[1:], strict=False):
        assert after[1] - before[2] >= GAP_S - 0.05
    outputs = [out for entry in entries for out in entry["outputs"].values()]
    reports = [out["supir_xpu"][0] for out in outputs if "supir_xpu" in out]
    waited = [report for report in reports if report["waits_s"] > 0]
    assert waited  # a busy computer may rest long enough between some of them by itself
    for report in waited:
        assert report["waits_s"] <= GAP_S
        assert any("before the run" in change for change in report["changes"])


def test_a_plan_without_queueing_is_what_the_run_reports(strict, small):
    small.set("SUPIR_XPU_Sample", seed=91)
    answer = strict.post("/supir_xpu/plan", {"prompt": small.prompt})
    assert answer.status == 200
    plan = answer.json()
    assert plan["refused"] is False
    outputs = strict.run(small.prompt, timeout=300)["outputs"]
    ours = [n for n in plan["nodes"] if n in outputs]
    assert small.node("SUPIR_XPU_Sample") in ours
    for node in ours:
        ran = outputs[node]["supir_xpu"][0]
        assert ran["plan"] == plan["nodes"][node]["plan"], node
        assert ran["severity"] == plan["nodes"][node]["severity"]
    small.set("SUPIR_XPU_Sample", steps=MANY_STEPS)
    assert strict.post("/supir_xpu/plan", {"prompt": small.prompt}).json()["refused"] is True
    for body in ({}, {"prompt": {}}, {"prompt": {"1": {"class_type": "x", "inputs": {}}}}, []):
        assert strict.post("/supir_xpu/plan", body).status == 400


def test_a_target_that_does_not_need_the_risky_node_is_queued(strict, small):
    small.set("SUPIR_XPU_Sample", steps=MANY_STEPS)
    picture = [small.node("LoadImage"), 0]
    small.prompt["look"] = {"class_type": "PreviewImage", "inputs": {"images": picture}}
    body = {"prompt": small.prompt, "partial_execution_targets": ["look"]}
    reply = strict.post("/prompt", body)
    assert reply.status == 200
    assert strict.wait(reply.json()["prompt_id"], 60)["status"]["status_str"] == "success"
    body["partial_execution_targets"] = ["look", small.node("SaveImage")]
    assert strict.post("/prompt", body).status == 400


def test_a_prompt_comfyui_refuses_gets_comfyuis_answer(strict, small):
    small.set("SUPIR_XPU_Sample", steps=MANY_STEPS)
    del small.prompt[small.node("SUPIR_XPU_Sample")]["inputs"]["model"]
    body = strict.post("/prompt", {"prompt": small.prompt}).json()
    errors = body["node_errors"][small.node("SUPIR_XPU_Sample")]["errors"]
    assert [e["type"] for e in errors] == ["required_input_missing"]


def test_status_tells_device_limits_and_files(strict, server):
    body = strict.get("/api/supir_xpu/status").json()
    assert body["device"]["driver"] == "32.0.101.8629"
    assert body["simulated"] is True
    assert body["limits"]["gap_s"] == GAP_S
    assert body["profile"]["base_points"] == 5
    assert body["settings"]["found"] is True
    assert body["history"]["last_end"] is not None
    body = server.get("/supir_xpu/status").json()
    assert body["device"]["kind"] == "cpu"
    assert body["journal"]["path"] is None


def raw(server, body, content_type="application/json"):
    request = urllib.request.Request(
        server.base + "/prompt", body, {"Content-Type": content_type}, method="POST"
    )
    reply = server._send(request)
    return reply.status, reply.body


BODIES = [
    (b"", "application/json"),
    (b"SUPIR", "application/json"),
    (b'{"prompt": "SUPIR"}', "application/json"),
    (b'{"prompt": null, "x": "SUPIR"}', "application/json"),
    (b'["SUPIR"]', "application/json"),
    (b'{"x": "SUPIR"}', "text/plain"),
    (b'{"prompt": {}, "x": "SUPIR"}', "application/json"),
    (b'{"prompt": {"1": {}}, "x": "SUPIR"}', "application/json"),
    (b'{"prompt": {"1": {"class_type": "SUPIR_XPU_None", "inputs": {}}}}', "application/json"),
    (b'{"prompt": {"1": {"class_type": 5, "inputs": []}}, "x": "SUPIR"}', "application/json"),
    (b'{"prompt": {"1": ["SUPIR"]}}', "application/json"),
    (b'{"x": "SUPIR\xff"}', "application/json"),
    (b'{"x": "SUPIR"}', "application/json; charset=nothing"),
    (b"[" * 50_000 + b"SUPIR", "application/json"),
]


@pytest.mark.newest
def test_bodies_that_are_no_prompts_get_comfyuis_own_answers(strict, tmp_path):
    """Compared with the same ComfyUI without any custom node."""
    with launch(tmp_path / "plain", "--disable-all-custom-nodes") as plain:
        for body, content_type in BODIES:
            assert raw(strict, body, content_type) == raw(plain, body, content_type), body[:60]


def test_constants_that_cannot_work_are_marked_on_the_node(server, workflow, make_picture):
    workflow.set("LoadImage", image=server.upload(make_picture(64, 64)))
    node = workflow.node("SUPIR_XPU_Sample")
    for value, words in ((7, "at least 8 latent cells"), (99_999, "goes from -1 to 8192")):
        workflow.set("SUPIR_XPU_Sample", tile_px=value)
        reply = server.post("/prompt", {"prompt": workflow.prompt})
        assert reply.status == 400
        (error,) = reply.json()["node_errors"][node]["errors"]
        assert error["extra_info"]["input_name"] == "tile_px"
        assert words in error["details"]
    workflow.set("SUPIR_XPU_Sample", tile_px=0, steps=0)
    errors = server.post("/prompt", {"prompt": workflow.prompt}).json()["node_errors"][node]
    assert [e["type"] for e in errors["errors"]] == ["value_smaller_than_min"]


def test_a_side_beyond_the_limit_is_refused_on_any_device(server, workflow, make_picture):
    workflow.set("LoadImage", image=server.upload(make_picture(2100, 3)))
    workflow.set("SUPIR_XPU_FirstStage", upscale_by=32.0)
    body = server.post("/prompt", {"prompt": workflow.prompt}).json()
    node = workflow.node("SUPIR_XPU_FirstStage")
    error = body["node_errors"][node]["errors"][0]
    assert error["extra_info"] == {"code": "SETTINGS_INVALID", "input_name": "upscale_by"}
    assert "65536" in error["details"]


def test_risk_check_and_cooldown_pass_on_what_comes_in(server, workflow, make_picture, saved):
    workflow.set("LoadImage", image=server.upload(make_picture(70, 50, seed=9)))
    workflow.set("SUPIR_XPU_Sample", seed=101)
    want = saved(server.run(workflow.copy(), timeout=300))[0]
    widgets = {"upscale_by": 2.0, "steps": 20, "sampler": "restore_edm", "tile_px": 0}
    widgets |= {"tile_overlap_px": 256, "risk": "warn"}
    workflow.insert_after("LoadImage", "check", "SUPIR_XPU_RiskCheck", "anything", **widgets)
    workflow.insert_after("SUPIR_XPU_Sample", "rest", "SUPIR_XPU_Cooldown", "anything", seconds=0.5)
    entry = server.run(workflow.prompt, timeout=300)
    assert saved(entry)[0].tobytes() == want.tobytes()
    assert "140x100 px" in entry["outputs"]["check"]["text"][0]
    assert "Waited 0.5 s" in entry["outputs"]["rest"]["text"][0]
    again = server.run(workflow.copy(), timeout=300)
    messages = dict(again["status"]["messages"])
    assert {"check", "rest", workflow.node("SUPIR_XPU_Sample")} <= set(
        messages["execution_cached"]["nodes"]
    )
    assert json.dumps(again["status"]["status_str"]) == '"success"'
