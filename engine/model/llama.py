"""The decoder of all four families, readable from top to bottom: embed, layers, norm, head."""

from __future__ import annotations

import torch
from torch.nn import functional

from engine.model.attention import AttentionPlan, paged_attention, plan_attention
from engine.model.backend import Batch
from engine.model.config import ModelConfig
from engine.model.kv import PagedKV
from engine.model.layers import Rope, feed_forward, rms_norm, rotate
from engine.model.load import LayerWeights, Weights


class Decoder:
    """Pre-norm transformer with rotary positions, grouped queries and a gated feed-forward."""

    def __init__(self, config: ModelConfig, weights: Weights, kv: PagedKV) -> None:
        self.config = config
        self.weights = weights
        self.kv = kv
        self._rope = Rope(weights.inverse_frequencies, config.max_context)
        self._wide_head = weights.head if weights.head.is_cuda else weights.head.float()

    @torch.inference_mode()
    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Residual stream after the last layer `[rows, hidden]`, and after the tapped layers `[rows, taps, hidden]`."""
        plan = plan_attention(batch, self.kv.block_size)
        rope = self._rope.at(batch.positions)
        x = self.embed(batch.tokens)
        run = range(self.config.num_layers) if batch.layers is None else batch.layers
        tapped: list[torch.Tensor] = []
        for index in run:
            x = self._layer(x, index, rope, plan)
            if index in batch.taps:
                tapped.append(x)
        return x, torch.stack(tapped, dim=1) if tapped else None

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return functional.embedding(tokens, self.weights.embedding)

    @torch.inference_mode()
    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """float32 `[rows, vocab]` of rows of the residual stream."""
        return self.lm_head(rms_norm(x, self.weights.final_norm, self.config.rms_eps))

    def lm_head(self, normed: torch.Tensor) -> torch.Tensor:
        """float32 `[rows, vocab]`: bf16 logits would tie tokens that are one rounding step apart."""
        if self._wide_head.dtype == torch.float32:
            return functional.linear(normed.float(), self._wide_head)
        return torch.mm(normed, self._wide_head.t(), out_dtype=torch.float32)

    def _layer(
        self, x: torch.Tensor, index: int, rope: tuple[torch.Tensor, torch.Tensor], plan: AttentionPlan
    ) -> torch.Tensor:
        layer, eps = self.weights.layers[index], self.config.rms_eps
        q, k, v = self._project(rms_norm(x, layer.attn_norm, eps), layer)
        q, k = rotate(q, *rope), rotate(k, *rope)
        attended = paged_attention(q, k, v, self.kv.keys[index], self.kv.values[index], plan)
        x = x + functional.linear(attended, layer.out, layer.out_bias)
        return x + feed_forward(rms_norm(x, layer.ffn_norm, eps), layer)

    def _project(self, x: torch.Tensor, layer: LayerWeights) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q `[rows, heads, head_dim]`, k and v `[rows, kv_heads, head_dim]`."""
        c = self.config
        qkv = functional.linear(x, layer.qkv, layer.qkv_bias).view(x.shape[0], -1, c.head_dim)
        q, k, v = qkv.split((c.num_heads, c.num_kv_heads, c.num_kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = rms_norm(q, layer.q_norm, c.rms_eps), rms_norm(k, layer.k_norm, c.rms_eps)
        return q, k, v
