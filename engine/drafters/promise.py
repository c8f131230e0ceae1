"""What a step of an arm promises: expected tokens, expected time, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from engine.core.device import DrafterName
from engine.drafters.acceptance import Calibration, MatchAcceptance, PositionAcceptance
from engine.drafters.arms import ArmKey, arm_of
from engine.drafters.costs import CostTable

FIRST_GUESS: Final = 3
"""Drafts to begin with, before any cost is known."""


@dataclass(slots=True)
class Promises:
    """All that was learned from steps: costs by width bucket, acceptance by drafter."""

    matches: MatchAcceptance = field(default_factory=MatchAcceptance)
    acceptance: dict[DrafterName, PositionAcceptance] = field(default_factory=dict)
    calibration: dict[DrafterName, Calibration] = field(default_factory=dict)
    tables: dict[int, CostTable] = field(default_factory=dict)
    costs: CostTable = field(default_factory=CostTable)
    """The table of the bucket that runs now."""
    bucket: int = 1
    width: int = 1
    match_len: int = 0

    def note(self, bucket: int, width: int, match_len: int) -> None:
        """Look at a step to come."""
        if bucket != self.bucket or not self.tables:
            self.costs = self.tables.setdefault(bucket, CostTable())
            self.costs.note_return()
        self.bucket, self.width, self.match_len = bucket, max(width, 1), match_len

    def accepts(self, drafter: DrafterName) -> PositionAcceptance:
        found = self.acceptance.get(drafter)
        if found is None:
            found = self.acceptance[drafter] = PositionAcceptance()
        return found

    def calibrated(self, drafter: DrafterName) -> Calibration:
        return self.calibration.setdefault(drafter, Calibration())

    def accepted(self, drafter: DrafterName | None, most: int) -> list[float]:
        """Expected accepted per sequence of 0 to `most` drafts."""
        match drafter:
            case None:
                return [0.0] * (most + 1)
            case DrafterName.NGRAM:
                return self.matches.expected(self.match_len, most)
            case _:
                return self.accepts(drafter).expected(most)

    def rate(self, arm: ArmKey) -> float:
        """Expected tokens per nanosecond; 0 where no cost is known."""
        wall_ns = self.costs.step_ns(arm.drafter, arm.drafts)
        return self.width * (1 + self.accepted(arm.drafter, arm.drafts)[arm.drafts]) / wall_ns if wall_ns else 0.0

    def best(self, drafter: DrafterName | None, counts: Sequence[int], price: float) -> tuple[ArmKey, float]:
        """The draft count that wins most tokens over spending the step's time at `price` tokens per nanosecond; of
        several that win as much the largest. `counts` rise."""
        most = counts[-1]
        curve, accepted, width = self.costs.curve(drafter, most), self.accepted(drafter, most), self.width
        if curve is None:
            return arm_of(drafter, min(counts, key=lambda drafts: abs(drafts - FIRST_GUESS))), 0.0
        hopeful, price = curve.hopeful, price * self.costs.scale
        best, most_worth = most, -math.inf
        for drafts in counts:
            worth = width * (1 + accepted[drafts]) - price * hopeful[drafts]
            if worth >= most_worth:
                best, most_worth = drafts, worth
        return arm_of(drafter, best), most_worth

    def fastest(self, drafter: DrafterName | None, counts: Sequence[int]) -> tuple[ArmKey, float]:
        """The draft count that promises most tokens per nanosecond, and how many; 0 where no cost is known."""
        most = counts[-1]
        curve = self.costs.curve(drafter, most)
        if curve is None:
            return arm_of(drafter, min(counts, key=lambda drafts: abs(drafts - FIRST_GUESS))), 0.0
        accepted, hopeful = self.accepted(drafter, most), curve.hopeful
        drafts = max(counts, key=lambda drafts: (1 + accepted[drafts]) / hopeful[drafts])
        return arm_of(drafter, drafts), self.width * (1 + accepted[drafts]) / (hopeful[drafts] * self.costs.scale)

    def worth(self, arm: ArmKey, price: float) -> float:
        """Tokens that a step wins over spending its time at `price`; none where no cost is known."""
        curve = self.costs.curve(arm.drafter, arm.drafts)
        if curve is None:
            return 0.0
        tokens = self.width * (1 + self.accepted(arm.drafter, arm.drafts)[arm.drafts])
        return tokens - price * self.costs.scale * curve.hopeful[arm.drafts]

    def bound(self, drafter: DrafterName | None, counts: Sequence[int]) -> float:
        """Tokens per nanosecond if every draft were accepted; 0 where no cost is known."""
        curve = self.costs.curve(drafter, counts[-1])
        if curve is None:
            return 0.0
        return self.width * max((1 + drafts) / curve.expected[drafts] for drafts in counts) / self.costs.scale

    def uncertainty(self, drafter: DrafterName | None, drafts: int) -> float:
        """Relative standard error of the rate."""
        of_cost = self.costs.error(drafts)
        if drafter is None or drafter is DrafterName.NGRAM:
            return of_cost
        accepts = self.accepts(drafter)
        first = accepts.at[0]
        accepted = accepts.expected(drafts)[drafts]
        of_tokens = math.sqrt(first.variance) / max(first.value, 0.05) * accepted / (1 + accepted)
        return math.hypot(of_cost, of_tokens)

    def best_prefix(self, drafter: DrafterName, confidences: Sequence[float], price: float) -> int:
        """How many of some drafts to verify, at least 1: each must be worth the row that it adds."""
        calibration, curve = self.calibrated(drafter), self.costs.curve(None, len(confidences))
        if curve is None:
            return len(confidences)
        price *= self.costs.scale
        best, best_worth, accepted, reached = 1, -math.inf, 0.0, 1.0
        for count, confidence in enumerate(confidences, start=1):
            reached *= calibration.value(confidence)
            accepted += reached
            worth = self.width * (1 + accepted) - price * curve.expected[count]
            if worth > best_worth:
                best, best_worth = count, worth
        return best
