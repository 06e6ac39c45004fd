"""Listen to a ComfyUI server's websocket while a prompt runs: when each node and step happened.

Runs inside ``.venv``: it uses aiohttp, which ComfyUI brings along.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from host_server import Server, ServerError

CONNECT_SECONDS = 30.0


@dataclass
class Step:
    """One advance of a node's progress bar."""

    node: str
    value: int
    total: int
    at: float
    cpu: float = 0.0


@dataclass
class Timeline:
    """What was heard: node starts and progress, with arrival times (``time.monotonic``).

    ``cpu_clock``, if given, is read at each event: processor seconds used until then.
    """

    starts: list[tuple[str, float]] = field(default_factory=list)
    start_cpu: list[float] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    ended: float | None = None
    ended_cpu: float = 0.0
    cpu_clock: Callable[[], float] | None = None

    def hear(self, kind: str, data: dict[str, Any], now: float) -> None:
        """Take in one event of the server."""
        if kind == "executing" and data.get("node") is not None:
            self.starts.append((str(data["node"]), now))
            self.start_cpu.append(self._cpu())
        elif kind == "progress":
            node, value, total = str(data.get("node")), int(data["value"]), int(data["max"])
            self.steps.append(Step(node, value, total, now, self._cpu()))
        elif kind in ("execution_success", "execution_error", "execution_interrupted"):
            self.ended, self.ended_cpu = now, self._cpu()

    def _cpu(self) -> float:
        return self.cpu_clock() if self.cpu_clock is not None else 0.0

    def seconds_per_node(self) -> dict[str, float]:
        """Seconds from each node's start to the next one's (the last: to the end of the prompt)."""
        times = [start for _, start in self.starts]
        times.append(self.ended if self.ended is not None else time.monotonic())
        return self._per_node(times)

    def cpu_seconds_per_node(self) -> dict[str, float]:
        """Processor seconds of each node that ran to its end in a prompt that ended."""
        return self._per_node([*self.start_cpu, self.ended_cpu])

    def _per_node(self, times: list[float]) -> dict[str, float]:
        found: dict[str, float] = {}
        for (node, _), start, end in zip(self.starts, times, times[1:], strict=False):
            found[node] = found.get(node, 0.0) + end - start
        return found

    def seconds_per_step(self, node: str) -> list[float]:
        """Seconds of each step of one node's progress bar, from the node's start on."""
        times = [start for name, start in self.starts if name == node][:1]
        times += [step.at for step in self.steps if step.node == node and step.value > 0]
        return [late - early for early, late in zip(times, times[1:], strict=False)]

    def cpu_seconds_per_step(self, node: str) -> list[float]:
        """Processor seconds of each step of one node's bar after its first advance."""
        used = [step.cpu for step in self.steps if step.node == node and step.value > 0]
        return [late - early for early, late in zip(used, used[1:], strict=False)]


class Listener:
    """Hears a server's events in the background; ``with Listener(server) as heard: ...``.

    Queue prompts with ``client_id=heard.client_id``, or the server tells somebody else.
    """

    def __init__(self, server: Server) -> None:
        self.client_id = uuid.uuid4().hex
        self.timeline = Timeline()
        self._url = f"{server.base.replace('http', 'ws', 1)}/ws?clientId={self.client_id}"
        self._connected = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> Listener:
        self._thread.start()
        if not self._connected.wait(CONNECT_SECONDS):
            raise ServerError(f"{self._url} could not be opened within {CONNECT_SECONDS:g} s.")
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(CONNECT_SECONDS)

    def _listen(self) -> None:
        asyncio.run(self._receive())

    async def _receive(self) -> None:
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(self._url, max_msg_size=0) as socket,
        ):
            self._connected.set()
            while not self._stop.is_set():
                try:
                    message = await socket.receive(timeout=0.2)
                except asyncio.TimeoutError:
                    continue
                if message.type in (aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR):
                    return
                if message.type is aiohttp.WSMsgType.TEXT:  # binary ones are previews
                    event = json.loads(message.data)
                    self.timeline.hear(event["type"], event["data"], time.monotonic())
