"""The real program with a frozen clock and a scripted past instead of a connection: the same picture every time."""

from __future__ import annotations

import tempfile
from pathlib import Path

from engine.protocol import wire
from tests.tui import scenes
from tui.conversation import Conversation
from tui.program import MetraleApp
from tui.sessions import Store
from tui.state import Dropped, Event, Opened, Said, Sent

NOW = scenes.START + 60.0


class Deaf:
    """A connection that takes everything and answers nothing."""

    def __init__(self) -> None:
        self.sent: list[wire.ClientMessage] = []
        self.app: MetraleApp | None = None

    async def run(self, receive: object, received: object) -> None:
        return

    def send(self, message: wire.ClientMessage) -> bool:
        self.sent.append(message)
        if self.app is not None:
            self.app.receive(Sent(message))
        return True


class Clock:
    def __init__(self, now: float = NOW) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def staged(scene: str = "talk", mode: str = "chat", directory: Path | None = None) -> MetraleApp:
    """The program as it stands after `scene`: connecting, loading, empty, talk, streaming, down."""
    clock, deaf = Clock(), Deaf()
    app = MetraleApp(deaf, mode=mode, store=Store(directory or Path(tempfile.mkdtemp())), clock=clock)
    deaf.app = app
    app.open_conversation(Conversation(id="c1", created=scenes.START, updated=scenes.START))
    for at, event in script(scene):
        clock.now = at
        app.receive(event)
    clock.now = NOW
    return app


def script(scene: str) -> list[tuple[float, Event]]:
    """The events of a scene, each with its arrival time."""
    if scene == "connecting":
        return [(NOW - 2, Dropped("No server answers at http://127.0.0.1:8000."))]
    if scene == "loading":
        loading = wire.Load(state="loading", stage="reading weights", done=61_000_000, total=98_000_000)
        return [(NOW - 4, scenes.welcome("loading")), (NOW - 1, loading)]
    if scene == "empty":
        idle = [(scenes.START + i / 4, scenes.stats(i, busy=False)) for i in range(220, 240)]
        return [(NOW - 9, scenes.welcome()), *idle]
    past: list[tuple[float, Event]] = [(scenes.START, scenes.welcome())]
    past += [(scenes.START + i / 4, scenes.stats(i)) for i in range(240)]
    past += [(NOW - 31, scenes.lever_event("num_drafts", 3, 5, NOW - 31))]
    past += [(NOW - 42, scenes.gate(72, "probe")), (NOW - 40, scenes.gate(80, "switch")), (NOW - 7, scenes.gate(212))]
    past += [(NOW - 0.3, scenes.requests(239)), *_talk(scene)]
    past.append((NOW - 8, wire.Log(time=NOW - 8, level="warning", message="The exporter was slow for 1.2 s.")))
    past.sort(key=lambda item: item[0])
    if scene == "down":
        past = [*(item for item in past if item[0] < NOW - 5), (NOW - 5, Dropped("The connection was cut."))]
    return past


def _talk(scene: str) -> list[tuple[float, Event]]:
    said = scenes.tokens()
    if scene == "streaming":
        said = said[: len(said) // 2]
    start = NOW - 6
    talk: list[tuple[float, Event]] = [
        (start, Opened(Conversation(id="c1", title="", created=scenes.START, updated=start))),
        (start + 0.01, Said("What is speculative decoding? Show the acceptance rule in Python.", "r1")),
        (start + 0.02, wire.Queued(request_id="r1", prompt_tokens=38, max_context=2048)),
    ]
    talk += [(start + 0.2 + i * 0.02, scenes.delta("r1", [token])) for i, token in enumerate(said)]
    if scene != "streaming":
        talk.append((NOW - 1, scenes.done("r1", said)))
    return talk
