"""The terminal program: keeps one `State`, feeds it from the wire, shows the pane in front a few times a second."""

from __future__ import annotations

import gc
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ClassVar

from textual import on
from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import ContentSwitcher, Input, TextArea

from engine.protocol import wire
from engine.protocol.commands import Value
from tui.actions import ACTIONS, BY_NAME, Action, Where, parse_slash
from tui.bar import key_line, replay_length, tab_line, top_line
from tui.link import Connection
from tui.panels import PANES, make_pane
from tui.panels.chat.panel import ChatPanel
from tui.panels.chat.prompt import Editor, Prompt
from tui.panels.levers.lever_list import LeverList
from tui.reducer import reduce
from tui.sessions import Preferences, Store, new_conversation
from tui.settings import Settings
from tui.state import Event, Opened, State, Told
from tui.themes import DARK, LIGHT, lane_variables
from tui.widgets import Cell, Panel

REPAINT_S = 0.25
FOLLOW_S = (0.05, 0.25)
"""Shortest and longest time between two writes of streamed text; what comes meanwhile is written in one go."""
FOLLOW_SHARE = 0.12
"""Of a core, that this program may take while text streams: 2 ms per token at 60 tokens a second. Where drawing costs
more, it is done less often, within the bounds above."""


PLAIN_KEYS = ("question_mark", "space", "left", "right", "minus", "plus", "equals_sign")
"""Keys that, like single characters, belong to the input while it has the focus."""


def _binding(name: str, label: str, key: str, footer: bool) -> Binding:
    plain = len(key) == 1 or key in PLAIN_KEYS
    return Binding(key, f"act('{name}')", label, show=footer, priority=not plain)


class MetraleApp(App[None]):
    """Chat, operator screens or a replay, on one server."""

    CSS_PATH = "theme.tcss"
    TITLE = "metrale"
    ENABLE_COMMAND_PALETTE = True
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide"), (150, "-full")]
    VERTICAL_BREAKPOINTS = [(0, "-short"), (30, "-tall")]
    BINDINGS: ClassVar[list[BindingType]] = [
        _binding(action.name, action.label, key, action.footer and index == 0)
        for action in ACTIONS
        if action.key
        for index, key in enumerate(action.key.split(","))
    ]

    def __init__(
        self,
        connection: Connection | None,
        *,
        mode: str = "chat",
        store: Store | None = None,
        clock: Callable[[], float] = time.time,
        replay_run: str = "",
    ) -> None:
        super().__init__()
        from tui.chat_actions import ChatActions
        from tui.screen_actions import ScreenActions
        from tui.session_actions import SessionActions

        self.connection = connection
        self.mode_name = mode
        self.store = store or Store()
        self.clock = clock
        self.replay_run = replay_run
        self.settings = Settings()
        self.state = State(conversation=new_conversation(clock()))
        self.held: tuple[State, float] | None = None
        """What the operator screens show while they are held still, and since when."""
        self.chat = ChatActions(self)
        self.sessions = SessionActions(self)
        self.screens = ScreenActions(self)
        self._top, self._tabs, self._keys = Cell(id="top"), Cell(id="tabs"), Cell(id="keys")
        self._panes: dict[str, Panel] = {}
        self._front = ""
        self._switcher: ContentSwitcher | None = None
        self._followed = True
        self._following = False
        self._follow_pause = FOLLOW_S[0]
        self._worked = 0.0
        self._replayed = ""
        self._themed = False
        """Whether the remembered theme is on, so that the next change is the user's."""

    # ---- building

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return lane_variables(dark=True)

    def get_css_variables(self) -> dict[str, str]:
        return super().get_css_variables() | lane_variables(dark=self.current_theme.dark)

    def compose(self) -> ComposeResult:
        yield self._top
        yield self._tabs
        first = "chat" if self.mode_name == "chat" else "overview"
        self._panes[first] = make_pane(first)
        self._front = first
        with ContentSwitcher(id="panes", initial=f"pane-{first}") as self._switcher:
            yield self._panes[first]
        yield self._keys

    def on_mount(self) -> None:
        self.register_theme(DARK)
        self.register_theme(LIGHT)
        chosen = self.store.preferences().theme
        self.theme = chosen if chosen in self.available_themes else DARK.name
        self.call_after_refresh(setattr, self, "_themed", True)
        if self.mode_name == "chat":
            editor = self.query_one(Editor)
            editor.recall_from(self.store.history())
            editor.focus()
        self.call_after_refresh(self._painted)
        self.set_interval(REPAINT_S, self.repaint)
        self.repaint()
        self._follow_soon()
        if self.connection is not None:
            self.run_worker(self.connection.run(self.receive, self.state_received), name="link", exit_on_error=True)

    @staticmethod
    def _painted() -> None:
        """The first picture stands: what was loaded for it is here to stay and need not be searched for garbage."""
        gc.freeze()
        gc.enable()

    # ---- data in

    def receive(self, event: Event) -> None:
        """One message of the wire or one local event; the only way that the state changes."""
        before = self.state
        self.state = reduce(before, event, self.clock())
        if self.state.conversation is not before.conversation:
            self._follow_soon()
        if isinstance(event, wire.Done) and self.state.conversation is not before.conversation:
            self.sessions.keep()
        if isinstance(event, wire.Stats) and event.replay_run and event.replay_run != self._replayed:
            self._replayed = event.replay_run
            self.send(replay_length(event.replay_run))
        if self.state.ready and not before.ready:
            self.call_later(self.chat.became_ready)
        if isinstance(event, wire.Welcome) and self.mode_name == "replay":
            self.send(wire.Replay(run=self.replay_run, action="start"))
        if not isinstance(event, wire.Delta | wire.Stats | wire.GateView | wire.Requests | wire.Log):
            self.call_later(self.repaint)

    def state_received(self) -> dict[str, int]:
        """Tokens that are here already, of the reply that runs."""
        reply = self.state.reply
        return {reply.request_id: len(reply.tokens)} if reply is not None and reply.running else {}

    def _follow_soon(self) -> None:
        if self._followed and self.is_running:
            self._followed = False
            self.set_timer(self._follow_pause, self._follow)

    async def _follow(self) -> None:
        self._followed = True
        if self._following:
            self._follow_soon()
            return
        self._following = True
        self._weigh()
        try:
            chat = self._panes.get("chat")
            if isinstance(chat, ChatPanel):
                await chat.follow(self.state, self.clock())
        finally:
            self._following = False

    def _weigh(self) -> None:
        """Sets the pause to the next write by what this thread has worked since the last one, painting included."""
        shortest, longest = FOLLOW_S
        worked = time.thread_time()
        self._follow_pause = min(longest, max(shortest, (worked - self._worked) / FOLLOW_SHARE))
        self._worked = worked

    # ---- pixels out

    @property
    def pane(self) -> str:
        return self._front

    def repaint(self) -> None:
        """Shows the state in the pane in front; panes repaint only what changed."""
        if not self.is_running or not self._panes:
            return
        name = self.pane
        held = self.held if name != "chat" else None
        state, now = held or (self.state, self.clock())
        panel = self._panes[name]
        if panel.is_mounted:
            panel.show(state, now)
        line = top_line(
            self.state, self.clock(), held=held[1] if held else 0.0, pane=PANES[name].label, width=self.size.width
        )
        self._top.put(line)
        self._tabs.display = name not in ("chat", "provenance")
        self._tabs.put(tab_line(name, digits=self.mode_name != "chat" or not self._typing))
        if len(self.screen_stack) > 1:
            return
        offered = [self._labelled(action) for action in ACTIONS if action.footer and self._offers(action)]
        self._keys.put(key_line(offered, self.size.width))

    @property
    def _typing(self) -> bool:
        return isinstance(self.focused, Input | TextArea)

    def _offers(self, action: Action) -> bool:
        if action.name == "stop" and self.pane == "chat":
            return self.state.reply is not None and self.state.reply.running
        if action.name == "stop" or action.name == "go_provenance":
            return self.mode_name == "chat"
        return self.check_action("act", (action.name,)) is True

    def _labelled(self, action: Action) -> Action:
        back = action.name == "stop" and self.pane != "chat"
        return replace(action, label="Back") if back else action

    async def go(self, name: str) -> None:
        """Brings a pane to the front; it is built when it is first wanted."""
        if name == self.pane or (name == "chat" and self.mode_name != "chat"):
            name = "chat" if self.mode_name == "chat" else name
        if self._switcher is None:
            return
        if name not in self._panes:
            self._panes[name] = make_pane(name)
            await self._switcher.mount(self._panes[name])
        self._switcher.current = f"pane-{name}"
        self._front = name
        self.refresh_bindings()
        self._panes[name].landed()
        self.repaint()

    # ---- data out

    def send(self, message: wire.ClientMessage) -> bool:
        """Sends to the server, or says why it cannot."""
        if self.connection is not None and self.connection.send(message):
            return True
        self.notify("There is no connection to the engine; this was not sent.", severity="warning")
        return False

    def ask_lever(
        self, name: str, value: Value, seen: Value | None, *, for_seconds: float = 0.0, guard: float = 0.0
    ) -> None:
        """Asks for a lever change; the screen shows it as pending until the engine answers."""
        if self.state.role == "read":
            self.notify("This connection may only read; levers need the control token.", severity="warning")
            return
        self.send(
            wire.SetLever(
                change_id=self.fresh_id(), name=name, value=value, expected=seen, for_seconds=for_seconds, guard=guard
            )
        )

    @staticmethod
    def fresh_id() -> str:
        return uuid.uuid4().hex[:16]

    def tell(self, message: str, level: str = "info") -> None:
        """Says something to the user and writes it into the log."""
        severity: Any = {"info": "information", "warning": "warning", "error": "error"}[level]
        self.notify(message, severity=severity, markup=False)
        self.receive(Told(level, message))

    # ---- actions

    async def action_act(self, name: str) -> None:
        await self.perform(name, "")

    async def perform(self, name: str, argument: str) -> None:
        handlers = self.chat.handlers | self.sessions.handlers | self.screens.handlers
        await handlers[name](argument)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action != "act" or not self.is_running or not self._panes:
            return True
        if len(self.screen_stack) > 1:
            return False  # a small window is in front and has its own keys
        where = BY_NAME[str(parameters[0])].where
        if parameters[0] == "go_chat" and self.mode_name != "chat":
            return False
        match where:
            case Where.CHAT:
                return self.pane == "chat"
            case Where.SCREENS:
                return self.pane not in ("chat", "provenance")
            case Where.REPLAY:
                return self.mode_name == "replay"
            case _:
                return True

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        for action in ACTIONS:
            if action.name not in ("palette", "set") and self.check_action("act", (action.name,)):
                shown = f"{action.sentence}  {action.key.split(',')[0]}" if action.key else action.sentence
                yield SystemCommand(action.label, shown, lambda name=action.name: self._perform_later(name))

    def _perform_later(self, name: str) -> None:
        self.call_later(self.perform, name, "")

    # ---- what widgets ask for

    @on(Editor.Submitted)
    async def _submitted(self, event: Editor.Submitted) -> None:
        editor = self.query_one(Prompt).editor
        if event.text.startswith("/"):
            found = parse_slash(event.text)
            if found is None:
                word = event.text.split()[0]
                self.notify(f"There is no command {word}; /help lists them.", severity="warning", markup=False)
                return
            editor.remember(event.text)
            self.store.remember(event.text)
            editor.clear()
            await self.perform(found[0].name, found[1])
        elif self.chat.say(event.text):
            editor.remember(event.text)
            self.store.remember(event.text)
            editor.clear()

    @on(Editor.Left)
    def _left(self) -> None:
        self.leave()

    @on(LeverList.Asked)
    def _lever_asked(self, event: LeverList.Asked) -> None:
        self.ask_lever(event.name, event.value, event.seen)

    @on(LeverList.Wrong)
    def _lever_wrong(self, event: LeverList.Wrong) -> None:
        self.notify(event.message, severity="error", markup=False)

    def watch_theme(self, theme: str) -> None:
        if self._themed and not self.is_headless:
            self.store.prefer(Preferences(theme=theme))

    def leave(self) -> None:
        """Stops what is running, saves the conversation and ends the program."""
        reply = self.state.reply
        if reply is not None and reply.running and self.connection is not None:
            self.connection.send(wire.Stop(request_id=reply.request_id))
        self.sessions.keep()
        self.exit()

    def open_conversation(self, conversation: object) -> None:
        from tui.conversation import Conversation

        if isinstance(conversation, Conversation):
            self.receive(Opened(conversation))
