"""Fixtures of the terminal's tests: a server that speaks the wire, and the program connected to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot

from tests.tui.fake_server import FakeServer
from tui.link import Link
from tui.program import MetraleApp
from tui.sessions import Store

PATIENCE_S = 10.0


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    server = FakeServer(tokens_per_s=400)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@pytest.fixture
def connected(server: FakeServer, store: Store) -> Callable[..., MetraleApp]:
    """Makes the program on the fake server."""

    def make(mode: str = "chat", **more: object) -> MetraleApp:
        link = Link(f"http://127.0.0.1:{server.port}", rate_hz=20)
        return MetraleApp(link, mode=mode, store=store, **more)  # type: ignore[arg-type]

    return make


async def until(pilot: Pilot[None], true: Callable[[], object], what: str = "") -> None:
    """Waits for something that must become true."""
    for _ in range(int(PATIENCE_S / 0.02)):
        await pilot.pause()
        if true():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"this did not happen within {PATIENCE_S:g} s: {what or true}")


async def type_text(pilot: Pilot[None], text: str) -> None:
    named = {" ": "space", "/": "slash", "_": "underscore", ".": "full_stop", "-": "minus", "\n": "ctrl+j"}
    await pilot.press(*[named.get(char, char) for char in text])
