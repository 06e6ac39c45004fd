"""Breadcrumbs of ``run.py stress`` that are damaged, and a loop whose parent is gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from supir_xpu.xpu import boot

ELSEWHERE = {"boot_id": "linux:other", "pid": 7, "started": "ticks:1", "space": ""}
TIME = {"time": 1.7e9}
DAMAGED_HEADS = [
    {"owner": owner, "device": "xpu:0", **TIME}
    for owner in (
        5, None, [], "x", {}, {**ELSEWHERE, "boot_id": 5}, {**ELSEWHERE, "boot_id": ""},
        {**ELSEWHERE, "boot_id": "zzz"}, {**ELSEWHERE, "pid": "7"}, {**ELSEWHERE, "pid": 10**30},
        {**ELSEWHERE, "pid": True}, {**ELSEWHERE, "started": None}, {**ELSEWHERE, "space": []},
        {**ELSEWHERE, "more": ""}, {"boot_id": "linux:other"},
    )
] + [
    {"owner": ELSEWHERE, "device": "xpu:0", "time": "x"},
    {"owner": ELSEWHERE, "device": "xpu:0", "time": 1e300},
    {"owner": ELSEWHERE, "device": ["xpu:0"], **TIME},
]  # fmt: skip


@pytest.mark.parametrize("head", DAMAGED_HEADS)
def test_a_session_with_a_damaged_head_is_no_death(stress, log, capsys, monkeypatch, head):
    log.parent.mkdir()
    rows = [{"event": "session", **head}, {"event": "before", "burst": 3, **TIME}]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    monkeypatch.setattr(stress, "watched", lambda *_: 0)
    assert stress.main(["--yes"], log=log) == 0
    out = capsys.readouterr().out
    assert "never ended" not in out
    assert "1 damaged line(s)" in out


DAMAGED_LINES = [
    {"event": "ready", "launches": "many", **TIME}, {"event": "ready", "launches": None, **TIME},
    {"event": "ready", "launches": float("nan"), **TIME}, {"event": "ready", "launches": -1, **TIME},
    {"event": "ready", "launches": 5, "owner": 5, **TIME},
    {"event": "before", "burst": "x", **TIME}, {"event": "before", "burst": 10**400, **TIME},
    {"event": "before", "burst": 9, "time": "x"}, {"event": "before", "burst": 9, "time": 1e300},
    {"event": "before", "burst": 9, "time": float("nan")}, {"event": "before", "burst": 9},
    {"event": ["before"], **TIME}, {"event": "zzz", **TIME}, 5, None, [], "x", {},
]  # fmt: skip


@pytest.mark.parametrize("damage", [*(json.dumps(line) for line in DAMAGED_LINES), "[" * 200000,
                                    "\u2028{", '{"event": "bef'])  # fmt: skip
def test_damaged_lines_are_left_out_counted_and_told_once(stress, log, capsys, monkeypatch, damage):
    log.parent.mkdir()
    rows = [
        json.dumps({"event": "session", "owner": ELSEWHERE, "device": "xpu:0", **TIME}),
        json.dumps({"event": "ready", "launches": 100, **TIME}),
        json.dumps({"event": "before", "burst": 7, **TIME}),
        damage,
        damage,
    ]
    log.write_text("\n".join(rows), encoding="utf-8")
    monkeypatch.setattr(
        stress, "watched", lambda _job, log, _: stress.stress_log.end_session(log, "x")
    )
    stress.main(["--yes"], log=log)
    out = capsys.readouterr().out
    assert "the computer went down in or after burst 7 (about 700 launches)" in out
    assert "2 damaged line(s)" in out
    stress.main(["--yes"], log=log)
    out = capsys.readouterr().out
    assert "damaged" not in out
    assert "never ended" not in out


def test_a_damaged_end_is_an_end(tool, log):
    log.parent.mkdir()
    rows = [{"event": "session", "owner": ELSEWHERE, "device": "xpu:0", **TIME},
            {"event": "end", "ended": 5, "time": "x"}]  # fmt: skip
    log.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert tool("stress_log").last_unfinished(log, boot) == (None, 1)


def test_a_loop_that_outlived_its_parent_keeps_the_next_run_out(stress, log, capsys):
    log.parent.mkdir()
    parent = {**asdict(boot.current_owner()), "pid": 2**30}
    rows = [
        {"event": "session", "owner": parent, "device": "xpu:0", **TIME},
        {"event": "ready", "launches": 5, "owner": asdict(boot.current_owner()), **TIME},
    ]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert stress.main(["--yes"], log=log) == 2
    assert "still going on" in capsys.readouterr().out


def test_the_loop_ends_itself_when_its_parent_is_gone(loop):
    """Real processes; the one that is watched is killed, as a system short of memory does."""
    tools = str(Path(loop.__file__).parent)
    parent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    owner = {**asdict(boot.current_owner()), "pid": parent.pid}
    owner["started"] = boot.process_start(parent.pid)
    script = (
        "import json, sys, time; sys.path.insert(0, sys.argv[1]); import stress_loop\n"
        "boot = stress_loop.load('xpu.boot')\n"
        "stress_loop.end_with(boot.Owner(**json.loads(sys.argv[2])), boot)\n"
        "print('watching', flush=True); time.sleep(300)"
    )
    command = [sys.executable, "-c", script, tools, json.dumps(owner)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert child.stdout.readline().strip() == b"watching"
        assert child.poll() is None
        parent.kill()
        parent.wait(60)
        assert child.wait(60) == loop.ORPHANED
    finally:
        for process in (parent, child):
            process.kill()
            process.wait(60)
        child.stdout.close()


def test_the_loop_is_told_its_parent_and_tells_its_own_number(stress, loop, log, monkeypatch):
    job = loop.Job("cpu", 8, 8, 1, 2, "float32", 60.0, 1, 32)
    asked = []
    popen = subprocess.Popen

    def start(command, **options):
        asked.append(json.loads(command[-1]))
        return popen(command, **options)

    monkeypatch.setattr(stress.subprocess, "Popen", start)
    assert stress.main(["--yes"], log=log, job=job) == 0
    assert asked[0]["parent"] == asdict(boot.current_owner())
    rows = log.read_text(encoding="utf-8").splitlines()
    (ready,) = [line for line in map(json.loads, rows) if line["event"] == "ready"]
    assert ready["owner"]["pid"] != os.getpid()
    assert ready["owner"]["boot_id"] == boot.read_boot_id()


def test_a_device_there_cannot_be_is_refused(stress, log, capsys):
    with pytest.raises(SystemExit) as ended:
        stress.main(["--yes", "--device", "xpu:9999999999"], log=log)
    assert ended.value.code == 2
    assert "give cpu, xpu or xpu:N" in capsys.readouterr().err
