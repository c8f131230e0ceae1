"""The log: what the server said, what levers did, and how the connection fared."""

from __future__ import annotations

from time import localtime, strftime

from textual.app import ComposeResult
from textual.widgets import RichLog

from tui import words
from tui.state import LogLine, State
from tui.widgets import Panel

STYLES = {"error": "bold red", "warning": "yellow"}


class LogPanel(Panel):
    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._last: LogLine | None = None

    def compose(self) -> ComposeResult:
        yield RichLog(id="log-lines", classes="box", wrap=True, max_lines=2000, auto_scroll=True)

    def on_mount(self) -> None:
        self.title("#log-lines", "Log", "oldest first")

    def landed(self) -> None:
        self.query_one(RichLog).focus()

    def show(self, state: State, now: float) -> None:
        if not state.log or state.log[-1] is self._last:
            return
        lines = self.query_one(RichLog)
        fresh = list(state.log)
        for index in range(len(fresh) - 1, -1, -1):
            if fresh[index] is self._last:
                fresh = fresh[index + 1 :]
                break
        for line in fresh:
            lines.write(_shown(line), expand=True)
        self._last = state.log[-1]


def _shown(line: LogLine) -> object:
    from rich.text import Text

    clock = strftime("%H:%M:%S", localtime(line.time))
    style = STYLES.get(line.level, "")
    return Text.assemble((f"{clock} ", "dim"), (f"{line.level:<8}", style), words.harmless(line.message))
