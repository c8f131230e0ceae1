"""Runs one sequence through a backend, for comparison with another implementation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from engine.model.backend import Backend, BackendRequest, Batch
from engine.model.load import open_source
from engine.model.reference import open_backend


def open_reference(path: Path, kv_tokens: int = 1024, dtype: str = "float32") -> Backend:
    source = open_source(path)
    config = source.config
    source.close()
    return open_backend(BackendRequest(path, config, kv_tokens, 16, 1, 1024, dtype, 2))


def feed(backend: Backend, tokens: Sequence[int], start: int = 0, first_block: int = 0) -> torch.Tensor:
    """Logits `[len(tokens), vocab]` of a sequence whose blocks follow each other from `first_block`."""
    count = len(tokens)
    blocks = -(-(start + count) // backend.kv.block_size)
    batch = Batch(
        tokens=torch.tensor(tokens),
        positions=torch.arange(start, start + count),
        row_offsets=(0, count),
        starts=(start,),
        block_tables=torch.arange(first_block, first_block + blocks, dtype=torch.int32).unsqueeze(0),
        logit_rows=tuple(range(count)),
    )
    logits = backend.run(batch).logits
    assert logits is not None
    return logits.clone()


def continue_greedily(backend: Backend, prompt: Sequence[int], count: int) -> list[int]:
    """`count` tokens, each from a step of one row."""
    tokens = [int(feed(backend, prompt)[-1].argmax())]
    while len(tokens) < count:
        tokens.append(int(feed(backend, tokens[-1:], len(prompt) + len(tokens) - 1)[-1].argmax()))
    return tokens
