"""Random decoders and ragged batches for the CUDA backend's tests, on whatever device there is."""

from __future__ import annotations

import torch

from engine.model.backend import Batch
from engine.model.config import ModelConfig
from engine.model.cuda_backend import CudaBackend
from engine.model.kv import PagedKV
from engine.model.load import LayerWeights, Weights, rope_frequencies
from engine.model.reference import ReferenceBackend

BLOCK = 16


def tiny_config(**changes: object) -> ModelConfig:
    fields: dict[str, object] = {
        "architecture": "llama", "name": "tiny", "vocab_size": 112, "hidden_size": 64, "intermediate_size": 96,
        "num_layers": 2, "num_heads": 6, "num_kv_heads": 2, "head_dim": 16, "max_context": 640,
        "tied_embeddings": True,
    }  # fmt: skip
    return ModelConfig(**{**fields, **changes})  # type: ignore[arg-type]


def random_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Weights:
    made = torch.Generator(device=device).manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=made, device=device, dtype=torch.float32)
        return (values * (gain * columns**-0.5)).to(dtype)

    def vector(size: int, around: float = 1.0) -> torch.Tensor:
        return (around + 0.1 * torch.randn(size, generator=made, device=device)).to(dtype)

    c = config
    d, f, width = c.hidden_size, c.intermediate_size, c.num_heads * c.head_dim
    heads = width + 2 * c.num_kv_heads * c.head_dim
    layers = tuple(
        LayerWeights(
            attn_norm=vector(d), qkv=matrix(heads, d), qkv_bias=vector(heads, 0.0) if c.qkv_bias else None,
            q_norm=None, k_norm=None, out=matrix(d, width), out_bias=None, ffn_norm=vector(d),
            gate_up=matrix(2 * f, d), gate_up_bias=None, down=matrix(d, f), down_bias=None,
        )
        for _ in range(c.num_layers)
    )  # fmt: skip
    embedding = matrix(c.vocab_size, d, gain=d**0.5)
    head = embedding if c.tied_embeddings else matrix(c.vocab_size, d)
    return Weights(embedding, layers, vector(d), head, rope_frequencies(config).to(device))


def make_kv(config: ModelConfig, blocks: int, dtype: torch.dtype, device: torch.device) -> PagedKV:
    return PagedKV(config.num_layers, blocks, BLOCK, config.num_kv_heads, config.head_dim, dtype, device)


def pair(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, widths: tuple[int, ...], blocks: int = 100
) -> tuple[CudaBackend, ReferenceBackend]:
    """The fused backend and the reference with the same weights, a cache each."""
    weights = random_weights(config, dtype, device)
    fused = CudaBackend(config, weights, make_kv(config, blocks, dtype, device), widths=widths)
    return fused, ReferenceBackend(config, weights, make_kv(config, blocks, dtype, device))


def batch_on(
    device: torch.device,
    segments: list[tuple[int, list[int], list[int]]],
    logit_rows: tuple[int, ...] | None = None,
    **more: object,
) -> Batch:
    """Segments are (start, tokens, blocks); by default every row's logits are wanted."""
    offsets = [0]
    for _, tokens, _ in segments:
        offsets.append(offsets[-1] + len(tokens))
    widest = max(len(blocks) for _, _, blocks in segments)
    return Batch(
        tokens=torch.tensor([token for _, tokens, _ in segments for token in tokens], device=device),
        positions=torch.tensor([start + i for start, tokens, _ in segments for i in range(len(tokens))], device=device),
        row_offsets=tuple(offsets),
        starts=tuple(start for start, _, _ in segments),
        block_tables=torch.tensor(
            [blocks + [0] * (widest - len(blocks)) for _, _, blocks in segments], dtype=torch.int32, device=device
        ),
        logit_rows=tuple(range(offsets[-1])) if logit_rows is None else logit_rows,
        **more,  # type: ignore[arg-type]
    )
