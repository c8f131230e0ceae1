"""The transcript: every turn of the conversation, the last one streaming."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.widget import Widget

if TYPE_CHECKING:
    from textual.widgets.markdown import MarkdownStream

from tui.conversation import Conversation, Turn
from tui.panels.chat.reply_line import reply_line
from tui.widgets import Cell

SHOWN_TURNS = 40
"""Older turns of a long conversation stay in the file and in the model's view, not on the screen."""


class Spoken(Cell):
    """What the user said, exactly."""


class Note(Cell):
    """What this program says in the transcript; not part of the conversation."""


class Answer(Vertical):
    """A reply as Markdown with its line of numbers."""

    def __init__(self, turn: Turn) -> None:
        super().__init__()
        self.turn = turn
        self._written = 0
        self._stream: MarkdownStream | None = None
        from textual.widgets import Markdown

        self.text = Markdown(open_links=False)
        self.numbers = Cell(classes="reply-line")

    def compose(self) -> ComposeResult:
        yield self.text
        yield self.numbers

    async def follow(self, turn: Turn) -> None:
        """Writes what is new of the turn's text."""
        self.turn = turn
        new = turn.content[self._written :]
        if new:
            self._written = len(turn.content)
            if self._stream is None:
                self._stream = self.text.get_stream(self.text)
            await self._stream.write(new)
        if turn.reply is not None and turn.reply.status == "done":
            await self.settle()

    async def settle(self) -> None:
        if self._stream is not None:
            stream, self._stream = self._stream, None
            await stream.stop()

    def tick(self, now: float) -> None:
        if self.turn.reply is not None:
            self.numbers.put(reply_line(self.turn.reply, now))


class Transcript(VerticalScroll):
    """Mirrors the conversation: adds what is new, drops what is gone, and lets the last answer follow its stream."""

    can_focus = True

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._conversation = Conversation()
        self._views: list[Widget] = []
        self._turns: list[Turn] = []
        self._offset = 0
        self.noted = False
        """Whether a note stands here."""

    def on_mount(self) -> None:
        self.anchor()

    async def follow(self, conversation: Conversation, now: float) -> None:
        """Brings the widgets in line with `conversation`."""
        if conversation.id != self._conversation.id or len(conversation.turns) < self._offset:
            await self._clear()
            self._offset = max(0, len(conversation.turns) - SHOWN_TURNS)
        self._conversation = conversation
        turns = conversation.turns[self._offset :]
        kept = _common(self._turns, turns)
        if kept < len(self._turns):
            await self._drop(kept)
        await self._add(turns[kept:])
        for view, turn in self._answers(turns):
            await view.follow(turn)
            view.tick(now)

    def tick(self, now: float) -> None:
        """Keeps the numbers of a running reply going."""
        if self._views and isinstance(self._views[-1], Answer):
            self._views[-1].tick(now)

    def _answers(self, turns: tuple[Turn, ...]) -> Iterator[tuple[Answer, Turn]]:
        """The answers whose turn moved on since it was last drawn."""
        for index, (view, turn) in enumerate(zip(self._views, turns, strict=True)):
            if isinstance(view, Answer) and turn is not self._turns[index]:
                self._turns[index] = turn
                yield view, turn

    async def note(self, content: Content | str) -> None:
        self.noted = True
        await self.mount(Note(content))
        self.anchor()

    async def _add(self, turns: tuple[Turn, ...]) -> None:
        views = [Answer(turn) if turn.role == "assistant" else Spoken(Content(turn.content)) for turn in turns]
        if not views:
            return
        await self.mount_all(views)
        self._views += views
        self._turns += [replace(turn) for turn in turns]
        self.anchor()

    async def _drop(self, kept: int) -> None:
        gone, self._views, self._turns = self._views[kept:], self._views[:kept], self._turns[:kept]
        for view in gone:
            if isinstance(view, Answer):
                await view.settle()
            await view.remove()

    async def _clear(self) -> None:
        await self._drop(0)
        self.noted = False
        await self.query(Note).remove()


def _common(old: list[Turn], new: tuple[Turn, ...]) -> int:
    """How many turns from the start are the same turn, perhaps further on."""
    for index, (before, after) in enumerate(zip(old, new, strict=False)):
        if _key(before) != _key(after):
            return index
    return min(len(old), len(new))


def _key(turn: Turn) -> tuple[str, str]:
    return turn.role, turn.reply.request_id if turn.reply else turn.content
