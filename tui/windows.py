"""Numbers over a stretch of time, derived from the frames of the wire: sums by lane, rates, lever effects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import sqrt
from statistics import fmean, variance

from engine.protocol import wire

WINDOW_S = 60.0
EFFECT_S = 30.0
"""How far before and after a lever change frames are compared."""
EFFECT_FRAMES = 5
"""Fewer busy frames on either side say nothing."""


@dataclass(frozen=True, slots=True)
class Window:
    """Sums over the frames of a window."""

    seconds: float
    frames: int
    tokens_per_s: float
    prefill_tokens_per_s: float
    lanes: dict[str, wire.LaneStats]

    @property
    def tokens(self) -> int:
        return sum(lane.tokens for lane in self.lanes.values())

    @property
    def drafted(self) -> int:
        return sum(lane.drafted for lane in self.lanes.values())

    @property
    def accepted(self) -> int:
        return sum(lane.accepted for lane in self.lanes.values())

    @property
    def acceptance(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None

    def ranked(self) -> list[tuple[str, wire.LaneStats]]:
        """Lanes that did something, the busiest first."""
        busy = ((name, lane) for name, lane in self.lanes.items() if lane.steps or lane.tokens)
        return sorted(busy, key=lambda item: (-item[1].tokens, item[0]))


def recent(stats: Sequence[wire.Stats], seconds: float) -> Sequence[wire.Stats]:
    """The frames of the last `seconds` before the newest one."""
    if not stats:
        return ()
    start = stats[-1].time - seconds
    first = len(stats)
    while first > 0 and stats[first - 1].time > start:
        first -= 1
    return stats[first:]


def window(stats: Sequence[wire.Stats], seconds: float = WINDOW_S) -> Window:
    frames = recent(stats, seconds)
    span = sum(frame.window_s for frame in frames)
    return Window(
        seconds=span,
        frames=len(frames),
        tokens_per_s=sum(frame.tokens_per_s * frame.window_s for frame in frames) / span if span else 0.0,
        prefill_tokens_per_s=sum(f.prefill_tokens_per_s * f.window_s for f in frames) / span if span else 0.0,
        lanes=merge_lanes(frame.lanes for frame in frames),
    )


def merge_lanes(frames: Iterable[dict[str, wire.LaneStats]]) -> dict[str, wire.LaneStats]:
    grouped: dict[str, list[wire.LaneStats]] = {}
    for lanes in frames:
        for name, lane in lanes.items():
            grouped.setdefault(name, []).append(lane)
    return {name: _total(parts) for name, parts in grouped.items()}


def _total(parts: Sequence[wire.LaneStats]) -> wire.LaneStats:
    return wire.LaneStats(
        steps=sum(part.steps for part in parts),
        tokens=sum(part.tokens for part in parts),
        seconds=sum(part.seconds for part in parts),
        drafted=sum(part.drafted for part in parts),
        accepted=sum(part.accepted for part in parts),
        drafted_at=_by_position(part.drafted_at for part in parts),
        accepted_at=_by_position(part.accepted_at for part in parts),
    )


def _by_position(rows: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip_longest(*rows, fillvalue=0))


@dataclass(frozen=True, slots=True)
class Effect:
    """Delivered tokens per second after a lever change against before, busy frames only."""

    before: float
    after: float
    low: float
    high: float
    """95 % bounds of the relative change."""

    @property
    def change(self) -> float:
        return self.after / self.before - 1

    @property
    def certain(self) -> bool:
        return self.low > 0 or self.high < 0


def effect(stats: Sequence[wire.Stats], change: wire.LeverEvent, next_time: float) -> Effect | None:
    """The effect of `change`, judged up to the next change at `next_time`; None while too little was seen."""
    start, end = change.time - EFFECT_S, min(change.time + EFFECT_S, next_time)
    busy = [frame for frame in stats if frame.tokens_per_s > 0 and frame.active and start <= frame.time <= end]
    before = [frame.tokens_per_s for frame in busy if frame.time <= change.time]
    after = [frame.tokens_per_s for frame in busy if frame.time - frame.window_s >= change.time]
    if min(len(before), len(after)) < EFFECT_FRAMES:
        return None
    base, now = fmean(before), fmean(after)
    spread = sqrt(variance(before) / len(before) + variance(after) / len(after))
    middle, reach = now / base - 1, 1.96 * spread / base
    return Effect(base, now, middle - reach, middle + reach)
