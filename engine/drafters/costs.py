"""What a step costs: wall time of a verify by drafts, and of drafting, learned from the steps that ran."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from engine.core.device import DrafterName

FIRST_SAMPLES: Final = 5
WEIGHT: Final = 0.1
HICCUP: Final = 2.0
"""A step that took this many times its estimate says little: it counts as this many times, not more."""
HICCUPS_BELIEVED: Final = 3
FORGET_STEPS: Final = 4096
PRIOR_SLOPE: Final = 0.12
"""Cost of one more row in plain steps, where nothing was measured: low, so that it is tried and measured."""


@dataclass(slots=True)
class Cost:
    """Nanoseconds of one kind of work: the median of the first samples, then an average that hiccups cannot move."""

    ns: float = 0.0
    deviation: float = 0.0
    step: int = 0
    """When it was measured last."""
    samples: int = 0
    """Since the last restart."""
    _first: list[int] = field(default_factory=list)
    _hiccups: int = 0

    def add(self, ns: int, step: int) -> None:
        if step - self.step > FORGET_STEPS:
            self._first.clear()
        self.step = step
        self.samples += 1
        if len(self._first) < FIRST_SAMPLES:
            self._first.append(ns)
            self.ns = float(median(self._first))
            self.deviation = sum(abs(sample - self.ns) for sample in self._first) / len(self._first)
            return
        self._hiccups = self._hiccups + 1 if ns > HICCUP * self.ns else 0
        if self._hiccups >= HICCUPS_BELIEVED:
            self._first.clear()
            self._hiccups = 0
        sample = min(float(ns), HICCUP * self.ns)
        self.ns += WEIGHT * (sample - self.ns)
        self.deviation += WEIGHT * (abs(sample - self.ns) - self.deviation)

    def restart(self) -> None:
        """Let the next samples replace what is believed now."""
        self._first.clear()
        self.samples = 0

    @property
    def uncertainty(self) -> float:
        """Relative standard error of `ns`, taking the spread of single steps for what it is."""
        return self.deviation / self.ns / math.sqrt(max(1, min(self.samples, 10))) if self.ns else 0.0


@dataclass(slots=True)
class CostTable:
    """Costs at one width bucket. `verify[0]` is the plain step; what was not measured is read off a line."""

    verify: dict[int, Cost] = field(default_factory=dict)
    drafting: dict[tuple[DrafterName, int], Cost] = field(default_factory=dict)

    def add(self, drafter: DrafterName | None, drafts: int, wall_ns: int, draft_ns: int, step: int) -> None:
        self.verify.setdefault(drafts, Cost()).add(wall_ns - draft_ns, step)
        if drafter is not None and draft_ns:
            self.drafting.setdefault((drafter, drafts), Cost()).add(draft_ns, step)

    def verify_ns(self, drafts: int) -> float | None:
        """Measured, or on the line through the nearest measured counts; None before anything ran."""
        known = self.verify.get(drafts)
        if known is not None:
            return known.ns
        return _on_line({count: cost.ns for count, cost in self.verify.items()}, drafts)

    def drafting_ns(self, drafter: DrafterName, drafts: int) -> float:
        known = self.drafting.get((drafter, drafts))
        if known is not None:
            return known.ns
        points = {count: cost.ns for (name, count), cost in self.drafting.items() if name is drafter}
        # A chain costs by the draft, so its line goes through the origin.
        return (_on_line({0: 0.0, **points}, drafts) or 0.0) if points else 0.0

    def step_ns(self, drafter: DrafterName | None, drafts: int) -> float | None:
        """Wall time of a whole step, drafting included."""
        verify = self.verify_ns(drafts)
        if verify is None or drafter is None:
            return verify
        return verify + self.drafting_ns(drafter, drafts)

    def restart(self) -> None:
        """Let the next sample of every cost replace what is believed."""
        for cost in (*self.verify.values(), *self.drafting.values()):
            cost.restart()

    def restart_plain(self) -> None:
        if 0 in self.verify:
            self.verify[0].restart()


def _on_line(points: dict[int, float], at: int) -> float | None:
    """Interpolate; beyond the ends follow the nearest two points, rising at least a little with `at`."""
    if not points:
        return None
    below = [count for count in points if count < at]
    above = [count for count in points if count > at]
    if below and above:
        low, high = max(below), min(above)
        return points[low] + (points[high] - points[low]) * (at - low) / (high - low)
    near = max(below) if below else min(above)
    slope = PRIOR_SLOPE * points[near] / (1 + PRIOR_SLOPE * near)
    if len(below) >= 2:
        second = sorted(below)[-2]
        slope = max((points[near] - points[second]) / (near - second), slope / 2)
    return max(points[near] + slope * (at - near), points[near] * 0.3)
