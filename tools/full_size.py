"""``run.py bench --full``: SDXL and SUPIR at true size, by this pack and by ComfyUI's own nodes.

The files hold random weights, so this measures loading, speed, memory and agreement, not pictures.
Every run has a server process of its own; runs of the two sides alternate. Runs inside ``.venv``. Scratch files
lie in ``.cache/full_size`` and are deleted whatever happens.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import full_size_turns
import psutil
import torch
from bench_walk import interval
from benchmark_table import Row
from full_size_prompts import (
    SDXL_NAME,
    SIDE_PX,
    STEPS,
    SUPIR_NAME,
    Prompt,
    complete,
    core_prompt,
    our_prompt,
)
from host_events import Listener, Timeline
from host_server import Server, start_server
from PIL import Image
from random_checkpoints import file_bytes, key_list, text_encoder_shapes, write_random
from safetensors.torch import load_file

TITLE = "Full size"
ROOT = Path(__file__).resolve().parents[1]
KEYS = ROOT / "tests" / "parity" / "golden" / "supir_v0_keys.json.gz"
PHOTO = ROOT / "tools" / "photo" / "chelsea.jpg"
SCRATCH = ROOT / ".cache" / "full_size"
PAIRS = 2
"""Runs of each side in a server of its own. Their order changes from pair to pair."""

TURNS = 8
"""Pairs of runs of two steps in one process."""

SPARE_BYTES = 1 << 30
MEMORY_BYTES = 18 << 30
RUN_SECONDS = 3600.0

DESCRIPTION = f"""\
Random-weight float16 files at true size (SDXL with both text encoders, SUPIR) in a real ComfyUI
server on the CPU; {PAIRS} runs of each side, each in a process of its own, the first side changing
from pair to pair. {SIDE_PX} x {SIDE_PX} px, {STEPS} steps of Euler on the same noise and
words, levels from the table, control 1, restore_cfg 4, cfg 4. *ComfyUI* is `ModelPatchLoader`,
`SUPIRApply` and `KSampler`. Columns of the two sides are medians; the ratio is the median of the
pairs' ratios, with the lowest and highest. The first step includes getting the weights ready. CPU
seconds are of the server process, all threads. Peak memory is its resident maximum, file mappings
included. A machine's speed drifts between two servers by more than the sides differ, so the last rows
measure steps of both sides in turn in one process on one SDXL. The median of the pairs' ratios is not
the ratio of the medians, as the machine's speed drifts over the pairs too. The latents' difference is
relative to the largest value."""


class FullSizeError(RuntimeError):
    """The benchmark cannot run here; the message says why."""


@dataclass(frozen=True)
class Measured:
    """One side's run: seconds per node and step (clock and processor), memory, and its latent."""

    nodes: dict[str, float]
    cpu_nodes: dict[str, float]
    steps: list[float]
    cpu_steps: list[float]
    peak_bytes: int
    latent: torch.Tensor


def run() -> list[Row]:
    """Make the files, run both servers, delete the files; return what was measured.

    Raises: FullSizeError for want of disk or memory, or when the picture is wrong; PromptError.
    """
    comfyui = Path(os.environ["COMFYUI_ROOT"])
    shutil.rmtree(SCRATCH, ignore_errors=True)  # of a run that was killed
    try:
        make_files(comfyui)
        pairs = [measure_pair(comfyui, ours_first=k % 2 == 0) for k in range(PAIRS)]
        print("Running steps of both sides in turn in one process ...", flush=True)
        return [*rows(pairs), *turn_rows(full_size_turns.measure(SCRATCH, TURNS))]
    finally:
        shutil.rmtree(SCRATCH, ignore_errors=True)


def make_files(comfyui: Path) -> None:
    """Write both checkpoints into the scratch folder. Raises: FullSizeError."""
    base, supir = key_list(KEYS)
    base |= text_encoder_shapes(comfyui)
    needed = file_bytes(base) + file_bytes(supir)
    SCRATCH.mkdir(parents=True)
    free = shutil.disk_usage(SCRATCH).free
    if free < needed + SPARE_BYTES:
        raise FullSizeError(
            f"The files need {needed / 2**30:.1f} GiB and 1 GiB to spare, but {SCRATCH} has "
            f"{free / 2**30:.1f} GiB free."
        )
    available = psutil.virtual_memory().available
    if available < MEMORY_BYTES:
        raise FullSizeError(
            f"The run needs about {MEMORY_BYTES >> 30} GiB of memory, but "
            f"{available / 2**30:.1f} GiB are available. Close other programs."
        )
    print(f"Writing {needed / 2**30:.1f} GiB of random weights to {SCRATCH} ...", flush=True)
    for folder, name, shapes, seed in (
        ("checkpoints", SDXL_NAME, base, 1),
        ("model_patches", SUPIR_NAME, supir, 2),
    ):
        path = SCRATCH / "models" / folder / name
        path.parent.mkdir(parents=True)
        write_random(path, shapes, seed)


def measure_pair(comfyui: Path, *, ours_first: bool) -> tuple[Measured, Measured]:
    """Run both sides once; return (ours, core). Raises: as measure."""
    if ours_first:
        ours = measure(comfyui, our_prompt)
        return ours, measure(comfyui, core_prompt)
    core = measure(comfyui, core_prompt)
    return measure(comfyui, our_prompt), core


def measure(comfyui: Path, make_prompt: Callable[[str, int], Prompt]) -> Measured:
    """Run a prompt once on a fresh server. Raises: FullSizeError, PromptError, ServerError."""
    photo = SCRATCH / "photo.png"
    with Image.open(PHOTO) as image:
        image.crop((80, 20, 80 + SIDE_PX, 20 + SIDE_PX)).save(photo)
    print("Starting ComfyUI and restoring one picture ...", flush=True)
    shutil.rmtree(SCRATCH / "output", ignore_errors=True)
    with start_server(comfyui, ROOT, SCRATCH) as server:
        prompt = make_prompt(server.upload(photo), SIDE_PX)
        complete(prompt, server.get("/object_info").json())
        process = psutil.Process(server.process.pid)
        with peak_memory(process.pid) as peak, Listener(server) as heard:
            heard.timeline.cpu_clock = lambda: sum(process.cpu_times()[:2])
            picture = run_prompt(server, prompt, heard)
        complaints = load_complaints(server.log_path)
    check_picture(picture)
    if complaints:
        raise FullSizeError("ComfyUI did not take all weights:\n" + "\n".join(complaints))
    latents = list((SCRATCH / "output").rglob("*.latent"))
    if len(latents) != 1:
        raise FullSizeError(f"The run kept {len(latents)} latents, not one.")
    return summary(heard.timeline, peak[0], load_file(latents[0])["latent_tensor"])


def run_prompt(server: Server, prompt: Prompt, heard: Listener) -> Path:
    """Run a prompt to its end; return the picture it saved."""
    entry = server.run(prompt, RUN_SECONDS, heard.client_id)
    deadline = time.monotonic() + 2.0
    while heard.timeline.ended is None and time.monotonic() < deadline:
        time.sleep(0.02)
    picture = SCRATCH / "restored.png"
    picture.write_bytes(server.view(entry["outputs"]["save"]["images"][0]))
    return picture


def summary(timeline: Timeline, peak_bytes: int, latent: torch.Tensor) -> Measured:
    """What one run was heard to do. Raises: FullSizeError if a step is missing."""
    steps = timeline.seconds_per_step("sample")
    if len(steps) != STEPS:
        raise FullSizeError(f"{len(steps)} steps were reported instead of {STEPS}.")
    cpu = timeline.cpu_seconds_per_step("sample")
    nodes, cpu_nodes = timeline.seconds_per_node(), timeline.cpu_seconds_per_node()
    return Measured(nodes, cpu_nodes, steps, cpu, peak_bytes, latent)


def rows(pairs: list[tuple[Measured, Measured]]) -> list[Row]:
    """Both sides and their ratio; the latents' largest difference in parts of the largest value.

    Args: pairs: (ours, core).
    """

    def row(what: str, unit: str, read: Callable[[Measured], float]) -> Row:
        read_pairs = [(read(ours), read(core)) for ours, core in pairs]
        ratios = sorted(ours / core for ours, core in read_pairs if core)
        return {
            "figure": what,
            "SUPIR XPU": round(median(ours for ours, _ in read_pairs), 2),
            "ComfyUI": round(median(core for _, core in read_pairs), 2),
            "ratio": f"{median(ratios):.3f}" if ratios else "-",
            "lowest to highest": f"{ratios[0]:.3f} to {ratios[-1]:.3f}" if ratios else "-",
            "unit": unit,
        }

    apart = max(
        float((ours.latent - core.latent).abs().max() / core.latent.abs().max())
        for ours, core in pairs
    )
    loaders = ("base", "supir")
    return [
        row("loading SDXL", "s", lambda m: m.nodes["base"]),
        row("loading SUPIR", "s", lambda m: m.nodes["supir"]),
        row("loading both", "CPU s", lambda m: sum(m.cpu_nodes[name] for name in loaders)),
        row("encode, decode, encode before sampling", "s", lambda m: m.nodes["first"]),
        row("first step", "s", lambda m: m.steps[0]),
        row("later steps, median", "s", lambda m: median(m.steps[1:])),
        row("later steps, median", "CPU s", lambda m: median(m.cpu_steps)),
        row("decode", "s", lambda m: m.nodes["decode"]),
        row("whole run", "s", lambda m: sum(m.nodes.values())),
        row("whole run", "CPU s", lambda m: sum(m.cpu_nodes.values())),
        row("peak resident memory", "GiB", lambda m: m.peak_bytes / 2**30),
        {"figure": "largest difference of the latents", "value": f"{apart:.1e}"},
    ]


def turn_rows(pairs: list[tuple[float, float]]) -> list[Row]:
    """The steps in turn: seconds of both sides, and the pairs' median ratio with its interval.

    Args: pairs: (ours, core) in processor seconds per step.
    """
    low, mid, high = interval([ours / core for ours, core in pairs])
    return [
        {
            "steps in turn": f"{len(pairs)} pairs of {full_size_turns.STEPS} steps",
            "SUPIR XPU": round(median(ours for ours, _ in pairs), 2),
            "ComfyUI": round(median(core for _, core in pairs), 2),
            "ratio": f"{mid:.3f}",
            "95 % interval": f"{low:.3f} to {high:.3f}",
            "unit": "CPU s per step",
        }
    ]


def check_picture(path: Path) -> None:
    """Raises: FullSizeError unless the picture has the right size and is not one flat colour."""
    with Image.open(path) as image:
        extrema = image.convert("L").getextrema()
        if image.size != (SIDE_PX, SIDE_PX):
            raise FullSizeError(f"The picture is {image.size} px, not {SIDE_PX} x {SIDE_PX}.")
    if extrema[0] == extrema[1]:
        raise FullSizeError("The picture is one flat colour: the values were not finite.")


def load_complaints(log: Path) -> list[str]:
    """Lines of the server's log about weights that were missing or left over."""
    words = ("missing", "unexpected", "left over keys")
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line for line in lines if any(word in line.lower() for word in words)]


@contextlib.contextmanager
def peak_memory(pid: int) -> Generator[list[int], None, None]:
    """Watch a process; the list's one entry is its largest resident memory in bytes so far."""
    process, peak, stop = psutil.Process(pid), [0], threading.Event()

    def watch() -> None:
        while not stop.is_set():
            with contextlib.suppress(psutil.Error):
                memory = process.memory_info()
                # Windows keeps the maximum itself; elsewhere it is sampled.
                peak[0] = max(peak[0], memory.rss, getattr(memory, "peak_wset", 0))
            stop.wait(0.1)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        stop.set()
        watcher.join()
        peak[0] = max(peak[0], kernel_peak(pid))


def kernel_peak(pid: int) -> int:
    """The maximum that Linux kept for a living process in bytes (VmHWM), else 0."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
        for line in text.splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
