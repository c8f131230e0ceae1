"""Grammars for structured answers: JSON schemas as token masks, by the llguidance library (`metrale[grammar]`)."""

from __future__ import annotations

import importlib.util
from typing import Any

from engine.core.context import GrammarFactory
from engine.core.vocabulary import Vocabulary

MAX_SCHEMA_CHARS = 200_000


class GrammarError(ValueError):
    """A schema that cannot be followed; one sentence."""


class JsonGrammar:
    """State of one answer; implements `engine.core.context.Grammar`."""

    def __init__(self, matcher: Any, mask_bytes: int) -> None:
        self._matcher = matcher
        self._mask_bytes = mask_bytes

    def mask(self) -> bytes:
        """Legal next tokens, lowest bit of byte 0 first; end tokens are among them where the answer may end."""
        mask: bytes = self._matcher.compute_bitmask()
        return mask[: self._mask_bytes]

    def advance(self, token: int) -> bool:
        if self._matcher.validate_tokens([token]) != 1:
            return False
        return bool(self._matcher.consume_token(token))

    def is_done(self) -> bool:
        """Nothing but the end may follow."""
        return bool(self._matcher.is_stopped())

    def copy(self) -> JsonGrammar:
        return JsonGrammar(self._matcher.deep_copy(), self._mask_bytes)


class _Words:
    """The vocabulary in the shape that the library reads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        names = {token: name.encode() for name, token in vocabulary.special.items()}
        self.eos_token_id = min(vocabulary.eos_ids)
        self.bos_token_id = None
        self.tokens = [
            piece or names.get(token, f"<|unused {token}|>".encode())
            for token, piece in enumerate(vocabulary.token_bytes)
        ]
        self.special_token_ids = [token for token, piece in enumerate(vocabulary.token_bytes) if not piece]
        self._by_bytes = {piece: token for token, piece in enumerate(vocabulary.token_bytes) if piece}
        self._longest = max(map(len, self._by_bytes), default=1)

    def __call__(self, text: bytes) -> list[int]:
        """Greedy tokens of forced text; only a hint to the library, masks do not depend on it."""
        found, at = [], 0
        while at < len(text):
            for size in range(min(self._longest, len(text) - at), 0, -1):
                token = self._by_bytes.get(text[at : at + size])
                if token is not None:
                    found.append(token)
                    at += size
                    break
            else:
                at += 1
        return found


def grammar_factory(vocabulary: Vocabulary) -> GrammarFactory | None:
    """Makes grammars for this vocabulary; None where the library is not installed. The library loads at first use."""
    if importlib.util.find_spec("llguidance") is None or not vocabulary.eos_ids:
        return None
    return _Factory(vocabulary)


class _Factory:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokenizer: Any = None

    def __call__(self, schema: str) -> JsonGrammar:
        """A fresh grammar. Raises `GrammarError` for a schema that cannot be followed."""
        from llguidance import LLMatcher

        if len(schema) > MAX_SCHEMA_CHARS:
            raise GrammarError(f"The JSON schema has {len(schema)} characters; at most {MAX_SCHEMA_CHARS} are taken.")
        tokenizer = self._tokenizer = self._tokenizer or self._open()
        try:
            matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(schema), log_level=0)
        except ValueError as error:
            raise GrammarError(f"The JSON schema cannot be read: {_line(error)}.") from None
        if matcher.is_error():
            raise GrammarError(f"The JSON schema cannot be followed: {_line(matcher.get_error())}.")
        return JsonGrammar(matcher, (len(self._vocabulary.token_bytes) + 7) // 8)

    def _open(self) -> Any:
        from llguidance import LLTokenizer, TokenizerWrapper

        words = TokenizerWrapper(_Words(self._vocabulary))
        return LLTokenizer(words, eos_token=sorted(self._vocabulary.eos_ids), slices=LLTokenizer.json_slices())


def _line(error: object) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")[:300]
