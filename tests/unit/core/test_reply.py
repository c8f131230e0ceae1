"""Reply text: whole characters, and never the beginning of a stop string."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from engine.core.reply import ReplyText


def feed(text: ReplyText, *parts: str) -> list[str]:
    return [text.push(part.encode()) for part in parts]


def test_half_a_character_is_held_back() -> None:
    text = ReplyText()
    emoji = "🙂".encode()
    assert text.push(emoji[:2]) == ""
    assert text.push(emoji[2:]) == "🙂"


def test_a_character_that_never_completes_is_shown_as_replacement() -> None:
    text = ReplyText()
    text.push("é".encode()[:1])
    assert text.finish() == "\ufffd"


def test_a_stop_string_is_found_across_token_borders() -> None:
    text = ReplyText(["END"])
    assert feed(text, "the E", "N", "D of it") == ["the ", "", ""]
    assert text.stopped
    assert text.finish() == ""


def test_what_only_looked_like_a_stop_string_is_sent_after_all() -> None:
    text = ReplyText(["END"])
    assert feed(text, "an EN", "vy") == ["an ", "ENvy"]


def test_the_held_back_tail_is_text_when_the_reply_ends_otherwise() -> None:
    text = ReplyText(["END"])
    feed(text, "so EN")
    assert text.finish() == "EN"


def test_the_earliest_of_several_stop_strings_wins() -> None:
    text = ReplyText(["cd", "bc"])
    assert feed(text, "abcd") == ["a"]


@given(st.text(alphabet="abc", max_size=30), st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3))
def test_any_split_gives_the_text_before_the_first_stop(whole: str, stops: list[str]) -> None:
    text, got = ReplyText(stops), ""
    for letter in whole:
        got += text.push(letter.encode())
        if text.stopped:
            break
    got += text.finish()
    ends = [whole.find(stop) + len(stop) for stop in stops if stop in whole]
    first_end = min(ends, default=None)
    seen = whole if first_end is None else whole[:first_end]
    cut = min((seen.find(stop) for stop in stops if stop in seen), default=len(seen))
    assert got == seen[:cut]
