"""The WebSocket endpoint of the wire: hello, then messages both ways until one side ends it."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from starlette.websockets import WebSocket, WebSocketDisconnect

from engine.protocol.wire import (
    MAX_MESSAGE_BYTES,
    WIRE_VERSION,
    Hello,
    Problem,
    Refused,
    ServerMessage,
    WireError,
    decode_client,
    encode,
)
from engine.server.mailbox import LaggingError
from engine.server.safety import Access, Role
from engine.server.session import Session, Sessions
from engine.server.views import Views

log = logging.getLogger("metrale.server")

HELLO_S = 10.0
MAX_SOCKETS = 128
MAX_MISTAKES = 100
"""Messages that are not understood before the connection is given up."""
CLOSED_IN_ORDER = (1000, 1001)


class StrangerError(Exception):
    """A connection that is refused; one sentence for the client."""


@dataclass(slots=True)
class WireSocket:
    """Serves wire connections."""

    access: Access
    sessions: Sessions
    views: Views
    connected: int = 0

    async def serve(self, socket: WebSocket) -> None:
        await socket.accept()
        self.connected += 1
        try:
            hello, role = await self._hello(socket)
            await self._converse(socket, self._session(hello, role), hello)
        except StrangerError as error:
            await _part(socket, str(error))
        except (WebSocketDisconnect, RuntimeError):
            pass  # gone before hello
        finally:
            self.connected -= 1

    async def _hello(self, socket: WebSocket) -> tuple[Hello, Role]:
        if self.connected > MAX_SOCKETS:
            raise StrangerError(f"{MAX_SOCKETS} connections are open already; close one and try again.")
        try:
            hello = decode_client(await asyncio.wait_for(_receive(socket), HELLO_S))
        except TimeoutError:
            raise StrangerError("A connection begins with a hello; none came.") from None
        except WireError as error:
            raise StrangerError(str(error)) from None
        if not isinstance(hello, Hello):
            raise StrangerError("A connection begins with a hello.")
        if hello.version != WIRE_VERSION:
            raise StrangerError(
                f"This server speaks wire version {WIRE_VERSION}, the client {hello.version}; update the older."
            )
        role = self.access.role_of(hello.token)
        if role is Role.NONE:
            raise StrangerError("The token is missing or wrong; pass the one that the server was started with.")
        return hello, role

    def _session(self, hello: Hello, role: Role) -> Session:
        control = role is Role.CONTROL
        session = self.sessions.resume(hello.resume, control) if hello.resume else None
        if session is None:
            return self.sessions.open(hello.client, control)
        session.resume(hello.received)
        return session

    async def _converse(self, socket: WebSocket, session: Session, hello: Hello) -> None:
        pump = asyncio.create_task(self._pump(socket, session))
        code = 1006
        try:
            code = await self._listen(socket, session)
        except RuntimeError:
            pass  # the pump closed it
        finally:
            pump.cancel()
            self.sessions.detach(session, for_good=code in CLOSED_IN_ORDER or session.mailbox.overflowed)

    async def _listen(self, socket: WebSocket, session: Session) -> int:
        """The close code, once the client has left."""
        mistakes = 0
        while True:
            try:
                session.take(decode_client(await _receive(socket)))
            except WireError as error:
                mistakes += 1
                if mistakes > MAX_MISTAKES:
                    await _part(socket, "Too many messages were not understood.")
                    return 1000
                session.mailbox.put(Problem(message=str(error)))
            except WebSocketDisconnect as end:
                return end.code

    async def _pump(self, socket: WebSocket, session: Session) -> None:
        mailbox = session.mailbox
        try:
            await socket.send_text(encode(self.views.welcome(session.secret, session.control)))
            if not self.views.is_ready:
                await socket.send_text(encode(self.views.load()))  # how far it is, which welcome does not say
            while True:
                await socket.send_text(encode(await mailbox.next()))
        except LaggingError:
            await _part(socket, "The connection did not keep up and was given up; connect again.")
        except (WebSocketDisconnect, RuntimeError, OSError):
            pass  # the listening side sees the end too


async def _receive(socket: WebSocket) -> str | bytes:
    """One message. Raises `WireError` when it is too long, `WebSocketDisconnect` at the end."""
    message = await socket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code") or 1005, message.get("reason"))
    body: str | bytes = message.get("text") or message.get("bytes") or ""
    if len(body) > MAX_MESSAGE_BYTES:
        raise WireError(f"A message may have at most {MAX_MESSAGE_BYTES} bytes.")
    return body


async def _part(socket: WebSocket, sentence: str) -> None:
    refusal: ServerMessage = Refused(message=sentence)
    try:
        await socket.send_text(encode(refusal))
        await socket.close(1008, sentence[:120].encode()[:120].decode(errors="ignore"))
    except (WebSocketDisconnect, RuntimeError, OSError):
        pass
