"""The torch backend that every faster one is measured against."""

from __future__ import annotations

import torch

from engine.model.backend import Backend, BackendRequest, Batch, HostBatch, Output
from engine.model.config import ModelConfig
from engine.model.kv import PagedKV, available_bytes, default_kv_tokens
from engine.model.llama import Decoder
from engine.model.load import Weights, load_weights, open_source


class ReferenceBackend:
    """Plain torch, one operator after the other, float32 or bfloat16, CPU or CUDA."""

    def __init__(self, config: ModelConfig, weights: Weights, kv: PagedKV) -> None:
        self.config = config
        self.kv = kv
        self._decoder = Decoder(config, weights, kv)
        self.device = weights.embedding.device
        self.name = f"reference {str(weights.embedding.dtype).removeprefix('torch.')}"

    def run(self, batch: Batch) -> Output:
        x, hidden = self._decoder.forward(batch)
        if not batch.logit_rows:
            return Output(torch.empty(0, dtype=torch.int64, device=self.device), None, hidden)
        rows = torch.tensor(batch.logit_rows, device=self.device)
        logits = self._decoder.logits(x[rows])
        return Output(logits.argmax(-1), logits, hidden)

    def run_host(self, batch: HostBatch) -> Output:
        return self.run(batch.on(self.device))

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._decoder.embed(tokens)

    def lm_head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._decoder.lm_head(hidden)

    def close(self) -> None:
        """Nothing but memory to give back."""


def open_backend(request: BackendRequest) -> Backend:
    """Load all weights in the asked dtype; `auto` is float32 on a CPU and bfloat16 on CUDA."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = _dtype(request.dtype, device)
    source = open_source(request.path)
    try:
        weights = load_weights(source, dtype, device, request.progress)
    finally:
        source.close()
    config = request.config
    per_token = config.num_layers * 2 * config.num_kv_heads * config.head_dim * dtype.itemsize
    tokens = request.kv_tokens or default_kv_tokens(
        per_token, config.max_context, request.max_batch_size, available_bytes(device)
    )
    kv = PagedKV(
        config.num_layers,
        -(-tokens // request.block_size),
        request.block_size,
        config.num_kv_heads,
        config.head_dim,
        dtype,
        device,
    )
    return ReferenceBackend(config, weights, kv)


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
