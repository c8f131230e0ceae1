"""The panel beside the chat: throughput, latency, batch, KV memory, lanes, the gate in one line, and the levers."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.content import Content

from engine.protocol import wire
from tui import charts, words
from tui.charts import Part
from tui.panels.levers.lever_list import LeverList
from tui.state import State
from tui.themes import lane_style
from tui.widgets import Cell, Panel, age, muted
from tui.windows import WINDOW_S, window

CHART_COLUMNS, CHART_SPAN_S = 30, 60.0
SIDE_LEVERS = (
    "drafter", "num_drafts", "mtp_gate", "draft_conf_min", "pipelined_decode", "always_mixed", "max_prefill_tokens",
    "loop_watchdog", "think_budget", "adaptive_sampling", "force_temp_zero", "shadow_check", "trace_level",
)  # fmt: skip
"""Shown beside the chat; the levers screen has all of them."""


class Side(Panel):
    def compose(self) -> ComposeResult:
        yield Cell(id="side-speed", classes="box")
        yield Cell(id="side-latency", classes="box")
        yield Cell(id="side-lanes", classes="box")
        yield LeverList(names=SIDE_LEVERS, compact=True, id="side-levers", classes="box")

    def on_mount(self) -> None:
        self.title("#side-speed", "Throughput")
        self.title("#side-latency", "Latency and memory")
        self.title("#side-lanes", "Lanes")
        self.title("#side-levers", "Levers", "^l edits, ≠ is lossy")

    def show(self, state: State, now: float) -> None:
        old = age(state, state.stats_at, now)
        self.title("#side-speed", "Throughput", old)
        self.title("#side-lanes", f"Lanes, last {words.seconds(WINDOW_S)}", gate_word(state))
        self.query_one("#side-speed", Cell).put(speed(state))
        self.query_one("#side-latency", Cell).put(latency(state.latest))
        self.query_one("#side-lanes", Cell).put(lanes(state))
        self.query_one("#side-levers", LeverList).show(state)


def marks(state: State) -> list[charts.Mark]:
    return [charts.Mark(change.time, change.name) for change in state.changes]


def speed(state: State) -> Content:
    latest = state.latest
    frame = charts.bucket(state.stats, lambda s: s.tokens_per_s, CHART_COLUMNS, CHART_SPAN_S)
    base = latest.plain_tokens_per_s if latest else None
    now: list[Part] = [
        (f"{words.number(latest.tokens_per_s if latest else None)} tok/s", "bold $text-primary"),
        muted(f"  plain {words.number(base)} tok/s" if base else "  plain unmeasured"),
    ]
    picture = charts.chart(frame, 3, marks=marks(state), base=base)
    return Content("\n").join([Content.assemble(*now), picture, charts.time_axis(CHART_COLUMNS, CHART_SPAN_S)])


def latency(stats: wire.Stats | None) -> Content:
    if stats is None:
        return Content.styled("no numbers yet", "$quiet")
    used = stats.kv_used_tokens / stats.kv_total_tokens if stats.kv_total_tokens else 0.0
    lines: list[list[Part]] = [
        [muted("TTFT  p50 "), (words.milliseconds(stats.ttft.p50), ""), muted("  p95 "),
         (words.milliseconds(stats.ttft.p95), "")],
        [muted("TPOT  p50 "), (words.milliseconds(stats.tpot.p50), ""), muted("  p95 "),
         (words.milliseconds(stats.tpot.p95), "")],
        [muted("batch "), (f"{stats.active}", "bold"), muted(f" active, {stats.waiting} waiting, "
         f"{stats.prefilling} prefilling")],
        [muted("KV    "), *charts.bar(used, 12),
         muted(f" {words.percent(used)} of {words.count(stats.kv_total_tokens)}")],
    ]  # fmt: skip
    return charts.join(lines)


def lanes(state: State) -> Content:
    seen = window(state.stats)
    ranked = [(name, lane) for name, lane in seen.ranked() if lane.tokens]
    if not ranked:
        return Content.styled("no tokens in this window", "$quiet")
    lines = [_lane_row(name, lane, seen.tokens) for name, lane in ranked[:5]]
    if seen.drafted:
        lines.append([muted(f"accepted {seen.accepted}/{seen.drafted} drafts "), (words.percent(seen.acceptance), "")])
    return charts.join(lines)


def _lane_row(name: str, lane: wire.LaneStats, total: int) -> list[Part]:
    share = lane.tokens / total if total else 0.0
    accepted = f" {words.percent(lane.accepted, lane.drafted)} acc." if lane.drafted else ""
    style = lane_style(name)
    return [(f"{words.lane(name):<10}", style), *charts.bar(share, 10, style), (f" {words.percent(share):>5}", ""),
            muted(accepted)]  # fmt: skip


def gate_word(state: State) -> str:
    gate = state.gate
    return f"gate: {gate.arm}" if gate else ""
