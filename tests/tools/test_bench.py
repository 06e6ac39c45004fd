"""Benchmarks: the dispatcher, the written table, and what --full measures."""

from __future__ import annotations

import gzip
import importlib
import json
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open


@pytest.fixture
def table(tool):
    return tool("benchmark_table")


@pytest.fixture
def bench(tool):
    return tool("bench")


@pytest.fixture
def checkpoints(tool):
    return tool("random_checkpoints")


@pytest.fixture
def full_size(tool):
    return tool("full_size")


def test_sections_are_appended_and_replaced(table, tmp_path):
    path = tmp_path / "docs" / "benchmarks.md"
    row = table.figure("speed", 1.5, "s")
    for title, text in (("A", "first"), ("B", "second"), ("A", "again"), ("B", "too")):
        table.put_section(path, title, table.section(title, text, [row]))
    written = path.read_text(encoding="utf-8")
    assert written.count("## A\n") == written.count("## B\n") == 1
    assert "first" not in written
    assert "second" not in written
    assert written.index("again") < written.index("too")
    assert "| figure | value | unit |\n|---|---|---|\n| speed | 1.5 | s |" in written
    assert written.startswith("# Benchmarks")


def test_rows_are_shown_aligned_and_grouped_by_columns(table):
    rows = [{"a": 1, "b": "long"}, {"a": 22, "b": "x"}, {"c": 3}]
    assert table.show("T", rows).splitlines() == [
        "T",
        "  a   b",
        "  1   long",
        "  22  x",
        "  c",
        "  3",
    ]
    assert table.section("T", "why", rows).count("|---") == 3


def test_a_module_without_title_is_named_after_its_file(bench, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "machine", lambda: "a machine")
    module = SimpleNamespace(
        __name__="bench_thing", __doc__="What it is.\n\nMore.", run=lambda: [{"a": 1}]
    )
    bench.run_one(module, write=True, document=tmp_path / "b.md")
    written = (tmp_path / "b.md").read_text(encoding="utf-8")
    assert "## Thing\n\nWhat it is.\n\nMachine: a machine." in written


@pytest.mark.host  # psutil comes with ComfyUI
def test_machine_names_processor_memory_and_torch(table):
    line = table.machine()
    assert torch.__version__ in line
    assert "GiB" in line


def fake(tmp_path, action):
    return SimpleNamespace(__name__="fake", TITLE="Fake", DESCRIPTION="Nothing.", run=action)


def test_results_are_written_only_when_asked(bench, table, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "machine", lambda: "a machine")
    module = fake(tmp_path, lambda: [table.figure("x", 2, "s")])
    document = tmp_path / "benchmarks.md"
    bench.run_one(module, write=False, document=document)
    assert not document.exists()
    bench.run_one(module, write=True, document=document)
    written = document.read_text(encoding="utf-8")
    assert "| x | 2 | s |" in written
    assert "a machine" in written
    assert capsys.readouterr().out.count("x       2      s") == 2


def test_files_named_bench_are_registered(bench, tmp_path):
    for name in ("bench_b.py", "bench_a.py", "other.py", "bench.py"):
        (tmp_path / name).touch()
    assert bench.registered(tmp_path) == ["a", "b"]


def test_a_failed_benchmark_is_a_failed_command(bench, tmp_path, monkeypatch, capsys):
    def fail():
        raise RuntimeError("no disk")

    monkeypatch.setattr(bench.importlib, "import_module", lambda _: fake(tmp_path, fail))
    assert bench.main(["--full"]) == 1
    assert "no disk" in capsys.readouterr().err


def test_unknown_benchmark_is_refused(bench):
    with pytest.raises(SystemExit) as ended:
        bench.main(["nonsense"])
    assert ended.value.code == 2


def test_random_file_is_valid_and_scaled(checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "BLOCK_VALUES", 1000)  # the noise block is read many times
    shapes = {
        "conv.weight": (16, 32, 3, 3),
        "token_embedding.weight": (50, 40),
        "norm.weight": (7,),
        "norm.bias": (7,),
        "logit_scale": (),
    }
    path = tmp_path / "x.safetensors"
    checkpoints.write_random(path, shapes, seed=3)
    with safe_open(path, "pt") as file:
        read = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert {name: tuple(t.shape) for name, t in read.items()} == shapes
    assert all(t.dtype == torch.float16 for t in read.values())
    assert read["conv.weight"].float().std().item() == pytest.approx((32 * 9) ** -0.5, rel=0.1)
    assert read["token_embedding.weight"].float().std().item() == pytest.approx(0.02, rel=0.1)
    assert read["norm.weight"].eq(1).all()
    assert read["norm.bias"].eq(0).all()
    assert read["logit_scale"].item() == pytest.approx(4.6, abs=0.01)
    header = path.stat().st_size - checkpoints.file_bytes(shapes)
    assert header % 8 == 0


def test_random_file_depends_on_the_seed_alone(checkpoints, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        checkpoints.write_random(tmp_path / name, {"w": (4, 4)}, seed)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b != c


def test_key_list_is_taken_apart(checkpoints, tmp_path):
    path = tmp_path / "keys.json.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump({"sdxl_base": {"a": [1, 2]}, "supir": {"b": []}}, file)
    assert checkpoints.key_list(path) == ({"a": (1, 2)}, {"b": ()})


@pytest.mark.host
def test_text_encoders_have_the_keys_and_shapes_that_the_host_builds(checkpoints):
    """Only the unused projection and temperature of the first encoder are not in SDXL's files."""
    import os
    from pathlib import Path

    import comfy.ops
    from comfy import sdxl_clip
    from comfy.supported_models import SDXL

    shapes = checkpoints.text_encoder_shapes(Path(os.environ["COMFYUI_ROOT"]))
    state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    state = SDXL.process_clip_state_dict(None, state)
    model = sdxl_clip.SDXLClipModel(
        device="meta",
        dtype=torch.float16,
        model_options={"custom_operations": comfy.ops.disable_weight_init},
    )
    wanted = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    given = {name: tuple(t.shape) for name, t in state.items()}
    absent = set(wanted) - set(given)
    assert absent == {"clip_l.logit_scale", "clip_l.transformer.text_projection.weight"}
    assert given == {name: shape for name, shape in wanted.items() if name not in absent}


def heard(full_size, step_seconds, cpu_seconds):
    """A timeline of one run whose later steps take what is given."""
    clock = [0.0]
    timeline = full_size.Timeline(cpu_clock=lambda: clock[0])
    names = ("base", "supir", "photo", "first", "words", "sample", "decode", "save")
    for second, name in enumerate(names):
        timeline.hear("executing", {"node": name}, second * 10.0)
        clock[0] += 7.0
        if name == "sample":
            for step in range(1, full_size.STEPS + 1):
                at = 50.0 + step_seconds * step
                timeline.hear("progress", {"node": name, "value": step, "max": full_size.STEPS}, at)
                clock[0] += cpu_seconds
    timeline.hear("execution_success", {}, 95.0)
    return timeline


@pytest.mark.host
def test_both_sides_of_the_full_size_run_are_compared(full_size):
    latent = torch.tensor([1.0, -2.0])

    def pair(step_seconds, cpu_seconds, apart):
        return (
            full_size.summary(heard(full_size, step_seconds, cpu_seconds), 3 << 30, latent + apart),
            full_size.summary(heard(full_size, 2.0, 4.0), 2 << 30, latent),
        )

    pairs = [pair(3.0, 5.0, 0.5), pair(1.0, 1.0, 0.0), pair(2.5, 4.0, 0.1)]
    found = {(row["figure"], row.get("unit")): row for row in full_size.rows(pairs)}
    step = found["later steps, median", "s"]
    assert (step["SUPIR XPU"], step["ComfyUI"], step["ratio"]) == (2.5, 2.0, "1.250")
    assert step["lowest to highest"] == "0.500 to 1.500"
    assert found["later steps, median", "CPU s"]["ratio"] == "1.000"
    assert found["loading SDXL", "s"]["SUPIR XPU"] == 10.0
    assert found["loading both", "CPU s"]["SUPIR XPU"] == 14.0
    assert found["whole run", "CPU s"]["ComfyUI"] == 8 * 7.0 + full_size.STEPS * 4.0
    assert found["peak resident memory", "GiB"]["ratio"] == "1.500"
    assert found["largest difference of the latents", None]["value"] == "2.5e-01"


@pytest.mark.host
@pytest.mark.parametrize("ours_first", [True, False])
def test_the_first_side_of_a_pair_is_chosen_and_named(full_size, monkeypatch, ours_first):
    order = []
    monkeypatch.setattr(full_size, "measure", lambda _, make: order.append(make) or make)
    pair = full_size.measure_pair(None, ours_first=ours_first)
    assert pair == (full_size.our_prompt, full_size.core_prompt)
    assert order == list(pair if ours_first else pair[::-1])


@pytest.mark.host
def test_steps_in_turn_change_who_starts(tool, monkeypatch):
    turns, said = tool("full_size_turns"), []
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(turns.time, "process_time", lambda: next(clock))
    found = turns.in_turn(lambda: said.append("ours"), lambda: said.append("core"), 3)
    warm_up, first, second, third = (said[k : k + 2] for k in (0, 2, 4, 6))
    assert warm_up == first == third == ["ours", "core"]
    assert second == ["core", "ours"]
    assert found == [(10 / turns.STEPS, 10 / turns.STEPS)] * 3


@pytest.mark.host
def test_the_ratio_of_steps_in_turn_is_that_of_the_pairs(full_size):
    (row,) = full_size.turn_rows([(10.0, 10.0), (30.0, 20.0), (5.0, 5.0), (4.0, 8.0)])
    assert (row["SUPIR XPU"], row["ComfyUI"], row["ratio"]) == (7.5, 9.0, "1.000")
    low, high = map(float, row["95 % interval"].split(" to "))
    assert 0.5 <= low <= 1.0 <= high <= 1.5


@pytest.mark.host
@pytest.mark.core_supir
def test_a_child_that_fails_is_said_with_its_words(tool, tmp_path):
    turns = tool("full_size_turns")
    with pytest.raises(turns.TurnsError, match="(?s)exit code 1.*full_size_sdxl"):
        turns.measure(tmp_path, 1)


@pytest.mark.host
def test_a_missing_step_is_a_failure(full_size):
    timeline = heard(full_size, 3.0, 5.0)
    timeline.steps.pop()
    with pytest.raises(full_size.FullSizeError, match="2 steps"):
        full_size.summary(timeline, 0, torch.zeros(1))


@pytest.mark.host
def test_flat_and_wrong_pictures_are_failures(full_size, tmp_path):
    from PIL import Image

    path = tmp_path / "x.png"
    for size, why in (((256, 256), "flat"), ((64, 64), "not 256")):
        Image.new("RGB", size).save(path)
        with pytest.raises(full_size.FullSizeError, match=why):
            full_size.check_picture(path)
    Image.linear_gradient("L").save(path)
    full_size.check_picture(path)


@pytest.mark.host
def test_scratch_is_deleted_when_the_run_fails(full_size, tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    monkeypatch.setenv("COMFYUI_ROOT", str(tmp_path))
    monkeypatch.setattr(full_size, "SCRATCH", scratch)
    monkeypatch.setattr(full_size, "make_files", lambda _: scratch.mkdir() or 1.0)

    def fail(*_):
        assert scratch.is_dir()
        raise full_size.FullSizeError("no")

    monkeypatch.setattr(full_size, "measure", fail)
    with pytest.raises(full_size.FullSizeError):
        full_size.run()
    assert not scratch.exists()


@pytest.mark.host
def test_want_of_disk_is_said_with_both_numbers(full_size, tmp_path, monkeypatch):
    monkeypatch.setattr(full_size, "SCRATCH", tmp_path / "scratch")
    monkeypatch.setattr(full_size, "key_list", lambda _: ({"w": (1 << 40,)}, {}))
    monkeypatch.setattr(full_size, "text_encoder_shapes", lambda _: {})
    with pytest.raises(full_size.FullSizeError, match=r"2048\.0 GiB"):
        full_size.make_files(tmp_path)


@pytest.mark.host
def test_peak_memory_sees_a_child_grow(full_size):
    import subprocess
    import sys

    script = "x = b'x' * (200 << 20); print(len(x), flush=True); del x; input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        with full_size.peak_memory(child.pid) as peak:
            child.stdout.readline()
        child.stdin.close()
    assert peak[0] > 200 << 20


@pytest.mark.host
def test_log_lines_about_weights_are_found(full_size, tmp_path):
    log = tmp_path / "log"
    log.write_text("fine\nclip missing: ['a']\nleft over keys: x\n", encoding="utf-8")
    assert full_size.load_complaints(log) == ["clip missing: ['a']", "left over keys: x"]


@pytest.mark.host
def test_missing_widgets_get_their_defaults(full_size):
    prompt = {"a": {"class_type": "X", "inputs": {"set": 1}}}
    required = {"set": ["INT", {"default": 5}], "new": ["INT", {"default": 7}], "socket": ["VAE"]}
    full_size.complete(prompt, {"X": {"input": {"required": required}}})
    assert prompt["a"]["inputs"] == {"set": 1, "new": 7}


@pytest.mark.host
def test_the_guards_benchmark_sends_what_the_guard_reads(tool):
    import asyncio

    bench = tool("bench_guard")
    guard = importlib.import_module("supir_xpu.nodes.prompt_guard").guard
    body = json.dumps({"prompt": {"1": {"class_type": "SUPIR_XPU_Sample", "inputs": {}}}})
    answer = asyncio.run(guard(bench.Request(body.encode()), bench.passed))
    assert answer == "queued"


@pytest.mark.host
@pytest.mark.newest
def test_the_vaes_methods_are_compared_round_by_round(tool):
    bench = tool("bench_vae")
    with torch.inference_mode():
        rows = {row["method"]: row for row in bench.time_methods("decode", 64, 2)}
    assert rows["untiled"]["lowest to highest"] == "1.000 to 1.000"
    assert {name: row["rounds"] for name, row in rows.items()} == {
        "untiled": 2, "striped": 2, "striped+polyphase": 2, "host tiled": 1,
    }  # fmt: skip
    assert float(rows["striped"]["max_error"]) < 2e-5 * max(1.0, rows["striped"]["std"])
