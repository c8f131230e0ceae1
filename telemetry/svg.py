"""Charts as inline SVG: lines, stacked areas, lever marks, bands of the gate; no scripts, any width of screen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import ceil, floor, log10

from telemetry.report import Band, Chart, Mark

WIDTH, HEIGHT = 760, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 28, 34
_DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 2", "10 4")
"""Lines differ by more than colour."""
COLOURS = 8


def chart(picture: Chart, marks: Sequence[Mark]) -> str:
    """One chart with its axes, marks and legend; a sentence instead where nothing was measured."""
    values = [value for series in picture.series for value in series.values if value is not None]
    if not values or not picture.seconds:
        return '<p class="empty">Nothing was measured here.</p>'
    tops = _stack(picture) if picture.is_stacked else [list(series.values) for series in picture.series]
    top = _nice(max((value for line in tops for value in line if value is not None), default=1.0))
    end = max(picture.seconds[-1], 1.0)
    parts = [*_axes(top, end, picture.unit)]
    for index in reversed(range(len(tops))):
        floor_line = (tops[index - 1] if index else [0.0] * len(picture.seconds)) if picture.is_stacked else None
        parts.append(_shape(picture.seconds, tops[index], floor_line, (top, end), index))
    parts += _marks(marks, end)
    label = escape(f"{picture.title}, {picture.unit}, over {end:.0f} seconds", quote=True)
    body = "".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{body}</svg>{_legend(picture)}'


def bands(stretches: Sequence[Band], end: float) -> str:
    """What the gate ran over time: one block per stretch, its reason in the title."""
    if not stretches:
        return '<p class="empty">The gate decided nothing in this run.</p>'
    arms = sorted({band.arm for band in stretches})
    height = 26 * len(arms) + _BOTTOM
    span = max(end, 1e-9)
    parts = [f'<text x="4" y="{26 * row + 18}" class="axis">{escape(arm)}</text>' for row, arm in enumerate(arms)]
    for band in stretches:
        x, width = _x(band.start, span), max(0.8, _x(band.end, span) - _x(band.start, span))
        title = escape(f"{band.arm}: {band.reason}, {band.start:.2f} to {band.end:.2f} s")
        row = arms.index(band.arm)
        kind = f"s{row % COLOURS}" + (" probe" if band.reason in ("probe", "refresh") else "")
        parts.append(
            f'<rect x="{x:.1f}" y="{26 * row + 4}" width="{width:.1f}" height="18" class="{kind}">'
            f"<title>{title}</title></rect>"
        )
    parts += [
        f'<text x="{_x(at, span):.0f}" y="{height - 12}" class="axis mid">{at:g} s</text>' for at in _ticks(span, 5)
    ]
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="Gate over time">{"".join(parts)}</svg>'


def _stack(picture: Chart) -> list[list[float | None]]:
    sums = [0.0] * len(picture.seconds)
    lines: list[list[float | None]] = []
    for series in picture.series:
        sums = [total + (value or 0.0) for total, value in zip(sums, series.values, strict=True)]
        lines.append(list(sums))
    return lines


def _shape(
    seconds: Sequence[float], line: Sequence[float | None], floor_line: Sequence[float | None] | None,
    scale: tuple[float, float], index: int,
) -> str:  # fmt: skip
    top, end = scale
    if floor_line is not None:
        upper = [f"{_x(at, end):.1f},{_y(value or 0.0, top):.1f}" for at, value in zip(seconds, line, strict=True)]
        lower = [
            f"{_x(at, end):.1f},{_y(value or 0.0, top):.1f}" for at, value in zip(seconds, floor_line, strict=True)
        ]
        return f'<polygon points="{" ".join(upper + lower[::-1])}" class="s{index % COLOURS} area"/>'
    dash = _DASHES[index % len(_DASHES)]
    return "".join(
        f'<polyline points="{" ".join(points)}" class="s{index % COLOURS} line" stroke-dasharray="{dash}"/>'
        for points in _runs(seconds, line, scale)
    )


def _runs(seconds: Sequence[float], line: Sequence[float | None], scale: tuple[float, float]) -> Iterator[list[str]]:
    """A line is interrupted where nothing was measured; a lone point becomes a short dash."""
    points: list[str] = []
    for at, value in zip(seconds, line, strict=True):
        if value is None:
            if points:
                yield points if len(points) > 1 else points * 2
            points = []
        else:
            points.append(f"{_x(at, scale[1]):.1f},{_y(value, scale[0]):.1f}")
    if points:
        yield points if len(points) > 1 else points * 2


def _axes(top: float, end: float, unit: str) -> Iterator[str]:
    for value in (0.0, top / 4, top / 2, top * 3 / 4, top):
        y = _y(value, top)
        yield f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{WIDTH - _RIGHT}" y2="{y:.1f}" class="grid"/>'
        yield f'<text x="{_LEFT - 5}" y="{y + 4:.1f}" class="axis end">{value:g}</text>'
    for at in _ticks(end, 6):
        yield f'<text x="{_x(at, end):.1f}" y="{HEIGHT - 14}" class="axis mid">{at:g} s</text>'
    yield f'<text x="4" y="11" class="axis">{escape(unit)}</text>'


def _marks(marks: Sequence[Mark], end: float) -> Iterator[str]:
    for number, mark in enumerate(marks, start=1):
        if 0 <= mark.second <= end:
            x = _x(mark.second, end)
            yield (
                f'<g><title>{escape(mark.label)}</title><line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}"'
                f' y2="{HEIGHT - _BOTTOM}" class="mark"/>'
                f'<text x="{x + 2:.1f}" y="{_TOP + 8}" class="axis">{number}</text></g>'
            )


def _legend(picture: Chart) -> str:
    items = "".join(
        f'<li><svg viewBox="0 0 30 10" class="key"><line x1="0" y1="5" x2="30" y2="5" class="s{index % COLOURS} line"'
        f' stroke-dasharray="{_DASHES[index % len(_DASHES)] if not picture.is_stacked else ""}"/></svg>'
        f"{escape(series.name)}</li>"
        for index, series in enumerate(picture.series)
    )
    return f'<ul class="legend">{items}</ul>'


def _x(second: float, end: float) -> float:
    return _LEFT + (WIDTH - _LEFT - _RIGHT) * second / end


def _y(value: float, top: float) -> float:
    return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * value / top


def _nice(value: float) -> float:
    """The next 1, 2, 4 or 8 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** floor(log10(value))
    return next(step * power for step in (1, 2, 4, 8, 10) if value <= step * power * (1 + 1e-9))


def _ticks(end: float, count: int) -> list[float]:
    step = _nice(end / count)
    return [step * at for at in range(ceil(end / step)) if step * at <= end]
