"""Spans follow the conventions, have the recorded times, and are the same from the SDK, over OTLP and in SQL."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode

from engine.bench.step_stream import StepStream, run_record
from telemetry.batch import pack
from telemetry.exporters import BoundedSpanProcessor, span_row
from telemetry.otel import SpanFactory
from telemetry.record import GateRecord, LeverRecord, LoadRecord, RequestRecord, SeqShare, StepRecord
from telemetry.setup import Telemetry

MS = 1_000_000
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


def a_request(**changes: Any) -> RequestRecord:
    values: dict[str, Any] = {
        "request_id": "a", "operation": "chat", "conversation_id": "talk", "trace_id": TRACE,
        "parent_span_id": PARENT, "arrived_ns": 10 * MS, "admitted_ns": 12 * MS, "first_token_ns": 20 * MS,
        "finished_ns": 60 * MS, "reason": "stop", "error": "", "prompt_tokens": 5, "cached_tokens": 2,
        "output_tokens": 5, "drafted": 9, "accepted": 3, "prefill_chunks": 1, "preemptions": 0,
        "tokens_by_lane": {"mtp": 5}, "steps_by_lane": {"mtp": 2}, "temperature": 0.7, "top_p": 1.0, "top_k": 0,
        "max_tokens": 64, "seed": 7, "prefill_end_ns": 20 * MS,
    }  # fmt: skip
    return RequestRecord(**{**values, **changes})


@pytest.fixture
def factory() -> SpanFactory:
    return SpanFactory(run_record("r", unix_ns=1_000_000 * MS))


def test_a_request_span_continues_the_callers_trace_and_counts_no_drafts_as_output(factory: SpanFactory) -> None:
    root, *phases = factory.spans(a_request())
    assert root.name == "chat SmolLM2-135M"
    assert root.kind is SpanKind.SERVER
    assert root.context is not None
    assert root.parent is not None
    assert f"{root.context.trace_id:032x}" == TRACE
    assert f"{root.parent.span_id:016x}" == PARENT
    assert (root.start_time, root.end_time) == (1_000_010 * MS, 1_000_060 * MS)
    assert root.attributes is not None
    assert root.attributes["gen_ai.usage.output_tokens"] == 5
    assert root.attributes["metrale.drafted"] == 9
    assert root.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert [phase.name for phase in phases] == ["queue", "prefill", "decode"]
    assert all(phase.parent == root.context for phase in phases)
    assert [(span.start_time, span.end_time) for span in phases] == [
        (1_000_010 * MS, 1_000_012 * MS), (1_000_012 * MS, 1_000_020 * MS), (1_000_020 * MS, 1_000_060 * MS)
    ]  # fmt: skip


def test_a_request_without_a_caller_is_a_root_with_a_trace_of_its_own(factory: SpanFactory) -> None:
    one = next(iter(factory.spans(a_request(request_id="a", trace_id="", parent_span_id=""))))
    two = next(iter(factory.spans(a_request(request_id="b", trace_id="", parent_span_id=""))))
    assert one.parent is None
    assert one.context is not None
    assert two.context is not None
    assert one.context.trace_id != two.context.trace_id


def test_an_unsampled_request_has_no_span(factory: SpanFactory) -> None:
    assert list(factory.spans(a_request(sampled=False))) == []


@pytest.mark.parametrize(("reason", "failed"), [("stop", False), ("cancelled", False), ("error", True), ("loop", True)])
def test_failures_are_errors_and_cancels_are_not(factory: SpanFactory, reason: str, failed: bool) -> None:
    root = next(iter(factory.spans(a_request(reason=reason, error="it broke" if failed else ""))))
    assert (root.status.status_code is StatusCode.ERROR) is failed
    assert root.attributes is not None
    assert root.attributes.get("error.type") == (reason if failed else None)


def test_a_request_that_never_left_the_queue_has_only_that_phase(factory: SpanFactory) -> None:
    spans = factory.spans(a_request(admitted_ns=0, first_token_ns=0, prefill_end_ns=0, reason="cancelled"))
    assert [span.name for span in spans] == ["chat SmolLM2-135M", "queue"]


def test_a_lane_step_links_to_the_requests_that_it_served_and_gate_decisions_are_its_children(
    factory: SpanFactory,
) -> None:
    factory.announce("a", TRACE)
    step = StepRecord(
        7, 7, "mtp", 30 * MS, 31 * MS, 1, 4, drafted=3, accepted=1, bonus=1, emitted=2, drafted_at=(1, 1, 1),
        accepted_at=(1, 0, 0), refusals=(("ngram", "no_match"),), shares=(SeqShare("a", 3, 1, 2),),
    )  # fmt: skip
    [span] = factory.spans(step)
    [gate] = factory.spans(
        GateRecord(7, 30 * MS, "verify", "verify", "hold", (("plain", -1.0, -1.0, 3, False),), 1.0, 0, 9, 1, 5)
    )
    root = next(iter(factory.spans(a_request())))
    assert span.name == "lane.mtp"
    assert [link.context for link in span.links] == [root.context]
    assert span.attributes is not None
    assert gate.attributes is not None
    assert span.attributes["metrale.refused.ngram"] == "no_match"
    assert gate.name == "gate.decision"
    assert gate.parent == span.context
    assert "metrale.gate.plain.tokens_per_s" not in gate.attributes


def test_the_resource_names_service_run_model_device_versions_and_levers(factory: SpanFactory) -> None:
    attributes = factory.resource.attributes
    assert attributes["service.name"] == "metrale"
    assert attributes["service.instance.id"] == "r"
    assert attributes["metrale.lever.num_drafts"] == 3


def test_spans_in_sql_are_those_of_the_sdk(tmp_path: Path) -> None:
    owner = Telemetry(tmp_path / "m.duckdb")
    run = run_record("r", unix_ns=time.time_ns() // 1_000_000 * 1_000_000)
    records = [
        *StepStream().take(60),
        LeverRecord("c", 5 * MS, 3, "num_drafts", 3, 5, "tui", "me", "why"),
        LoadRecord("load", 0, 4 * MS, "weights", 98),
        a_request(),
        a_request(request_id="broken", reason="error", error="it broke", conversation_id=""),
        a_request(request_id="waited", admitted_ns=0, first_token_ns=0, prefill_end_ns=0, reason="deadline"),
        a_request(
            request_id="cut", first_token_ns=0, prefill_end_ns=0, reason="shutdown", trace_id="", parent_span_id=""
        ),
        a_request(request_id="quiet", sampled=False),
    ]
    owner.announce("chat-0001000000000001", trace_id=TRACE)
    owner.take(pack([run, *records]))
    owner.spans.flush()
    owner.spans.close()
    assert owner.store.flush()
    factory = SpanFactory(run)
    factory.announce("chat-0001000000000001", TRACE)
    expected = [span_row(span) for record in records for span in factory.spans(record)]
    rows = owner.query(
        "SELECT trace_id, span_id, parent_span_id, name, kind, epoch_us(start), dur_us, status, attributes, links"
        " FROM spans WHERE name <> 'engine.run'"
    ).rows
    found = {row[1]: row for row in rows}
    assert sorted(row[3] for row in rows) == sorted(row[3] for row in expected)
    assert len(found) == len(rows)
    for row in expected:
        trace, span, parent, name, kind, start, duration, status, attributes, _, links = row
        assert found[span][:8] == (trace, span, parent, name, kind, start, duration, status)
        assert found[span][9] == links
        ours, theirs = json.loads(found[span][8]), json.loads(attributes)
        if name.startswith("lane."):
            theirs = {key: value for key, value in theirs.items() if ".refused." not in key}
            ours = {key: ours[key] for key in theirs}
        if name != "gate.decision":  # arms are one list there, and attributes of their own here
            assert ours == {key: pytest.approx(value) for key, value in theirs.items()}
    owner.close()


# ---- over OTLP to a real receiver -----------------------------------------------------------------------------


@dataclass
class Collector:
    process: subprocess.Popen[bytes]
    port: int
    output: Path

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> list[dict[str, Any]]:
        self.process.terminate()
        self.process.wait()
        return [json.loads(line) for line in self.output.read_text().splitlines()]


@pytest.fixture
def collect(tmp_path: Path) -> Iterator[Callable[..., Collector]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(port: int = 0, delay_s: float = 0.0, refuse_first: int = 0) -> Collector:
        command = [sys.executable, "-m", "tests.telemetry.collector", str(port), str(delay_s), str(refuse_first)]
        output = tmp_path / f"collector-{len(started)}"
        process = subprocess.Popen(command, stdout=output.open("wb"))
        started.append(process)
        while not (text := output.read_text()).endswith("\n"):
            assert process.poll() is None
            time.sleep(0.02)
        return Collector(process, json.loads(text.splitlines()[0])["port"], output)

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()


def test_a_collector_gets_every_span_with_resource_links_and_times(
    tmp_path: Path, collect: Callable[..., Collector]
) -> None:
    collector = collect()
    owner = Telemetry(tmp_path / "m.duckdb", otlp_endpoint=collector.endpoint)
    run = run_record("r")
    records = StepStream().take(200)
    owner.take(pack([run, *records, a_request()]))
    owner.spans.flush()
    assert owner.spans.otlp is not None
    assert owner.spans.otlp.force_flush(20_000)
    owner.close()
    got = collector.stop()
    spans = [line for line in got if "name" in line]
    factory = SpanFactory(run)
    expected = [span for record in [*records, a_request()] for span in factory.spans(record)]
    assert len(spans) == len(expected) + 1  # and the run itself
    by_id = {span["span_id"]: span for span in spans}
    for span in expected:
        assert span.context is not None
        there = by_id[f"{span.context.span_id:016x}"]
        assert (there["start"], there["end"]) == (span.start_time, span.end_time)
        assert there["resource"]["service.instance.id"] == "r"
        assert len(there["links"]) == len(span.links)
    names = {line["metric"]: line for line in got if "metric" in line}
    assert names["gen_ai.server.request.duration"]["kind"] == "histogram"
    assert names["gen_ai.server.time_to_first_token"]["unit"] == "s"
    assert names["metrale.spec_decode_num_drafts"]["kind"] == "sum"


def test_a_collector_that_is_down_costs_nothing_but_counted_spans_and_is_served_when_it_comes(
    tmp_path: Path, collect: Callable[..., Collector]
) -> None:
    first = collect()
    port = first.port
    first.stop()
    owner = Telemetry(tmp_path / "m.duckdb", otlp_endpoint=first.endpoint)
    owner.take(pack([run_record(), a_request(request_id="early")]))
    deadline = time.monotonic() + 20
    while "collector" not in owner.trouble and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "kept" in owner.trouble
    begun = time.perf_counter()
    owner.take(pack(StepStream().take(100)))
    assert time.perf_counter() - begun < 3.0, "an answer of the collector is waited for up to 5 s"
    second = collect(port=port)
    owner.take(pack([a_request(request_id="late")]))
    owner.spans.flush()
    assert owner.spans.otlp is not None
    assert owner.spans.otlp.force_flush(30_000)
    assert owner.query("SELECT count(*) FROM lane_steps").rows == ((100,),)
    owner.close()
    ids = {line["attributes"].get("gen_ai.response.id") for line in second.stop() if "name" in line}
    assert {"early", "late"} <= ids


def test_a_collector_that_answers_slowly_gets_what_the_queue_holds_and_the_rest_is_counted() -> None:
    class Slow(SpanExporter):
        taken = 0
        asked, answers = threading.Event(), threading.Event()

        def export(self, spans: Any) -> SpanExportResult:
            Slow.asked.set()
            Slow.answers.wait(60)
            Slow.taken += len(spans)
            return SpanExportResult.SUCCESS

    lost: list[int] = []
    processor = BoundedSpanProcessor(Slow(), lost.append, capacity=100)
    processor.on_end(ReadableSpan("x"))
    assert Slow.asked.wait(30)
    for _ in range(999):
        processor.on_end(ReadableSpan("x"))
    assert Slow.taken == 0, "nobody waited for the answer"
    assert sum(lost) == 900
    Slow.answers.set()
    assert processor.force_flush(30_000)
    processor.shutdown()
    assert (Slow.taken, sum(lost)) == (100, 900)


def test_a_refused_batch_is_kept_and_sent_again() -> None:
    class Moody(SpanExporter):
        answers = [SpanExportResult.FAILURE, SpanExportResult.SUCCESS]
        taken: list[str] = []

        def export(self, spans: Any) -> SpanExportResult:
            answer = Moody.answers.pop(0) if Moody.answers else SpanExportResult.SUCCESS
            if answer is SpanExportResult.SUCCESS:
                Moody.taken += [span.name for span in spans]
            return answer

    processor = BoundedSpanProcessor(Moody(), lambda count: None)
    processor.on_end(ReadableSpan("one"))
    processor.on_end(ReadableSpan("two"))
    assert processor.force_flush(10_000)
    processor.shutdown()
    assert Moody.taken == ["one", "two"]


def test_what_the_collector_never_took_is_counted_at_the_end() -> None:
    class Dead(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            raise ConnectionError

    lost: list[int] = []
    processor = BoundedSpanProcessor(Dead(), lost.append)
    processor.on_end(ReadableSpan("one"))
    processor.shutdown()
    assert sum(lost) == 1
