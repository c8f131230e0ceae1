"""Where each base of the arbiter stands: how current its evidence is, what a probe costs, what was delivered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from engine.core.device import DrafterName

RATE_MEMORY: Final = 0.98

Base = DrafterName | None
"""What runs where nothing better is at hand: plain, or one drafter that guesses."""


@dataclass(slots=True)
class Probe:
    base: Base
    steps_left: int
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
    wait: float = 1.0
    """Share of the usual interval between two probes: short where the next may well tell another tale."""

    def note_measured(self) -> None:
        self.is_measured, self.is_stale, self.age_tokens = True, False, 0
