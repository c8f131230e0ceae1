"""The bounded ring between tick thread and flush: appends never block, and what does not fit is counted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from telemetry.record import AnyRecord

DEFAULT_CAPACITY = 65_536

Entry = AnyRecord | tuple[Any, ...]
"""A record, or what becomes one when the ring is drained, on another thread: a function and its arguments, none of
which may change until then. Between two steps the caches are cold: making a record takes five times as long there as
in a loop, and a tuple a seventh of that."""


class Sink(Protocol):
    """What the engine records into."""

    @property
    def append(self) -> Callable[[Entry], None]: ...

    def note_cost(self, ns: int) -> None:
        """Add to what recording took on the tick thread, as estimated from a sample of steps."""
        ...


class Ring:
    """One writer, one reader; beyond the capacity the newest records are dropped and counted."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self.capacity = capacity
        self.entries: deque[Entry] = deque()
        """Between two calls of `trim` it may hold more than the capacity."""
        self.append: Callable[[Entry], None] = self.entries.append
        """The deque's own: a method in Python takes 2 us in the midst of decoding."""
        self.lost = 0
        """Dropped since the ring was made."""
        self.recording_ns = 0
        """What recording took on the tick thread so far."""
        self.composing_ns = 0
        """What the reader took to make records of entries and to pack them; the reader adds to it."""
        self._drained = 0

    @property
    def records(self) -> int:
        """Appended so far."""
        return self._drained + len(self.entries) + self.lost

    def note_cost(self, ns: int) -> None:
        self.recording_ns += ns

    def trim(self) -> None:
        """Drop what is beyond the capacity. The writer calls this after every tick that left more than that."""
        for _ in range(len(self.entries) - self.capacity):
            self.entries.pop()
            self.lost += 1

    def drain(self) -> list[AnyRecord]:
        """Take what is there now; safe while the writer appends or trims."""
        entries, taken = self.entries, []
        for _ in range(min(len(entries), self.capacity)):
            taken.append(entries.popleft())
        self._drained += len(taken)
        return [composed(entry) for entry in taken]


class NullSink:
    """Records nothing."""

    def append(self, entry: Entry) -> None:
        pass

    def note_cost(self, ns: int) -> None:
        pass


def composed(entry: Entry) -> AnyRecord:
    """The record that an entry is or becomes."""
    if isinstance(entry, tuple):
        make, *arguments = entry
        made: AnyRecord = make(*arguments)
        return made
    return entry
