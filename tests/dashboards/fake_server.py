"""A wire server that does what a script says: the real page, the real wire module, invented figures."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from dashboards.app import routes
from engine.levers.catalog import LEVERS
from engine.levers.resolve import find
from engine.levers.spec import LeverError
from engine.protocol import wire
from engine.protocol.commands import Message
from engine.protocol.events import Facts, Token, Usage
from telemetry.names import GateReason, Lane, Refusal

FACTS = Facts(
    run_id="run-fake",
    model="SmolLM2-135M-Instruct",
    device="cpu",
    dtype="q4_1",
    vocab_size=49152,
    max_context=8192,
    kv_tokens=16384,
    block_size=16,
    max_batch_size=8,
    drafters=("ngram", "mtp"),
    versions={"metrale": "0.1.0", "torch": "2.13"},
)

Asked = TypeVar("Asked", bound=Message)


@dataclass
class FakeServer:
    """State of the scripted server; a test changes it and sends what it likes."""

    state: str = "ready"
    role: str = "control"
    version: int = wire.WIRE_VERSION
    refusal: str = ""
    resumable: bool = True
    auto_chat: bool = True
    levers: dict[str, bool | int | float | str] = field(default_factory=dict)
    received: list[wire.ClientMessage] = field(default_factory=list)
    hold_levers: bool = False
    held: list[wire.SetLever] = field(default_factory=list)
    sockets: list[WebSocket] = field(default_factory=list)
    tick: int = 0
    port: int = 0
    sessions: int = 0

    def __post_init__(self) -> None:
        self.levers = {name: lever.default for name, lever in LEVERS.items()} | self.levers

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def of(self, kind: type[Asked]) -> list[Asked]:
        """The messages of one kind that came in."""
        return [message for message in self.received if isinstance(message, kind)]

    async def send(self, *messages: wire.ServerMessage) -> None:
        for message in messages:
            for socket in tuple(self.sockets):
                with contextlib.suppress(RuntimeError, WebSocketDisconnect):
                    await socket.send_text(wire.encode(message))

    async def drop(self) -> None:
        """Cut every connection without a word of farewell."""
        for socket in tuple(self.sockets):
            with contextlib.suppress(RuntimeError):
                await socket.close(code=1011)

    async def serve(self, socket: WebSocket) -> None:
        await socket.accept()
        hello = wire.decode_client(await socket.receive_text())
        self.received.append(hello)
        assert isinstance(hello, wire.Hello)
        if self.refusal:
            await socket.send_text(wire.encode(wire.Refused(message=self.refusal)))
            await socket.close()
            return
        await socket.send_text(wire.encode(self.welcome(hello)))
        self.sockets.append(socket)
        try:
            while True:
                message = wire.decode_client(await socket.receive_text())
                self.received.append(message)
                for answer in self.answer(message):
                    await self.send(answer)
                    if isinstance(answer, wire.Delta):
                        await asyncio.sleep(0.02)
        except (WebSocketDisconnect, RuntimeError):
            pass
        finally:
            self.sockets.remove(socket)

    def welcome(self, hello: wire.Hello) -> wire.Welcome:
        if not (hello.resume and self.resumable):
            self.sessions += 1
        return wire.Welcome(
            version=self.version,
            session=f"session-{self.sessions}",
            state=self.state,
            role=self.role,
            facts=FACTS if self.state == "ready" else None,
            levers=lever_views(self.levers),
        )

    def answer(self, message: wire.ClientMessage) -> Iterator[wire.ServerMessage]:
        match message:
            case wire.SetLever():
                if self.hold_levers:
                    self.held.append(message)
                else:
                    yield self.change(message)
            case wire.UndoLever():
                yield from self.undo(message)
            case wire.Chat():
                if self.auto_chat:
                    yield from reply(message.request_id)
            case wire.Stop():
                yield done(message.request_id, "cancelled", 3)
            case wire.Query():
                yield answer_query(message)
            case wire.Ping():
                yield wire.Pong(nonce=message.nonce)

    def change(self, message: wire.SetLever) -> wire.ServerMessage:
        lever, old = find(message.name), self.levers[message.name]
        try:
            new = lever.parse(message.value)
        except LeverError as error:
            return wire.LeverRefused(change_id=message.change_id, name=message.name, message=str(error), current=old)
        self.levers[message.name] = new
        self.tick += 1
        return wire.LeverEvent(
            change_id=message.change_id,
            name=message.name,
            old=old,
            new=new,
            tick=self.tick,
            time=time.time(),
            origin="web",
            actor="session-1",
            reason=message.reason,
            expires=time.time() + message.for_seconds if message.for_seconds else 0.0,
        )

    def undo(self, message: wire.UndoLever) -> Iterator[wire.ServerMessage]:
        changes = [entry for entry in self.received if isinstance(entry, wire.SetLever)]
        found = next((entry for entry in changes if entry.change_id == message.of), None)
        if found is not None:
            old = LEVERS[found.name].default
            yield self.change(wire.SetLever(change_id=message.change_id, name=found.name, value=old, reason="undo"))


def lever_views(values: dict[str, bool | int | float | str]) -> tuple[wire.LeverView, ...]:
    return tuple(
        wire.LeverView(
            name=name,
            group=lever.group,
            kind=lever.kind.value,
            value=values[name],
            default=lever.default,
            help=lever.help,
            source="default",
            applies=lever.applies.value,
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


def stats(index: int = 0, when: float | None = None, window_s: float = 0.1, **changes: object) -> wire.Stats:
    """A plausible frame; `index` moves every figure a little."""
    wave = math.sin(index / 14)
    rate = 48 + 9 * wave + 3 * math.sin(index * 1.7)
    ngram = max(0, round(rate * window_s * 0.45))
    plain = max(0, round(rate * window_s * 0.3))
    mixed = max(0, round(rate * window_s * 0.25))
    values: dict[str, object] = {
        "time": time.time() if when is None else when,
        "window_s": window_s,
        "tick": 1000 + index,
        "tokens_per_s": rate,
        "prefill_tokens_per_s": max(0.0, 300 * math.sin(index / 40)),
        "lanes": {
            Lane.NGRAM: wire.LaneStats(
                steps=max(1, ngram // 3),
                tokens=ngram,
                seconds=0.04,
                drafted=6,
                accepted=3,
                drafted_at=(3, 2, 1),
                accepted_at=(2, 1),
            ),
            Lane.PLAIN: wire.LaneStats(steps=plain, tokens=plain, seconds=0.05),
            Lane.MIXED: wire.LaneStats(steps=mixed, tokens=mixed, seconds=0.01),
        },
        "ttft": wire.Quantiles(p50=182.4 + 8 * wave, p95=411.0, p99=530.0, count=12),
        "tpot": wire.Quantiles(p50=21.3 + wave, p95=34.8 + 2 * wave, p99=51.2, count=12),
        "waiting": max(0, round(2 * wave)),
        "prefilling": 1 if wave > 0.5 else 0,
        "active": 3,
        "swapped": 0,
        "preempted": 0,
        "kv_used_tokens": 4096 + round(900 * wave),
        "kv_total_tokens": 16384,
        "cached_tokens": 512,
        "lane": Lane.NGRAM,
        "refusals": {Lane.MTP: Refusal.GATE, Lane.SELF_SPEC: Refusal.LEVER_OFF},
        "total_tokens": 5000 + 5 * index,
        "total_requests": 17,
        "lost": {},
        "telemetry_cost": 0.0042,
        "database": "ok",
        "plain_tokens_per_s": 41.2,
    }
    return wire.Stats(**(values | changes))  # type: ignore[arg-type]


def gate(**changes: object) -> wire.GateView:
    values: dict[str, object] = {
        "time": time.time(),
        "mode": "verify",
        "arm": "verify",
        "reason": GateReason.HOLD,
        "arms": (
            wire.ArmView(name="verify", tokens_per_s=52.6, deviation=3.1, age_tokens=12),
            wire.ArmView(name="plain", tokens_per_s=41.2, deviation=1.4, age_tokens=640, stale=True),
        ),
        "margin": 2.6,
        "losses": 0,
        "depth": 310,
        "width_bucket": 4,
        "tokens_until_probe": 384,
        "switches": 2,
    }
    return wire.GateView(**(values | changes))  # type: ignore[arg-type]


def requests(*rows: wire.RequestView) -> wire.Requests:
    return wire.Requests(time=time.time(), rows=rows or REQUESTS)


REQUESTS = (
    wire.RequestView(
        request_id="req-a", state="active", age_s=4.2, prompt_tokens=120, output_tokens=88, tokens_per_s=21.4,
        ttft_ms=182.0, drafted=60, accepted=31, lane=Lane.NGRAM,
    ),
    wire.RequestView(
        request_id="req-b", state="active", age_s=1.1, prompt_tokens=40, output_tokens=12, tokens_per_s=17.0,
        ttft_ms=140.0, drafted=9, accepted=2, lane=Lane.MIXED,
    ),
    wire.RequestView(request_id="req-c", state="waiting", age_s=0.3, prompt_tokens=2048, output_tokens=0),
    wire.RequestView(
        request_id="req-d", state="finished", age_s=30.0, prompt_tokens=64, output_tokens=256, tokens_per_s=38.2,
        ttft_ms=201.0, drafted=300, accepted=180, lane=Lane.PLAIN, reason="stop",
    ),
)  # fmt: skip

WORDS = (
    ("The", 0), (" sky", 0), (" is", 1), (" blue", 2), (" because", 0), (" **", 0), ("short", 1), (" waves", 2),
    ("**", 3), (" scatter", 0), (" more", 1), (":\n\n", 0), ("- ", 0), ("air", 1), (" molecules", 2), ("\n- ", 0),
    ("<b>no", 0), (" markup</b>", 1), ("\n\n```python\n", 0), ("print", 0), ("(4", 1), (")", 2), ("\n```", 0),
    ("\n", 0),
)  # fmt: skip


def tokens() -> tuple[Token, ...]:
    found, step = [], 700
    for index, (text, draft) in enumerate(WORDS):
        step += 0 if draft else 1
        lane = Lane.NGRAM if index % 12 < 9 else Lane.PLAIN
        rejected = (17, 18) if index == 9 else ()
        top = ((100 + index, -0.22), (900, -2.1), (901, -3.9))
        found.append(
            Token(
                id=100 + index, lane=lane, draft=draft, step=step, text=text, logprob=-0.22, top=top, rejected=rejected
            )
        )
    return tuple(found)


def reply(request_id: str) -> Iterator[wire.ServerMessage]:
    yield wire.Queued(request_id=request_id, prompt_tokens=31, max_context=8192)
    said = tokens()
    for start in range(0, len(said), 3):
        part = said[start : start + 3]
        bare = {number for token in part for number in token.rejected}
        yield wire.Delta(
            request_id=request_id, text="", tokens=part, spelled={number: f" no{number}" for number in bare}
        )
    yield done(request_id, "stop", len(said))


def done(request_id: str, reason: str, output: int, speedup: float | None = 0.94) -> wire.Done:
    usage = Usage(
        prompt_tokens=31, output_tokens=output, drafted=18, accepted=12, prefill_us=90_000, decode_us=520_000,
        ttft_us=182_000, seed=7,
    )  # fmt: skip
    return wire.Done(request_id=request_id, reason=reason, usage=usage, speedup=speedup)


def answer_query(query: wire.Query) -> wire.QueryResult:
    if "duckdb_views" in query.sql:
        rows = (
            ("throughput_by_lane", "Tokens per second by lane and second."),
            ("slow_requests", "The slowest requests."),
        )
        return wire.QueryResult(
            query_id=query.query_id, columns=("view_name", "comment"), types=("VARCHAR",) * 2, rows=rows
        )
    if "run_list" in query.sql:
        columns = ("run", "run_id", "started", "seconds", "state", "model", "device")
        row = (7, "run-7", "2026-01-02T10:00:00", 90.0, "ended", "SmolLM2-135M-Instruct", "cpu")
        types = ("INTEGER", "VARCHAR", "TIMESTAMP", "DOUBLE", "VARCHAR", "VARCHAR", "VARCHAR")
        return wire.QueryResult(query_id=query.query_id, columns=columns, types=types, rows=(row,))
    if "losses_by_kind" in query.sql:
        return wire.QueryResult(query_id=query.query_id, columns=("kind", "lost"), types=("VARCHAR", "BIGINT"))
    if "nonsense" in query.sql:
        return wire.QueryResult(query_id=query.query_id, error="There is no table 'nonsense'. Did you mean 'requests'?")
    steps = tuple((index, f"lane-{index}", index * 1.25, None) for index in range(40))
    return wire.QueryResult(
        query_id=query.query_id,
        columns=("step", "lane", "ms", "note"),
        types=("BIGINT", "VARCHAR", "DOUBLE", "VARCHAR"),
        rows=steps,
        seconds=0.0123,
    )


@contextlib.asynccontextmanager
async def running(server: FakeServer) -> AsyncIterator[FakeServer]:
    """The server on a free port of the loopback; the port stays the same for the whole test."""
    app = Starlette(routes=[*routes(), WebSocketRoute(wire.WIRE_PATH, server.serve)])
    config = uvicorn.Config(
        app, host="127.0.0.1", port=server.port, log_level="error", ws="websockets-sansio", lifespan="off"
    )
    serving = uvicorn.Server(config)
    task = asyncio.create_task(serving.serve())
    while not serving.started:
        if task.done():
            await task
        await asyncio.sleep(0.01)
    server.port = serving.servers[0].sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        await server.drop()
        serving.should_exit = True
        await task


@contextlib.asynccontextmanager
async def live(server: FakeServer, rate_hz: float = 10.0) -> AsyncIterator[None]:
    """Frames at a steady rate until the block ends."""

    async def pump() -> None:
        index = 0
        while True:
            await server.send(stats(index), requests(), gate())
            index += 1
            await asyncio.sleep(1 / rate_hz)

    task = asyncio.create_task(pump())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
