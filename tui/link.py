"""The connection to the server: one WebSocket that connects, says hello, subscribes, and comes back when it is cut."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol
from urllib.parse import urlsplit

from engine.protocol import wire
from tui.state import Dropped, Event, Sent

TOPICS = ("stats", "requests", "levers", "gate", "log")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 3.0
PATH = "/wire"
Receive = Callable[[Event], None]


class Connection(Protocol):
    """What the screens need of a connection."""

    async def run(self, receive: Receive) -> None:
        """Hands every message and every loss to `receive`, until cancelled or refused for good."""

    def send(self, message: wire.ClientMessage) -> bool:
        """Sends soon; False when there is no connection."""


class AddressError(ValueError):
    """A server address that cannot be used; one sentence."""


def address(url: str) -> tuple[str, str]:
    """The WebSocket address and the token for a server's `url` (the token is its fragment). Raises `AddressError`."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    schemes = {"http": "ws", "ws": "ws", "https": "wss", "wss": "wss"}
    if parts.scheme not in schemes or not parts.hostname:
        raise AddressError(f"{url!r} is not a server address; it looks like http://127.0.0.1:8000.")
    path = parts.path if parts.path not in ("", "/") else PATH
    return f"{schemes[parts.scheme]}://{parts.netloc}{path}", parts.fragment


class Link:
    """One server, for as long as the screen lives."""

    def __init__(self, url: str, *, rate_hz: float = 4.0, alive: Callable[[], str] = lambda: "") -> None:
        self.url = url
        self._address, self._token = address(url)
        self._rate_hz = rate_hz
        self._alive = alive
        self._outbox: asyncio.Queue[wire.ClientMessage] | None = None
        self._session = ""

    def send(self, message: wire.ClientMessage) -> bool:
        if self._outbox is None:
            return False
        self._outbox.put_nowait(message)
        return True

    async def run(self, receive: Receive) -> None:
        pause = FIRST_PAUSE_S
        while True:
            before = self._session
            reason, final = await self._once(receive)
            self._outbox = None
            receive(Dropped(reason, final))
            if final:
                return
            pause = FIRST_PAUSE_S if self._session != before else min(pause * 1.6, LONGEST_PAUSE_S)
            await asyncio.sleep(pause)

    async def _once(self, receive: Receive) -> tuple[str, bool]:
        """One connection from hello to its end; why it ended and whether that is for good."""
        from websockets.asyncio.client import connect
        from websockets.exceptions import ConnectionClosed, InvalidHandshake

        try:
            async with connect(
                self._address, max_size=wire.MAX_MESSAGE_BYTES, compression=None, open_timeout=5, proxy=None
            ) as socket:
                hello = wire.Hello(version=wire.WIRE_VERSION, client="tui", token=self._token, resume=self._session)
                await socket.send(wire.encode(hello))
                welcome = wire.decode_server(await socket.recv())
                receive(welcome)
                if isinstance(welcome, wire.Refused):
                    return welcome.message, True
                if isinstance(welcome, wire.Welcome):
                    self._session = welcome.session
                self._outbox = asyncio.Queue()
                self.send(wire.Subscribe(topics=TOPICS, rate_hz=self._rate_hz))
                writer = asyncio.create_task(self._write(socket, receive))
                try:
                    async for text in socket:
                        receive(wire.decode_server(text))
                finally:
                    writer.cancel()
            return "The server closed the connection.", False
        except wire.WireError as error:
            return str(error), True
        except ConnectionClosed:
            dead = self._alive()
            return dead or "The connection was cut.", bool(dead)
        except (OSError, InvalidHandshake, TimeoutError) as error:
            dead = self._alive()
            return dead or f"No server answers at {self.url.partition('#')[0]} ({error}).", bool(dead)

    async def _write(self, socket: object, receive: Receive) -> None:
        outbox = self._outbox
        while outbox is not None:
            message = await outbox.get()
            await socket.send(wire.encode(message))  # type: ignore[attr-defined]
            receive(Sent(message))
