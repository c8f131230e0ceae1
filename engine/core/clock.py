"""The clock that the scheduler is given; nothing else in the policy reads time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_ns(self) -> int:
        """Nanoseconds that never run backwards; only differences mean anything."""
        ...


class MonotonicClock:
    def now_ns(self) -> int:
        return time.perf_counter_ns()


class ManualClock:
    """Moves only when told to, for traces and simulations."""

    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns

    def now_ns(self) -> int:
        return self._now_ns

    def advance_us(self, us: float) -> None:
        self._now_ns += int(us * 1000)
