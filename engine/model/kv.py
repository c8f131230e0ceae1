"""The paged KV cache: per layer two tensors of blocks, addressed by block number alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

CACHE_LINE = 64
"""Bytes. Default model with AVX-512, aligned over 16 bytes off: 7 rows at 2,000 positions take 0.82 of the time, 4 rows
at 3,500 positions 0.79."""


class PagedKV:
    """Keys and values of `layers` layers in `num_blocks` blocks of `block_size` tokens.

    `keys[l]` and `values[l]` are `[num_blocks, block_size, kv_heads, head_dim]`, each block contiguous; `data` is
    `[layers, 2, num_blocks, ...]`. Keys are stored after rope. Fresh memory reads as zero and is backed by pages only
    once written, so a large pool costs nothing yet. In memory the layers come first, each contiguous, or with
    `by_block` the blocks, each with all its layers: then a few blocks fill a few huge pages instead of two a layer.
    """

    def __init__(
        self,
        layers: int,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        by_block: bool = False,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.dtype = dtype
        block = (block_size, kv_heads, head_dim)
        if by_block:
            self.data = _zeros((num_blocks, layers, 2, *block), dtype, torch.device(device)).permute(1, 2, 0, 3, 4, 5)
        else:
            self.data = _zeros((layers, 2, num_blocks, *block), dtype, torch.device(device))
        self.data[:, :, :1].zero_()  # in huge pages the first write of every layer would delay a first reply
        self.keys = [self.data[layer, 0] for layer in range(layers)]
        self.values = [self.data[layer, 1] for layer in range(layers)]

    @property
    def bytes_per_block(self) -> int:
        layers, two, _, *block = self.data.shape
        return layers * two * int(np.prod(block)) * self.data.element_size()

    def gather(self, blocks: Sequence[int]) -> torch.Tensor:
        """A copy of `blocks` in host memory: `[layers, 2, len(blocks), block_size, kv_heads, head_dim]`."""
        index = torch.tensor(list(blocks), dtype=torch.int64, device=self.data.device)
        return self.data.index_select(2, index).cpu()

    def scatter(self, blocks: Sequence[int], content: torch.Tensor) -> None:
        """Write what `gather` returned into (other) blocks."""
        index = torch.tensor(list(blocks), dtype=torch.int64, device=self.data.device)
        self.data.index_copy_(2, index, content.to(self.data.device))


def default_kv_tokens(
    bytes_per_token: int, max_context: int, max_batch_size: int, available_bytes: int, share: float = 0.25
) -> int:
    """Tokens of a pool that holds every sequence at full context, or what `share` of the free memory holds, but
    at least one context of up to 2048 tokens."""
    affordable = int(available_bytes * share) // bytes_per_token
    return max(min(max_context * max_batch_size, affordable), min(max_context, 2048))


def available_bytes(device: torch.device) -> int:
    """Memory that can be had now: free device memory on CUDA, `MemAvailable` (or free pages) on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return int(os.sysconf("SC_PHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE")) // 2
    except (ValueError, OSError, AttributeError):
        return 4 << 30


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's zeros come from calloc: the system hands out pages on first write, torch.zeros touches them all. They lie
    # 16 bytes off a cache line, where every second vector would straddle two.
    count = int(np.prod(shape)) * dtype.itemsize
    raw = np.zeros(count + CACHE_LINE, dtype=np.uint8)
    first = -raw.ctypes.data % CACHE_LINE
    return torch.from_numpy(raw[first : first + count]).view(dtype).view(shape)
