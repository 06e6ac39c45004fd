"""Too little memory on a simulated device: smaller pieces, host memory, or an error the host knows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from supir_xpu.xpu.errors import DeviceError, DeviceLostError, DeviceMemoryError

pytestmark = pytest.mark.host

TOLERANCE = 5e-4
STEPS = {"risk": "off", "steps": 1}
OOM = "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"


@pytest.fixture(scope="module")
def case():
    from supir_xpu.tests.nodes import device_case

    return device_case


@pytest.fixture(scope="module")
def undisturbed(demo):
    return demo.run_latent(**STEPS)


def is_out_of_memory(error):
    """The question the host's executor asks before it unloads models and shows its tip."""
    import comfy.model_management as mm

    ask = getattr(mm, "is_oom", None)
    return ask(error) if ask else isinstance(error, mm.OOM_EXCEPTION)


def test_the_host_takes_our_error_for_out_of_memory():
    assert is_out_of_memory(DeviceMemoryError("gone"))
    assert isinstance(DeviceMemoryError("gone"), (DeviceError, MemoryError))
    assert not is_out_of_memory(DeviceLostError("gone"))


def test_attention_that_outgrows_an_allocation_runs_in_smaller_pieces(
    demo, case, undisturbed, monkeypatch
):
    """The kernel turns out to store its scores, and the largest are more than one allocation."""
    spec = replace(case.GOOD, sdpa="math")
    with case.simulated(monkeypatch, spec) as run:
        report = demo.run(**STEPS)
    whole = run.dev.max_scores
    limit = 4 * whole - 1
    believed = replace(case.place(spec).facts, fused_sdpa="fused")
    with case.simulated(monkeypatch, spec) as run:
        place = replace(case.machine._machine, facts=believed)
        monkeypatch.setattr(case.machine, "_machine", place)
        _limit_scores(monkeypatch, run.dev, limit)
        report = demo.run(**STEPS)
    monkeypatch.undo()
    events = run.executions[0].attention_report.faults.events
    assert {(e.op, e.reaction) for e in events} == {("attention", "smaller")}
    assert events[-1].outcome == "recovered"
    assert "in attention: smaller, recovered" in case.flat(report)
    assert run.executions[0].attention_report.policies["math"] > 0
    assert (report.result[0]["samples"] - undisturbed).abs().max() <= TOLERANCE


def _limit_scores(monkeypatch, dev, limit):
    """Only score matrices meet the limit, so that attention alone is under test."""
    softmax = ("softmax", "_softmax", "_safe_softmax")
    after = dev._after

    def limited(func, name, result):
        after(func, name, result)
        if any(part in name for part in softmax):
            size = result.untyped_storage().nbytes()
            if size > limit:
                raise torch.OutOfMemoryError(
                    f"XPU out of memory. Tried to allocate {size} bytes. Limit {limit}"
                )

    monkeypatch.setattr(dev, "_after", limited)


def test_conditionings_run_apart_when_they_do_not_fit_together(
    demo, case, undisturbed, monkeypatch
):
    with case.simulated(monkeypatch) as run:
        _refuse_batches(monkeypatch, run.dev)
        report = demo.run(risk="off", steps=1)
        again = demo.run(risk="off", steps=2)
    monkeypatch.undo()
    assert "OUT_OF_DEVICE_MEMORY in tile: smaller, recovered" in case.flat(report)
    assert (report.result[0]["samples"] - undisturbed).abs().max() <= TOLERANCE
    assert case.flat(again).count("in tile: smaller, recovered") == 1  # learned at the first step


def _refuse_batches(monkeypatch, dev):
    """A convolution of two rows at once does not fit."""
    before = dev._before

    def refuse(name):
        result = before(name)
        if name == "convolution" and rows[-1] > 1:
            raise RuntimeError(OOM)
        return result

    rows = [1]
    dispatch = type(dev).__torch_dispatch__

    def noted(self, func, types, args=(), kwargs=None):
        if func._schema.name == "aten::convolution":
            rows.append(args[0].shape[0])
        return dispatch(self, func, types, args, kwargs)

    monkeypatch.setattr(type(dev), "__torch_dispatch__", noted)
    monkeypatch.setattr(dev, "_before", refuse)


def test_vae_keeps_stripes_in_host_memory_when_the_device_is_full(demo, case, monkeypatch):
    want = demo.decode(demo.vae, demo.control, risk="off").result[0]
    with case.simulated(monkeypatch) as run:
        run.dev.inject(OOM, op="^convolution$", nth=6)
        report = demo.decode(demo.vae, demo.control, risk="off")
    assert "OUT_OF_DEVICE_MEMORY in VAE: smaller, recovered" in case.flat(report)
    assert (report.result[0] - want).abs().max() <= 1e-5


def test_an_allocation_limit_shapes_the_vae(demo, case, monkeypatch):
    """Maps of 1 MiB do not fit, stripes of them do."""
    want = demo.decode(demo.vae, demo.control, risk="off").result[0]
    with case.simulated(monkeypatch) as run:
        demo.decode(demo.vae, demo.control, risk="off")
    largest = run.dev.largest
    from supir_xpu.nodes import vae

    monkeypatch.setattr(vae, "RETRY_WORKSPACE_BYTES", largest // 2)
    with case.simulated(monkeypatch, replace(case.GOOD, max_alloc_bytes=largest - 1)) as run:
        report = demo.decode(demo.vae, demo.control, risk="off")
    assert "in VAE: smaller, recovered" in case.flat(report)
    assert (report.result[0] - want).abs().max() <= 1e-5


def test_a_device_too_small_for_anything_ends_in_an_error_the_host_knows(demo, case, monkeypatch):
    with case.simulated(monkeypatch) as run:
        run.dev.inject(OOM, op=".", times=0)
        with pytest.raises(DeviceMemoryError, match=r"Set a smaller tile_px") as caught:
            demo.run(**STEPS)
    assert is_out_of_memory(caught.value)


def prompt():
    """Load the demo, pass a grey picture through the demo's VAE."""
    return {
        "1": {"class_type": "SUPIR_XPU_LoadDemo", "inputs": {}},
        "2": {"class_type": "EmptyImage", "inputs": {
            "width": 64, "height": 64, "batch_size": 1, "color": 0x808080}},
        "3": {"class_type": "SUPIR_XPU_Encode", "inputs": {
            "vae": ["1", 2], "image": ["2", 0], "workspace_mb": 0, "risk": "off"}},
        "4": {"class_type": "SUPIR_XPU_Decode", "inputs": {
            "vae": ["1", 2], "latent": ["3", 0], "workspace_mb": 0, "risk": "off"}},
        "5": {"class_type": "PreviewImage", "inputs": {"images": ["4", 0]}},
    }  # fmt: skip


def fail(text, load, *args, **kwargs):
    """Load weights; fail where a run asks for memory beside them."""
    if "memory_required" in kwargs:
        raise RuntimeError(text)
    return load(*args, **kwargs)


@pytest.fixture
def executor(monkeypatch):
    """The host's own executor, with a server that only remembers what it was told."""
    import execution as host_execution
    from supir_xpu.nodes import codec
    from supir_xpu.nodes import demo as demo_nodes

    import nodes as host_nodes

    ours = (demo_nodes.LoadDemo, codec.Encode, codec.Decode)
    for node in ours:
        name = node.define_schema().node_id
        monkeypatch.setitem(host_nodes.NODE_CLASS_MAPPINGS, name, node)
    told = []
    server = SimpleNamespace(
        client_id="test", last_node_id=None, told=told,
        send_sync=lambda event, data, client=None: told.append((event, data)),
        sockets_metadata={}, last_prompt_id=None,
    )  # fmt: skip
    return host_execution.PromptExecutor(
        server, cache_args={"lru": 0, "ram": 0.0, "ram_inactive": 0.0}
    ), told


@pytest.mark.parametrize(
    ("text", "kind"), [(OOM, "DeviceMemoryError"), ("error: 20 (UR_RESULT_ERROR_DEVICE_LOST)", "DeviceLostError")]
)  # fmt: skip
def test_the_hosts_executor_reports_it_and_unloads_when_memory_ran_out(
    case, executor, monkeypatch, text, kind
):
    import comfy.model_management as mm

    run_prompt, told = executor
    unloaded = []
    unload = mm.unload_all_models
    monkeypatch.setattr(mm, "unload_all_models", lambda: (unloaded.append(1), unload()))
    with case.simulated(monkeypatch) as run:
        with monkeypatch.context() as patch:
            if kind == "DeviceMemoryError":  # the weights do not fit
                patch.setattr(mm, "load_models_gpu", partial(fail, text, mm.load_models_gpu))
            else:
                run.dev.inject(text, op="^convolution$", nth=3)
            run_prompt.execute(prompt(), "one", {"client_id": "test"}, ["5"])
        assert not run_prompt.success
    (error,) = [data for event, data in told if event == "execution_error"]
    assert error["node_type"] == "SUPIR_XPU_Encode", error["traceback"]
    assert error["exception_type"].endswith(kind)
    assert error["node_type"] == "SUPIR_XPU_Encode"
    assert bool(unloaded) == (kind == "DeviceMemoryError")
    assert ("TIPS" in error["exception_message"]) == (kind == "DeviceMemoryError")
    with case.simulated(monkeypatch, counted=False):
        run_prompt.execute(prompt(), "two", {"client_id": "test"}, ["5"])
        assert run_prompt.success
