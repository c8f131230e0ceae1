"""The hub counts every step once for every subscriber, and its speed-up is an honest one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from engine.bench.step_stream import StepStream, run_record
from telemetry.baseline import PlainBaseline
from telemetry.batch import pack
from telemetry.hub import Hub, LiveRequest, percentiles
from telemetry.record import GateRecord, HealthRecord, RequestRecord, RunRecord, SeqShare, StepRecord

MS = 1_000_000


class ManualClock:
    def __init__(self) -> None:
        self.ns = 1_000_000 * MS

    def __call__(self) -> int:
        return self.ns


def a_run() -> RunRecord:
    return run_record("r", unix_ns=1_000_000 * MS)


def step(
    number: int, lane: str = "plain", ms: float = 10, emitted: int = 1, width: int = 1, ids: Sequence[str] = "a"
) -> StepRecord:
    start = int(number * 20 * MS)
    drafted = 3 * width if lane == "mtp" else 0
    accepted = emitted - width if drafted else 0
    shares = tuple(SeqShare(name, 3 if drafted else 0, accepted, emitted // width) for name in ids)
    drafted_at, accepted_at = ((width,) * 3, (width,) * accepted) if drafted else ((), ())
    return StepRecord(
        number, number, lane, start, start + int(ms * MS), width, width, 0, drafted, accepted, width, emitted,
        drafted_at, accepted_at, shares=shares, refusals=(("ngram", "no_match"),), kv_used=3, kv_total=10,
    )  # fmt: skip


def ended(name: str, arrived: int = 0, first: int = 50, finished: int = 250, tokens: int = 11) -> RequestRecord:
    return RequestRecord(
        name, "chat", "talk", "", "", arrived * MS, arrived * MS, first * MS, finished * MS, "stop", "", 5, 0, tokens,
        0, 0, 1, 0, {"plain": tokens}, {"plain": tokens}, 1.0, 1.0, 0, 0, 1,
    )  # fmt: skip


@pytest.fixture
def hub() -> Hub:
    hub = Hub(ManualClock())
    hub.update(pack([a_run()]))
    return hub


def test_a_window_holds_what_came_since_the_last_read_and_nothing_twice(hub: Hub) -> None:
    screen = hub.subscribe()
    hub.update(pack([step(1), step(2)]))
    first = screen.read()
    hub.update(pack([step(3, "mtp", emitted=4)]))
    second, third = screen.read(), screen.read()
    assert (first.lanes["plain"].steps, first.lanes["plain"].tokens) == (2, 2)
    assert list(second.lanes) == ["mtp"]
    assert (second.lanes["mtp"].drafted_at, second.lanes["mtp"].accepted_at) == ([1, 1, 1], [1, 1, 1])
    assert third.lanes == {}


def test_subscribers_have_places_of_their_own_and_a_slow_one_loses_nothing(hub: Hub) -> None:
    fast, slow = hub.subscribe(), hub.subscribe()
    seen = 0
    for number in range(10):
        hub.update(pack([step(number)]))
        seen += fast.read().lanes["plain"].steps
    assert seen == 10
    assert slow.read().lanes["plain"].steps == 10


def test_a_subscriber_sees_only_what_comes_after_it(hub: Hub) -> None:
    hub.update(pack([step(1)]))
    late = hub.subscribe()
    hub.update(pack([step(2)]))
    assert late.read().lanes["plain"].steps == 1


def test_rates_are_per_second_of_the_window(hub: Hub) -> None:
    clock = hub._clock_ns
    assert isinstance(clock, ManualClock)
    screen = hub.subscribe()
    clock.ns += 500 * MS
    hub.update(pack([step(number) for number in range(10)]))
    assert screen.read().tokens_per_s == pytest.approx(20.0)


def test_windows_add_up_to_the_totals_over_a_long_stream(hub: Hub) -> None:
    screen = hub.subscribe()
    stream, emitted, accepted = StepStream(), 0, 0
    tokens = 0
    for _ in range(20):
        records = stream.take(50)
        tokens += sum(record.emitted for record in records if isinstance(record, StepRecord))
        hub.update(pack(records))
        for lane in screen.read().lanes.values():
            emitted += lane.tokens
            accepted += sum(lane.accepted_at)
    assert emitted == tokens == hub.tokens_out
    assert accepted == sum(lane.accepted for lane in hub.lanes.values())


def test_a_new_run_begins_new_windows_and_totals(hub: Hub) -> None:
    screen = hub.subscribe()
    hub.update(pack([step(1), step(2)]))
    hub.update(pack([run_record("next", 1_000_000 * MS), step(1)]))
    window = screen.read()
    assert window.lanes["plain"].steps == 1
    assert window.total_tokens == 1


def test_latencies_are_those_of_the_last_minute(hub: Hub) -> None:
    clock = hub._clock_ns
    assert isinstance(clock, ManualClock)
    hub.update(pack([ended("old", first=500, finished=1000)]))
    clock.ns += 62_000 * MS
    hub.update(pack([ended("new", arrived=61_000, first=61_040, finished=61_140)]))
    ttft, tpot = hub.latencies()
    assert (ttft.count, ttft.p50) == (1, pytest.approx(40.0))
    assert tpot.p50 == pytest.approx(10.0)


def test_quantiles_follow_the_nearest_rank() -> None:
    found = percentiles([*map(float, range(1, 101)), None])
    assert (found.p50, found.p95, found.p99, found.count) == (51.0, 96.0, 100.0, 100)
    assert percentiles([]).p50 is None
    assert percentiles([7.0]).p99 == 7.0


def test_a_request_is_waiting_then_active_then_finished(hub: Hub) -> None:
    hub.announce("a", prompt_tokens=5, conversation_id="talk")
    assert hub.requests()[0].state == "waiting"
    hub.update(pack([step(1), step(2)]))
    assert [(live.state, live.output_tokens, live.lane) for live in hub.requests()] == [("active", 2, "plain")]
    hub.update(pack([ended("a", tokens=2)]))
    [done] = hub.requests()
    assert (done.state, done.reason, done.conversation_id) == ("finished", "stop", "talk")


def test_running_requests_whose_end_was_lost_do_not_pile_up(hub: Hub) -> None:
    hub.update(pack([step(number, ids=[f"r{number}"]) for number in range(5000)]))
    assert len(hub.running()) <= 4096


def test_the_gate_view_tells_the_last_decision_with_unmeasured_arms_as_none(hub: Hub) -> None:
    assert hub.gate() is None
    arms = (("plain", 100.0, 2.0, 5, False), ("verify", -1.0, -1.0, 0, False))
    for mode in ("verify", "plain", "plain", "verify"):
        hub.update(pack([GateRecord(1, 5 * MS, mode, mode, "switch", arms, 5.0, 1, 100, 1, 64)]))
    gate = hub.gate()
    assert gate is not None
    assert gate.switches == 2
    assert [arm.tokens_per_s for arm in gate.arms] == [100.0, None]


def test_refusals_and_kv_are_those_of_the_last_decode_step(hub: Hub) -> None:
    hub.update(pack([step(1)]))
    window = hub.subscribe().read()
    assert window.refusals == {"ngram": "no_match"}
    assert (window.kv_used, window.kv_total) == (3, 10)


def test_the_cost_of_recording_is_a_share_of_tick_time(hub: Hub) -> None:
    hub.update(pack([HealthRecord(0, 900, 9, 1, 0, 0), HealthRecord(1, 100, 1, 1, 0, 0)]))
    assert hub.telemetry_cost() == pytest.approx(0.01)


# ---- the base of every speed-up -------------------------------------------------------------------------------


def baseline_step(baseline: PlainBaseline, record: StepRecord) -> None:
    (batch,) = pack([record])
    baseline.steps(batch, np.ones(1, np.bool_))


def test_plain_decoding_is_measured_by_width_and_only_when_there_is_enough() -> None:
    baseline = PlainBaseline()
    for number in range(7):
        baseline_step(baseline, step(number))
    assert baseline.tokens_per_s(1) is None
    baseline_step(baseline, step(7))
    assert baseline.tokens_per_s(1) == pytest.approx(100.0)
    assert baseline.tokens_per_s(2) is None


def test_the_gates_plain_arm_stands_in_until_plain_steps_were_seen() -> None:
    baseline = PlainBaseline()
    baseline.gate(GateRecord(1, 0, "verify", "verify", "hold", (("plain", 80.0, 1.0, 0, False),), 1.0, 0, 0, 4, 9))
    assert baseline.tokens_per_s(3) == 80.0
    assert baseline.tokens_per_s(1) is None


def test_a_pipelined_step_is_charged_only_the_time_since_the_one_before_it() -> None:
    baseline = PlainBaseline()
    for number in range(400):
        start = number * 10 * MS
        baseline_step(baseline, StepRecord(number, number, "pipelined", start, start + 20 * MS, 1, 1, emitted=1))
    assert baseline.tokens_per_s(1) == pytest.approx(100.0, rel=0.02)


def test_speculation_that_doubles_the_pace_shows_two_and_one_that_loses_shows_less_than_one(hub: Hub) -> None:
    hub.update(pack([step(number, ids="x") for number in range(10)]))
    hub.update(pack([step(10 + number, "mtp", ms=20, emitted=4, ids=("fast",)) for number in range(10)]))
    hub.update(pack([step(20 + number, "mtp", ms=20, emitted=1, ids=("slow",)) for number in range(10)]))
    by_name = {live.request_id: live for live in hub.requests()}
    assert by_name["fast"].speedup == pytest.approx(2.0)
    assert by_name["slow"].speedup == pytest.approx(0.5)


def test_without_a_measured_plain_step_there_is_no_speed_up(hub: Hub) -> None:
    hub.update(pack([step(number, "mtp", emitted=4) for number in range(10)]))
    assert hub.requests()[0].speedup is None
    assert LiveRequest("x", 0.0).speedup is None


def test_batches_that_wait_show_once_somebody_looks_and_count_as_if_taken_one_by_one(hub: Hub) -> None:
    waiting = Hub(ManualClock())
    stream = StepStream()
    batches = [pack([a_run()]), *(pack(stream.take(3)) for _ in range(9)), pack([ended("a")])]
    for batch in batches:
        waiting.put(batch)
        hub.update(batch)
    window, expected = (seen.subscribe() for seen in (waiting, hub))
    assert waiting.lanes == hub.lanes
    assert waiting.tokens_out == hub.tokens_out > 0
    assert waiting.gate() == hub.gate()
    assert _without_plain_time(waiting) == _without_plain_time(hub)
    assert window.read() == expected.read()


def _without_plain_time(hub: Hub) -> list[LiveRequest]:
    """What plain decoding would have taken is judged by what was known before a batch, so it depends on their size."""
    return [replace(request, decode_ns=0, plain_ns=0.0) for request in hub.requests()]


def test_a_new_run_among_waiting_batches_begins_new_totals(hub: Hub) -> None:
    for number in range(3):
        hub.put(pack([step(number)]))
    hub.put(pack([run_record("second", unix_ns=1_000_000 * MS)]))
    hub.put(pack([step(0, emitted=1)]))
    with hub.guard:
        assert hub.run == run_record("second", unix_ns=1_000_000 * MS)
        assert hub.tokens_out == 1
