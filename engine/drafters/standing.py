"""Where each base of the arbiter stands: how current its evidence is, what a probe costs, what was delivered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from engine.core.device import DrafterName

RATE_MEMORY: Final = 0.98
MUCH_UNREAD: Final = 64
"""Tokens; to read fewer of them is part of what drafting costs."""
READ_WEIGHT: Final = 0.2
FIRST_TOKENS: Final = 96.0
"""What a reply is expected to be worth before any has ended."""
TOKENS_WEIGHT: Final = 0.25

MOST_DOUBLINGS: Final = 2

Base = DrafterName | None
"""What runs where nothing better is at hand: plain, or one drafter that guesses."""


@dataclass(slots=True)
class Probe:
    base: Base
    steps: int = 0
    lost_ns: float = 0.0


@dataclass(slots=True)
class Delivered:
    """Tokens and time of late: the throughput that clients really got."""

    tokens: float = 0.0
    wall_ns: float = 0.0
    steps: int = 0

    def add(self, tokens: int, wall_ns: int) -> None:
        self.tokens = self.tokens * RATE_MEMORY + tokens
        self.wall_ns = self.wall_ns * RATE_MEMORY + wall_ns
        self.steps += 1

    @property
    def rate(self) -> float:
        """Tokens per nanosecond."""
        return self.tokens / self.wall_ns if self.wall_ns else 0.0


@dataclass(slots=True)
class Standing:
    """How current the evidence about a base is, and how often it beat the running one, each time on new evidence."""

    is_measured: bool = False
    is_stale: bool = False
    age_tokens: int = 0
    wins: int = 0
    is_confirming: bool = False
    rests_until: int = 0
    """Age until which nobody need ask whether a probe is due."""
    far_losses: int = 0
    """Probes in a row that ended far behind."""

    def note_measured(self) -> None:
        self.is_measured, self.is_stale, self.age_tokens, self.rests_until = True, False, 0, 0

    def note_loss(self, far: bool, interval: int) -> None:
        """A probe lost; the further it was behind, again and again, the longer until the next."""
        self.far_losses = self.far_losses + 1 if far else 0
        self.rests_until = interval * 2 ** min(self.far_losses, MOST_DOUBLINGS) if far else 0

    def is_due(self, age_tokens: int) -> bool:
        """Whether a probe is wanted: something happened, or the evidence is `age_tokens` old."""
        return self.is_stale or self.is_confirming or self.age_tokens >= age_tokens


@dataclass(slots=True)
class Reading:
    """What a draft head has yet to read before it can draft, and whether that pays for the reply that runs."""

    unread: int = 0
    """Tokens: a new reply's whole context, then what was emitted without the head."""
    token_ns: float = 0.0
    """What reading one took of late."""
    usual_tokens: float = FIRST_TOKENS
    """Tokens of a reply that its base emits; copies are made whatever the base is."""
    _tokens: int = 0

    @property
    def is_much(self) -> bool:
        return self.unread >= MUCH_UNREAD

    @property
    def cost_ns(self) -> float:
        return self.unread * self.token_ns if self.is_much else 0.0

    def begin(self, depth: int) -> None:
        """Another reply runs, `depth` tokens into its context."""
        if self._tokens:
            self.usual_tokens += TOKENS_WEIGHT * (self._tokens - self.usual_tokens)
        self.unread, self._tokens = depth, 0

    def note_unread(self, emitted: int, *, copied: bool) -> None:
        """A step ran without the head."""
        self.unread += emitted
        self._tokens += 0 if copied else emitted

    def note_read(self, emitted: int, spent_ns: float) -> None:
        """A head drafted, which took `spent_ns` longer than drafting alone does."""
        if self.is_much:
            sample = max(0.0, spent_ns) / self.unread
            self.token_ns += (READ_WEIGHT if self.token_ns else 1.0) * (sample - self.token_ns)
        self.unread = 0
        self._tokens += emitted

    def pays(self, rate: float, rate_without: float) -> bool:
        """Whether a head that delivers `rate` (tokens/ns) earns the time back against `rate_without`, without it."""
        if not self.cost_ns or not rate or not rate_without:
            return True
        expected = max(self.usual_tokens, self._tokens)
        return expected * (1 / rate_without - 1 / rate) >= self.cost_ns
