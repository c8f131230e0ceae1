"""Fixtures: one Chromium for all tests of the page, a fresh tab and a fresh scripted server for each."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from tests.dashboards import chromium
from tests.dashboards.fake_server import FakeServer, running


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def tab() -> AsyncIterator[Callable[[], Any]]:
    program = chromium.find()
    if program is None:
        if os.environ.get("CI") == "true":
            pytest.fail("No Chromium is installed, and CI=true says that the page must be tested.")
        pytest.skip("no Chromium is installed (chromium, chromium-browser or google-chrome)")
    async with chromium.browser(program) as open_tab:
        yield open_tab


@pytest_asyncio.fixture(loop_scope="session")
async def server() -> AsyncIterator[FakeServer]:
    async with running(FakeServer()) as fake:
        yield fake


@pytest_asyncio.fixture(loop_scope="session")
async def page(tab: Callable[[], Any], server: FakeServer) -> AsyncIterator[chromium.Page]:
    """A tab at 1280 x 800, closed before its server.

    Whatever a test does, the page must not log an error, break its policy or call another host.
    """
    opened = await tab()
    await opened.size(1280, 800)
    yield opened
    await opened.close()
    harmless = ("log", "info", "debug")
    complaints = [line for line in opened.console if not line.startswith(harmless) and not opened.excused(line)]
    assert complaints == []
    hosts = {url.split("/")[2].split(":")[0] for url in [*opened.requested, *opened.sockets] if "://" in url}
    assert hosts <= {"127.0.0.1"}, hosts
