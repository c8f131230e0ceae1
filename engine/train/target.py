"""The frozen target model as draft-head training needs it: hidden states of whole batches, and its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from engine.model.config import ModelConfig
from engine.model.layers import Rope, feed_forward, rotate
from engine.model.load import LayerWeights, Weights, load_weights, open_source


@dataclass(frozen=True, slots=True)
class FrozenTarget:
    """A decoder without gradients on rows of any batch shape; float32 or bfloat16, on one device."""

    config: ModelConfig
    weights: Weights
    rope: Rope

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return functional.embedding(tokens, self.weights.embedding)

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines `[..., 1, head_dim / 2]`."""
        cos, sin = self.rope.at(positions.reshape(-1))
        return cos.view(*positions.shape, 1, -1), sin.view(*positions.shape, 1, -1)

    def qkv(
        self, layer: LayerWeights, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated queries `[..., heads, head_dim]`, rotated keys and values `[..., kv_heads, head_dim]`."""
        c = self.config
        mixed = functional.linear(self._normed(x, layer.attn_norm), layer.qkv, layer.qkv_bias)
        q, k, v = mixed.unflatten(-1, (-1, c.head_dim)).split((c.num_heads, c.num_kv_heads, c.num_kv_heads), dim=-2)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._normed(q, layer.q_norm), self._normed(k, layer.k_norm)
        return rotate(q, *angles), rotate(k, *angles), v

    def finish(self, layer: LayerWeights, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Output projection, feed-forward and both residual sums; `attended` is `[..., heads * head_dim]`."""
        x = x + functional.linear(attended, layer.out, layer.out_bias)
        return x + feed_forward(self._normed(x, layer.ffn_norm), layer)

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._normed(hidden, self.weights.final_norm)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.config.rms_eps)

    @torch.no_grad()
    def hidden_states(self, tokens: torch.Tensor, taps: tuple[int, ...]) -> torch.Tensor:
        """Residual stream after the tapped layers, `[batch, time, len(taps), hidden]`, of right-padded rows."""
        angles = self.angles(torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens))
        x = self.embed(tokens)
        kept: list[torch.Tensor] = []
        for index, layer in enumerate(self.weights.layers[: max(taps) + 1]):
            q, k, v = (t.transpose(1, 2) for t in self.qkv(layer, x, angles))
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = self.finish(layer, x, attended.transpose(1, 2).flatten(2))
            if index in taps:
                kept.append(x)
        return torch.stack(kept, 2)


def load_target(path: Path, dtype: torch.dtype, device: torch.device) -> FrozenTarget:
    """Read a GGUF file or a Hugging Face directory; raises `ModelFileError` where it is unusable."""
    source = open_source(path)
    try:
        weights = load_weights(source, dtype, device)
    finally:
        source.close()
    return FrozenTarget(source.config, weights, Rope(weights.inverse_frequencies, source.config.max_context))
