"""The seam for trained draft heads, and the hidden rows that wait for them.

A head (`mtp_head.py`, `dflash_head.py`) implements `DraftHead` and is handed to `TorchDevice`; the device keeps the
target's hidden rows per sequence until the head consumes them, together with the token that followed each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, Protocol

import torch

from engine.core.device import Draft, DrafterName
from engine.model.backend import Backend, Behind
from engine.model.kv import PagedKV

_HEAD_MODULES = {
    DrafterName.MTP: "engine.model.mtp_head",
    DrafterName.DFLASH: "engine.model.dflash_head",
}
"""Where each head lives; a module exposes `open_head(backend) -> DraftHead | None`, None where no head was trained
for this model."""

RING_ROWS = 1024
"""Hidden rows kept per sequence and head; the oldest go first. So many unread rows mean that the head has long not
drafted here (or that a long prompt came in): absorbing them on the way would charge every step for a head that may
never be asked, so the head's memory then begins after the hole."""


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Consecutive verified positions that a head has not seen: what the target computed there and what came next."""

    seq: int
    start: int
    """Position of the first row."""
    hidden: torch.Tensor
    """`[rows, taps, hidden_size]`, residual stream after the tapped layers."""
    next_tokens: tuple[int, ...]
    """`next_tokens[i]` is the token at position `start + i + 1`."""
    blocks: Sequence[int]
    """Block table of the sequence, the same numbers as in the target's cache."""
    kv_start: int
    """First position from which the head's own KV of this sequence has no hole up to `start`; a head that attends
    to its past reads nothing before it. Equal to `start` when the head knows nothing yet."""


@dataclass(frozen=True, slots=True)
class HeadItem:
    """One sequence that wants drafts after `last_token` at position `seq_len`."""

    seq: int
    seq_len: int
    last_token: int
    rows: HeadRows
    """Never empty: its last row is position `seq_len - 1`, whose next token is `last_token`."""
    blocks: Sequence[int]
    count: int


class DraftHead(Protocol):
    """A trained drafter on the target's hidden states. Called from the device thread only."""

    @property
    def drafter(self) -> DrafterName: ...

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers (0-based, ascending) whose residual streams it wants; `(num_layers - 1,)` for MTP."""
        ...

    @property
    def kv(self) -> PagedKV | None:
        """Its own cache, of as many blocks of the same size as the target's; spilled and restored with it."""
        ...

    def extend(self, rows: Sequence[HeadRows]) -> None:
        """Absorb rows without drafting (several sequences at once)."""
        ...

    def propose(self, items: Sequence[HeadItem], conf_min: float) -> list[Draft]:
        """Absorb each item's rows, then draft up to `count` tokens, stopping before one less sure than `conf_min`."""
        ...


@dataclass(frozen=True, slots=True)
class Followed:
    """What a head drafted behind a step for one of its segments."""

    accepted: int
    """Drafts of the step itself that the head took for accepted."""
    ids: list[int]
    chances: list[float]


class FollowingHead(DraftHead, Protocol):
    """A head that can draft behind a verify on the device, from what will be accepted there."""

    def skip(self, kv_start: int) -> int:
        """Blocks at the beginning of a table that hold nothing of the head's, for `HostBatch.draft_skips`."""
        ...

    def follows(self, rows: Sequence[int]) -> bool:
        """Whether it can follow a step of so many rows in each segment."""
        ...

    def follow(self, behind: Behind, segments: int, context: int, count: int) -> None:
        """Queue `count` drafts for every segment of the step that was just queued; `context` bounds its positions."""
        ...

    def followed(self, behind: Behind, segment: int, count: int) -> Followed:
        """Wait for them."""
        ...


def open_heads(backend: Backend) -> list[DraftHead]:
    """Every head that is trained for the backend's model."""
    heads: list[DraftHead] = []
    for module in _HEAD_MODULES.values():
        opener = getattr(import_module(module), "open_head", None) if find_spec(module) else None
        head: DraftHead | None = opener(backend) if opener is not None else None
        if head is not None:
            heads.append(head)
    return heads


@dataclass(slots=True)
class _Chunk:
    start: int
    hidden: torch.Tensor
    tokens: tuple[int, ...]
    """The tokens fed at these positions; -1 where the device fed its own last sample."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class HiddenRing:
    """Unconsumed hidden rows of one sequence for one head, oldest first, at most `RING_ROWS` of them."""

    def __init__(self) -> None:
        self._chunks: deque[_Chunk] = deque()
        self._rows = 0
        self._kv_start = -1
        """Start of the gapless run that the head has absorbed, -1: none."""
        self._kv_end = -1
        """Position after the last absorbed row."""

    @property
    def oldest(self) -> int:
        """Position of the oldest row, -1 when empty."""
        return self._chunks[0].start if self._chunks else -1

    @property
    def rows(self) -> int:
        return self._rows

    def append(self, start: int, hidden: torch.Tensor, tokens: tuple[int, ...]) -> None:
        """Add rows at `start..`; rows at or after `start` were rejected drafts and go."""
        self.trim(start)
        self._chunks.append(_Chunk(start, hidden, tokens))
        self._rows += len(tokens)

    def trim(self, end: int) -> None:
        """Drop rows at positions `>= end`, and the head's claim to have absorbed them."""
        while self._chunks and self._chunks[-1].start >= end:
            self._rows -= len(self._chunks.pop().tokens)
        if self._chunks and self._chunks[-1].end > end:
            chunk = self._chunks[-1]
            keep = end - chunk.start
            self._chunks[-1] = _Chunk(chunk.start, chunk.hidden[:keep], chunk.tokens[:keep])
            self._rows -= len(chunk.tokens) - keep
        if self._kv_end > end:
            self._kv_end = end
            if self._kv_start >= end:
                self._kv_start = self._kv_end = -1

    @property
    def kv_start(self) -> int:
        """Position from which the head has absorbed without a hole, -1: none."""
        return self._kv_start

    def is_absorbed_to(self, end: int) -> bool:
        """Whether the head has absorbed everything before position `end`, and nothing waits."""
        return not self._chunks and self._kv_end == end

    def absorbed_to(self, end: int) -> None:
        """The head has absorbed by itself what came after the last absorbed row."""
        self._kv_end = end

    def shed(self) -> None:
        """Drop the oldest rows beyond the limit."""
        while self._rows > RING_ROWS:
            chunk = self._chunks.popleft()
            count = min(self._rows - RING_ROWS, len(chunk.tokens))
            self._rows -= count
            if count < len(chunk.tokens):
                rest = _Chunk(chunk.start + count, chunk.hidden[count:], chunk.tokens[count:])
                self._chunks.appendleft(rest)

    def consume(
        self, seq: int, seq_len: int, recent: Sequence[int], last_token: int, blocks: Sequence[int]
    ) -> list[HeadRows]:
        """Take all rows before `seq_len` as gapless runs; `recent` ends at position `seq_len - 1`."""
        self.trim(seq_len)
        first = seq_len - len(recent)
        history = (*recent, last_token)
        runs: list[HeadRows] = []
        pending: list[_Chunk] = []
        for chunk in [*self._chunks, None]:
            if pending and (chunk is None or chunk.start != pending[-1].end):
                runs.append(self._run(seq, pending, first, history, blocks))
                pending = []
            if chunk is not None and chunk.start + 1 >= first:
                pending.append(chunk)
        self._chunks.clear()
        self._rows = 0
        return runs

    def take_known(self, seq: int, blocks: Sequence[int]) -> HeadRows | None:
        """Take the rows whose next token was fed, all but the newest; None where there are none or some have a hole."""
        chunks = list(self._chunks)
        tokens = [token for chunk in chunks for token in chunk.tokens]
        gapless = all(chunk.end == later.start for chunk, later in pairwise(chunks))
        if len(tokens) < 2 or not gapless or min(tokens[1:]) < 0:
            return None
        hidden, start = _joined(chunks), chunks[0].start
        self._chunks.clear()
        self._chunks.append(_Chunk(start + len(tokens) - 1, hidden[-1:].clone(), (tokens[-1],)))
        self._rows = 1
        return self._absorb(seq, start, hidden[:-1], tuple(tokens[1:]), blocks)

    def state(self) -> dict[str, Any]:
        """Everything as tensors and numbers, for the spill store."""
        chunks = [[chunk.start, chunk.hidden.cpu(), list(chunk.tokens)] for chunk in self._chunks]
        return {"chunks": chunks, "kv": [self._kv_start, self._kv_end]}

    @classmethod
    def from_state(cls, state: dict[str, Any], device: torch.device) -> HiddenRing:
        ring = cls()
        ring._chunks.extend(
            _Chunk(start, hidden.to(device), tuple(tokens)) for start, hidden, tokens in state["chunks"]
        )
        ring._rows = sum(len(chunk.tokens) for chunk in ring._chunks)
        ring._kv_start, ring._kv_end = state["kv"]
        return ring

    def _run(
        self, seq: int, chunks: list[_Chunk], first: int, history: tuple[int, ...], blocks: Sequence[int]
    ) -> HeadRows:
        start, end = chunks[0].start, chunks[-1].end
        following = history[start + 1 - first : end + 1 - first]
        return self._absorb(seq, start, _joined(chunks), following, blocks)

    def _absorb(
        self, seq: int, start: int, hidden: torch.Tensor, following: tuple[int, ...], blocks: Sequence[int]
    ) -> HeadRows:
        if self._kv_start < 0 or self._kv_end != start:
            self._kv_start = start
        self._kv_end = start + hidden.shape[0]
        return HeadRows(seq, start, hidden, following, blocks, self._kv_start)


def _joined(chunks: list[_Chunk]) -> torch.Tensor:
    return chunks[0].hidden if len(chunks) == 1 else torch.cat([chunk.hidden for chunk in chunks])
