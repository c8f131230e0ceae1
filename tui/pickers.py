"""Small screens in front of the others: choose one line out of many, and the help with every key and command."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option

from tui import charts
from tui.actions import ACTIONS, SETTINGS, Action, Where
from tui.charts import Part
from tui.widgets import Cell, muted

Row = tuple[str, str, str]
"""What is returned, what is shown, and a note beside it."""


class Picker(ModalScreen[str]):
    """Type to narrow, Enter to take, Esc to leave."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss('')", "Leave"),
        Binding("down", "move(1)", "Down", show=False, priority=True),
        Binding("up", "move(-1)", "Up", show=False, priority=True),
    ]

    def __init__(self, title: str, rows: Sequence[Row], *, empty: str, query: str = "") -> None:
        super().__init__()
        self._title, self._rows, self._empty, self._query = title, rows, empty, query
        self._found: list[Row] = []

    def compose(self) -> ComposeResult:
        with Vertical(classes="window") as window:
            window.border_title = self._title
            yield Input(self._query, placeholder="type to narrow")
            yield OptionList(compact=True)
            yield Cell(self._empty, classes="empty")

    def on_mount(self) -> None:
        self._narrow(self._query)

    def on_input_changed(self, event: Input.Changed) -> None:
        self._narrow(event.value)

    def _narrow(self, query: str) -> None:
        needles = query.lower().split()
        self._found = [row for row in self._rows if all(n in (row[1] + row[2]).lower() for n in needles)][:200]
        options = self.query_one(OptionList)
        options.clear_options()
        options.add_options(
            Option(Content.assemble(shown[:90], (f"  {note}" if note else "", "$quiet")))
            for _, shown, note in self._found
        )
        options.highlighted = 0 if self._found else None
        self.query_one(".empty").display = not self._rows

    def action_move(self, by: int) -> None:
        options = self.query_one(OptionList)
        (options.action_cursor_down if by > 0 else options.action_cursor_up)()

    def on_input_submitted(self) -> None:
        index = self.query_one(OptionList).highlighted
        self.dismiss(self._found[index][0] if index is not None and self._found else "")

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._found[event.option_index][0])


class HelpScreen(ModalScreen[None]):
    """Every action with its key and its command, straight from the registry."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,f1,question_mark", "dismiss", "Close")]

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="window") as window:
            window.border_title = "Keys and commands"
            window.border_subtitle = "Esc closes"
            yield Cell(id="help-text")

    def on_resize(self) -> None:
        self.query_one("#help-text", Cell).put(help_text(min(self.size.width * 9 // 10, 96) - 6))


def help_text(width: int) -> Content:
    """Every action, its sentence wrapped behind key and command."""
    lines: list[list[Part]] = []
    for where in Where:
        actions = [action for action in ACTIONS if action.where is where]
        lines += [
            [(str(where), "bold $text-primary")],
            *(line for action in actions for line in _row(action, width)),
            [],
        ]
    lines.append([("in the input", "bold $text-primary")])
    typed = (("enter", "Send."), ("shift+enter, ctrl+j", "Break the line."), ("up, down", "What was typed before."),
             ("tab", "Take the completion."))  # fmt: skip
    lines += [[(f"  {key:<22}", "bold"), muted(text)] for key, text in typed]
    lines += [[], [("on a lever", "bold $text-primary")]]
    lever = (("left, right", "Step."), ("enter", "Toggle, or type a value."), ("backspace", "Back to the default."))
    lines += [[(f"  {key:<22}", "bold"), muted(text)] for key, text in lever]
    lines += [[], [("settings for /set, beside every lever", "bold $text-primary")]]
    lines += [[(f"  {name:<22}", "bold"), muted(hint)] for name, hint in SETTINGS.items()]
    return charts.join(lines)


def _row(action: Action, width: int) -> list[list[Part]]:
    key = action.key.replace("question_mark", "?").replace("equals_sign", "=").replace(",", " ")
    command = f"{action.slash} {action.argument}".strip()
    first, *more = wrap(action.sentence, max(width - 29, 20))
    head: list[Part] = [(f"  {key:<10}", "bold"), (f"{command:<17}", "$text-accent"), muted(first)]
    return [head, *([muted(" " * 29 + line)] for line in more)]
