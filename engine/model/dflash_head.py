"""The DFlash draft head: one bidirectional pass over a block of masks, conditioned on the target's hidden states.

Block diffusion drafting (DFlash, 2026): hidden states of several target layers become keys and values of
every draft layer. A small chain then picks the block's tokens from left to right among each position's candidates, so
that neighbours agree; it costs two small products per draft and no pass of the network.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.nn import functional

from engine.model.layers import Rope, rotate


@dataclass(frozen=True, slots=True)
class DFlashShape:
    """Everything that decides the size of the network."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    layers: int
    block: int
    """Rows of a pass: the last token and `block - 1` masks."""
    chain_size: int
    taps: tuple[int, ...]
    """Target layers whose residual streams come in, ascending; the last is the top layer."""
    rms_eps: float

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "taps": list(self.taps)}


class DFlashLayer(nn.Module):
    def __init__(self, shape: DFlashShape, rope: Rope) -> None:
        super().__init__()
        self.shape, self.rope = shape, rope
        d, f = shape.hidden_size, shape.intermediate_size
        self.attn_norm = nn.Parameter(torch.ones(d))
        self.context_norm = nn.Parameter(torch.ones(d))
        self.q_weight = nn.Parameter(torch.zeros(shape.num_heads * shape.head_dim, d))
        self.kv_weight = nn.Parameter(torch.zeros(2 * shape.num_kv_heads * shape.head_dim, d))
        self.out = nn.Parameter(torch.zeros(d, shape.num_heads * shape.head_dim))
        self.ffn_norm = nn.Parameter(torch.ones(d))
        self.gate_up = nn.Parameter(torch.zeros(2 * f, d))
        self.down = nn.Parameter(torch.zeros(d, f))

    def context(self, fused: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[..., kv_heads, head_dim]` of the target's positions."""
        return self._keys_values(fused * self.context_norm, positions)

    def qkv(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated queries, rotated keys and values of the block's rows."""
        normed = self._normed(x, self.attn_norm)
        q = functional.linear(normed, self.q_weight).unflatten(-1, (-1, self.shape.head_dim))
        return (self._rotated(q, positions), *self._keys_values(normed, positions))

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The layer's output; `attended` is `[..., heads * head_dim]`."""
        x = x + functional.linear(attended, self.out)
        gate, up = functional.linear(self._normed(x, self.ffn_norm), self.gate_up).chunk(2, -1)
        return x + functional.linear(functional.silu(gate) * up, self.down)

    def _keys_values(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = functional.linear(x, self.kv_weight).unflatten(-1, (-1, self.shape.head_dim)).chunk(2, -2)
        return self._rotated(k, positions), v

    def _rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = (t.view(*positions.shape, 1, -1) for t in self.rope.at(positions.reshape(-1)))
        return rotate(x, cos, sin)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.shape.rms_eps)


class DFlashNet(nn.Module):
    """Fusion of the taps, the draft layers and the chain. Rows may have any batch shape."""

    def __init__(self, shape: DFlashShape, rope: Rope) -> None:
        super().__init__()
        self.shape = shape
        d = shape.hidden_size
        self.tap_norms = nn.Parameter(torch.ones(len(shape.taps), d))
        self.fusion = nn.Parameter(torch.zeros(d, len(shape.taps) * d))
        self.mask = nn.Parameter(torch.zeros(d))
        self.layers = nn.ModuleList([DFlashLayer(shape, rope) for _ in range(shape.layers)])
        self.chain_norm = nn.Parameter(torch.ones(d))
        self.unknown = nn.Parameter(torch.zeros(d))
        self.chain_in = nn.Parameter(torch.zeros(shape.chain_size, 2 * d))
        self.chain_out = nn.Parameter(torch.zeros(d, shape.chain_size))
        self.final_norm = nn.Parameter(torch.ones(d))

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        """Context of the draft layers `[..., hidden]`, normed, out of `[..., taps, hidden]`."""
        d = self.shape.hidden_size
        normed = functional.rms_norm(taps, (d,), None, self.shape.rms_eps) * self.tap_norms
        return functional.rms_norm(functional.linear(normed.flatten(-2), self.fusion), (d,), None, self.shape.rms_eps)

    def chained(self, hidden: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """What the LM head takes: rows adjusted to the embedded token before each, `unknown` where it is open."""
        d = self.shape.hidden_size
        pair = torch.cat((functional.rms_norm(hidden, (d,), self.chain_norm, self.shape.rms_eps), before), -1)
        adjusted = hidden + functional.linear(functional.silu(functional.linear(pair, self.chain_in)), self.chain_out)
        return functional.rms_norm(adjusted, (d,), self.final_norm, self.shape.rms_eps)
