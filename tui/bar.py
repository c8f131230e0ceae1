"""The top line (what runs, whether it answers, what is held or replayed) and the bottom line (keys)."""

from __future__ import annotations

from collections.abc import Iterable

from textual.content import Content

from engine.protocol import wire
from tui import charts, words
from tui.actions import ACTIONS, Action
from tui.charts import Part
from tui.state import Phase, State
from tui.widgets import muted

KEY_SIGNS = {"question_mark": "?", "escape": "Esc", "f1": "F1", "f2": "F2", "f3": "F3", "left": "←", "right": "→"}


def top_line(state: State, now: float, *, held: float, pane: str, width: int) -> Content:
    left: list[Part] = [(" metrale ", "bold $text-primary"), (f"{pane} ", "bold"), *_condition(state, now)]
    if held:
        left.append((f" HELD {words.seconds(now - held)}, still recording ", "bold $text-warning"))
    if state.latest is not None and state.latest.replay_run:
        left += _replay(state, state.latest)
    facts = state.facts
    right = f"{facts.model} on {facts.device} " if facts else ""
    used = sum(len(text) for text, _ in left)
    if used + len(right) >= width:
        right = ""
    return Content.assemble(*left, (" " * max(0, width - used - len(right)), ""), muted(right))


REPLAY_LENGTH = "replay length"


def replay_length(run: str) -> wire.Query:
    """Asks how long a recorded run lasted."""
    name = "".join(char for char in run if char.isalnum() or char in "-_")
    of_run = f"run = (SELECT max(run) FROM runs WHERE run_id = '{name}')"
    sql = f"SELECT epoch(max(start)) - epoch(min(start)) FROM lane_steps WHERE {of_run}"
    return wire.Query(query_id=REPLAY_LENGTH, sql=sql, max_rows=1)


def _replay(state: State, latest: wire.Stats) -> list[Part]:
    """Which run, how far, and a bar once it is known how long the run was."""
    parts: list[Part] = [(f" REPLAY {latest.replay_run[:8]} ", "bold $text-accent")]
    asked = state.queries.get(REPLAY_LENGTH)
    rows = asked.result.rows if asked and asked.result else ()
    length = rows[0][0] if rows and rows[0] else None
    if isinstance(length, int | float) and length > 0:
        parts += charts.bar(latest.replay_position / length, 16, "$accent")
        return [*parts, (f" {words.seconds(latest.replay_position)} of {words.seconds(length)} ", "")]
    return [*parts, (f"at {words.seconds(latest.replay_position)} ", "")]


def key_line(offered: Iterable[Action], width: int) -> Content:
    """The bottom line: keys that do something here, as many as fit; each can be clicked."""
    parts: list[Content] = []
    used = 1
    for action in offered:
        key = KEY_SIGNS.get(action.key.split(",")[0], action.key.split(",")[0].replace("ctrl+", "^"))
        used += len(key) + len(action.label) + 3
        if used > width:
            break
        link = f"[@click=app.act('{action.name}')]{action.label}[/]"
        parts.append(Content.from_markup(f" [bold $accent]{key}[/] {link} "))
    return Content("").join(parts)


def tab_line(pane: str, digits: bool) -> Content:
    """The operator screens with their keys, the present one marked."""
    parts: list[Content] = []
    for action in ACTIONS:
        name = action.name.removeprefix("go_")
        if action.name == name or name in ("chat", "provenance"):
            continue
        key = action.key.split(",")[-1 if digits else 0].upper()
        style = "bold reverse" if name == pane else "not bold"
        label = f"[@click=app.act('{action.name}')]{action.label.lower()}[/]"
        parts.append(Content.from_markup(f"[bold $accent]{key}[/] [{style}]{label}[/]"))
    return Content("  ").join(parts)


def _condition(state: State, now: float) -> list[Part]:
    link = state.link
    if link.phase is Phase.REFUSED:
        return [("● not connected ", "bold $text-error"), muted(link.reason)]
    if link.phase is Phase.DOWN:
        return [(f"● down for {words.seconds(now - link.since)} ", "bold $text-error"), muted(link.reason)]
    if link.phase is Phase.CONNECTING:
        return [("○ connecting ", "$text-warning")]
    if state.loading.state == "failed":
        return [("● failed ", "bold $text-error"), muted(state.loading.message)]
    if state.loading.state != "ready":
        return [("○ loading ", "$text-warning"), muted(state.loading.stage)]
    if state.stats_at and now - state.stats_at > 3:
        return [(f"○ stale for {words.seconds(now - state.stats_at)} ", "$text-warning")]
    return [("● live ", "$text-success"), *([] if state.role != "read" else [muted("read only ")])]
