"""What a lever change did to throughput: steps before and after, matched by batch width, with an interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import numpy as np

from telemetry.batch import Array
from telemetry.database import Connection
from telemetry.schema import DECODE

WINDOW_S = 60.0
BLOCK_STEPS = 16
"""Steps follow one another; blocks of them are drawn so that the interval is not too narrow."""
FEWEST_BLOCKS = 4
RESAMPLES = 1000
_MOST_STEPS = 50_000
_SEED = 20_011


@dataclass(frozen=True, slots=True)
class Effect:
    """Relative change of tokens per second; 0.1 is ten per cent faster."""

    change: float | None
    low: float | None
    high: float | None
    """95 % interval."""
    verdict: str
    """faster, slower, no clear effect, or too few steps."""
    steps_before: int
    steps_after: int
    widths: tuple[int, ...]
    """Width buckets that were seen on both sides."""


@dataclass(frozen=True, slots=True)
class Change:
    time: datetime
    tick: int
    name: str
    old: str
    new: str
    origin: str
    reason: str
    error: str
    effect: Effect | None
    """None for a refused change."""


def lever_changes(cursor: Connection, run: int) -> tuple[Change, ...]:
    """Every lever change of a run with its effect; the window ends where the next change begins."""
    rows = cursor.execute(
        "SELECT time, tick, name, old, new, origin, reason, error FROM lever_changes WHERE run = ? ORDER BY time", [run]
    ).fetchall()
    applied = [time for time, *_, error in rows if not error]
    return tuple(
        Change(
            time, tick, name, old, new, origin, reason, error,
            None if error else _effect_at(cursor, run, time, applied),
        )
        for time, tick, name, old, new, origin, reason, error in rows
    )  # fmt: skip


def _effect_at(cursor: Connection, run: int, time: datetime, changes: list[datetime]) -> Effect:
    window = timedelta(seconds=WINDOW_S)
    start = max([time - window, *(other for other in changes if other < time)])
    end = min([time + window, *(other for other in changes if other > time)])
    return effect(_steps(cursor, run, start, time, "DESC"), _steps(cursor, run, time, end, "ASC"))


def _steps(cursor: Connection, run: int, start: datetime, end: datetime, order: str) -> Array:
    """[steps, 3]: width bucket, tokens, microseconds of the decode steps between two times."""
    lanes = ", ".join(f"'{lane}'" for lane in DECODE)
    rows = cursor.execute(
        "SELECT pow(2, ceil(log2(greatest(width, 1))))::INTEGER, emitted, dur_us FROM lane_steps"
        f" WHERE run = ? AND start >= ? AND start < ? AND emitted > 0 AND lane IN ({lanes})"
        f" ORDER BY start {order} LIMIT {_MOST_STEPS}",
        [run, start, end],
    ).fetchall()
    return np.array(rows, np.float64).reshape(-1, 3)


def effect(before: Array, after: Array) -> Effect:
    """Compare two sets of steps ([steps, 3]: width bucket, tokens, microseconds) width by width."""
    sides = [(_blocks(before, width), _blocks(after, width), width) for width in _widths(before, after)]
    matched = [side for side in sides if min(len(side[0]), len(side[1])) >= FEWEST_BLOCKS]
    counts = len(before), len(after)
    if not matched:
        return Effect(None, None, None, "too few steps", *counts, ())
    generator = np.random.default_rng(_SEED)
    change = _change([(old, new) for old, new, _ in matched])
    drawn = [
        _change([(_draw(old, generator), _draw(new, generator)) for old, new, _ in matched]) for _ in range(RESAMPLES)
    ]
    low, high = (float(edge) for edge in np.quantile(drawn, (0.025, 0.975)))
    verdict = "faster" if low > 0 else "slower" if high < 0 else "no clear effect"
    return Effect(change, low, high, verdict, *counts, tuple(width for _, _, width in matched))


def _widths(before: Array, after: Array) -> Sequence[int]:
    return sorted({int(width) for width in before[:, 0]} & {int(width) for width in after[:, 0]})


def _blocks(steps: Array, width: int) -> Array:
    """[blocks, 2]: tokens and microseconds of consecutive steps of one width bucket."""
    chosen = steps[steps[:, 0] == width][:, 1:]
    whole = len(chosen) // BLOCK_STEPS * BLOCK_STEPS
    blocks: Array = chosen[:whole].reshape(-1, BLOCK_STEPS, 2).sum(axis=1)
    return blocks


def _draw(blocks: Array, generator: np.random.Generator) -> Array:
    drawn: Array = blocks[generator.integers(0, len(blocks), len(blocks))]
    return drawn


def _change(sides: list[tuple[Array, Array]]) -> float:
    """Ratio of throughputs, as the geometric mean over widths, weighted by the smaller side."""
    total, weights = 0.0, 0.0
    for old, new in sides:
        ratio = (new[:, 0].sum() / new[:, 1].sum()) / (old[:, 0].sum() / old[:, 1].sum())
        weight = min(len(old), len(new))
        total += weight * float(np.log(ratio))
        weights += weight
    return float(np.expm1(total / weights))


def percent(value: float | None) -> str:
    return "" if value is None else f"{value * 100:+.1f} %"


def sentence(effect_: Effect | None) -> str:
    """`faster: +12.3 % (8.1 to 16.2 %), widths 1 2`"""
    if effect_ is None:
        return "refused"
    if effect_.change is None:
        return f"{effect_.verdict} ({effect_.steps_before} before, {effect_.steps_after} after)"
    widths = " ".join(str(width) for width in effect_.widths)
    interval = f"{percent(effect_.low)} to {percent(effect_.high)}"
    return f"{effect_.verdict}: {percent(effect_.change)} ({interval}), widths {widths}"
