"""How many tokens to draft: the least of lever, ladder, adaptive rung and room, with what bounded it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

Ladder = Sequence[tuple[int, int]]
"""(widest batch, drafts) with rising widths."""

ADAPTIVE_STEPS: Final = 12


def rung(ladder: Ladder, width: int) -> int:
    """Drafts for a batch of `width`; a batch wider than the last rung takes the last one's."""
    return next((drafts for widest, drafts in ladder if width <= widest), ladder[-1][1])


def draft_count(
    num_drafts: int, ladder: Ladder, width: int, adaptive: int | None = None, capacities: Iterable[int] = ()
) -> tuple[int, str]:
    """K and what bounded it: `num_drafts`, `ladder`, `adaptive` or `capacity`; never below 1.

    `capacities` are the drafts that each active slot has room for; none of them clamps when there are none."""
    bounds = [(num_drafts, "num_drafts"), (rung(ladder, width), "ladder")]
    if adaptive is not None:
        bounds.append((adaptive, "adaptive"))
    bounds.extend((capacity, "capacity") for capacity in capacities)
    drafts, reason = min(bounds, key=lambda bound: bound[0])
    return max(1, drafts), reason


@dataclass(slots=True)
class AdaptiveSuspend:
    """One sequence's own brake: drafting that was accepted too little pauses for some tokens."""

    recent: deque[int] = field(default_factory=lambda: deque(maxlen=ADAPTIVE_STEPS))
    suspended_tokens_left: int = 0

    @property
    def is_suspended(self) -> bool:
        return self.suspended_tokens_left > 0

    def observe_verify(self, accepted: int, least_mean: float, suspend_tokens: int) -> None:
        """Take in one verify step; a full record of 12 with a mean below `least_mean` suspends and is forgotten."""
        self.recent.append(accepted)
        if len(self.recent) == ADAPTIVE_STEPS and sum(self.recent) < least_mean * ADAPTIVE_STEPS:
            self.suspended_tokens_left = suspend_tokens
            self.recent.clear()

    def observe_emitted(self, tokens: int) -> None:
        """Count every emitted token, whichever lane emitted it, so that a pause always ends."""
        self.suspended_tokens_left = max(0, self.suspended_tokens_left - tokens)


def is_past_resume_guard(emitted: int, post_think_emitted: int, *, is_thinking: bool, guard: int) -> bool:
    """Whether enough tokens were decoded plainly: all of them inside thinking, else those of the answer."""
    return (emitted if is_thinking else post_think_emitted) >= guard
