"""``run.py smoke``: does the pack load and run on every ComfyUI version it is made for?

Runs inside ``.venv`` with ``VERSION=FOLDER`` for each ComfyUI. Starts its server with the pack,
compares the registered nodes with those in the source, restores a picture of 64 x 64 px with the
demo model in one step, and prints a table. The exit code is 1 if anything is not as it should be.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmark_table import Row, show
from host_server import PromptError, Server, ServerError, start_server
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
WORKFLOW = ROOT / "example_workflows" / "api" / "demo_restore.json"
SIDE_PX = 64
RUN_SECONDS = 300.0


def node_ids(root: Path = ROOT) -> set[str]:
    """The ids of every node class in the pack's source."""
    texts = (path.read_text(encoding="utf-8") for path in (root / "nodes").glob("*.py"))
    return {found for text in texts for found in re.findall(r'node_id="(\w+)"', text)}


def small_prompt() -> dict[str, Any]:
    """The demo workflow without resizing, in one step."""
    prompt = json.loads(WORKFLOW.read_text(encoding="utf-8"))
    inputs = {node["class_type"]: node["inputs"] for node in prompt.values()}
    inputs["SUPIR_XPU_FirstStage"]["upscale_by"] = 1.0
    inputs["SUPIR_XPU_Sample"]["steps"] = 1
    return prompt


def picture_bytes() -> bytes:
    """A PNG of colour ramps, SIDE_PX on a side."""
    ramp = bytes(range(0, 256, 256 // SIDE_PX))
    across = Image.frombytes("L", (SIDE_PX, 1), ramp).resize((SIDE_PX, SIDE_PX))
    down = across.transpose(Image.Transpose.ROTATE_90)
    buffer = io.BytesIO()
    Image.merge("RGB", (across, down, across)).save(buffer, "PNG")
    return buffer.getvalue()


def missing_nodes(server: Server, wanted: set[str]) -> set[str]:
    """The wanted nodes that the server does not offer."""
    return wanted - set(server.get("/object_info").json())


def run_prompt(server: Server, scratch: Path) -> Image.Image:
    """Run the small prompt; return the saved picture. Raises: PromptError, ServerError."""
    picture = scratch / "smoke.png"
    picture.write_bytes(picture_bytes())
    prompt = small_prompt()
    loader = next(node for node in prompt.values() if node["class_type"] == "LoadImage")
    loader["inputs"]["image"] = server.upload(picture)
    entry = server.run(prompt, RUN_SECONDS)
    saved = [image for out in entry["outputs"].values() for image in out.get("images", [])]
    if len(saved) != 1:
        raise ServerError(f"{len(saved)} pictures were saved, not one.")
    return Image.open(io.BytesIO(server.view(saved[0]))).convert("RGB")


def try_host(version: str, folder: Path, wanted: set[str]) -> Row:
    """One row of the table; its ``result`` is "ok" or says what went wrong."""
    row: Row = {"ComfyUI": version, "start s": "", "nodes": "", "run s": "", "picture": ""}
    started = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
            scratch = Path(name)
            with start_server(folder, ROOT, scratch) as server:
                row["start s"] = round(time.monotonic() - started, 1)
                missing = missing_nodes(server, wanted)
                row["nodes"] = f"{len(wanted) - len(missing)} of {len(wanted)}"
                if missing:
                    raise ServerError(f"Not registered: {', '.join(sorted(missing))}.")
                started = time.monotonic()
                image = run_prompt(server, scratch)
                row["run s"] = round(time.monotonic() - started, 1)
        row["picture"] = hashlib.sha256(image.tobytes()).hexdigest()[:8]
        if image.size != (SIDE_PX, SIDE_PX):
            raise ServerError(f"The picture has {image.size} px, not {SIDE_PX} x {SIDE_PX}.")
    except (ServerError, PromptError, TimeoutError) as error:
        return {**row, "result": " ".join(str(error).split())}
    return {**row, "result": "ok"}


def main(arguments: list[str]) -> int:
    """Try every ``VERSION=FOLDER``; 0 if all went well, 1 if not, 130 when stopped."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace", line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    wanted, rows = node_ids(), []
    try:
        for argument in arguments:
            version, _, folder = argument.partition("=")
            print(f"ComfyUI {version} ...")
            rows.append(try_host(version, Path(folder), wanted))
            print(f"  {rows[-1]['result']}")
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130
    print("\n" + show("Smoke test: every node registered, one picture restored, on the CPU", rows))
    return 0 if rows and all(row["result"] == "ok" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
