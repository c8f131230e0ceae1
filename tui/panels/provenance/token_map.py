"""The reply as a flow of tokens, coloured by lane and underlined by draft position, with a cursor."""

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

from engine.protocol.events import Token
from tui import words
from tui.palette import paint
from tui.themes import lane_style

GUTTER = 4
HELD_BACK = "·"
"""Stands for a token whose text came out with a later one."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a token on one line."""

    index: int
    text: str


def flow(tokens: Sequence[Token], width: int, lines: list[list[Piece]], start: int) -> None:
    """Lays `tokens[start:]` out behind `lines`, breaking at newlines and at `width` cells."""
    used = sum(len(piece.text) for piece in lines[-1]) if lines else 0
    if not lines:
        lines.append([])
    for index in range(start, len(tokens)):
        text = words.harmless(tokens[index].text).expandtabs(4) or HELD_BACK
        for number, part in enumerate(text.split("\n")):
            if number:
                lines[-1].append(Piece(index, "⏎"))
                lines.append([])
                used = 0
            while part:
                if used and used + len(part) > width and len(part) <= width:
                    lines.append([])
                    used = 0
                taken, part = part[: width - used], part[width - used :]
                lines[-1].append(Piece(index, taken))
                used += len(taken)
                if part:
                    lines.append([])
                    used = 0


def underline(token: Token) -> str:
    """Draft position without colour: the model's own is bare, first draft underlined, later ones doubly so."""
    return "" if token.draft == 0 else "underline" if token.draft == 1 else "underline bold"


class TokenMap(ScrollView, can_focus=True):
    """Arrows move the cursor by token and by line; Home and End go to the ends."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,h", "move(-1)", "Token before", show=False),
        Binding("right,l", "move(1)", "Token after", show=False),
        Binding("up,k", "line(-1)", "Line up", show=False),
        Binding("down,j", "line(1)", "Line down", show=False),
        Binding("pageup", "line(-10)", "Page up", show=False),
        Binding("pagedown", "line(10)", "Page down", show=False),
        Binding("home", "move(-1000000)", "First", show=False),
        Binding("end", "move(1000000)", "Last", show=False),
        Binding("n", "refused(1)", "Next refused draft", show=False),
        Binding("N", "refused(-1)", "Refused draft before", show=False),
    ]

    @dataclass
    class Moved(Message):
        index: int

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._tokens: tuple[Token, ...] = ()
        self._lines: list[list[Piece]] = []
        self._width = 0
        self.cursor = 0

    def show(self, tokens: tuple[Token, ...]) -> None:
        """Lays out what is new; everything again when the width or the reply changed."""
        width = max(10, self.size.width - GUTTER - 1)
        grown = len(tokens) >= len(self._tokens) and tokens[: len(self._tokens)] == self._tokens[:]
        if tokens is self._tokens and width == self._width:
            return
        if not grown or width != self._width:
            self._lines, start = [], 0
            self.cursor = min(self.cursor, max(len(tokens) - 1, 0))
        else:
            start = len(self._tokens)
        self._tokens, self._width = tokens, width
        flow(tokens, width, self._lines, start)
        self.virtual_size = Size(self.size.width - 1, len(self._lines))
        self.refresh()

    def on_resize(self) -> None:
        self.show(self._tokens)

    # ---- painting

    def render_line(self, y: int) -> Strip:
        index = y + self.scroll_offset.y
        width = self.size.width
        if not 0 <= index < len(self._lines):
            return Strip.blank(width, self.rich_style)
        pieces = self._lines[index]
        segments = [Segment(self._gutter(pieces), paint(self.app, "$quiet"))]
        segments += [Segment(piece.text, paint(self.app, self._style(piece))) for piece in pieces]
        return Strip(segments).adjust_cell_length(width).apply_style(self.rich_style).crop(0, width)

    def _gutter(self, pieces: list[Piece]) -> str:
        """The lanes of the line as letters, in order of appearance: the picture without colours."""
        marks = dict.fromkeys(words.LANE_MARKS.get(self._tokens[piece.index].lane, "?") for piece in pieces)
        return "".join(marks)[: GUTTER - 1].ljust(GUTTER)

    def _style(self, piece: Piece) -> str:
        token = self._tokens[piece.index]
        style = f"{lane_style(token.lane)} {underline(token)}"
        if token.rejected:
            style += " italic"
        if piece.index == self.cursor:
            style += " reverse"
        return style.strip()

    # ---- moving

    def action_move(self, by: int) -> None:
        self._go(self.cursor + by)

    def action_line(self, by: int) -> None:
        at, column = self._place(self.cursor)
        to = max(0, min(len(self._lines) - 1, at + by))
        step = 1 if by > 0 else -1
        while 0 <= to < len(self._lines) and not self._lines[to]:
            to += step
        if 0 <= to < len(self._lines):
            self._go(self._at(to, column))

    def action_refused(self, by: int) -> None:
        index = self.cursor + by
        while 0 <= index < len(self._tokens):
            if self._tokens[index].rejected:
                self._go(index)
                return
            index += by

    def on_click(self, event: events.Click) -> None:
        line = event.y - self.gutter.top + self.scroll_offset.y
        if 0 <= line < len(self._lines) and self._lines[line]:
            self._go(self._at(line, event.x - GUTTER - self.gutter.left))

    def _go(self, index: int) -> None:
        if not self._tokens:
            return
        self.cursor = max(0, min(len(self._tokens) - 1, index))
        line, _ = self._place(self.cursor)
        self.scroll_to_region(Region(0, line, 1, 1), animate=False)
        self.refresh()
        self.post_message(self.Moved(self.cursor))

    def _place(self, index: int) -> tuple[int, int]:
        """Line and column of a token's first piece."""
        for number, line in enumerate(self._lines):
            if line and line[-1].index >= index:
                column = 0
                for piece in line:
                    if piece.index >= index:
                        return number, column
                    column += len(piece.text)
        return max(len(self._lines) - 1, 0), 0

    def _at(self, line: int, column: int) -> int:
        """The token at a column of a line, or the line's last."""
        for piece in self._lines[line]:
            column -= len(piece.text)
            if column < 0:
                return piece.index
        return self._lines[line][-1].index
