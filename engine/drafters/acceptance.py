"""How often drafts are accepted: by position for drafters that guess, by match length for copies of the history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

MEMORY: Final = 0.985
"""Weight of a trial after the next one: about the last 70 count."""
PRIOR_TRIALS: Final = 2.0
FIRST_DRAFT_PRIOR: Final = 0.6
MATCH_PRIOR: Final = ((2, 0.5), (3, 0.6), (4, 0.7), (6, 0.76), (9, 0.82), (15, 0.9), (1 << 30, 0.96))
"""(match length up to, share of right next tokens) over the greedy replies of the default model to 144 prompts."""
_LONGEST: Final = 16
_BUCKETS: Final = tuple(next(i for i, (most, _) in enumerate(MATCH_PRIOR) if length <= most) for length in range(17))


@dataclass(slots=True)
class Share:
    """A share of hits with a prior and a fading memory."""

    prior: float
    hits: float = 0.0
    trials: float = 0.0

    def add(self, hit: bool) -> None:
        self.hits = self.hits * MEMORY + hit
        self.trials = self.trials * MEMORY + 1

    def fade(self) -> None:
        """Forget as much as a trial would have made forgotten."""
        self.hits *= MEMORY
        self.trials *= MEMORY

    @property
    def value(self) -> float:
        return (self.hits + PRIOR_TRIALS * self.prior) / (self.trials + PRIOR_TRIALS)

    @property
    def variance(self) -> float:
        """Of the value, as that of a binomial share."""
        value = self.value
        return value * (1 - value) / (self.trials + PRIOR_TRIALS)


@dataclass(slots=True)
class PositionAcceptance:
    """Share of drafts accepted at position 1, 2, ... given that all before were: exact for every smaller count too.

    A position beyond the drafts of late is forgotten step by step, back to what is known of the one before it: a draft
    that follows right ones is right at least as often. So a count that no longer runs is tried again when text turns
    easier."""

    at: list[Share] = field(default_factory=lambda: [Share(FIRST_DRAFT_PRIOR)])
    _curve: list[float] = field(default_factory=list)

    def add(self, drafted: int, accepted: int) -> None:
        self._curve.clear()
        reached = min(drafted, accepted + 1)
        while len(self.at) < reached:
            self.at.append(Share(self.at[-1].value))
        for position in range(reached):
            self.at[position].add(position < accepted)
        if drafted:
            for share in self.at[drafted:]:
                share.fade()

    def expected(self, most: int) -> list[float]:
        """Mean accepted of 0 to `most` drafts at least."""
        if len(self._curve) <= most:
            shares, value = [], self.at[0].prior
            for share in self.at[:most]:
                share.prior = value
                value = share.value
                shares.append(value)
            shares.extend([value] * (most - len(shares)))
            self._curve = _means(shares)
        return self._curve


@dataclass(slots=True)
class MatchAcceptance:
    """Share of right next tokens by length of the match; learned from every emitted token, drafted or not."""

    by_length: list[Share] = field(default_factory=lambda: [Share(prior) for _, prior in MATCH_PRIOR])
    _values: list[float] = field(default_factory=lambda: [prior for _, prior in MATCH_PRIOR])

    def observe_match(self, match_len: int, *, hit: bool) -> None:
        bucket = _BUCKETS[min(match_len, _LONGEST)]
        share = self.by_length[bucket]
        share.add(hit)
        self._values[bucket] = share.value

    def expected(self, match_len: int, most: int) -> list[float]:
        """Mean accepted of 0 to `most` copied tokens: each that is right makes the match one longer."""
        values = self._values
        short = [values[bucket] for bucket in _BUCKETS[match_len : match_len + most]]
        return _means(short + [values[_BUCKETS[_LONGEST]]] * (most - len(short)))


def _means(shares: Sequence[float]) -> list[float]:
    """Expected right drafts in a row, for every count, from the shares right after right ones."""
    total, reached, means = 0.0, 1.0, [0.0]
    for share in shares:
        reached *= share
        total += reached
        means.append(total)
    return means


@dataclass(slots=True)
class Calibration:
    """What a drafter's stated confidence is worth, in ten bins."""

    bins: list[Share] = field(default_factory=lambda: [Share((i + 0.5) / 10) for i in range(10)])

    def add(self, confidences: Sequence[float], accepted: int) -> None:
        for position, confidence in enumerate(confidences[: accepted + 1]):
            self._bin(confidence).add(position < accepted)

    def value(self, confidence: float) -> float:
        return self._bin(confidence).value

    def _bin(self, confidence: float) -> Share:
        return self.bins[min(9, max(0, int(confidence * 10)))]
