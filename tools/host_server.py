"""A real ComfyUI server as a child process, for tests, the demo and the benchmarks.

Owns starting, asking and stopping it. Standard library only; knows nothing of SUPIR. Run as a
script (``host_server.py --child ROOT args...``) this file is the child: it runs ComfyUI's own
``main.py`` and ends as soon as its parent is gone.

    with start_server(comfyui_root, pack_root, base_dir) as server:
        entry = server.run(prompt, timeout=60)
        png = server.view(entry["outputs"]["7"]["images"][0])
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

NOT_PRODUCT = frozenset({"tests", "output", "node_modules"})
"""Top-level names of the repository that users' installations do not need. Hidden names (.git,
.venv, .cache, ...) and byte code are left out everywhere."""

READY_SECONDS = 180.0
REQUEST_SECONDS = 60.0
STOP_SECONDS = 15.0
LOG_TAIL_CHARS = 4000
ON_WINDOWS = os.name == "nt"
STOP_SIGNAL: int = getattr(signal, "CTRL_BREAK_EVENT", signal.SIGINT)
"""Ctrl-Break on Windows, where only a process group can be told to stop; else Ctrl-C."""


class ServerError(RuntimeError):
    """The server did not start, or died."""


class PromptError(RuntimeError):
    """ComfyUI refused a prompt, or the prompt failed while it ran.

    Attributes:
        status: HTTP status of a refused prompt (400; 200 when only a part was refused), or None
            when the prompt was accepted and failed later.
        body: ComfyUI's answer (``error``, ``node_errors``) or, for a failed run, its history entry.
    """

    def __init__(self, message: str, body: dict[str, Any], status: int | None = None) -> None:
        super().__init__(message)
        self.body = body
        self.status = status


class Reply(NamedTuple):
    """One HTTP answer; no status raises. ``status, body = server.get(path)`` works too."""

    status: int
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body.decode("utf-8"))


class Server:
    """A running ComfyUI. Made by ``start_server``; ``stop`` it, or use it in a ``with`` block."""

    def __init__(
        self, spawn: Callable[[], subprocess.Popen[bytes]], base: str, base_dir: Path, log: Path
    ) -> None:
        self._spawn = spawn
        self.process = spawn()
        self.base = base
        self.base_dir = base_dir
        self.log_path = log
        # No proxy: requests to 127.0.0.1 must not leave this machine.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def restart(self, ready_timeout: float = READY_SECONDS) -> None:
        """Stop, and start again with the same arguments, port and folders; the log goes on.

        Raises: ServerError when it dies or stays silent.
        """
        self.stop()
        self.process = self._spawn()
        self.wait_ready(ready_timeout)

    def wait_ready(self, timeout: float) -> None:
        """Wait until the server answers. Raises: ServerError."""
        deadline = time.monotonic() + timeout
        while True:
            with contextlib.suppress(ServerError):
                if self.get("/system_stats").status == 200:
                    return
            self._check_alive()
            if time.monotonic() > deadline:
                raise ServerError(
                    f"ComfyUI did not answer within {timeout:g} s. "
                    f"End of {self.log_path}:\n{self.log_tail()}"
                )
            time.sleep(0.1)

    def get(self, path: str) -> Reply:
        return self._send(urllib.request.Request(self.base + path))

    def post(self, path: str, data: Any) -> Reply:
        """POST ``data`` as JSON."""
        body = json.dumps(data).encode("utf-8")
        headers = {"Content-Type": "application/json"}
        return self._send(urllib.request.Request(self.base + path, body, headers))

    def log_tail(self) -> str:
        """The end of the server's own output."""
        text = self.log_path.read_text(encoding="utf-8", errors="replace")
        return text[-LOG_TAIL_CHARS:]

    def queue(self, prompt: dict[str, Any], client_id: str | None = None) -> str:
        """Queue an API prompt; return its id.

        Raises: PromptError when ComfyUI refuses it, wholly or in part.
        """
        reply = self.post("/prompt", {"prompt": prompt, "client_id": client_id or uuid.uuid4().hex})
        body = _json_or_text(reply)
        if reply.status != 200:
            raise PromptError(_refusal(body), body, reply.status)
        if body.get("node_errors"):  # the valid outputs would run without the refused ones
            self.cancel(body["prompt_id"])
            raise PromptError(_refusal(body), body, reply.status)
        return body["prompt_id"]

    def wait(self, prompt_id: str, timeout: float) -> dict[str, Any]:
        """Wait until a queued prompt has ended; return its history entry, whatever became of it.

        Raises: TimeoutError (after cancelling the prompt), ServerError if the server died.
        """
        deadline = time.monotonic() + timeout
        while True:
            self._check_alive()
            entry = self.get(f"/history/{prompt_id}").json().get(prompt_id)
            if entry is not None:
                return entry
            if time.monotonic() > deadline:
                self.cancel(prompt_id)
                raise TimeoutError(
                    f"The prompt did not end within {timeout:g} s and was cancelled. "
                    f"End of {self.log_path}:\n{self.log_tail()}"
                )
            time.sleep(0.1)

    def run(
        self, prompt: dict[str, Any], timeout: float = 120.0, client_id: str | None = None
    ) -> dict[str, Any]:
        """Run an API prompt to its end and return its history entry.

        Raises: PromptError when it is refused, fails or is interrupted; TimeoutError; ServerError.
        """
        entry = self.wait(self.queue(prompt, client_id), timeout)
        if entry["status"]["status_str"] != "success":
            raise PromptError(_failure(entry), entry)
        return entry

    def cancel(self, prompt_id: str) -> None:
        """Take a prompt out of the queue, and interrupt it if it is the one that runs."""
        self.post("/queue", {"delete": [prompt_id]})
        self.post("/interrupt", {"prompt_id": prompt_id})

    def interrupt(self) -> None:
        """Interrupt whatever runs."""
        self.post("/interrupt", {})

    def upload(self, path: str | Path) -> str:
        """Upload a picture for LoadImage; return the name the server gave it."""
        path = Path(path)
        boundary = uuid.uuid4().hex
        head = (
            f"--{boundary}\r\n"
            f'Content-Disposition: form-data; name="image"; filename="{path.name}"\r\n'
            "Content-Type: application/octet-stream\r\n\r\n"
        )
        body = head.encode("utf-8") + path.read_bytes() + f"\r\n--{boundary}--\r\n".encode("ascii")
        headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
        url = self.base + "/upload/image"
        reply = self._send(urllib.request.Request(url, body, headers))
        if reply.status != 200:
            raise ServerError(f"Uploading {path} was answered with HTTP {reply.status}.")
        answer = reply.json()
        return "/".join(part for part in (answer.get("subfolder"), answer["name"]) if part)

    def view(self, image_ref: dict[str, str]) -> bytes:
        """Fetch the file behind one entry of a history's ``outputs[node]["images"]``."""
        reply = self.get("/view?" + urllib.parse.urlencode(image_ref))
        if reply.status != 200:
            raise ServerError(f"{image_ref} was answered with HTTP {reply.status}.")
        return reply.body

    def stop(self) -> None:
        """End the server: ask first, insist after 15 s. Safe to call twice."""
        process = self.process
        try:
            if process.poll() is None:
                with contextlib.suppress(OSError):  # it may end between the two calls
                    process.send_signal(STOP_SIGNAL)
                try:
                    process.wait(STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        finally:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()

    def _send(self, request: urllib.request.Request) -> Reply:
        try:
            with self._opener.open(request, timeout=REQUEST_SECONDS) as answer:
                return Reply(answer.status, answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return Reply(error.code, error.read())
        except OSError as error:
            self._check_alive()
            raise ServerError(f"{request.full_url} was not answered: {error}") from error

    def _check_alive(self) -> None:
        code = self.process.poll()
        if code is not None:
            raise ServerError(
                f"ComfyUI ended with exit code {code}. End of {self.log_path}:\n{self.log_tail()}"
            )


def start_server(
    comfyui_root: str | Path,
    pack_root: str | Path,
    base_dir: str | Path,
    extra_args: tuple[str, ...] | list[str] = (),
    pack_name: str = "supir-xpu",
    env: dict[str, str | None] | None = None,
    ready_timeout: float = READY_SECONDS,
) -> Server:
    """Start ComfyUI on the CPU and a free port of 127.0.0.1, and wait until it answers.

    Args:
        comfyui_root: folder with ComfyUI's ``main.py``; user data goes to ``base_dir`` instead.
        pack_root: folder of this pack; a copy goes to ``base_dir/custom_nodes/pack_name``.
        base_dir: scratch folder for models, input, output, user and temp; made if absent.
        extra_args: more arguments for ``main.py``.
        env: variables added to the child's environment; None takes one out.
        ready_timeout: seconds until the server must answer.
    Raises: ServerError with the end of the server's log when it dies or stays silent.
    """
    root, scratch = Path(comfyui_root).resolve(), Path(base_dir).resolve()
    if not (root / "main.py").is_file():
        raise ServerError(f"{root} has no main.py, so it is no ComfyUI folder.")
    scratch.mkdir(parents=True, exist_ok=True)
    copy_pack(Path(pack_root), scratch / "custom_nodes" / pack_name)
    port = free_port()
    log = scratch / "server.log"
    arguments = [
        *("--cpu", "--listen", "127.0.0.1", "--port", str(port), "--disable-auto-launch"),
        *("--base-directory", str(scratch), "--database-url", "sqlite:///:memory:"),
        *extra_args,
    ]
    log.unlink(missing_ok=True)

    def spawn() -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            return _spawn(root, arguments, output, env)

    server = Server(spawn, f"http://127.0.0.1:{port}", scratch, log)
    try:
        server.wait_ready(ready_timeout)
    except BaseException:  # also Ctrl-C: the child must not stay behind
        server.stop()
        raise
    return server


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def copy_pack(pack_root: Path, target: Path) -> None:
    """Copy what an installed pack consists of; a copy, as links need rights on Windows."""

    def ignore(folder: str, names: list[str]) -> set[str]:
        left_out = {n for n in names if n.startswith(".") or n == "__pycache__"}
        if Path(folder) == pack_root:
            left_out |= NOT_PRODUCT & set(names)
        return left_out

    if target.exists():
        shutil.rmtree(target)
    shutil.copytree(pack_root, target, ignore=ignore)


def _spawn(
    root: Path, arguments: list[str], output: IO[bytes], env: dict[str, str | None] | None
) -> subprocess.Popen[bytes]:
    variables = {**os.environ, "PYTHONIOENCODING": "utf-8:backslashreplace", **(env or {})}
    command = [sys.executable, str(Path(__file__).resolve()), "--child", str(root), *arguments]
    return subprocess.Popen(
        command,
        cwd=root,
        stdin=subprocess.PIPE,  # its end tells the child that we are gone
        stdout=output,
        stderr=subprocess.STDOUT,
        env={name: value for name, value in variables.items() if value is not None},
        # Its own group: Ctrl-C in our console reaches only us, and we stop it.
        start_new_session=not ON_WINDOWS,
        creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
    )


def _json_or_text(reply: Reply) -> dict[str, Any]:
    try:
        body = reply.json()
    except ValueError:
        body = None
    if isinstance(body, dict):
        return body
    return {"error": {"message": reply.body.decode("utf-8", errors="replace")}}


def _refusal(body: dict[str, Any]) -> str:
    """Every reason in ComfyUI's refusal, in one line each."""
    error = body.get("error") or {}
    lines = [str(error.get("message", error)) if isinstance(error, dict) else str(error)]
    node_errors = body.get("node_errors") or {}
    for node_id, node in node_errors.items():
        for item in node.get("errors", []):
            lines.append(
                f"node {node_id} ({node.get('class_type')}): "
                f"{item.get('message')}: {item.get('details')}"
            )
    return "ComfyUI refused the prompt. " + "\n".join(line for line in lines if line)


def _failure(entry: dict[str, Any]) -> str:
    """What a history entry says about a run that did not succeed."""
    for kind, data in entry["status"].get("messages", []):
        if kind == "execution_error":
            return (
                f"node {data.get('node_id')} ({data.get('node_type')}) failed: "
                f"{data.get('exception_type')}: {data.get('exception_message')}"
            )
        if kind == "execution_interrupted":
            return f"The prompt was interrupted at node {data.get('node_id')}."
    return "The prompt failed without a message."


def _run_child(root: str, arguments: list[str]) -> None:
    """Be ComfyUI: run its main.py in this process, and die with the parent."""

    def end_with_parent() -> None:
        while os.read(stdin, 1):  # ends when the parent has closed its end, even by dying
            pass
        os._exit(1)

    stdin = sys.stdin.fileno()
    # A shell's background job is started with Ctrl-C switched off; we are stopped by it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=end_with_parent, daemon=True).start()
    main = os.path.join(root, "main.py")
    sys.argv = [main, *arguments]
    sys.path[0] = root
    runpy.run_path(main, run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1:2] != ["--child"] or len(sys.argv) < 3:
        sys.exit("This file is imported by the demo, the benchmarks and the tests.")
    _run_child(sys.argv[2], sys.argv[3:])
