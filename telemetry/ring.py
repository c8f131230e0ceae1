"""The bounded ring between tick thread and flush: appends never block, and what does not fit is counted."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from telemetry.record import AnyRecord

DEFAULT_CAPACITY = 65_536


class Sink(Protocol):
    """What the engine records into."""

    def append(self, record: AnyRecord) -> None: ...


class Ring:
    """One writer, one reader; full means that the newest record is dropped and counted."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self._capacity = capacity
        self._records: deque[AnyRecord] = deque()
        self.lost = 0
        """Dropped since the ring was made."""

    def append(self, record: AnyRecord) -> None:
        if len(self._records) < self._capacity:
            self._records.append(record)
        else:
            self.lost += 1

    def drain(self) -> list[AnyRecord]:
        """Take what is there now; safe while the writer appends."""
        records = self._records
        return [records.popleft() for _ in range(len(records))]


class NullSink:
    """Records nothing."""

    def append(self, record: AnyRecord) -> None:
        pass
