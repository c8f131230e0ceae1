"""Cross-entropy of a frozen LM head against the target's own distribution, with its gradient computed on the way."""

from __future__ import annotations

from typing import Any

import torch

CHUNK = 8192
"""Rows whose logits exist at once."""


def soft_targets(normed: torch.Tensor, head: torch.Tensor, argmax_share: float) -> torch.Tensor:
    """The target's distribution over the drafted ids, mixed with all weight on its best id, `[rows, ids]`."""
    out = torch.empty(normed.shape[0], head.shape[0], dtype=normed.dtype, device=normed.device)
    for start in range(0, normed.shape[0], CHUNK):
        logits = normed[start : start + CHUNK] @ head.t()
        part = logits.softmax(-1, dtype=torch.float32).mul_(1 - argmax_share)
        part.scatter_add_(1, logits.argmax(-1, keepdim=True), part.new_full((len(part), 1), argmax_share))
        out[start : start + CHUNK] = part
    return out


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head: torch.Tensor,
        targets: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        total = torch.zeros((), device=hidden.device)
        gradient = torch.empty_like(hidden)
        for start in range(0, hidden.shape[0], CHUNK):
            rows = slice(start, start + CHUNK)
            log_probs = (hidden[rows] @ head.t()).log_softmax(-1, dtype=torch.float32)
            wanted = targets[index[rows]]
            total += (weights[rows] * torch.einsum("nv,nv->n", log_probs.to(wanted.dtype), wanted).float()).sum().neg()
            slope = log_probs.exp_().sub_(wanted).mul_(weights[rows, None])
            gradient[rows] = slope.to(head.dtype) @ head
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None, None, None


def head_loss(
    hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Weighted sum of the cross-entropies of `hidden @ head.T` against `targets[index]`, a scalar.

    `hidden` is `[rows, hidden]`, `head` `[ids, hidden]` and frozen, `targets` `[any, ids]` of rows that sum to 1.
    """
    loss: torch.Tensor = _HeadLoss.apply(hidden, head, targets, index, weights)
    return loss
