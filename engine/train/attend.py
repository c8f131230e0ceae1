"""Attention of many draft chains over one shared past: each query also sees a few keys of its own chain."""

from __future__ import annotations

import torch

Pair = tuple[torch.Tensor, torch.Tensor]


def chain_attention(q: torch.Tensor, past: Pair, visible: torch.Tensor, own: list[Pair]) -> torch.Tensor:
    """`q` is `[batch, slots, heads, dim]`; `past` holds keys and values `[batch, time, kv_heads, dim]`, of which
    slot `s` sees those where `visible` `[batch, slots, time]`; `own` holds pairs `[batch, slots, kv_heads, dim]`.

    Returns `[batch, slots, heads * dim]`.
    """
    batch, slots, heads, dim = q.shape
    kv_heads = past[0].shape[2]
    grouped = q.view(batch, slots, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4) * dim**-0.5
    folded = grouped.reshape(batch, kv_heads, -1, dim)  # [batch, kv_heads, group * slots, dim]
    scores = (folded @ past[0].permute(0, 2, 3, 1)).unflatten(2, (-1, slots))
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    mine = [(grouped * k.permute(0, 2, 1, 3).unsqueeze(2)).sum(-1, keepdim=True) for k, _ in own]
    shares = torch.cat([scores, *mine], -1).softmax(-1).to(past[1].dtype)
    time = past[0].shape[1]
    out = (shares[..., :time].flatten(2, 3) @ past[1].transpose(1, 2)).view(batch, kv_heads, -1, slots, dim)
    for index, (_, v) in enumerate(own):
        out = out + shares[..., time + index, None] * v.permute(0, 2, 1, 3).unsqueeze(2)
    return out.permute(0, 3, 1, 2, 4).reshape(batch, slots, -1)


def block_attention(q: torch.Tensor, past: Pair, visible: torch.Tensor, own: Pair) -> torch.Tensor:
    """Rows of many draft blocks over one past; rows of a block see each other in both directions.

    `q` is `[batch, blocks, width, heads, dim]`, `past` `[batch, time, kv_heads, dim]` of which a block sees those
    where `visible` `[batch, blocks, time]`, `own` `[batch, blocks, width, kv_heads, dim]`. Returns
    `[batch, blocks, width, heads * dim]`.
    """
    batch, blocks, width, _, dim = q.shape
    kv_heads, time = past[0].shape[2], past[0].shape[1]
    grouped = q.view(batch, blocks, width, kv_heads, -1, dim).permute(0, 3, 1, 4, 2, 5) * dim**-0.5
    rows = grouped.reshape(batch, kv_heads, blocks, -1, dim)  # [batch, kv_heads, blocks, group * width, dim]
    scores = (rows.flatten(2, 3) @ past[0].permute(0, 2, 3, 1)).view(*rows.shape[:4], time)
    scores = scores.masked_fill(~visible[:, None, :, None], float("-inf"))
    mine = rows @ own[0].permute(0, 3, 1, 4, 2)
    shares = torch.cat((scores, mine), -1).softmax(-1).to(past[1].dtype)
    out = (shares[..., :time].flatten(2, 3) @ past[1].transpose(1, 2)).view(rows.shape)
    out = out + shares[..., time:] @ own[1].permute(0, 3, 1, 2, 4)
    return out.view(batch, kv_heads, blocks, -1, width, dim).permute(0, 2, 4, 1, 3, 5).reshape(*q.shape[:3], -1)
