"""The n-gram index against a plain search, and its copy window against the contract."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.drafters.ngram import NgramIndex, NgramSettings
from engine.levers.resolve import LeverState

TOKENS = st.lists(st.integers(0, 3), max_size=60)


def index_of(tokens: list[int], **settings: int) -> NgramIndex:
    index = NgramIndex(NgramSettings(**settings))
    index.extend(tokens)
    return index


def search(history: list[int], shortest: int, longest: int, count: int) -> tuple[int, tuple[int, ...]]:
    """Longest suffix that occurred before and what followed its latest occurrence, by looking everywhere."""
    for length in range(min(longest, len(history) - 1), shortest - 1, -1):
        for end in range(len(history) - 2, length - 2, -1):
            if history[end - length + 1 : end + 1] == history[-length:]:
                run = list(history)
                for i in range(count):
                    run.append(run[end + 1 + i])
                return length, tuple(run[len(history) :])
    return 0, ()


@given(TOKENS, st.integers(1, 3), st.integers(3, 16))
def test_it_finds_the_longest_suffix_and_its_latest_occurrence(history: list[int], shortest: int, longest: int) -> None:
    index = index_of(history, shortest=shortest, longest=longest)
    length, copied = search(history, shortest, longest, 5)
    assert index.copy(5) == copied
    assert length == 0 or index.match_len == length


@given(TOKENS)
def test_entering_tokens_one_by_one_or_at_once_is_the_same(history: list[int]) -> None:
    one_by_one = NgramIndex()
    for token in history:
        one_by_one.append(token)
    assert one_by_one.copy(4) == index_of(history).copy(4)


def test_the_history_includes_the_newest_token() -> None:
    """Without it the draft would be the newest token itself, which is known already."""
    index = index_of([1, 2, 3, 4, 9, 1, 2])
    assert index.propose(1) == (3,)
    index.append(3)
    assert index.propose(1) == (4,)


def test_it_copies_what_followed_the_latest_of_several_occurrences() -> None:
    assert index_of([1, 2, 7, 1, 2, 8, 1, 2]).propose(1) == (8,)


def test_a_longer_match_wins_over_a_later_one() -> None:
    assert index_of([5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2]).propose(1) == (7,)


def test_a_suffix_shorter_than_the_lever_is_no_match() -> None:
    assert index_of([1, 7, 1]).propose(4) == ()
    assert index_of([1, 7, 1], shortest=1).propose(1) == (7,)


def test_a_loop_is_copied_beyond_the_end_of_the_history() -> None:
    assert index_of([1, 2, 3, 1, 2, 3]).copy(7) == (1, 2, 3, 1, 2, 3, 1)


SHORT_MATCH = [1, *range(10, 60), 1]
"""Ends in a match of one token, below the length that is trusted."""


def test_the_window_starts_at_two_doubles_after_a_full_accept_and_is_capped() -> None:
    index = index_of(SHORT_MATCH, copy_max=10, shortest=1)
    widths = []
    for _ in range(5):
        drafts = index.propose(99)
        widths.append(len(drafts))
        index.observe(len(drafts), len(drafts))
    assert widths == [2, 4, 8, 10, 10]


def test_a_partial_accept_keeps_the_window_and_a_miss_halves_it() -> None:
    index = index_of([1, 2, 3] * 20)
    index.observe(2, 2)
    index.observe(4, 4)
    index.observe(8, 3)
    assert index.window == 8
    index.observe(8, 0)
    assert index.window == 4


def test_misses_back_off_one_two_four_steps_and_an_accept_ends_it() -> None:
    index = index_of(SHORT_MATCH, shortest=1)
    silent = []
    for _ in range(4):
        index.observe(1, 0)
        silent.append(next(count for count in range(100) if index.propose(8)))
    assert silent == [1, 2, 4, 8]
    index.observe(1, 1)
    index.observe(1, 0)
    assert (index.propose(8), len(index.propose(8))) == ((), 1)


def test_a_match_of_two_or_more_copies_two_more_than_it_matched_and_ignores_the_back_off() -> None:
    index = index_of([1, 2, 3, 4, 5, *range(10, 60), 1, 2, 3, 4, 5])
    index.observe(2, 0)
    assert index.propose(16) == (10, 11, 12, 13, 14, 15, 16)
    short = index_of([1, 2, *range(10, 60), 1, 2])
    short.observe(2, 0)
    assert short.propose(16) == (10, 11, 12, 13)


def test_a_step_that_drafted_nothing_says_nothing() -> None:
    index = index_of(SHORT_MATCH, shortest=1)
    index.observe(0, 0)
    assert len(index.propose(8)) == 2


def test_the_limit_of_the_caller_bounds_the_copy() -> None:
    index = index_of([1, 2, 3] * 20)
    assert index.propose(1) == (1,)
    assert index.propose(0) == ()


def test_emitted_tokens_teach_the_observer_and_prompts_do_not() -> None:
    seen: list[tuple[int, bool]] = []

    class Observer:
        def observe_match(self, match_len: int, *, hit: bool) -> None:
            seen.append((match_len, hit))

    index = NgramIndex(NgramSettings(), Observer())
    index.extend([1, 2, 3, 4, 1, 2])
    index.append(3)
    index.append(9)
    index.append(5)
    assert seen == [(2, True), (3, False)]


def test_a_token_costs_a_bounded_number_of_nodes() -> None:
    """Even a history of one repeated token, the worst for a search, grows by at most `longest` nodes a token."""
    index = index_of([7] * 3000, longest=16)

    def nodes(branch: object) -> int:
        assert isinstance(branch, dict)
        return sum(1 + (nodes(node.longer) if node.longer else 0) for node in branch.values())

    assert nodes(index._root) <= 17
    assert index.match_len == 16


@pytest.mark.parametrize(("lever", "value"), [("ngram_min", 3), ("ngram_max", 8), ("ngram_copy_max", 4)])
def test_settings_come_from_the_levers(lever: str, value: int) -> None:
    settings = NgramSettings.of(LeverState.of(**{lever: value}))
    assert {"ngram_min": settings.shortest, "ngram_max": settings.longest, "ngram_copy_max": settings.copy_max}[
        lever
    ] == value
