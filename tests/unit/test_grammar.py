"""JSON schemas as token masks."""

from __future__ import annotations

import json
import random

import pytest

from engine.core.vocabulary import Vocabulary
from engine.grammar import GrammarError, JsonGrammar, grammar_factory

pytest.importorskip("llguidance")

PIECES = [bytes([code]) for code in range(32, 127)] + [b'{"', b'":', b'", "', b"true", b"false", b"12"]
EOS = len(PIECES)
WORDS = Vocabulary(token_bytes=(*PIECES, b"", b""), eos_ids=frozenset({EOS}), special={"<eos>": EOS, "<x>": EOS + 1})
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"age": {"type": "integer", "maximum": 99}, "ok": {"type": "boolean"}},
        "required": ["age", "ok"],
        "additionalProperties": False,
    }
)


def grammar(schema: str = SCHEMA) -> JsonGrammar:
    factory = grammar_factory(WORDS)
    assert factory is not None
    made = factory(schema)
    assert isinstance(made, JsonGrammar)
    return made


def legal(state: JsonGrammar) -> set[int]:
    mask = state.mask()
    return {token for token in range(len(WORDS.token_bytes)) if mask[token // 8] >> token % 8 & 1}


def write(state: JsonGrammar, seed: int) -> str:
    """A random walk along the masks until the answer must end."""
    chance, text = random.Random(seed), b""
    for _ in range(400):
        if state.is_done():
            return text.decode()
        token = chance.choice(sorted(legal(state)))
        assert state.advance(token)
        if token == EOS:
            return text.decode()
        text += WORDS.token_bytes[token]
    raise AssertionError(text)


def test_whatever_is_drawn_from_the_masks_matches_the_schema() -> None:
    for seed in range(20):
        answer = json.loads(write(grammar(), seed))
        assert set(answer) == {"age", "ok"}
        assert isinstance(answer["age"], int)
        assert answer["age"] <= 99


def test_an_answer_may_not_end_before_it_is_complete_and_a_special_token_is_never_legal() -> None:
    state = grammar()
    assert EOS not in legal(state)
    assert EOS + 1 not in legal(state)


def test_an_illegal_token_is_refused_and_changes_nothing() -> None:
    state = grammar()
    before = state.mask()
    assert state.advance(PIECES.index(b"x")) is False
    assert state.mask() == before


def test_a_copy_goes_its_own_way() -> None:
    state = grammar()
    other = state.copy()
    assert other.advance(PIECES.index(b"{"))
    assert state.mask() != other.mask()
    assert state.advance(PIECES.index(b"{"))
    assert state.mask() == other.mask()


@pytest.mark.parametrize("schema", ["{", "[]", '"x"', '{"type": "nothing"}', '{"$ref": "#/nowhere"}', "x" * 300_000])
def test_a_schema_that_cannot_be_followed_is_one_sentence(schema: str) -> None:
    with pytest.raises(GrammarError, match=r"schema"):
        grammar(schema)
