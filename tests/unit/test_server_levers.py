"""Lever changes through the server: who is refused, what is recorded, what takes itself back."""

from __future__ import annotations

import asyncio

from engine.levers.changes import Step
from engine.levers.resolve import resolve
from engine.protocol.client import WireClient
from engine.protocol.commands import ChangeLever, Command
from engine.protocol.wire import LeverEvent, LeverRefused, Subscribe
from tests.fakes.live_server import live, until
from tests.fakes.server_parts import FakeEngine


async def test_a_change_takes_effect_at_a_tick_and_says_what_it_replaced() -> None:
    async with live() as served, WireClient(served.url, "tui") as client:
        answer = await client.set_lever("num_drafts", 5, reason="try")
        assert isinstance(answer, LeverEvent)
        assert (answer.old, answer.new, answer.tick, answer.origin, answer.reason) == (3, 5, 1, "tui", "try")
        assert served.server.broker.levers["num_drafts"] == 5


async def test_a_value_out_of_bounds_and_an_unknown_lever_are_refused_before_the_engine_hears_of_them() -> None:
    async with live() as served, WireClient(served.url) as client:
        bounds = await client.set_lever("num_drafts", 99)
        unknown = await client.set_lever("num_draft", 5)
        assert isinstance(bounds, LeverRefused)
        assert "1 to 15" in bounds.message
        assert isinstance(unknown, LeverRefused)
        assert "num_drafts" in unknown.message
        assert not served.engine.of_kind(ChangeLever)


async def test_a_stale_write_is_refused_with_the_value_that_holds() -> None:
    async with live() as served, WireClient(served.url) as one, WireClient(served.url) as two:
        await one.set_lever("num_drafts", 5, expected=3)
        stale = await two.set_lever("num_drafts", 7, expected=3)
        assert isinstance(stale, LeverRefused)
        assert stale.current == 5
        assert served.server.broker.levers["num_drafts"] == 5


class SlowTicks(FakeEngine):
    """Lever changes wait until the test lets a tick begin."""

    def _answer(self, command: Command) -> None:
        if not isinstance(command, ChangeLever):
            super()._answer(command)

    def begin_tick(self) -> None:
        for change in self.of_kind(ChangeLever)[self.tick :]:
            self._change(change)


async def test_of_two_writes_that_saw_the_same_value_one_is_refused_at_the_tick() -> None:
    engine = SlowTicks()
    async with live(engine) as served, WireClient(served.url) as one, WireClient(served.url) as two:
        writes = [
            asyncio.create_task(client.set_lever("num_drafts", 5 + n, expected=3)) for n, client in ((0, one), (2, two))
        ]
        await until(lambda: len(engine.of_kind(ChangeLever)) == 2)
        engine.begin_tick()
        answers = await asyncio.gather(*writes)
        refused = [answer for answer in answers if isinstance(answer, LeverRefused)]
        assert len(refused) == 1
        assert refused[0].current == served.server.broker.levers["num_drafts"]


async def test_an_undo_that_another_write_overtakes_leaves_the_newer_value() -> None:
    engine = SlowTicks()
    async with live(engine) as served, WireClient(served.url) as one, WireClient(served.url) as two:
        first = asyncio.create_task(one.set_lever("num_drafts", 5))
        await until(lambda: len(engine.of_kind(ChangeLever)) == 1)
        engine.begin_tick()
        await first
        write = asyncio.create_task(two.set_lever("num_drafts", 9))
        await until(lambda: len(engine.of_kind(ChangeLever)) == 2)
        undo = asyncio.create_task(one.undo_lever())
        await until(lambda: len(engine.of_kind(ChangeLever)) == 3)
        engine.begin_tick()
        assert isinstance(await write, LeverEvent)
        assert isinstance(await undo, LeverRefused)
        assert served.server.broker.levers["num_drafts"] == 9


async def test_a_change_that_takes_itself_back_says_what_it_takes_back() -> None:
    async with live() as served, WireClient(served.url) as client:
        await client.set_lever("num_drafts", 5, for_seconds=0.1)
        await until(lambda: served.server.broker.levers["num_drafts"] == 3)
        assert [change.expected for change in served.engine.of_kind(ChangeLever)] == [None, 5]


async def test_a_lever_that_takes_effect_at_start_is_refused_live() -> None:
    async with live() as served, WireClient(served.url) as client:
        answer = await client.set_lever("kv_tokens", 4096)
        assert isinstance(answer, LeverRefused)
        assert "--kv-tokens" in answer.message


async def test_read_only_refuses_every_change() -> None:
    engine = FakeEngine(levers=resolve(flags={"read_only": True})[0])
    async with live(engine) as served, WireClient(served.url) as client:
        answer = await client.set_lever("num_drafts", 5)
        assert isinstance(answer, LeverRefused)
        assert "read_only" in answer.message


async def test_everyone_who_watches_levers_learns_of_a_change() -> None:
    async with live() as served, WireClient(served.url) as watcher, WireClient(served.url) as changer:
        await watcher.send(Subscribe(topics=("levers",)))
        await asyncio.sleep(0.05)
        await changer.set_lever("num_drafts", 5)
        async for message in watcher.messages():
            if isinstance(message, LeverEvent):
                assert message.new == 5
                break


async def test_undo_puts_the_last_change_back_and_a_second_undo_the_one_before() -> None:
    async with live() as served, WireClient(served.url) as client:
        first = await client.set_lever("num_drafts", 5)
        await client.set_lever("gate_dwell", 4)
        undone = await client.undo_lever()
        assert isinstance(undone, LeverEvent)
        assert (undone.name, undone.new, undone.origin) == ("gate_dwell", 2, "undo")
        assert isinstance(first, LeverEvent)
        again = await client.undo_lever(first.change_id)
        assert isinstance(again, LeverEvent)
        assert (again.name, again.new) == ("num_drafts", 3)


async def test_undo_of_a_change_that_no_longer_holds_is_refused() -> None:
    async with live() as served, WireClient(served.url) as client:
        first = await client.set_lever("num_drafts", 5)
        await client.set_lever("num_drafts", 7)
        assert isinstance(first, LeverEvent)
        assert isinstance(await client.undo_lever(first.change_id), LeverRefused)
        assert isinstance(await client.undo_lever("nobody"), LeverRefused)


async def test_a_change_for_a_time_takes_itself_back() -> None:
    async with live() as served, WireClient(served.url) as client:
        answer = await client.set_lever("num_drafts", 5, for_seconds=0.1)
        assert isinstance(answer, LeverEvent)
        assert answer.expires > 0
        await until(lambda: served.server.broker.levers["num_drafts"] == 3)
        back = served.engine.of_kind(ChangeLever)[-1]
        assert back.origin == "ttl"


async def test_a_change_for_a_time_leaves_a_newer_value_alone() -> None:
    async with live() as served, WireClient(served.url) as client:
        await client.set_lever("num_drafts", 5, for_seconds=0.1)
        await client.set_lever("num_drafts", 9)
        await asyncio.sleep(0.3)
        assert served.server.broker.levers["num_drafts"] == 9


async def test_a_guarded_change_that_slows_decoding_takes_itself_back_and_says_why() -> None:
    async with live() as served, WireClient(served.url) as client:
        steps = served.server._parts.steps
        steps.add(Step(0.010 + 0.0001 * (index % 7), 1, 1) for index in range(200))
        await client.set_lever("num_drafts", 5, guard=0.1)
        steps.add(Step(0.020 + 0.0001 * (index % 7), 1, 1) for index in range(200))
        await until(lambda: served.server.broker.levers["num_drafts"] == 3)
        back = served.engine.of_kind(ChangeLever)[-1]
        assert back.origin == "guard"
        assert "throughput fell by 49 %" in back.reason


async def test_changes_that_come_too_fast_are_refused() -> None:
    async with live() as served, WireClient(served.url) as client:
        answers = [await client.set_lever("num_drafts", 1 + turn % 15) for turn in range(60)]
        refused = [answer for answer in answers if isinstance(answer, LeverRefused)]
        assert refused
        assert "too fast" in refused[0].message
