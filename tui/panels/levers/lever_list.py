"""A list of levers that is edited in place: it asks for a change and shows it as pending until the engine answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.segment import Segment
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from engine.levers.spec import LeverError, Value
from engine.protocol.wire import LeverView
from tui.palette import paint
from tui.panels.levers.values import parse_value, show_value, stepped
from tui.state import State

Part = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Row:
    """One line: a heading (no lever) or a lever as it is to be painted."""

    text: str
    lever: LeverView | None = None
    value: str = ""
    pending: str = ""
    refused: bool = False


class LeverList(ScrollView, can_focus=True):
    """Up and down choose, left and right step, Enter edits or toggles, Esc leaves, Backspace restores the default."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("home", "move(-999)", "First", show=False),
        Binding("end", "move(999)", "Last", show=False),
        Binding("pageup", "move(-10)", "Page up", show=False),
        Binding("pagedown", "move(10)", "Page down", show=False),
        Binding("left", "step(-1)", "Less", show=False),
        Binding("right", "step(1)", "More", show=False),
        Binding("enter", "edit", "Edit"),
        Binding("space", "flip", "Toggle", show=False),
        Binding("backspace,delete", "reset", "Default", show=False),
    ]

    @dataclass
    class Asked(Message):
        """The operator wants `name` to be `value`; `seen` is what the list showed."""

        name: str
        value: Value
        seen: Value

    @dataclass
    class Chosen(Message):
        lever: LeverView

    @dataclass
    class Wrong(Message):
        message: str

    def __init__(
        self, names: Sequence[str] = (), *, compact: bool = False, id: str | None = None, classes: str | None = None
    ) -> None:
        super().__init__(id=id, classes=classes)
        self._names = tuple(names)
        self._compact = compact
        self._rows: list[Row] = []
        self._cursor = ""
        self._typed: str | None = None

    # ---- state in

    def show(self, state: State) -> None:
        rows = list(self._lines(state))
        if rows == self._rows:
            return
        resized = len(rows) != len(self._rows)
        self._rows = rows
        if self._index() is None:
            self._cursor = next((row.lever.name for row in rows if row.lever), "")
        if resized:
            self.virtual_size = Size(self.size.width, len(rows))
        self.refresh()

    def _lines(self, state: State) -> Sequence[Row]:
        rows: list[Row] = []
        group = ""
        shown = [lever for lever in state.levers.values() if not self._names or lever.name in self._names]
        groups = list(dict.fromkeys(lever.group for lever in shown))
        for lever in sorted(shown, key=lambda lever: groups.index(lever.group)):
            if lever.group != group and not self._compact:
                rows.append(Row(lever.group))
            group = lever.group
            waiting = state.pending.get(lever.name)
            pending = "" if waiting is None else "undo" if waiting.value is None else show_value(lever, waiting.value)
            rows.append(Row(lever.name, lever, show_value(lever, lever.value), pending, lever.name in state.refusals))
        return rows

    @property
    def lever(self) -> LeverView | None:
        index = self._index()
        return None if index is None else self._rows[index].lever

    def _index(self) -> int | None:
        return next((i for i, row in enumerate(self._rows) if row.lever and row.lever.name == self._cursor), None)

    # ---- painting

    def render_line(self, y: int) -> Strip:
        index = y + self.scroll_offset.y
        width = self.size.width
        if not 0 <= index < len(self._rows):
            return Strip.blank(width, self.rich_style)
        row = self._rows[index]
        parts = self._heading(row) if row.lever is None else self._lever(row, row.lever, width)
        chosen = row.lever is not None and row.lever.name == self._cursor and self.has_focus
        ground = " on $primary-muted" if chosen else ""
        segments = [Segment(text, paint(self.app, (style + ground).strip())) for text, style in parts]
        fill = paint(self.app, ground.strip()) if chosen else self.rich_style
        return Strip(segments).adjust_cell_length(width, fill).apply_style(self.rich_style).crop(0, width)

    def _heading(self, row: Row) -> list[Part]:
        return [(f" {row.text}", "bold $text-primary")]

    def _lever(self, row: Row, lever: LeverView, width: int) -> list[Part]:
        cursor = "›" if lever.name == self._cursor and self.has_focus else " "
        flag = "…" if row.pending else " " if lever.lossless else "≠"
        name: list[Part] = [(cursor, "bold $text-accent"), (flag, "bold $text-warning")]
        room = 18 if self._compact else 24
        name.append((f"{lever.name:<{room}} ", "$quiet" if lever.applies == "restart" else "$foreground"))
        value = self._value(row, lever)
        if self._compact:
            return name + value
        used = sum(len(text) for text, _ in name + value)
        bounds = lever.bounds if width >= 76 + len(lever.bounds) else ""
        gap = max(1, 28 + 20 - used)
        note = f"{lever.source:<12}{'' if lever.applies == 'tick' else 'next ' + lever.applies:<14}"
        return [
            *name,
            *value,
            (" " * gap, ""),
            (note, "$quiet"),
            (bounds, "$quiet"),
        ]

    def _value(self, row: Row, lever: LeverView) -> list[Part]:
        if self._typed is not None and lever.name == self._cursor:
            return [(f"{self._typed}", "bold $text-accent underline"), ("▏", "$text-accent")]
        changed = lever.value != lever.default
        value = (row.value, "bold $text-accent" if changed else "$foreground")
        if row.pending:
            word = "" if self._compact else " pending"
            return [value, (f" → {row.pending}{word}", "italic $text-warning")]
        return [value, (" refused", "$text-error")] if row.refused else [value]

    # ---- keys

    def action_move(self, by: int) -> None:
        self._typed = None
        levers = [i for i, row in enumerate(self._rows) if row.lever]
        index = self._index()
        if index is None:
            return
        place = max(0, min(len(levers) - 1, levers.index(index) + by))
        lever = self._rows[levers[place]].lever
        if lever is not None:
            self._cursor = lever.name
            top = levers[place] - (1 if place == 0 or self._rows[levers[place] - 1].lever is None else 0)
            self.scroll_to_region(Region(0, max(top, 0), 1, levers[place] - max(top, 0) + 1), animate=False)
            self.post_message(self.Chosen(lever))
        self.refresh()

    def action_step(self, by: int) -> None:
        lever = self.lever
        if lever is None or self._typed is not None:
            return
        value = stepped(lever, by)
        if value is not None and value != lever.value:
            self.post_message(self.Asked(lever.name, value, lever.value))

    def action_flip(self) -> None:
        lever = self.lever
        if lever is not None and lever.kind in ("bool", "choice") and self._typed is None:
            self.action_step(1)

    def action_edit(self) -> None:
        lever = self.lever
        if lever is None:
            return
        if self._typed is not None:
            typed, self._typed = self._typed, None
            self._ask(lever, typed)
        elif lever.kind in ("bool", "choice"):
            self.action_step(1)
        else:
            self._typed = ""
        self.refresh()

    def action_reset(self) -> None:
        lever = self.lever
        if self._typed is not None:
            self._typed = self._typed[:-1]
            self.refresh()
        elif lever is not None and lever.value != lever.default:
            self.post_message(self.Asked(lever.name, lever.default, lever.value))

    @property
    def editing(self) -> bool:
        return self._typed is not None

    def leave(self) -> None:
        """Drops what was typed."""
        self._typed = None
        self.refresh()

    def on_key(self, event: events.Key) -> None:
        if self._typed is None:
            lever = self.lever
            if lever is None or lever.kind in ("bool", "choice") or not (event.character or "").isdigit():
                return
            self._typed = ""
        if event.key == "escape":
            self.leave()
        elif event.is_printable and event.character:
            self._typed += event.character
        else:
            return
        event.stop()
        event.prevent_default()
        self.refresh()

    def on_paste(self, event: events.Paste) -> None:
        if self._typed is not None:
            self._typed += event.text.strip().replace("\n", "")
            self.refresh()

    def on_focus(self) -> None:
        self.refresh()
        if self.lever is not None:
            self.post_message(self.Chosen(self.lever))

    def on_blur(self) -> None:
        self.leave()

    def on_click(self, event: events.Click) -> None:
        index = event.y - self.gutter.top + self.scroll_offset.y
        row = self._rows[index] if 0 <= index < len(self._rows) else None
        if row is None or row.lever is None:
            return
        again = row.lever.name == self._cursor
        self._cursor = row.lever.name
        self.refresh()
        if again:
            self.action_edit()

    def _ask(self, lever: LeverView, typed: str) -> None:
        try:
            value = parse_value(lever, typed)
        except LeverError as error:
            self.post_message(self.Wrong(str(error)))
            return
        if value != lever.value:
            self.post_message(self.Asked(lever.name, value, lever.value))
