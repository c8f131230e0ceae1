"""A recorded run over the wire: the frames of a live run, with pause, speed and seeking."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from engine.levers.catalog import LEVERS
from engine.protocol.client import ChatError, WireClient
from engine.protocol.commands import Value
from engine.protocol.wire import ChatTurn, LeverEvent, LeverRefused, Problem, Replay, Stats, Subscribe
from engine.server.idle import NoEngine
from telemetry.batch import pack
from telemetry.hub import Hub
from telemetry.record import LeverRecord, RunRecord, StepRecord
from tests.fakes.live_server import LiveServer, live

DEFAULT = LEVERS["num_drafts"].default


@dataclass
class FakeRun:
    """A minute in which one token was emitted every 10 ms."""

    run_id: str = "recorded-1"
    duration_s: float = 60.0
    position_s: float = 0.0
    hub: Hub = field(init=False)

    def __post_init__(self) -> None:
        self.hub = Hub(clock_ns=lambda: int(self.position_s * 1e9))
        self.hub.update(pack([RunRecord("recorded-1", 0, 0, "m", "d", "f", {}, {}, kv_tokens=64, block_size=4)]))

    @property
    def levers(self) -> dict[str, Value]:
        return {"num_drafts": 7 if self.position_s < 30 else 2, "of_another_version": 1}

    def seek(self, position_s: float) -> None:
        self.position_s = min(position_s, self.duration_s)

    def advance(self, seconds: float) -> bool:
        until = min(self.position_s + seconds, self.duration_s)
        while self.position_s < until - 1e-9:
            start = int(self.position_s * 1e9)
            self.position_s = round(self.position_s + 0.01, 4)
            self.hub.update(
                pack([StepRecord(1, 1, "plain", start, start + 9_000_000, 1, 1, emitted=1, bonus=1, kv_used=2)])
            )
        return self.position_s < self.duration_s


async def played(served: LiveServer, client: WireClient, count: int) -> list[Stats]:
    found: list[Stats] = []
    async with asyncio.timeout(20):
        async for message in client.messages():
            if isinstance(message, Stats) and message.replay_run:
                found.append(message)
            if len(found) == count:
                break
    return found


async def test_a_replay_sends_statistics_of_the_past_and_no_live_ones() -> None:
    async with live() as served, WireClient(served.url) as client:
        served.telemetry.recorded = FakeRun()
        await client.send(Replay(run="recorded-1", speed=8.0))
        await client.send(Subscribe(topics=("stats",), rate_hz=30))
        frames = await played(served, client, 4)
        assert [frame.replay_run for frame in frames] == ["recorded-1"] * 4
        positions = [frame.replay_position for frame in frames]
        assert positions == sorted(positions)
        assert frames[-1].tokens_per_s == pytest.approx(100, rel=0.1)
        assert frames[-1].kv_used_tokens == 8


async def test_pause_holds_seek_jumps_and_stop_ends() -> None:
    async with live() as served, WireClient(served.url) as client:
        served.telemetry.recorded = run = FakeRun()
        await client.send(Replay(run="recorded-1", speed=4.0))
        await played(served, client, 2)
        await client.send(Replay(action="pause", speed=4.0))
        await asyncio.sleep(0.3)
        held = run.position_s
        await asyncio.sleep(0.6)
        assert run.position_s == held
        await client.send(Replay(action="seek", position=42.0))
        while (await played(served, client, 1))[0].replay_position < 42:
            pass
        await client.send(Replay(action="stop"))
        await asyncio.sleep(0.1)
        assert not any(served.server.views._players)


async def test_a_replay_that_cannot_be_is_one_sentence() -> None:
    async with live() as served, WireClient(served.url) as client:
        for message in (
            Replay(run="nobody"),
            Replay(action="pause"),
            Replay(run="x", speed=1000.0),
        ):
            await client.send(message)
            async for answer in client.messages():
                if isinstance(answer, Problem):
                    assert answer.message.endswith(".")
                    break


async def test_a_server_without_an_engine_shows_runs_and_refuses_work() -> None:
    async with live(NoEngine()) as served, WireClient(served.url) as client:
        served.telemetry.recorded = FakeRun()
        await client.send(Replay(run="recorded-1"))
        assert await played(served, client, 1)
        with pytest.raises(ChatError):
            async for _ in client.chat([ChatTurn(role="user", content="hi")]):
                pass
        assert isinstance(await client.set_lever("num_drafts", 5), LeverRefused)
        assert (await client.query("select 1")).rows == ((1,),)


async def next_lever(client: WireClient) -> LeverEvent:
    async with asyncio.timeout(20):
        async for message in client.messages():
            if isinstance(message, LeverEvent):
                return message
    raise AssertionError("no lever changed")


async def test_a_replay_shows_the_levers_of_its_moment_and_gives_those_of_now_back() -> None:
    async with live(NoEngine()) as served, WireClient(served.url) as client:
        served.telemetry.recorded = run = FakeRun()
        await client.send(Subscribe(topics=("stats", "levers")))
        await client.send(Replay(run="recorded-1", speed=1.0))
        start = await next_lever(client)
        assert (start.name, start.old, start.new, start.origin) == ("num_drafts", DEFAULT, 7, "replay")
        record = LeverRecord("c1", int(29.9e9), 12, "num_drafts", 7, 2, "tui", "me", "fewer")
        run.hub.update(pack([record]))
        await client.send(Replay(action="seek", position=42.0))
        change = await next_lever(client)
        assert (change.change_id, change.old, change.new, change.tick) == ("c1", 7, 2, 12)
        assert (change.origin, change.reason, change.time) == ("tui", "fewer", pytest.approx(29.9))
        await client.send(Replay(action="stop"))
        back = await next_lever(client)
        assert (back.name, back.new, back.origin) == ("num_drafts", DEFAULT, "replay")


async def test_levers_that_change_now_are_not_shown_in_a_replay_but_after_it() -> None:
    async with live() as served, WireClient(served.url) as client, WireClient(served.url) as other:
        served.telemetry.recorded = FakeRun()
        await client.send(Subscribe(topics=("stats", "levers")))
        await client.send(Replay(run="recorded-1", speed=1.0))
        assert (await next_lever(client)).new == 7
        assert isinstance(await other.set_lever("num_drafts", 5), LeverEvent)
        await client.send(Replay(action="stop"))
        back = await next_lever(client)
        assert (back.old, back.new, back.origin) == (7, 5, "replay")


async def test_a_session_that_ends_takes_its_replay_along() -> None:
    async with live() as served:
        served.telemetry.recorded = FakeRun()
        async with WireClient(served.url) as client:
            await client.send(Replay(run="recorded-1"))
            await played(served, client, 1)
        await asyncio.sleep(0.1)
        assert not served.server.views._players


async def test_an_export_is_an_archive_and_an_unknown_run_one_sentence() -> None:
    async with live() as served, served.http() as http:
        answer = await http.get("/telemetry/export?run=1")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-tar")
        assert b"runs.parquet" in answer.content
        assert (await http.get("/telemetry/export?run=7")).json()["error"]["message"] == "There is no run 7."
        assert (await http.get("/telemetry/export?run=x")).status_code == 400
