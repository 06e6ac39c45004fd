"""docs/api_client.py against the real server, and docs/api.md against the routes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

pytestmark = pytest.mark.host

ROOT = Path(__file__).resolve().parents[2]
CLIENT = ROOT / "docs" / "api_client.py"


def call(*words):
    return subprocess.run(
        [sys.executable, "-S", "-I", str(CLIENT), *map(str, words)], capture_output=True, text=True
    )


@pytest.fixture
def prompt_file(workflow, tmp_path):
    def write(**changed):
        workflow.set("SUPIR_XPU_Sample", **changed)
        path = tmp_path / "prompt.json"
        path.write_text(json.dumps(workflow.prompt), encoding="utf-8")
        return path

    return write


def test_the_client_plans_uploads_queues_follows_and_fetches(
    server, prompt_file, make_picture, tmp_path
):
    results = tmp_path / "results"
    ended = call(prompt_file(), make_picture(50, 40, seed=31), results, server.base)
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"planned: \d+ launches", ended.stdout)
    (saved,) = results.iterdir()
    assert f"saved {saved}" in ended.stdout
    with Image.open(saved) as picture:
        assert picture.size == (50, 40)


def test_a_refusal_ends_the_client_with_its_reasons(server, prompt_file, make_picture, tmp_path):
    ended = call(prompt_file(tile_px=5), make_picture(20, 20), tmp_path / "out", server.base)
    assert ended.returncode == 1
    assert "set tile_px to 0" in ended.stderr
    assert not (tmp_path / "out").exists()


def test_the_page_names_every_route_and_no_other(server):
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    told = set(re.findall(r"^### \w+ (/supir_xpu/\w+)$", page, re.MULTILINE))
    assert told == set(server.get("/supir_xpu/status").json()["routes"])


def test_the_answers_have_the_keys_the_page_names(server, workflow, make_picture):
    workflow.set("LoadImage", image=server.upload(make_picture(20, 20)))
    answer = server.post("/supir_xpu/plan", {"prompt": workflow.prompt}).json()
    assert set(answer) >= {"refused", "nodes", "size_unknown", "suggestion", "suggestion_text"}
    assert set(answer["total"]) >= {"seconds", "launches", "severity"}


def test_files_of_the_wrong_format_and_silent_servers_are_said_in_a_line(make_picture, tmp_path):
    picture = make_picture(8, 8)
    example = ROOT / "example_workflows" / "demo_restore.json"
    for prompt, words in (
        (example, "not in API format"),
        (ROOT / "example_workflows" / "api" / "demo_restore.json", "does not answer"),
    ):
        done = call(prompt, picture, tmp_path, "http://127.0.0.1:9")
        assert done.returncode == 1
        assert words in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
