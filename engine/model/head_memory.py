"""A draft head's own past: keys and values of verified positions in the target's block numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.core.device import Draft
from engine.model.backend import Backend
from engine.model.heads import HeadItem, HeadRows
from engine.model.kv import PagedKV


@dataclass(frozen=True, slots=True)
class Absorbed:
    """Rows of several sequences laid out flat."""

    hidden: torch.Tensor
    """`[rows, taps, hidden]`."""
    next_tokens: torch.Tensor
    """int64 `[rows]`."""
    positions: torch.Tensor
    """int64 `[rows]`."""
    slots: torch.Tensor
    """int64 `[rows]`: where they go in the cache seen as `[num_blocks * block_size]`."""
    last: torch.Tensor
    """int64 `[sequences]`: index of each one's newest row."""


@dataclass(frozen=True, slots=True)
class Past:
    """What each sequence of a draft call may read."""

    slots: torch.Tensor
    """int64 `[sequences, time]`, padded with slot 0 in front."""
    visible: torch.Tensor | None
    """bool `[sequences, 1, 1, time]`, None where nothing is padding."""


class HeadMemory:
    """One paged cache of `layers` layers beside the target's."""

    def __init__(self, backend: Backend, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self._device, self._dtype = backend.device, dtype
        target = backend.kv
        self.kv = PagedKV(layers, target.num_blocks, target.block_size, kv_heads, head_dim, dtype, backend.device)

    def lay_out(self, rows: Sequence[HeadRows]) -> Absorbed:
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        last: list[int] = []
        for run in rows:
            count = run.hidden.shape[0]
            tokens += run.next_tokens
            positions += range(run.start, run.start + count)
            slots += self._slots(run.blocks, run.start, run.start + count)
            last.append(len(positions) - 1)
        hidden = rows[0].hidden if len(rows) == 1 else torch.cat([run.hidden for run in rows])
        index = torch.tensor([tokens, positions, slots], device=self._device)
        return Absorbed(hidden.to(self._dtype), index[0], index[1], index[2], torch.tensor(last, device=self._device))

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store `[rows, kv_heads, head_dim]`."""
        self.kv.keys[layer].view(-1, *k.shape[1:]).index_copy_(0, slots, k)
        self.kv.values[layer].view(-1, *v.shape[1:]).index_copy_(0, slots, v)

    def past(self, items: Sequence[HeadItem]) -> Past:
        """From each sequence's first gapless position to the one before its last token."""
        sizes = [item.seq_len - item.rows.kv_start for item in items]
        longest = max(sizes)
        slots = [
            [0] * (longest - size) + self._slots(item.blocks, item.rows.kv_start, item.seq_len)
            for item, size in zip(items, sizes, strict=True)
        ]
        visible = None
        if min(sizes) < longest:
            first = longest - torch.tensor(sizes)
            visible = (torch.arange(longest) >= first[:, None])[:, None, None].to(self._device)
        return Past(torch.tensor(slots, device=self._device), visible)

    def read(self, layer: int, past: Past) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[sequences, kv_heads, time, head_dim]`."""
        keys, values = self.kv.keys[layer], self.kv.values[layer]
        k = keys.view(-1, *keys.shape[2:])[past.slots].transpose(1, 2)
        return k, values.view(-1, *values.shape[2:])[past.slots].transpose(1, 2)

    def _slots(self, blocks: Sequence[int], start: int, end: int) -> list[int]:
        size = self.kv.block_size
        return [blocks[p // size] * size + p % size for p in range(start, end)]


def drafted_rows(backend: Backend, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows `[ids, hidden]` of the target's LM head."""
    if backend.config.tied_embeddings:
        return backend.embed(ids).to(dtype)
    identity = torch.eye(backend.config.hidden_size, device=backend.device, dtype=dtype)
    return backend.lm_head(identity)[:, ids].t().to(dtype).contiguous()


def drafts_of(
    items: Sequence[HeadItem], tokens: Sequence[torch.Tensor], sure: Sequence[torch.Tensor], conf_min: float
) -> list[Draft]:
    """Cut each item's chain at its count and before the first draft below `conf_min`."""
    return cut_chains(items, torch.stack(list(tokens), 1).tolist(), torch.stack(list(sure), 1).tolist(), conf_min)


def cut_chains(
    items: Sequence[HeadItem], chains: list[list[int]], confidences: list[list[float]], conf_min: float
) -> list[Draft]:
    """The same from plain numbers, a list of drafts per item."""
    drafts = []
    for item, chain, confidence in zip(items, chains, confidences, strict=True):
        low = next((i for i, value in enumerate(confidence) if value < conf_min), len(chain))
        keep = min(item.count, low)
        drafts.append(Draft(tuple(chain[:keep]), tuple(confidence[:keep])))
    return drafts


def head_dtype(backend: Backend) -> torch.dtype:
    """What torch heads compute in: float32 beside a float32 cache, else bfloat16 where it has fast products."""
    fast = backend.device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if backend.kv.dtype != torch.float32 and fast else torch.float32
