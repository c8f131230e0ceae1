"""What the keys outside the chat do: change panes, hold the picture, steer a replay, help, theme, leave."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from textual.widgets import TextArea

from engine.protocol import wire
from tui.panels import PANES

if TYPE_CHECKING:
    from tui.program import MetraleApp

Handler = Callable[[str], Awaitable[None]]
SPANS_S = (60.0, 180.0, 600.0)
SEEK_S = 10.0
AGAIN_S = 2.0
"""How soon the second Ctrl+C must follow the first."""


class ScreenActions:
    def __init__(self, app: MetraleApp) -> None:
        self.app = app
        self.span_s = SPANS_S[0]
        self._paused, self._speed = False, 1.0
        self._interrupted = -AGAIN_S
        panes: dict[str, Handler] = {f"go_{name}": partial(self._go, name) for name in PANES}
        self.handlers: dict[str, Handler] = panes | {
            "help": self.help,
            "palette": self.palette,
            "pause": self.pause,
            "span": self.span,
            "theme": self.theme,
            "quit": self.quit,
            "interrupt": self.interrupt,
            "replay_toggle": self.replay_toggle,
            "replay_back": partial(self._seek, -SEEK_S),
            "replay_forward": partial(self._seek, SEEK_S),
            "replay_slower": partial(self._hasten, 0.5),
            "replay_faster": partial(self._hasten, 2.0),
        }

    async def _go(self, name: str, argument: str) -> None:
        await self.app.go(name)

    async def help(self, argument: str) -> None:
        from tui.pickers import HelpScreen

        self.app.push_screen(HelpScreen())

    async def palette(self, argument: str) -> None:
        self.app.action_command_palette()

    async def pause(self, argument: str) -> None:
        """Holds the operator screens still, or lets them go; the state goes on either way."""
        self.app.held = None if self.app.held else (self.app.state, self.app.clock())
        self.app.repaint()

    async def span(self, argument: str) -> None:
        self.span_s = SPANS_S[(SPANS_S.index(self.span_s) + 1) % len(SPANS_S)]
        self.app.repaint()

    async def theme(self, argument: str) -> None:
        if not argument:
            self.app.search_themes()
        elif argument in self.app.available_themes:
            self.app.theme = argument
        else:
            names = ", ".join(sorted(self.app.available_themes))
            self.app.notify(f"There is no theme {argument!r}; there are {names}.", severity="warning", markup=False)

    async def quit(self, argument: str) -> None:
        self.app.leave()

    async def interrupt(self, argument: str) -> None:
        """One key that means what is nearest: copy, stop, clear; pressed twice with nothing to do, leave."""
        app, reply, now = self.app, self.app.state.reply, monotonic()
        focused = app.focused
        marked = focused.selected_text if isinstance(focused, TextArea) else ""
        marked = marked or app.screen.get_selected_text() or ""
        if marked:
            app.copy_to_clipboard(marked)
            app.notify("Copied what was marked.")
        elif app.pane == "chat" and reply is not None and reply.running:
            await app.perform("stop", "")
        elif isinstance(focused, TextArea) and focused.text and app.pane == "chat":
            focused.clear()
        elif now - self._interrupted < AGAIN_S:
            app.leave()
        else:
            self._interrupted = now
            app.notify("Press Ctrl+C again to leave.", timeout=AGAIN_S)

    # ---- replay

    async def replay_toggle(self, argument: str) -> None:
        self._paused = not self._paused
        self._steer("pause" if self._paused else "resume")

    async def _seek(self, by: float, argument: str) -> None:
        latest = self.app.state.latest
        self._steer("seek", max(0.0, (latest.replay_position if latest else 0.0) + by))

    async def _hasten(self, factor: float, argument: str) -> None:
        self._speed = max(0.25, min(64.0, self._speed * factor))
        self._steer("pause" if self._paused else "resume")
        self.app.notify(f"Replay at {self._speed:g} times the speed.")

    def _steer(self, action: str, position: float = 0.0) -> None:
        self.app.send(wire.Replay(run=self.app.replay_run, action=action, speed=self._speed, position=position))
