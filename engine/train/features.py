"""What a frozen target knows about a corpus, computed once: hidden states of every position, served in batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.train.corpus import Corpus
from engine.train.target import FrozenTarget

FORWARD_TOKENS = 1 << 16


@dataclass(frozen=True, slots=True)
class Window:
    """Rows of one batch. Slot `s` of a row is the position before its reply token `s`: the hidden state there is the
    newest that a drafter has when reply token `s` has just been emitted."""

    taps: torch.Tensor
    """`[batch, time, taps, hidden]` of positions 0.. of each row, padding repeats the last one."""
    tokens: torch.Tensor
    """int64 `[batch, time + 1]`."""
    start: torch.Tensor
    """int64 `[batch]`: position of slot 0."""
    replies: torch.Tensor
    """int64 `[batch]`: reply length, which is also the number of slots."""
    slots: int
    """Slots of the longest reply."""

    def positions(self) -> torch.Tensor:
        """int64 `[batch, slots]`, at most the last position that has a successor."""
        last = (self.start + self.replies - 1)[:, None]
        return torch.minimum(self.start[:, None] + torch.arange(self.slots, device=self.start.device), last)

    def top(self) -> torch.Tensor:
        """The top layer's hidden states at the slots, `[batch, slots, hidden]`."""
        return self.taps[torch.arange(len(self.start), device=self.start.device)[:, None], self.positions(), -1]

    def token_after(self, distance: int) -> torch.Tensor:
        """int64 `[batch, slots]`: the token `distance` positions after each slot, the last one where the row ends."""
        last = (self.start + self.replies)[:, None]
        return self.tokens.gather(1, torch.minimum(self.positions() + distance, last))

    def predicts(self, distance: int) -> torch.Tensor:
        """bool `[batch, slots]`: whether the token `distance` after a slot is part of the reply."""
        slot = torch.arange(self.slots, device=self.start.device)
        return slot + distance <= self.replies[:, None]


class Features:
    """Flat hidden states `[tokens, taps, hidden]` of a corpus on the target's device."""

    def __init__(self, target: FrozenTarget, corpus: Corpus, taps: tuple[int, ...]) -> None:
        self.corpus, self.target, self.taps = corpus, target, taps
        device = target.device
        self._tokens = torch.from_numpy(corpus.tokens.astype(np.int64)).to(device)
        self._offsets = torch.from_numpy(corpus.offsets).to(device)
        self._prompts = torch.from_numpy(corpus.prompts).to(device)
        self._lengths = np.diff(corpus.offsets)
        shape = (len(corpus.tokens), len(taps), target.config.hidden_size)
        self._taps = torch.empty(shape, dtype=target.dtype, device=device)
        for rows in self._groups(np.argsort(self._lengths, kind="stable"), FORWARD_TOKENS):
            self._compute(torch.from_numpy(rows).to(device), int(self._lengths[rows].max()))

    def _groups(self, order: npt.NDArray[np.int64], budget: int) -> Iterator[npt.NDArray[np.int64]]:
        at = 0
        while at < len(order):
            count = max(1, budget // int(self._lengths[order[min(at + budget // 64, len(order) - 1)]]))
            while count > 1 and count * int(self._lengths[order[at : at + count]].max()) > budget:
                count = count * 3 // 4
            yield order[at : at + count]
            at += count

    def _compute(self, rows: torch.Tensor, width: int) -> None:
        column = torch.arange(width, device=rows.device)
        begin, end = self._offsets[rows], self._offsets[rows + 1]
        index = torch.minimum(begin[:, None] + column, end[:, None] - 1)
        hidden = self.target.hidden_states(self._tokens[index], self.taps)
        real = column < (end - begin)[:, None]
        self._taps[index[real]] = hidden[real]

    def window(self, rows: npt.NDArray[np.int64]) -> Window:
        index = torch.from_numpy(rows).to(self._tokens.device)
        begin, end = self._offsets[index], self._offsets[index + 1]
        time = int(self._lengths[rows].max()) - 1
        at = torch.minimum(begin[:, None] + torch.arange(time + 1, device=begin.device), end[:, None] - 1)
        replies = end - begin - self._prompts[index]
        slots = int((self._lengths[rows] - self.corpus.prompts[rows]).max())
        return Window(self._taps[at[:, :-1]], self._tokens[at], self._prompts[index] - 1, replies, slots)

    def batches(self, slots: int, time: int, seed: int) -> list[npt.NDArray[np.int64]]:
        """Rows of like lengths together, about `slots` slots and at most `time` positions a batch, in random order."""
        random = np.random.default_rng(seed)
        classes: dict[tuple[int, int], list[int]] = defaultdict(list)
        replies = self._lengths - self.corpus.prompts
        for row in random.permutation(len(self.corpus)):
            classes[-(-int(replies[row]) // 64), -(-int(self._lengths[row]) // 128)].append(int(row))
        out: list[npt.NDArray[np.int64]] = []
        for (reply, length), rows in classes.items():
            count = max(1, min(slots // (reply * 64), time // (length * 128)))
            out += [np.array(rows[at : at + count], np.int64) for at in range(0, len(rows), count)]
        random.shuffle(out)
        return out
