"""What the server shows of itself: load state, levers, statistics, requests, query answers, the log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from engine.levers.catalog import LEVERS
from engine.protocol import wire
from engine.protocol.commands import Value
from engine.protocol.events import Usage
from engine.server.broker import Broker, EngineState, Flight, NotReadyError
from engine.server.ports import EncodedPrompt, QueryAnswer, QueryRefusedError, Telemetry, Text
from engine.server.replay import Player
from engine.server.stats import EMPTY, gate_of, stats_of
from telemetry.hub import LiveRequest, Subscription

MAX_ROWS = 100_000


class Views:
    """Builds frames from what broker and telemetry hold; keeps no numbers of its own."""

    def __init__(
        self,
        broker: Broker,
        telemetry: Telemetry,
        text: Callable[[], Text],
        wall: Callable[[], float] = time.time,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.broker = broker
        self.telemetry = telemetry
        self._text = text
        self._wall = wall
        self._now = now
        self._players: dict[Hashable, Player] = {}
        self.log_watchers: list[Callable[[wire.Log], None]] = []

    @property
    def text(self) -> Text:
        """Tokenizer of the loaded model. Raises `NotReadyError` while it loads."""
        if self.broker.state is EngineState.LOADING:
            raise NotReadyError("The model is still loading; try again when it is ready.")
        return self._text()

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> EncodedPrompt:
        """On a worker thread, since a long prompt takes long. Raises `NotReadyError` or `PromptError`."""
        return await asyncio.to_thread(self.text.encode_chat, messages, tools)

    # -- state ---------------------------------------------------------------------------------------------

    def load(self) -> wire.Load:
        broker, loading = self.broker, self.broker.loading
        return wire.Load(
            state=str(broker.state),
            stage=loading.stage,
            done=loading.done,
            total=loading.total,
            unit=loading.unit,
            message=broker.failure,
            facts=broker.facts,
        )

    @property
    def is_ready(self) -> bool:
        return self.broker.state is EngineState.READY

    def levers(self) -> tuple[wire.LeverView, ...]:
        return lever_views(self.broker.levers, self.broker.sources)

    def welcome(self, session: str, control: bool) -> wire.Welcome:
        return wire.Welcome(
            version=wire.WIRE_VERSION,
            session=session,
            state=str(self.broker.state),
            role="control" if control else "read",
            facts=self.broker.facts,
            levers=self.levers(),
            flush_ms=10,
        )

    # -- numbers -------------------------------------------------------------------------------------------

    def subscribe(self) -> Subscription:
        """A place of its own in the aggregates."""
        return self.telemetry.hub.subscribe()

    def stats(self, subscription: Subscription, skipped: int) -> wire.Stats:
        """Aggregates since this subscription was read last, and the state now."""
        facts = self.broker.facts
        return stats_of(
            subscription.read(),
            self.broker.snapshot or EMPTY,
            block_size=facts.block_size if facts else 0,
            database=self.telemetry.trouble or "ok",
            skipped=skipped,
        )

    def gate(self) -> wire.GateView | None:
        """The last decision; None before the first."""
        return gate_of(self.telemetry.hub)

    def requests(self) -> wire.Requests:
        seen = {request.request_id: request for request in self.telemetry.hub.requests()}
        flights = (*self.broker.flights.values(), *reversed(self.broker.finished))
        rows = tuple(self._row(flight, seen.get(flight.submit.request_id)) for flight in flights)
        return wire.Requests(time=self._wall(), rows=rows)

    def speedup(self, request_id: str, usage: Usage) -> float | None:
        """Delivered decoding speed of one reply over measured plain decoding."""
        live = self.telemetry.hub.request(request_id)
        if live is not None and live.speedup is not None:
            return live.speedup
        plain = self.telemetry.hub.baseline.tokens_per_s(1)
        if not plain or usage.output_tokens < 2 or usage.decode_us <= 0:
            return None
        return (usage.output_tokens - 1) / (usage.decode_us / 1e6) / plain

    def _row(self, flight: Flight, live: LiveRequest | None) -> wire.RequestView:
        end = flight.ended or self._now()
        speaking = end - flight.first_token if flight.first_token else 0.0
        usage = flight.finished.usage if flight.finished else None
        state = "finished" if usage else "active" if flight.first_token else live.state if live else "waiting"
        return wire.RequestView(
            request_id=flight.submit.request_id,
            state=state,
            age_s=self._now() - flight.started,
            prompt_tokens=len(flight.submit.prompt),
            output_tokens=flight.output_tokens,
            tokens_per_s=(flight.output_tokens - 1) / speaking if speaking > 0 and flight.output_tokens > 1 else 0.0,
            ttft_ms=_ttft_ms(flight, live),
            drafted=usage.drafted if usage else live.drafted if live else 0,
            accepted=usage.accepted if usage else flight.drafted_accepted,
            lane=flight.lane,
            reason=flight.finished.reason if flight.finished else "",
            conversation_id=flight.submit.conversation_id,
        )

    # -- questions -----------------------------------------------------------------------------------------

    async def query(self, sql: str, max_rows: int, run: int = 0) -> QueryAnswer:
        """Read-only SQL on a worker thread. Raises `QueryRefusedError`."""
        if not sql.strip():
            raise QueryRefusedError("The query is empty.")
        return await asyncio.to_thread(self.telemetry.query, sql, max(1, min(max_rows, MAX_ROWS)), max(0, run))

    def replaying(self, session: Hashable) -> bool:
        return session in self._players

    async def replay(self, session: Hashable, message: wire.Replay, out: Callable[[wire.ServerMessage], None]) -> None:
        """Start, steer or end the replay of one session. Raises `QueryRefusedError`."""
        player = self._players.get(session)
        if message.action == "stop":
            self._return_from(session)
        elif message.action == "start":
            recorded = await asyncio.to_thread(self.telemetry.replay, message.run)
            self._return_from(session)
            self._players[session] = started = Player(recorded, out, self.broker.levers, message.speed)
            await started.seek(message.position)
            started.start()
        elif player is None:
            raise QueryRefusedError("No replay is running; start one with the id of a run.")
        else:
            await player.steer(message)

    def _return_from(self, session: Hashable) -> None:
        """End the replay of a session that goes on: it shows the levers of now again."""
        player = self._players.get(session)
        self.end_replay(session)
        if player:
            player.show_levers(self.broker.levers)

    def end_replay(self, session: Hashable) -> None:
        player = self._players.pop(session, None)
        if player:
            player.stop()

    # -- log -----------------------------------------------------------------------------------------------

    def say(self, level: str, message: str) -> None:
        entry = wire.Log(time=self._wall(), level=level, message=message)
        for watch in tuple(self.log_watchers):
            watch(entry)


class LogRelay(logging.Handler):
    """Shows warnings of the server to those who subscribed to the log."""

    def __init__(self, views: Views, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(logging.INFO)
        self._views = views
        self._loop = loop

    def emit(self, record: logging.LogRecord) -> None:
        level = "error" if record.levelno >= logging.ERROR else record.levelname.lower()
        try:
            self._loop.call_soon_threadsafe(self._views.say, level, record.getMessage())
        except RuntimeError:
            pass  # the loop is closed: nobody is left to tell


def lever_views(values: Mapping[str, Value], sources: Mapping[str, str]) -> tuple[wire.LeverView, ...]:
    return tuple(
        wire.LeverView(
            name=name,
            group=lever.group,
            kind=str(lever.kind),
            value=values.get(name, lever.default),
            default=lever.default,
            help=lever.help,
            source=sources.get(name, "default"),
            applies=str(lever.applies),
            lossless=lever.lossless,
            bounds=lever.bounds,
            unit=lever.unit,
            minimum=lever.minimum,
            maximum=lever.maximum,
            choices=lever.choices,
            none_word=lever.none_word,
            env=lever.env,
        )
        for name, lever in LEVERS.items()
    )


def _ttft_ms(flight: Flight, live: LiveRequest | None) -> float | None:
    """The engine's figure, which the reply and SQL have too; what the server saw until that is here."""
    if flight.finished and flight.finished.usage.ttft_us:
        return flight.finished.usage.ttft_us / 1000
    if live is not None and live.ttft_ms is not None:
        return live.ttft_ms
    return 1000 * (flight.first_token - flight.started) if flight.first_token else None
