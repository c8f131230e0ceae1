"""Sums reconcile: tokens by step, by request, by lane, by position and in the live view are the same tokens."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.bench.step_stream import StepStream, run_record
from telemetry.batch import decode, encode, pack
from telemetry.hub import Hub
from telemetry.record import RequestRecord, SeqShare, StepRecord
from telemetry.recorded import recorded_steps, records
from telemetry.store import Store

LANES = ("plain", "mtp", "ngram", "mixed", "pipelined", "dflash", "preempt")


@st.composite
def streams(draw: st.DrawFn) -> list[StepRecord | RequestRecord]:
    """Steps with any number of sequences, drafts and accepted prefixes, and the requests that they add up to."""
    out: list[StepRecord | RequestRecord] = []
    totals: dict[str, Counter[str]] = {}
    by_lane: dict[str, tuple[Counter[str], Counter[str]]] = {}
    now = 0
    for number in range(draw(st.integers(1, 25))):
        lane = draw(st.sampled_from(LANES))
        ids = draw(st.lists(st.sampled_from("abcdef"), unique=True, max_size=5))
        most = draw(st.integers(1, 6)) if lane in ("mtp", "ngram", "dflash") else 0
        shares = []
        for name in ids:
            drafted = draw(st.integers(0, most))
            accepted = draw(st.integers(0, drafted))
            emitted = 0 if lane == "preempt" else accepted + 1
            shares.append(SeqShare(name, drafted, accepted, emitted, draw(st.integers(0, 70_000))))
            totals.setdefault(name, Counter()).update(emitted=emitted, drafted=drafted, accepted=accepted)
            tokens, steps = by_lane.setdefault(name, (Counter(), Counter()))
            tokens[lane] += emitted
            steps[lane] += 1
        accepted_sum = sum(share.accepted for share in shares)
        emitted_sum = sum(share.emitted for share in shares)
        positions = range(1, most + 1)
        end = now + draw(st.integers(1, 50_000_000))
        out.append(
            StepRecord(
                number, number, lane, now, end, len(ids), len(ids) * (most + 1),
                sum(share.prefill_tokens for share in shares), sum(share.drafted for share in shares),
                accepted_sum if lane != "preempt" else 0, emitted_sum - accepted_sum if emitted_sum else 0, emitted_sum,
                tuple(sum(share.drafted >= at for share in shares) for at in positions),
                tuple(sum(share.accepted >= at for share in shares) for at in positions), most,
                refusals=(("ngram", "no_match"),) * draw(st.integers(0, 1)), shares=tuple(shares),
            )
        )  # fmt: skip
        now = end
    for name, total in totals.items():
        tokens, steps = by_lane[name]
        out.append(
            RequestRecord(
                name, "chat", "", "", "", 0, 1, 2, now, "stop", "", 3, 0, total["emitted"], total["drafted"],
                total["accepted"], 1, 0, dict(tokens), dict(steps), 1.0, 1.0, 0, 0, 1,
            )
        )  # fmt: skip
    return out


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stream=streams())
def test_every_view_of_the_tokens_of_a_run_adds_up_to_the_same(
    stream: list[StepRecord | RequestRecord], tmp_path_factory: object
) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        store = Store(Path(directory) / "m.duckdb", flush_s=0.01)
        try:
            run = run_record("r")
            store.put(decode(encode(pack([run, *stream]))))
            assert store.flush()
            _check(store, stream)
        finally:
            store.close()


def _check(store: Store, stream: list[StepRecord | RequestRecord]) -> None:
    steps = [record for record in stream if isinstance(record, StepRecord)]
    cursor = store.cursor()
    emitted = sum(step.emitted for step in steps)

    def total(sql: str) -> int:
        return int(cursor.execute(sql).fetchall()[0][0] or 0)

    assert total("SELECT sum(emitted) FROM lane_steps") == emitted
    assert total("SELECT sum(emitted) FROM step_sequences") == emitted
    assert total("SELECT sum(emitted) FROM step_rollup") == emitted
    assert total("SELECT sum(tokens) FROM lanes") == emitted
    assert total("SELECT sum(output_tokens) FROM requests") == emitted
    assert total("SELECT sum(tokens) FROM request_lanes") == emitted
    assert total("SELECT sum(accepted) FROM position_rollup") == sum(sum(step.accepted_at) for step in steps)
    assert total("SELECT sum(drafted) FROM position_rollup") == sum(sum(step.drafted_at) for step in steps)
    assert total("SELECT sum(steps) FROM step_time_rollup") == len(steps)
    assert total("SELECT sum(steps) FROM refusal_rollup") == sum(len(step.refusals) for step in steps)
    assert total("SELECT sum(busy_us) - (SELECT sum(dur_us) FROM lane_steps) FROM step_rollup") == 0
    by_request = dict(
        cursor.execute("SELECT request_id, sum(emitted)::BIGINT FROM step_sequences GROUP BY 1").fetchall()
    )
    assert by_request == {r.request_id: r.output_tokens for r in stream if isinstance(r, RequestRecord)}
    hub = Hub()
    hub.update(pack([run_record("r"), *stream]))
    assert hub.tokens_out == emitted
    assert sum(lane.tokens for lane in hub.lanes.values()) == emitted


def test_what_is_read_back_is_what_was_recorded(tmp_path: Path) -> None:
    store = Store(tmp_path / "m.duckdb")
    stream = StepStream(width=5).take(800)
    store.put(pack([run_record("r"), *stream]))
    store.close()
    from telemetry.database import open_for_reading

    reader = open_for_reading(store.path)
    steps = [record for record in stream if isinstance(record, StepRecord)]
    back = list(recorded_steps(reader, 1))
    assert [_whole(step) for step in back] == [_whole(step) for step in steps]
    kinds = Counter(type(record).__name__ for record in records(reader, 1))
    assert kinds == Counter(type(record).__name__ for record in stream if type(record).__name__ != "HealthRecord")


def _whole(step: StepRecord) -> tuple[object, ...]:
    """Everything but times, which the database keeps to a microsecond."""
    times = {"start_ns", "end_ns"}
    return tuple(getattr(step, name) for name in step.__struct_fields__ if name not in times)
