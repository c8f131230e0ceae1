"""The application: routes of wire, API, page and probes on one port, behind one guard."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute

from engine.levers.changes import Step
from engine.protocol import wire
from engine.protocol.commands import Value
from engine.server.api import Api
from engine.server.broker import MAX_IN_FLIGHT, Broker, EngineState
from engine.server.desk import LeverDesk, Steps
from engine.server.export import packed
from engine.server.ports import EngineLink, QueryRefusedError, Telemetry, Text
from engine.server.safety import Access, Guarded, Role, bearer, problem
from engine.server.session import Session, Sessions
from engine.server.views import LogRelay, Views
from engine.server.wire_socket import WireSocket
from telemetry.batch import Batch
from telemetry.record import StepRecord

log = logging.getLogger("metrale")


@dataclass(slots=True)
class Parts:
    """What the composition root brings to a server."""

    link: EngineLink
    telemetry: Telemetry
    text: Callable[[], Text]
    access: Access
    pages: Sequence[BaseRoute] = ()
    steps: Steps = field(default_factory=Steps)
    max_in_flight: int = MAX_IN_FLIGHT
    grace_s: float = 30.0
    levers: Mapping[str, Value] = field(default_factory=dict)
    """Values that the engine starts with, so that clients see them while it loads."""
    sources: Mapping[str, str] = field(default_factory=dict)


class Server:
    """Everything behind the port, wired together."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.broker = Broker(parts.link, self._ingest, parts.max_in_flight)
        self.broker.levers, self.broker.sources = dict(parts.levers), dict(parts.sources)
        self.broker.announce, self.broker.forget = parts.telemetry.announce, parts.telemetry.forget
        self.broker.record = parts.telemetry.record_content
        self.views = Views(self.broker, parts.telemetry, parts.text)
        self.desk = LeverDesk(self.broker, parts.link.send, parts.steps)
        self.sessions = Sessions(self._session, parts.grace_s)
        self._socket = WireSocket(parts.access, self.sessions, self.views)
        self._api = Api(self.broker, self.views, parts.access)
        self._ending: asyncio.Task[None] | None = None
        self.on_failed_start: Callable[[], None] = lambda: None
        self.on_engine_started: Callable[[], None] = lambda: None
        self.broker.watchers.state.append(self._on_state)

    def drain(self) -> None:
        """The end is near: tell those who wait for replies now."""
        self.broker.fail_all("The server is shutting down.", "shutdown")

    def _on_state(self) -> None:
        if self.broker.state is EngineState.FAILED:
            reason = self.broker.failure
            if self.broker.facts is None:
                self.on_failed_start()
            self._ending = asyncio.create_task(asyncio.to_thread(self._parts.telemetry.end_run, reason))

    def _ingest(self, payload: bytes, lost: int) -> None:
        for batch in self._parts.telemetry.ingest(payload, lost):
            self._parts.steps.add(decode_steps(batch))

    def application(self) -> Starlette:
        return Starlette(
            routes=[
                WebSocketRoute(wire.WIRE_PATH, self._socket.serve),
                WebSocketRoute("/ws", self._socket.serve),
                Route("/v1/chat/completions", self._api.chat, methods=["POST"]),
                Route("/v1/completions", self._api.completions, methods=["POST"]),
                Route("/v1/models", self._api.models),
                Route("/v1/models/{name:path}", self._api.model),
                Route("/healthz", self._health),
                Route("/readyz", self._ready),
                Route("/metrics", self._metrics),
                Route("/schema", self._schema),
                Route("/telemetry/export", self._export),
                *self._parts.pages,
            ],
            middleware=[Middleware(Guarded, access=self._parts.access)],
            lifespan=self._lifespan,
            exception_handlers={404: _not_found, 405: _not_allowed, 500: _failed},
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        relay = LogRelay(self.views, asyncio.get_running_loop())
        log.addHandler(relay)
        starting = asyncio.create_task(self._start())
        try:
            yield
        finally:
            starting.cancel()
            if self._ending:
                await asyncio.gather(self._ending, return_exceptions=True)
            log.removeHandler(relay)
            await self.desk.close()
            await self.broker.stop()
            self.sessions.close()
            await asyncio.to_thread(self._parts.telemetry.close)

    async def _start(self) -> None:
        try:
            await self.broker.start()
            self.on_engine_started()
        except OSError as error:
            self.broker.on_death(f"The engine could not be started: {error}.")

    def _session(self, label: str, client: str, control: bool) -> Session:
        return Session(label, client, control, self.broker, self.desk, self.views)

    async def _health(self, request: Request) -> Response:
        """Whether this process answers; says nothing of the model."""
        return JSONResponse({"status": "ok", "engine": str(self.broker.state)})

    async def _ready(self, request: Request) -> Response:
        broker = self.broker
        if broker.state is EngineState.READY:
            return JSONResponse({"status": "ready"})
        stage, done, total = broker.loading.stage, broker.loading.done, broker.loading.total
        detail = broker.failure or (f"{stage} {done}/{total}" if total else stage)
        return JSONResponse({"status": str(broker.state), "detail": detail}, 503, {"retry-after": "1"})

    async def _metrics(self, request: Request) -> Response:
        if self._parts.access.role_of(bearer(request.headers)) < Role.READ:
            return problem(401, "The token is missing; send it as a bearer token.", "invalid_api_key")
        text = await asyncio.to_thread(self._parts.telemetry.prometheus)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def _export(self, request: Request) -> Response:
        """Telemetry of one run, or of all, as a tar of Parquet files."""
        if self._parts.access.role_of(bearer(request.headers)) < Role.READ:
            return problem(401, "The token is missing; send it as a bearer token.", "invalid_api_key")
        run = request.query_params.get("run", "0")
        if not run.isdigit():
            return problem(400, "run takes the number of a run.", "invalid_value", "run")
        try:
            archive = await asyncio.to_thread(packed, self._parts.telemetry, int(run))
        except QueryRefusedError as error:
            return problem(400, str(error), "invalid_value", "run")
        remove = BackgroundTask(archive.unlink, missing_ok=True)
        return FileResponse(archive, media_type="application/x-tar", background=remove)

    async def _schema(self, request: Request) -> Response:
        return JSONResponse(wire.schema())


async def _not_found(request: Request, error: Exception) -> Response:
    return problem(404, f"There is nothing at {request.url.path}.", "not_found")


async def _not_allowed(request: Request, error: Exception) -> Response:
    return problem(405, f"{request.method} is not allowed at {request.url.path}.", "method_not_allowed")


async def _failed(request: Request, error: Exception) -> Response:
    log.error("A request to %s failed.", request.url.path, exc_info=error)
    return problem(500, "The server failed to answer; its log says why.", "internal_error")


def decode_steps(batch: Batch) -> Iterator[Step]:
    """The steps of a batch that only decoded, for guards."""
    for record in batch.others:
        if isinstance(record, StepRecord) and record.width > 0 and not record.prefill_tokens:
            yield Step((record.end_ns - record.start_ns) / 1e9, record.emitted, record.width)
    if batch.rows("steps"):
        steps = batch.table("steps")
        decoded = (steps["width"] > 0) & (steps["prefill_tokens"] == 0)
        seconds = (steps["end_ns"] - steps["start_ns"])[decoded] / 1e9
        yield from map(Step, seconds.tolist(), steps["emitted"][decoded].tolist(), steps["width"][decoded].tolist())
