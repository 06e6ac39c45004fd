"""Restore a picture over ComfyUI's HTTP API: upload, plan, queue, follow, fetch.

python docs/api_client.py PROMPT.json PICTURE [FOLDER] [http://127.0.0.1:8188]
"""

import json
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from pathlib import Path
from typing import Any


def ask(url: str, data: Any = None, kind: str = "application/json") -> bytes:
    """GET, or POST bytes or JSON; return the body. A refusal ends the program with its reasons."""
    body = data if data is None or isinstance(data, bytes) else json.dumps(data).encode()
    request = urllib.request.Request(url, body, {"Content-Type": kind})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read()
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{url}: HTTP {error.code}\n{error.read().decode()}") from error
    except urllib.error.URLError as error:
        raise SystemExit(f"{url} does not answer ({error.reason}). Is ComfyUI running?") from error


def upload(server: str, path: Path) -> str:
    """Send a picture to ComfyUI's input folder; return the name Load Image knows it by."""
    line, field = uuid.uuid4().hex, 'Content-Disposition: form-data; name="image"; filename='
    body = f'--{line}\r\n{field}"{path.name}"\r\n\r\n'.encode() + path.read_bytes()
    kind = f"multipart/form-data; boundary={line}"
    answer = ask(f"{server}/upload/image", body + f"\r\n--{line}--\r\n".encode(), kind)
    return json.loads(answer)["name"]


def restore(server: str, prompt: dict[str, Any], picture: Path, folder: Path) -> None:
    """Run a prompt on a picture and save the results in a folder."""
    name = upload(server, picture)
    for node in prompt.values():
        if node["class_type"] == "LoadImage":
            node["inputs"]["image"] = name
    plan = json.loads(ask(f"{server}/supir_xpu/plan", {"prompt": prompt}))
    if plan["refused"]:
        raise SystemExit(f"This device would refuse it. {plan['suggestion_text']}")
    seconds = plan["total"]["seconds"]
    print(f"planned: {plan['total']['launches']} launches, about {seconds:.0f} s")
    prompt_id = json.loads(ask(f"{server}/prompt", {"prompt": prompt}))["prompt_id"]
    start, entry = time.monotonic(), None
    while entry is None:
        time.sleep(0.5)
        waiting = len(json.loads(ask(f"{server}/queue"))["queue_pending"])
        print(f"\r{time.monotonic() - start:.0f} s, {waiting} waiting ", end="", flush=True)
        entry = json.loads(ask(f"{server}/history/{prompt_id}")).get(prompt_id)
    print()
    if entry["status"]["status_str"] != "success":
        raise SystemExit(json.dumps(entry["status"]["messages"], indent=1))
    folder.mkdir(parents=True, exist_ok=True)
    for image in [i for out in entry["outputs"].values() for i in out.get("images", [])]:
        target = folder / Path(image["filename"]).name
        target.write_bytes(ask(f"{server}/view?{urllib.parse.urlencode(image)}"))
        print(f"saved {target}")


if __name__ == "__main__":
    if len(sys.argv) < 3 or not all(Path(file).is_file() for file in sys.argv[1:3]):
        raise SystemExit(f"{__doc__}PROMPT.json and PICTURE have to be files that are there.")
    given, found, *rest = sys.argv[1:]
    where, at = [*rest, *["results", "http://127.0.0.1:8188"][len(rest) :]]
    prompt = json.loads(Path(given).read_text("utf-8"))
    if not all(isinstance(n, dict) and "class_type" in n for n in prompt.values()):
        raise SystemExit(f"{given} is not in API format: use Workflow, Export (API), or api/ here.")
    restore(at, prompt, Path(found), Path(where))
