"""Rules of a live lever change: who is refused and why, what was changed, and when a change takes itself back."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from engine.levers.resolve import find
from engine.levers.spec import Applies, LeverError, Value

HISTORY = 1000
CHANGES_PER_SECOND = 10.0
BURST = 30


class ChangeRefusedError(LeverError):
    """A change that was not made; carries the value that holds."""

    def __init__(self, message: str, current: Value | None = None) -> None:
        super().__init__(message)
        self.current = current


@dataclass(frozen=True, slots=True)
class Proposal:
    """A change as somebody asks for it."""

    name: str
    value: object
    expected: Value | None = None
    """The value that the operator saw; None: whatever holds."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change that took effect."""

    change_id: str
    name: str
    old: Value
    new: Value
    tick: int
    time: float
    """Unix seconds."""
    origin: str
    actor: str = ""
    reason: str = ""


class RateLimit:
    """A token bucket; the caller brings the time in seconds."""

    def __init__(self, per_second: float = CHANGES_PER_SECOND, burst: int = BURST) -> None:
        self._per_second = per_second
        self._burst = float(burst)
        self._left = float(burst)
        self._last: float | None = None

    def take(self, now: float) -> bool:
        if self._last is not None:
            self._left = min(self._burst, self._left + (now - self._last) * self._per_second)
        self._last = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


def judge(proposal: Proposal, current: Mapping[str, Value]) -> tuple[str, Value, Value | None]:
    """Name, parsed value and parsed expected value of a change that may be made.

    The last goes down to the tick, which knows what holds then. Raises `ChangeRefusedError` with what holds now.
    """
    try:
        lever = find(proposal.name)
    except LeverError as error:
        raise ChangeRefusedError(str(error)) from None
    held = current.get(lever.name, lever.default)
    if current.get("read_only") is True:
        raise ChangeRefusedError("This engine was started with read_only on; levers cannot be changed.", held)
    if lever.applies is Applies.RESTART:
        raise ChangeRefusedError(f"{lever.name} takes effect at start only; restart with {lever.flag}.", held)
    try:
        value = lever.parse(proposal.value)
        expected = None if proposal.expected is None else lever.parse(proposal.expected)
    except LeverError as error:
        raise ChangeRefusedError(str(error), held) from None
    if expected is not None and not _same(expected, held):
        raise ChangeRefusedError(
            f"{lever.name} is {lever.show(held)} by now, not {proposal.expected}; look again and repeat.", held
        )
    return lever.name, value, expected


class History:
    """The last changes, oldest first."""

    def __init__(self, limit: int = HISTORY) -> None:
        self._changes: deque[Change] = deque(maxlen=limit)

    def __iter__(self) -> Iterator[Change]:
        return iter(self._changes)

    def __len__(self) -> int:
        return len(self._changes)

    def add(self, change: Change) -> None:
        self._changes.append(change)

    def undo_of(self, change_id: str, current: Mapping[str, Value]) -> Change:
        """The change to put back: `change_id`, or the last one that still holds. Raises `ChangeRefusedError`."""
        for change in reversed(self._changes):
            holds = _same(current.get(change.name, change.new), change.new)
            if not change_id and holds and not _same(change.old, change.new):
                return change
            if change_id and change.change_id == change_id:
                if not holds:
                    raise ChangeRefusedError(
                        f"{change.name} was changed again since; undo that first.", current[change.name]
                    )
                return change
        raise ChangeRefusedError(
            f"There is no change {change_id!r} to undo." if change_id else "There is nothing to undo."
        )


@dataclass(frozen=True, slots=True)
class Step:
    """What a guard looks at: one lane step."""

    seconds: float
    tokens: int
    width: int


@dataclass(frozen=True, slots=True)
class Verdict:
    revert: bool
    sentence: str = ""


GUARD_MIN_STEPS = 24
GUARD_Z = 3.0
"""Bound of a guard in standard errors: it looks again and again, so one look must seldom be wrong."""


class Guard:
    """Judges a change by the steps before and after it, per batch width, each with its confidence bound."""

    def __init__(self, share: float, before: Sequence[Step]) -> None:
        self._share = share
        self._before = [step for step in before if step.tokens > 0 and step.width > 0]

    def verdict(self, after: Sequence[Step]) -> Verdict:
        """Revert when throughput or p95 time per token is worse by more than the share, beyond doubt."""
        after = [step for step in after if step.tokens > 0 and step.width > 0]
        widths = {step.width for step in self._before} & {step.width for step in after}
        slower = self._throughput(after, widths)
        return slower if slower.revert else self._p95(after, widths)

    def _throughput(self, after: Sequence[Step], widths: set[int]) -> Verdict:
        """Log ratio of tokens per second, widths weighted by the certainty of each."""
        weight = total = 0.0
        for width in widths:
            old, new = _rate(_of(self._before, width)), _rate(_of(after, width))
            if old is None or new is None:
                continue
            certainty = 1 / max(old[1] ** 2 + new[1] ** 2, 1e-12)
            total += certainty * math.log(new[0] / old[0])
            weight += certainty
        if not weight:
            return Verdict(False)
        ratio, error = total / weight, 1 / math.sqrt(weight)
        if ratio + GUARD_Z * error >= math.log(1 - min(self._share, 0.999)):
            return Verdict(False)
        return Verdict(True, f"throughput fell by {100 * (1 - math.exp(ratio)):.0f} %")

    def _p95(self, after: Sequence[Step], widths: set[int]) -> Verdict:
        """Whether significantly more than one token in twenty takes longer than the old p95 and its margin."""
        old = sorted(step.seconds * step.width / step.tokens for step in self._before if step.width in widths)
        new = [step.seconds * step.width / step.tokens for step in after if step.width in widths]
        if len(old) < GUARD_MIN_STEPS or len(new) < GUARD_MIN_STEPS:
            return Verdict(False)
        rank = min(len(old) - 1, math.ceil(0.95 * len(old) + GUARD_Z * math.sqrt(0.95 * 0.05 * len(old))) - 1)
        limit = old[rank] * (1 + self._share)
        over = sum(time > limit for time in new) / len(new)
        if over - GUARD_Z * math.sqrt(max(over * (1 - over), 0.05 * 0.95) / len(new)) <= 0.05:
            return Verdict(False)
        return Verdict(True, f"p95 time per token rose above {1000 * limit:.1f} ms")


def _of(steps: Sequence[Step], width: int) -> list[Step]:
    return [step for step in steps if step.width == width]


def _rate(steps: Sequence[Step]) -> tuple[float, float] | None:
    """Tokens per second and the relative standard error of a ratio estimate; None with too few steps."""
    seconds, tokens = sum(step.seconds for step in steps), sum(step.tokens for step in steps)
    if len(steps) < GUARD_MIN_STEPS or seconds <= 0 or tokens <= 0:
        return None
    rate = tokens / seconds
    residual = sum((step.tokens - rate * step.seconds) ** 2 for step in steps) / (len(steps) - 1)
    return rate, math.sqrt(len(steps) * residual) / tokens


def _same(one: Value, other: Value) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    return one == other
