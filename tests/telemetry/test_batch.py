"""Few records travel as they are and many as columns; merged, nobody can tell which way they came."""

from __future__ import annotations

from collections.abc import Sequence

from engine.bench.step_stream import StepStream, run_record
from engine.server.app import decode_steps
from engine.server.desk import Steps
from telemetry.batch import FEW, Batch, decode, merge, message, pack
from telemetry.hub import Hub
from telemetry.record import AnyRecord, LeverRecord, StepRecord
from tests.telemetry.conftest import OpenStore

BAD = StepRecord(99, 99, "plain", 0, 1, width=-3, rows=1)


def sent(records: Sequence[AnyRecord]) -> list[Batch]:
    return decode(message(records))


def test_few_records_travel_loose_and_many_as_columns() -> None:
    few, many = StepStream().take(20), StepStream().take(FEW)
    assert [batch.is_loose for batch in sent(few)] == [True]
    assert [batch.is_loose for batch in sent(many)] == [False]
    assert list(sent(few)[0].records()) == few
    assert sent([]) == []


def test_loose_and_columnar_batches_merge_to_the_columns_of_all_their_records() -> None:
    stream = StepStream()
    parts = [[run_record(unix_ns=1), *stream.take(30)], stream.take(FEW), stream.take(7), stream.take(9)]
    merged = merge([batch for part in parts for batch in sent(part)])
    (whole,) = pack([record for part in parts for record in part])
    assert not merged.is_loose
    assert list(merged.records()) == list(whole.records())
    assert merged.run == whole.run


def test_the_live_view_of_loose_batches_is_that_of_columns() -> None:
    loose, columnar = Hub(clock_ns=lambda: 5), Hub(clock_ns=lambda: 5)
    stream = StepStream()
    for records in ([run_record(unix_ns=1), *stream.take(50)], stream.take(60), [run_record("b", 1), *stream.take(40)]):
        loose.put(sent(records))
        columnar.put(pack(records))
    assert loose.requests() == columnar.requests()
    assert loose.subscribe().read() == columnar.subscribe().read()
    assert loose.lanes == columnar.lanes
    assert loose.gate() == columnar.gate()


def test_a_loose_record_that_no_column_can_hold_is_counted_once_and_its_neighbours_are_kept(
    open_store: OpenStore,
) -> None:
    store = open_store()
    good = [record for record in StepStream().take(20) if isinstance(record, StepRecord)]
    store.put(sent([run_record(), *good[:10], BAD]))
    store.put(sent(good[10:]))
    assert store.flush()
    assert store.cursor().execute("SELECT count(*) FROM lane_steps").fetchall() == [(20,)]
    assert store.losses == {"malformed StepRecord": 1}
    assert store.flush()
    assert store.cursor().execute("SELECT sum(lost)::INTEGER FROM losses").fetchall() == [(1,)]


def test_a_number_that_cannot_be_sent_costs_its_neighbours_nothing() -> None:
    far = StepRecord(2**70, 1, "plain", 0, 1, 1, 1)
    change = LeverRecord("a", 1, 1, "num_drafts", 3, 5, "tui", "me", "")
    steps = [record for record in StepStream().take(9) if isinstance(record, StepRecord)]
    (batch,) = sent([*steps, far, change])
    assert list(batch.records()) == [*steps, change]
    assert batch.malformed == {"StepRecord": 1}


def test_guards_see_loose_steps_and_columnar_ones_alike() -> None:
    stream, loose, columnar = StepStream(), Steps(), Steps()
    mark = loose.mark
    for _ in range(40):
        records = stream.take(5)
        for steps, batches in ((loose, sent(records)), (columnar, pack(records))):
            for batch in batches:
                steps.add(decode_steps(batch))
    assert len(loose.all()) > 100
    assert loose.all() == columnar.all() == loose.since(mark)
