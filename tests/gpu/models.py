"""Random decoders for the CUDA backend's tests, on whatever device there is."""

from __future__ import annotations

from typing import Any

import torch

from engine.bench.random_model import make_kv, random_weights
from engine.bench.random_model import ragged_batch as batch_on
from engine.model.config import ModelConfig
from engine.model.cuda_backend import CudaBackend
from engine.model.reference import ReferenceBackend

__all__ = ["batch_on", "pair", "tiny_config"]


def tiny_config(**changes: Any) -> ModelConfig:
    fields: dict[str, Any] = {
        "architecture": "llama", "name": "tiny", "vocab_size": 112, "hidden_size": 64, "intermediate_size": 96,
        "num_layers": 2, "num_heads": 6, "num_kv_heads": 2, "head_dim": 16, "max_context": 640,
        "tied_embeddings": True,
    }  # fmt: skip
    return ModelConfig(**{**fields, **changes})


def pair(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, widths: tuple[int, ...], blocks: int = 100
) -> tuple[CudaBackend, ReferenceBackend]:
    """The fused backend and the reference with the same weights, a cache each."""
    weights = random_weights(config, dtype, device)
    fused = CudaBackend(config, weights, make_kv(config, blocks, dtype, device), widths=widths)
    return fused, ReferenceBackend(config, weights, make_kv(config, blocks, dtype, device))
