"""Where every sequence is: one owner of the queues, seats and identities, with no cost that grows with the wait."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

from engine.core.sequence import Sequence, Status


@dataclass(slots=True)
class Queues:
    waiting: deque[Sequence] = field(default_factory=deque)
    prefilling: list[Sequence] = field(default_factory=list)
    active: list[Sequence] = field(default_factory=list)
    swapped: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    by_id: dict[str, Sequence] = field(default_factory=dict)
    ended: list[Sequence] = field(default_factory=list)
    """Finished since the last retirement, wherever they were."""
    waiting_count: int = 0
    """Waiting sequences that have not finished; `waiting` itself may still hold finished ones."""
    _deadlines: list[tuple[int, int, Sequence]] = field(default_factory=list)

    @property
    def committed(self) -> list[Sequence]:
        """Those that hold a seat."""
        return self.prefilling + self.active

    @property
    def parked(self) -> bool:
        return bool(self.swapped or self.preempted)

    @property
    def is_idle(self) -> bool:
        return not (self.waiting_count or self.prefilling or self.active or self.parked or self.ended)

    def enter(self, seq: Sequence, deadline_ns: int) -> None:
        self.by_id[seq.request_id] = seq
        self.waiting.append(seq)
        self.waiting_count += 1
        if deadline_ns:
            heapq.heappush(self._deadlines, (deadline_ns, seq.number, seq))

    def head(self) -> Sequence | None:
        """The first waiting sequence; finished ones before it are dropped for good."""
        while self.waiting and self.waiting[0].is_finished:
            self.waiting.popleft()
        return self.waiting[0] if self.waiting else None

    def leave_waiting(self, seq: Sequence) -> None:
        """Take a sequence out of the wait: the head at no cost, another (slai) by search."""
        if self.waiting and self.waiting[0] is seq:
            self.waiting.popleft()
        else:
            self.waiting.remove(seq)
        self.waiting_count -= 1

    def overdue(self, now_ns: int) -> list[Sequence]:
        """Unfinished sequences whose deadline has passed, each returned once."""
        due: list[Sequence] = []
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            seq = heapq.heappop(self._deadlines)[2]
            if not seq.is_finished:
                due.append(seq)
        return due

    def remove(self, seq: Sequence) -> None:
        """Take a finished sequence out of wherever it is; a waiting one is dropped when it comes to the head."""
        match seq.status:
            case Status.WAITING:
                self.waiting_count -= 1
            case Status.PREFILLING:
                self.prefilling.remove(seq)
            case Status.ACTIVE:
                self.active.remove(seq)
            case Status.SWAPPED:
                self.swapped.remove(seq)
            case Status.PREEMPTED:
                self.preempted.remove(seq)
        del self.by_id[seq.request_id]
