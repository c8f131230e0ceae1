"""What changes from step to step, packed into one buffer so that one copy brings it to the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

_HEADER = 16
"""Numbers before the columns; the first is the cursor in the ring of sampled tokens."""
_COLUMNS = 7
_STAGES = 4
"""Staging copies: more than steps can be in flight, so that none is rewritten before it was read."""


class StepInputs:
    """Static int32 inputs of the programs of one width: columns of `rows` numbers each, then all block tables."""

    def __init__(self, rows: int, table_entries: int, device: torch.device) -> None:
        self.rows = rows
        self._padded = -(-rows // 16) * 16
        total = _HEADER + _COLUMNS * self._padded + table_entries
        self._device = torch.zeros(total, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self._staged = [torch.zeros(total, dtype=torch.int32, pin_memory=pinned) for _ in range(_STAGES)]
        self._views: list[npt.NDArray[np.int32]] = [stage.numpy() for stage in self._staged]
        self._turn = 0
        self.cursor = self._device[:1]
        columns = [self._device[_HEADER + at * self._padded :][:rows] for at in range(_COLUMNS)]
        self.tokens, self.sources, self.positions, self.slots, self.firsts, self.table_starts, self.logit_rows = columns
        self.tables = self._device[_HEADER + _COLUMNS * self._padded :]
        self.positions.fill_(-1)  # a run before the first step then touches no cache

    def write(
        self,
        cursor: int,
        columns: Sequence[npt.NDArray[np.int32] | Sequence[int]],
        tables: npt.NDArray[np.int32],
    ) -> None:
        """Queue the copy of a step: `columns` in the order of the fields, shorter ones padded with 0, positions and
        sources with -1; `tables` flat."""
        stage, view = self._staged[self._turn], self._views[self._turn]
        self._turn = (self._turn + 1) % _STAGES
        view[0] = cursor
        for at, column in enumerate(columns):
            begin = _HEADER + at * self._padded
            view[begin : begin + len(column)] = column
            view[begin + len(column) : begin + self.rows] = -1 if at in (1, 2) else 0
        begin = _HEADER + _COLUMNS * self._padded
        end = begin + tables.size
        view[begin:end] = tables
        self._device[:end].copy_(stage[:end], non_blocking=True)
