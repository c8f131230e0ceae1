"""The DFlash draft head: one bidirectional pass over a block of masks, conditioned on the target's hidden states.

Block diffusion drafting (DFlash, 2026): hidden states of several target layers become keys and values of
every draft layer. A small chain then picks the block's tokens from left to right among each position's candidates, so
that neighbours agree; it costs two small products per draft and no pass of the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import cast

import torch
from torch import nn
from torch.nn import functional

from engine.core.device import Draft, DrafterName
from engine.model.backend import Backend
from engine.model.head_file import HeadFile, find_head
from engine.model.head_memory import HeadMemory, drafted_rows, drafts_of, head_dtype
from engine.model.heads import HeadItem, HeadRows
from engine.model.kv import PagedKV
from engine.model.layers import Rope, rotate
from engine.model.load import rope_frequencies

DRAFT_VOCABULARY = 16_384
"""Ids that the shipped head drafts from."""

CANDIDATES = 16
"""Best ids of each position among which the chain picks."""


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


class DFlashHead:
    """Implements `engine.model.heads.DraftHead` on any backend."""

    drafter = DrafterName.DFLASH

    def __init__(self, backend: Backend, file: HeadFile, dtype: torch.dtype, ids: int = DRAFT_VOCABULARY) -> None:
        config, device = backend.config, backend.device
        shape = DFlashShape(**{**file.shape, "taps": tuple(file.shape["taps"])})
        net = DFlashNet(shape, Rope(rope_frequencies(config).to(device), config.max_context))
        net.load_state_dict(file.tensors)
        self._net = net.to(device, dtype).requires_grad_(False)
        self._layers = [cast(DFlashLayer, layer) for layer in self._net.layers]
        self._backend, self._dtype = backend, dtype
        self._memory = HeadMemory(backend, shape.layers, shape.num_kv_heads, shape.head_dim, dtype)
        self._ids = file.vocab_ids[:ids].to(device)
        self._rows = drafted_rows(backend, self._ids, dtype)
        self._offsets = torch.arange(shape.block, device=device)

    @property
    def taps(self) -> tuple[int, ...]:
        return self._net.shape.taps

    @property
    def kv(self) -> PagedKV | None:
        return self._memory.kv

    def extend(self, rows: Sequence[HeadRows]) -> None:
        """Absorb rows without drafting."""
        laid_out = self._memory.lay_out(rows)
        fused = self._net.fuse(laid_out.hidden)
        for index, layer in enumerate(self._layers):
            self._memory.write(index, laid_out.slots, *layer.context(fused, laid_out.positions))

    def propose(self, items: Sequence[HeadItem], conf_min: float) -> list[Draft]:
        """Draft up to each item's `count`, at most the block, stopping before a draft less sure than `conf_min`."""
        self.extend([item.rows for item in items])
        last = self._embedded(torch.tensor([item.last_token for item in items], device=self._ids.device))
        hidden = self._block(items, last)
        wanted = min(max(item.count for item in items), hidden.shape[1])
        tokens, sure = self._pick(hidden[:, :wanted], last)
        return drafts_of(items, tokens, sure, conf_min)

    def _block(self, items: Sequence[HeadItem], last: torch.Tensor) -> torch.Tensor:
        """Hidden rows of the drafts, `[sequences, block - 1, hidden]`."""
        net, block = self._net, self._net.shape.block
        past = self._memory.past(items)
        start = torch.tensor([item.seq_len for item in items], device=self._ids.device)
        masks = net.mask.expand(len(items), block - 1, -1)
        x = torch.cat((last.unsqueeze(1), masks), 1)
        positions = (start[:, None] + self._offsets).clamp(max=self._backend.config.max_context - 1)
        visible = None if past.visible is None else functional.pad(past.visible, (0, block), value=True)
        for index, layer in enumerate(self._layers):
            q, k, v = (t.transpose(1, 2) for t in layer.qkv(x, positions))
            seen_k, seen_v = self._memory.read(index, past)
            attended = functional.scaled_dot_product_attention(
                q, torch.cat((seen_k, k), 2), torch.cat((seen_v, v), 2), attn_mask=visible, enable_gqa=True
            )
            x = layer.finish(x, attended.transpose(1, 2).flatten(2))
        return x[:, 1:]

    def _pick(self, hidden: torch.Tensor, before: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Tokens from left to right among each position's candidates, and their probability among these."""
        net = self._net
        logits = functional.linear(net.chained(hidden, net.unknown.expand_as(hidden)), self._rows)
        best = logits.topk(min(CANDIDATES, logits.shape[-1]), -1).indices  # [sequences, drafts, candidates]
        rows = self._rows[best]
        tokens: list[torch.Tensor] = []
        sure: list[torch.Tensor] = []
        for step in range(hidden.shape[1]):
            linked = net.chained(hidden[:, step], before)
            scores = (rows[:, step] @ linked.unsqueeze(-1)).squeeze(-1).float()
            chance, index = scores.softmax(-1).max(-1)
            tokens.append(self._ids[best[:, step].gather(1, index[:, None]).squeeze(1)])
            sure.append(chance)
            before = self._embedded(tokens[-1])
        return tokens, sure

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._backend.embed(tokens).to(self._dtype)


def open_head(backend: Backend) -> DFlashHead | None:
    """The shipped head for the backend's model, None where none was trained for it."""
    file = find_head("dflash", backend.config)
    return None if file is None else DFlashHead(backend, file, head_dtype(backend))
