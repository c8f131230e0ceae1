"""Two runs side by side: the same figures of each, how they differ, and whether that is more than chance."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from telemetry.batch import Array
from telemetry.database import Connection
from telemetry.effects import Effect, effect, percent, sentence
from telemetry.migrations import scalar
from telemetry.schema import DECODE

_MOST_STEPS = 200_000


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    unit: str
    first: float | None
    second: float | None

    @property
    def change(self) -> float | None:
        """Second over first, minus one."""
        return self.second / self.first - 1 if self.first and self.second is not None else None


@dataclass(frozen=True, slots=True)
class LeverDifference:
    name: str
    first: str
    second: str


@dataclass(frozen=True, slots=True)
class Comparison:
    runs: tuple[str, str]
    figures: tuple[Figure, ...]
    levers: tuple[LeverDifference, ...]
    """Start-up values that differ."""
    throughput: Effect
    """Decode steps of the second run against those of the first, at equal batch width."""


_FIGURES = (
    ("delivered", "tokens/busy s", "SELECT sum(emitted) / nullif(sum(busy_us), 0) * 1e6 FROM step_rollup"
     " WHERE run = ?"),
    ("tokens per decode step", "", "SELECT sum(emitted) / nullif(sum(steps) FILTER (emitted > 0), 0) FROM step_rollup"
     " WHERE run = ?"),
    ("acceptance", "", "SELECT sum(accepted) / nullif(sum(drafted), 0) FROM step_rollup WHERE run = ?"),
    ("mean batch width", "", "SELECT sum(width_sum) / nullif(sum(steps), 0) FROM step_rollup WHERE run = ?"),
    ("TTFT p50", "ms", "SELECT quantile_cont(ttft_ms, 0.5) FROM requests WHERE run = ?"),
    ("TTFT p95", "ms", "SELECT quantile_cont(ttft_ms, 0.95) FROM requests WHERE run = ?"),
    ("time per token p50", "ms", "SELECT quantile_cont(tpot_ms, 0.5) FROM requests WHERE run = ?"),
    ("time per token p95", "ms", "SELECT quantile_cont(tpot_ms, 0.95) FROM requests WHERE run = ?"),
    ("requests", "", "SELECT count(*) FROM requests WHERE run = ?"),
    ("tokens", "", "SELECT sum(emitted) FROM step_rollup WHERE run = ?"),
    ("preemptions", "", "SELECT sum(preemptions) FROM requests WHERE run = ?"),
    ("records lost", "", "SELECT coalesce(sum(lost), 0) FROM losses WHERE run = ?"),
    ("cost of recording", "share of tick time", "SELECT sum(recording_us) / nullif(sum(tick_us), 0) FROM health"
     " WHERE run = ?"),
)  # fmt: skip


def compare(cursor: Connection, first: int, second: int) -> Comparison:
    """Read both runs; the cursor stays open."""
    names = tuple(str(scalar(cursor, "SELECT run_id FROM runs WHERE run = ?", [run])) for run in (first, second))
    figures = tuple(
        Figure(name, unit, _number(scalar(cursor, sql, [first])), _number(scalar(cursor, sql, [second])))
        for name, unit, sql in _FIGURES
    )
    throughput = effect(_steps(cursor, first), _steps(cursor, second))
    return Comparison((names[0], names[1]), figures, _levers(cursor, first, second), throughput)


def render(comparison: Comparison) -> RenderableType:
    """Something that rich prints."""
    first, second = comparison.runs
    table = Table(show_edge=False, header_style="bold")
    for column in ("", first, second, "second against first"):
        table.add_column(Text(column), overflow="fold")
    for figure in comparison.figures:
        name = f"{figure.name}, {figure.unit}" if figure.unit else figure.name
        table.add_row(name, _text(figure.first), _text(figure.second), percent(figure.change))
    parts: list[RenderableType] = [table, Text(), Text(f"Throughput at equal width: {sentence(comparison.throughput)}")]
    parts += [Text(f"{lever.name}: {lever.first} / {lever.second}") for lever in comparison.levers]
    return Group(*parts)


def _steps(cursor: Connection, run: int) -> Array:
    lanes = ", ".join(f"'{lane}'" for lane in DECODE)
    rows = cursor.execute(
        "SELECT pow(2, ceil(log2(greatest(width, 1))))::INTEGER, emitted, dur_us FROM lane_steps"
        f" WHERE run = ? AND emitted > 0 AND lane IN ({lanes}) ORDER BY step_id LIMIT {_MOST_STEPS}",
        [run],
    ).fetchall()
    return np.array(rows, np.float64).reshape(-1, 3)


def _levers(cursor: Connection, first: int, second: int) -> tuple[LeverDifference, ...]:
    old, new = (
        json.loads(scalar(cursor, "SELECT levers FROM runs WHERE run = ?", [run]) or "{}") for run in (first, second)
    )
    names = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    return tuple(LeverDifference(name, str(old.get(name, "unset")), str(new.get(name, "unset"))) for name in names)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"
