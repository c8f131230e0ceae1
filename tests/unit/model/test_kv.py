"""Where the cache lies in memory."""

from __future__ import annotations

import pytest
import torch

from engine.model.kv import CACHE_LINE, PagedKV


@pytest.mark.parametrize("head_dim", [32, 64, 96])
def test_every_layer_begins_at_a_cache_line(head_dim: int) -> None:
    kv = PagedKV(3, 4, 16, 1, head_dim, torch.float16)
    assert {tensor.data_ptr() % CACHE_LINE for tensor in (*kv.keys, *kv.values)} == {0}


def test_fresh_memory_reads_as_zero() -> None:
    assert not PagedKV(2, 3, 16, 1, 32).data.any()
