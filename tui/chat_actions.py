"""What the chat's keys and slash commands do: say, stop, regenerate, edit, copy, sessions, settings."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from textual.content import Content

from engine.levers.catalog import LEVERS
from engine.levers.spec import LeverError, unknown_lever
from engine.protocol import wire
from tui import words
from tui.actions import SETTINGS
from tui.change import parse_change
from tui.panels.chat.prompt import Editor
from tui.panels.chat.side import Side
from tui.panels.chat.transcript import Transcript
from tui.panels.levers.lever_list import LeverList
from tui.panels.levers.values import parse_value, show_value
from tui.settings import SettingError
from tui.state import Opened, Phase, Retold, Said
from tui.windows import window

if TYPE_CHECKING:
    from tui.program import MetraleApp

Handler = Callable[[str], Awaitable[None]]
CODE = re.compile(r"^(`{3,}|~{3,})[^\n]*\n(.*?)^\1\s*$", re.MULTILINE | re.DOTALL)


class ChatActions:
    def __init__(self, app: MetraleApp) -> None:
        self.app = app
        self._early = ""
        self.handlers: dict[str, Handler] = {
            "stop": self.stop,
            "levers_focus": self.levers_focus,
            "side": self.side,
            "set": self.set,
            "undo": self.undo,
            "stats": self.stats,
            "model": self.model,
            "regenerate": self.regenerate,
            "edit": self.edit,
            "search": self.search,
            "copy": self.copy,
            "copy_code": self.copy_code,
        }

    # ---- speaking

    def say(self, text: str) -> bool:
        """Adds the user's turn and asks for a reply; False (and a word why) when that cannot be now.

        Before the model is ready the text stays in the input and goes out by itself if it is still the same then."""
        self._early = "" if self.app.state.ready else text
        if not self._can_ask():
            return False
        request_id = self.app.fresh_id()
        self.app.receive(Said(text, request_id))
        self._ask(request_id)
        return True

    async def became_ready(self) -> None:
        """Sends what was entered too early."""
        early, self._early = self._early, ""
        for editor in self.app.query(Editor):
            if early and editor.text.strip() == early:
                editor.post_message(Editor.Submitted(early))

    def _can_ask(self) -> bool:
        state = self.app.state
        if state.link.phase is Phase.REFUSED or state.loading.state == "failed":
            self.app.notify("The engine is gone; leave and start it again.", severity="error")
            return False
        if not state.ready:
            self.app.notify("This is sent as soon as the model is ready.")
            return False
        if state.reply is not None and state.reply.running:
            self.app.notify("The model is still speaking; Esc stops it.", severity="warning")
            return False
        return True

    def _ask(self, request_id: str) -> None:
        state, settings = self.app.state, self.app.settings
        self.app.send(
            wire.Chat(
                request_id=request_id,
                messages=state.conversation.messages(),
                sampling=settings.sampling,
                limits=settings.limits,
                speculate=settings.speculate,
                conversation_id=state.conversation.id,
            )
        )

    async def stop(self, argument: str) -> None:
        """Stops a running reply; with none, leaves an edit, a panel or an operator screen."""
        app = self.app
        focused = app.focused
        if isinstance(focused, LeverList) and focused.editing:
            focused.leave()
        elif app.pane == "chat" and app.state.reply is not None and app.state.reply.running:
            app.send(wire.Stop(request_id=app.state.reply.request_id))
            app.query_one(Editor).focus()
        elif app.pane == "chat":
            for editor in app.query(Editor):
                if editor.prompt is not None and editor.prompt.take_key("escape"):
                    return
                editor.focus()
        elif app.mode_name == "chat":
            await app.go("chat")
        else:
            app.set_focus(None)

    async def regenerate(self, argument: str) -> None:
        if not self.app.state.conversation.turns or not self._can_ask():
            return
        request_id = self.app.fresh_id()
        self.app.receive(Retold(request_id))
        self._ask(request_id)

    async def edit(self, argument: str) -> None:
        """Takes the last user turn, and what followed it, back into the input."""
        conversation = self.app.state.conversation
        place = max((i for i, turn in enumerate(conversation.turns) if turn.role == "user"), default=-1)
        if place < 0:
            self.app.notify("There is no message to edit yet.")
            return
        reply = self.app.state.reply
        if reply is not None and reply.running:
            self.app.send(wire.Stop(request_id=reply.request_id))
        text = conversation.turns[place].content
        self.app.receive(Opened(replace(conversation, turns=conversation.turns[:place])))
        self.app.query_one(Editor).fill(text)

    # ---- copying and looking back

    async def copy(self, argument: str) -> None:
        self._copy(self.app.state.conversation.last_answer, "the last reply")

    async def copy_code(self, argument: str) -> None:
        blocks = CODE.findall(self.app.state.conversation.last_answer)
        self._copy(blocks[-1][1] if blocks else "", "the last code block")

    def _copy(self, text: str, what: str) -> None:
        if not text:
            self.app.notify(f"There is nothing to copy: no {what.removeprefix('the last ')} yet.")
            return
        self.app.copy_to_clipboard(text)
        self.app.notify(f"Copied {what} ({words.count(len(text))} characters).")

    async def search(self, argument: str) -> None:
        from tui.pickers import Picker

        editor = self.app.query_one(Editor)
        typed = list(dict.fromkeys(reversed(editor.typed)))
        rows = [(text, " ".join(text.split()), "") for text in typed]
        picked = Picker("What was typed before", rows, empty="Nothing was typed yet.", query=argument)
        self.app.push_screen(picked, lambda text: editor.fill(text) if text else None)

    # ---- levers and settings

    async def levers_focus(self, argument: str) -> None:
        if self.app.pane != "chat" or not self.app.query_one(Side).display:
            await self.app.go("levers")
            return
        levers = self.app.query_one("#side-levers", LeverList)
        (self.app.query_one(Editor) if levers.has_focus else levers).focus()

    async def side(self, argument: str) -> None:
        self.app.screen.toggle_class("-no-side" if self.app.size.width >= 100 else "-with-side")
        self.app.call_after_refresh(self.app.repaint)

    async def set(self, argument: str) -> None:
        name, _, typed = argument.partition(" ")
        name, typed = name.lower().replace("-", "_"), typed.strip().removeprefix("=").strip()
        try:
            if name in SETTINGS:
                self._set_setting(name, typed)
            elif name in self.app.state.levers:
                self._set_lever(name, typed)
            else:
                raise unknown_lever(name, [*self.app.state.levers, *SETTINGS])
        except (LeverError, SettingError) as error:
            self.app.notify(str(error), severity="error", markup=False)

    def _set_setting(self, name: str, typed: str) -> None:
        if typed:
            self.app.settings = self.app.settings.with_value(name, typed)
        self.app.notify(f"{name} is {self.app.settings.value(name)} ({SETTINGS[name]}).", markup=False)
        self.app.repaint()

    def _set_lever(self, name: str, typed: str) -> None:
        lever = self.app.state.levers[name]
        if typed:
            change = parse_change(typed)
            value = parse_value(lever, change.value)
            self.app.ask_lever(name, value, lever.value, for_seconds=change.for_seconds, guard=change.guard)
            return
        what = LEVERS[name].help if name in LEVERS else lever.help
        self.app.notify(f"{name} is {show_value(lever, lever.value)}: {what} Takes {lever.bounds}.", markup=False)

    async def undo(self, argument: str) -> None:
        if not self.app.state.changes:
            self.app.notify("No lever was changed since this screen opened.")
            return
        self.app.send(wire.UndoLever(change_id=self.app.fresh_id()))

    # ---- facts

    async def stats(self, argument: str) -> None:
        state = self.app.state
        seen, latest = window(state.stats), state.latest
        if latest is None:
            self.app.notify("No numbers have come yet.")
            return
        lines = [
            f"last {words.seconds(seen.seconds)}: {words.number(seen.tokens_per_s)} tok/s delivered, "
            f"{words.number(seen.prefill_tokens_per_s)} tok/s prefill, {words.count(seen.tokens)} tokens",
            f"plain decoding: {words.number(latest.plain_tokens_per_s)} tok/s",
            f"TTFT p50 {words.milliseconds(latest.ttft.p50)} p95 {words.milliseconds(latest.ttft.p95)} · "
            f"TPOT p50 {words.milliseconds(latest.tpot.p50)} p95 {words.milliseconds(latest.tpot.p95)}",
            f"drafts accepted: {seen.accepted}/{seen.drafted} ({words.percent(seen.acceptance)})",
            f"since the run began: {words.count(latest.total_tokens)} tokens, {latest.total_requests} requests",
        ]
        await self.note("\n".join(lines))

    async def model(self, argument: str) -> None:
        facts = self.app.state.facts
        if facts is None:
            self.app.notify("The engine has not said yet what it runs.")
            return
        await self.note(
            f"{facts.model} · {facts.device} · {facts.dtype} · context {words.count(facts.max_context)} tokens · "
            f"KV {words.count(facts.kv_tokens)} tokens · batch {facts.max_batch_size} · "
            f"drafters {', '.join(facts.drafters) or 'none'}"
        )

    async def note(self, text: str) -> None:
        """Says something in the transcript that is no part of the conversation."""
        await self.app.go("chat") if self.app.pane != "chat" else None
        await self.app.query_one(Transcript).note(Content(text))
        self.app.repaint()
