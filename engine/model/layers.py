"""The small pieces of a decoder layer: norm, rope, gated feed-forward."""

from __future__ import annotations

import torch
from torch.nn import functional

from engine.model.load import LayerWeights


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square norm over the last dimension, computed in float32 (Zhang and Sennrich 2019)."""
    if x.dtype == torch.float32:
        return functional.rms_norm(x, weight.shape, weight, eps)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


class Rope:
    """Cosines and sines of every position, rotated as two halves."""

    def __init__(self, inverse_frequencies: torch.Tensor, max_context: int) -> None:
        positions = torch.arange(max_context, dtype=torch.float32, device=inverse_frequencies.device)
        angles = torch.outer(positions, inverse_frequencies)  # [max_context, head_dim / 2]
        self._cos = angles.cos()
        self._sin = angles.sin()

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 `[rows, 1, head_dim / 2]` each, to broadcast over heads."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `[rows, heads, head_dim]` by the angles of each row; float32 inside."""
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


def feed_forward(x: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
    """`down(silu(gate(x)) * up(x))`, `[rows, hidden]` (Shazeer 2020)."""
    gate, up = functional.linear(x, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
    return functional.linear(functional.silu(gate) * up, layer.down, layer.down_bias)
