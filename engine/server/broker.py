"""State of the engine as the server knows it, and the requests in flight with those who wait for them."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from engine.protocol.commands import Cancel, Submit, Value
from engine.protocol.events import (
    Accepted,
    Delta,
    Event,
    Facts,
    Finished,
    LeverChanged,
    Loading,
    Ready,
    Records,
    Snapshot,
    Usage,
)
from engine.server.ports import EngineLink

log = logging.getLogger("metrale.server")

MAX_IN_FLIGHT = 1024
KEPT_FINISHED = 50


class EngineState(StrEnum):
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"


class NotReadyError(RuntimeError):
    """The engine is loading or gone; one sentence."""


class OverloadedError(RuntimeError):
    """The queue is full; one sentence."""


class TooLongError(ValueError):
    """The prompt does not fit the context; one sentence."""


class Waiter(Protocol):
    """Gets the events of one request, on the event loop; the last is `Finished`, exactly once."""

    def on_delta(self, delta: Delta) -> None: ...

    def on_finished(self, finished: Finished) -> None: ...


@dataclass(slots=True)
class Flight:
    """One request from submission to its end."""

    submit: Submit
    waiter: Waiter
    started: float
    accepted: bool = False
    first_token: float = 0.0
    ended: float = 0.0
    output_tokens: int = 0
    drafted_accepted: int = 0
    lane: str = ""
    finished: Finished | None = None


@dataclass(slots=True)
class Recorded:
    """A waiter whose reply is kept when it ends; what the engine refused was never a request."""

    waiter: Waiter
    prompt: str
    keep: Callable[[str, str, str], None]
    reply: list[str] = field(default_factory=list)

    def on_delta(self, delta: Delta) -> None:
        self.reply.extend(token.text for token in delta.tokens)
        self.waiter.on_delta(delta)

    def on_finished(self, finished: Finished) -> None:
        if finished.reason != "refused":
            self.keep(finished.request_id, self.prompt, "".join(self.reply) + finished.tail)
        self.waiter.on_finished(finished)


@dataclass(slots=True)
class Watchers:
    """Who is told of what, by kind."""

    state: list[Callable[[], None]] = field(default_factory=list)
    levers: list[Callable[[LeverChanged], None]] = field(default_factory=list)
    deltas: list[Callable[[Delta], None]] = field(default_factory=list)


class Broker:
    """Lives on the event loop; nothing here waits."""

    def __init__(
        self,
        link: EngineLink,
        ingest: Callable[[bytes, int], None] = lambda payload, lost: None,
        max_in_flight: int = MAX_IN_FLIGHT,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._ingest = ingest
        self._max_in_flight = max_in_flight
        self._now = now
        self.state = EngineState.LOADING
        self.loading = Loading(stage="starting", done=0, total=0)
        self.failure = ""
        self.facts: Facts | None = None
        self.levers: dict[str, Value] = {}
        self.sources: dict[str, str] = {}
        self.snapshot: Snapshot | None = None
        self.flights: dict[str, Flight] = {}
        self.finished: deque[Flight] = deque(maxlen=KEPT_FINISHED)
        self.watchers = Watchers()
        self.announce: Callable[[Submit], None] = lambda submit: None
        """Told of every request before the engine is."""
        self.forget: Callable[[str], None] = lambda request_id: None
        """Told of every request that ended without a record of the engine."""
        self.record: Callable[[str, str, str], None] = lambda request_id, prompt, reply: None
        """Told request id, prompt (JSON) and reply where the lever `record_content` was on at submission."""

    async def start(self) -> None:
        await self._link.start(self.on_event, self.on_death)

    async def stop(self) -> None:
        await self._link.stop()
        self.fail_all("The server is shutting down.", "shutdown")

    # -- requests ------------------------------------------------------------------------------------------

    def check(self, prompt_tokens: int) -> Facts:
        """Facts of an engine that can take the prompt. Raises `NotReadyError`, `OverloadedError` or `TooLongError`."""
        if self.state is EngineState.FAILED:
            raise NotReadyError(self.failure)
        if self.state is EngineState.LOADING or self.facts is None:
            raise NotReadyError("The model is still loading; try again when it is ready.")
        if len(self.flights) >= self._max_in_flight:
            raise OverloadedError(
                f"{len(self.flights)} requests are waiting or running already; try again in a moment."
            )
        if prompt_tokens >= self.facts.max_context:
            raise TooLongError(
                f"The prompt has {prompt_tokens} tokens, but the context of {self.facts.model} holds "
                f"{self.facts.max_context} with the reply; shorten it."
            )
        return self.facts

    def submit(self, submit: Submit, waiter: Waiter, prompt: Any = None) -> None:
        """Send a request to the engine. `prompt` is what was asked, as JSON values. Raises what `check` raises."""
        self.check(len(submit.prompt))
        if prompt is not None and self.levers.get("record_content") is True:
            waiter = Recorded(waiter, msgspec.json.encode(prompt).decode(), self.record)
        self.flights[submit.request_id] = Flight(submit, waiter, self._now())
        self.announce(submit)
        self._link.send(submit)

    def cancel(self, request_id: str, reason: str) -> bool:
        """Ask for the end of a request; False when none of that id is in flight."""
        if request_id not in self.flights:
            return False
        self._link.send(Cancel(request_id=request_id, reason=reason))
        return True

    # -- what the engine says ------------------------------------------------------------------------------

    def on_event(self, event: Event) -> None:
        match event:
            case Delta():
                self._on_delta(event)
            case Records():
                self._ingest(event.payload, event.lost)
            case Snapshot():
                self.snapshot = event
            case Finished():
                self._on_finished(event)
            case Accepted():
                if flight := self.flights.get(event.request_id):
                    flight.accepted = True
            case LeverChanged():
                self._on_lever(event)
            case Loading():
                self.loading = event
                self._tell_state()
            case Ready():
                self._on_ready(event)
            case _:
                log.warning("The engine sent %s, which the server does not expect.", type(event).__name__)

    def on_death(self, sentence: str) -> None:
        if self.state is EngineState.FAILED:
            return
        log.error("%s", sentence)
        self.state = EngineState.FAILED
        self.failure = sentence
        self.fail_all(sentence, "error")
        self._tell_state()

    def _on_ready(self, ready: Ready) -> None:
        self.facts, self.levers, self.sources = ready.facts, dict(ready.levers), dict(ready.sources)
        self.state = EngineState.READY
        log.info("Ready: %s on %s.", ready.facts.model, ready.facts.device)
        self._tell_state()

    def _on_delta(self, delta: Delta) -> None:
        flight = self.flights.get(delta.request_id)
        if flight is None:
            return
        if not flight.output_tokens:
            flight.first_token = self._now()
        flight.output_tokens += len(delta.tokens)
        for token in delta.tokens:
            flight.drafted_accepted += token.draft > 0
            flight.lane = token.lane
        flight.waiter.on_delta(delta)
        for watch in self.watchers.deltas:
            watch(delta)

    def _on_finished(self, finished: Finished) -> None:
        flight = self.flights.pop(finished.request_id, None)
        if flight is None:
            return
        flight.finished, flight.ended = finished, self._now()
        if finished.reason == "refused":
            self.forget(finished.request_id)
        self.finished.append(flight)
        flight.waiter.on_finished(finished)

    def _on_lever(self, change: LeverChanged) -> None:
        if not change.error:
            self.levers[change.name] = change.new
            self.sources[change.name] = "operator"
        for watch in tuple(self.watchers.levers):
            watch(change)

    def fail_all(self, sentence: str, reason: str) -> None:
        """End every request in flight with one sentence."""
        for request_id in tuple(self.flights):
            usage = Usage(output_tokens=self.flights[request_id].output_tokens)
            self._on_finished(Finished(request_id=request_id, reason=reason, usage=usage, error=sentence))
            self.forget(request_id)

    def _tell_state(self) -> None:
        for watch in tuple(self.watchers.state):
            watch()
