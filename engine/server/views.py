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
from engine.protocol.events import Snapshot, Usage
from engine.server.broker import Broker, EngineState, Flight, NotReadyError
from engine.server.ports import EncodedPrompt, QueryAnswer, QueryRefusedError, Telemetry, Text
from telemetry.hub import LaneTotals, LiveRequest, Percentiles, Subscription

MAX_ROWS = 100_000
EMPTY = Snapshot(
    tick=0, waiting=0, prefilling=0, active=0, swapped=0, preempted=0, kv_used_blocks=0, kv_total_blocks=0,
    cached_blocks=0, lane="",
)  # fmt: skip


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
        self._replays: dict[Hashable, asyncio.Task[None]] = {}
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
        window = subscription.read()
        state, facts = self.broker.snapshot or EMPTY, self.broker.facts
        block = facts.block_size if facts else 0
        return wire.Stats(
            time=self._wall(),
            window_s=window.window_s,
            tick=max(state.tick, window.tick),
            tokens_per_s=window.tokens_per_s,
            prefill_tokens_per_s=window.prefill_tokens_per_s,
            lanes={name: _lane(totals) for name, totals in window.lanes.items()},
            ttft=_quantiles(window.ttft),
            tpot=_quantiles(window.tpot),
            waiting=state.waiting,
            prefilling=state.prefilling,
            active=state.active,
            swapped=state.swapped,
            preempted=state.preempted,
            kv_used_tokens=state.kv_used_blocks * block,
            kv_total_tokens=state.kv_total_blocks * block,
            cached_tokens=state.cached_blocks * block,
            lane=state.lane,
            refusals=state.refusals,
            total_tokens=window.total_tokens,
            total_requests=window.total_requests,
            lost=window.lost,
            telemetry_cost=window.telemetry_cost,
            database=self.telemetry.trouble or "ok",
            skipped=skipped,
            plain_tokens_per_s=window.plain_tokens_per_s,
        )

    def gate(self) -> wire.GateView | None:
        """The last decision; None before the first."""
        gate = self.telemetry.hub.gate()
        if gate is None:
            return None
        return wire.GateView(
            time=gate.time,
            mode=gate.mode,
            arm=gate.arm,
            reason=gate.reason,
            arms=tuple(
                wire.ArmView(
                    name=arm.name,
                    tokens_per_s=arm.tokens_per_s,
                    deviation=arm.deviation,
                    age_tokens=arm.age_tokens,
                    stale=arm.stale,
                )
                for arm in gate.arms
            ),
            margin=gate.margin,
            losses=gate.losses,
            depth=gate.depth,
            width_bucket=gate.width_bucket,
            tokens_until_probe=gate.tokens_until_probe,
            switches=gate.switches,
        )

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
            ttft_ms=1000 * (flight.first_token - flight.started) if flight.first_token else None,
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
        return session in self._replays

    async def replay(self, session: Any, message: wire.Replay) -> None:
        raise QueryRefusedError("This server cannot replay runs.")

    def end_replay(self, session: Hashable) -> None:
        task = self._replays.pop(session, None)
        if task:
            task.cancel()

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


def _lane(totals: LaneTotals) -> wire.LaneStats:
    return wire.LaneStats(
        steps=totals.steps,
        tokens=totals.tokens,
        seconds=totals.seconds,
        drafted=totals.drafted,
        accepted=totals.accepted,
        drafted_at=tuple(totals.drafted_at),
        accepted_at=tuple(totals.accepted_at),
    )


def _quantiles(spread: Percentiles) -> wire.Quantiles:
    return wire.Quantiles(p50=spread.p50, p95=spread.p95, p99=spread.p99, count=spread.count)
