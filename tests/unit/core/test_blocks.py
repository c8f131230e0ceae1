"""The block pool: exact accounting, content-addressed reuse, eviction by least recent use."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from engine.core.blocks import BlockPool, OutOfBlocksError


def filled(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Blocks that hold `tokens`, known to the cache and given back."""
    blocks = pool.allocate(pool.blocks_for(len(tokens)))
    pool.remember(tokens, blocks)
    pool.release(blocks)
    return blocks


def test_asking_before_acting_never_raises() -> None:
    pool = BlockPool(2, 4)
    assert pool.can_allocate(2)
    assert not pool.can_allocate(3)
    with pytest.raises(OutOfBlocksError, match="3 KV blocks were asked for and 2 are available"):
        pool.allocate(3)


def test_a_prefix_is_found_in_whole_blocks_only() -> None:
    pool = BlockPool(8, 4)
    blocks = filled(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert pool.match([1, 2, 3, 4, 5, 6, 7, 8, 9, 10]) == blocks[:2]
    assert pool.match([1, 2, 3]) == []


def test_equal_tokens_after_another_prefix_are_no_hit() -> None:
    pool = BlockPool(8, 2)
    filled(pool, [1, 2, 3, 4])
    other = filled(pool, [9, 9, 5, 6])
    assert pool.match([9, 9, 3, 4]) == other[:1]


def test_idle_blocks_are_available_and_the_least_recently_used_goes_first() -> None:
    pool = BlockPool(3, 2)
    first, second = filled(pool, [1, 1]), filled(pool, [2, 2])
    pool.release(pool.match([1, 1]))
    assert (pool.used, pool.idle, pool.available) == (0, 2, 3)
    taken = pool.allocate(2)
    assert second[0] in taken
    assert first[0] not in taken
    assert pool.match([2, 2]) == []


def test_a_block_with_two_holders_stays_until_both_let_go() -> None:
    pool = BlockPool(4, 2)
    filled(pool, [1, 2])
    held, again = pool.match([1, 2]), pool.match([1, 2])
    pool.release(held)
    assert pool.used == 1
    pool.release(again)
    assert pool.used == 0


def test_tails_are_evicted_before_the_prefix_they_need() -> None:
    pool = BlockPool(3, 2)
    filled(pool, [1, 2, 3, 4])
    pool.allocate(2)
    assert len(pool.match([1, 2, 3, 4])) == 1


def test_trimming_forgets_the_least_recently_used_and_reuses_its_memory() -> None:
    pool = BlockPool(9, 2)
    old, new = pool.allocate(2), pool.allocate(2)
    for blocks, tokens in ((old, [1, 2, 3, 4]), (new, [5, 6, 7, 8])):
        pool.remember(tokens, blocks)
        pool.release(blocks)
    pool.trim(4)
    assert pool.idle == 4
    pool.trim(2)
    assert (pool.idle, pool.match([1, 2, 3, 4])) == (2, [])
    assert sorted(pool.allocate(2)) == sorted(old)
    assert pool.match([5, 6, 7, 8]) == new


def test_forgetting_idle_content_frees_it() -> None:
    pool = BlockPool(2, 2)
    filled(pool, [1, 2])
    pool.trim(0)
    assert pool.idle == 0
    assert pool.available == 2
    assert pool.match([1, 2]) == []


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 2), min_size=1, max_size=9)), max_size=40))
def test_free_idle_and_held_always_sum_to_the_pool(script: list[tuple[bool, list[int]]]) -> None:
    pool, held = BlockPool(6, 2), []
    for give_back, tokens in script:
        if give_back and held:
            pool.release(held.pop(0))
            continue
        blocks = pool.match(tokens)
        missing = pool.blocks_for(len(tokens)) - len(blocks)
        if pool.can_allocate(missing):
            blocks += pool.allocate(missing)
            pool.remember(tokens, blocks)
        held.append(blocks)
        owners = {block for table in held for block in table}
        assert pool.used == len(owners)
        assert pool.used + pool.available == pool.num_blocks
        assert pool.available == len(pool._free) + pool.idle
