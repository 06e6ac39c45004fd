"""Faults of the XPU stack in real node runs of the tiny model, on a simulated device.

The texts are those reported; that a real driver behaves like this is not claimed.
"""

from __future__ import annotations

import threading

import pytest
import torch
from safetensors.torch import load_file
from supir_xpu.tests.simulated_device import ROOT, run_child
from supir_xpu.tests.xpu.test_faults import REPORTED
from supir_xpu.xpu.errors import DeviceFaultError, DeviceLostError, NonFiniteError
from supir_xpu.xpu.faults import classify, device_lost_reason, fault_by_code

pytestmark = pytest.mark.host

TOLERANCE = 5e-4
"""Of latents up to about 140, as without faults."""

PLACES = {
    "attention": "^scaled_dot_product",
    "conv": "^convolution$",
    "matmul": "^addmm$",
    "copy": "^(clone|copy_)$",
}
RECOVERED = [
    (row, text) for row, text, kind, _ in REPORTED if kind in ("specific", "memory", "platform")
]
LOST = [(row, text) for row, text, kind, _ in REPORTED if row in (2, 25, 41)]
STEPS = {"risk": "off", "steps": 1}


@pytest.fixture(scope="module")
def case():
    from supir_xpu.tests.nodes import device_case

    return device_case


@pytest.fixture(scope="module")
def undisturbed(demo, case):
    """What a run gives on the device when nothing goes wrong."""
    with pytest.MonkeyPatch.context() as patch, case.simulated(patch, counted=False):
        return demo.run_latent(**STEPS)


@pytest.fixture
def clean(demo, case, undisturbed, monkeypatch):
    """Afterwards, in the same process: the next run equals an undisturbed one bit for bit."""
    yield
    with case.simulated(monkeypatch, counted=False):
        assert torch.equal(demo.run_latent(**STEPS), undisturbed)


def first_reaction(fault, place):
    """The first of the table's reactions that the place can carry out."""
    can = {"attention": {"smaller"}}.get(place, set()) | {
        "retry",
        "contiguous",
        "dtype",
        "cpu_block",
    }
    if place == "attention":
        can.discard("dtype")  # these runs are float32 already
    return next((r for r in fault.reactions if r in can), "smaller")


def error_of(row):
    return {13: ValueError, 40: NotImplementedError}.get(row, RuntimeError)


def places():
    """Every row in one place, the places taking turns; row 1 in all of them."""
    names = list(PLACES)
    for number, (row, text) in enumerate(RECOVERED):
        at = "attention" if row in (38, 39) else names[number % len(names)]
        yield from ((row, text, place) for place in (names if row == 1 else [at]))
    yield 14, "Native API failed. Native API returns: -999 (Unknown PI error)", "conv"
    yield 4, "Native API failed. Native API returns: -997 (Command failed)", "matmul"


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize(("row", "text", "place"), list(places()))
def test_recovered_as_the_table_says(demo, case, undisturbed, monkeypatch, row, text, place):
    with case.simulated(monkeypatch) as run:
        planned = run.dev.inject(text, op=PLACES[place], nth=9, error=error_of(row))
        report = demo.run(**STEPS)
    assert planned.done == 1
    events = run.executions[0].attention_report.faults.events
    fault = classify(error_of(row)(text))
    assert fault.row == row
    assert {(e.row, e.code) for e in events} == {(row, fault.code)}
    assert events[-1].outcome == "recovered"
    assert events[-1].reaction == first_reaction(fault, place)
    line = f"{fault.code} in {events[-1].op}: {events[-1].reaction}, recovered"
    assert line in case.flat(report)
    assert line in case.numbers(report)["execution"]
    assert (report.result[0]["samples"] - undisturbed).abs().max() <= TOLERANCE


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("place", PLACES)
def test_what_no_reaction_helps_against_is_a_clear_error(demo, case, monkeypatch, place):
    text = "Kernel is incompatible with all devices in devs"
    with case.simulated(monkeypatch) as run:
        run.dev.inject(text, op=PLACES[place], nth=9, times=0)
        run.dev.inject(text, op="^(mul|add|sub|div)", times=0)  # around the networks too
        with pytest.raises(DeviceFaultError, match=r"no way around it.*Update the Intel graphics"):
            demo.run(**STEPS)
    assert device_lost_reason() is None


@pytest.mark.usefixtures("clean")
def test_a_fault_around_the_networks_is_tried_again_or_named(demo, case, undisturbed, monkeypatch):
    with case.simulated(monkeypatch) as run:
        planned = run.dev.inject("could not create a primitive", op="^cat$")
        report = demo.run(**STEPS)
    assert planned.done == 1
    assert "NO_PRIMITIVE in tile: retry, recovered" in case.flat(report)
    assert (report.result[0]["samples"] - undisturbed).abs().max() <= TOLERANCE


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize(("row", "text"), LOST)
@pytest.mark.parametrize("place", ["attention", "cat"])
def test_a_lost_device_stops_everything(demo, case, monkeypatch, row, text, place):
    op = PLACES.get(place, "^cat$")
    steps = []
    from supir_xpu.nodes.guarded_run import GuardedRun

    monkeypatch.setattr(GuardedRun, "step", lambda self, step: steps.append(step))
    with case.simulated(monkeypatch) as run:
        run.dev.inject(text, op=op, nth=12 if place == "attention" else 2)
        with pytest.raises(DeviceLostError, match="Restart ComfyUI"):
            demo.run(**STEPS)
        launches = run.dev.launches
        for again in (
            lambda: demo.run(**STEPS),
            lambda: demo.decode(demo.vae, demo.control, risk="off"),
            lambda: demo.first_stage(demo.vae, demo.supir, demo.image, 1.0, "off"),
        ):
            with pytest.raises(DeviceLostError, match="lost earlier in this process"):
                again()
        assert run.dev.launches == launches  # nothing more was sent to it
    assert steps == []


@pytest.mark.usefixtures("clean")
def test_out_of_resources_again_means_a_reset(demo, case, monkeypatch):
    with case.simulated(monkeypatch) as run:
        run.dev.inject("error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)", op="^addmm$", nth=9, times=2)
        with pytest.raises(DeviceLostError, match="OUT_OF_RESOURCES"):
            demo.run(**STEPS)


@pytest.mark.usefixtures("clean")
def test_two_kinds_of_operation_failing_alike_blame_the_platform(demo, case, monkeypatch):
    text = "error: 45 (UR_RESULT_ERROR_INVALID_ARGUMENT)"
    with case.simulated(monkeypatch) as run:
        run.dev.inject(text, op="^convolution$", nth=3)
        run.dev.inject(text, op="^scaled_dot_product", nth=1)
        with pytest.raises(DeviceFaultError, match="2 kinds of operation fail alike"):
            demo.run(**STEPS)


@pytest.mark.usefixtures("clean")
def test_non_finite_values_name_the_stage_and_the_cause(demo, case, monkeypatch):
    from supir_xpu.nodes import execution

    with case.simulated(monkeypatch) as run:
        run.dev.corrupt(op="^convolution$", nth=30)
        with pytest.raises(NonFiniteError, match=r"Step 1 of sampling.*kernel returned wrong"):
            demo.run(**STEPS)
    with case.simulated(monkeypatch) as run:
        run.dev.corrupt(op="^convolution$", nth=110)  # the second step
        with pytest.raises(NonFiniteError, match=r"Sampling produced NaN"):
            demo.run(risk="off", steps=2)
    freed = []
    with case.simulated(monkeypatch) as run:  # row 33: all NaN once memory was given back
        monkeypatch.setattr(execution, "release_cached_memory", lambda: freed.append(1))
        made = execution.Execution.for_run.__func__

        def for_run(cls, device=None, **options):
            return made(cls, device, **{"release": lambda: freed.append(1), **options})

        monkeypatch.setattr(execution.Execution, "for_run", classmethod(for_run))
        run.dev.inject("XPU out of memory. Tried to allocate 1 GiB", op="^scaled_dot_product")
        run.dev.corrupt(op="^convolution$", nth=80, times=0)
        with pytest.raises(NonFiniteError, match=r"NaN after empty_cache.*torch 2\.11"):
            demo.run(**STEPS)
    assert freed
    monkeypatch.undo()


def test_non_finite_vae_is_run_again_in_float32(demo, case, monkeypatch):
    """Row 37: overflow of a half-precision VAE."""
    want = demo.decode(demo.vae, demo.control, risk="off").result[0]
    with case.simulated(monkeypatch) as run:
        run.dev.corrupt(op="^convolution$", nth=5)
        with pytest.raises(NonFiniteError, match=r"VAE produced NaN"):
            demo.decode(demo.vae, demo.control, risk="off")
    import copy

    half = copy.copy(demo.vae)
    half.vae_dtype = torch.float16
    half.patcher = demo.vae.patcher.clone()
    half.first_stage_model = copy.deepcopy(demo.vae.first_stage_model).to(torch.float16)
    half.patcher.model = half.first_stage_model
    with case.simulated(monkeypatch) as run:
        run.dev.corrupt(op="^convolution$", nth=5)
        report = demo.decode(half, demo.control, risk="off")
    assert "NON_FINITE in VAE: dtype, recovered" in case.flat(report)
    assert (report.result[0] - want).abs().max() < 0.02  # the weights are those of float16
    assert torch.isfinite(report.result[0]).all()


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("kind", ["fused", "bounded"])
def test_a_hang_is_told_from_a_side_thread(demo, case, undisturbed, monkeypatch, kind):
    """Row 30: only a message; the run goes on if the device does."""
    from supir_xpu.nodes import execution

    monkeypatch.setattr(execution, "GOVERNED_STALL_S", 0.8)
    monkeypatch.setattr(execution, "FREE_STALL_S", 0.8)
    with case.simulated(monkeypatch, case.BAD if kind == "bounded" else case.GOOD) as run:
        run.dev.hang(700)

        def rescue():
            run.dev.hanging.wait(60)
            for _ in range(600):
                if any(name == "supir_xpu.stall" for name, _ in run.events):
                    break
                threading.Event().wait(0.05)
            run.dev.release()

        helper = threading.Thread(target=rescue)
        helper.start()
        report = demo.run(**STEPS)
        helper.join()
    (told,) = [data for name, data in run.events if name == "supir_xpu.stall"]
    assert (told["node"], told["phase"]) == ("Sample", "sample")
    assert "End ComfyUI once" in told["message"]
    assert "STALL in sample" in case.flat(report)
    assert (report.result[0]["samples"] - undisturbed).abs().max() <= TOLERANCE
    assert not [t for t in threading.enumerate() if t.name == "supir-xpu-stall"]


@pytest.mark.parametrize("name", ["InterruptProcessingException"])
@pytest.mark.parametrize("base", [Exception, BaseException])
def test_cancel_passes_through_every_layer(demo, case, monkeypatch, name, base):
    """Old hosts derive their cancel from Exception, new ones from BaseException."""
    import comfy.model_management as mm
    from supir_xpu.nodes import execution, host

    cancel = type(name, (base,), {})
    with case.simulated(monkeypatch) as run:
        monkeypatch.setattr(mm, name, cancel)
        monkeypatch.setattr(execution, "CANCEL", (cancel,))
        text = "could not create a primitive"  # even a cancel that reads like a fault
        for op, nth in ((PLACES["attention"], 5), (PLACES["conv"], 9), ("^cat$", 2)):
            run.dev.inject(text, op=op, nth=nth, error=cancel)
            with pytest.raises(cancel):
                demo.run(**STEPS)
            run.dev.injections.clear()
        for op in (PLACES["conv"], PLACES["attention"]):
            run.dev.inject(text, op=op, error=cancel)
            with pytest.raises(cancel):
                demo.decode(demo.vae, demo.control, risk="off")
            run.dev.injections.clear()
        monkeypatch.setattr(host, "check_cancel", lambda: (_ for _ in ()).throw(cancel()))
        with pytest.raises(cancel):
            demo.decode(demo.vae, demo.control, risk="off")  # between stripes
        for made in run.executions:
            assert made.attention_report.faults.events == []
    monkeypatch.undo()
    with case.simulated(monkeypatch, counted=False):
        assert torch.isfinite(demo.run_latent(**STEPS)).all()


def test_cancel_in_a_wait(monkeypatch):
    import comfy.model_management as mm
    from supir_xpu.nodes import host

    mm.interrupt_current_processing(True)
    with pytest.raises(mm.InterruptProcessingException):
        host.wait(30.0, "test")


CHILD = """
import os, tempfile
sys.path.insert(0, {tests!r})
import conftest
import folder_paths
folder_paths.set_temp_directory({place!r} + "/temp")
folder_paths.set_output_directory({place!r} + "/output")
folder_paths.set_user_directory({place!r} + "/user")
for part in ("temp", "output", "user"):
    os.makedirs({place!r} + "/" + part, exist_ok=True)
import pytest
with torch.inference_mode():
    from supir_xpu.nodes import demo, first_stage, condition, sample
    from supir_xpu.tests.nodes import device_case
    model, clip, vae, supir = demo.LoadDemo.execute().result
    positive, negative = condition.Conditioning.execute([clip], ["a"], ["b"]).result
    _, control, center = first_stage.FirstStage.execute(vae, supir, torch.rand(1, 32, 32, 3), 1.0).result
    with pytest.MonkeyPatch.context() as patch, device_case.simulated(patch) as run:
        run.dev.die(600, {code})
        sample.Sample.execute(
            model, supir, positive, negative, control, 1, 1, "restore_edm", 4.0, 4.0, 1.0, 0.9,
            4.0, 5.0, 1.003, 1.0, -1, 64, "off", center)
print("still alive")
"""


@pytest.mark.parametrize("code", [0xC0000005 & 0xFF, 0xD1])
def test_a_death_leaves_nothing_half_written(tmp_path, code):
    """Rows 24, 31, 32 and 41: the process or the machine ends in the middle of a step."""
    text = CHILD.format(tests=str(ROOT / "tests"), place=str(tmp_path), code=code)
    done = run_child(text)
    assert done.returncode == code, done.stderr
    assert "still alive" not in done.stdout
    assert not [*(tmp_path / "output").rglob("*")]
    temporary = [p for p in (tmp_path / "temp").rglob("*") if p.is_file()]
    from supir_xpu.nodes.demo import FILE_NAME

    assert [p.name for p in temporary] == [FILE_NAME]  # made before the run
    assert load_file(temporary[0])
    import sqlite3

    journals = [
        p for p in (tmp_path / "user").rglob("*") if p.suffix in (".sqlite", ".db", ".sqlite3")
    ]
    assert journals, sorted((tmp_path / "user").rglob("*"))
    assert sqlite3.connect(journals[0]).execute("pragma integrity_check").fetchone() == ("ok",)


@pytest.mark.parametrize("row", [29, 42, 43, 44])
def test_advice_rows_are_recognised(row):
    found = [classify(text) for number, text, _, _ in REPORTED if number == row]
    assert found
    for fault in found:
        assert fault.row == row
        assert fault.advice
        assert fault_by_code(fault.code) is fault
