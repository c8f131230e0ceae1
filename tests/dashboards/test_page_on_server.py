"""The page on the real server with its guard, sessions and levers; only engine and database are stand-ins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from dashboards.app import routes
from engine.levers.resolve import resolve
from engine.protocol.commands import ChangeLever
from tests.dashboards.chromium import Page
from tests.fakes.live_server import LiveServer, live
from tests.fakes.server_parts import FakeEngine

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

CONDITION = "document.documentElement.dataset.condition"


@pytest_asyncio.fixture(loop_scope="session")
async def real(page: Page) -> AsyncIterator[LiveServer]:
    """A guarded server; the tab is left blank before it goes."""
    async with live(pages=routes(), tokens=("look", "steer")) as server:
        yield server
        await page.call("Page.navigate", url="about:blank")
        await asyncio.sleep(0.1)


async def opened(page: Page, real: LiveServer, view: str, token: str = "steer") -> None:
    await page.goto(f"{real.url}/#view={view}&token={token}")
    await page.until(f"['live', 'refused'].includes({CONDITION})")


async def test_a_chat_goes_through_guard_session_and_tokenizer(page: Page, real: LiveServer) -> None:
    await opened(page, real, "chat")
    await page.click("#chat-input")
    await page.type("Hi")
    await page.key("Enter")
    await page.until("document.querySelector('.reply .reply-line')?.textContent.includes('finished')")
    assert await page.text(".reply .words") == "hello"
    assert "speed-up not measured" in await page.text(".reply .reply-line")


async def test_a_lever_change_reaches_the_engine_and_comes_back(page: Page, real: LiveServer) -> None:
    await opened(page, real, "levers")
    await page.click("[data-lever=num_drafts] .control > *")
    await page.key("ArrowUp")
    await page.key("Enter")
    await page.until("document.querySelector('[data-lever=num_drafts] .source').textContent === 'set by operator'")
    [change] = real.engine.of_kind(ChangeLever)
    assert (change.name, change.value, change.origin) == ("num_drafts", 4, "web")
    await page.click("#panel-levers tbody button")
    await page.until("document.querySelector('[data-lever=num_drafts] .control > *').value === '3'")


async def test_a_dropped_connection_resumes_and_no_token_of_the_reply_is_lost(page: Page, real: LiveServer) -> None:
    real.engine.holds = True
    keep = "const Old = WebSocket; window.sockets = [];" + "window.WebSocket = class extends Old {"
    keep += "constructor(url) { super(url); sockets.push(this); } };"
    await page.call("Page.addScriptToEvaluateOnNewDocument", source=keep)
    await opened(page, real, "chat")
    await page.click("#chat-input")
    await page.type("Hi")
    await page.key("Enter")
    await page.until("document.querySelector('.reply .reply-line')?.textContent.includes('queued')")
    real.engine.say(real.engine.held[0].request_id, "abc")
    await page.until("document.querySelector('.reply .words').textContent === 'abc'")
    await page.run("sockets.at(-1).close(4000)")  # any code but an orderly one is a loss to the server
    await page.until(f"{CONDITION} === 'disconnected'")
    real.engine.say(real.engine.held[0].request_id, "def")
    await page.until("document.querySelector('.reply .words').textContent === 'abcdef'", within=15)
    real.engine.release()
    await page.until("document.querySelector('.reply .reply-line').textContent.includes('finished')")
    assert await page.text(".reply .words") == "abcdefhello"


async def test_levers_set_at_the_start_are_shown_while_the_model_loads(page: Page) -> None:
    values, sources = resolve(flags={"num_drafts": 7})
    engine = FakeEngine(loads=False, levers=values)
    async with live(engine, pages=routes(), levers=values, sources=sources) as server:
        await page.goto(f"{server.url}/#view=levers")
        await page.until(f"{CONDITION} === 'loading'")
        await page.until("document.querySelector('[data-lever=num_drafts] .control > *').value === '7'")
        await page.call("Page.navigate", url="about:blank")


async def test_a_wrong_token_is_refused_with_the_sentence_of_the_server(page: Page, real: LiveServer) -> None:
    await opened(page, real, "overview", "guess")
    assert "token" in await page.text("#banner-words")


async def test_a_token_to_read_shows_figures_and_changes_nothing(page: Page, real: LiveServer) -> None:
    await opened(page, real, "levers", "look")
    await page.until("document.querySelector('[data-lever=num_drafts] .control > *').disabled")
    assert "may read" in await page.text("#banner-words")
