"""The gate: what it measured of both arms, what it decided and why, and when it looks again."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content

from engine.protocol import wire
from tui import charts, words
from tui.charts import Part
from tui.panels.chat.side import marks
from tui.state import State
from tui.themes import arm_style
from tui.widgets import Cell, Panel, muted

SHOWN_DECISIONS = 100


class GatePanel(Panel):
    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Cell(id="gate-now", classes="box")
            yield Cell(id="gate-arms", classes="box")
            yield Cell(id="gate-speed", classes="box")
            yield Cell(id="gate-past", classes="box")

    def show(self, state: State, now: float) -> None:
        gate, span = state.gate, self.metrale.screens.span_s
        self.title("#gate-now", "Decision", _decided(state, now))
        self.query_one("#gate-now", Cell).put(decision(gate))
        self.title("#gate-arms", "Arms", "measured tokens per second, with one standard deviation")
        self.query_one("#gate-arms", Cell).put(arms(gate, self.size.width))
        self.title("#gate-speed", f"Delivered tok/s, {words.seconds(span)}", "dashed: plain")
        rows = 5 if self.size.height < 30 else 9
        self.query_one("#gate-speed", Cell).put(delivered(state, self.size.width, span, rows))
        self.title("#gate-past", "Decisions since this screen opened", "latest first")
        self.query_one("#gate-past", Cell).put(past(state))


def _decided(state: State, now: float) -> str:
    """A decision is an event: it grows old without being stale."""
    return f"{words.seconds(now - state.gate_at)} ago" if state.gate_at else ""


def decision(gate: wire.GateView | None) -> Content:
    if gate is None:
        return Content.styled("The gate has not decided anything yet; it does with the first decode steps.", "$quiet")
    return charts.join(
        [
            [muted("arm      "), (gate.arm, f"bold {arm_style(gate.arm)}"), muted("   mode "), (gate.mode, "bold"),
             muted("   context depth "), (f"{words.count(gate.depth)} tokens", "bold"), muted("   batch up to "),
             (str(gate.width_bucket), "bold")],
            [muted("because  "), (words.gate_reason(gate.reason), ""), muted(f"  ({gate.reason})")],
            [muted("next     "), (f"looks again in {words.count(gate.tokens_until_probe)} tokens", "")],
            [muted("switches "), (str(gate.switches), ""), muted("   losses in a row "), (str(gate.losses), ""),
             muted("   other arm must win by "), (f"{words.number(gate.margin)} tok/s", "")],
        ]
    )  # fmt: skip


def arms(gate: wire.GateView | None, width: int) -> Content:
    measured = [arm for arm in gate.arms if arm.tokens_per_s is not None] if gate else []
    if not gate or not gate.arms:
        return Content.styled("Nothing has been measured yet.", "$quiet")
    top = max((_high(arm) for arm in measured), default=1.0)
    room = max(10, min(50, width - 58))
    named = max(len(arm.name) for arm in gate.arms)
    return charts.join(_arm(arm, gate.arm, named, top, room) for arm in gate.arms)


def _high(arm: wire.ArmView) -> float:
    return (arm.tokens_per_s or 0.0) + (arm.deviation or 0.0)


def _arm(arm: wire.ArmView, chosen: str, named: int, top: float, room: int) -> list[Part]:
    color = arm_style(arm.name)
    name: list[Part] = [("› " if arm.name == chosen else "  ", "bold $accent"), (f"{arm.name:<{named}} ", color)]
    if arm.tokens_per_s is None:
        return [*name, muted("unmeasured")]
    spread = f" ± {words.number(arm.deviation)}" if arm.deviation is not None else ""
    old = f"  {words.count(arm.age_tokens)} tokens ago" + (", stale" if arm.stale else "")
    return [
        *name,
        *_whisker(arm, top, room, color),
        (f" {words.number(arm.tokens_per_s):>6}", "bold"),
        (f"{spread} tok/s", ""),
        (old, "$text-warning" if arm.stale else "$quiet"),
    ]


def _whisker(arm: wire.ArmView, top: float, room: int, color: str) -> list[Part]:
    """A bar up to the mean, with the spread marked on it."""
    mean, deviation = arm.tokens_per_s or 0.0, arm.deviation or 0.0
    ends = (mean - deviation, mean, mean + deviation)
    low, middle, high = (max(0, min(room, round(end / top * room))) for end in ends)
    return [("█" * low + "▒" * (middle - low) + "░" * (high - middle), color), (" " * (room - high), "")]


def delivered(state: State, width: int, span: float, height: int) -> Content:
    columns = max(10, width - charts.AXIS - 4)
    frame = charts.bucket(state.stats, lambda s: s.tokens_per_s, columns, span)
    base = state.latest.plain_tokens_per_s if state.latest else None
    picture = charts.chart(frame, height, marks=marks(state), base=base)
    return Content("\n").join([picture, charts.time_axis(columns, span)])


def past(state: State) -> Content:
    if not state.decisions:
        return Content.styled("none", "$quiet")
    newest = state.decisions[-1].time
    return charts.join(
        [muted(f"{words.seconds(newest - gate.time):>8} before  "), (f"{gate.arm:<10}", arm_style(gate.arm)),
         (words.gate_reason(gate.reason), "")]
        for gate in reversed(state.decisions[-SHOWN_DECISIONS:])
    )  # fmt: skip
