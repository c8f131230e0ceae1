"""The levers screen: all levers, what the chosen one means, the history of changes and the effect of each."""

from __future__ import annotations

from textual import on
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content

from engine.protocol import wire
from tui import charts, words
from tui.charts import Part
from tui.panels.levers.lever_list import LeverList
from tui.panels.levers.values import show_value
from tui.state import State
from tui.widgets import Cell, Panel, muted
from tui.windows import effect

SHOWN_CHANGES = 50
FOREVER = float("inf")


class LeversPanel(Panel):
    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._chosen = ""

    def compose(self) -> ComposeResult:
        yield LeverList(id="all-levers", classes="box")
        yield Cell(id="lever-facts", classes="box")
        with VerticalScroll(id="lever-past", classes="box"):
            yield Cell(id="lever-changes")

    def on_mount(self) -> None:
        self.title("#all-levers", "Levers", "≠ lossy · Enter edits · ← → step · Backspace default · u undo")
        self.title("#lever-past", "Changes since this screen opened", "effect on tok/s, 30 s each side")

    def landed(self) -> None:
        self.query_one("#all-levers", LeverList).focus()

    def show(self, state: State, now: float) -> None:
        levers = self.query_one("#all-levers", LeverList)
        levers.show(state)
        lever = levers.lever
        self.title("#lever-facts", lever.name if lever else "Lever", lever.env if lever else "")
        self.query_one("#lever-facts", Cell).put(facts(state, lever))
        self.query_one("#lever-changes", Cell).put(changes(state, now))

    @on(LeverList.Chosen)
    def _lever_chosen(self, event: LeverList.Chosen) -> None:
        self.metrale.repaint()


def facts(state: State, lever: wire.LeverView | None) -> Content:
    if lever is None:
        return Content.styled("The engine has not told its levers yet.", "$quiet")
    promise: Part = ("lossless", "$text-success") if lever.lossless else ("≠ may change the answer", "$text-warning")
    when = {"tick": "at the next step", "request": "for the next requests", "restart": "after a restart"}
    refusal = state.refusals.get(lever.name)
    last: list[Part] = [(refusal.message, "$text-error")] if refusal else []
    return charts.join(
        [
            [(lever.help, "")],
            [muted("takes "), (lever.bounds, ""), muted("   default "), (show_value(lever, lever.default), ""),
             muted("   applies "), (when.get(lever.applies, lever.applies), ""), muted("   from "), (lever.source, ""),
             muted("   "), promise],
            last,
        ]
    )  # fmt: skip


def changes(state: State, now: float) -> Content:
    if not state.changes:
        return Content.styled("No lever was changed yet.", "$quiet")
    lines: list[list[Part]] = []
    following = FOREVER
    for change in list(reversed(state.changes))[:SHOWN_CHANGES]:
        lines.append(_change(state, change, following, now))
        following = change.time
    return charts.join(lines)


def _change(state: State, change: wire.LeverEvent, following: float, now: float) -> list[Part]:
    lever = state.levers.get(change.name)
    old, new = (show_value(lever, v) if lever else str(v) for v in (change.old, change.new))
    parts: list[Part] = [
        muted(f"{words.seconds(now - change.time):>7} ago  "),
        (f"{change.name} ", "bold"),
        (f"{old} → {new}", "$text-accent"),
        muted(f"  {change.origin}, tick {words.count(change.tick)}"),
    ]
    if change.expires > now:
        parts.append((f"  reverts in {words.seconds(change.expires - now)}", "$text-warning"))
    return [*parts, *_effect(state, change, following)]


def _effect(state: State, change: wire.LeverEvent, following: float) -> list[Part]:
    seen = effect(state.stats, change, following)
    if seen is None:
        return [muted("  too little busy time to judge")]
    style = "$quiet" if not seen.certain else "$text-success" if seen.change > 0 else "$text-error"
    bounds = f"95 %: {seen.low:+.0%} to {seen.high:+.0%}"
    return [(f"  {seen.change:+.0%}", f"bold {style}"), muted(f" ({bounds})")]
