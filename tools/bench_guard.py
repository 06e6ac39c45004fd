"""What the guard adds to queueing a prompt: a graph of 200 nodes, judged on a simulated device.

One restoration, or four of pictures of different sizes, each with First Stage, Sample, Decode and
Color Fix, behind long chains of picture nodes. The device is an Arc Pro B70 by its facts only; nothing
runs on one. Time is of the processor, median of 9; "first" has empty caches, "again" is the same
graph once more, as with another seed; "after a start" is a picture never seen before, with what the
pack plans ahead when ComfyUI starts. The limit is 50 ms.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from benchmark_table import Row
from the_pack import load_with_host

TITLE = "Guard"
NODES = 200
SIZES = ((956, 1399), (512, 512), (1024, 768), (31, 2000))
RUNS = 9
GIB = 1024**3
B70 = {
    "kind": "xpu",
    "family": "battlemage",
    "os": "Windows",
    "driver": "32.0.101.8629",
    "name": "Intel(R) Arc(TM) Pro B70 Graphics",
    "total_bytes": 32 * GIB,
    "free_bytes": 28 * GIB,
    "max_alloc_bytes": 4 * GIB,
}
SAMPLE = {
    "steps": 35,
    "sampler": "restore_edm",
    "cfg_start": 4.0,
    "cfg_end": 4.0,
    "control_start": 1.0,
    "control_end": 1.0,
    "restore_cfg": 4.0,
    "s_churn": 5.0,
    "s_noise": 1.003,
    "eta": 1.0,
    "tile_px": 0,
    "tile_overlap_px": 256,
    "risk": "auto",
}


def make_graph(folder: Path, restorations: int, nodes: int = NODES) -> dict[str, Any]:
    """Return an API prompt of about that many nodes, its pictures written to a folder."""
    from PIL import Image

    graph: dict[str, Any] = {
        "ckpt": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "x"}},
        "supir": {"class_type": "SUPIR_XPU_LoadSUPIR", "inputs": {"supir_name": "x"}},
    }
    padding = (nodes - len(graph) - 7 * restorations) // restorations
    for k, (width, height) in enumerate(SIZES[:restorations]):
        Image.new("RGB", (width, height)).save(folder / f"{k}.png")
        graph[f"load{k}"] = {"class_type": "LoadImage", "inputs": {"image": f"{k}.png"}}
        last = f"load{k}"
        for i in range(padding):
            graph[f"i{k}_{i}"] = {"class_type": "ImageInvert", "inputs": {"image": [last, 0]}}
            last = f"i{k}_{i}"
        vae, net = {"vae": ["ckpt", 2]}, {"supir": ["supir", 0]}
        text = {"clip": ["ckpt", 1], "positive": "", "negative": ""}
        conds = {"positive": [f"text{k}", 0], "negative": [f"text{k}", 1]}
        parts: dict[str, tuple[str, dict[str, Any]]] = {
            "text": ("Conditioning", text),
            "first": ("FirstStage", {**vae, **net, "image": [last, 0], "upscale_by": 2.0}),
            "sample": (
                "Sample",
                {**SAMPLE, **net, **conds, "model": ["ckpt", 0], "control": [f"first{k}", 1]},
            ),
            "decode": ("Decode", {**vae, "latent": [f"sample{k}", 0]}),
            "color": ("ColorFix", {"image": [f"decode{k}", 0], "reference": [f"first{k}", 0]}),
        }
        for name, (kind, inputs) in parts.items():
            graph[f"{name}{k}"] = {"class_type": f"SUPIR_XPU_{kind}", "inputs": inputs}
        graph[f"save{k}"] = {"class_type": "SaveImage", "inputs": {"images": [f"color{k}", 0]}}
    return graph


class Request:
    """As much of a web request as the guard reads."""

    method, path, charset = "POST", "/prompt", "utf-8"

    def __init__(self, body: bytes) -> None:
        self.body = body

    async def read(self) -> bytes:
        return self.body

    async def json(self) -> Any:
        return json.loads(self.body)


async def passed(_: Any) -> str:
    """Stand in for ComfyUI."""
    return "queued"


def measure(guard: Any, body: bytes, prepare: Callable[[], object] | None = None) -> float:
    """Return the median milliseconds of the guard on a body."""

    async def once() -> float:
        started = time.process_time()
        answer = await guard(Request(body), passed)
        if answer != "queued":
            raise RuntimeError(f"The guard refused the benchmark's graph: {answer.text}")
        return time.process_time() - started

    taken: list[float] = []
    for _ in range(RUNS):
        if prepare is not None:
            prepare()
        taken.append(asyncio.run(once()))
    return statistics.median(taken) * 1e3


def module(name: str) -> Any:
    """Return a module of the pack's node layer."""
    return importlib.import_module(f"supir_xpu.nodes.{name}")


def run() -> list[Row]:
    """Measure everything; one row per figure."""
    load_with_host("supir.striped")
    logging.getLogger("supir_xpu").setLevel(logging.ERROR)  # warnings are part of the work, once
    import folder_paths
    from supir_xpu.nodes import NODES as OURS
    from supir_xpu.xpu.device import facts_from_mapping
    from supir_xpu.xpu.device_profiles import bundled_profiles
    from supir_xpu.xpu.journal import Journal

    import nodes as host_nodes  # pyright: ignore[reportMissingModuleSource]

    for node in OURS:
        host_nodes.NODE_CLASS_MAPPINGS[node.GET_SCHEMA().node_id] = node
    machine, planning = module("machine"), module("planning")
    facts = facts_from_mapping(B70)
    simulated = machine.Machine(facts, bundled_profiles().pick(facts), simulated=True)
    guard = module("prompt_guard").guard
    plan_network = importlib.import_module("supir_xpu.supir.plan_network")

    def forget() -> None:
        planning.plan_cached.cache_clear()
        planning.attention_cost.cache_clear()
        plan_network.plan_step.cache_clear()
        module("picture_file").header_size.cache_clear()

    def start() -> None:
        forget()
        module("graph_judging").warm_up(simulated)
        planning.plan_cached.cache_clear()  # of pictures; plans of tiles stay

    with tempfile.TemporaryDirectory() as folder:
        before = folder_paths.get_input_directory()
        folder_paths.set_input_directory(folder)
        rows: list[Row] = []
        bodies = {
            count: json.dumps({"prompt": make_graph(Path(folder), count)}).encode()
            for count in (1, len(SIZES))
        }
        try:
            module("journal").set_journal(Journal(None))
            machine.set_machine(simulated)
            for count, body in bodies.items():
                what = f"{NODES} nodes, {3 * count} of them judged"
                rows.append(_row(f"{what}: first", measure(guard, body, forget)))
                rows.append(_row(f"{what}: after a start", measure(guard, body, start)))
                rows.append(_row(f"{what}: again", measure(guard, body)))
            machine.set_machine(None)
            rows.append(_row(f"{what}: on a device without risk", measure(guard, body)))
            plain = body.replace(b"SUPIR", b"OTHER")
            rows.append(_row("a graph without SUPIR", measure(guard, plain)))
        finally:
            machine.set_machine(None)
            module("journal").set_journal(None)
            folder_paths.set_input_directory(before)
    return rows


def _row(what: str, value: float) -> Row:
    return {"what": what, "median": round(value, 2), "unit": "ms"}


if __name__ == "__main__":
    from benchmark_table import show

    print(show(TITLE, run()))
