"""The connection to the server: one WebSocket that says hello, subscribes, and comes back while the screen lives.

The waiting client of `engine.protocol.client` gives up after a while, as a script should; a screen goes on trying and
shows each loss, so it drives the socket itself and shares only the address.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from engine.protocol import wire
from tui.state import Dropped, Event, Sent

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

    from engine.protocol.client import Address

TOPICS = ("stats", "requests", "levers", "gate", "log")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 3.0
Receive = Callable[[Event], None]
Received = Callable[[], dict[str, int]]
"""How many tokens of each running reply are here already, so that a resumed connection goes on after them."""


class Connection(Protocol):
    """What the screens need of a connection."""

    async def run(self, receive: Receive, received: Received) -> None:
        """Hands every message and every loss to `receive`, until cancelled or refused for good."""

    def send(self, message: wire.ClientMessage) -> bool:
        """Sends soon; False when there is no connection."""


class Link:
    """One server, for as long as the screen lives."""

    def __init__(self, url: str, *, rate_hz: float = 4.0, alive: Callable[[], str] = lambda: "") -> None:
        self.url = url
        self._rate_hz = rate_hz
        self._alive = alive
        self._outbox: asyncio.Queue[wire.ClientMessage] | None = None
        self._session = ""

    def send(self, message: wire.ClientMessage) -> bool:
        if self._outbox is None:
            return False
        self._outbox.put_nowait(message)
        return True

    async def run(self, receive: Receive, received: Received) -> None:
        from engine.protocol.client import Address

        try:
            address = Address.parse(self.url)
        except ValueError as error:
            receive(Dropped(str(error), final=True))
            return
        pause = FIRST_PAUSE_S
        while True:
            welcomed = self._session
            reason, final = await self._once(address, receive, received)
            self._outbox = None
            receive(Dropped(reason, final))
            if final:
                return
            pause = FIRST_PAUSE_S if self._session != welcomed else min(pause * 1.6, LONGEST_PAUSE_S)
            await asyncio.sleep(pause)

    async def _once(self, address: Address, receive: Receive, received: Received) -> tuple[str, bool]:
        """One connection from hello to its end; why it ended and whether that is for good."""
        from websockets.asyncio.client import connect
        from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI

        try:
            limit = 4 * wire.MAX_MESSAGE_BYTES
            async with connect(address.socket, max_size=limit, open_timeout=5, proxy=None) as socket:
                refusal = await self._greet(socket, address.token, receive, received())
                if refusal:
                    return refusal, True
                return await self._converse(socket, receive), False
        except (wire.WireError, InvalidURI) as error:
            return str(error), True
        except ConnectionClosed:
            dead = self._alive()
            return dead or "The connection was cut.", bool(dead)
        except (OSError, InvalidHandshake, TimeoutError) as error:
            dead = self._alive()
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            return dead or f"No server answers at {address.base}: {why}.", bool(dead)

    async def _greet(self, socket: ClientConnection, token: str, receive: Receive, received: dict[str, int]) -> str:
        """Hello and welcome; the server's sentence if it refused."""
        hello = wire.Hello(
            version=wire.WIRE_VERSION,
            client="tui",
            token=token,
            resume=self._session,
            received=received if self._session else {},
        )
        await socket.send(wire.encode(hello))
        welcome = wire.decode_server(await socket.recv())
        if isinstance(welcome, wire.Refused):
            return welcome.message
        if not isinstance(welcome, wire.Welcome):
            return f"The server began with {type(welcome).__name__} instead of a welcome."
        self._session = welcome.session
        self._outbox = asyncio.Queue()
        self.send(wire.Subscribe(topics=TOPICS, rate_hz=self._rate_hz))
        receive(welcome)
        return ""

    async def _converse(self, socket: ClientConnection, receive: Receive) -> str:
        """Both ways until the server ends it; why it did."""
        writer = asyncio.create_task(self._write(socket, receive))
        try:
            async for text in socket:
                message = wire.decode_server(text)
                if isinstance(message, wire.Refused):
                    return message.message
                receive(message)
            return "The server closed the connection."
        finally:
            writer.cancel()

    async def _write(self, socket: ClientConnection, receive: Receive) -> None:
        outbox = self._outbox
        while outbox is not None:
            message = await outbox.get()
            await socket.send(wire.encode(message))
            receive(Sent(message))
