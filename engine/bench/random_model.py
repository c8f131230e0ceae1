"""Decoders with random weights in the shapes of known models: speed and exactness need no download."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from engine.model.backend import Batch, HostBatch
from engine.model.config import ModelConfig
from engine.model.kv import PagedKV
from engine.model.load import LayerWeights, Weights, rope_frequencies

BLOCK_SIZE = 16

SHAPES = {
    "default": ModelConfig("llama", "SmolLM2-135M shape", 49152, 576, 1536, 30, 9, 3, 64, 8192, rope_theta=1e5,
                           tied_embeddings=True),
    "1b": ModelConfig("llama", "Llama-3.2-1B shape", 128256, 2048, 8192, 16, 32, 8, 64, 8192, rope_theta=5e5,
                      tied_embeddings=True),
    "8b": ModelConfig("llama", "Llama-8B shape", 128256, 4096, 14336, 32, 32, 8, 128, 8192, rope_theta=5e5),
}  # fmt: skip


def random_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0, layers: int | None = None
) -> Weights:
    """Normal weights scaled to keep activations near 1; `layers` fewer than the config's make a shorter model."""
    made = torch.Generator(device=device).manual_seed(seed)
    c = config
    d, f, width = c.hidden_size, c.intermediate_size, c.num_heads * c.head_dim
    heads = width + 2 * c.num_kv_heads * c.head_dim

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        values = torch.empty(rows, columns, dtype=dtype, device=device)
        return values.normal_(0.0, gain * columns**-0.5, generator=made)

    def vector(size: int, around: float = 1.0) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device).normal_(around, 0.1, generator=made)

    def layer() -> LayerWeights:
        return LayerWeights(
            attn_norm=vector(d), qkv=matrix(heads, d), qkv_bias=vector(heads, 0.0) if c.qkv_bias else None,
            q_norm=None, k_norm=None, out=matrix(d, width), out_bias=None, ffn_norm=vector(d),
            gate_up=matrix(2 * f, d), gate_up_bias=None, down=matrix(d, f), down_bias=None,
        )  # fmt: skip

    embedding = matrix(c.vocab_size, d, gain=d**0.5)
    head = embedding if c.tied_embeddings else matrix(c.vocab_size, d)
    blocks = tuple(layer() for _ in range(c.num_layers if layers is None else layers))
    return Weights(embedding, blocks, vector(d), head, rope_frequencies(config).to(device))


def make_kv(config: ModelConfig, blocks: int, dtype: torch.dtype, device: torch.device) -> PagedKV:
    return PagedKV(config.num_layers, blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim, dtype, device)


def ragged_batch(
    device: torch.device,
    segments: Sequence[tuple[int, list[int], list[int]]],
    logit_rows: tuple[int, ...] | None = None,
    *,
    greedy: bool = False,
    taps: tuple[int, ...] = (),
    layers: tuple[int, ...] | None = None,
) -> Batch:
    """Segments are (start, tokens, blocks); by default every row's logits are wanted."""
    return host_batch(segments, logit_rows, greedy=greedy, taps=taps, layers=layers).on(device)


def host_batch(
    segments: Sequence[tuple[int, list[int], list[int]]],
    logit_rows: tuple[int, ...] | None = None,
    *,
    greedy: bool = False,
    taps: tuple[int, ...] = (),
    layers: tuple[int, ...] | None = None,
    previous: tuple[tuple[int, torch.Tensor], ...] = (),
) -> HostBatch:
    """The same in plain numbers."""
    offsets = (0, *accumulate(len(tokens) for _, tokens, _ in segments))
    return HostBatch(
        tokens=[token for _, tokens, _ in segments for token in tokens],
        row_offsets=offsets,
        starts=tuple(start for start, _, _ in segments),
        block_tables=[blocks for _, _, blocks in segments],
        logit_rows=tuple(range(offsets[-1])) if logit_rows is None else logit_rows,
        greedy=greedy,
        taps=taps,
        layers=layers,
        previous=previous,
    )
