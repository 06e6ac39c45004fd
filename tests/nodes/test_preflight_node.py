"""The Preflight node, and what each verdict does to the compute nodes. Devices are simulated."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from supir_xpu.xpu.errors import DeviceLostError, FactsError, RiskBlockedError

pytestmark = pytest.mark.host

STAND_IN = Path(__file__).parents[1] / "xpu" / "probe_fixtures" / "simulated_xpu.py"
ERROR_45 = "level_zero backend failed with error: 45 (UR_RESULT_ERROR_INVALID_ARGUMENT)"
TOLERANCE = 5e-4
"""Of latents up to about 140, as in the other simulated runs."""


@pytest.fixture(scope="module")
def case():
    from supir_xpu.tests.nodes import device_case

    return device_case


@pytest.fixture(scope="module")
def told():
    from supir_xpu.tests.nodes import preflight_case

    return preflight_case


@pytest.fixture
def node():
    return importlib.import_module("supir_xpu.nodes.preflight")


@pytest.fixture
def journal():
    """A journal in memory, in place of the user's."""
    from supir_xpu.xpu.journal import Journal

    place = importlib.import_module("supir_xpu.nodes.journal")
    made = Journal(None)
    place.set_journal(made)
    yield made
    place.set_journal(None)


@pytest.fixture
def freed(monkeypatch):
    """What happened, in order; models are only said to leave the device."""
    host, happened = importlib.import_module("supir_xpu.nodes.host"), []
    monkeypatch.setattr(host, "free_device", lambda: happened.append("freed"))
    return happened


# ------------------------------------------------------------------ the node


def test_without_an_xpu_one_line_names_the_device(node, freed):
    thing = object()
    out = node.PreflightCheck.execute(thing)
    assert out.result[0] is thing
    assert out.result[1].count("\n") == 0
    assert "the processor (CPU)" in out.result[1]
    assert out.ui["text"] == (out.result[1],)
    assert freed == []
    assert node.PreflightCheck.execute().result[0] is None


def test_the_whole_battery_runs_once_with_the_device_freed_first(node, told, freed, monkeypatch):
    from supir_xpu.xpu.probe_types import FULL_STAGES

    found = told.health(told.HEALTHY)
    run = found._run
    found._run = lambda *args, **options: (freed.append("run"), run(*args, **options))[1]
    told.put(monkeypatch, found)
    out = node.PreflightCheck.execute("x")
    assert out.result[0] == "x"
    assert "HEALTHY" in out.result[1]
    assert "All 12 checks passed." in out.result[1]
    assert out.ui["supir_xpu"][0]["preflight"]["status"] == "healthy"
    json.dumps(out.ui)
    assert run.requests[0].groups == FULL_STAGES
    assert freed == ["freed", "run"]
    assert node.PreflightCheck.execute("x").result[1].startswith("HEALTHY")
    assert freed == ["freed", "run"], "what is known is not asked again"
    node.PreflightCheck.execute("x", refresh=True)
    assert freed == ["freed", "run"] * 2


def test_the_simplest_checks_do_not_stand_for_the_whole_battery(node, told, freed, monkeypatch):
    found = told.health(told.HEALTHY)
    told.put(monkeypatch, found)
    found.check(check_cancel=int, progress=print)
    assert found.as_dict()["complete"] is False
    node.PreflightCheck.execute()
    assert len(found._run.requests) == 2
    assert found.as_dict()["complete"] is True


def test_a_retreat_is_final_and_says_where_to_go(node, told, freed, monkeypatch):
    found = told.health(told.RETREAT)
    told.put(monkeypatch, found)
    found.check(check_cancel=int, progress=print)
    report = node.PreflightCheck.execute().result[1]
    for words in ("RETREAT", "hang", "Restart the computer", "about 240 minutes"):
        assert words in report
    assert freed == []


def test_progress_is_shown_and_cancel_ends_it(node, told, freed, monkeypatch):
    import comfy.model_management as mm
    import comfy.utils

    moved, said = [], []
    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", lambda *a, **k: moved.append(a[:2]))
    host = importlib.import_module("supir_xpu.nodes.host")
    monkeypatch.setattr(host, "send_event", lambda name, data: said.append((name, data)))
    told.put(monkeypatch, told.health(told.HEALTHY))
    node.PreflightCheck.execute()
    assert moved[-1][0] == moved[-1][1]
    assert ("supir_xpu.preflight", {"text": "reductions: sum over dim 1"}) in said
    again = told.health(told.HEALTHY)
    told.put(monkeypatch, again)
    mm.interrupt_current_processing(True)
    with pytest.raises(mm.InterruptProcessingException):
        node.PreflightCheck.execute()
    assert again.known() is None


def test_checks_that_cannot_be_started_are_reported(node, told, freed, monkeypatch):
    told.put(monkeypatch, told.health(OSError("no such interpreter")))
    assert "no such interpreter" in node.PreflightCheck.execute().result[1]


def test_a_described_device_is_not_asked(node, case, freed, monkeypatch):
    machine = importlib.import_module("supir_xpu.nodes.machine")
    monkeypatch.setattr(machine, "_machine", case.place(case.GOOD))
    report = node.PreflightCheck.execute().result[1]
    assert "described in the user's settings" in report
    assert freed == []


def test_a_device_that_was_lost_is_not_touched(node, told, freed, monkeypatch):
    from supir_xpu.xpu.faults import mark_device_lost, reset_device_lost

    found = told.health(told.HEALTHY)
    told.put(monkeypatch, found)
    mark_device_lost("DEVICE_LOST in conv")
    try:
        with pytest.raises(DeviceLostError, match="Restart ComfyUI"):
            node.PreflightCheck.execute()
        assert found.check(check_cancel=int, progress=print) is None
        assert found.word == "unknown"
    finally:
        reset_device_lost()
    assert found._run.requests == []


def test_it_frees_the_device_as_comfyui_does(monkeypatch):
    import comfy.model_management as mm

    host, done = importlib.import_module("supir_xpu.nodes.host"), []
    monkeypatch.setattr(mm, "unload_all_models", lambda: done.append("unloaded"))
    monkeypatch.setattr(mm, "soft_empty_cache", lambda *_: done.append("emptied"))
    host.free_device()
    assert done == ["unloaded", "emptied"]


# ------------------------------------------------------------------ compute nodes


def runs(demo):
    """Every compute node, as a call that takes risk."""
    from supir_xpu.nodes.custom import Guider
    from supir_xpu.nodes.upscale import Upscale

    steer = {"cfg_start": 2.0, "cfg_end": 4.0, "control_start": 1.0, "control_end": 0.9}
    steer |= {"restore_cfg": 4.0}
    noise = {"s_churn": 5.0, "s_noise": 1.003, "eta": 1.0}
    tiles = {"tile_px": -1, "tile_overlap_px": 64}
    sampling = (demo.model, demo.supir, demo.positive, demo.negative, demo.control)
    upscale = partial(
        Upscale.execute, demo.model, demo.clip, demo.vae, demo.supir, demo.image, 1.0, "a", "b",
        seed=1, steps=1, sampler="restore_edm", color_fix="none", **steer, **noise, **tiles,
    )  # fmt: skip
    return {
        "Encode": partial(demo.encode, demo.vae, demo.image),
        "Decode": partial(demo.decode, demo.vae, demo.control),
        "FirstStage": partial(demo.first_stage, demo.vae, demo.supir, demo.image, 1.0),
        "Sample": partial(demo.run, steps=1),
        "Guider": partial(Guider.execute, *sampling, **steer, **tiles),
        "Upscale": upscale,
    }


def test_a_healthy_device_is_asked_once_and_measurements_replace_guesses(
    demo, case, told, journal, monkeypatch
):
    from supir_xpu.xpu.probe_types import QUICK_STAGES

    measured = replace(told.HEALTHY, measured=told.MEASURED)
    with case.simulated(monkeypatch, counted=False):
        before = case.numbers(demo.encode(demo.vae, demo.image))
        assert before["preflight"] is None
        found = told.health(measured)
        device = told.put(monkeypatch, found)
        first = demo.encode(demo.vae, demo.image)
        demo.decode(demo.vae, demo.control)
    assert [request.groups for request in found._run.requests] == [QUICK_STAGES]
    after = case.numbers(first)
    assert after["preflight"]["status"] == "healthy"
    assert after["plan"]["seconds"] > 2 * before["plan"]["seconds"]
    assert after["plan"]["attention"] == "math"
    facts = device.now()
    assert (facts.launch_s, facts.max_alloc_bytes) == (1e-4, 2**30)
    assert facts.sources["fused_sdpa"] == "preflight"
    assert "Preflight" not in case.flat(first)


def test_retreat_stops_every_node_before_anything_is_loaded(demo, case, told, monkeypatch):
    import comfy.model_management as mm

    loaded = []
    monkeypatch.setattr(mm, "load_models_gpu", lambda *a, **k: loaded.append(a))
    found = told.health(told.RETREAT)
    with case.simulated(monkeypatch, counted=False) as run:
        told.put(monkeypatch, found)
        for name, start in runs(demo).items():
            for mode in ("auto", "block"):
                with pytest.raises(RiskBlockedError) as caught:
                    start(risk=mode)
                text = str(caught.value)
                assert text.startswith("[XPU_PREFLIGHT]"), name
                for words in ("sum over dim 1", "Restart the computer", "--cpu", "risk to off"):
                    assert words in text, name
    assert loaded == []
    assert run.executions == []
    assert len(found._run.requests) == 1


@pytest.mark.parametrize("mode", ["off", "warn"])
def test_an_override_runs_and_is_recorded(demo, case, told, journal, monkeypatch, mode):
    words = f"Overridden: it runs because risk is {mode}."
    with case.simulated(monkeypatch, counted=False):
        told.put(monkeypatch, told.health(told.RETREAT))
        report = demo.encode(demo.vae, demo.image, risk=mode)
    assert words in case.flat(report)
    assert "sum over dim 1" in case.flat(report)
    numbers = case.numbers(report)
    assert numbers["preflight"]["status"] == "retreat"
    assert "XPU_PREFLIGHT" in [risk["code"] for risk in numbers["risks"]]
    (row,) = journal._db.execute("SELECT summary FROM phases").fetchall()
    assert "preflight retreat (hang)" in row[0]
    assert words in row[0]


def test_an_unsupported_device_runs_after_it_passed(demo, case, told, journal, monkeypatch):
    spec = replace(case.GOOD, family="xe-lp")
    with case.simulated(monkeypatch, spec, counted=False):
        with pytest.raises(RiskBlockedError, match="XPU_UNSUPPORTED"):
            demo.encode(demo.vae, demo.image)
        told.put(monkeypatch, told.health(told.HEALTHY), spec)
        report = demo.encode(demo.vae, demo.image)
    assert case.numbers(report)["severity"] == "warn"


@pytest.fixture(scope="module")
def undisturbed(demo, case):
    with pytest.MonkeyPatch.context() as patch, case.simulated(patch, counted=False):
        return demo.run_latent(steps=1)


@pytest.mark.parametrize(
    ("op_class", "ops"),
    [("norms", "^(native_layer_norm|native_group_norm)$"), ("reductions", "^(sum|mean|all)")],
)
def test_a_degraded_device_runs_exactly_its_workaround(
    demo, case, told, journal, undisturbed, monkeypatch, op_class, ops
):
    with case.simulated(monkeypatch) as run:
        told.put(monkeypatch, told.health(told.degraded(**{op_class: "cpu_block"})))
        run.dev.inject(ERROR_45, op=ops, times=0)
        report = demo.run(steps=1)
    assert (report.result[0]["samples"] - undisturbed).abs().max() <= TOLERANCE
    (execution,) = run.executions
    assert execution.attention_report.faults.events == []
    assert set(execution.ways.used) == {(op_class, "cpu_block")}
    text = case.flat(report)
    assert "Preflight degraded (workaround): 'layer norm' (norms) gave an error (45)." in text
    assert "on the processor" in text
    assert f"calls of {op_class} on the processor" in text
    assert case.numbers(report)["preflight"]["workarounds"] == {op_class: "cpu_block"}


@pytest.mark.parametrize(("way", "policy"), [("math", "math"), ("cpu_block", "cpu")])
def test_degraded_attention_is_planned_and_run_that_way(
    demo, case, told, journal, undisturbed, monkeypatch, way, policy
):
    with case.simulated(monkeypatch) as run:
        told.put(monkeypatch, told.health(told.degraded(attention=way)))
        run.dev.inject(ERROR_45, op="^scaled_dot_product|^_scaled_dot_product", times=0)
        report = demo.run(steps=1)
    assert (report.result[0]["samples"] - undisturbed).abs().max() <= TOLERANCE
    assert case.numbers(report)["plan"]["attention"] == policy
    report = run.executions[0].attention_report
    assert set(report.policies) == {policy}
    assert report.faults.events == []


def test_memory_is_released_after_a_value_was_read_back(case, told, monkeypatch):
    from supir_xpu.nodes.execution import Execution

    device, order = told.judged_machine(told.health(told.degraded(silence="read_back"))), []
    device.health.check(check_cancel=int, progress=print)
    execution = Execution(device, release=lambda: order.append("released"))

    class Live(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func.__name__ == "to":
                order.append("read")
            return super().__torch_function__(func, types, args, kwargs or {})

    value = torch.ones(3).as_subclass(Live)
    execution.run_layer("Block", lambda h, device, dtype: h, value)
    execution.release()
    assert order == ["read", "released"]


def test_after_a_lost_device_the_next_process_checks_again(
    demo, case, told, journal, tmp_path, monkeypatch
):
    told.keep(tmp_path)
    found = told.health(told.HEALTHY, folder=tmp_path)
    with case.simulated(monkeypatch) as run:
        told.put(monkeypatch, found)
        run.dev.inject("error: 20 (UR_RESULT_ERROR_DEVICE_LOST)", op="^convolution$", nth=3)
        assert found.known() is not None
        with pytest.raises(DeviceLostError):
            demo.run(steps=1)
        assert found.known() is None
    assert found._run.requests == [], "the judgement was remembered"
    later = told.health(told.RETREAT, folder=tmp_path)  # the next process
    assert later.known() is None
    assert later.check(check_cancel=int, progress=print).verdict.status == "retreat"


def test_cancel_during_the_first_checks_stops_the_run_and_they_are_tried_again(
    demo, case, told, journal, monkeypatch
):
    import comfy.model_management as mm

    found = told.health(told.HEALTHY)
    with case.simulated(monkeypatch, counted=False):
        told.put(monkeypatch, found)
        mm.interrupt_current_processing(True)
        with pytest.raises(mm.InterruptProcessingException):
            demo.encode(demo.vae, demo.image)
        demo.encode(demo.vae, demo.image)
    assert len(found._run.requests) == 2


def test_checks_that_cannot_start_do_not_stop_a_run(demo, case, told, journal, monkeypatch):
    found = told.health(OSError("no such interpreter"))
    with case.simulated(monkeypatch, counted=False):
        told.put(monkeypatch, found)
        report = demo.encode(demo.vae, demo.image)
        demo.encode(demo.vae, demo.image)
    assert len(found._run.requests) == 1, "once per process"
    shown = case.numbers(report)["preflight"]
    assert shown["status"] is None
    assert "no such interpreter" in shown["reason"]


@pytest.mark.slow
def test_real_children_stop_a_run_on_a_device_that_hangs(demo, case, told, tmp_path, monkeypatch):
    """The stand-in hangs in silence, in a child process of its own, as a real device would."""
    from supir_xpu.tests.xpu.probe_fixtures.cases import SHORT
    from supir_xpu.xpu.probe import preflight

    fault = {"op": "aten::sum", "action": "hang"}

    def run(request, folder, **options):
        request = replace(
            request, small=True, deadlines=SHORT, stand_in=STAND_IN,
            stand_in_options={"faults": [fault]},
        )  # fmt: skip
        return preflight(request, folder, **options, boot_id="linux:a")

    found = told.health(folder=tmp_path)
    found._run = run
    with case.simulated(monkeypatch, counted=False):
        told.put(monkeypatch, found)
        with pytest.raises(RiskBlockedError, match=r"XPU_PREFLIGHT.*hang.*reductions"):
            demo.encode(demo.vae, demo.image)
    assert found.as_dict()["status"] == "retreat"


# ------------------------------------------------------------------ guard, status, settings


def graph_of(demo_prompt_inputs=None):
    return {
        "demo": {"class_type": "SUPIR_XPU_LoadDemo", "inputs": {}},
        "image": {
            "class_type": "EmptyImage",
            "inputs": {"width": 512, "height": 512, "batch_size": 1, "color": 0},
        },
        "flight": {"class_type": "SUPIR_XPU_Preflight", "inputs": {"anything": ["image", 0]}},
        "code": {
            "class_type": "SUPIR_XPU_Encode",
            "inputs": {
                "vae": ["demo", 2],
                "image": ["flight", 0],
                "workspace_mb": 0,
                "risk": "auto",
            },
        },
    }


@pytest.mark.parametrize("family", ["pvc", "xe-lp"])
def test_the_guard_asks_no_device_and_lets_pass_what_will_be_checked(
    case, told, journal, monkeypatch, family
):
    from supir_xpu.nodes.graph import Graph
    from supir_xpu.nodes.graph_judging import judge_graph

    found = told.health(told.RETREAT)
    device = told.judged_machine(found, replace(case.GOOD, family=family))
    judged = judge_graph(Graph(graph_of()), ["code"], device)
    assert [node.node_id for node in judged.nodes] == ["code"], "the size came through Preflight"
    assert not judged.refused
    assert judged.nodes[0].as_dict()["preflight"]["pending"] is True
    assert found._run.requests == []


def test_the_guard_refuses_with_the_reasons_that_are_remembered(
    case, told, journal, tmp_path, monkeypatch
):
    from supir_xpu.nodes.graph import Graph
    from supir_xpu.nodes.graph_judging import judge_graph, suggest
    from supir_xpu.xpu.probe_types import Check

    hang = Check(2, "sum over dim 1", "hang", text="no answer for 20 s")
    told.keep(tmp_path, "retreat", hang)
    device = told.judged_machine(told.health(told.HEALTHY, folder=tmp_path))
    prompt = graph_of()
    (node,) = judge_graph(Graph(prompt), ["code"], device).refused
    (risk,) = [r for r in node.verdict.risks if r.code == "XPU_PREFLIGHT"]
    assert "sum over dim 1" in risk.message
    assert "Restart the computer" in risk.action
    assert suggest(Graph(prompt), ["code"], device, [node]) == []
    for mode in ("off", "warn"):
        prompt["code"]["inputs"]["risk"] = mode
        assert not judge_graph(Graph(prompt), ["code"], device).refused


def test_status_tells_the_verdict_its_age_and_that_there_is_none(
    case, told, journal, tmp_path, monkeypatch
):
    from supir_xpu.nodes.prompt_routes import status_dict

    none = status_dict(case.place(case.GOOD))["preflight"]
    assert none["status"] is None
    pending = status_dict(told.judged_machine(told.health()))["preflight"]
    assert (pending["status"], pending["pending"]) == (None, True)
    told.keep(tmp_path)
    status = status_dict(told.judged_machine(told.health(folder=tmp_path)))
    json.dumps(status)
    shown = status["preflight"]
    assert (shown["status"], shown["criterion"], shown["from_cache"]) == (
        "healthy", "all-passed", True,
    )  # fmt: skip
    assert shown["age_s"] > 1e6
    assert "checks passed" in shown["reason"]
    assert set(none) == set(pending) == set(shown)


def test_a_judgement_on_disk_that_changes_is_seen(told, tmp_path):
    found = told.health(folder=tmp_path)
    assert found.known() is None
    told.keep(tmp_path)
    assert found.known().from_cache


def test_a_retreat_found_by_another_process_reaches_this_one(told, tmp_path):
    from supir_xpu.xpu.probe_types import Check

    hang = Check(2, "sum", "hang", text="no answer for 20 s")
    found = told.health(told.HEALTHY, folder=tmp_path)
    told.keep(tmp_path)
    assert found.word == "healthy"
    told.keep(tmp_path, "retreat", hang)
    assert found.word == "healthy", "not later than what is known"
    told.keep(tmp_path, "retreat", hang, when=2.0)
    assert found.word == "retreat"
    told.keep(tmp_path, when=3.0)
    assert found.word == "healthy"
    (tmp_path / "supir_xpu_preflight.json").unlink()
    assert found.word == "healthy", "what is known is not forgotten"


@pytest.fixture
def user_folder(tmp_path, monkeypatch):
    import folder_paths

    monkeypatch.setattr(folder_paths, "get_user_directory", lambda: str(tmp_path))
    return tmp_path


def test_a_real_intel_gpu_gets_a_judgement_of_its_own(user_folder, case, monkeypatch):
    import comfy.model_management as mm

    machine = importlib.import_module("supir_xpu.nodes.machine")
    facts = case.place(case.GOOD).facts
    monkeypatch.setattr(mm, "get_torch_device", lambda: torch.device("xpu", 0))
    for name in ("get_free_memory", "get_total_memory"):
        monkeypatch.setattr(mm, name, lambda device: 2**30)
    monkeypatch.setattr(machine, "probe_facts", lambda device, memory: facts)
    monkeypatch.setattr(machine, "device_identity", lambda device: ("uuid-1", "1.6"))
    read = machine.read_machine()
    key = read.health.key
    assert (key.selector, key.device, key.driver) == ("xpu:0", "uuid-1", "1.6")
    assert key.torch == torch.__version__
    assert read.health.folder == user_folder
    (user_folder / "supir_xpu.yaml").write_text("facts: {kind: cpu}", encoding="utf-8")
    assert machine.read_machine().health is None


def test_a_folder_in_place_of_the_settings_is_named(user_folder, journal, caplog):
    from supir_xpu.nodes.prompt_routes import status_dict

    machine = importlib.import_module("supir_xpu.nodes.machine")
    assert machine.read_machine().settings_problem == ""
    (user_folder / "supir_xpu.yaml").mkdir()
    read = machine.read_machine()
    assert "supir_xpu.yaml is a folder" in caplog.text
    assert "is a folder" in status_dict(read)["settings"]["problem"]


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("facts: {kind: banana}", FactsError, "'kind' is 'banana'"),
        ("facts: {kind: xpu, flops_per_s: .nan}", FactsError, "'flops_per_s' is nan"),
        ("facts: {kind: xpu, name: '${oc.env:PATH}'}", ValueError, "facts.name"),
        ("profiles: {pvc: {gap_s: '${oc.env:PATH}'}}", ValueError, "profiles.pvc.gap_s"),
        ("guard_core: ${oc.env:PATH}", ValueError, "guard_core"),
        ("guard_core: off", ValueError, 'YAML reads as a boolean; write guard_core: "warn"'),
        ("guard_core: on", ValueError, 'boolean; write guard_core: "warn" or guard_core: "block"'),
        ("profiles: {pvc: {gap_s: .nan}}", ValueError, "profiles.pvc.gap_s"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_by_name(user_folder, text, error, words):
    machine = importlib.import_module("supir_xpu.nodes.machine")
    (user_folder / "supir_xpu.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(error, match=words.replace(".", r"\.")):
        machine.read_machine()


def test_wrong_facts_do_not_keep_the_pack_from_loading(user_folder, caplog):
    import asyncio

    nodes = importlib.import_module("supir_xpu.nodes")
    machine = importlib.import_module("supir_xpu.nodes.machine")
    (user_folder / "supir_xpu.yaml").write_text("facts: {kind: banana}", encoding="utf-8")
    machine.set_machine(None)
    try:
        asyncio.run(nodes.SupirXpuExtension().on_load())
    finally:
        machine.set_machine(None)
    assert "banana" in caplog.text
