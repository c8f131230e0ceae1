"""Telemetry about itself: what was lost, what recording costs, how the database is, and what this screen missed."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content

from tui import charts, words
from tui.charts import Part
from tui.state import State
from tui.widgets import Cell, Panel, age, muted


class TelemetryPanel(Panel):
    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Cell(id="tele-health", classes="box")
            yield Cell(id="tele-lost", classes="box")
            yield Cell(id="tele-cost", classes="box")
            yield Cell(id="tele-screen", classes="box")
            yield Cell(id="tele-versions", classes="box")

    def show(self, state: State, now: float) -> None:
        self.title("#tele-health", "Database and recording", age(state, state.stats_at, now))
        self.query_one("#tele-health", Cell).put(health(state))
        self.title("#tele-lost", "Lost", "whole run")
        self.query_one("#tele-lost", Cell).put(lost(state))
        self.title("#tele-cost", "Cost of recording in % of tick time", words.seconds(self.metrale.screens.span_s))
        self.query_one("#tele-cost", Cell).put(cost(state, self.size.width, self.metrale.screens.span_s))
        self.title("#tele-screen", "This screen", f"since {words.seconds(now - state.since)}" if state.since else "")
        self.query_one("#tele-screen", Cell).put(screen(state))
        self.title("#tele-versions", "Run", state.facts.run_id if state.facts else "")
        self.query_one("#tele-versions", Cell).put(versions(state))


def health(state: State) -> Content:
    latest = state.latest
    if latest is None:
        return Content.styled("No numbers have come yet.", "$quiet")
    sound = latest.database == "ok"
    trace = state.levers.get("trace_level")
    level = str(trace.value) if trace else words.DASH
    return charts.join(
        [
            [muted("database     "), ("ok" if sound else latest.database, "$text-success" if sound else "$text-error")],
            [muted("own cost     "), (words.percent(latest.telemetry_cost), "bold"), muted(" of tick time, measured")],
            [muted("trace level  "), (level, "bold"), muted("  0 off, 1 requests, 2 steps, 3 tokens")],
            [muted("tick         "), (words.count(latest.tick), "bold")],
        ]
    )


def lost(state: State) -> Content:
    kinds = state.latest.lost if state.latest else {}
    if not kinds:
        return Content.styled("Nothing was reported lost.", "$quiet")
    lines: list[list[Part]] = [
        [muted(f"{kind:<13}"), (words.count(amount), "bold $text-error" if amount else "bold $text-success")]
        for kind, amount in sorted(kinds.items())
    ]
    return charts.join(lines)


def cost(state: State, width: int, span: float) -> Content:
    columns = max(10, width - charts.AXIS - 4)
    frame = charts.bucket(state.stats, lambda s: s.telemetry_cost * 100, columns, span)
    return Content("\n").join([charts.chart(frame, 3, color="$secondary"), charts.time_axis(columns, span)])


def screen(state: State) -> Content:
    return charts.join(
        [
            [muted("frames kept  "), (words.count(len(state.stats)), "bold"), muted("  skipped because this screen was "
             "slow  "), (words.count(state.skipped), "bold $text-warning" if state.skipped else "bold")],
            [muted("reconnects   "), (str(state.link.drops), "bold $text-warning" if state.link.drops else "bold")],
        ]
    )  # fmt: skip


def versions(state: State) -> Content:
    facts = state.facts
    if facts is None:
        return Content.styled("The engine has not said yet what it runs.", "$quiet")
    lines: list[list[Part]] = [
        [muted("model        "), (facts.model, "bold")],
        [muted("device       "), (f"{facts.device}, {facts.dtype}", "")],
        [muted("capacity     "), (f"batch {facts.max_batch_size}, context {words.count(facts.max_context)} tokens, "
         f"KV {words.count(facts.kv_tokens)} tokens in blocks of {facts.block_size}", "")],
        [muted("drafters     "), (", ".join(facts.drafters) or "none", "")],
    ]  # fmt: skip
    lines += [[muted(f"{name:<13}"), (version, "")] for name, version in sorted(facts.versions.items())]
    return charts.join(lines)
