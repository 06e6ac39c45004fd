"""The preflight on simulated devices: real operations on the processor, planted faults.

Simulated throughout: nothing here ran on an Intel GPU. Cases marked ``real`` run in child processes
as in the product. The others run the child's code in a thread of this process, which spares the
seconds of importing torch; with PROBE_CHILDREN=all in the environment they are real too.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from supir_xpu.tests.xpu.probe_fixtures.cases import CASES, LONG, SHORT, Case, fails
from supir_xpu.xpu import boot, probe, probe_child
from supir_xpu.xpu.probe import (
    Preflight,
    PreflightCancelled,
    identified,
    preflight,
    preflight_in_background,
)
from supir_xpu.xpu.probe_cache import FILE_NAME, CacheKey, ProbeCache
from supir_xpu.xpu.probe_process import ChildOutcome, run_child
from supir_xpu.xpu.probe_types import FULL_STAGES, Check, ProbeRequest

pytestmark = pytest.mark.slow

STAND_IN = Path(__file__).with_name("probe_fixtures") / "simulated_xpu.py"
BOOT = "linux:a"


def run_in_thread(command, env, deadlines, **options) -> ChildOutcome:
    """Do what a child would do, in a thread: the simulation stays in force in its own thread only."""
    if threading.current_thread() is not threading.main_thread():  # the battery under way
        return run_child(command, env, deadlines, **options)
    out = io.StringIO()
    thread = threading.Thread(target=probe_child.run, args=(json.loads(command[5]), out))
    thread.start()
    thread.join(600)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    outcome = ChildOutcome(str(lines[-1]["event"]))
    for line in lines:
        if line["event"] == "result":
            outcome.checks.append(Check.from_mapping(line))
        if line["event"] == "warnings":
            outcome.warnings = line["texts"]
    return outcome


def run_patiently(command, env, deadlines, **options) -> ChildOutcome:
    """Give the child that finds the device all the time it wants; the next one hangs at once."""
    finds = 0 in json.loads(command[-1])["stages"]
    limits = LONG if finds else replace(deadlines, first_op_s=deadlines.op_s)
    return run_child(command, env, limits, **options)


def slowness() -> float:
    """How many times longer than usual this machine may take, by what else runs on it; at least 1."""
    load = max(os.getloadavg()[:2]) if hasattr(os, "getloadavg") else 0.0
    return max(1.0, load / (os.cpu_count() or 1))


@pytest.mark.parametrize("name", CASES)
def test_verdict_and_next_run(name, tmp_path, monkeypatch):
    case = CASES[name]
    if not case.real and os.environ.get("PROBE_CHILDREN") != "all":
        monkeypatch.setattr(probe, "run_child", run_in_thread)
    if case.deadlines is SHORT:
        monkeypatch.setattr(probe, "run_child", run_patiently)
    groups = case.stages if isinstance(case.stages[0], tuple) else (case.stages,)
    asked = ProbeRequest("xpu:0", groups, case.deadlines, True, STAND_IN, case.options)
    result = preflight(asked, tmp_path, boot_id=BOOT)
    verdict = result.verdict
    assert (verdict.status, verdict.criterion) == (case.status, case.criterion), verdict.reason
    for word in case.words:
        assert word in verdict.reason
    assert case.note in " ".join(verdict.notes)
    assert verdict.broken == case.broken
    assert dict(verdict.workarounds) == case.ways or case.criterion == "dtype"
    assert verdict.dropped_dtypes == case.dropped
    assert not result.from_cache
    if case.criterion == "hang":
        assert result.battery.checks[-1].seconds < SHORT.op_s + 20 * slowness()
    if case.status == "retreat":
        assert [option.target for option in verdict.retreats] == [
            "OpenVINO on the GPU",
            "OpenVINO on the processor",
            "torch on the processor",
            "a supported Arc card",
        ]
        assert verdict.retreats[2].minutes > 0
    check_next_run(case, result, tmp_path, asked, monkeypatch)


def check_next_run(case: Case, first: Preflight, folder: Path, asked: ProbeRequest, monkeypatch):
    """What is certain is not tried again; what may be mended without a restart is asked anew."""

    class Started(Exception):  # noqa: N818
        pass

    def refuse(*args, **options):
        if threading.current_thread() is not threading.main_thread():  # the battery under way
            return run_child(*args, **options)
        raise Started

    monkeypatch.setattr(probe, "run_child", refuse)
    unknown = CacheKey(asked.device, "", "", str(probe.torch.__version__), BOOT)
    key = identified(unknown, first.battery)
    if not case.kept:
        with pytest.raises(Started):
            preflight(asked, folder, known=key, boot_id=BOOT)
        return
    again = preflight(asked, folder, known=key, boot_id=BOOT)
    assert again.from_cache
    assert again.verdict == first.verdict
    with pytest.raises(Started):
        preflight(asked, folder, known=key, boot_id=BOOT, refresh=True)
    other = CacheKey(key.selector, key.device, key.driver, key.torch, "linux:b")
    with pytest.raises(Started):
        preflight(asked, folder, known=other, boot_id="linux:b")


@pytest.fixture(scope="module", autouse=True)
def battery_under_way(tmp_path_factory):
    """Start the whole battery on a simulated device that works, in real children, beside the rest."""
    said: list[str] = []
    options = {
        "memory": "refused",
        "largest_bytes": 4 * 2**20,
        "properties": {"total_memory": 64 * 2**20},
    }
    asked = ProbeRequest("xpu:60", FULL_STAGES, LONG, True, STAND_IN, options)
    folder = tmp_path_factory.mktemp("cache")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(preflight, asked, folder, boot_id=BOOT, progress=said.append)
        yield lambda: (running.result(), said, folder, asked)


@pytest.fixture
def healthy(battery_under_way):
    return battery_under_way()


def test_everything_fine_and_memory_not_reported(healthy):
    result, said, _, _ = healthy
    verdict, battery = result.verdict, result.battery
    assert (verdict.status, verdict.criterion, verdict.complete) == ("healthy", "all-passed", True)
    assert battery.seconds < 120 * slowness()  # mostly importing torch
    assert sum(check.seconds for check in battery.checks) < 60 * slowness()
    assert battery.stages == frozenset(range(10))
    assert any("free memory" in note and "querying" in note for note in verdict.notes)
    assert any("above the limit" in note.lower() for note in verdict.notes)
    measured = verdict.measured
    rates = ("flops_per_s", "bw_bytes_per_s", "h2d_bytes_per_s", "d2h_bytes_per_s", "launch_s")
    assert all(getattr(measured, rate) > 0 for rate in rates)
    assert (measured.fused_sdpa, measured.fused_max_dim_head) == ("fused", 512)
    assert measured.allocated_bytes == 39 * (2**20 // 10)
    assert measured.refused_bytes == 41 * (2**20 // 10)
    assert any(text.startswith("attention: ") for text in said)
    names = [check.name for check in battery.checks]
    for dtype in ("float32", "float16", "bfloat16"):
        assert f"convolution 3x3 channels last {dtype}" in names
    assert sum(name.startswith("softmax over") for name in names) == 7


def test_a_full_judgement_serves_the_short_battery(healthy, monkeypatch):
    first, _, folder, asked = healthy
    monkeypatch.setattr(probe, "run_child", None)
    short = ProbeRequest(asked.device, ((0,), (1, 2, 3)))
    key = identified(CacheKey(asked.device, "", "", probe.torch.__version__, BOOT), first.battery)
    assert preflight(short, folder, known=key, boot_id=BOOT).verdict == first.verdict


def test_a_lost_device_is_probed_again(healthy, monkeypatch):
    first, _, folder, asked = healthy
    key = identified(CacheKey(asked.device, "", "", probe.torch.__version__, BOOT), first.battery)
    cache = ProbeCache(folder)
    assert cache.find(key, asked.stages, None) is not None
    assert cache.find(key, asked.stages, "DEVICE_LOST in conv") is None
    before = (folder / FILE_NAME).read_bytes()
    probe.invalidate(folder, asked.device, "DEVICE_LOST in conv")
    assert cache.find(key, asked.stages, None) is None
    assert cache.was_seen(asked.device)
    (folder / FILE_NAME).write_bytes(before)


def test_a_device_that_was_here_and_is_gone(healthy, monkeypatch):
    monkeypatch.setattr(probe, "run_child", run_in_thread)
    _, _, folder, asked = healthy
    gone = ProbeRequest(asked.device, ((0, 1),), LONG, True, STAND_IN, {"count": 0})
    verdict = preflight(gone, folder, boot_id="linux:c").verdict
    assert (verdict.status, verdict.criterion) == ("retreat", "vanished")  # row 26
    assert "Restart the computer" in verdict.action


def test_the_child_imports_neither_host_nor_pack():
    """The real child on this machine's processor."""
    modules = STAND_IN.with_name("list_modules.py")
    asked = ProbeRequest("cpu", ((0, 1, 2, 3, 4, 5, 6, 7, 8, 9),), LONG, True, modules, {})
    result = preflight(asked, None)
    assert result.verdict.status == "healthy", result.verdict.reason
    loaded = json.loads(result.battery.word("modules"))
    assert "torch" in loaded
    for name in loaded:
        assert name.split(".")[0] not in (
            "comfy",
            "supir_xpu",
            "nodes",
            "folder_paths",
            "execution",
        )


def test_an_event_loop_goes_on_and_can_cancel():
    asked = ProbeRequest(
        "xpu:61", ((0, 2),), LONG, True, STAND_IN, {"faults": [fails("aten::sum", "hang")]}
    )
    said: list[str] = []
    children: list[int] = []
    others = child_processes()  # of tests before this one, such as a ComfyUI that serves a file

    async def main() -> float:
        task = asyncio.create_task(
            preflight_in_background(asked, None, boot_id=BOOT, progress=said.append)
        )
        worst, last = 0.0, time.monotonic()
        while not any("sum over" in text for text in said):
            await asyncio.sleep(0.01)
            worst, last = max(worst, time.monotonic() - last), time.monotonic()
            assert not task.done(), task.result()
        children.extend(pid for pid in child_processes() if pid not in others)
        assert children
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return worst

    assert asyncio.run(main()) < 2.0 * slowness()
    assert not [pid for pid in children if boot.process_start(pid) is not None]


def child_processes() -> list[int]:
    """Numbers of this process's children; empty where that cannot be read."""
    found: list[int] = []
    for thread in Path("/proc/self/task").glob("*/children"):
        found += [int(pid) for pid in thread.read_text(encoding="ascii").split()]
    return found


def test_cancelled_before_its_turn():
    held = probe._turns.setdefault("xpu:62", threading.Lock())

    def cancel():
        raise PreflightCancelled

    with held, pytest.raises(PreflightCancelled):
        preflight(ProbeRequest("xpu:62"), None, check_cancel=cancel)
