"""The content-loop watchdog against its definition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.lanes.emit import LOOP_FROM, is_looping


def is_looping_by_definition(tokens: list[int]) -> bool:
    return len(tokens) >= LOOP_FROM and any(
        len(tokens) >= 3 * period
        and tokens[-period:] == tokens[-2 * period : -period] == tokens[-3 * period : -2 * period]
        for period in range(2, 65)
    )


@given(
    st.lists(st.integers(0, 2), max_size=60), st.lists(st.integers(0, 2), min_size=1, max_size=70), st.integers(1, 40)
)
def test_a_reply_loops_exactly_when_its_end_repeats_three_times(
    opening: list[int], phrase: list[int], times: int
) -> None:
    tokens = opening + phrase * times
    for cut in range(3):
        assert is_looping(tokens[: len(tokens) - cut]) == is_looping_by_definition(tokens[: len(tokens) - cut])


def test_the_longest_and_the_shortest_period_count_and_none_beyond() -> None:
    assert is_looping([*range(100), *list(range(64)) * 3])
    assert not is_looping([*range(100), *list(range(65)) * 3])
    assert is_looping([7, 8] * 24)
    assert not is_looping([7, 8] * 23)
