"""Where SDK spans go: into the database, and over OTLP/HTTP to a collector; both bounded, counted, off the hot path."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

from telemetry.batch import Batch
from telemetry.otel import SpanFactory
from telemetry.record import AnyRecord, LeverRecord, LoadRecord, RunRecord
from telemetry.store import Store

_RARE = (LeverRecord, LoadRecord)
"""Records whose spans are stored as SDK spans; the view `spans` composes those of requests, steps and decisions."""
_WORKER_CAPACITY = 65_536
_OTLP_CAPACITY = 16_384
_OTLP_BATCH = 512
_OTLP_TIMEOUT_S = 5.0
_PAUSE_S = 0.1
_RETRY_S = (0.5, 1.0, 2.0, 5.0, 10.0)


class DuckDBSpanExporter(SpanExporter):
    """Writes SDK spans into `spans_recorded`, through the queue of the store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._store.put_rows("spans_recorded", [span_row(span) for span in spans])
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._store.flush(timeout_millis / 1e3)


def span_row(span: ReadableSpan) -> tuple[Any, ...]:
    """A span as a row of `spans_recorded`, without the run number."""
    context, parent = span.get_span_context(), span.parent
    start, end = span.start_time or 0, span.end_time or 0
    return (
        f"{context.trace_id:032x}" if context else "",
        f"{context.span_id:016x}" if context else "",
        f"{parent.span_id:016x}" if parent else "",
        span.name,
        span.kind.name,
        start // 1000,
        end // 1000 - start // 1000,
        span.status.status_code.name,
        _json(dict(span.attributes or {})),
        _json([{"name": event.name, "time": event.timestamp} for event in span.events]),
        [{"trace_id": f"{link.context.trace_id:032x}", "span_id": f"{link.context.span_id:016x}"}
         for link in span.links],
    )  # fmt: skip


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


class BoundedSpanProcessor(SpanProcessor):
    """Exports from a thread of its own: a full queue drops the newest, a failed batch is kept and sent again."""

    def __init__(self, exporter: SpanExporter, lose: Callable[[int], None], capacity: int = _OTLP_CAPACITY) -> None:
        self._exporter = exporter
        self._lose = lose
        self._capacity = capacity
        self._spans: deque[ReadableSpan] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._failures = 0
        self.exported = 0
        self.trouble = ""
        self._thread = threading.Thread(target=self._run, name="telemetry-otlp", daemon=True)
        self._thread.start()

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        pass

    @property
    def queued(self) -> int:
        return len(self._spans)

    @property
    def full(self) -> bool:
        return len(self._spans) >= self._capacity

    def on_end(self, span: ReadableSpan) -> None:
        if self.full or self._stopping:
            self._lose(1)
        else:
            self._spans.append(span)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        deadline = time.monotonic() + timeout_millis / 1e3
        while self._spans and time.monotonic() < deadline and self._thread.is_alive():
            self._wake.set()
            time.sleep(0.02)
        return not self._spans

    def shutdown(self) -> None:
        """One last attempt for what is queued; what the collector does not take is counted as lost."""
        self._stopping = True
        self._wake.set()
        self._thread.join(_OTLP_TIMEOUT_S)
        self._exporter.shutdown()
        self._lose(len(self._spans))
        self._spans.clear()

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait(_RETRY_S[min(self._failures, 5) - 1] if self._failures else _PAUSE_S)
            self._wake.clear()
            while self._spans and self._send() and not self._stopping:
                pass
        while self._spans and self._send():
            pass

    def _send(self) -> bool:
        """Send the oldest batch; it leaves the queue only when the collector took it."""
        batch = [self._spans[at] for at in range(min(len(self._spans), _OTLP_BATCH))]
        try:
            taken = self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception as error:  # an exporter must not be able to end this thread
            taken = False
            logging.getLogger(__name__).debug("span export failed: %s", error)
        if taken:
            for _ in batch:
                self._spans.popleft()
            self.exported += len(batch)
            self._failures = 0
            self.trouble = ""
        else:
            self._failures += 1
            self.trouble = f"The collector has not taken the last {self._failures} batches of spans; they are kept."
        return taken


class SpanWorker:
    """Turns records into SDK spans off the caller's thread and hands them to the span processors."""

    def __init__(self, store: Store, otlp_endpoint: str = "") -> None:
        self.lost: Counter[str] = Counter()
        self._store = store
        self._database = SimpleSpanProcessor(DuckDBSpanExporter(store))
        self.otlp = self._collector(otlp_endpoint) if otlp_endpoint else None
        self._guard = threading.Lock()
        self._work: deque[Batch | tuple[str, str]] = deque()
        self._waiting = 0
        self._factory: SpanFactory | None = None
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry-spans", daemon=True)
        self._thread.start()

    def put(self, batches: Sequence[Batch]) -> None:
        """Queue what becomes SDK spans; without a collector that is only what is rare."""
        for batch in batches if self.otlp else filter(len, map(_rare_only, batches)):
            if self._waiting + len(batch) > _WORKER_CAPACITY:
                self._lose(len(batch))
                continue
            with self._guard:
                self._waiting += len(batch)
            self._work.append(batch)
            self._wake.set()

    def announce(self, request_id: str, trace_id: str) -> None:
        """The caller's trace of a request that was just accepted."""
        if trace_id and len(self._work) < _WORKER_CAPACITY:
            self._work.append((request_id, trace_id))
            self._wake.set()

    @property
    def queued(self) -> int:
        return self._waiting + (self.otlp.queued if self.otlp else 0)

    def close(self) -> None:
        self._stopping.set()
        self._wake.set()
        self._thread.join(_OTLP_TIMEOUT_S)
        if self.otlp is not None:
            self.otlp.shutdown()
        self._database.shutdown()

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until every queued record became spans (not until a collector took them)."""
        deadline = time.monotonic() + timeout_s
        while self._work and time.monotonic() < deadline:
            time.sleep(0.01)
        return not self._work

    def _collector(self, endpoint: str) -> BoundedSpanProcessor:
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)  # we report its failures ourselves
        exporter = OTLPSpanExporter(traces_endpoint(endpoint), timeout=_OTLP_TIMEOUT_S)
        return BoundedSpanProcessor(exporter, self._lose)

    def _run(self) -> None:
        while not self._stopping.wait(_PAUSE_S):
            self._wake.wait()
            self._wake.clear()
            self._drain()
        self._drain()
        if self._factory is not None:
            self._end(self._factory.run_span(time.time_ns()), rare=False)

    def _drain(self) -> None:
        while self._work:
            work = self._work[0]
            if isinstance(work, Batch):
                for record in work.records():
                    self._take(record)
                with self._guard:
                    self._waiting -= len(work)
            elif self._factory is not None:
                self._factory.announce(*work)
            self._work.popleft()

    def _take(self, record: AnyRecord) -> None:
        if isinstance(record, RunRecord):
            if self._factory is not None:
                self._end(self._factory.run_span(time.time_ns()), rare=False)
            self._factory = SpanFactory(record)
        elif self._factory is not None:
            self._make(record, self._factory)

    def _make(self, record: AnyRecord, factory: SpanFactory) -> None:
        rare = isinstance(record, _RARE)
        if not rare and self.otlp is not None and self.otlp.full:
            self._lose(1)
            return
        try:
            for span in factory.spans(record):
                self._end(span, rare)
        except (ValueError, TypeError):
            self.lost["malformed span"] += 1
            self._store.lose("malformed span", 1)

    def _end(self, span: ReadableSpan, rare: bool) -> None:
        if rare:
            self._database.on_end(span)
        if self.otlp is not None:
            self.otlp.on_end(span)

    def _lose(self, count: int) -> None:
        if count > 0:
            self.lost["otlp"] += count
            self._store.lose("otlp", count)


def _rare_only(batch: Batch) -> Batch:
    return Batch(batch.run, others=[record for record in batch.others if isinstance(record, _RARE)])


def traces_endpoint(endpoint: str) -> str:
    """The URL for traces: a bare collector address gets the path that OTLP prescribes."""
    base = endpoint.rstrip("/")
    return base if base.endswith("/v1/traces") else f"{base}/v1/traces"
