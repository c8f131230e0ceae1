"""The MTP draft head: one decoder block on the target's hidden states and the next token, applied again per draft.

DeepSeek-V3 style recurrence (arXiv 2412.19437, section 2.2) with several hidden states at the first step (EAGLE-3,
arXiv 2503.01840); embedding and LM head are the target's, restricted to the ids that replies use most.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.nn import functional

from engine.model.layers import Rope, rotate


@dataclass(frozen=True, slots=True)
class MTPShape:
    """Everything that decides the size of the network."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    taps: tuple[int, ...]
    """Target layers whose residual streams come in, ascending; the last is the top layer."""
    rms_eps: float

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "taps": list(self.taps)}


class MTPNet(nn.Module):
    """The block. Rows may have any batch shape; positions are those of the hidden states."""

    def __init__(self, shape: MTPShape, rope: Rope) -> None:
        super().__init__()
        self.shape, self.rope = shape, rope
        d, f = shape.hidden_size, shape.intermediate_size
        heads = shape.num_heads + 2 * shape.num_kv_heads
        self.tap_norms = nn.Parameter(torch.ones(len(shape.taps), d))
        self.token_norm = nn.Parameter(torch.ones(d))
        self.first = nn.Parameter(torch.zeros(d, (len(shape.taps) + 1) * d))
        self.again_norm = nn.Parameter(torch.ones(d))
        self.again = nn.Parameter(torch.zeros(d, 2 * d))
        self.attn_norm = nn.Parameter(torch.ones(d))
        self.qkv_weight = nn.Parameter(torch.zeros(heads * shape.head_dim, d))
        self.out = nn.Parameter(torch.zeros(d, shape.num_heads * shape.head_dim))
        self.ffn_norm = nn.Parameter(torch.ones(d))
        self.gate_up = nn.Parameter(torch.zeros(2 * f, d))
        self.down = nn.Parameter(torch.zeros(d, f))
        self.final_norm = nn.Parameter(torch.ones(d))

    def fuse(self, taps: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Input of the first draft step: `taps` is `[..., taps, hidden]`, `embedded` the next token `[..., hidden]`."""
        d = self.shape.hidden_size
        normed = functional.rms_norm(taps, (d,), None, self.shape.rms_eps) * self.tap_norms
        return functional.linear(
            torch.cat((normed.flatten(-2), self._normed(embedded, self.token_norm)), -1), self.first
        )

    def fuse_again(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Input of later draft steps: the block's own last output and the token drafted from it."""
        pair = (self._normed(hidden, self.again_norm), self._normed(embedded, self.token_norm))
        return functional.linear(torch.cat(pair, -1), self.again)

    def qkv(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated queries `[..., heads, head_dim]`, rotated keys and values `[..., kv_heads, head_dim]`."""
        s = self.shape
        mixed = functional.linear(self._normed(x, self.attn_norm), self.qkv_weight).unflatten(-1, (-1, s.head_dim))
        q, k, v = mixed.split((s.num_heads, s.num_kv_heads, s.num_kv_heads), dim=-2)
        cos, sin = (t.view(*positions.shape, 1, -1) for t in self.rope.at(positions.reshape(-1)))
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The block's output `[..., hidden]`; `attended` is `[..., heads * head_dim]`."""
        x = x + functional.linear(attended, self.out)
        gate, up = functional.linear(self._normed(x, self.ffn_norm), self.gate_up).chunk(2, -1)
        return x + functional.linear(functional.silu(gate) * up, self.down)

    def read_out(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the LM head takes."""
        return self._normed(hidden, self.final_norm)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.shape.rms_eps)
