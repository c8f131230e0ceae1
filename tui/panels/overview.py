"""Overview: throughput, time per token, batch and KV memory over time, with the numbers of now, window and run."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Grid
from textual.content import Content

from engine.protocol import wire
from tui import charts, words
from tui.charts import Part, Reading
from tui.panels.chat.side import marks
from tui.state import State
from tui.themes import lane_style
from tui.widgets import Cell, Panel, age, muted, table
from tui.windows import WINDOW_S, window

WIDE = 100


class OverviewPanel(Panel):
    def compose(self) -> ComposeResult:
        yield Cell(id="ov-now", classes="box")
        with Grid(id="ov-charts"):
            yield Cell(id="ov-speed", classes="box")
            yield Cell(id="ov-tpot", classes="box")
            yield Cell(id="ov-batch", classes="box")
            yield Cell(id="ov-kv", classes="box")

    def show(self, state: State, now: float) -> None:
        old, latest, span = age(state, state.stats_at, now), state.latest, self.metrale.screens.span_s
        self.title("#ov-now", "Numbers", old)
        self.query_one("#ov-now", Cell).put(numbers(state, self.size.width))
        stretch = words.seconds(span)
        base = latest.plain_tokens_per_s if latest else None
        self._chart(
            "#ov-speed",
            f"Delivered tok/s, {stretch}",
            f"dashed: plain {words.number(base)}",
            state,
            lambda s: s.tokens_per_s,
            base=base,
        )
        self._chart(
            "#ov-tpot",
            f"Time per token p95 in ms, {stretch}",
            "of the last 60 s",
            state,
            lambda s: s.tpot.p95,
            color=lane_style("mtp"),
        )
        self._chart(
            "#ov-batch",
            f"Sequences decoding, {stretch}",
            "",
            state,
            lambda s: float(s.active),
            color=lane_style("ngram"),
        )
        total = latest.kv_total_tokens if latest else 0
        self._chart("#ov-kv", f"KV tokens in use, {stretch}", f"of {words.count(total)}", state,
                    lambda s: float(s.kv_used_tokens), color=lane_style("dflash"))  # fmt: skip

    def _chart(
        self, selector: str, title: str, note: str, state: State, reading: Reading, *,
        base: float | None = None, color: str = "$primary",
    ) -> None:  # fmt: skip
        self.title(selector, title, note)
        cell = self.query_one(selector, Cell)
        span = self.metrale.screens.span_s
        width, height = cell.size.width - charts.AXIS, cell.size.height - 2
        if width < 10:
            return
        frame = charts.bucket(state.stats, reading, width, span)
        height -= any(frame.column(mark.time) is not None for mark in marks(state))
        picture = charts.chart(frame, max(height, 1), marks=marks(state), base=base, color=color)
        cell.put(Content("\n").join([picture, charts.time_axis(width, span)]))


def numbers(state: State, width: int) -> Content:
    """The table of numbers; the last pair of each row gives way on a narrow terminal."""
    latest = state.latest
    if latest is None:
        return Content.styled("No numbers have come yet; they start with the first step of the engine.", "$quiet")
    pairs = 4 if width >= WIDE else 3
    padded = table(
        [[muted(name), *(part for pair in row[:pairs] for part in pair)] for name, row in _rows(state, latest)]
    )
    note = f"* of drafts in the last {words.seconds(WINDOW_S)}; TTFT and TPOT: last 60 s"
    return charts.join([*padded, [muted(note)]])


def _rows(state: State, latest: wire.Stats) -> list[tuple[str, list[list[Part]]]]:
    seen = window(state.stats)
    prompts = f"{words.number(seen.prefill_tokens_per_s)} tok/s"
    return [
        ("throughput", [_pair("now", f"{words.number(latest.tokens_per_s)} tok/s"),
                        _pair(f"last {words.seconds(WINDOW_S)}", f"{words.number(seen.tokens_per_s)} tok/s"),
                        _pair("plain", f"{words.number(latest.plain_tokens_per_s)} tok/s"), _pair("prompts", prompts)]),
        ("TTFT", _quantiles(latest.ttft)),
        ("TPOT", _quantiles(latest.tpot)),
        ("batch", [_pair("active", str(latest.active)), _pair("waiting", str(latest.waiting)),
                   _pair("prefill", str(latest.prefilling)), _pair("parked", str(latest.swapped + latest.preempted))]),
        ("KV", [_pair("used", words.percent(latest.kv_used_tokens, latest.kv_total_tokens)),
                _pair("tokens", words.count(latest.kv_used_tokens)), _pair("of", words.count(latest.kv_total_tokens)),
                _pair("cached", words.count(latest.cached_tokens))]),
        ("whole run", [_pair("tokens", words.count(latest.total_tokens)),
                       _pair("requests", words.count(latest.total_requests)),
                       _pair("accepted*", words.percent(seen.acceptance)),
                       _pair("gate", state.gate.arm if state.gate else words.DASH)]),
    ]  # fmt: skip


def _pair(name: str, value: str) -> list[Part]:
    return [muted(name), (value, "bold")]


def _quantiles(q: wire.Quantiles) -> list[list[Part]]:
    values = (("p50", q.p50), ("p95", q.p95), ("p99", q.p99))
    return [*(_pair(name, words.milliseconds(value)) for name, value in values), _pair("samples", words.count(q.count))]
