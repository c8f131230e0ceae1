"""The input: several lines, paste-safe, with history and slash completion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import OptionList, TextArea
from textual.widgets.option_list import Option

from tui.actions import complete

CHOICES = 6


class Editor(TextArea):
    """The text itself: Enter sends, Shift+Enter or Ctrl+J breaks the line, a paste never sends."""

    BINDINGS: ClassVar[list[BindingType]] = []

    @dataclass
    class Submitted(Message):
        text: str

    class Left(Message):
        """The user is done."""

    def __init__(self) -> None:
        super().__init__(placeholder="Say something, or / for commands", highlight_cursor_line=False)
        self.prompt: Prompt | None = None
        self.typed: list[str] = []
        self._at = 0
        self._draft = ""

    async def _on_key(self, event: events.Key) -> None:
        prompt = self.prompt
        if prompt is not None and prompt.take_key(event.key):
            event.stop()
            event.prevent_default()
        elif event.key == "enter":
            event.stop()
            event.prevent_default()
            self._submit()
        elif event.key in ("shift+enter", "ctrl+j", "alt+enter"):
            event.stop()
            event.prevent_default()
            self.insert("\n")
        elif self._at_edge(event.key) and self._recall(-1 if event.key == "up" else 1):
            event.stop()
            event.prevent_default()
        else:
            await super()._on_key(event)

    def _at_edge(self, key: str) -> bool:
        """Whether this arrow would leave the text, and so means the line typed before or after."""
        row = self.cursor_location[0]
        return (key == "up" and row == 0) or (key == "down" and row == self.document.line_count - 1)

    def action_delete_right(self) -> None:
        """Ctrl+D: deletes, and leaves when there is nothing to delete, as shells do."""
        if self.text:
            super().action_delete_right()
        else:
            self.post_message(self.Left())

    def fill(self, text: str) -> None:
        self.load_text(text)
        self.move_cursor(self.document.end)

    def remember(self, text: str) -> None:
        if not self.typed or self.typed[-1] != text:
            self.typed.append(text)
        self._at = len(self.typed)

    def recall_from(self, history: list[str]) -> None:
        self.typed, self._at = history, len(history)

    def _submit(self) -> None:
        text = self.text.strip()
        if text:
            self.post_message(self.Submitted(text))

    def _recall(self, direction: int) -> bool:
        """The line typed before or after; the unsent draft is kept at the end."""
        to = self._at + direction
        if not 0 <= to <= len(self.typed):
            return False
        if self._at == len(self.typed):
            self._draft = self.text
        self._at = to
        self.fill(self._draft if to == len(self.typed) else self.typed[to])
        return True


class Prompt(Vertical):
    """The editor with the list of completions above it."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.editor = Editor()
        self.editor.prompt = self
        self.choices = OptionList(id="completions", compact=True)
        self.choices.can_focus = False
        self.lever_names: list[str] = []
        self._inserts: list[str] = []
        self._completed = ""

    def compose(self) -> ComposeResult:
        yield self.choices
        yield self.editor

    def on_mount(self) -> None:
        self.choices.display = False

    def on_text_area_changed(self, event: TextArea.Changed) -> None:
        self._complete()

    def _complete(self) -> None:
        """Offers what fits the text as it is now; called again by fast typists' Tab before the change is announced."""
        typed = self.editor.text
        if typed == self._completed:
            return
        self._completed = typed
        found = complete(typed, self.lever_names)
        if len(found) == 1 and found[0][0].strip() == typed.strip():
            found = []
        self._inserts = [insert for insert, _ in found]
        self.choices.display = bool(found)
        self.choices.clear_options()
        if found:
            width = max(len(insert) for insert in self._inserts)
            self.choices.add_options(
                Option(Content.assemble((insert.ljust(width + 1), "bold"), (hint, "$quiet"))) for insert, hint in found
            )
            self.choices.highlighted = 0

    def take_key(self, key: str) -> bool:
        """Keys that belong to the completion list while it is open."""
        self._complete()
        if not self.choices.display:
            return False
        match key:
            case "down":
                self.choices.action_cursor_down()
            case "up":
                self.choices.action_cursor_up()
            case "tab":
                self._accept()
            case "enter" if self.editor.text.strip() not in [insert.strip() for insert in self._inserts]:
                self._accept()
            case "escape":
                self.choices.display = False
            case _:
                return False
        return True

    def _accept(self) -> None:
        index = self.choices.highlighted
        if index is not None:
            self.editor.fill(self._inserts[index])
