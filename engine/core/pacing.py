"""How much of a prompt may ride on a decode step before those who are chatting feel it.

With `mixed_slice_tokens` at `auto` the chunk that is fused into a decode step fills an allowance. A client feels the
gap between two deliveries, so the allowance is `STRETCH` times the gap that it is used to: what its latest decode steps
took under the levers in force, drafting and verifying included (the `USUAL` quantile of the last `KEPT` of them). A
mixed step makes no drafts, so where speculation makes the usual gap long, that time goes to the prompt.

A mixed step is forecast as

    decode + rows * (near + far * position)

`decode` is a step that feeds one token per sequence (from steps that verified drafts, less the rows of the drafts),
`near` what a row costs at the start of a context, `far` what each position before it adds (attention reads all of
them). `far` is the slope of the measured cost over the position, with a long memory, for a prompt runs through all
positions; `near` follows the latest steps. An error in `decode` moves `near` the other way: the forecast at a like
number of rows stays.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

STRETCH = 2.75
"""The bar is 3, p99 over p99; the rest is for the jitter of the machine."""
USUAL = 0.9
KEPT = 64
"""Decode steps whose gaps are remembered."""
LEAST_SLICE = 4
FIRST_SLICE = 16
"""Rows while nothing is measured; from there a slice at most doubles."""
QUICK = 0.25
"""Weight of the newest measurement in `decode` and `near`."""
SLOW = 1 / 64
"""The same in `far`."""
SPREAD = 100.0
"""Positions over which prompts must have been measured before their slope is believed."""


@dataclass(slots=True)
class RowCost:
    """ns of a prompt row by its position, from measured steps; 0 while unmeasured."""

    near: float = 0.0
    far: float = 0.0
    _position: float = 0.0
    _cost: float = 0.0
    _variance: float = 0.0
    _covariance: float = 0.0

    def note(self, position: float, cost: float) -> None:
        if not self.near:
            self._position, self._cost, self.near = position, cost, cost
            return
        ahead, dearer = position - self._position, cost - self._cost
        self._position += SLOW * ahead
        self._cost += SLOW * dearer
        self._variance = (1 - SLOW) * (self._variance + SLOW * ahead * ahead)
        self._covariance = (1 - SLOW) * (self._covariance + SLOW * ahead * dearer)
        slope = self._covariance / (self._variance + SPREAD * SPREAD)
        old, self.far = self.far, min(max(slope, 0.0), self._cost / max(self._position, 1.0))
        level = self.near + (old - self.far) * position
        self.near = level + QUICK * (cost - self.far * position - level)

    def at(self, position: float) -> float:
        return self.near + self.far * position


@dataclass(slots=True)
class Pacer:
    """Measured gaps and costs in ns."""

    row: RowCost = field(default_factory=RowCost)
    decode_ns: float = 0.0
    """The forward of a step with one row per sequence; 0 while unmeasured."""
    _gaps: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT))
    _last_slice: int = FIRST_SLICE // 2

    def note_decode(self, gap_ns: int, forward_ns: int, drafts: int = 0) -> None:
        """Take in a step without prompt rows: the whole of it, its forward alone, and the drafts verified in that."""
        self._gaps.append(gap_ns)
        plain_ns = max(forward_ns - drafts * self.row.near, 0.0)
        self.decode_ns += (QUICK if self.decode_ns else 1.0) * (plain_ns - self.decode_ns)

    def note_prefill(self, wall_ns: int, rows: int, position: float, is_mixed: bool) -> None:
        """Take in a step with `rows` prompt rows, whose mean position was `position`."""
        beside = self.decode_ns if is_mixed else 0.0
        if wall_ns > beside:
            self.row.note(position, (wall_ns - beside) / rows)
        if is_mixed:
            self._last_slice = rows

    @property
    def allowance_ns(self) -> float:
        """How long a mixed step may take; 0 while no gap was measured."""
        gaps = sorted(self._gaps)
        return STRETCH * gaps[int(USUAL * (len(gaps) - 1))] if gaps else 0.0

    def slice(self, cap: int, position: int) -> int:
        """Prompt rows that the next mixed step may carry from `position` on, at most `cap`."""
        most, allowance = 2 * self._last_slice, self.allowance_ns
        if allowance and self.row.near:
            most = min(most, int((allowance - self.decode_ns) / max(self.row.at(position), 1.0)))
        return min(max(most, LEAST_SLICE), cap)
