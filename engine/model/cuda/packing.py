"""Weights in the order of the kernels: rows that one thread needs together lie in one group of 16."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.model.config import ModelConfig
from engine.model.load import LayerWeights, Weights


@dataclass(frozen=True, slots=True)
class PackedLayer:
    attn_norm: torch.Tensor
    qkv: torch.Tensor
    """Per head groups of 16 rows: 8 of the first half of its dimensions, the same 8 of the second half."""
    qkv_bias: torch.Tensor | None
    out: torch.Tensor
    ffn_norm: torch.Tensor
    gate_up: torch.Tensor
    """Groups of 16 rows: 8 of gate, the same 8 of up."""
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class PackedWeights:
    embedding: torch.Tensor
    layers: tuple[PackedLayer, ...]
    final_norm: torch.Tensor
    head: torch.Tensor
    cos: torch.Tensor
    """float32 `[max_context, head_dim / 2]`."""
    sin: torch.Tensor


def interleave(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Rows of two equal halves in groups of 16: 8 of `first`, 8 of `second`."""
    inner = first.shape[1:]
    return torch.stack((first.view(-1, 8, *inner), second.view(-1, 8, *inner)), 1).reshape(-1, *inner)


def pack_heads(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of q, k and v (or their bias) with the halves of every head interleaved."""
    halves = rows.view(-1, 2, head_dim // 2, *rows.shape[1:])
    return interleave(halves[:, 0].reshape(-1, *rows.shape[1:]), halves[:, 1].reshape(-1, *rows.shape[1:]))


def pack(config: ModelConfig, weights: Weights) -> PackedWeights:
    """Copies `qkv` and `gate_up`, shares the rest."""
    positions = torch.arange(config.max_context, dtype=torch.float32, device=weights.inverse_frequencies.device)
    angles = torch.outer(positions, weights.inverse_frequencies)
    layers = tuple(_layer(layer, config.head_dim) for layer in weights.layers)
    return PackedWeights(
        weights.embedding, layers, weights.final_norm, weights.head, angles.cos().contiguous(), angles.sin().contiguous()
    )


def _layer(layer: LayerWeights, head_dim: int) -> PackedLayer:
    gate, up = layer.gate_up.chunk(2)
    bias = None if layer.qkv_bias is None else pack_heads(layer.qkv_bias, head_dim)
    return PackedLayer(
        layer.attn_norm, pack_heads(layer.qkv, head_dim), bias, layer.out, layer.ffn_norm, interleave(gate, up), layer.down
    )
