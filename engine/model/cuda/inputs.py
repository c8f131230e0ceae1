"""What changes from step to step, packed so that one copy brings it to the device, and the words that come back."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence

import torch

from engine.core.value import StepValue
from engine.model.backend import Arrival

HEADER = 16
CURSOR, STAMP, ROWS, SEGMENTS, ACCEPTS, DRAFTS_AT = range(6)
"""Places in the header: where in the ring the step's tokens go, what its words are stamped with, its rows and segments,
whether a draft head takes the rows' own tokens as next tokens (else `tokens` holds them), and where its drafts go."""
RING = 1 << 16
"""Sampled tokens that stay readable: far more than the rows of the steps that can be in flight."""
DRAFT_WORDS = 16
"""Words of one segment's drafts: how many of the step's own were accepted, then id and probability of each."""
FILLS = (0, -1, -1, 0, 0, 0, 0, 0, 0, 0)
"""One per column: what rows beyond the step's own hold."""
LOOKS = 100_000
"""Looks at a word before the driver is asked whether the device still works: about a tenth of a second."""
_STAGES = 64
"""Places for copies: more than can be queued, one for each step in flight and each sequence that a draft head takes in,
so that none is rewritten before it was read."""


class InputArea:
    """Memory that the inputs of all widths share, since steps follow each other on one stream: header and columns of
    a width end where the block tables begin, so tables lie in the same place for every width."""

    def __init__(self, rows: int, table_entries: int, device: torch.device) -> None:
        self.begin = HEADER + len(FILLS) * _padded(rows)
        total = self.begin + table_entries
        self.data = torch.zeros(total, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self._staged = list(torch.zeros(_STAGES, total, dtype=torch.int32, pin_memory=pinned))
        self._views = [stage.numpy().data for stage in self._staged]
        self._turn = 0
        self._copy = ctypes.CDLL("libcuda.so.1").cuMemcpyHtoDAsync_v2 if pinned else None

    @property
    def tables(self) -> torch.Tensor:
        return self.data[self.begin :]

    def write(self, columns: list[int], tables: Sequence[int]) -> None:
        """Queue the copy of header and columns, which lie before the tables, and of the tables, flat."""
        turn = self._turn = (self._turn + 1) % _STAGES
        begin = 4 * (self.begin - len(columns))
        numbers = [*columns, *tables]
        struct.pack_into(f"{len(numbers)}i", self._views[turn], begin, *numbers)
        self._queue(self._staged[turn], begin, 4 * len(numbers))

    def _queue(self, stage: torch.Tensor, begin: int, count: int) -> None:
        """Copy bytes of a stage to their place on the device; by the driver itself, without the views that torch's copy
        needs. With places in the ring instead of tensors this took a plain step of the engine from 578 to 545 us."""
        if self._copy is None:
            numbers = slice(begin // 4, (begin + count) // 4)
            self.data[numbers].copy_(stage[numbers])
            return
        stream = torch.cuda.current_stream().cuda_stream
        code = self._copy(
            ctypes.c_uint64(self.data.data_ptr() + begin), ctypes.c_void_p(stage.data_ptr() + begin),
            ctypes.c_size_t(count), ctypes.c_void_p(stream),
        )  # fmt: skip
        if code != 0:
            raise RuntimeError(f"the CUDA driver refused a copy with code {code}: see the log")


class StepInputs:
    """Static int32 inputs of the programs of one width: a header, columns of `rows` numbers each, block tables."""

    def __init__(self, rows: int, area: InputArea) -> None:
        self.rows = rows
        self._area = area
        self._size = _padded(rows)
        begin = area.begin - HEADER - len(FILLS) * self._size
        self.header = area.data[begin : begin + HEADER]
        columns = [area.data[begin + HEADER + at * self._size :][:rows] for at in range(len(FILLS))]
        self.tokens, self.sources, self.positions, self.slots, self.firsts, self.table_starts, self.logit_rows = (
            columns[:7]
        )
        self.row_segments, self.segment_rows, self.skips = columns[7:]
        """Of draft heads: the segment of each row, the first row of each segment, and the blocks at the beginning of
        its table that the head does not read."""
        self.tables = area.tables

    def write(
        self,
        header: Sequence[int],
        columns: Sequence[Sequence[int]],
        tables: Sequence[int],
    ) -> None:
        """Queue the copy of a step: `columns` in the order of the fields, shorter or missing ones filled up."""
        flat = [*header, *([0] * (HEADER - len(header)))]
        size = self._size
        for at, fill in enumerate(FILLS):
            if at < len(columns):
                column = columns[at]
                flat += column
                flat += [fill] * (size - len(column))
            else:
                flat += [fill] * size
        self._area.write(flat, tables)

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
