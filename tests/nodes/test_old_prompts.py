"""Old prompts in the process of the server: handler, replacements, and the guard's view."""

from __future__ import annotations

import asyncio

import pytest
from supir_xpu.tests import old_workflows as old

pytestmark = pytest.mark.host

OURS = dict.fromkeys(
    [
        *("SUPIR_XPU_LoadSUPIR", "SUPIR_XPU_FirstStage", "SUPIR_XPU_Conditioning"),
        *("SUPIR_XPU_Sample", "SUPIR_XPU_Decode", "SUPIR_XPU_Encode", "SUPIR_XPU_Upscale"),
        *("LoadImage", "SaveImage", "CheckpointLoaderSimple"),
    ]
)


class Manager:
    def __init__(self):
        self.registered = []

    def register(self, replacement):
        self.registered.append(replacement.old_node_id)


class Server:
    """What of ComfyUI's server the pack uses."""

    def __init__(self, manager=None):
        from aiohttp import web

        self.app, self.routes, self.handlers = web.Application(), web.RouteTableDef(), []
        if manager is not None:
            self.node_replace_manager = manager

    def add_on_prompt_handler(self, handler):
        self.handlers.append(handler)

    def start(self):
        self.app.freeze()
        asyncio.run(self.app.startup())


@pytest.fixture
def old_prompts():
    from supir_xpu.nodes import old_prompts

    return old_prompts


def handler_of(old_prompts, known):
    server = Server()
    old_prompts.install(server, known)
    (handler,) = server.handlers
    return handler


def test_a_comfyui_without_node_replacement_still_converts(old_prompts):
    server = Server()
    old_prompts.install(server, OURS)
    server.start()
    new = server.handlers[0]({"prompt": old.structure_d(), "client_id": "me"})
    assert new["prompt"]["2"]["class_type"] == "SUPIR_XPU_Upscale"
    assert new["client_id"] == "me"
    assert "/supir_xpu/convert" in {route.path for route in server.routes}


@pytest.mark.parametrize("later", [{}, {"SUPIR_sample": object}])
def test_replacements_are_registered_when_every_pack_is_loaded(old_prompts, later):
    manager, known = Manager(), dict(OURS)
    server = Server(manager)
    old_prompts.install(server, known)
    assert manager.registered == []
    known.update(later)  # the old pack, loaded after this one
    server.start()
    assert manager.registered == ([] if later else ["SUPIR_encode", "SUPIR_decode"])


@pytest.mark.parametrize("odd", [{}, {"prompt": None}, {"prompt": []}, {"prompt": {"1": 1}}])
def test_other_requests_pass_as_they_are(old_prompts, odd):
    assert handler_of(old_prompts, OURS)(odd) is odd


def test_with_the_old_pack_installed_prompts_pass_as_they_are(old_prompts):
    data = {"prompt": old.structure_e()}
    assert handler_of(old_prompts, {**OURS, "SUPIR_tiles": object})(data) is data


def test_what_cannot_be_converted_does_not_break_comfyuis_replacement(old_prompts):
    """A node that is no node keeps the prompt from being converted as a whole."""
    prompt = {"1": {"class_type": "SUPIR_decode", "inputs": {}}, "2": {"inputs": {}}}
    data = {"prompt": prompt}
    assert handler_of(old_prompts, OURS)(data) is data
    assert prompt["1"]["_meta"] == {}
    assert prompt["1"]["inputs"] == {"SUPIR_VAE": None, "latents": None}


def test_the_guard_judges_what_will_run(old_prompts, monkeypatch):
    from supir_xpu.nodes import prompt_guard

    monkeypatch.setattr(prompt_guard, "node_classes", lambda: OURS)
    monkeypatch.setattr(prompt_guard, "server_instance", lambda: None)
    graph = prompt_guard.read_graph(old.structure_e(steps=17))
    assert graph is not None
    assert graph.kind("6") == "SUPIR_XPU_Sample"
    assert graph.integer("6", "steps") == 17


def test_a_conversion_that_fails_unexpectedly_never_fails_the_request(
    old_prompts, monkeypatch, caplog
):
    def fail(_):
        raise KeyError("2")

    monkeypatch.setattr(old_prompts, "convert", fail)
    prompt = {
        "1": {"class_type": "SUPIR_decode", "inputs": {}},
        "2": {"class_type": [], "inputs": {}},
    }
    data = {"prompt": prompt}
    assert handler_of(old_prompts, OURS)(data) is data
    assert prompt["1"]["inputs"] == {"SUPIR_VAE": None, "latents": None}
    assert "could not be converted" in caplog.text


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_body_that_cannot_be_unpacked_is_the_clients_error(old_prompts, encoding):
    from aiohttp import web
    from aiohttp.test_utils import TestClient, TestServer

    async def ask():
        app = web.Application()
        app.router.add_post("/convert", old_prompts.post_convert)
        async with TestClient(TestServer(app)) as client:
            answer = await client.post(
                "/convert", data=b"not packed at all", headers={"Content-Encoding": encoding}
            )
            return answer.status, await answer.text()

    status, text = asyncio.run(ask())
    assert status == 400
    assert "supir_xpu_not_json" in text
