"""``run.py bench --full``: SDXL and SUPIR at their true size through the real ComfyUI.

The files hold random weights, so this measures loading, speed and memory, not pictures. Runs
inside ``.venv``. Scratch files lie in ``.cache/full_size`` and are deleted whatever happens.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil
from benchmark_table import Row, figure
from host_events import Listener, Timeline
from host_server import start_server
from PIL import Image
from random_checkpoints import file_bytes, key_list, text_encoder_shapes, write_random

TITLE = "Full size"
ROOT = Path(__file__).resolve().parents[1]
KEYS = ROOT / "tests" / "parity" / "golden" / "supir_v0_keys.json.gz"
PHOTO = ROOT / "tools" / "photo" / "chelsea.jpg"
SCRATCH = ROOT / ".cache" / "full_size"
SDXL_NAME, SUPIR_NAME = "full_size_sdxl.safetensors", "full_size_supir.safetensors"
SIDE_PX = 256
STEPS = 2
SPARE_BYTES = 1 << 30
MEMORY_BYTES = 18 << 30
RUN_SECONDS = 3600.0

DESCRIPTION = f"""\
Random-weight float16 files at true size (SDXL with both text encoders, SUPIR), loaded by
`CheckpointLoaderSimple` and *Load SUPIR* in a real ComfyUI server on the CPU;
{SIDE_PX} x {SIDE_PX} px, {STEPS} steps of `restore_edm`. Peak memory is the server process's
resident maximum, file mappings included. The first step includes getting the weights ready."""


class FullSizeError(RuntimeError):
    """The benchmark cannot run here; the message says why."""


def make_prompt(picture: str) -> dict[str, Any]:
    """The whole restoration as an API prompt, on the two big files."""

    def node(class_type: str, **inputs: Any) -> dict[str, Any]:
        return {"class_type": class_type, "inputs": inputs}

    return {
        "base": node("CheckpointLoaderSimple", ckpt_name=SDXL_NAME),
        "supir": node("SUPIR_XPU_LoadSUPIR", supir_name=SUPIR_NAME),
        "photo": node("LoadImage", image=picture),
        "first": node(
            "SUPIR_XPU_FirstStage",
            **{"vae": ["base", 2], "supir": ["supir", 0], "image": ["photo", 0]},
            upscale_by=1.0,
        ),
        "words": node(
            "SUPIR_XPU_Conditioning", clip=["base", 1], positive="a cat", negative="blurry"
        ),
        "sample": node(
            "SUPIR_XPU_Sample",
            model=["base", 0],
            supir=["supir", 0],
            positive=["words", 0],
            negative=["words", 1],
            control=["first", 1],
            center=["first", 2],
            **{"seed": 1, "steps": STEPS, "sampler": "restore_edm"},
            **{"cfg_start": 4.0, "cfg_end": 4.0, "control_start": 1.0, "control_end": 1.0},
            **{"restore_cfg": 4.0, "s_churn": 5.0, "s_noise": 1.003, "eta": 1.0},
        ),
        "decode": node("SUPIR_XPU_Decode", vae=["base", 2], latent=["sample", 0]),
        "color": node(
            "SUPIR_XPU_ColorFix", image=["decode", 0], reference=["first", 0], method="wavelet"
        ),
        "save": node("SaveImage", images=["color", 0], filename_prefix="full_size"),
    }


def complete(prompt: dict[str, Any], object_info: dict[str, Any]) -> None:
    """Give every required widget that a prompt does not set its default, in place."""
    for node in prompt.values():
        required = object_info[node["class_type"]]["input"].get("required", {})
        for name, (_, *options) in required.items():
            if name not in node["inputs"] and options and "default" in options[0]:
                node["inputs"][name] = options[0]["default"]


def run() -> list[Row]:
    """Make the files, run the server, delete the files; return what was measured.

    Raises: FullSizeError for want of disk or memory, or when the picture is wrong; PromptError.
    """
    comfyui = Path(os.environ["COMFYUI_ROOT"])
    shutil.rmtree(SCRATCH, ignore_errors=True)  # of a run that was killed
    try:
        seconds = make_files(comfyui)
        return [figure("making the files", seconds, "s"), *measure(comfyui)]
    finally:
        shutil.rmtree(SCRATCH, ignore_errors=True)


def make_files(comfyui: Path) -> float:
    """Write both checkpoints into the scratch folder; return the seconds it took."""
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
    started = time.monotonic()
    for folder, name, shapes, seed in (
        ("checkpoints", SDXL_NAME, base, 1),
        ("supir", SUPIR_NAME, supir, 2),
    ):
        path = SCRATCH / "models" / folder / name
        path.parent.mkdir(parents=True)
        write_random(path, shapes, seed)
    return time.monotonic() - started


def measure(comfyui: Path) -> list[Row]:
    """Run the prompt once on a fresh server."""
    photo = SCRATCH / "photo.png"
    with Image.open(PHOTO) as image:
        image.crop((80, 20, 80 + SIDE_PX, 20 + SIDE_PX)).save(photo)
    print("Starting ComfyUI and restoring one picture ...", flush=True)
    with start_server(comfyui, ROOT, SCRATCH) as server:
        prompt = make_prompt(server.upload(photo))
        complete(prompt, server.get("/object_info").json())
        with peak_memory(server.process.pid) as peak, Listener(server) as heard:
            entry = server.run(prompt, RUN_SECONDS, heard.client_id)
            deadline = time.monotonic() + 2.0
            while heard.timeline.ended is None and time.monotonic() < deadline:
                time.sleep(0.02)
        picture = SCRATCH / "restored.png"
        picture.write_bytes(server.view(entry["outputs"]["save"]["images"][0]))
        complaints = load_complaints(server.log_path)
    check_picture(picture)
    if complaints:
        raise FullSizeError("ComfyUI did not take all weights:\n" + "\n".join(complaints))
    return rows(heard.timeline, peak[0])


def rows(timeline: Timeline, peak_bytes: int) -> list[Row]:
    """The figures of one run."""
    nodes = timeline.seconds_per_node()
    steps = timeline.seconds_per_step("sample")
    if len(steps) != STEPS:
        raise FullSizeError(f"{len(steps)} steps were reported instead of {STEPS}.")
    return [
        figure("loading SDXL", nodes["base"], "s"),
        figure("loading SUPIR", nodes["supir"], "s"),
        figure("first stage", nodes["first"], "s"),
        figure("prompts", nodes["words"], "s"),
        *(figure(f"step {i}", seconds, "s") for i, seconds in enumerate(steps, 1)),
        figure("decode", nodes["decode"], "s"),
        figure("whole run", sum(nodes.values()), "s"),
        figure("peak resident memory", peak_bytes / 2**30, "GiB"),
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
