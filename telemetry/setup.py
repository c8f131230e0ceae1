"""Wires telemetry together for the process that owns the database: one call takes a batch, the rest reads."""

from __future__ import annotations

from pathlib import Path

from telemetry.database import StoreError, default_path
from telemetry.hub import Hub
from telemetry.queries import Limits, QueryError, Result, run_query
from telemetry.record import AnyRecord, RecordError, decode
from telemetry.store import Store


class Telemetry:
    """Store, hub and exporters behind one door.

    `ingest` never raises and never blocks on the disk or the network.
    """

    def __init__(self, path: Path | None = None, otlp_endpoint: str = "") -> None:
        """Open the database (default: `database.default_path`). Raises `StoreError`."""
        self.path = path or default_path()
        self.store = Store(self.path)
        self.hub = Hub()

    def ingest(self, payload: bytes, lost: int = 0) -> None:
        """Take one encoded batch from the engine; `lost` were dropped by its ring since the last one."""
        try:
            records = decode(payload)
        except RecordError:
            self._lose("malformed batch", 1)
            records = []
        self.take(records, lost)

    def take(self, records: list[AnyRecord], lost: int = 0) -> None:
        """The same for records that are decoded already."""
        self.store.put(records, lost)
        self.hub.update(records)
        self.hub.set_lost(self.store.losses)

    @property
    def trouble(self) -> str:
        """One sentence of what is wrong with recording, or nothing."""
        return self.store.trouble

    def query(self, sql: str, limits: Limits = Limits()) -> Result:
        """Answer one read-only statement; blocks the calling thread up to the time limit. Raises `QueryError`."""
        try:
            cursor = self.store.cursor()
        except StoreError as error:
            raise QueryError(str(error)) from None
        return run_query(cursor, sql, limits)

    def end_run(self, reason: str) -> None:
        """The engine is gone; what comes next belongs to another run."""
        self.store.end_run(reason)

    def close(self, reason: str = "closed") -> None:
        """Write what is queued, state the end of the run, and let go of the file."""
        self.store.close(reason)

    def _lose(self, kind: str, count: int) -> None:
        self.store.lose(kind, count)
