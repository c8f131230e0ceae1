"""The MTP draft head: one decoder block on the target's hidden states and the next token, applied again per draft.

DeepSeek-V3 style recurrence (arXiv 2412.19437, section 2.2) with several hidden states at the first step (EAGLE-3,
arXiv 2503.01840); embedding and LM head are the target's, restricted to the ids that replies use most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.nn import functional

from engine.core.device import Draft, DrafterName
from engine.model.backend import Backend
from engine.model.head_file import HeadFile, find_head
from engine.model.head_memory import Absorbed, HeadMemory, drafted_rows, drafts_of, head_dtype
from engine.model.heads import DraftHead, HeadItem, HeadRows
from engine.model.kv import PagedKV
from engine.model.layers import Rope, rotate
from engine.model.load import rope_frequencies

DRAFT_VOCABULARY = 16_384
"""Ids that the shipped head drafts from."""


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


class MTPHead:
    """Implements `engine.model.heads.DraftHead` on any backend."""

    drafter = DrafterName.MTP

    def __init__(self, backend: Backend, file: HeadFile, dtype: torch.dtype, ids: int = DRAFT_VOCABULARY) -> None:
        config, device = backend.config, backend.device
        shape = MTPShape(**{**file.shape, "taps": tuple(file.shape["taps"])})
        net = MTPNet(shape, Rope(rope_frequencies(config).to(device), config.max_context))
        net.load_state_dict(file.tensors)
        self._net = net.to(device, dtype).requires_grad_(False)
        self._backend, self._dtype = backend, dtype
        self._memory = HeadMemory(backend, 1, shape.num_kv_heads, shape.head_dim, dtype)
        self._ids = file.vocab_ids[:ids].to(device)
        self._rows = drafted_rows(backend, self._ids, dtype)

    @property
    def taps(self) -> tuple[int, ...]:
        return self._net.shape.taps

    @property
    def kv(self) -> PagedKV | None:
        return self._memory.kv

    def extend(self, rows: Sequence[HeadRows]) -> None:
        """Absorb rows without drafting."""
        self._absorb(self._memory.lay_out(rows))

    def propose(self, items: Sequence[HeadItem], conf_min: float) -> list[Draft]:
        """Draft up to each item's `count`, stopping before a draft less sure than `conf_min`."""
        laid_out = self._memory.lay_out([item.rows for item in items])
        x, q = self._absorb(laid_out)
        x, q = x[laid_out.last], q[laid_out.last]
        positions = laid_out.positions[laid_out.last]
        past = self._memory.past(items)
        k, v = self._memory.read(0, past)
        visible = past.visible
        tokens: list[torch.Tensor] = []
        sure: list[torch.Tensor] = []
        for step in range(max(item.count for item in items)):
            if step:
                x = self._net.fuse_again(x, self._backend.embed(tokens[-1]).to(self._dtype))
                q, key, value = self._net.qkv(x, positions + step)
                k, v = torch.cat((k, key.unsqueeze(2)), 2), torch.cat((v, value.unsqueeze(2)), 2)
                visible = None if visible is None else functional.pad(visible, (0, 1), value=True)
            attended = functional.scaled_dot_product_attention(q.unsqueeze(2), k, v, attn_mask=visible, enable_gqa=True)
            x = self._net.finish(x, attended.flatten(1))
            logits = functional.linear(self._net.read_out(x), self._rows).float()
            best, index = logits.max(-1)
            tokens.append(self._ids[index])
            sure.append((best - logits.logsumexp(-1)).exp())
            if not x.is_cuda and bool((sure[-1] < conf_min).all()):
                break
        return drafts_of(items, tokens, sure, conf_min)

    def _absorb(self, rows: Absorbed) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the rows' keys and values; returns the block's input and queries of all of them."""
        x = self._net.fuse(rows.hidden, self._backend.embed(rows.next_tokens).to(self._dtype))
        q, k, v = self._net.qkv(x, rows.positions)
        self._memory.write(0, rows.slots, k, v)
        return x, q


def open_head(backend: Backend) -> DraftHead | None:
    """The shipped head for the backend's model on that backend's kernels, None where none was trained for it."""
    file = find_head("mtp", backend.config)
    if file is None:
        return None
    from engine.model.cuda_backend import CudaBackend
    from engine.model.mtp_native import NativeMTPHead
    from engine.model.native_backend import NativeBackend

    if isinstance(backend, NativeBackend):
        return NativeMTPHead(backend, file)
    if isinstance(backend, CudaBackend):
        from engine.model.mtp_cuda import CudaMTPHead

        fused = CudaMTPHead(backend, file)
        fused.prepare()
        return fused
    return MTPHead(backend, file, head_dtype(backend))
