"""The entry of the terminal program: shows the screen on a server until the user leaves."""

from __future__ import annotations

import gc
from collections.abc import Callable


def run(
    url: str,
    *,
    mode: str = "chat",
    on_quit: Callable[[], None] | None = None,
    alive: Callable[[], str] = lambda: "",
    replay_run: str = "",
    conversation: str = "",
    mouse: bool = True,
) -> None:
    """Shows the terminal on the server at `url` until the user leaves.

    `mode` is chat, top or replay. `alive` returns a sentence once the server's process has ended (and "" before),
    so that the screen stops trying. `conversation` names a saved conversation to resume. `on_quit` is called at
    the end, however it came. Raises `SessionError`.
    """
    gc.disable()  # collections while modules load are a seventh of the time to the first paint; on again after it
    from tui.link import Link
    from tui.program import MetraleApp

    try:
        app = MetraleApp(Link(url, alive=alive), mode=mode, replay_run=replay_run)
        if conversation:
            app.open_conversation(app.store.read(conversation))
        app.run(mouse=mouse)
    finally:
        gc.enable()
        if on_quit is not None:
            on_quit()
