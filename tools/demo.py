"""``run.py demo``: damage the bundled photograph, restore it with the real ComfyUI, measure and show.

Runs inside ``.venv``, with the environment variable COMFYUI_ROOT naming ComfyUI's folder. Writes
to ``output/`` and ``.cache/`` of the repository only.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import demo_metrics as metrics
import numpy as np
from demo_degrade import damage
from host_events import Listener, Timeline
from host_server import PromptError, Server, ServerError, start_server
from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).resolve().parents[1]
PHOTO = ROOT / "tools" / "photo" / "chelsea.jpg"
WORKFLOW = ROOT / "example_workflows" / "api" / "demo_restore.json"
OUTPUT = ROOT / "output"
DEGRADED = OUTPUT / "demo_degraded.png"
RESTORED = OUTPUT / "demo_restored.png"
SHEET = OUTPUT / "demo_before_after.png"
LOG = OUTPUT / "demo_server.log"
RUN_SECONDS = 1800.0

CROP = (40, 0, 424, 288)
"""Left, top, right, bottom of the part of the photograph that is used."""

DAMAGE_SEED = 11
DAMAGE: dict[str, Any] = {"blur": 1.0, "factor": 2.0, "noise": 28.0, "grey": False, "quality": 35}
"""What is done to it; see demo_degrade.damage."""

FIRST_STAGE = "first_stage"
"""Id of the node that is added to save the first stage's picture."""

WHAT_IT_IS = """\
The bundled model is a toy, made to show the pipeline at work without a download: it takes noise and
JPEG blocks out of small pictures. It is not SUPIR's quality and invents no detail. For that, load an
SDXL checkpoint and a SUPIR file in ComfyUI (README.md). What it can and cannot do: docs/demo_model.md."""
HOW_IT_RAN = """\
It ran on the CPU. With an Intel Arc: install this pack in your own ComfyUI, on an XPU build of
torch, and run the same workflow (example_workflows/demo_restore.json) there."""


class DemoError(RuntimeError):
    """The run ended, but not with the picture it should have made."""


Prompt = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """What ComfyUI gave back: two pictures as files, its history entry, and when what happened."""

    restored: bytes
    first_stage: bytes
    entry: dict[str, Any]
    timeline: Timeline


def find_node(prompt: Prompt, class_type: str) -> tuple[str, dict[str, Any]]:
    """The one node of a class in an API prompt: its id and its inputs.

    Raises: DemoError unless there is exactly one.
    """
    found = [(i, n["inputs"]) for i, n in prompt.items() if n["class_type"] == class_type]
    if len(found) != 1:
        raise DemoError(f"{WORKFLOW.name} holds {len(found)} nodes of {class_type}, not one.")
    return found[0]


def read_prompt() -> Prompt:
    """The demo workflow, which must keep the size of the picture. Raises: DemoError."""
    prompt: Prompt = json.loads(WORKFLOW.read_text(encoding="utf-8"))
    upscale_by = find_node(prompt, "SUPIR_XPU_FirstStage")[1]["upscale_by"]
    if upscale_by != 1.0:
        raise DemoError(
            f"{WORKFLOW.name} has upscale_by {upscale_by}, so its picture could not be compared with "
            "the original. Set it to 1."
        )
    return prompt


def make_pictures() -> tuple[np.ndarray, np.ndarray]:
    """The part of the photograph that is used, and its damaged copy, uint8 [H, W, 3] each."""
    with Image.open(PHOTO) as photo:
        original = np.asarray(photo.convert("RGB").crop(CROP))
    return original, damage(original, np.random.default_rng(DAMAGE_SEED), **DAMAGE)


def restore(server: Server, prompt: Prompt) -> Run:
    """Upload the damaged picture and run the workflow, the first stage's picture saved as well."""
    find_node(prompt, "LoadImage")[1]["image"] = server.upload(DEGRADED)
    saver, _ = find_node(prompt, "SaveImage")
    first, _ = find_node(prompt, "SUPIR_XPU_FirstStage")
    asked = {**prompt, FIRST_STAGE: {"class_type": "SaveImage", "inputs": {}}}
    asked[FIRST_STAGE]["inputs"] = {"images": [first, 0], "filename_prefix": FIRST_STAGE}
    with Listener(server) as heard:
        entry = server.run(asked, RUN_SECONDS, heard.client_id)
        deadline = time.monotonic() + 2.0  # the last event may arrive after the history entry
        while heard.timeline.ended is None and time.monotonic() < deadline:
            time.sleep(0.02)
    pictures = [saved(server, entry, node) for node in (saver, FIRST_STAGE)]
    return Run(*pictures, entry, heard.timeline)


def saved(server: Server, entry: dict[str, Any], node: str) -> bytes:
    """The one picture a node saved. Raises: DemoError."""
    images = entry["outputs"].get(node, {}).get("images", [])
    if len(images) != 1:
        raise DemoError(f"The workflow's node {node} saved {len(images)} pictures, not one.")
    return server.view(images[0])


def read_picture(content: bytes, what: str, expected: tuple[int, int]) -> np.ndarray:
    """A picture file as uint8 [H, W, 3]. Raises: DemoError if its size is not exactly the expected one."""
    with Image.open(io.BytesIO(content)) as image:
        picture = image.convert("RGB")
    if picture.size != expected:
        raise DemoError(f"{what} is {picture.size} px, but {expected} px was asked for.")
    return np.asarray(picture)


def make_sheet(pictures: dict[str, np.ndarray]) -> Image.Image:
    """Pictures of one size side by side, each with its name above it."""
    height, width = next(iter(pictures.values())).shape[:2]
    margin, band = 12, 34
    size = (len(pictures) * (width + margin) + margin, height + band + margin)
    sheet = Image.new("RGB", size, "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=18)
    for column, (label, picture) in enumerate(pictures.items()):
        left = margin + column * (width + margin)
        draw.text((left, 8), label, fill="black", font=font)
        sheet.paste(Image.fromarray(picture), (left, band))
    return sheet


def measure(
    degraded: np.ndarray, first_stage: np.ndarray, restored: np.ndarray, original: np.ndarray
) -> list[str]:
    """Lines of a table: each picture against the original, the best plain filter among them."""
    plain = metrics.trivial_filters(degraded)
    best = max(plain, key=lambda name: metrics.psnr(plain[name], original))
    shown = {
        "degraded": degraded,
        f"best plain filter ({best})": plain[best],
        "first stage": first_stage,
        "restored": restored,
    }
    lines = [f"{'against the original':42}{'PSNR':>9}{'SSIM':>8}{'GMSD':>8}"]
    for name, picture in shown.items():
        psnr, ssim, gmsd = (
            rule(picture, original) for rule in (metrics.psnr, metrics.ssim, metrics.gmsd)
        )
        lines.append(f"{name:42}{psnr:6.2f} dB{ssim:8.3f}{gmsd:8.3f}")
    return [*lines, "(PSNR and SSIM: more is better; GMSD: less is better)"]


def report(prompt: Prompt, run: Run, started: float) -> None:
    """Print seconds per phase and whatever the nodes wrote about the run."""
    print("\nSeconds per phase")
    print(f"  {started:8.2f}  ComfyUI start")
    for node, seconds in run.timeline.seconds_per_node().items():
        if node in prompt:
            title = prompt[node].get("_meta", {}).get("title") or prompt[node]["class_type"]
            print(f"  {seconds:8.2f}  {title}")
    for node, output in run.entry["outputs"].items():
        for text in output.get("text", []):
            print(f"\n{prompt[node]['class_type']}:\n{text}")


def run_demo(comfyui: str, scratch: Path) -> None:
    """Do the whole run. Raises: DemoError, PromptError, ServerError, TimeoutError."""
    prompt = read_prompt()
    original, degraded = make_pictures()
    Image.fromarray(degraded).save(DEGRADED)
    size = (original.shape[1], original.shape[0])
    print(f"Starting ComfyUI from {comfyui} ...")
    started = time.monotonic()
    with start_server(comfyui, ROOT, scratch) as server:
        ready = time.monotonic() - started
        print(f"Restoring a damaged copy of {PHOTO.name}, {size[0]}x{size[1]} px ...")
        run = restore(server, prompt)
    restored = read_picture(run.restored, "The restored picture", size)
    first_stage = read_picture(run.first_stage, "The first stage's picture", size)
    RESTORED.write_bytes(run.restored)
    noise, quality = DAMAGE["noise"], DAMAGE["quality"]
    labels = (f"Damaged: half size, noise {noise:g}, JPEG {quality}", "Restored (toy model)")
    pictures = (degraded, restored, original)
    make_sheet(dict(zip((*labels, "Original"), pictures, strict=True))).save(SHEET)
    report(prompt, run, ready)
    print("", *measure(degraded, first_stage, restored, original), sep="\n")
    print(f"\nRestored picture:    {RESTORED}\nBefore/after sheet:  {SHEET}")
    print(f"\n{HOW_IT_RAN}\n{WHAT_IT_IS}")


def main() -> int:
    """Run the demo; return 0 only when the picture was written in exactly the expected size."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace", line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    OUTPUT.mkdir(exist_ok=True)
    for old in (DEGRADED, RESTORED, SHEET, LOG):
        old.unlink(missing_ok=True)
    scratch = ROOT / ".cache" / f"demo-{os.getpid()}"
    try:
        run_demo(os.environ["COMFYUI_ROOT"], scratch)
    except (DemoError, PromptError, ServerError, TimeoutError) as error:
        print(f"\nThe demo failed. {error}\nComfyUI's log: {LOG}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 130
    finally:
        with contextlib.suppress(OSError):
            shutil.copyfile(scratch / "server.log", LOG)
        shutil.rmtree(scratch, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
