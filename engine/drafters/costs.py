"""What a step costs: wall time of a verify by drafts, and of drafting, learned from the steps that ran."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Final

from engine.core.device import DrafterName
from engine.drafters.arms import ArmKey

FIRST_SAMPLES: Final = 5
WEIGHT: Final = 0.03
COMMON_WEIGHT: Final = 0.05
"""Share of a surprise that is taken for the machine's speed, which moves all costs alike."""
SPREAD_WEIGHT: Final = 0.06
CURVE_STEPS: Final = 16
"""Costs move slowly, so the lines through them are drawn anew every few steps only."""
CURIOSITY: Final = 1.0
RETURN_WEIGHT: Final = 0.3
RETURN_STEPS: Final = 8
MOST_COUNTED: Final = 20
HALF_LIFE_STEPS: Final = 1024
UNMEASURED_HOPE: Final = 0.3
"""Between 4 and 5 rows an int4 step of the default model jumps from 1.09 to 1.5 plain steps."""
HICCUP: Final = 2.0
"""A step that took this many times its estimate says little: it counts as this many times, not more."""
ODD: Final = 1.4
HICCUPS_BELIEVED: Final = 3
FORGET_STEPS: Final = 4096
PRIOR_SLOPE: Final = 0.12
"""Cost of one more row in plain steps, where nothing was measured: low, so that it is tried and measured."""


@dataclass(slots=True)
class Cost:
    """Time of one kind of work: the median of the first samples, then an average that hiccups cannot move."""

    value: float = 0.0
    deviation: float = 0.0
    step: int = 0
    """When it was measured last."""
    samples: int = 0
    """Since the last restart."""
    _first: list[float] = field(default_factory=list)
    _hiccups: int = 0

    def add(self, sample: float, step: int) -> None:
        if step - self.step > FORGET_STEPS:
            self.restart()
        self.step = step
        self.samples += 1
        if len(self._first) < FIRST_SAMPLES:
            self._first.append(sample)
            # A hiccup only ever adds: of two samples far apart the lower one is the better guess.
            is_odd = len(self._first) == 2 and max(self._first) > ODD * min(self._first)
            self.value = min(self._first) if is_odd else median(self._first)
            self.deviation = sum(abs(each - self.value) for each in self._first) / len(self._first)
            return
        self._hiccups = self._hiccups + 1 if sample > HICCUP * self.value else 0
        if self._hiccups >= HICCUPS_BELIEVED:
            self.restart()
        sample = min(sample, HICCUP * self.value)
        self.value += WEIGHT * (sample - self.value)
        self.deviation += WEIGHT * (abs(sample - self.value) - self.deviation)

    def restart(self) -> None:
        """Let the next samples replace what is believed now."""
        self._first.clear()
        self._hiccups = self.samples = 0

    def error(self, step: int, spread: float) -> float:
        """Relative standard error when single steps spread by `spread`; it grows as the measurement ages."""
        counted = min(self.samples, MOST_COUNTED) * 0.5 ** ((step - self.step) / HALF_LIFE_STEPS)
        return spread / math.sqrt(max(counted, 1.0))


@dataclass(frozen=True, slots=True)
class _Curve:
    """Costs by drafts in units of `CostTable.scale`."""

    expected: list[float]
    hopeful: list[float]
    """What is known poorly gets the benefit of the doubt: to try it is to know it."""
    step: int


@dataclass(slots=True)
class CostTable:
    """Costs at one width bucket. `verify[0]` is the plain step; what was not measured is read off a line."""

    verify: dict[int, Cost] = field(default_factory=dict)
    drafting: dict[DrafterName, dict[int, Cost]] = field(default_factory=dict)
    scale: float = 1.0
    """Nanoseconds of a unit of cost: how slow the machine is now."""
    spread: float = 0.0
    """Relative deviation of single steps."""
    step: int = 0
    _curves: dict[DrafterName | None, _Curve] = field(default_factory=dict)
    _returning: int = 0

    def note_return(self) -> None:
        """Conditions changed while the costs were not watched: take the next surprises for the machine's speed."""
        self._returning = RETURN_STEPS

    def add(self, arm: ArmKey, drafted: int, wall_ns: int, draft_ns: int, step: int) -> None:
        """Take in a step that made `drafted` drafts in `draft_ns` and verified `arm.drafts` of them."""
        self.step = step
        cost = self.verify.get(arm.drafts)
        if cost is None:
            cost = self.verify[arm.drafts] = Cost()
        sample = float(wall_ns - draft_ns)
        if cost.samples >= FIRST_SAMPLES:
            surprise = min(max(sample / (cost.value * self.scale), 1 / HICCUP), HICCUP)
            self.scale *= surprise ** (RETURN_WEIGHT if self._returning else COMMON_WEIGHT)
            self._returning = max(0, self._returning - 1)
            self.spread += SPREAD_WEIGHT * (abs(math.log(surprise)) - self.spread)
        else:
            self._curves.clear()
        cost.add(sample / self.scale, step)
        if arm.drafter is not None and draft_ns:
            self.drafting.setdefault(arm.drafter, {}).setdefault(drafted, Cost()).add(draft_ns / self.scale, step)

    def error(self, drafts: int) -> float:
        """Relative standard error of a verify's cost; where it was never measured, costs may jump between counts."""
        cost = self.verify.get(drafts)
        return cost.error(self.step, self.spread) if cost else max(self.spread, UNMEASURED_HOPE)

    def curve(self, drafter: DrafterName | None, most: int) -> _Curve | None:
        """Costs of whole steps with 0 to `most` drafts at least; None before anything ran."""
        curve = self._curves.get(drafter)
        if curve is None or len(curve.expected) <= most or self.step - curve.step >= CURVE_STEPS:
            if not self.verify:
                return None
            curve = self._curves[drafter] = self._draw(drafter, most)
        return curve

    def step_ns(self, drafter: DrafterName | None, drafts: int) -> float | None:
        curve = self.curve(drafter, drafts)
        return curve.expected[drafts] * self.scale if curve else None

    def restart_plain(self) -> None:
        if 0 in self.verify:
            self.verify[0].restart()

    def _draw(self, drafter: DrafterName | None, most: int) -> _Curve:
        expected = _line(self._rising(), most, PRIOR_SLOPE)[: most + 1]
        drafting = self.drafting.get(drafter) if drafter else None
        if drafting:
            # A chain costs by the draft, so its line goes through the origin.
            chain = _line({0: 0.0, **{count: cost.value for count, cost in drafting.items()}}, most, 0.0)
            expected = [step + draft for step, draft in zip(expected, chain[: most + 1], strict=True)]
        return _Curve(expected, self._hopeful(expected), self.step)

    def _rising(self) -> dict[int, float]:
        """Measured costs of a verify, none (far) above that of more drafts: a hiccup made it look so."""
        least, rising = math.inf, {}
        for count in sorted(self.verify, reverse=True):
            cost = self.verify[count]
            rising[count] = min(cost.value, least)
            least = min(least, rising[count] * (1.0 if cost.samples >= FIRST_SAMPLES else ODD))
        return rising

    def _hopeful(self, expected: list[float]) -> list[float]:
        """Costs less a part of their errors, but never below those of fewer drafts that were measured."""
        hopeful, floor = [], 0.0
        for count, cost in enumerate(expected):
            if count in self.verify:
                hopeful.append(cost * (1 - CURIOSITY * self.error(count)))
                floor = hopeful[-1]
            else:
                hopeful.append(max(floor, cost * (1 - UNMEASURED_HOPE)))
        return hopeful


def _line(points: dict[int, float], most: int, prior_slope: float) -> list[float]:
    """Values at 0..most: measured where measured, between two on their line, beyond the ends on the nearest one.

    A lone point's line rises by `prior_slope` of its value at 0; a line past the last point never falls."""
    known = sorted(points)
    if not known:
        return []
    first, last = known[0], known[-1]
    lone = prior_slope * points[first] / (1 + prior_slope * first)
    values = [max(points[first] - lone * (first - at), 0.0) for at in range(min(first, most + 1))]
    for low, high in pairwise(known):
        slope = (points[high] - points[low]) / (high - low)
        values.extend(points[low] + slope * (at - low) for at in range(low, high))
    slope = max((points[last] - points[known[-2]]) / (last - known[-2]), lone / 2) if len(known) > 1 else lone
    values.extend(points[last] + slope * (at - last) for at in range(last, max(most, last) + 1))
    return values
