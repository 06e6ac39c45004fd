"""RiskCheck and Cooldown in this process; Intel GPUs are simulated by their facts."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.host

GIB = 1024**3
WIDGETS = {"upscale_by": 2.0, "steps": 35, "sampler": "restore_edm", "tile_px": -1}
WIDGETS |= {"tile_overlap_px": 256}


@pytest.fixture
def pack(monkeypatch):
    names = ("risk_nodes", "machine", "journal", "host", "widgets")
    made = {name: importlib.import_module(f"supir_xpu.nodes.{name}") for name in names}
    waited = []
    monkeypatch.setattr(made["host"], "wait", lambda seconds, why: waited.append(seconds))
    return SimpleNamespace(**made, waited=waited)


@pytest.fixture
def b70(pack):
    from supir_xpu.xpu.device import DeviceFacts
    from supir_xpu.xpu.device_profiles import bundled_profiles
    from supir_xpu.xpu.journal import Journal, RunInfo

    facts = DeviceFacts(
        "xpu", family="battlemage", os="Windows", driver="32.0.101.8629",
        name="Intel(R) Arc(TM) Pro B70 Graphics",
        total_bytes=32 * GIB, free_bytes=28 * GIB, max_alloc_bytes=4 * GIB,
    )  # fmt: skip
    journal = Journal(None)
    pack.machine.set_machine(
        pack.machine.Machine(facts, bundled_profiles().pick(facts), simulated=True)
    )
    pack.journal.set_journal(journal)

    def just_ran(heavy):
        run = RunInfo("r", facts.name, facts.driver, "2", "fused", 1, 1.0, heavy)
        journal.close_phase(journal.open_phase(run, "sample"), "ok")

    yield just_ran
    pack.machine.set_machine(None)
    pack.journal.set_journal(None)


def test_a_check_passes_on_the_very_object_and_reports_numbers(pack, b70):
    thing = object()
    image = torch.zeros(1, 960, 1408, 3)
    out = pack.risk_nodes.RiskCheck.execute(thing, **WIDGETS, image=image)
    assert out.result[0] is thing
    report = out.result[1]
    for words in ("2816x1920 px", "35 steps", "launches", "XPU_DRIVER", "XPU_LAUNCHES"):
        assert words in report
    assert out.ui["text"] == (report,)


def test_a_check_reads_the_size_of_latents_and_of_what_passes_through(pack):
    latent = {"samples": torch.zeros(2, 4, 16, 24)}
    check = pack.risk_nodes.RiskCheck.execute
    for args in ({"anything": latent}, {"anything": 1, "latent": latent}):
        assert "2 picture(s) of 384x256 px" in check(**args, **WIDGETS).result[1]
    from supir_xpu.supir.errors import ShapeError

    with pytest.raises(ShapeError, match="no size to judge"):
        check("text", **WIDGETS)


@pytest.mark.parametrize(("mode", "stops"), [("block", True), ("warn", False), ("off", False)])
def test_a_check_stops_the_graph_only_when_told_to(pack, b70, mode, stops):
    from supir_xpu.xpu.errors import RiskBlockedError

    image = torch.zeros(1, 1472, 1472, 3)
    args = {**WIDGETS, "tile_px": 512, "tile_overlap_px": 128, "risk": mode, "image": image}
    if stops:
        with pytest.raises(RiskBlockedError, match="XPU_LAUNCHES"):
            pack.risk_nodes.RiskCheck.execute(1, **args)
    else:
        assert "Risk block" in pack.risk_nodes.RiskCheck.execute(1, **args).result[1]


def test_seconds_are_waited_as_asked(pack):
    out = pack.risk_nodes.Cooldown.execute("x", 2.5)
    assert out.result == ("x", "Waited 2.5 s: as asked.")
    assert pack.waited == [2.5]


@pytest.mark.parametrize(("heavy", "seconds"), [(False, 8), (True, 30)])
def test_zero_waits_what_is_left_of_the_rest_the_device_needs(pack, b70, heavy, seconds):
    assert "not waited" in pack.risk_nodes.Cooldown.execute("x", 0.0).result[1]
    b70(heavy)
    pack.risk_nodes.Cooldown.execute("x", 0.0)
    assert seconds - 1 < pack.waited[-1] <= seconds


def test_zero_waits_for_nothing_elsewhere(pack):
    assert "not waited" in pack.risk_nodes.Cooldown.execute("x", 0.0).result[1]
    assert pack.waited == [0.0]


def test_nothing_behind_them_runs_again(pack):
    for node in (pack.risk_nodes.RiskCheck, pack.risk_nodes.Cooldown):
        assert node.fingerprint_inputs(a=1) == node.fingerprint_inputs(b=2)


def test_a_cooldown_can_be_cancelled(monkeypatch):
    import comfy.model_management as mm

    risk_nodes = importlib.import_module("supir_xpu.nodes.risk_nodes")
    mm.interrupt_current_processing(True)
    with pytest.raises(mm.InterruptProcessingException):
        risk_nodes.Cooldown.execute("x", 60.0)


@pytest.mark.parametrize("value", [None, -1, 0, 32, 64, 8192])
def test_tile_sizes_that_may_work(pack, value):
    assert pack.widgets.check_tile_px(value) is True


@pytest.mark.parametrize("value", [-2, 1, 31, 8193])
def test_tile_sizes_that_cannot_work_are_told_with_their_value(pack, value):
    assert f"tile_px is {value};" in pack.widgets.check_tile_px(value)
