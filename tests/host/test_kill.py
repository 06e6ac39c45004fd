"""Killed in every phase: the next start says what died, and after a reboot the same job is refused.

A real server with the tiny model. Its device is simulated: facts in ``supir_xpu.yaml`` make the pack
plan, judge and record as on an Arc Pro B70 with the driver of the first crash report; the arithmetic
runs on this processor. A reboot is simulated by giving the rows in the journal another boot id while
no server runs.
"""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytestmark = pytest.mark.host

ROOT = Path(__file__).resolve().parents[2]
JOURNAL = "supir_xpu_journal.sqlite3"
B70 = """
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
    gap_s: 0
    heavy_gap_s: 0
    load_settle_s: 0
    image_settle_s: 0
"""
LARGE_PX, SMALL_PX = 448, 64
PHASES = {
    "encode_control": "SUPIR_XPU_FirstStage",
    "decode_stage1": "SUPIR_XPU_FirstStage",
    "encode_center": "SUPIR_XPU_FirstStage",
    "sample": "SUPIR_XPU_Sample",
    "decode": "SUPIR_XPU_Decode",
}


class SimulatedMachine:
    """One ComfyUI folder on a simulated device, started, killed and 'rebooted' at will."""

    def __init__(self, base):
        self.base, self.server = base, None
        (base / "user").mkdir(parents=True)
        (base / "user" / "supir_xpu.yaml").write_text(B70, encoding="utf-8")
        (base / "input").mkdir()
        for side in (LARGE_PX, SMALL_PX):
            noise = np.random.default_rng(side).integers(0, 255, (side, side, 3), dtype=np.uint8)
            Image.fromarray(noise).save(base / "input" / f"noise_{side}.png")

    @property
    def journal(self):
        return self.base / "user" / JOURNAL

    def start(self, base=None, *args):
        from host_server import start_server

        front_end = os.environ.get("COMFYUI_FRONT_END")
        if front_end:
            args = ("--front-end-root", front_end, *args)
        return start_server(os.environ["COMFYUI_ROOT"], ROOT, base or self.base, args)

    def start_second(self):
        """Start another ComfyUI that shares user and input folder with the first."""
        user, pictures = self.base / "user", self.base / "input"
        second = self.base.with_name("second")
        return self.start(second, "--user-directory", str(user), "--input-directory", str(pictures))

    def running(self):
        if self.server is None:
            self.server = self.start()
        return self.server

    def query(self, sql, values=()):
        db = sqlite3.connect(f"{self.journal.as_uri()}?mode=ro", uri=True, timeout=5)
        try:
            return db.execute(sql, values).fetchall()
        finally:
            db.close()

    def wait_for_phase(self, phase, timeout=120):
        """Wait until a phase is open on disk; for sampling, until its first step is recorded."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            sql = "SELECT step FROM phases WHERE closed IS NULL AND phase=?"
            rows = self.query(sql, (phase,)) if self.journal.exists() else []
            if rows and (phase != "sample" or rows[0][0] >= 1):
                return
            assert self.server.process.poll() is None, self.server.log_tail()
            time.sleep(0.005)
        raise AssertionError(f"{phase} was never open. {self.server.log_tail()}")

    def kill(self):
        self.server.process.kill()
        self.server.process.wait(30)
        self.server.stop()
        self.server = None

    def stop(self):
        if self.server is not None:
            self.server.stop()
            self.server = None

    def reboot(self):
        """Make everything that was open belong to an earlier boot of this machine."""
        db = sqlite3.connect(self.journal, timeout=5)
        with db:
            changed = db.execute("UPDATE phases SET boot_id='boot:before' WHERE closed IS NULL")
        db.close()
        assert changed.rowcount >= 1


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    made = SimulatedMachine(tmp_path_factory.mktemp("simulated") / "comfy")
    yield made
    made.stop()


def job(workflow, side, seed, steps=2):
    prompt = workflow.copy()
    inputs = {node["class_type"]: node["inputs"] for node in prompt.values()}
    inputs["LoadImage"]["image"] = f"noise_{side}.png"
    inputs["SUPIR_XPU_Sample"].update(seed=seed, steps=steps)
    return prompt


def status(server):
    return server.get("/supir_xpu/status").json()


@pytest.mark.parametrize(
    ("phase", "reboots"),
    [
        pytest.param("encode_control", True, marks=pytest.mark.newest),
        pytest.param("decode_stage1", False, marks=pytest.mark.newest),
        pytest.param("encode_center", False, marks=pytest.mark.newest),
        ("sample", True),
        pytest.param("decode", True, marks=pytest.mark.newest),
    ],
)
def test_a_kill_in_a_phase_is_reported_and_a_reboot_tightens(machine, workflow, phase, reboots):
    from host_server import PromptError

    server = machine.running()
    steps = 40 if phase == "sample" else 2
    same = job(workflow, LARGE_PX, seed=10 + list(PHASES).index(phase), steps=steps)
    server.queue(same)
    machine.wait_for_phase(phase)
    machine.kill()
    if reboots:
        machine.reboot()

    server = machine.running()
    death = status(server)["last_death"]
    kind = "machine" if reboots else "process"
    assert (death["kind"], death["phase"]) == (kind, phase)
    assert death["step"] >= (1 if phase == "sample" else 0)
    assert death["message"] in server.log_path.read_text(encoding="utf-8", errors="replace")
    if reboots:
        with pytest.raises(PromptError) as caught:
            server.run(same)
        assert caught.value.status == 400
        (node,) = [n for n in same if same[n]["class_type"] == PHASES[phase]]
        errors = caught.value.body["node_errors"][node]["errors"]
        assert "XPU_CRASHED_BEFORE" in {e["extra_info"]["code"] for e in errors}
        server.run(job(workflow, SMALL_PX, seed=1, steps=1), timeout=300)
    else:
        assert not status(server)["limits"]["crashed"]
        assert server.post("/supir_xpu/plan", {"prompt": same}).json()["refused"] is False
    assert server.post("/supir_xpu/forget", {}).status == 400
    assert status(server)["last_death"] is not None
    assert server.post("/supir_xpu/forget", {"confirm": True}).json()["forgotten"] >= 1
    assert status(server)["last_death"] is None


def test_a_graceful_stop_is_never_a_crash(machine, workflow):
    server = machine.running()
    server.queue(job(workflow, LARGE_PX, seed=50, steps=200))
    machine.wait_for_phase("sample")
    machine.stop()
    assert machine.query("SELECT COUNT(*) FROM phases WHERE closed IS NULL") == [(0,)]
    assert status(machine.running())["last_death"] is None


@pytest.mark.newest
def test_two_servers_share_one_journal(machine, workflow):
    first, second = machine.running(), machine.start_second()
    try:
        waits = first.queue(job(workflow, LARGE_PX, seed=60, steps=60))
        machine.wait_for_phase("sample")
        assert status(second)["history"]["busy_elsewhere"] is True
        assert status(second)["last_death"] is None
        second.run(job(workflow, SMALL_PX, seed=61, steps=1), timeout=300)
        first.cancel(waits)
        first.wait(waits, 60)
        assert status(second)["history"]["busy_elsewhere"] is False
        assert status(first)["deaths"] == []
    finally:
        second.stop()


@pytest.mark.newest
@pytest.mark.parametrize("trouble", ["corrupt", "locked", "no file"])
def test_trouble_with_the_journal_never_stops_a_run_and_is_said_once(tmp_path, workflow, trouble):
    machine = SimulatedMachine(tmp_path / "comfy")
    lock = None
    try:
        if trouble == "corrupt":
            machine.journal.write_bytes(b"this is no database" * 500)
        elif trouble == "no file":
            machine.journal.mkdir()  # cannot be opened, by any user, on any system
        else:
            lock = sqlite3.connect(machine.journal, isolation_level=None)
            lock.execute("PRAGMA journal_mode=WAL")
            lock.execute("CREATE TABLE mine (x)")
            lock.execute("BEGIN EXCLUSIVE")
        server = machine.running()
        server.run(job(workflow, SMALL_PX, seed=1, steps=1), timeout=300)
        server.run(job(workflow, SMALL_PX, seed=2, steps=1), timeout=300)
        log = server.log_path.read_text(encoding="utf-8", errors="replace")
        assert log.count("cannot be used") == 1
        assert status(server)["journal"]["in_memory"] is True
    finally:
        machine.stop()
        if lock is not None:
            lock.close()
