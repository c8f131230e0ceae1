"""Lanes: what each one delivered, how many drafts it had accepted by position, and why faster ones were refused."""

from __future__ import annotations

from functools import partial

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content

from engine.protocol import wire
from tui import charts, words
from tui.charts import Part
from tui.panels.chat.side import marks
from tui.state import State
from tui.themes import lane_style
from tui.widgets import Cell, Panel, age, muted, table
from tui.windows import Window, window

POSITIONS = 8
SHOWN_LANES, LABEL = 5, 10


class LanesPanel(Panel):
    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Cell(id="lanes-work", classes="box")
            yield Cell(id="lanes-time", classes="box")
            yield Cell(id="lanes-accept", classes="box")
            yield Cell(id="lanes-refused", classes="box")

    def show(self, state: State, now: float) -> None:
        span = self.metrale.screens.span_s
        seen, old = window(state.stats, span), age(state, state.stats_at, now)
        self.title("#lanes-work", f"Work by lane, last {words.seconds(span)}", old)
        self.query_one("#lanes-work", Cell).put(work(seen))
        self.title("#lanes-time", f"Delivered tok/s by lane, {words.seconds(span)}", "one scale for all")
        self.query_one("#lanes-time", Cell).put(over_time(state, seen, self.size.width, span))
        self.title("#lanes-accept", f"Accepted drafts by position, last {words.seconds(span)}", "accepted/drafted")
        self.query_one("#lanes-accept", Cell).put(acceptance(seen))
        lane = words.lane(state.latest.lane) if state.latest and state.latest.lane else words.DASH
        self.title("#lanes-refused", "Why not a faster lane", f"at the last step, which ran as {lane}")
        self.query_one("#lanes-refused", Cell).put(refusals(state.latest))


def work(seen: Window) -> Content:
    ranked = seen.ranked()
    if not ranked:
        return Content.styled("No step ran in this window.", "$quiet")
    head = [muted(name) for name in ("lane", "share", "tokens", "tok/s", "steps", "tok/step", "time", "accepted")]
    rows = [head, *(_work_row(name, lane, seen) for name, lane in ranked)]
    padded = table(rows)
    for (name, lane), row in zip(ranked, padded[1:], strict=True):
        share = lane.tokens / seen.tokens if seen.tokens else 0.0
        row += charts.bar(share, 16, lane_style(name))
    return charts.join(padded)


def over_time(state: State, seen: Window, width: int, span: float) -> Content:
    """One chart for each lane that delivered, all to the same scale."""
    busy = [name for name, lane in seen.ranked() if lane.tokens][:SHOWN_LANES]
    columns = max(10, width - charts.AXIS - LABEL - 4)
    frames = [charts.bucket(state.stats, partial(_rate, name), columns, span) for name in busy]
    if not frames:
        return Content.styled("No tokens in this window.", "$quiet")
    top = max((value for frame in frames for value in frame.values if value), default=0.0)
    blocks: list[Content] = []
    for row, (name, frame) in enumerate(zip(busy, frames, strict=True)):
        picture = charts.chart(frame, 2, marks=marks(state) if row == 0 else (), top=top, color=lane_style(name))
        blocks.append(charts.beside(f"{words.lane(name):<{LABEL}}", lane_style(name), picture))
    return Content("\n").join([*blocks, charts.beside(" " * LABEL, "", charts.time_axis(columns, span))])


def _rate(name: str, stats: wire.Stats) -> float | None:
    lane = stats.lanes.get(name)
    return (lane.tokens if lane else 0) / stats.window_s if stats.window_s else None


def _work_row(name: str, lane: wire.LaneStats, seen: Window) -> list[Part]:
    return [
        (words.lane(name), lane_style(name)),
        (words.percent(lane.tokens, seen.tokens), "bold"),
        (words.count(lane.tokens), ""),
        (words.number(lane.tokens / lane.seconds if lane.seconds else None), ""),
        (words.count(lane.steps), ""),
        (words.number(lane.tokens / lane.steps if lane.steps else None, 2), ""),
        (words.percent(lane.seconds, seen.seconds), ""),
        (words.percent(lane.accepted, lane.drafted) if lane.drafted else words.DASH, ""),
    ]


def acceptance(seen: Window) -> Content:
    drafting = [(name, lane) for name, lane in seen.ranked() if any(lane.drafted_at)]
    if not drafting:
        return Content.styled("Nothing was drafted in this window.", "$quiet")
    lines: list[list[Part]] = []
    for name, lane in drafting:
        lines.append([(words.lane(name), f"bold {lane_style(name)}")])
        lines += [_position(i, name, lane) for i in range(min(len(lane.drafted_at), POSITIONS)) if lane.drafted_at[i]]
    return charts.join(lines)


def _position(index: int, name: str, lane: wire.LaneStats) -> list[Part]:
    drafted = lane.drafted_at[index]
    accepted = lane.accepted_at[index] if index < len(lane.accepted_at) else 0
    return [
        muted(f"  draft {index + 1}  "),
        *charts.bar(accepted / drafted, 24, lane_style(name)),
        (f" {words.percent(accepted, drafted):>6}", "bold"),
        muted(f"  {accepted}/{drafted}"),
    ]


def refusals(stats: wire.Stats | None) -> Content:
    if stats is None or not stats.refusals:
        return Content.styled("No faster lane was refused.", "$quiet")
    width = max(len(words.lane(name)) for name in stats.refusals)
    return charts.join(
        [(f"{words.lane(name):<{width}}  ", lane_style(name)), (words.refusal(reason), ""), muted(f"  ({reason})")]
        for name, reason in stats.refusals.items()
    )
