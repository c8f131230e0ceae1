"""Wires telemetry together for the process that owns the database: one call takes a batch, the rest reads."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from telemetry.batch import Batch, BatchError, decode
from telemetry.database import StoreError, default_path
from telemetry.exporters import SpanWorker
from telemetry.hub import Hub
from telemetry.metrics import Metric, exposition
from telemetry.otel import resource_of
from telemetry.otlp_metrics import MetricsSender
from telemetry.prometheus import counter, gauge, hub_metrics
from telemetry.queries import DEFAULT_LIMITS, Limits, QueryError, Result, run_query
from telemetry.store import Store

METRICS_EVERY_S = 10.0
_YOUNG_OBJECTS = 50_000
_SWITCH_S = 0.0005


class Telemetry:
    """Store, hub, spans and metrics behind one door.

    `ingest` never raises, and never waits for the disk or the network.
    """

    def __init__(
        self, path: Path | None = None, otlp_endpoint: str = "", metrics_every_s: float = METRICS_EVERY_S
    ) -> None:
        """Open the database (default: `database.default_path`). Raises `StoreError`."""
        _tune_interpreter()
        self.path = path or default_path()
        self.store = Store(self.path)
        self.hub = Hub()
        self.spans = SpanWorker(self.store, otlp_endpoint)
        self._sender = MetricsSender(otlp_endpoint) if otlp_endpoint else None
        self._every_s = metrics_every_s
        self._closing = threading.Event()
        self._sampler = threading.Thread(target=self._sample, name="telemetry-metrics", daemon=True)
        self._sampler.start()

    def ingest(self, payload: bytes, lost: int = 0) -> list[Batch]:
        """Take one message from the engine; `lost` were dropped by its ring since the last one."""
        try:
            batches = decode(payload)
        except BatchError:
            self.store.lose("malformed batch", 1)
            batches = []
        self.take(batches, lost)
        return batches

    def take(self, batches: Sequence[Batch], lost: int = 0) -> None:
        """The same for batches that are decoded already."""
        self.store.put(batches, lost)
        self.spans.put(batches)
        self.hub.put(batches)
        self.hub.set_lost(self.store.losses)

    def announce(self, request_id: str, prompt_tokens: int = 0, conversation_id: str = "", trace_id: str = "") -> None:
        """A request was accepted: it shows as waiting, and steps link to the caller's trace."""
        self.hub.announce(request_id, prompt_tokens, conversation_id)
        if trace_id:
            self.spans.announce(request_id, trace_id)
            self.store.announce(request_id, trace_id)

    def record_content(self, request_id: str, prompt: str, reply: str) -> None:
        """Keep what was said; `prompt` is JSON. The caller knows whether the operator asked for it."""
        self.store.put_rows("contents", [(time.time_ns() // 1000, request_id, prompt, reply)])

    @property
    def trouble(self) -> str:
        """One sentence of what is wrong with recording, or nothing."""
        return self.store.trouble or (self.spans.otlp.trouble if self.spans.otlp else "")

    def query(self, sql: str, limits: Limits = DEFAULT_LIMITS) -> Result:
        """Answer one read-only statement; blocks the calling thread up to the time limit. Raises `QueryError`."""
        self.store.freshen()
        try:
            cursor = self.store.cursor()
        except StoreError as error:
            raise QueryError(str(error)) from None
        return run_query(cursor, sql, limits)

    def prometheus(self) -> str:
        """The text of `/metrics`."""
        with self.hub.guard:
            return exposition(self.metrics(), self.hub.histograms.families())

    def metrics(self) -> list[Metric]:
        """Counters and gauges of the hub and of our own queues."""
        queues: dict[str, float] = {"store": self.store.queued, "spans": self.spans.queued}
        own = [
            gauge("telemetry_queue_records", "Records and spans that wait, by queue.", queues, "queue"),
            gauge(
                "telemetry_database_ok", "1 while the database takes what is recorded.", float(not self.store.trouble)
            ),
        ]
        if self.spans.otlp is not None:
            own.append(counter("telemetry_otlp_spans", "Spans that the collector took.", self.spans.otlp.exported))
        return [*hub_metrics(self.hub), *own]

    def end_run(self, reason: str) -> None:
        """The engine is gone; what comes next belongs to another run."""
        self.store.end_run(reason)

    def close(self, reason: str = "closed") -> None:
        """Write what is queued, state the end of the run, and let go of the file."""
        self._closing.set()
        self.spans.close()
        self._sampler.join(1.0)
        self.store.close(reason)

    def _sample(self) -> None:
        while not self._closing.wait(self._every_s):
            self._sample_once()
        self._sample_once()

    def _sample_once(self) -> None:
        now_ns, metrics = time.time_ns(), self.metrics()
        rows = [
            (now_ns // 1000, metric.name, ",".join(f"{name}={value}" for name, value in labels), float(number))
            for metric in metrics
            for labels, number in metric.values
        ]
        run = self.hub.run
        if run is not None:
            self.store.put_rows("metrics", rows)
        if self._sender is not None and run is not None:
            families = self.hub.histograms.families()
            if not self._sender.send(resource_of(run), run.unix_ns, now_ns, metrics, families):
                self.store.lose("otlp metrics", 1)


def _tune_interpreter() -> None:
    """Settings of the whole process for a busy ingest beside a busy event loop.

    Rows and spans of requests are thousands of small objects that die young and hold no cycles, and Python's own
    threshold makes the garbage collector look at them again and again. Every call into DuckDB gives the interpreter
    lock away, and with the default switch interval it comes back 5 ms later, which made the writer half as fast.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
    young, *_ = gc.get_threshold()
    if 0 < young < _YOUNG_OBJECTS:
        gc.set_threshold(_YOUNG_OBJECTS, 20, 20)
