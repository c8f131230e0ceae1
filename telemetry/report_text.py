"""The report for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from telemetry.effects import sentence
from telemetry.report import Chart, Report, Section

_BARS = "▁▂▃▄▅▆▇█"
_SPARK = 60


def render(report: Report) -> RenderableType:
    """Something that rich prints at any width."""
    parts: list[RenderableType] = [Text(f"Run {report.run_id}", style="bold"), _facts(report), Text()]
    for chart in report.charts:
        parts += _chart(chart)
    if report.changes:
        parts += [Text("Levers", style="bold"), _changes(report), Text()]
    for section in report.sections:
        if section.rows:
            parts += [Text(section.title, style="bold"), Text(section.note, style="dim"), _table(section), Text()]
    return Group(*parts)


def to_text(report: Report, width: int = 120) -> str:
    """The same without colour."""
    console = Console(width=width, no_color=True, force_terminal=False)
    with console.capture() as capture:
        console.print(render(report))
    return capture.get()


def _facts(report: Report) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in report.facts:
        table.add_row(Text(name, style="dim"), Text(value))
    return table


def _chart(chart: Chart) -> list[RenderableType]:
    lines = [series for series in chart.series if any(value is not None for value in series.values)]
    if not lines:
        return []
    table = Table.grid(padding=(0, 2))
    for series in lines:
        known = [value for value in series.values if value is not None]
        table.add_row(
            series.name, sparkline(series.values), f"last {known[-1]:.4g}, highest {max(known):.4g} {chart.unit}"
        )
    return [Text(chart.title, style="bold"), table, Text()]


def sparkline(values: tuple[float | None, ...], width: int = _SPARK) -> str:
    """At most `width` bars; a gap where nothing was measured."""
    chunk = max(1, -(-len(values) // width))
    means = [_mean(values[at : at + chunk]) for at in range(0, len(values), chunk)]
    top = max((mean for mean in means if mean is not None), default=0.0) or 1.0
    return "".join(" " if mean is None else _BARS[min(7, int(mean / top * 7.999))] for mean in means)


def _mean(values: tuple[float | None, ...]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


CHANGE_COLUMNS = ("#", "lever", "change", "effect on tokens/s (95 %)", "at", "by")


def change_rows(report: Report) -> Iterator[tuple[str, ...]]:
    """One row per lever change; the number is that of its mark in the pictures, a refused one has none."""
    number = 0
    for change in report.changes:
        number += not change.error
        yield (
            "" if change.error else str(number), change.name, f"{change.old} → {change.new}",
            change.error or sentence(change.effect), f"{change.time:%H:%M:%S}", change.origin,
        )  # fmt: skip


def _changes(report: Report) -> Table:
    table = Table(show_edge=False, header_style="bold")
    for column in CHANGE_COLUMNS:
        table.add_column(column)
    for row in change_rows(report):
        table.add_row(*map(Text, row))
    return table


def _table(section: Section) -> Table:
    table = Table(show_edge=False, header_style="bold")
    for column in section.columns:
        table.add_column(Text(column.replace("_", " ")), overflow="fold")
    for row in section.rows:
        table.add_row(*(Text(cell(value)) for value in row))
    return table


def cell(value: Any) -> str:
    """A value as people write it."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:%Y-%m-%d %H:%M:%S}" if hasattr(value, "strftime") else str(value)
