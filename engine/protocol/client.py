"""A client of the wire for terminal, scripts and tests: connects with retry, resumes, and speaks typed messages."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI

from engine.protocol.address import Address
from engine.protocol.commands import Limits, Sampling, Value
from engine.protocol.wire import (
    MAX_MESSAGE_BYTES,
    WIRE_VERSION,
    Chat,
    ChatTurn,
    ClientMessage,
    Delta,
    Done,
    Hello,
    LeverEvent,
    LeverRefused,
    Load,
    Problem,
    QueryResult,
    Queued,
    Refused,
    ServerMessage,
    SetLever,
    Stop,
    Subscribe,
    UndoLever,
    Welcome,
    WireError,
    decode_server,
    encode,
)
from engine.protocol.wire import Query as QueryMessage

__all__ = ["Address", "ChatError", "WireClient", "WireClosedError"]

RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
ANSWER_S = 60.0


class WireClosedError(ConnectionError):
    """The server cannot be reached or has ended the connection; one sentence."""


class ChatError(RuntimeError):
    """A reply that was not given; one sentence."""


@dataclass(slots=True)
class _Reply:
    """One reply under way, seen from here."""

    queue: asyncio.Queue[Queued | Delta | Done | Problem] = field(default_factory=asyncio.Queue)
    received: int = 0


class WireClient:
    """One connection; reconnects and resumes by itself until it is closed.

    Use as `async with WireClient(address) as client:`. Messages that belong to nobody in particular come
    out of `messages()`; `chat`, `set_lever`, `undo_lever` and `query` wait for their own answers.
    """

    def __init__(self, address: Address | str, client: str = "cli", retry_s: float = 10.0) -> None:
        self.address = Address.parse(address) if isinstance(address, str) else address
        self.welcome: Welcome | None = None
        self.load: Load | None = None
        self._client = client
        self._retry_s = retry_s
        self._connection: ClientConnection | None = None
        self._reader: asyncio.Task[None] | None = None
        self._inbox: asyncio.Queue[ServerMessage | WireClosedError] = asyncio.Queue()
        self._replies: dict[str, _Reply] = {}
        self._answers: dict[str, asyncio.Future[ServerMessage]] = {}
        self._subscription: Subscribe | None = None
        self._state = asyncio.Event()
        self._closed = ""

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    async def open(self) -> Welcome:
        """Connect and say hello. Raises `WireClosedError` after `retry_s` of trying, at once when refused."""
        welcome = await self._connect("")
        self._reader = asyncio.create_task(self._read())
        return welcome

    async def close(self) -> None:
        self._closed = self._closed or "The connection was closed."
        if self._reader:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        if self._connection:
            await self._connection.close()
            self._connection = None

    async def send(self, message: ClientMessage) -> None:
        """Send one message. Raises `WireClosedError` while there is no connection."""
        if isinstance(message, Subscribe):
            self._subscription = message
        if self._connection is None:
            raise WireClosedError(self._closed or "The connection to the server is down; it is being restored.")
        try:
            await self._connection.send(encode(message))
        except ConnectionClosed:
            raise WireClosedError("The connection to the server was lost; it is being restored.") from None

    async def messages(self) -> AsyncIterator[ServerMessage]:
        """Every message that is not the answer to `chat`, `set_lever`, `undo_lever` or `query`.

        Raises `WireClosedError` when the server is gone for good.
        """
        while True:
            message = await self._inbox.get()
            if isinstance(message, WireClosedError):
                raise message
            yield message

    async def ready(self, timeout: float = 600.0) -> Welcome | Load:
        """Wait until the model is loaded. Raises `WireClosedError` when it failed to."""
        async with asyncio.timeout(timeout):
            while True:
                state = self.load or self.welcome
                if state is not None and state.state == "ready":
                    return state
                if isinstance(state, Load) and state.state == "failed":
                    raise WireClosedError(state.message)
                if self._closed:
                    raise WireClosedError(self._closed)
                self._state.clear()
                await self._state.wait()

    async def chat(
        self,
        messages: Sequence[ChatTurn],
        sampling: Sampling | None = None,
        limits: Limits | None = None,
        *,
        request_id: str = "",
        speculate: bool = True,
        conversation_id: str = "",
    ) -> AsyncIterator[Queued | Delta | Done]:
        """Ask for a reply; the last message is `Done`. Leaving the iterator early stops the reply.

        Raises `ChatError` when it was not taken, `WireClosedError` when the server is gone.
        """
        request_id = request_id or uuid.uuid4().hex[:12]
        reply = self._replies[request_id] = _Reply()
        ended = False
        try:
            await self.send(
                Chat(
                    request_id=request_id,
                    messages=tuple(messages),
                    sampling=sampling or Sampling(),
                    limits=limits or Limits(),
                    speculate=speculate,
                    conversation_id=conversation_id,
                )
            )
            while not ended:
                message = await reply.queue.get()
                ended = isinstance(message, Done | Problem)
                if isinstance(message, Problem):
                    raise WireClosedError(self._closed) if self._closed else ChatError(message.message)
                yield message
        finally:
            self._replies.pop(request_id, None)
            if not ended:
                with contextlib.suppress(WireClosedError):
                    await self.send(Stop(request_id=request_id))

    async def stop(self, request_id: str) -> None:
        await self.send(Stop(request_id=request_id))

    async def set_lever(
        self,
        name: str,
        value: Value,
        expected: Value | None = None,
        *,
        reason: str = "",
        for_seconds: float = 0.0,
        guard: float = 0.0,
    ) -> LeverEvent | LeverRefused:
        """Change a lever and wait until it took effect or was refused."""
        key = uuid.uuid4().hex[:12]
        change = SetLever(
            change_id=key,
            name=name,
            value=value,
            expected=expected,
            reason=reason,
            for_seconds=for_seconds,
            guard=guard,
        )
        return _lever_answer(await self._ask(key, change))

    async def undo_lever(self, of: str = "") -> LeverEvent | LeverRefused:
        key = uuid.uuid4().hex[:12]
        return _lever_answer(await self._ask(key, UndoLever(change_id=key, of=of)))

    async def query(self, sql: str, max_rows: int = 1000, run: int = 0) -> QueryResult:
        key = uuid.uuid4().hex[:12]
        answer = await self._ask(key, QueryMessage(query_id=key, sql=sql, max_rows=max_rows, run=run))
        if not isinstance(answer, QueryResult):
            raise WireClosedError(f"The server answered a query with {type(answer).__name__}.")
        return answer

    # -- inside ----------------------------------------------------------------------------------------------

    async def _ask(self, key: str, message: ClientMessage) -> ServerMessage:
        future: asyncio.Future[ServerMessage] = asyncio.get_running_loop().create_future()
        self._answers[key] = future
        try:
            await self.send(message)
            return await asyncio.wait_for(future, ANSWER_S)
        except TimeoutError:
            raise WireClosedError(f"The server did not answer within {ANSWER_S:.0f} s.") from None
        finally:
            self._answers.pop(key, None)

    async def _connect(self, resume: str) -> Welcome:
        loop = asyncio.get_running_loop()
        end, attempt = loop.time() + self._retry_s, 0
        while True:
            try:
                return await self._hello(resume)
            except (OSError, InvalidHandshake, ConnectionClosed, TimeoutError) as error:
                pause = RETRY_S[min(attempt, len(RETRY_S) - 1)]
                if loop.time() + pause > end:
                    raise WireClosedError(f"No server answers at {self.address.base}: {_why(error)}.") from None
                attempt += 1
                await asyncio.sleep(pause)
            except InvalidURI:
                raise WireClosedError(f"{self.address.base!r} is not an address.") from None

    async def _hello(self, resume: str) -> Welcome:
        connection = await connect(self.address.socket, max_size=4 * MAX_MESSAGE_BYTES, max_queue=64, proxy=None)
        received = {key: reply.received for key, reply in self._replies.items()} if resume else {}
        hello = Hello(
            version=WIRE_VERSION, client=self._client, token=self.address.token, resume=resume, received=received
        )
        await connection.send(encode(hello))
        answer = decode_server(await asyncio.wait_for(connection.recv(), 10))
        if isinstance(answer, Refused):
            await connection.close()
            raise WireClosedError(answer.message)
        if not isinstance(answer, Welcome):
            await connection.close()
            raise WireClosedError(f"The server began with {type(answer).__name__} instead of a welcome.")
        self._connection, self.welcome = connection, answer
        if self.load is not None and self.load.state != answer.state:
            self.load = None
        self._state.set()
        return answer

    async def _read(self) -> None:
        while True:
            try:
                connection = self._connection
                if connection is None:
                    return
                async for text in connection:
                    self._take(decode_server(text))
            except ConnectionClosed:
                pass
            except WireError as error:
                self._closed = str(error)
            if self._closed:
                break
            try:
                await self._restore()
            except WireClosedError as error:
                self._closed = self._closed or str(error)
                break
        self._give_up()

    async def _restore(self) -> None:
        before, self._connection = self.welcome.session if self.welcome else "", None
        welcome = await self._connect(before)
        if welcome.session != before:
            for request_id, reply in self._replies.items():
                lost = "The reply was lost with its connection; ask again."
                reply.queue.put_nowait(Problem(message=lost, request_id=request_id))
        if self._subscription:
            await self.send(self._subscription)
        self._inbox.put_nowait(welcome)

    def _take(self, message: ServerMessage) -> None:
        match message:
            case Delta(request_id=key) | Queued(request_id=key) | Done(request_id=key) if key in self._replies:
                reply = self._replies[key]
                reply.received += len(message.tokens) if isinstance(message, Delta) else 0
                reply.queue.put_nowait(message)
                return
            case Problem(request_id=key) if key in self._replies:
                self._replies[key].queue.put_nowait(message)
                return
            case LeverRefused(change_id=key) | QueryResult(query_id=key) if self._answer(key, message):
                return
            case LeverEvent(change_id=key):
                self._answer(key, message)  # everyone else learns of it too
            case Load():
                self.load = message
                self._state.set()
            case Refused():
                self._closed = message.message
        self._inbox.put_nowait(message)

    def _answer(self, key: str, message: ServerMessage) -> bool:
        future = self._answers.get(key)
        if future is None or future.done():
            return False
        future.set_result(message)
        return True

    def _give_up(self) -> None:
        error = WireClosedError(self._closed)
        self._inbox.put_nowait(error)
        for request_id, reply in self._replies.items():
            reply.queue.put_nowait(Problem(message=self._closed, request_id=request_id))
        for future in self._answers.values():
            if not future.done():
                future.set_exception(error)
        self._state.set()


def _lever_answer(message: ServerMessage) -> LeverEvent | LeverRefused:
    if isinstance(message, LeverEvent | LeverRefused):
        return message
    raise WireClosedError(f"The server answered a lever change with {type(message).__name__}.")


def _why(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).splitlines()[0].rstrip(".")[:200]
