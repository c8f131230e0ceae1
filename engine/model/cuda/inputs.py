"""What changes from step to step, packed so that one copy brings it to the device, and the words that come back."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence

import torch

from engine.core.value import StepValue
from engine.model.backend import Arrival

HEADER = 16
CURSOR, STAMP, ROWS, SEGMENTS, ACCEPTS, DRAFTS_AT, NUMBER, LENGTH = range(8)
"""Places in the header: where in the ring the step's tokens go, what its words are stamped with, its rows and segments,
whether a draft head takes the rows' own tokens as next tokens (else `tokens` holds them), where its drafts go, and of a
step that is handed over its number and how many numbers it has."""
RING = 1 << 16
"""Sampled tokens that stay readable: far more than the rows of the steps that can be in flight."""
DRAFT_WORDS = 16
"""Words of one segment's drafts: how many of the step's own were accepted, then id and probability of each."""
FILLS = (0, -1, -1, 0, 0, 0, 0, 0, 0, 0)
"""One per column: what rows beyond the step's own hold."""
LOOKS = 100_000
"""Looks at a word before the driver is asked whether the device still works: about a tenth of a second."""
STAGES = 4
"""Places for steps that are handed over: more than can be in flight, so that none is rewritten before it was read."""
COPIES = 64
"""The same for copies: a draft head queues one for each of its sequences."""


class InputArea:
    """Memory that the inputs of all widths share, since steps follow each other on one stream: header and columns of
    a width end where the block tables begin, so tables lie in the same place for every width.

    A step of few rows takes its numbers in by itself (`kernels.take_in`): a copy by the driver took 26 to 50 us of the
    host's time. For others a copy is queued.
    """

    def __init__(self, rows: int, table_entries: int, device: torch.device) -> None:
        self.begin = HEADER + len(FILLS) * _padded(rows)
        self.size = self.begin + table_entries
        self.data = torch.zeros(self.size, dtype=torch.int32, device=device)
        self.taken = torch.zeros(1, dtype=torch.int32, device=device)
        """Number of the last step that was taken in."""
        pinned = device.type == "cuda"
        self.handed = torch.zeros(STAGES * self.size, dtype=torch.int32, pin_memory=pinned)
        self._copied = torch.zeros(COPIES * self.size, dtype=torch.int32, pin_memory=pinned)
        self._handed_view, self._copied_view = self.handed.numpy().data, self._copied.numpy().data
        self._copies = self._hands = 0

    @property
    def tables(self) -> torch.Tensor:
        return self.data[self.begin :]

    def hand(self, numbers: list[int], columns: int) -> None:
        """Lay out header and columns, which are the first `columns` of `numbers` and lie before the tables, and the
        tables, for a step that takes them in. Every hand is followed by one such step."""
        self._hands += 1
        numbers[NUMBER], numbers[LENGTH] = self._hands, len(numbers)
        at = self._hands % STAGES * self.size + self.begin - columns
        struct.pack_into(f"{len(numbers)}i", self._handed_view, 4 * at, *numbers)

    def copy(self, numbers: list[int], columns: int) -> None:
        """Queue their copy."""
        self._copies += 1
        begin = self.begin - columns
        at, end = self._copies % COPIES * self.size + begin, begin + len(numbers)
        struct.pack_into(f"{len(numbers)}i", self._copied_view, 4 * at, *numbers)
        self.data[begin:end].copy_(self._copied[at : at + len(numbers)], non_blocking=True)


class StepInputs:
    """Static int32 inputs of the programs of one width: a header, columns of `rows` numbers each, block tables."""

    def __init__(self, rows: int, area: InputArea) -> None:
        self.rows = rows
        self.area = area
        self._size = _padded(rows)
        self.begin = area.begin - HEADER - len(FILLS) * self._size
        begin = self.begin
        self.header = area.data[begin : begin + HEADER]
        columns = [area.data[begin + HEADER + at * self._size :][:rows] for at in range(len(FILLS))]
        self.tokens, self.sources, self.positions, self.slots, self.firsts, self.table_starts = columns[:6]
        self.logit_rows, self.row_segments, self.segment_rows, self.skips = columns[6:]
        """The last three are for draft heads: the segment of each row, the first row of each segment, and the blocks at
        the beginning of its table that the head does not read."""
        self.tables = area.tables

    def write(
        self, header: Sequence[int], columns: Sequence[Sequence[int]], tables: Sequence[int], *, hand: bool = False
    ) -> None:
        """Bring a step to the device: `columns` in the order of the fields, shorter or missing ones filled up. `hand`
        where the step takes it in."""
        flat = [*header, *([0] * (HEADER - len(header)))]
        size = self._size
        for at, fill in enumerate(FILLS):
            if at < len(columns):
                column = columns[at]
                flat += column
                flat += [fill] * (size - len(column))
            else:
                flat += [fill] * size
        length = len(flat)
        flat += tables
        if hand:
            self.area.hand(flat, length)
        else:
            self.area.copy(flat, length)

    def clear(self) -> None:
        """Rows that touch no cache and results that nobody reads: what a program may run on outside a step."""
        self.write((RING, 0, 0, 0, 0, RING), (), ())


def _padded(rows: int) -> int:
    """Columns begin at multiples of 16 bytes."""
    return -(-rows // 4) * 4


class Tape:
    """Words that kernels write into pinned memory: 32 bits of the step's stamp above 32 bits of content, so that a
    word says itself whether it is there."""

    CLOCKS = 64
    """Steps whose time on the device stays readable."""

    def __init__(self, size: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.words = torch.zeros(size, dtype=torch.int64, pin_memory=pinned)
        self.clocks = torch.zeros(self.CLOCKS, dtype=torch.int64, pin_memory=pinned)
        self._words = self.words.numpy().data
        self._clocks = self.clocks.numpy().data

    def wait(self, begin: int, count: int, stamp: int) -> list[int]:
        """Content of `count` words of the step with this stamp; returns once they are there.

        Other threads run between two looks: a blocking wait in the driver would wake up later than the words come.
        """
        words, found, looks = self._words, [], 0
        for at in range(begin, begin + count):
            while (word := words[at]) >> 32 != stamp:
                os.sched_yield()
                looks += 1
                if looks % LOOKS == 0:
                    self._check()
            found.append(word & 0xFFFFFFFF)
        return found

    def _check(self) -> None:
        """A device that has failed writes no words: let the driver say so."""
        if self.words.is_pinned():
            torch.cuda.current_stream().query()

    def device_us(self, stamp: int) -> int:
        """Time of that step on the device; 0 where none was taken."""
        word = self._clocks[stamp % self.CLOCKS]
        return int(word & 0xFFFFFFFF) if word >> 32 == stamp else 0


class TapeArrival(StepValue, frozen=True):
    """Tokens of a step's wanted rows on their way to the host."""

    tape: Tape
    stamp: int
    begin: int
    count: int

    def wait(self) -> tuple[list[int], int]:
        """The tokens, and the microseconds that the step took on the device."""
        tokens = self.tape.wait(self.begin, self.count, self.stamp)
        return tokens, self.tape.device_us(self.stamp)


class Arrivals(StepValue, frozen=True):
    """The same of a step that ran in slices."""

    parts: tuple[Arrival, ...]

    def wait(self) -> tuple[list[int], int]:
        read = [part.wait() for part in self.parts]
        return [token for tokens, _ in read for token in tokens], sum(device_us for _, device_us in read)
