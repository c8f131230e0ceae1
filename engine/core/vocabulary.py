"""What the scheduler must know of a tokenizer: the bytes of every token and the special ids by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Plain data, built by `engine.text` from the model file; no tokenizer library behind it."""

    token_bytes: tuple[bytes, ...]
    """UTF-8 bytes that each id stands for; empty for special tokens, which no client sees as text."""
    eos_ids: frozenset[int]
    """Every id that ends a reply."""
    special: Mapping[str, int] = field(default_factory=dict)
    """Special tokens by their spelling, e.g. `<think>`; a model without one switches its stage off."""

    def bytes_of(self, token: int) -> bytes:
        """The bytes of an id; none for the ids that pad a model's vocabulary beyond its tokenizer."""
        return self.token_bytes[token] if token < len(self.token_bytes) else b""

    def id_of(self, name: str) -> int | None:
        return self.special.get(name)
