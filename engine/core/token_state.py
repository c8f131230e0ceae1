"""What the processor chain must know of the tokens so far: thinking, tools, grammar, counts, the edge of the text.

A pure fold over emitted tokens. A verify step forks it and folds its drafts in, so that every row is planned as
plain decoding would have planned it; preemption keeps it as it is.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from engine.core.context import Grammar
from engine.core.vocabulary import Vocabulary

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
TOOL_OPEN, TOOL_CLOSE = "<tool_call>", "</tool_call>"
MAX_DEFERRALS = 64
_BOUNDARY = b".!?\n"
_BACKTICK, _FENCE = ord("`"), 3


@dataclass(frozen=True, slots=True)
class Markers:
    """The special tokens that steer the chain; None where the model has none, which switches the stage off."""

    think_open: int | None = None
    think_close: int | None = None
    tool_open: int | None = None
    tool_close: int | None = None

    @classmethod
    def of(cls, vocabulary: Vocabulary) -> Markers:
        names = (THINK_OPEN, THINK_CLOSE, TOOL_OPEN, TOOL_CLOSE)
        return cls(*(vocabulary.id_of(name) for name in names))

    @property
    def any(self) -> bool:
        return self.think_close is not None or self.tool_open is not None


@dataclass(slots=True)
class TokenState:
    """The fold. `budget` < 0 means that thinking is unbounded; `counts` is kept only for penalties."""

    markers: Markers
    budget: int = -1
    counts: Counter[int] | None = None
    grammar: Grammar | None = None
    emitted: int = 0
    thinking: bool = False
    think_tokens: int = 0
    thought_closed: bool = False
    post_think: int = 0
    """Answer tokens: those after `</think>`, or all of them when there was no thinking."""
    in_tool: bool = False
    tool_opened: bool = False
    in_fence: bool = False
    deferrals: int = 0
    force_close: bool = False
    ticks: int = 0
    """Backticks at the end of the text."""
    last: bytes = b""
    """The last byte of the text."""

    def fork(self) -> TokenState:
        return replace(
            self,
            counts=None if self.counts is None else self.counts.copy(),
            grammar=None if self.grammar is None else self.grammar.copy(),
        )

    def advance(self, token: int, data: bytes) -> None:
        """Fold in one emitted token and the bytes that it stands for."""
        self.emitted += 1
        if self.counts is not None:
            self.counts[token] += 1
        if self.grammar is not None and not self.thinking:
            self.grammar.advance(token)
        self._note_text(data)
        if self.markers.any:
            self._note_markers(token)
        if self.thinking:
            self.think_tokens += 1
            self._note_budget()
        else:
            self.post_think += 1

    @property
    def mid_word(self) -> bool:
        """The text ends inside a word (or inside a character)."""
        return self.last != b"" and (self.last.isalnum() or self.last in b"_-'" or self.last[0] >= 0x80)

    @property
    def structured(self) -> bool:
        """Inside code, a tool call or a grammar, where `adaptive_sampling` sharpens."""
        return self.in_fence or self.in_tool or (self.grammar is not None and not self.thinking)

    def _note_text(self, data: bytes) -> None:
        if not data:
            return
        if self.ticks or b"`" in data:
            for byte in data:
                self.ticks = self.ticks + 1 if byte == _BACKTICK else 0
                self.in_fence ^= self.ticks == _FENCE
        self.last = data[-1:]

    def _note_markers(self, token: int) -> None:
        marks = self.markers
        if token == marks.think_open:
            self.thinking = True
        elif token == marks.think_close:
            self.thinking, self.thought_closed, self.force_close = False, True, False
            self.post_think = -1
        elif token == marks.tool_open:
            self.in_tool = self.tool_opened = True
        elif token == marks.tool_close:
            self.in_tool = False

    def _note_budget(self) -> None:
        if self.budget < 0 or self.think_tokens < self.budget:
            return
        at_boundary = not self.in_fence and self.last != b"" and self.last in _BOUNDARY
        if at_boundary or self.deferrals >= MAX_DEFERRALS:
            self.force_close = True
        else:
            self.deferrals += 1
