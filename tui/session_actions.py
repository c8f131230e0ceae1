"""What keys and slash commands do with whole conversations: save, open, rename, delete, export, system prompt."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.protocol import wire
from tui import words
from tui.sessions import SessionError, new_conversation
from tui.state import Opened

if TYPE_CHECKING:
    from tui.program import MetraleApp

Handler = Callable[[str], Awaitable[None]]


class SessionActions:
    def __init__(self, app: MetraleApp) -> None:
        self.app = app
        self.handlers: dict[str, Handler] = {
            "system": self.system,
            "new": self.new,
            "load": self.load,
            "save": self.save,
            "rename": self.rename,
            "delete": self.delete,
            "export": self.export,
        }

    def keep(self) -> None:
        """Saves the conversation if anything was said."""
        conversation = self.app.state.conversation
        if conversation.turns:
            try:
                self.app.store.write(conversation)
            except OSError as error:
                self.app.notify(f"The conversation could not be saved: {error}", severity="error", markup=False)

    async def system(self, argument: str) -> None:
        conversation = self.app.state.conversation
        if argument:
            text = "" if argument == "-" else argument
            self.app.receive(Opened(replace(conversation, system=text)))
            conversation = self.app.state.conversation
        await self.app.chat.note(f"system prompt: {conversation.system}" if conversation.system else "no system prompt")

    async def new(self, argument: str) -> None:
        await self._stop_running()
        self.keep()
        self.app.receive(Opened(new_conversation(self.app.clock(), self.app.state.conversation.system)))
        self.app.repaint()

    async def _stop_running(self) -> None:
        reply = self.app.state.reply
        if reply is not None and reply.running:
            self.app.send(wire.Stop(request_id=reply.request_id))

    async def load(self, argument: str) -> None:
        if argument:
            await self._load(argument)
            return
        from tui.pickers import Picker

        now = self.app.clock()
        saved = [
            (c.id, c.name, f"{len(c.turns)} turns, {words.seconds(now - c.updated)} ago")
            for c in self.app.store.saved()
        ]
        picker = Picker("Saved conversations", saved, empty="No conversation was saved yet.")
        self.app.push_screen(picker, self._load_chosen)

    async def _load_chosen(self, name: str | None) -> None:
        if name:
            await self._load(name)

    async def _load(self, name: str) -> None:
        try:
            conversation = self.app.store.read(name)
        except SessionError as error:
            self.app.notify(str(error), severity="error", markup=False)
            return
        await self._stop_running()
        self.keep()
        self.app.receive(Opened(conversation))
        self.app.repaint()

    async def save(self, argument: str) -> None:
        if argument:
            await self.rename(argument)
        elif self.app.state.conversation.turns:
            path = self.app.store.write(self.app.state.conversation)
            self.app.notify(f"Saved as {path}.", markup=False)
        else:
            self.app.notify("There is nothing to save yet.")

    async def rename(self, argument: str) -> None:
        if not argument:
            self.app.notify("Give the name: /rename NAME.", severity="warning")
            return
        self.app.receive(Opened(replace(self.app.state.conversation, title=argument)))
        self.keep()
        self.app.notify(f"This conversation is now called {argument!r}.", markup=False)

    async def delete(self, argument: str) -> None:
        try:
            conversation = self.app.store.read(argument)
        except SessionError as error:
            self.app.notify(str(error), severity="error", markup=False)
            return
        self.app.store.delete(conversation)
        self.app.notify(f"Deleted {conversation.name!r}.", markup=False)
        if conversation.id == self.app.state.conversation.id:
            self.app.receive(Opened(new_conversation(self.app.clock())))

    async def export(self, argument: str) -> None:
        try:
            path = self.app.store.export(self.app.state.conversation, argument)
        except OSError as error:
            self.app.notify(f"The conversation could not be written: {error}", severity="error", markup=False)
            return
        self.app.notify(f"Written to {path}.", markup=False)
