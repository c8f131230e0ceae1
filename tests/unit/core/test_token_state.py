"""The fold over emitted tokens: thinking, tools, fences, counts and budget."""

from __future__ import annotations

from collections import Counter

from engine.core.token_state import MAX_DEFERRALS, Markers, TokenState
from tests.fakes.scripted_device import THINKING_SPECIAL, vocabulary

WORDS = vocabulary(THINKING_SPECIAL)
MARKERS = Markers.of(WORDS)
THINK, CLOSE = THINKING_SPECIAL["<think>"], THINKING_SPECIAL["</think>"]
TOOL, TOOL_END = THINKING_SPECIAL["<tool_call>"], THINKING_SPECIAL["</tool_call>"]


def say(state: TokenState, *tokens: int | str) -> TokenState:
    for token in tokens:
        if isinstance(token, str):
            for letter in token:
                state.advance(0, letter.encode())
        else:
            state.advance(token, b"")
    return state


def test_answer_tokens_count_from_the_first_when_there_is_no_thinking() -> None:
    assert say(TokenState(Markers()), "abc").post_think == 3


def test_answer_tokens_start_again_when_thinking_closes() -> None:
    state = say(TokenState(MARKERS), "a", THINK, "bcd", CLOSE)
    assert state.post_think == 0
    assert state.thought_closed
    assert say(state, "ef").post_think == 2


def test_a_prompt_may_end_inside_thinking() -> None:
    state = say(TokenState(MARKERS, thinking=True), "ab")
    assert (state.think_tokens, state.post_think) == (2, 0)


def test_the_budget_waits_for_a_boundary() -> None:
    state = say(TokenState(MARKERS, budget=3, thinking=True), "abcd")
    assert not state.force_close
    assert say(state, ".").force_close


def test_the_budget_never_waits_longer_than_its_deferrals() -> None:
    state = say(TokenState(MARKERS, budget=1, thinking=True), "a" * MAX_DEFERRALS)
    assert not state.force_close
    assert say(state, "a").force_close


def test_a_boundary_inside_a_code_fence_does_not_count() -> None:
    state = say(TokenState(MARKERS, budget=1, thinking=True), "```x\n")
    assert state.in_fence
    assert not state.force_close
    assert say(state, "```\n").force_close


def test_a_fence_is_seen_across_tokens_and_longer_runs_toggle_once() -> None:
    state = TokenState(Markers())
    for piece in (b"``", b"`py", b"code", b"````"):
        state.advance(0, piece)
    assert not state.in_fence


def test_mid_word_means_a_letter_or_half_a_character_at_the_end() -> None:
    assert say(TokenState(Markers()), "ab").mid_word
    assert not say(TokenState(Markers()), "ab.").mid_word
    half = TokenState(Markers())
    half.advance(0, "é".encode()[:1])
    assert half.mid_word


def test_a_tool_call_is_open_between_its_markers() -> None:
    state = say(TokenState(MARKERS), TOOL, "x")
    assert state.in_tool
    assert state.structured
    assert not say(state, TOOL_END).in_tool
    assert state.tool_opened


def test_a_fork_does_not_touch_its_origin() -> None:
    state = say(TokenState(MARKERS, counts=Counter()), "a")
    fork = say(state.fork(), THINK, "b")
    assert fork.thinking
    assert not state.thinking
    assert state.counts == {0: 1}
