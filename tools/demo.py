"""``run.py demo``: restore the bundled photograph with the real ComfyUI and show the result.

Runs inside ``.venv``, with the environment variable COMFYUI_ROOT naming ComfyUI's folder. Writes
to ``output/`` and ``.cache/`` of the repository only.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from host_events import Listener, Timeline
from host_server import PromptError, Server, ServerError, start_server
from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).resolve().parents[1]
PHOTO = ROOT / "tools" / "photo" / "chelsea.jpg"
WORKFLOW = ROOT / "example_workflows" / "api" / "demo_restore.json"
OUTPUT = ROOT / "output"
RESTORED = OUTPUT / "demo_restored.png"
SHEET = OUTPUT / "demo_before_after.png"
LOG = OUTPUT / "demo_server.log"
RUN_SECONDS = 1800.0

WHAT_IT_IS = """\
The bundled model is a tiny one with random weights: this proves that the pipeline runs from the
photograph to the saved picture. The picture is no restoration. For one, load an SDXL checkpoint
and a SUPIR file in ComfyUI (README.md)."""
HOW_IT_RAN = """\
It ran on the CPU. With an Intel Arc: install this pack in your own ComfyUI, on an XPU build of
torch, and run the same workflow (example_workflows/demo_restore.json) there."""


class DemoError(RuntimeError):
    """The run ended, but not with the picture it should have made."""


Prompt = dict[str, Any]


def find_node(prompt: Prompt, class_type: str) -> tuple[str, dict[str, Any]]:
    """The one node of a class in an API prompt: its id and its inputs.

    Raises: DemoError unless there is exactly one.
    """
    found = [(i, n["inputs"]) for i, n in prompt.items() if n["class_type"] == class_type]
    if len(found) != 1:
        raise DemoError(f"{WORKFLOW.name} holds {len(found)} nodes of {class_type}, not one.")
    return found[0]


def expected_size(photo: tuple[int, int], upscale_by: float) -> tuple[int, int]:
    """Width and height in pixels that the restored picture must have."""
    return round(photo[0] * upscale_by), round(photo[1] * upscale_by)


def restore(server: Server, prompt: Prompt) -> tuple[bytes, dict[str, Any], Timeline]:
    """Upload the photograph, run the workflow; return the picture, history entry and timing."""
    find_node(prompt, "LoadImage")[1]["image"] = server.upload(PHOTO)
    saver, _ = find_node(prompt, "SaveImage")
    with Listener(server) as heard:
        entry = server.run(prompt, RUN_SECONDS, heard.client_id)
        deadline = time.monotonic() + 2.0  # the last event may arrive after the history entry
        while heard.timeline.ended is None and time.monotonic() < deadline:
            time.sleep(0.02)
    images = entry["outputs"].get(saver, {}).get("images", [])
    if len(images) != 1:
        raise DemoError(f"The workflow saved {len(images)} pictures, not one.")
    return server.view(images[0]), entry, heard.timeline


def save(picture: bytes, expected: tuple[int, int]) -> Image.Image:
    """Write the restored picture and read it back.

    Raises: DemoError if its size is not exactly the expected one.
    """
    RESTORED.write_bytes(picture)
    with Image.open(RESTORED) as image:
        image.load()
    if image.size != expected:
        raise DemoError(f"{RESTORED} is {image.size} px, but {expected} px was asked for.")
    return image.convert("RGB")


def make_sheet(photo: Image.Image, restored: Image.Image) -> Image.Image:
    """Both pictures side by side at the restored size, each with a line of text above it."""
    width, height = restored.size
    margin, band = 12, 34
    sheet = Image.new("RGB", (2 * width + 3 * margin, height + band + margin), "white")
    before = photo.convert("RGB").resize(restored.size, Image.Resampling.LANCZOS)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=18)
    labels = (
        f"Before: {photo.width} x {photo.height} px, enlarged",
        f"After: {width} x {height} px (tiny demo model, random weights)",
    )
    for column, (picture, label) in enumerate(zip((before, restored), labels, strict=True)):
        left = margin + column * (width + margin)
        draw.text((left, 8), label, fill="black", font=font)
        sheet.paste(picture, (left, band))
    return sheet


def report(prompt: Prompt, entry: dict[str, Any], timeline: Timeline, started: float) -> None:
    """Print seconds per phase and whatever the nodes wrote about the run."""
    print("\nSeconds per phase")
    print(f"  {started:8.2f}  ComfyUI start")
    for node, seconds in timeline.seconds_per_node().items():
        title = prompt[node].get("_meta", {}).get("title") or prompt[node]["class_type"]
        print(f"  {seconds:8.2f}  {title}")
    for node, output in entry["outputs"].items():
        for text in output.get("text", []):
            print(f"\n{prompt[node]['class_type']}:\n{text}")


def run_demo(comfyui: str, scratch: Path) -> None:
    """Do the whole run. Raises: DemoError, PromptError, ServerError, TimeoutError."""
    prompt: Prompt = json.loads(WORKFLOW.read_text(encoding="utf-8"))
    with Image.open(PHOTO) as photo:
        photo.load()
    upscale_by = find_node(prompt, "SUPIR_XPU_FirstStage")[1]["upscale_by"]
    expected = expected_size(photo.size, upscale_by)
    print(f"Starting ComfyUI from {comfyui} ...")
    started = time.monotonic()
    with start_server(comfyui, ROOT, scratch) as server:
        ready = time.monotonic() - started
        print(f"Restoring {PHOTO.name}: {photo.size} -> {expected} px ...")
        picture, entry, timeline = restore(server, prompt)
    restored = save(picture, expected)
    make_sheet(photo, restored).save(SHEET)
    report(prompt, entry, timeline, ready)
    print(f"\nRestored picture:    {RESTORED}\nBefore/after sheet:  {SHEET}")
    print(f"\n{HOW_IT_RAN}\n{WHAT_IT_IS}")


def main() -> int:
    """Run the demo; return 0 only when the picture was written in exactly the expected size."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace", line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    OUTPUT.mkdir(exist_ok=True)
    for old in (RESTORED, SHEET, LOG):
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
