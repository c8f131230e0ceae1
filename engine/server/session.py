"""One client of the wire: its requests, its subscriptions, what it may do; it outlives a dropped connection."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from engine.levers.changes import Proposal, RateLimit
from engine.protocol import wire
from engine.protocol.commands import Submit, Switches
from engine.protocol.events import Delta, Finished, Token, Usage
from engine.server.bounds import OutOfBoundsError, check_limits, check_sampling
from engine.server.broker import Broker, NotReadyError, OverloadedError, TooLongError
from engine.server.desk import LeverDesk, Operator, Terms
from engine.server.mailbox import Mailbox
from engine.server.ports import EncodedPrompt, PromptError, QueryRefusedError
from engine.server.views import Views
from telemetry.names import Finish

MESSAGES_PER_SECOND = 200.0
MESSAGE_BURST = 500
MAX_REQUESTS = 64
"""Requests that one session may have in flight."""
MAX_QUERIES = 8
"""Queries that one session may have running."""
KEPT_ENDED = 16
"""Ended replies that a reconnecting client may still ask for."""
ORIGINS = {"tui": "tui", "web": "web", "cli": "cli"}


@dataclass(slots=True)
class OwnRequest:
    """A reply under way for this session, with all tokens so far, so that a reconnect misses none."""

    request_id: str
    engine_id: str
    tokens: list[Token] = field(default_factory=list)
    done: wire.Done | None = None
    stopped: bool = False
    """Stopped before it reached the engine."""


class Session:
    """Handles the messages of one client; everything runs on the event loop."""

    def __init__(self, label: str, client: str, control: bool, broker: Broker, desk: LeverDesk, views: Views) -> None:
        self.label = label
        self.secret = secrets.token_hex(16)
        self.client = client
        self.control = control
        self._broker = broker
        self._desk = desk
        self._views = views
        self.mailbox = Mailbox(self._spell)
        self._requests: dict[str, OwnRequest] = {}
        self._ended: dict[str, OwnRequest] = {}
        self._topics: frozenset[str] = frozenset()
        self._ticker: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._querying = 0
        self._limit = RateLimit(MESSAGES_PER_SECOND, MESSAGE_BURST)
        self._subscription = views.subscribe()
        broker.watchers.state.append(self._on_state)
        broker.watchers.deltas.append(self._on_foreign_delta)
        desk.watchers.append(self._on_lever)
        views.log_watchers.append(self._on_log)

    # -- from the client -----------------------------------------------------------------------------------

    def take(self, message: wire.ClientMessage) -> None:
        """Act on one message; the answer goes to the mailbox."""
        if not self._limit.take(time.monotonic()):
            self._problem("Too many messages a second; this one was dropped.", getattr(message, "request_id", ""))
            return
        match message:
            case wire.Chat():
                self._chat(message)
            case wire.Stop():
                self._stop(message.request_id)
            case wire.Subscribe():
                self._subscribe(message)
            case wire.SetLever() | wire.UndoLever():
                self._spawn(self._lever(message))
            case wire.Query():
                self._spawn(self._query(message))
            case wire.Ping():
                self.mailbox.put(wire.Pong(nonce=message.nonce[:200]))
            case wire.Replay():
                self._spawn(self._replay(message))
            case wire.Hello():
                self._problem("This connection has said hello already.")

    def resume(self, received: dict[str, int]) -> None:
        """Carry on with a new connection: send again what the client does not have of its replies."""
        waiting, self.mailbox = self.mailbox.rest(), Mailbox(self._spell)
        for message in waiting:
            self.mailbox.put(message)
        for request_id, count in received.items():
            own = self._requests.get(request_id) or self._ended.get(request_id)
            if own is None:
                self._problem(f"The request {request_id[:100]!r} is not known any more.", request_id)
                continue
            missing = tuple(own.tokens[max(0, count) :])
            if missing:
                self.mailbox.put(wire.Delta(request_id=request_id, text="", tokens=missing))
            if own.done:
                self.mailbox.put(own.done)

    def close(self, reason: str = "client") -> None:
        """Forget everything and cancel what still runs."""
        for own in self._requests.values():
            self._broker.cancel(own.engine_id, reason)
        for task in (*self._tasks, *([self._ticker] if self._ticker else [])):
            task.cancel()
        self._broker.watchers.state.remove(self._on_state)
        self._broker.watchers.deltas.remove(self._on_foreign_delta)
        self._desk.watchers.remove(self._on_lever)
        self._views.log_watchers.remove(self._on_log)
        self._views.end_replay(self)

    # -- chat ----------------------------------------------------------------------------------------------

    def _chat(self, chat: wire.Chat) -> None:
        """Known at once, so that a stop right behind it finds it."""
        if problem := self._chat_problem(chat):
            self._problem(problem, chat.request_id)
            return
        own = OwnRequest(chat.request_id, f"{self.label}.{chat.request_id}")
        self._requests[chat.request_id] = own
        self._spawn(self._submit(own, chat))

    async def _submit(self, own: OwnRequest, chat: wire.Chat) -> None:
        try:
            self._broker.check(0)
            turns = [_turn(turn) for turn in chat.messages]
            prompt = await self._views.encode_chat(turns)
            facts = self._broker.check(len(prompt.tokens))
            self.mailbox.put(
                wire.Queued(request_id=chat.request_id, prompt_tokens=len(prompt.tokens), max_context=facts.max_context)
            )
            if own.stopped:
                usage = Usage(prompt_tokens=len(prompt.tokens))
                self.on_finished(own, Finished(request_id=own.engine_id, reason=Finish.CANCELLED, usage=usage))
                return
            self._broker.submit(_submit(own.engine_id, chat, prompt), _Relay(self, own), turns)
        except (NotReadyError, OverloadedError, TooLongError, PromptError) as error:
            self._requests.pop(chat.request_id, None)
            self._problem(str(error), chat.request_id)

    def _chat_problem(self, chat: wire.Chat) -> str:
        if not self.control:
            return "This connection may read only; connect with the control token to chat."
        if not 1 <= len(chat.request_id) <= 100:
            return "A request_id has 1 to 100 characters."
        if chat.request_id in self._requests:
            return f"The request_id {chat.request_id!r} is in use; choose a new one."
        if len(self._requests) >= MAX_REQUESTS:
            return f"A connection may have {MAX_REQUESTS} replies under way at once; wait for one to end."
        if not chat.messages:
            return "A chat needs at least one message."
        try:
            check_sampling(chat.sampling, self._broker.facts.vocab_size if self._broker.facts else 2**31)
            check_limits(chat.limits)
        except OutOfBoundsError as error:
            return str(error)
        return ""

    def _stop(self, request_id: str) -> None:
        own = self._requests.get(request_id)
        engine_id = own.engine_id if own else request_id
        if not self.control:
            self._problem("This connection may read only.", request_id)
        elif self._broker.cancel(engine_id, "stop"):
            return
        elif own:
            own.stopped = True  # its prompt is being encoded still
        else:
            self._problem(f"No request {request_id[:100]!r} is running.", request_id)

    def on_delta(self, own: OwnRequest, delta: Delta) -> None:
        own.tokens.extend(delta.tokens)
        self.mailbox.put(wire.Delta(request_id=own.request_id, text="", tokens=delta.tokens))

    def on_finished(self, own: OwnRequest, finished: Finished) -> None:
        own.done = wire.Done(
            request_id=own.request_id,
            reason=finished.reason,
            usage=finished.usage,
            text=finished.tail,
            error=finished.error,
            speedup=self._views.speedup(own.engine_id, finished.usage),
        )
        self._requests.pop(own.request_id, None)
        self._ended[own.request_id] = own
        while len(self._ended) > KEPT_ENDED:
            del self._ended[next(iter(self._ended))]
        self.mailbox.put(own.done)

    # -- levers, queries, replay ---------------------------------------------------------------------------

    async def _lever(self, message: wire.SetLever | wire.UndoLever) -> None:
        operator = Operator(ORIGINS.get(self.client, "api"), f"{self.client[:40]}:{self.label}", self.control)
        answer: wire.LeverEvent | wire.LeverRefused
        if isinstance(message, wire.UndoLever):
            answer = await self._desk.undo(message.change_id, message.of, operator)
        elif not (0 <= message.for_seconds <= 86_400 and 0 <= message.guard < 1):
            refusal = "for_seconds must be 0 to 86400 and guard a share below 1."
            answer = wire.LeverRefused(change_id=message.change_id, name=message.name, message=refusal)
        else:
            proposal = Proposal(message.name, message.value, message.expected)
            terms = Terms(message.reason[:500], message.for_seconds, message.guard)
            answer = await self._desk.change(message.change_id[:64], proposal, operator, terms)
        if isinstance(answer, wire.LeverRefused) or "levers" not in self._topics:
            self.mailbox.put(answer)

    async def _query(self, query: wire.Query) -> None:
        if self._querying >= MAX_QUERIES:
            sentence = f"{MAX_QUERIES} queries of this connection are running; wait for one to end."
            self.mailbox.put(wire.QueryResult(query_id=query.query_id, error=sentence))
            return
        self._querying += 1
        try:
            answer = await self._views.query(query.sql, query.max_rows, query.run)
        except QueryRefusedError as error:
            self.mailbox.put(wire.QueryResult(query_id=query.query_id, error=str(error)))
            return
        finally:
            self._querying -= 1
        result = wire.QueryResult(
            query_id=query.query_id,
            columns=answer.columns,
            types=answer.types,
            rows=answer.rows,
            truncated=answer.truncated,
            seconds=answer.seconds,
        )
        self.mailbox.put(_fitting(result))

    async def _replay(self, message: wire.Replay) -> None:
        try:
            await self._views.replay(self, message, self.mailbox_put)
        except QueryRefusedError as error:
            self._problem(str(error))

    def mailbox_put(self, message: wire.ServerMessage) -> None:
        """To the mailbox of the moment: a resumed session has a new one."""
        self.mailbox.put(message)

    # -- topics --------------------------------------------------------------------------------------------

    def _subscribe(self, message: wire.Subscribe) -> None:
        unknown = [topic for topic in message.topics if topic not in wire.TOPICS]
        if unknown or not 0.1 <= message.rate_hz <= 30:
            what = f"topic {unknown[0][:40]!r} is unknown" if unknown else f"{message.rate_hz:g} Hz is out of 0.1 to 30"
            self._problem(f"The subscription was not taken: {what}; topics are {', '.join(wire.TOPICS)}.")
            return
        self._topics = frozenset(message.topics)
        if self._ticker:
            self._ticker.cancel()
        self._ticker = asyncio.create_task(self._tick(1 / message.rate_hz))

    async def _tick(self, period: float) -> None:
        while True:
            if "stats" in self._topics and not self._views.replaying(self):
                self.mailbox.put_due("stats", self._stats)
            if "gate" in self._topics and not self._views.replaying(self):
                self.mailbox.put_due("gate", lambda skipped: self._views.gate())
            if "requests" in self._topics:
                self.mailbox.put_due("requests", lambda skipped: self._views.requests())
            await asyncio.sleep(period)

    def _stats(self, skipped: int) -> wire.ServerMessage | None:
        return self._views.stats(self._subscription, skipped)

    def _spell(self, token: int) -> str:
        return self._views.text.token_bytes(token).decode("utf-8", "replace")

    def _on_state(self) -> None:
        self.mailbox.put(self._views.load())

    def _on_lever(self, event: wire.LeverEvent) -> None:
        if "levers" in self._topics and not self._views.replaying(self):
            self.mailbox.put(event)

    def _on_foreign_delta(self, delta: Delta) -> None:
        if "tokens" in self._topics and not delta.request_id.startswith(f"{self.label}."):
            self.mailbox.put(wire.Delta(request_id=delta.request_id, text="", tokens=delta.tokens))

    def _on_log(self, entry: wire.Log) -> None:
        if "log" in self._topics:
            self.mailbox.put(entry)

    def _problem(self, sentence: str, request_id: str = "") -> None:
        self.mailbox.put(wire.Problem(message=sentence, request_id=request_id[:100]))

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@dataclass(slots=True)
class _Relay:
    """Hands the events of one request to its session."""

    session: Session
    own: OwnRequest

    def on_delta(self, delta: Delta) -> None:
        self.session.on_delta(self.own, delta)

    def on_finished(self, finished: Finished) -> None:
        self.session.on_finished(self.own, finished)


class Sessions:
    """All sessions; one whose connection dropped is kept for a while, so that it can be resumed."""

    def __init__(self, make: Callable[[str, str, bool], Session], grace_s: float = 30.0) -> None:
        self._make = make
        self._grace_s = grace_s
        self._count = 0
        self._open: dict[str, Session] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, client: str, control: bool) -> Session:
        self._count += 1
        session = self._make(f"s{self._count}", client, control)
        self._open[session.secret] = session
        return session

    def resume(self, secret: str, control: bool) -> Session | None:
        """The detached session of that id, if its role is the same; a connected one is not taken over."""
        session = self._open.get(secret)
        timer = self._timers.pop(secret, None) if session and session.control == control else None
        if timer is None:
            return None
        timer.cancel()
        return session

    def detach(self, session: Session, for_good: bool) -> None:
        """The connection ended; for good when the client closed it in order."""
        if for_good:
            self._end(session)
        else:
            loop = asyncio.get_running_loop()
            self._timers[session.secret] = loop.call_later(self._grace_s, self._end, session)

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        for session in tuple(self._open.values()):
            self._end(session)

    def _end(self, session: Session) -> None:
        self._timers.pop(session.secret, None)
        if self._open.pop(session.secret, None):
            session.close()


def _fitting(result: wire.QueryResult) -> wire.QueryResult:
    """As many rows as one message holds."""
    while (size := len(wire.encode(result))) > wire.MAX_MESSAGE_BYTES and result.rows:
        kept = int(len(result.rows) * 0.9 * wire.MAX_MESSAGE_BYTES / size)
        result = replace(result, rows=result.rows[:kept], truncated=True)
    return result


def _turn(turn: wire.ChatTurn) -> dict[str, str]:
    return {"role": turn.role, "content": turn.content}


def _submit(engine_id: str, chat: wire.Chat, prompt: EncodedPrompt) -> Submit:
    return Submit(
        request_id=engine_id,
        prompt=prompt.tokens,
        sampling=chat.sampling,
        limits=chat.limits,
        switches=Switches(speculate=chat.speculate, thinking_open=prompt.thinking_open),
        conversation_id=chat.conversation_id[:200],
    )
