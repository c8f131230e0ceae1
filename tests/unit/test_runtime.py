"""The loop of the engine process: batches, sleep, shutdown, failure, and what is recorded of itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from engine.core.clock import ManualClock, MonotonicClock
from engine.core.context import Context
from engine.levers.resolve import LeverState
from engine.protocol.commands import Cancel, ChangeLever, Command, Limits, Shutdown, Submit
from engine.protocol.events import (
    Accepted,
    Delta,
    Event,
    Fatal,
    Finished,
    LeverChanged,
    Ready,
    Records,
    Snapshot,
    Token,
)
from engine.runtime.in_process import InProcessEngine
from engine.runtime.loop import EngineLoop, WakingInbox
from engine.runtime.outbox import FLUSH_S, BatchOutbox, Flusher
from engine.scheduler import Scheduler
from telemetry.batch import decode
from telemetry.record import HealthRecord, RungRecord, StepRecord
from telemetry.ring import Ring
from tests.fakes.scripted_device import ScriptedDevice, encode, vocabulary
from tests.fakes.server_parts import FACTS

SNAPSHOT = Snapshot(
    tick=1, waiting=0, prefilling=0, active=1, swapped=0, preempted=0, kv_used_blocks=0, kv_total_blocks=0,
    cached_blocks=0, lane="plain",
)  # fmt: skip


def delta(number: int) -> Delta:
    return Delta(request_id="r", tokens=(Token(id=number, lane="plain", draft=0, step=number),))


class Collector:
    """Where batches arrive."""

    def __init__(self) -> None:
        self.batches: list[list[Event]] = []

    def __call__(self, events: list[Event]) -> None:
        self.batches.append(events)

    @property
    def events(self) -> list[Event]:
        return [event for batch in self.batches for event in batch]

    def wait(self, condition: Callable[[list[Event]], bool], seconds: float = 5) -> list[Event]:
        end = time.monotonic() + seconds
        while not condition(self.events):
            assert time.monotonic() < end, self.events
            time.sleep(0.002)
        return self.events


def flusher(outbox: BatchOutbox, write: Callable[[list[Event]], None], ring: Ring | None = None) -> Flusher:
    return Flusher(outbox, ring or Ring(), write, lambda: None)


def test_events_leave_in_order_and_of_snapshots_only_the_newest() -> None:
    outbox = BatchOutbox()
    for number in range(3):
        outbox.send(delta(number))
        outbox.send(SNAPSHOT)
    assert outbox.take() == [delta(0), delta(1), delta(2), SNAPSHOT]
    assert outbox.take() == []


def test_an_event_after_a_pause_leaves_at_once_and_a_burst_leaves_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.runtime.outbox.IDLE_S", 60.0)
    outbox, found = BatchOutbox(), Collector()
    thread = flusher(outbox, found)
    thread.start()
    time.sleep(0.05)
    outbox.send(delta(0))
    found.wait(lambda events: len(events) == 1, 20)
    start = time.monotonic()
    for number in range(1, 201):
        outbox.send(delta(number))
        time.sleep(0.0002)
    found.wait(lambda events: len(events) == 201, 30)
    intervals = (time.monotonic() - start) / FLUSH_S
    thread.close()
    assert found.events == [delta(number) for number in range(201)]
    assert len(found.batches) <= intervals + 5


def test_a_lever_change_is_recorded_before_it_is_acknowledged() -> None:
    outbox, ring, found = BatchOutbox(), Ring(), Collector()
    thread = flusher(outbox, found, ring)
    thread._last_records = time.monotonic()  # records are not due yet
    ring.append(RungRecord(1, 1, 1, 1, True))
    outbox.send(LeverChanged(change_id="c", name="num_drafts", old=3, new=5, tick=1, origin="cli"))
    thread.flush()
    assert [type(event) for event in found.events] == [Records, LeverChanged]


def test_lost_records_are_told_once() -> None:
    outbox, ring, found = BatchOutbox(), Ring(capacity=1), Collector()
    thread = flusher(outbox, found, ring)
    for _ in range(3):
        ring.append(RungRecord(1, 1, 1, 1, True))
    ring.trim()
    thread.flush(last=True)
    thread.flush(last=True)
    batches = [event for event in found.events if isinstance(event, Records)]
    assert [batch.lost for batch in batches] == [2]
    assert [len(batch) for batch in decode(batches[0].payload)] == [1]


def test_a_server_that_is_gone_ends_the_engine() -> None:
    def broken(events: list[Event]) -> None:
        raise BrokenPipeError

    told = threading.Event()
    outbox = BatchOutbox()
    thread = Flusher(outbox, Ring(), broken, told.set)
    thread.start()
    outbox.send(delta(0))
    assert told.wait(5)


def test_the_first_token_does_not_wait_behind_the_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.runtime.outbox.FLUSH_S", 30.0)
    outbox, found = BatchOutbox(), Collector()
    thread = flusher(outbox, found)
    thread.start()
    for number, event in enumerate((Accepted(request_id="r"), SNAPSHOT, delta(0)), 1):
        outbox.send(event)
        found.wait(lambda events, number=number: len(events) == number, 10)
    thread.close()


class ScriptedTick:
    """A scheduler that has work for some ticks."""

    def __init__(self, work: int = 0, error: Exception | None = None) -> None:
        self.work, self.error, self.ticks = work, error, 0
        self.inbox: WakingInbox | None = None
        self.seen: list[Command] = []

    def tick(self) -> bool:
        self.ticks += 1
        if self.inbox:
            self.seen += self.inbox.drain()
        if self.error:
            raise self.error
        self.work -= 1
        return self.work > 0


def loop_of(tick: ScriptedTick) -> tuple[EngineLoop, WakingInbox, BatchOutbox, Ring]:
    inbox, outbox, ring = WakingInbox(), BatchOutbox(), Ring()
    tick.inbox = inbox
    return EngineLoop(tick, inbox, outbox, ring, MonotonicClock(), lambda: 123), inbox, outbox, ring


def test_the_loop_ticks_while_there_is_work_sleeps_without_and_wakes_for_a_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.runtime.loop.IDLE_WAIT_S", 60.0)
    tick = ScriptedTick(work=5)
    loop, _, _, _ = loop_of(tick)
    thread = threading.Thread(target=loop.run)
    thread.start()
    time.sleep(0.1)
    assert tick.ticks == 5
    begun = time.monotonic()
    loop.put(Cancel(request_id="r"))
    while not tick.seen:
        assert time.monotonic() - begun < 20
        time.sleep(0.001)
    loop.stop()
    thread.join(5)
    assert not thread.is_alive()
    assert isinstance(tick.seen[-1], Shutdown)


def test_a_failure_in_a_tick_is_told_and_never_a_silent_stop() -> None:
    loop, _, outbox, _ = loop_of(ScriptedTick(error=RuntimeError("out of\nmemory")))
    assert loop.run() is False
    assert outbox.take() == [Fatal(message="The engine stopped: out of memory")]


def test_the_engine_accounts_for_itself_once_a_second() -> None:
    clock = ManualClock()
    inbox, outbox, ring = WakingInbox(), BatchOutbox(), Ring()

    class Slow(ScriptedTick):
        def tick(self) -> bool:
            clock.advance_us(400_000)
            for _ in range(64):
                ring.append(RungRecord(1, 1, 1, 1, True))
            ring.note_cost(1_000)
            ring.composing_ns += 20  # as the flush thread does
            return super().tick()

    loop = EngineLoop(Slow(work=6), inbox, outbox, ring, clock, lambda: 123)
    thread = threading.Thread(target=loop.run)
    thread.start()
    time.sleep(0.1)
    loop.stop()
    thread.join(5)
    health = [record for record in ring.drain() if isinstance(record, HealthRecord)]
    assert [record.tick_ns for record in health[:2]] == [1_200_000_000, 1_200_000_000]
    assert [record.records for record in health[:2]] == [192, 193]
    assert [record.recording_ns for record in health[:2]] == [3_060, 3_060]
    assert health[0].resident_bytes == 123


def test_the_loop_bounds_the_ring_after_every_tick_and_counts_what_it_drops() -> None:
    ring = Ring(capacity=10)

    class Busy(ScriptedTick):
        def tick(self) -> bool:
            for number in range(8):
                ring.append(RungRecord(self.ticks * 8 + number, 1, 1, 1, True))
            return super().tick()

    loop = EngineLoop(Busy(work=3), WakingInbox(), BatchOutbox(), ring, ManualClock(), lambda: 0)
    for _ in range(3):
        loop._tick()
    assert (ring.lost, ring.records) == (14, 24)
    assert [record.time_ns for record in ring.drain() if isinstance(record, RungRecord)] == list(range(10))
    assert ring.records == 24


def test_the_flush_makes_records_of_what_the_tick_thread_left_and_says_what_that_took() -> None:
    outbox, ring, found = BatchOutbox(), Ring(), Collector()
    thread, made_on = flusher(outbox, found, ring), []

    def make(time_ns: int) -> RungRecord:
        made_on.append(threading.current_thread().name)
        return RungRecord(time_ns, 1, 1, 1, True)

    ring.append((make, 7))
    assert made_on == []
    thread.start()
    thread.close()
    (sent,) = [event for event in found.events if isinstance(event, Records)]
    assert [list(batch.records()) for batch in decode(sent.payload)] == [[RungRecord(7, 1, 1, 1, True)]]
    assert made_on == ["flush"]
    assert ring.composing_ns > 0


@pytest.fixture
def engine() -> tuple[InProcessEngine, Collector]:
    found, device = Collector(), ScriptedDevice(num_blocks=512, max_context=1024)

    def build(inbox: WakingInbox, outbox: BatchOutbox, ring: Ring) -> tuple[Context, Scheduler]:
        levers = LeverState.of(drafter="off", pipelined_decode="off")
        context = Context(device, MonotonicClock(), levers, inbox, outbox, vocabulary(), ring)
        return context, Scheduler(context)

    return InProcessEngine(build, FACTS, found), found


def test_a_request_runs_through_the_whole_loop_in_process(engine: tuple[InProcessEngine, Collector]) -> None:
    running, found = engine
    running.start()
    running.send(Submit(request_id="r", prompt=encode("hello"), limits=Limits(max_tokens=40)))
    found.wait(lambda events: any(isinstance(event, Finished) for event in events))
    found.wait(lambda events: any(isinstance(event, Records) for event in events))
    running.stop()
    tokens = [token for event in found.events if isinstance(event, Delta) for token in event.tokens]
    records = [r for e in found.events if isinstance(e, Records) for b in decode(e.payload) for r in b.records()]
    assert isinstance(found.events[0], Ready)
    assert len(tokens) == 40
    assert sum(record.emitted for record in records if isinstance(record, StepRecord)) == 40


def test_a_lever_changes_between_two_ticks_of_a_running_reply(engine: tuple[InProcessEngine, Collector]) -> None:
    running, found = engine
    running.start()
    running.send(Submit(request_id="r", prompt=encode("hello"), limits=Limits(max_tokens=600)))
    found.wait(lambda events: any(isinstance(event, Delta) for event in events))
    running.send(ChangeLever(change_id="c", name="trace_level", value=1, origin="cli"))
    found.wait(lambda events: any(isinstance(event, Finished) for event in events))
    running.stop()
    kinds = [type(event) for event in found.events]
    assert kinds.index(LeverChanged) < kinds.index(Finished)


def test_a_shutdown_ends_every_reply_and_the_threads(engine: tuple[InProcessEngine, Collector]) -> None:
    running, found = engine
    running.start()
    running.send(Submit(request_id="r", prompt=encode("hello"), limits=Limits(max_tokens=900)))
    found.wait(lambda events: any(isinstance(event, Delta) for event in events))
    running.stop()
    ends = [event.reason for event in found.events if isinstance(event, Finished)]
    assert ends in (["shutdown"], ["length"])
    assert not running._thread.is_alive()
    assert not running._flusher.is_alive()
