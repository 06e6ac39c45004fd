"""The server helper, over a stand-in for ComfyUI's main.py (the real one: tests/host)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
import time

import pytest

STAND_IN = """
import argparse, json, os, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

parser = argparse.ArgumentParser()
for name in ("--listen", "--port", "--base-directory", "--database-url"):
    parser.add_argument(name)
parser.add_argument("--cpu", action="store_true")
parser.add_argument("--disable-auto-launch", action="store_true")
args = parser.parse_args()
mode = os.environ.get("STAND_IN", "")
print("stand-in says hello", flush=True)
if mode == "die":
    sys.exit(7)
history, seen = {}, []


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_): pass

    def answer(self, status, data):
        body = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if self.path == "/system_stats":
            self.answer(503 if mode == "silent" else 200, {})
        elif self.path.startswith("/history/"):
            self.answer(200, history)
        elif self.path == "/seen":
            self.answer(200, seen)
        elif self.path.startswith("/view?"):
            self.answer(200, b"picture " + self.path.encode())
        else:
            self.answer(404, {})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/upload/image":
            name = body.split(b'filename="')[1].split(b'"')[0].decode()
            return self.answer(200, {"name": name, "subfolder": "sub"})
        data = json.loads(body)
        seen.append([self.path, data])
        if self.path != "/prompt":
            return self.answer(200, {})
        kind = data["prompt"]["kind"]
        error = {"9": {"class_type": "X", "errors": [{"message": "bad", "details": "E_CODE: why"}]}}
        if kind == "refuse":
            return self.answer(400, {"error": {"message": "no"}, "node_errors": error})
        if kind == "crash":
            os._exit(3)
        if kind != "hang":
            messages = [["execution_error", {"node_id": "4", "exception_message": "boom"}]]
            ok = {"status": {"status_str": "success", "messages": []}, "outputs": {}}
            failed = {"status": {"status_str": "error", "messages": messages}}
            history["id"] = failed if kind == "fail" else ok
        self.answer(200, {"prompt_id": "id", "node_errors": error if kind == "part" else {}})


server = ThreadingHTTPServer((args.listen, int(args.port)), Handler)
try:
    server.serve_forever()
except KeyboardInterrupt:
    print("asked to stop", flush=True)
"""


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stand_in")
    (folder / "main.py").write_text(textwrap.dedent(STAND_IN), encoding="utf-8")
    pack = folder / "pack"
    for name in ("__init__.py", "nodes/a.py", "tests/t.py", ".venv/x", ".git/y", "output/z"):
        (pack / name).parent.mkdir(parents=True, exist_ok=True)
        (pack / name).touch()
    return folder


@pytest.fixture(scope="module")
def server(tool, stand_in, tmp_path_factory):
    module = tool("host_server")
    base = tmp_path_factory.mktemp("base")
    with module.start_server(stand_in, stand_in / "pack", base) as server:
        yield server


def test_the_pack_is_copied_without_what_users_do_not_need(server):
    pack = server.base_dir / "custom_nodes" / "supir-xpu"
    files = {p.relative_to(pack).as_posix() for p in pack.rglob("*") if p.is_file()}
    assert files == {"__init__.py", "nodes/a.py"}


def test_run_returns_the_history_entry(server):
    assert server.run({"kind": "fine"}, 5)["status"]["status_str"] == "success"


@pytest.mark.parametrize(("kind", "status"), [("refuse", 400), ("part", 200)])
def test_refusals_carry_the_body(host_server, server, kind, status):
    with pytest.raises(host_server.PromptError, match="E_CODE: why") as caught:
        server.run({"kind": kind}, 5)
    assert caught.value.status == status
    assert caught.value.body["node_errors"]["9"]["class_type"] == "X"


def test_a_partly_refused_prompt_is_cancelled(host_server, server):
    with pytest.raises(host_server.PromptError):
        server.run({"kind": "part"}, 5)
    assert ["/interrupt", {"prompt_id": "id"}] in server.get("/seen").json()


def test_failures_carry_the_entry(host_server, server):
    with pytest.raises(host_server.PromptError, match="node 4 .*boom") as caught:
        server.run({"kind": "fail"}, 5)
    assert caught.value.status is None
    assert caught.value.body["status"]["status_str"] == "error"


def test_upload_view_and_plain_requests(server, tmp_path):
    picture = tmp_path / "a picture.png"
    picture.write_bytes(b"\r\n--not a boundary")
    assert server.upload(picture) == "sub/a picture.png"
    assert server.view({"filename": "a b.png", "type": "output"}).endswith(
        b"filename=a+b.png&type=output"
    )
    status, body = server.get("/nothing")
    assert (status, json.loads(body)) == (404, {})


def test_a_prompt_that_never_ends_is_cancelled(tool, stand_in, tmp_path):
    module = tool("host_server")
    with module.start_server(stand_in, stand_in / "pack", tmp_path) as server:
        with pytest.raises(TimeoutError, match=r"0\.3 s"):
            server.run({"kind": "hang"}, 0.3)
        assert ["/queue", {"delete": ["id"]}] in server.get("/seen").json()


def test_stop_asks_first_and_can_be_repeated(tool, stand_in, tmp_path):
    module = tool("host_server")
    server = module.start_server(stand_in, stand_in / "pack", tmp_path)
    server.stop()
    server.stop()
    assert server.process.returncode is not None
    if os.name != "nt":
        assert server.process.returncode == 0
        assert "asked to stop" in server.log_tail()
    with socket.socket() as probe:  # nobody listens there any more
        assert probe.connect_ex(("127.0.0.1", int(server.base.rsplit(":", 1)[1]))) != 0


@pytest.mark.parametrize(
    ("mode", "why"), [("die", "exit code 7"), ("silent", "did not answer within 2 s")]
)
def test_a_server_that_does_not_start_says_so(tool, stand_in, tmp_path, mode, why):
    module = tool("host_server")
    with pytest.raises(module.ServerError, match=why) as caught:
        module.start_server(
            stand_in, stand_in / "pack", tmp_path, env={"STAND_IN": mode}, ready_timeout=2
        )
    assert "stand-in says hello" in str(caught.value)


def test_a_server_that_dies_is_noticed(tool, stand_in, tmp_path):
    module = tool("host_server")
    with module.start_server(stand_in, stand_in / "pack", tmp_path) as server:
        with pytest.raises(module.ServerError):
            server.run({"kind": "crash"}, 5)
        server.process.wait(5)
        with pytest.raises(module.ServerError, match="exit code 3"):
            server.get("/system_stats")


def test_the_server_dies_with_its_parent(stand_in, tmp_path):
    tools = os.path.join(os.path.dirname(__file__), "..", "..", "tools")
    script = f"""
import os, sys
sys.path.insert(0, {tools!r})
import host_server
server = host_server.start_server({str(stand_in)!r}, {str(stand_in / "pack")!r}, {str(tmp_path)!r})
print(server.base, flush=True)
os._exit(9)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 9
    port = int(ended.stdout.strip().rsplit(":", 1)[1])
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return
        time.sleep(0.05)
    pytest.fail("the server still listens 10 s after its parent was killed")


def test_folder_without_main_is_refused(tool, stand_in, tmp_path):
    module = tool("host_server")
    with pytest.raises(module.ServerError, match=r"no main\.py"):
        module.start_server(tmp_path, stand_in / "pack", tmp_path / "base")


def test_free_port_can_be_bound(host_server):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", host_server.free_port()))


def test_variables_are_added_to_the_childs_environment_or_taken_out(
    host_server, tmp_path, monkeypatch
):
    monkeypatch.setenv("SUPIR_TEST_GONE", "1")
    monkeypatch.setenv("SUPIR_TEST_KEPT", "2")
    main = tmp_path / "main.py"
    main.write_text("import os\nprint(sorted(k for k in os.environ if 'SUPIR_TEST' in k))\n")
    (tmp_path / "pack").mkdir()
    env = {"SUPIR_TEST_GONE": None, "SUPIR_TEST_NEW": "3"}
    with pytest.raises(host_server.ServerError, match="ended with exit code 0") as caught:
        host_server.start_server(tmp_path, tmp_path / "pack", tmp_path / "base", env=env)
    assert "['SUPIR_TEST_KEPT', 'SUPIR_TEST_NEW']" in str(caught.value)
