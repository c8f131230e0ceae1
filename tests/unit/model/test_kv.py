"""Where the cache lies in memory."""

from __future__ import annotations

import pytest
import torch

from engine.model.kv import CACHE_LINE, PagedKV


@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.parametrize("head_dim", [32, 64, 96])
def test_every_layer_begins_at_a_cache_line(head_dim: int, by_block: bool) -> None:
    kv = PagedKV(3, 4, 16, 1, head_dim, torch.float16, by_block=by_block)
    assert {tensor.data_ptr() % CACHE_LINE for tensor in (*kv.keys, *kv.values)} == {0}


def test_fresh_memory_reads_as_zero() -> None:
    assert not PagedKV(2, 3, 16, 1, 32).data.any()


def test_by_block_a_block_of_all_layers_is_one_piece_of_memory() -> None:
    kv = PagedKV(3, 4, 16, 2, 32, by_block=True)
    places = [tensor[1].data_ptr() for pair in zip(kv.keys, kv.values, strict=True) for tensor in pair]
    step = 16 * 2 * 32 * 4
    assert places == [places[0] + at * step for at in range(6)]
    assert kv.keys[0][2].data_ptr() == places[0] + kv.bytes_per_block == places[0] + 6 * step


@pytest.mark.parametrize("by_block", [False, True])
def test_gathered_blocks_come_back_into_others(by_block: bool) -> None:
    kv = PagedKV(3, 5, 16, 2, 32, by_block=by_block)
    kv.data.copy_(torch.rand(kv.data.shape))
    content = kv.gather([3, 1])
    assert torch.equal(content, kv.data[:, :, [3, 1]])
    kept = kv.data[:, :, 1:4].clone()
    kv.scatter([0, 4], content)
    assert torch.equal(kv.data[:, :, [0, 4]], content)
    assert torch.equal(kv.data[:, :, 1:4], kept)
