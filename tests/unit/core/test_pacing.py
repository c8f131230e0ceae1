"""The pacer against a simulated device whose cost grows with rows and with the position of each."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from engine.core.pacing import FIRST_SLICE, KEPT, LEAST_SLICE, STRETCH, Pacer

MS = 1_000_000
Step = tuple[int, float]
"""Prompt rows of a mixed step and its ms."""


def cost_ms(rows: int, position: int) -> float:
    return 10 + rows * (1 + (position + rows / 2) / 1000)


def chatting(pacer: Pacer, gap_ms: float, drafts: int = 0, steps: int = KEPT) -> None:
    """A chat, whose own prompt came in with nobody beside it."""
    pacer.note_prefill(int((cost_ms(60, 0) - 8) * MS), 60, 30, is_mixed=False)
    for _ in range(steps):
        pacer.note_decode(int(gap_ms * MS), int((10 + drafts) * MS), drafts)


def prefill(pacer: Pacer, tokens: int, cost: Callable[[int, int], float] = cost_ms) -> list[Step]:
    """A prompt that comes in beside a chat."""
    steps: list[Step] = []
    at = 0
    while at < tokens:
        rows = pacer.slice(min(512, tokens - at), at)
        took = cost(rows, at)
        pacer.note_prefill(int(took * MS), rows, at + rows / 2, is_mixed=True)
        steps.append((rows, took))
        at += rows
    return steps


def test_a_mixed_step_fills_the_allowance_at_every_position() -> None:
    pacer = Pacer()
    chatting(pacer, gap_ms=20)
    took = [ms for _, ms in prefill(pacer, 4000)]
    assert max(took) < 1.1 * STRETCH * 20
    assert min(took[3:-1]) > 0.85 * STRETCH * 20


def test_the_time_that_speculation_would_take_goes_to_the_prompt() -> None:
    plain, speculating = Pacer(), Pacer()
    chatting(plain, gap_ms=10)
    chatting(speculating, gap_ms=20)
    assert len(prefill(speculating, 2000)) < 0.5 * len(prefill(plain, 2000))


def test_the_rows_of_drafts_are_not_taken_for_those_of_a_plain_step() -> None:
    pacer = Pacer()
    chatting(pacer, gap_ms=22, drafts=7)
    assert pacer.decode_ns == pytest.approx(10 * MS, rel=0.1)
    took = [ms for _, ms in prefill(pacer, 4000)]
    assert max(took) < 1.1 * STRETCH * 22
    assert min(took[4:-1]) > 0.85 * STRETCH * 22


def test_the_next_prompt_is_forecast_at_its_own_position() -> None:
    pacer = Pacer()
    chatting(pacer, gap_ms=20)
    first, second = prefill(pacer, 4000), prefill(pacer, 4000)
    assert max(ms for _, ms in second) < 1.15 * STRETCH * 20
    assert len(second) < 1.1 * len(first)
    assert pacer.row.far == pytest.approx(MS / 1000, rel=0.15)


def test_a_slice_at_most_doubles_whatever_was_measured() -> None:
    pacer = Pacer()
    chatting(pacer, gap_ms=1000)
    rows = [rows for rows, _ in prefill(pacer, 2000)]
    assert rows[0] == FIRST_SLICE
    assert all(later <= 2 * earlier for earlier, later in itertools.pairwise(rows))


def test_a_prompt_goes_on_where_no_slice_fits_the_allowance() -> None:
    pacer = Pacer()
    chatting(pacer, gap_ms=5)
    slices = [rows for rows, _ in prefill(pacer, 400)]
    assert set(slices[2:-1]) == {LEAST_SLICE}
    assert sum(slices) == 400


def test_the_allowance_follows_the_latest_gaps_and_not_a_few_long_ones() -> None:
    pacer = Pacer()
    chatting(pacer, gap_ms=20)
    chatting(pacer, gap_ms=90, steps=KEPT // 16)
    assert pacer.allowance_ns == STRETCH * 20 * MS
    chatting(pacer, gap_ms=10)
    assert pacer.allowance_ns == STRETCH * 10 * MS


def test_the_first_long_gap_of_a_chat_is_not_taken_for_its_usual_one() -> None:
    pacer = Pacer()
    chatting(pacer, gap_ms=200, steps=1)
    chatting(pacer, gap_ms=20, steps=5)
    assert pacer.allowance_ns == STRETCH * 20 * MS


def test_a_slice_never_exceeds_what_the_caller_can_feed() -> None:
    pacer = Pacer()
    assert pacer.slice(3, 0) == 3
    chatting(pacer, gap_ms=1000)
    assert all(rows <= 50 for rows, _ in prefill(pacer, 50))
