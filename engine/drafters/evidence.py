"""What is known of one arm (a way to decode): delivered throughput by windows, its spread, age and staleness."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from statistics import median
from typing import Final

from engine.core.value import StepValue
from telemetry.names import GateReason
from telemetry.record import GateRecord

NEW_WINDOW_WEIGHT: Final = 0.3
DRIFT: Final = 1e-4
"""Relative variance that an estimate gains with every token that passes: 16 % after a probe's 256."""
HICCUP: Final = 2.5
USUAL_STEPS: Final = 9
LEAST_USUAL: Final = 3
DEVIATION_SHARE: Final = 0.5
DEPTH_FLOOR: Final = 512
DEPTH_FACTOR: Final = 2.0
LEAST_PURSE: Final = 0.25
RESERVE: Final = 0.25
SHOWN_NS: Final = 250_000_000
"""Evidence is laid out for the records so often, and when something happened: between two steps an arbiter's takes
100 us."""
DEAREST_STEP: Final = 0.5
"""Most of the cap that one step of a probe is charged."""


@dataclass(slots=True)
class Usual:
    """What an arm's steps took of late; a hiccup of the machine hits whichever arm runs and says nothing of it."""

    walls: deque[int] = field(default_factory=lambda: deque(maxlen=USUAL_STEPS))

    def without_hiccup(self, wall_ns: int) -> int:
        """`wall_ns`, but no more than a few times the median of late: what lasts becomes the median."""
        most = HICCUP * median(self.walls) if len(self.walls) >= LEAST_USUAL else math.inf
        self.walls.append(wall_ns)
        return int(min(wall_ns, most))


@dataclass(slots=True)
class Window:
    """Steps of one arm that are not folded into its estimate yet."""

    steps: int = 0
    tokens: int = 0
    wall_ns: int = 0
    _tokens_squared: float = 0.0
    _walls_squared: float = 0.0
    _products: float = 0.0

    def add(self, wall_ns: int, tokens: int) -> None:
        self.steps += 1
        self.tokens += tokens
        self.wall_ns += wall_ns
        self._tokens_squared += tokens * tokens
        self._walls_squared += wall_ns * wall_ns
        self._products += tokens * wall_ns

    def merge(self, other: Window) -> None:
        self.steps += other.steps
        self.tokens += other.tokens
        self.wall_ns += other.wall_ns
        self._tokens_squared += other._tokens_squared
        self._walls_squared += other._walls_squared
        self._products += other._products

    def clear(self) -> None:
        self.steps = self.tokens = self.wall_ns = 0
        self._tokens_squared = self._walls_squared = self._products = 0.0

    @property
    def noise(self) -> float:
        """Relative variance of one step's tokens around what the rate says of its wall time."""
        if self.steps < 2 or not self.tokens or not self.wall_ns:
            return 0.0
        rate = self.tokens / self.wall_ns
        residual = self._tokens_squared - 2 * rate * self._products + rate * rate * self._walls_squared
        return max(0.0, residual) * self.steps**2 / (self.steps - 1) / self.tokens**2

    @property
    def rate(self) -> float:
        """Tokens per second; 0 before any time has passed."""
        return self.tokens * 1e9 / self.wall_ns if self.wall_ns else 0.0


@dataclass(slots=True)
class Estimate:
    """Delivered throughput of one arm in tokens/s; `rate` is None until it was measured."""

    name: str
    rate: float | None = None
    deviation: float = 0.0
    age_tokens: int = 0
    stale: bool = False
    _variance: float = 0.0
    """Relative, of the rate."""
    _noise: float = -1.0
    """Relative variance of a step; negative: no window yet."""

    @property
    def is_fresh(self) -> bool:
        return self.rate is not None and not self.stale

    def take(self, window: Window, *, replace: bool) -> None:
        """Fold a window in by what it is worth: few steps of uneven length or luck say little."""
        noise = window.noise
        self._noise = noise if self._noise < 0 else self._noise + NEW_WINDOW_WEIGHT * (noise - self._noise)
        self.fold(window.rate, replace=replace, variance=self._noise / window.steps if window.steps else 0.0)

    def fold(self, rate: float, *, replace: bool, variance: float = 0.0) -> None:
        """Believe `rate`, whose relative variance is `variance`, as far as it is surer than what was believed.

        Where it is sure, the first, a probe's and a stale arm's window replace, and another weighs three tenths."""
        if self.rate is None or self.stale:
            if self.rate is None:
                self.deviation = rate * math.sqrt(variance)
            else:
                self.deviation /= 2
            self.rate, self._variance = rate, variance
        else:
            before = self._variance + DRIFT * self.age_tokens
            weight = before / (before + variance) if variance else 1.0
            weight = weight if replace else min(weight, NEW_WINDOW_WEIGHT)
            self.rate += weight * (rate - self.rate)
            self._variance = (1 - weight) ** 2 * before + weight**2 * variance
            if replace:
                self.deviation /= 2
            else:
                self.deviation += NEW_WINDOW_WEIGHT * (abs(rate - self.rate) - self.deviation)
        self.stale = False
        self.age_tokens = 0

    def row(self) -> tuple[str, float, float, int, bool]:
        rate, deviation = (-1.0, -1.0) if self.rate is None else (self.rate, self.deviation)
        return (self.name, rate, deviation, self.age_tokens, self.stale)


class Evidence(StepValue, frozen=True):
    """What is known of the arms, laid out for records; it may be some steps old."""

    arms: tuple[tuple[str, float, float, int, bool], ...]
    margin: float
    losses: int
    tokens_until_probe: int


def gate_record(
    step_id: int, time_ns: int, mode: str, arm: str, reason: GateReason, evidence: Evidence, depth: int,
    width_bucket: int, pinned: bool,
) -> GateRecord:  # fmt: skip
    """The record of why a step ran the arm that it ran; called when the ring is drained."""
    is_probing = reason in (GateReason.PROBE, GateReason.REFRESH)
    return GateRecord(
        step_id, time_ns, str(mode), str(arm), reason.value, evidence.arms, evidence.margin, evidence.losses,
        max(depth, 0), width_bucket, 0 if is_probing else evidence.tokens_until_probe, pinned,
    )  # fmt: skip


class Urgency(Enum):
    """Why a probe is wanted."""

    ROUTINE = auto()
    """Enough tokens have passed."""
    CHANGED = auto()
    """Something happened since the arms were compared."""
    CONFIRMS = auto()
    """The other arm has just won: every token until it is confirmed may be slow."""


@dataclass(slots=True)
class Budget:
    """Wall time that probes may lose: a share of all time spent, saved up to a cap.

    A probe is charged what it lost against the running arm and stops once it has lost what was saved; so over any
    stretch of time probes lose at most `share` of it, plus one and a half caps, plus what the last step of a probe ran
    over."""

    share: float
    cap_tokens: float
    """The cap, as the time that the running arm takes for so many tokens of each sequence."""
    saved_ns: float = 0.0
    _token_ns: float = 0.0

    def accrue(self, wall_ns: int, token_ns: float) -> None:
        """Save from a step of the running arm, which takes `token_ns` per token of each sequence."""
        if not self._token_ns:
            self.saved_ns = self.cap_tokens * token_ns
        self._token_ns = token_ns
        self.saved_ns = min(self.cap_ns, self.saved_ns + self.share * wall_ns)

    @property
    def cap_ns(self) -> float:
        return self.cap_tokens * self._token_ns

    def charge(self, lost_ns: float) -> float:
        """What a probe's step is charged: one hiccup of the machine does not use up the purse."""
        return min(lost_ns, self.cap_ns * DEAREST_STEP)

    def spend(self, lost_ns: float) -> None:
        self.saved_ns = max(self.saved_ns - max(0.0, lost_ns), -self.cap_ns / 2)

    def limit_ns(self, urgency: Urgency) -> float:
        """What a running probe may lose; one that confirms a win may borrow half the cap."""
        return self.saved_ns + (self.cap_ns / 2 if urgency is Urgency.CONFIRMS else 0.0)

    def missing_ns(self, expected_loss_ns: float, urgency: Urgency) -> float:
        """What is not saved yet of a probe's expected loss; 0 or less: it may begin.

        A probe costs a little even where none is expected, one that would cost more than the cap begins with a
        full purse, and a routine probe leaves some of it for a change of regime."""
        least = LEAST_PURSE * self.cap_ns
        if urgency is Urgency.CONFIRMS:
            return least - self.limit_ns(urgency)
        reserve = RESERVE * self.cap_ns if urgency is Urgency.ROUTINE else 0.0
        return min(max(expected_loss_ns, least) + reserve, self.cap_ns) - self.saved_ns


def width_bucket(width: int) -> int:
    """The next power of two of a batch width; 1 for an empty batch."""
    return 1 << max(0, width - 1).bit_length()


def is_other_depth(anchor: int, depth: int) -> bool:
    """Whether the context has doubled or halved, both floored at 512 tokens."""
    anchor, depth = max(anchor, DEPTH_FLOOR), max(depth, DEPTH_FLOOR)
    return depth >= DEPTH_FACTOR * anchor or anchor >= DEPTH_FACTOR * depth
