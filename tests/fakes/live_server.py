"""A real server on a loopback port of its own, in the event loop of the test."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn

from engine.protocol.client import WireClient
from engine.server.app import Parts, Server
from engine.server.ports import EngineLink
from engine.server.run import config_of
from engine.server.safety import Access
from tests.fakes.server_parts import FakeEngine, FakeTelemetry, FakeText


@dataclass
class LiveServer:
    engine: Any
    telemetry: FakeTelemetry
    text: FakeText
    server: Server
    port: int
    clients: list[WireClient] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def http(self, **more: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=10, trust_env=False, **more)


@contextlib.asynccontextmanager
async def live(
    engine: EngineLink | None = None,
    tokens: tuple[str, str] = ("", ""),
    text: FakeText | None = None,
    **parts: Any,
) -> AsyncIterator[LiveServer]:
    """Serve until the block ends. `tokens` are (read, control)."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    engine = engine or FakeEngine()
    telemetry, text = FakeTelemetry(), text or FakeText()
    access = Access.of("127.0.0.1", port, read=tokens[0], control=tokens[1])
    server = Server(Parts(engine, telemetry, lambda: text, access, **parts))
    runner = uvicorn.Server(config_of(server.application()))
    runner.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(runner.serve([listener]))
    while not runner.started:
        await asyncio.sleep(0.005)
    try:
        yield LiveServer(engine, telemetry, text, server, port)
    finally:
        runner.should_exit = True
        await asyncio.wait_for(task, 15)
        listener.close()


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait for something that another task brings about."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)
