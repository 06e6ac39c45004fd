"""Mutated workflows through the API: refused with a reason, run, or failed with our own message.

The mutations stay inside ``inputs`` and class names: what is no node at all is ComfyUI's to judge.
"""

from __future__ import annotations

import copy
import math
import random
import time
from collections import Counter

import numpy as np
import pytest

pytestmark = pytest.mark.host

ROUNDS, PER_ROUND = 24, 10
PATIENCE_SECONDS = 2.5
"""How long an accepted mutation may run before it is cancelled."""

END_SECONDS = 30.0
OUR_ERRORS = (".supir.errors.", ".xpu.errors.")

seen = Counter()


def link(node, output=0):
    return [node, output]


def graphs(workflow, picture):
    """Three workflows that together hold every node of the pack that needs no file."""
    quick = {"steps": 1, "cfg_start": 1.0, "cfg_end": 1.0, "seed": 5}
    workflow.set("LoadImage", image=picture).set("SUPIR_XPU_Sample", **quick)
    demo = workflow.copy()
    stage, prompts = workflow.node("SUPIR_XPU_FirstStage"), workflow.node("SUPIR_XPU_Conditioning")
    load, loaded = workflow.node("LoadImage"), workflow.node("SUPIR_XPU_LoadDemo")
    sample = demo[workflow.node("SUPIR_XPU_Sample")]["inputs"]

    def pick(*names):
        return {name: sample[name] for name in names}

    guidance = pick("cfg_start", "cfg_end", "control_start", "control_end", "restore_cfg")
    noise = pick("sampler", "s_churn", "s_noise", "eta")
    common = {"model": link(loaded, 0), "supir": link(loaded, 3)}

    def node(class_type, **inputs):
        return {"class_type": class_type, "inputs": inputs}

    custom = {
        load: demo[load],
        loaded: demo[loaded],
        stage: demo[stage],
        prompts: demo[prompts],
        "tiles": node("SUPIR_XPU_Tiles", image=link(stage), latent=link(stage, 1), tile_px=-1,
                      tile_overlap_px=64),
        "guider": node("SUPIR_XPU_Guider", **common, positive=link(prompts), **guidance,
                       negative=link(prompts, 1), control=link(stage, 1), center=link(stage, 2),
                       tile_px=link("tiles", 1), tile_overlap_px=link("tiles", 2)),
        "sampler": node("SUPIR_XPU_Sampler", **noise),
        "sigmas": node("SUPIR_XPU_Sigmas", model=link(loaded), steps=1, schedule="ddpm"),
        "noise": node("RandomNoise", noise_seed=3),
        "again": node("SUPIR_XPU_Encode", vae=link(loaded, 2), image=link(stage), workspace_mb=0),
        "run": node("SamplerCustomAdvanced", noise=link("noise"), guider=link("guider"),
                    sampler=link("sampler"), sigmas=link("sigmas"), latent_image=link("again")),
        "decode": node("SUPIR_XPU_Decode", vae=link(loaded, 2), latent=link("run"), workspace_mb=0),
        "save": node("SaveImage", images=link("decode"), filename_prefix="fuzz"),
    }  # fmt: skip
    texts = {"positive": "sharp", "negative": "blurry", "color_fix": "adain"}
    clip_vae = {"clip": link(loaded, 1), "vae": link(loaded, 2), "image": link(load)}
    widgets = {k: v for k, v in sample.items() if not isinstance(v, list)}
    whole = node("SUPIR_XPU_Upscale", **common, **clip_vae, upscale_by=1.0, **texts, **widgets)
    for one in (demo[stage], custom["guider"], custom["again"], custom["decode"], whole):
        one["inputs"]["risk"] = "auto"
    single = {
        load: demo[load],
        loaded: demo[loaded],
        "whole": whole,
        "save": node("SaveImage", images=link("whole"), filename_prefix="fuzz"),
    }
    return [demo, custom, single]


def nested(value, depth, as_dict):
    for _ in range(depth):
        value = {"a": value} if as_dict else [value]
    return value


NUMBERS = [
    -1, -(2**63), 2**63, 2**64, 2**70, 10**30, -1e308, 1e308, 1e-320, 0, -0.0, 0.5, 1000, 8191, 63,
    65, 2.999, math.nan, math.inf, -math.inf,
]  # fmt: skip
TEXTS = [
    "", " ", "7", "-3", "1e3", "0x10", "NaN", "true", "null", "[1]", "../../etc/passwd", "C:\\x",
    "süpir 修復 🖼️", "\u202e\u0000\ud800", "a" * 20000, "(((((:1.5", "embedding:none", "restore_edm\n",
]  # fmt: skip
OTHERS = [None, True, False, {}, [], [[]], {"__value__": [1, 2]}, {"__value__": None}, [1, 2, 3]]


def wrong_value(rng):
    kind = rng.randrange(4)
    if kind == 3:
        return nested(rng.choice([1, "x", None]), rng.choice([1, 2, 60]), rng.random() < 0.5)
    return copy.deepcopy(rng.choice((NUMBERS, TEXTS, OTHERS)[kind]))


def mutate(prompt, rng):
    """Change one thing; return what, in words."""
    ours = [k for k, n in prompt.items() if n["class_type"].startswith("SUPIR_XPU_")]
    node_id = rng.choice(ours if rng.random() < 0.9 else list(prompt))
    node = prompt[node_id]
    inputs = node["inputs"]
    links = [k for k, v in inputs.items() if isinstance(v, list)]
    kinds = ["extra", "class"]
    kinds += ["remove", "value", "value", "value", "text", "number", "self"] if inputs else []
    kinds += ["swap", "target", "output", "constant"] if links else []
    kind = rng.choice(kinds)
    name = rng.choice(links if kind in ("swap", "target", "output", "constant") else [*inputs, "?"])
    value = None
    if kind == "remove":
        inputs.pop(name, None)
    elif kind in ("value", "constant"):
        inputs[name] = value = wrong_value(rng)
    elif kind == "text":  # a number as text, a text as number
        old = inputs.get(name)
        inputs[name] = value = rng.choice(TEXTS) if isinstance(old, str) else str(old)
    elif kind == "number":
        inputs[name] = value = rng.choice(NUMBERS)
    elif kind == "self":
        inputs[name] = value = [node_id, 0]
    elif kind == "swap":
        other = rng.choice(links)
        inputs[name], inputs[other] = inputs[other], inputs[name]
        value = other
    elif kind == "target":
        inputs[name] = value = [rng.choice([*prompt, "404", "", "ü", 5]), rng.randrange(4)]
    elif kind == "output":
        wrong = [-1, 4, 99, 2**40, "0", 1.5, None, [0]]
        inputs[name] = value = [inputs[name][0], rng.choice(wrong)]
    elif kind == "extra":
        name = rng.choice(["extra", "self", "cls", "ünknown", "tile_px", "unique_id", "kwargs"])
        inputs[name] = value = wrong_value(rng)
    elif kind == "class":
        names = ["SUPIR_XPU_Nothing", "", "supir_xpu_sample", "SUPIR_conditioner"]
        names += [n["class_type"] for n in prompt.values()]
        node["class_type"] = value = rng.choice(names)
    return f"{kind} {node_id} ({node['class_type']}).{name} = {str(value)[:80]!r}"


def ended(server, prompt_id):
    """The history entry of a prompt that is cancelled when it takes long; None if it never ends."""
    started, cancelled = time.monotonic(), False
    while time.monotonic() - started < PATIENCE_SECONDS + END_SECONDS:
        entry = server.get(f"/history/{prompt_id}").json().get(prompt_id)
        if entry is not None:
            return entry
        if not cancelled and time.monotonic() - started > PATIENCE_SECONDS:
            cancelled = True
            server.cancel(prompt_id)
        time.sleep(0.03)
    return None


def said(node_errors):
    return [error for node in node_errors.values() for error in node["errors"]]


def judge(server, prompt):
    """What became of a prompt, and what is wrong with that (None: nothing)."""
    reply = server.post("/prompt", {"prompt": prompt, "client_id": "fuzz"})
    if reply.status not in (200, 400):
        return "broken", f"HTTP {reply.status}: {reply.body[:300]!r}"
    body = reply.json()
    texts = [str(error.get("message")) for error in said(body.get("node_errors") or {})]
    ours = [
        t for e in said(body.get("node_errors") or {}) for t in e["extra_info"].get("traceback", [])
    ]
    if any("custom_nodes" in text for text in ours):
        return "broken", f"our validation raised: {body}"
    if reply.status == 400:
        error = body["error"]
        message = error.get("message") if isinstance(error, dict) else error
        return "refused", None if message and all(texts) else f"no reason given: {body}"
    entry = ended(server, body["prompt_id"])
    if entry is None:
        return "broken", "it neither ended nor could be cancelled"
    for kind, data in entry["status"]["messages"]:
        if kind == "execution_interrupted":
            return "cancelled", None
        if kind == "execution_error":
            return "failed", complaint(data)
    return "ran", None


def complaint(data):
    """What is wrong with an error that a run ended with, or None."""
    what = f"{data['node_type']}: {data['exception_type']}: {data['exception_message']}"
    if any(tree in data["exception_type"] for tree in OUR_ERRORS):
        return None if len(data["exception_message"]) > 30 else f"no clear message: {what}"
    blame = [line for line in data["traceback"] if "custom_nodes" in line]
    if data["node_type"].startswith("SUPIR_XPU_") or blame:
        return f"not our message: {what}\n{''.join(data['traceback'][-4:])}"
    return None  # a node of ComfyUI's own, in its own words


@pytest.fixture
def bases(server, workflow, make_picture):
    return graphs(workflow, server.upload(make_picture(24, 20, seed=8)))


def test_the_workflows_run_when_they_are_not_changed(server, bases):
    for prompt in bases:
        assert server.run(prompt, timeout=120)["status"]["status_str"] == "success"


def test_the_workflows_run_without_their_optional_inputs(server, bases):
    info = server.get("/object_info").json()
    left_out = 0
    for prompt in bases:
        for node in prompt.values():
            for name in info[node["class_type"]]["input"].get("optional", {}):
                left_out += node["inputs"].pop(name, None) is not None
        assert server.run(prompt, timeout=120)["status"]["status_str"] == "success"
    assert left_out > 5


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_changed_workflows_are_refused_or_run_or_fail_with_our_message(server, bases, seed):
    rng = random.Random(seed)
    wrong = []
    for _ in range(PER_ROUND):
        prompt = copy.deepcopy(rng.choice(bases))
        changes = [mutate(prompt, rng) for _ in range(rng.choice([1, 1, 1, 2]))]
        outcome, problem = judge(server, prompt)
        seen[outcome] += 1
        if problem:
            wrong.append(f"{changes}\n  {problem}")
    assert not wrong, "\n".join(wrong)


def test_the_mutations_reached_every_outcome_and_the_server_works_as_before(
    server, bases, saved, workflow
):
    if sum(seen.values()) == ROUNDS * PER_ROUND:  # all rounds were selected
        assert seen["refused"] > ROUNDS * PER_ROUND / 5
        assert seen["ran"] > 10
        assert seen["failed"] > 5
    before = np.asarray(saved(server.run(bases[0], timeout=120))[0])
    server.post("/free", {"unload_models": True, "free_memory": True})
    again = copy.deepcopy(bases[0])
    again[workflow.node("SUPIR_XPU_Sample")]["inputs"]["seed"] += 1
    server.run(again, timeout=120)
    after = np.asarray(saved(server.run(bases[0], timeout=120))[0])
    assert np.array_equal(before, after)
    log = server.log_path.read_text(encoding="utf-8", errors="replace")
    assert "Error handling request" not in log
