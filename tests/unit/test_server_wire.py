"""The wire, one behaviour each, over a real socket."""

from __future__ import annotations

import asyncio
import random
import string
import threading
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from engine.levers.resolve import resolve
from engine.protocol import wire
from engine.protocol.client import ChatError, WireClient, WireClosedError
from engine.protocol.commands import Cancel, Limits, Sampling, Submit
from engine.protocol.wire import ChatTurn, Delta, Done, Hello, Queued, Stats, decode_server, encode
from engine.server.ports import EncodedPrompt
from tests.fakes.live_server import LiveServer, live, until
from tests.fakes.server_parts import FakeEngine, FakeText

HI = [ChatTurn(role="user", content="hi")]


async def _until_closed(socket: ClientConnection) -> AsyncIterator[str | bytes]:
    try:
        while True:
            yield await socket.recv()
    except ConnectionClosed:
        return


async def reply(client: WireClient, turns: list[ChatTurn] = HI, **more: Any) -> list[Any]:
    return [message async for message in client.chat(turns, **more)]


def raw(served: LiveServer) -> Any:
    return connect(f"ws://127.0.0.1:{served.port}{wire.WIRE_PATH}", max_size=2**26, proxy=None)


async def greeted(socket: ClientConnection, **hello: Any) -> wire.Welcome:
    await socket.send(encode(Hello(version=wire.WIRE_VERSION, client="test", **hello)))
    welcome = decode_server(await socket.recv())
    assert isinstance(welcome, wire.Welcome)
    return welcome


async def test_a_reply_is_queued_spoken_and_done_in_this_order() -> None:
    async with live() as served, WireClient(served.url) as client:
        messages = await reply(client)
        assert isinstance(messages[0], Queued)
        assert isinstance(messages[-1], Done)
        assert "".join(message.text for message in messages[1:-1]) == "hello"
        assert messages[0].prompt_tokens == 2
        assert messages[0].max_context == 64


async def test_welcome_names_state_facts_and_every_lever() -> None:
    async with live(FakeEngine(loads=False)) as served, WireClient(served.url) as client:
        assert client.welcome is not None
        assert client.welcome.state == "loading"
        assert client.welcome.facts is None
        served.engine.become_ready()
        state = await client.ready()
        assert state.facts is not None
        assert state.facts.model == "letters"
    async with live() as served, WireClient(served.url) as client:
        assert client.welcome is not None
        assert {view.name for view in client.welcome.levers} == set(served.engine.levers)


async def test_welcome_tells_the_values_that_the_engine_starts_with_while_it_loads() -> None:
    values, sources = resolve(flags={"num_drafts": 5})
    named = {name: str(source) for name, source in sources.items()}
    async with (
        live(FakeEngine(loads=False), levers=values, sources=named) as served,
        WireClient(served.url) as client,
    ):
        assert client.welcome is not None
        assert client.welcome.state == "loading"
        shown = {lever.name: (lever.value, lever.source) for lever in client.welcome.levers}
        assert shown["num_drafts"] == (5, "flag")
        assert shown["mtp_gate"][1] == "default"


async def test_a_client_that_comes_while_the_model_loads_hears_how_far_it_is() -> None:
    async with live(FakeEngine(loads=False)) as served, raw(served) as socket:
        assert (await greeted(socket)).state == "loading"
        load = decode_server(await socket.recv())
        assert isinstance(load, wire.Load)
        assert (load.stage, load.done, load.total) == ("weights", 1, 2)


async def test_a_first_message_that_is_no_hello_is_refused_with_a_sentence() -> None:
    async with live() as served:
        for first in (encode(wire.Ping()), "{", "[]", b"\xff\x00", '{"type":"hello"}', '{"type":"nobody"}'):
            async with raw(served) as socket:
                await socket.send(first)
                answer = decode_server(await socket.recv())
                assert isinstance(answer, wire.Refused)
                assert answer.message.endswith(".")
                with pytest.raises(ConnectionClosed):
                    await socket.recv()


async def test_another_wire_version_is_refused() -> None:
    async with live() as served, raw(served) as socket:
        await socket.send(encode(Hello(version=99, client="test")))
        answer = decode_server(await socket.recv())
        assert isinstance(answer, wire.Refused)
        assert "99" in answer.message


async def test_nonsense_after_hello_gets_a_problem_and_the_connection_goes_on() -> None:
    chance = random.Random(7)
    async with live() as served, raw(served) as socket:
        await greeted(socket)
        for _ in range(40):
            kind = chance.randrange(4)
            if kind == 0:
                await socket.send(chance.randbytes(chance.randrange(1, 200)))
            elif kind == 1:
                await socket.send("".join(chance.choices(string.printable, k=chance.randrange(1, 200))))
            elif kind == 2:
                await socket.send(msgspec.json.encode({"type": chance.choice(["chat", "set_lever", "query"]), "x": 1}))
            else:
                await socket.send("[" * 2000)
            answer = decode_server(await socket.recv())
            assert isinstance(answer, wire.Problem)
            assert answer.message
        await socket.send(encode(wire.Ping(nonce="still here")))
        assert decode_server(await socket.recv()) == wire.Pong(nonce="still here")
        assert not served.engine.commands


async def test_endless_nonsense_ends_the_connection_with_a_sentence() -> None:
    async with live() as served, raw(served) as socket:
        await greeted(socket)
        for _ in range(101):
            await socket.send("nonsense")
        messages = [decode_server(text) async for text in _until_closed(socket)]
        assert isinstance(messages[-1], wire.Refused)


async def test_a_message_beyond_the_bound_is_not_taken() -> None:
    async with live() as served, raw(served) as socket:
        await greeted(socket)
        await socket.send("x" * (wire.MAX_MESSAGE_BYTES + 1))
        answer = decode_server(await socket.recv())
        assert isinstance(answer, wire.Problem)
        assert str(wire.MAX_MESSAGE_BYTES) in answer.message


async def test_valid_messages_with_senseless_fields_change_nothing() -> None:
    async with live() as served, raw(served) as socket:
        await greeted(socket)
        for message in (
            wire.Chat(request_id="", messages=tuple(HI)),
            wire.Chat(request_id="r", messages=()),
            wire.Chat(request_id="r", messages=tuple(HI), sampling=Sampling(temperature=-1)),
            wire.Chat(request_id="r", messages=tuple(HI), sampling=Sampling(top_p=5)),
            wire.Chat(request_id="r", messages=tuple(HI), sampling=Sampling(logit_bias={9999: 1.0})),
            wire.Chat(request_id="r", messages=tuple(HI), limits=Limits(max_tokens=-5)),
            wire.Chat(request_id="r", messages=tuple(HI), limits=Limits(stop=("",))),
            wire.Subscribe(topics=("everything",)),
            wire.Subscribe(topics=("stats",), rate_hz=1000),
            wire.Stop(request_id="nobody"),
        ):
            await socket.send(encode(message))
            answer = decode_server(await socket.recv())
            assert isinstance(answer, wire.Problem), message
        assert not served.engine.commands


class SlowText(FakeText):
    """Encoding waits until the test lets it go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def encode_chat(self, *chat: Any) -> EncodedPrompt:
        assert self.go.wait(10)
        return super().encode_chat(*chat)


@pytest.mark.parametrize("pause_s", [0, 0.05])
async def test_a_stop_while_the_prompt_is_encoded_keeps_the_request_from_the_engine(pause_s: float) -> None:
    text = SlowText()
    async with live(text=text) as served, raw(served) as socket:
        await greeted(socket)
        await socket.send(encode(wire.Chat(request_id="r", messages=tuple(HI))))
        await asyncio.sleep(pause_s)
        await socket.send(encode(wire.Stop(request_id="r")))
        await socket.send(encode(wire.Ping(nonce="taken")))
        assert isinstance(decode_server(await socket.recv()), wire.Pong)
        text.go.set()
        answers = [decode_server(await socket.recv()) for _ in range(2)]
        assert isinstance(answers[0], Queued)
        assert isinstance(answers[1], Done)
        assert answers[1].reason == "cancelled"
        assert not served.engine.commands


async def test_a_prompt_longer_than_the_context_is_one_sentence() -> None:
    async with live() as served, WireClient(served.url) as client:
        with pytest.raises(ChatError, match="64"):
            await reply(client, [ChatTurn(role="user", content="x" * 100)])
        assert not served.engine.of_kind(Submit)


async def test_a_chat_while_the_model_loads_is_refused_and_works_afterwards() -> None:
    async with live(FakeEngine(loads=False)) as served, WireClient(served.url) as client:
        with pytest.raises(ChatError, match="loading"):
            await reply(client)
        served.engine.become_ready()
        await client.ready()
        assert isinstance((await reply(client))[-1], Done)


async def test_stop_cancels_and_keeps_what_was_said() -> None:
    async with live(FakeEngine(holds=True)) as served, WireClient(served.url) as client:
        messages = client.chat(HI, request_id="r1")
        assert isinstance(await anext(messages), Queued)
        await until(lambda: bool(served.engine.held))
        served.engine.say(served.engine.held[0].request_id, "hel")
        assert (await anext(messages)).text == "hel"  # type: ignore[union-attr]
        await client.stop("r1")
        done = await anext(messages)
        assert isinstance(done, Done)
        assert done.reason == "cancelled"


async def test_leaving_the_reply_early_cancels_it() -> None:
    async with live(FakeEngine(holds=True)) as served, WireClient(served.url) as client:
        messages = client.chat(HI)
        await anext(messages)
        await messages.aclose()  # type: ignore[attr-defined]
        await until(lambda: bool(served.engine.of_kind(Cancel)))


async def test_a_connection_that_closes_in_order_cancels_its_replies_at_once() -> None:
    async with live(FakeEngine(holds=True)) as served:
        async with WireClient(served.url) as client:
            await anext(client.chat(HI, request_id="r"))
            await until(lambda: bool(served.engine.held))
        await until(lambda: bool(served.engine.of_kind(Cancel)))
        assert len(served.server.sessions) == 0


async def test_a_dropped_connection_resumes_without_losing_or_repeating_a_token() -> None:
    async with live(FakeEngine(holds=True)) as served, WireClient(served.url) as client:
        messages = client.chat(HI, request_id="r")
        await anext(messages)
        await until(lambda: bool(served.engine.held))
        engine_id = served.engine.held[0].request_id
        served.engine.say(engine_id, "one ")
        text = (await anext(messages)).text  # type: ignore[union-attr]
        assert client._connection is not None
        client._connection.transport.abort()
        served.engine.say(engine_id, "two ")
        await asyncio.sleep(0.05)
        served.engine.say(engine_id, "three")
        served.engine.finish(engine_id, output=13)
        async for message in messages:
            text += message.text  # type: ignore[union-attr]
        assert text == "one two three"
        assert not served.engine.of_kind(Cancel)


async def test_a_dropped_connection_that_does_not_return_is_forgotten() -> None:
    async with live(FakeEngine(holds=True), grace_s=0.1) as served:
        async with raw(served) as socket:
            await greeted(socket)
            await socket.send(encode(wire.Chat(request_id="r", messages=tuple(HI))))
            await until(lambda: bool(served.engine.held))
            socket.transport.abort()
        await until(lambda: bool(served.engine.of_kind(Cancel)))
        assert len(served.server.sessions) == 0


async def test_a_session_in_use_cannot_be_taken_over() -> None:
    async with live() as served, raw(served) as first, raw(served) as second:
        session = (await greeted(first)).session
        assert (await greeted(second, resume=session)).session != session


async def test_statistics_come_at_the_rate_that_was_asked_for() -> None:
    async with live() as served, WireClient(served.url) as client:
        await client.send(wire.Subscribe(topics=("stats",), rate_hz=20))
        times = []
        async for message in client.messages():
            if isinstance(message, Stats):
                times.append(asyncio.get_running_loop().time())
            if len(times) == 6:
                break
        assert 0.2 < times[-1] - times[0] < 1.5


async def test_frames_of_a_lagging_client_are_merged_and_the_skipped_ones_counted() -> None:
    async with live(FakeEngine(holds=True)) as served, WireClient(served.url) as client:
        await anext(client.chat(HI, request_id="r"))
        await until(lambda: bool(served.engine.held))
        session = next(iter(served.server.sessions._open.values()))
        engine_id = served.engine.held[0].request_id
        for letter in "abc":  # no await: the client cannot take anything in between
            served.engine.say(engine_id, letter)
            session.mailbox.put_due("stats", session._stats)
        merged = session.mailbox._pop()
        assert isinstance(merged, Delta)
        assert merged.text == "abc"
        stats = session.mailbox._pop()
        assert isinstance(stats, Stats)
        assert stats.skipped == 2


async def test_a_client_that_never_reads_is_given_up_and_the_engine_is_not_slowed() -> None:
    async with live(FakeEngine(holds=True)) as served, raw(served) as socket:
        await greeted(socket)
        await socket.send(encode(wire.Chat(request_id="r", messages=tuple(HI))))
        await until(lambda: bool(served.engine.held))
        engine_id = served.engine.held[0].request_id
        for _ in range(300):
            served.engine.say(engine_id, "x" * 1000)
        session = next(iter(served.server.sessions._open.values()))
        assert session.mailbox.overflowed
        await until(lambda: len(served.server.sessions) == 0)
        await until(lambda: bool(served.engine.of_kind(Cancel)))


async def test_the_tokens_topic_shows_replies_of_others() -> None:
    async with live() as served, WireClient(served.url) as watcher, WireClient(served.url) as speaker:
        await watcher.send(wire.Subscribe(topics=("tokens",)))
        await asyncio.sleep(0.05)
        await reply(speaker)
        text = ""
        async for message in watcher.messages():
            text += message.text if isinstance(message, Delta) else ""
            if text == "hello":
                break


async def test_requests_are_listed_while_they_run_and_after_they_ended() -> None:
    async with live(FakeEngine(holds=True)) as served, WireClient(served.url) as client:
        await anext(client.chat(HI, request_id="r"))
        await until(lambda: bool(served.engine.held))
        rows = served.server.views.requests().rows
        assert [(row.state, row.prompt_tokens) for row in rows] == [("waiting", 2)]
        served.engine.release()
        rows = served.server.views.requests().rows
        assert [(row.state, row.output_tokens, row.reason) for row in rows] == [("finished", 5, "stop")]
        assert [row.ttft_ms for row in rows] == [1.0]  # the engine's, as in the reply, not what the server saw


async def test_the_death_of_the_engine_reaches_every_client_in_one_sentence() -> None:
    async with live(FakeEngine(holds=True)) as served, WireClient(served.url) as client:
        messages = client.chat(HI)
        await anext(messages)
        await until(lambda: bool(served.engine.held))
        served.engine.die("The engine process was ended by SIGKILL; start it again.")
        done = await anext(messages)
        assert isinstance(done, Done)
        assert (done.reason, done.error) == ("error", "The engine process was ended by SIGKILL; start it again.")
        await until(lambda: client.load is not None and client.load.state == "failed")
        with pytest.raises(ChatError, match="SIGKILL"):
            await reply(client)
        await until(lambda: bool(served.telemetry.ended))


async def test_a_query_is_answered_or_refused_with_a_sentence() -> None:
    async with live() as served, WireClient(served.url) as client:
        assert (await client.query("select 1")).rows == ((1,),)
        assert (await client.query("drop table runs")).error == "Only SELECT is allowed."
        assert (await client.query(" ")).error


async def test_a_flood_of_messages_is_bounded() -> None:
    async with live() as served, raw(served) as socket:
        await greeted(socket)
        for _ in range(700):
            await socket.send(encode(wire.Ping()))
        answers = [decode_server(await socket.recv()) for _ in range(700)]
        assert any(isinstance(answer, wire.Problem) and "Too many" in answer.message for answer in answers)


async def test_no_server_is_one_sentence() -> None:
    with pytest.raises(WireClosedError, match="No server answers at"):
        await WireClient("127.0.0.1:9", retry_s=0.1).open()


async def test_queries_of_one_connection_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async with live() as served, WireClient(served.url) as client:
        hold = threading.Event()
        answer = served.telemetry.query

        def slow(sql: str, max_rows: int, run: int = 0) -> Any:
            hold.wait(10)
            return answer(sql, max_rows, run)

        monkeypatch.setattr(served.telemetry, "query", slow)
        asked = [asyncio.create_task(client.query("select 1")) for _ in range(9)]
        refused = await asyncio.wait_for(asked[8], 5)
        assert "8 queries" in refused.error
        hold.set()
        answers = await asyncio.gather(*asked[:8])
        assert [one.rows for one in answers] == [((1,),)] * 8
