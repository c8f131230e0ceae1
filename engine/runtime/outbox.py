"""The way up: what the tick thread sends is collected here and written by another thread, batch by batch."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from engine.protocol.events import Delta, Event, LeverChanged, Records, Snapshot
from telemetry.batch import message
from telemetry.record import AnyRecord

FLUSH_S = 0.010
RECORDS_S = 0.100
IDLE_S = 0.5
MAX_PENDING = 500_000
"""Events that may wait for a server that does not read; beyond it the link counts as dead."""

Write = Callable[[list[Event]], None]


class Drain(Protocol):
    """The reading side of the record ring."""

    composing_ns: int

    @property
    def lost(self) -> int: ...

    def drain(self) -> list[AnyRecord]: ...


class BatchOutbox:
    """Takes events without waiting. Of snapshots only the newest is kept, so one leaves per flush."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._snapshot: Snapshot | None = None
        self._rung = False
        self.bell = threading.Event()

    def send(self, event: Event) -> None:
        if isinstance(event, Snapshot):
            self._snapshot = event
        else:
            self._events.append(event)
        if not self._rung:
            self._rung = True
            self.bell.set()

    def __len__(self) -> int:
        return len(self._events)

    def take(self) -> list[Event]:
        """All events so far, the newest snapshot last. Called by the flushing thread only."""
        self.bell.clear()
        self._rung = False
        events = [self._events.popleft() for _ in range(len(self._events))]
        snapshot, self._snapshot = self._snapshot, None
        return events if snapshot is None else [*events, snapshot]


class Flusher(threading.Thread):
    """Writes batches: at once after a pause, 10 ms after the last tokens under load, records every 100 ms. What carries
    no tokens delays none: the first token of a reply follows its acceptance at once.

    A lever change is recorded before it is acknowledged: its batch carries the records first.
    """

    def __init__(self, outbox: BatchOutbox, ring: Drain, write: Write, on_broken: Callable[[], None]) -> None:
        super().__init__(name="flush", daemon=True)
        self._outbox = outbox
        self._ring = ring
        self._write = write
        self._on_broken = on_broken
        self._lost = 0
        self._last_records = 0.0
        self._pending_records = False
        self._closing = threading.Event()

    def run(self) -> None:
        try:
            while not self._closing.is_set():
                if self._outbox.bell.wait(RECORDS_S if self._pending_records else IDLE_S):
                    started = time.monotonic()
                    if self.flush():
                        self._closing.wait(max(0.0, FLUSH_S - (time.monotonic() - started)))
                else:
                    self.flush()
            self.flush(last=True)
        except OSError:
            self._on_broken()

    def flush(self, last: bool = False) -> bool:
        """Write what waits now; whether there were tokens. Raises `OSError` when the other side is gone."""
        if len(self._outbox) > MAX_PENDING:
            raise TimeoutError("The server stopped reading.")
        events = self._outbox.take()
        due = last or time.monotonic() - self._last_records >= RECORDS_S
        self._pending_records = not due
        if due or any(isinstance(event, LeverChanged) for event in events):
            events = [*self._records(), *events]
        if events:
            self._write(events)
        return any(isinstance(event, Delta) for event in events)

    def close(self, timeout: float = 2.0) -> None:
        """Flush the rest and end; waits for the thread."""
        self._closing.set()
        self._outbox.bell.set()
        self.join(timeout)

    def _records(self) -> list[Event]:
        self._last_records = time.monotonic()
        ring, used_ns = self._ring, time.thread_time_ns()
        records = ring.drain()
        lost, self._lost = ring.lost - self._lost, ring.lost
        payload = message(records)
        ring.composing_ns += time.thread_time_ns() - used_ns
        return [Records(payload=payload, lost=lost)] if records or lost else []
