"""Charts as text: bars over time with an axis, a base line and marks where a lever changed. Pure; no widgets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from textual.content import Content

from engine.protocol import wire
from tui import words

BLOCKS = " ▁▂▃▄▅▆▇█"
AXIS = 7
Part = tuple[str, str]
Reading = Callable[[wire.Stats], float | None]


@dataclass(frozen=True, slots=True)
class Mark:
    time: float
    label: str


@dataclass(frozen=True, slots=True)
class Frame:
    """The columns of a chart: one mean (or None) per bucket of `step` seconds, the last ending at `end`."""

    values: tuple[float | None, ...]
    end: float
    step: float

    def column(self, time: float) -> int | None:
        index = len(self.values) - 1 - floor((self.end - time) / self.step)
        return index if 0 <= index < len(self.values) else None


def bucket(stats: Sequence[wire.Stats], reading: Reading, columns: int, span_s: float) -> Frame:
    """Means of `reading` in `columns` buckets that together cover `span_s`; bucket borders do not move with time."""
    step = span_s / max(columns, 1)
    if not stats:
        return Frame((None,) * columns, 0.0, step)
    end = ceil(stats[-1].time / step) * step
    sums, counts = [0.0] * columns, [0] * columns
    for frame in reversed(stats):
        index = columns - 1 - floor((end - frame.time) / step)
        if index < 0:
            break
        value = reading(frame)
        if value is not None and index < columns:
            sums[index] += value
            counts[index] += 1
    return Frame(tuple(sums[i] / counts[i] if counts[i] else None for i in range(columns)), end, step)


def chart(
    frame: Frame,
    height: int,
    *,
    marks: Iterable[Mark] = (),
    base: float | None = None,
    top: float = 0.0,
    color: str = "$primary",
) -> Content:
    """A chart of `height` rows: bars, an axis up to the greatest value, `base` as a dashed line, marks on top."""
    top = nice_ceiling(max([v for v in frame.values if v is not None] + [base or 0.0, top]))
    marked = {column: mark.label for mark in marks if (column := frame.column(mark.time)) is not None}
    lines: list[list[Part]] = []
    for row in range(height - 1, -1, -1):
        label = axis_label(top) if row == height - 1 else "0" if row == 0 else ""
        lines.append([(f"{label:>{AXIS - 2}} ", "$quiet"), *_row(frame, row, height, top, marked, base, color)])
    if marked:
        lines.insert(0, [(" " * (AXIS - 1), ""), (_flags(marked, len(frame.values)), "$text-accent")])
    return join(lines)


def _row(
    frame: Frame, row: int, height: int, top: float, marked: dict[int, str], base: float | None, color: str
) -> list[Part]:
    base_row = floor(base / top * height) if base is not None and top else -1
    cells: list[Part] = []
    for column, value in enumerate(frame.values):
        eighths = 0 if value is None or not top else round((value / top * height - row) * 8)
        if value and row == 0:
            eighths = max(eighths, 1)
        if eighths > 0:
            cells.append((BLOCKS[min(eighths, 8)], color if eighths <= 8 else f"{color} 55%"))
        elif column in marked:
            cells.append(("┊", "$text-accent"))
        elif row == base_row:
            cells.append(("╌", "$quiet"))
        else:
            cells.append((" ", ""))
    return runs(cells)


def _flags(marked: dict[int, str], width: int) -> str:
    """One line with a flag over each marked column and its name where there is room."""
    line = [" "] * width
    for column in sorted(marked):
        line[column] = "▾"
    for column, label in sorted(marked.items(), reverse=True):
        room = next((i for i in range(column + 1, width) if line[i] != " "), width) - column - 1
        text = label if len(label) <= room else ""
        line[column + 1 : column + 1 + len(text)] = text
    return "".join(line)


def beside(label: str, style: str, picture: Content) -> Content:
    """`picture` with `label` at the left of its last line."""
    lines = picture.split("\n")
    blank = " " * len(label)
    named = [Content.assemble((label if line is lines[-1] else blank, style), line) for line in lines]
    return Content("\n").join(named)


def axis_label(top: float) -> str:
    return words.number(top, 0) if top >= 10 else f"{top:.2g}"


def time_axis(width: int, span_s: float) -> Content:
    left = f"-{words.seconds(span_s)}"
    return Content.styled(" " * (AXIS - 1) + f"{left}{'now':>{max(width - len(left), 3)}}", "$quiet")


def bar(share: float, width: int, color: str = "$primary") -> list[Part]:
    """A horizontal gauge of `width` cells."""
    eighths = round(max(0.0, min(share, 1.0)) * width * 8)
    full, rest = divmod(eighths, 8)
    partial = "▏▎▍▌▋▊▉"[rest - 1] if rest else ""
    return [("█" * full + partial, color), ("·" * (width - full - bool(rest)), "$text-disabled")]


def runs(cells: Iterable[Part]) -> list[Part]:
    """Neighbouring parts of one style joined."""
    joined: list[Part] = []
    for text, style in cells:
        if joined and joined[-1][1] == style:
            joined[-1] = (joined[-1][0] + text, style)
        else:
            joined.append((text, style))
    return joined


def join(lines: Iterable[Iterable[Part]]) -> Content:
    return Content("\n").join([Content.assemble(*parts) for parts in lines])


def nice_ceiling(value: float) -> float:
    """The next round number at or above `value`, so that an axis does not jump with every frame."""
    if value <= 0:
        return 1.0
    power: float = 10.0 ** floor(log10(value))
    return next(step * power for step in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if step * power >= value * 0.9999)
