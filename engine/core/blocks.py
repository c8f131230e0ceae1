"""The KV block pool: who holds which block, and which full blocks of past prompts can be used again.

A block is free, held (by one or more sequences), or idle: nobody holds it, but its content is known and a
later prompt with the same tokens may take it. Idle blocks count as available and are evicted least recently
used first. `free + idle + held == num_blocks` always (tests/unit/core/test_blocks.py).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence


class OutOfBlocksError(RuntimeError):
    """More blocks were asked for than are available; callers ask `can_allocate` first."""


def chain_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Digest of one full block given that of the block before it, so that equal digests mean equal prefixes."""
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


class BlockPool:
    """Blocks `0..num_blocks-1` of `block_size` tokens each."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders = [0] * num_blocks
        self._digest_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.used = 0
        """Blocks that somebody holds."""

    @property
    def available(self) -> int:
        return self.num_blocks - self.used

    @property
    def idle(self) -> int:
        return len(self._idle)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def can_allocate(self, count: int) -> bool:
        return count <= self.available

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with unknown content, each held once. Raises `OutOfBlocksError`."""
        if not self.can_allocate(count):
            raise OutOfBlocksError(f"{count} KV blocks were asked for and {self.available} are available.")
        return [self._take() for _ in range(count)]

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one hold on each. Later blocks become idle first, so that a prefix outlives its tails."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self.used -= 1
                if block in self._digest_of:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Blocks that already hold the longest prefix of `tokens` in whole blocks; each is held once more."""
        found: list[int] = []
        digest = b""
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            digest = chain_digest(digest, tokens[start : start + self.block_size])
            block = self._block_of.get(digest)
            if block is None:
                break
            self._hold(block)
            found.append(block)
        return found

    def remember(self, tokens: Sequence[int], blocks: Sequence[int], parent: bytes = b"", start: int = 0) -> bytes:
        """State that `blocks[i]` holds the `i`-th whole block of `tokens`, from block `start` on, whose parent's
        digest is `parent`. Returns the digest of the last whole block, to go on from."""
        size = self.block_size
        for index in range(start, len(tokens) // size):
            parent = chain_digest(parent, tokens[index * size : (index + 1) * size])
            block = blocks[index]
            if parent not in self._block_of and block not in self._digest_of:
                self._block_of[parent] = block
                self._digest_of[block] = parent
        return parent

    def trim(self, most: int) -> None:
        """Forget the least recently used idle blocks beyond `most`; the next allocations take just these."""
        while len(self._idle) > most:
            self._free.append(self._evict())

    def _hold(self, block: int) -> None:
        self.used += not self._holders[block]
        self._holders[block] += 1
        self._idle.pop(block, None)

    def _take(self) -> int:
        block = self._free.pop() if self._free else self._evict()
        self._holders[block] = 1
        self.used += 1
        return block

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        del self._block_of[self._digest_of.pop(block)]
        return block
