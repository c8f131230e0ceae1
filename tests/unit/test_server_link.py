"""Server and engine as two real processes: start, death, and an end that leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

import psutil
import pytest

from engine.protocol.client import ChatError, WireClient, WireClosedError
from engine.protocol.commands import Limits
from engine.protocol.wire import ChatTurn, Delta, Done, Load
from engine.server.link import STOP_S, ProcessLink
from tests.fakes.live_server import live, until
from tests.fakes.server_parts import FakeText

HI = [ChatTurn(role="user", content="hello")]


class LetterText(FakeText):
    def encode(self, text: str) -> tuple[int, ...]:
        from tests.fakes.scripted_device import encode

        return encode(text)


def link(mode: str = "works") -> ProcessLink:
    return ProcessLink(b"{}", (sys.executable, "-m", "tests.fakes.engine_process", mode))


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_a_chat_streams_through_both_processes_and_the_records_arrive() -> None:
    async with live(link(), text=LetterText()) as served, WireClient(served.url) as client:
        await client.ready()
        text, deltas = "", 0
        async for message in client.chat(HI, limits=Limits(max_tokens=50)):
            if isinstance(message, Delta):
                text, deltas = text + message.text, deltas + 1
            last = message
        assert isinstance(last, Done)
        assert (last.reason, last.usage.output_tokens, len(text + last.text)) == ("length", 50, 50)
        assert deltas > 1
        await until(lambda: served.telemetry.hub.tokens_out == 50)
        pid = served.engine.pid
    assert pid is not None
    assert is_gone(pid)


async def test_loading_is_shown_step_by_step() -> None:
    async with live(link()) as served, WireClient(served.url) as client:
        await client.ready()
        assert served.server.broker.loading.done == 3
        assert client.load is None or isinstance(client.load, Load)


async def test_a_model_that_cannot_be_loaded_is_one_sentence_for_everyone() -> None:
    async with live(link("bad-model")) as served, WireClient(served.url) as client:
        with pytest.raises(WireClosedError, match="truncated at byte 17"):
            await client.ready()
        async with served.http() as http:
            assert "truncated" in (await http.get("/readyz")).json()["detail"]


async def test_a_device_that_fails_in_a_tick_ends_the_engine_with_its_sentence() -> None:
    async with live(link("fails"), text=LetterText()) as served, WireClient(served.url) as client:
        await client.ready()
        last = [message async for message in client.chat(HI, limits=Limits(max_tokens=5))][-1]
        assert isinstance(last, Done)
        assert last.reason == "error"
        assert "fell over" in last.error


async def test_a_killed_engine_ends_running_replies_and_says_how_it_died() -> None:
    async with live(link(), text=LetterText()) as served, WireClient(served.url) as client:
        await client.ready()
        messages = client.chat(HI, limits=Limits(max_tokens=5000))
        await anext(messages)
        os.kill(served.engine.pid, signal.SIGKILL)
        last = [message async for message in messages][-1]
        assert isinstance(last, Done)
        assert last.error == "The engine process was ended by SIGKILL; start it again."
        with pytest.raises(ChatError, match="SIGKILL"):
            await anext(client.chat(HI))


async def test_stopping_while_the_model_loads_leaves_no_process() -> None:
    async with live(link("slow-load")) as served:
        await until(lambda: served.server.broker.loading.done == 3)
        pid = served.engine.pid
        begun = time.monotonic()
    assert time.monotonic() - begun < 0.9 * STOP_S, "it had to be killed"
    assert pid is not None
    assert is_gone(pid)


async def test_a_command_that_is_no_engine_is_one_sentence() -> None:
    async with live(ProcessLink(b"{}", (sys.executable, "-c", "raise SystemExit(3)"))) as served:
        await until(lambda: bool(served.server.broker.failure))
        assert served.server.broker.failure == "The engine process ended with exit code 3; its log says why."


async def test_an_engine_whose_server_was_killed_ends_by_itself() -> None:
    script = (
        "import asyncio, sys\n"
        "from engine.server.link import ProcessLink\n"
        "async def main():\n"
        "    link = ProcessLink(b'{}', (sys.executable, '-m', 'tests.fakes.engine_process', 'works'))\n"
        "    await link.start(lambda e: print(type(e).__name__, link.pid, flush=True), print)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    server = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    assert server.stdout is not None
    while not (line := await server.stdout.readline()).startswith(b"Ready"):
        assert line, "the engine never became ready"
    pid = int(line.split()[1])
    server.kill()
    await server.wait()
    await until(lambda: is_gone(pid), 12)
