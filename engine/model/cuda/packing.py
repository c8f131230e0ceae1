"""Weights in the order of the kernels: rows that one thread needs together lie in one group of 16."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.model.config import ModelConfig
from engine.model.load import LayerWeights, Weights


@dataclass(frozen=True, slots=True)
class PackedLayer:
    qkv: torch.Tensor
    """Times the norm before it. Per head groups of 16 rows: 8 of the first half of its dimensions, the same 8 of the
    second half."""
    qkv_bias: torch.Tensor | None
    out: torch.Tensor
    gate_up: torch.Tensor
    """Times the norm before it. Groups of 16 rows: 8 of gate, the same 8 of up."""
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """Norm weights are multiplied into the matrices that follow: one rounding to bf16 either way, of the product of
    weight and norm here, of activation and norm elsewhere."""

    embedding: torch.Tensor
    layers: tuple[PackedLayer, ...]
    head: torch.Tensor
    """Times the final norm."""
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
    """Copies `qkv`, `gate_up` and the head, shares the rest."""
    positions = torch.arange(config.max_context, dtype=torch.float32, device=weights.inverse_frequencies.device)
    angles = torch.outer(positions, weights.inverse_frequencies)
    layers = tuple(_layer(layer, config.head_dim) for layer in weights.layers)
    head = _normed(weights.head, weights.final_norm)
    return PackedWeights(weights.embedding, layers, head, angles.cos().contiguous(), angles.sin().contiguous())


def _layer(layer: LayerWeights, head_dim: int) -> PackedLayer:
    gate, up = _normed(layer.gate_up, layer.ffn_norm).chunk(2)
    qkv = pack_heads(_normed(layer.qkv, layer.attn_norm), head_dim)
    bias = None if layer.qkv_bias is None else pack_heads(layer.qkv_bias, head_dim)
    return PackedLayer(qkv, bias, layer.out, interleave(gate, up), layer.down)


def _normed(matrix: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    return (matrix.float() * norm.float()).to(matrix.dtype)
