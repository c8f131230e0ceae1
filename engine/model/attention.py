"""Causal attention of ragged rows over a paged cache.

Segments with the same number of rows and a context of the same power of two run as one padded call; padding is
masked, so what a row reads never depends on its neighbours.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch.nn import functional

from engine.model.backend import Batch


@dataclass(frozen=True, slots=True)
class _Group:
    rows: torch.Tensor
    """int64 `[segments, count]`: which rows of the batch."""
    blocks: torch.Tensor
    """int64 `[segments, blocks]`: block tables, cut to the group's context."""
    context: int
    """Positions gathered per segment, padding included."""
    mask: torch.Tensor | None
    """bool `[segments, 1, count, context]`, true where a row may look; None where it may look everywhere."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Where rows are written and what they read: the same for every layer of a step."""

    slots: torch.Tensor
    """int64 `[rows]`: index of each row's KV in the cache seen as `[num_blocks * block_size]`."""
    groups: tuple[_Group, ...]


def plan_attention(batch: Batch, block_size: int) -> AttentionPlan:
    """Compute write slots and read groups of a batch."""
    members: dict[tuple[int, int], list[int]] = defaultdict(list)
    counts = [end - begin for begin, end in zip(batch.row_offsets, batch.row_offsets[1:], strict=False)]
    for segment, count in enumerate(counts):
        context = batch.starts[segment] + count
        members[count, (context - 1).bit_length()].append(segment)
    return AttentionPlan(
        slots=_slots(batch, counts, block_size),
        groups=tuple(_group(batch, segments, count, block_size) for (count, _), segments in members.items()),
    )


def paged_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: AttentionPlan
) -> torch.Tensor:
    """Write `k` and `v` `[rows, kv_heads, head_dim]` into one layer's cache, then attend with `q`.

    `q` is `[rows, heads, head_dim]`; returns `[rows, heads * head_dim]`.
    """
    keys.view(-1, *k.shape[1:]).index_copy_(0, plan.slots, k)
    values.view(-1, *v.shape[1:]).index_copy_(0, plan.slots, v)
    if len(plan.groups) == 1:
        return _attend(q, keys, values, plan.groups[0]).reshape(q.shape[0], -1)
    out = torch.empty_like(q)
    for group in plan.groups:
        out[group.rows] = _attend(q, keys, values, group)
    return out.view(q.shape[0], -1)


def _attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: _Group) -> torch.Tensor:
    """`[segments, count, heads, head_dim]` of one group."""
    segments, count = group.rows.shape
    gathered_k = keys[group.blocks].flatten(1, 2)[:, : group.context]  # [segments, context, kv_heads, head_dim]
    gathered_v = values[group.blocks].flatten(1, 2)[:, : group.context]
    out = functional.scaled_dot_product_attention(
        q[group.rows].transpose(1, 2),
        gathered_k.transpose(1, 2),
        gathered_v.transpose(1, 2),
        attn_mask=group.mask,
        enable_gqa=True,
    )
    return out.transpose(1, 2).reshape(segments, count, *q.shape[1:])


def _slots(batch: Batch, counts: list[int], block_size: int) -> torch.Tensor:
    device = batch.tokens.device
    segment_of_row = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(device)
    blocks = batch.block_tables[segment_of_row, batch.positions // block_size].long()
    return blocks * block_size + batch.positions % block_size


def _group(batch: Batch, segments: list[int], count: int, block_size: int) -> _Group:
    device = batch.tokens.device
    starts = [batch.starts[segment] for segment in segments]
    context = max(starts) + count
    first_rows = torch.tensor([batch.row_offsets[segment] for segment in segments])
    rows = first_rows[:, None] + torch.arange(count)
    tables = batch.block_tables[torch.tensor(segments, device=device), : -(-context // block_size)]
    mask = None
    if count > 1 or min(starts) != max(starts):
        last_seen = torch.tensor(starts)[:, None] + torch.arange(count)  # [segments, count]
        mask = (torch.arange(context) <= last_seen[:, :, None]).unsqueeze(1).to(device)
    return _Group(rows.to(device), tables.long(), context, mask)
