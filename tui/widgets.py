"""The parts that every pane is built from: text that repaints only when it changed, and the base of a pane."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from textual.containers import Vertical
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Static

from tui import words
from tui.charts import Part
from tui.state import Phase, State

if TYPE_CHECKING:
    from engine.protocol import wire
    from tui.program import MetraleApp


class Cell(Static):
    """Text that is painted again only when it differs."""

    def __init__(self, content: Content | str = "", *, id: str | None = None, classes: str | None = None) -> None:
        first = content if isinstance(content, Content) else Content(content)
        super().__init__(first, id=id, classes=classes)
        self._shown = first

    def put(self, content: Content | str) -> None:
        new = content if isinstance(content, Content) else Content(content)
        if new.is_same(self._shown):
            return
        self._shown = new
        self.update(new, layout=self._resizes(new))

    def _resizes(self, new: Content) -> bool:
        """Whether `new` needs another height than there is; a layout of the whole screen costs more than painting."""
        height, size = self.styles.height, self.content_size
        if not size.width:
            return True
        return (height is None or height.is_auto) and new.get_height({}, size.width) != size.height


class Panel(Vertical):
    """A pane: told the state a few times a second while it is visible, and nothing else."""

    def show(self, state: State, now: float) -> None:
        raise NotImplementedError

    def landed(self) -> None:
        """The pane came to the front; it may take the focus."""

    @property
    def metrale(self) -> MetraleApp:
        from tui.program import MetraleApp

        app: Any = self.app
        if not isinstance(app, MetraleApp):
            raise TypeError("a pane lives in the Metrale application")
        return app

    def send(self, message: wire.ClientMessage) -> None:
        self.metrale.send(message)

    def title(self, selector: str, title: str, note: str = "") -> None:
        """Names a part of the pane, and says beside it how old its numbers are."""
        name_part(self.query_one(selector), title, note)


def name_part(widget: Widget, title: str, note: str = "") -> None:
    """Puts a title and a quiet note on the upper edge of a part of a pane."""
    text = Content.assemble((title, "bold"), (f" {note}" if note else "", "not bold $quiet"))
    if widget.border_title != text.markup:
        widget.border_title = text


def age(state: State, since: float, now: float) -> str:
    """How old a number is, or why there is none."""
    if state.link.phase in (Phase.DOWN, Phase.REFUSED):
        return f"down, {words.seconds(now - since)} old" if since else "down"
    if not since:
        return "waiting for numbers"
    old = now - since
    if old <= 1:
        return "under 1 s ago"
    return f"stale, {words.seconds(old)} old" if old > 3 else f"{words.seconds(old)} ago"


def heading(text: str) -> Part:
    return (text, "bold $text-primary")


def muted(text: str) -> Part:
    return (text, "$quiet")


def table(rows: list[list[Part]], gaps: int = 2) -> list[list[Part]]:
    """Rows of cells, padded so that the columns stand under each other; columns with numbers are right-aligned."""
    columns = max((len(row) for row in rows), default=0)
    texts = [[row[i][0] for row in rows if i < len(row)] for i in range(columns)]
    widths = [max(map(len, column)) for column in texts]
    right = [any(text[:1].isdigit() for text in column) for column in texts]
    return [
        [((t.rjust if right[i] else t.ljust)(widths[i]) + " " * gaps, style) for i, (t, style) in enumerate(row)]
        for row in rows
    ]
