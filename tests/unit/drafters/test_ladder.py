"""Draft counts, the adaptive brake and the resume guard."""

from __future__ import annotations

import pytest

from engine.drafters.ladder import AdaptiveSuspend, draft_count, is_past_resume_guard
from engine.levers.resolve import LeverState

LADDER = LeverState.of().ladder


@pytest.mark.parametrize(("width", "drafts"), [(1, 3), (4, 3), (5, 3), (8, 3), (9, 1), (16, 1), (32, 1), (64, 1)])
def test_the_default_ladder_bounds_by_width(width: int, drafts: int) -> None:
    assert draft_count(15, LADDER, width)[0] == drafts


@pytest.mark.parametrize(
    ("num_drafts", "width", "adaptive", "capacities", "expected"),
    [
        (2, 1, None, (), (2, "num_drafts")),
        (15, 1, None, (), (3, "ladder")),
        (15, 1, 2, (), (2, "adaptive")),
        (15, 1, None, (7, 1, 9), (1, "capacity")),
        (3, 1, 3, (3, 3), (3, "num_drafts")),
    ],
)
def test_the_least_bound_wins_and_is_named(
    num_drafts: int, width: int, adaptive: int | None, capacities: tuple[int, ...], expected: tuple[int, str]
) -> None:
    assert draft_count(num_drafts, LADDER, width, adaptive, capacities) == expected


def test_at_least_one_token_is_drafted() -> None:
    assert draft_count(3, ((4, 0),), 1)[0] == 1
    assert draft_count(3, LADDER, 1, None, (0,))[0] == 1


def test_no_capacities_clamp_nothing() -> None:
    assert draft_count(3, LADDER, 1, None, ()) == (3, "num_drafts")


def test_twelve_steps_below_the_mean_suspend_and_eleven_do_not() -> None:
    brake = AdaptiveSuspend()
    for _ in range(11):
        brake.observe_verify(1, 2.0, 256)
    assert not brake.is_suspended
    brake.observe_verify(1, 2.0, 256)
    assert brake.is_suspended


def test_only_the_last_twelve_steps_count() -> None:
    brake = AdaptiveSuspend()
    for accepted in [9] * 12 + [1] * 10:
        brake.observe_verify(accepted, 2.0, 256)
    assert not brake.is_suspended
    brake.observe_verify(1, 2.0, 256)
    assert brake.is_suspended


def test_a_suspension_ends_after_its_tokens_however_they_were_emitted() -> None:
    brake = AdaptiveSuspend()
    for _ in range(12):
        brake.observe_verify(0, 2.0, 100)
    brake.observe_emitted(60)
    assert brake.is_suspended
    brake.observe_emitted(40)
    assert not brake.is_suspended
    brake.observe_verify(0, 2.0, 100)
    assert not brake.is_suspended, "the record starts anew"


@pytest.mark.parametrize(
    ("emitted", "answer", "thinking", "past"),
    [(10, 0, True, True), (9, 0, True, False), (500, 9, False, False), (500, 10, False, True)],
)
def test_the_resume_guard_counts_all_tokens_in_thinking_and_answer_tokens_after(
    emitted: int, answer: int, thinking: bool, past: bool
) -> None:
    assert is_past_resume_guard(emitted, answer, is_thinking=thinking, guard=10) is past
