"""Puts a server together: model file, telemetry store, tokenizer, engine process, page, on one listening socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import uvicorn

from engine.cli import places
from engine.cli.errors import Failure
from engine.levers.resolve import Source
from engine.levers.spec import Value
from engine.protocol.commands import Submit
from engine.runtime.build import EngineOptions
from engine.server.app import Parts, Server
from engine.server.broker import NotReadyError
from engine.server.idle import NoEngine
from engine.server.link import ProcessLink, split_cores
from engine.server.ports import EncodedPrompt, PromptError, QueryAnswer, QueryRefusedError
from engine.server.replay import Recorded
from engine.server.run import config_of
from engine.server.safety import Access
from engine.server.sockets import reachable
from telemetry.batch import Batch
from telemetry.hub import Hub

log = logging.getLogger("metrale.server")
TELL_S = 0.5
"""Time that clients get to hear why the engine did not start."""
NICENESS = 5
"""How far the server steps back behind the engine where both share the cores."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Everything that `metrale serve` decides before anything starts."""

    model: Path | None
    """None: no engine, recorded runs only."""
    database: Path
    levers: Mapping[str, Value]
    sources: Mapping[str, Source]
    host: str = "127.0.0.1"
    names: tuple[str, ...] = ()
    token: str = ""
    read_token: str = ""
    dtype: str = "auto"
    backend: str = "auto"
    threads: int = 0
    otlp: str = ""


def serve(options: ServeOptions, listener: socket.socket, leash: bool = False) -> int:
    """Serve on a listening socket until a signal, or until the parent lets go of the leash; the exit code."""
    port = listener.getsockname()[1]
    access = Access.of(options.host, port, options.names, options.read_token, options.token)
    telemetry = _Telemetry(options.database, options.otlp)
    with _owning(options, port):
        return asyncio.run(_serve(options, listener, access, telemetry, leash))


async def _serve(
    options: ServeOptions, listener: socket.socket, access: Access, telemetry: _Telemetry, leash: bool
) -> int:
    engine_cores, own_cores = split_cores()
    text = _Text(options.model)
    link = ProcessLink(_engine_options(options, engine_cores)) if options.model else NoEngine()
    sources = {name: str(source) for name, source in options.sources.items()}
    parts = Parts(link, telemetry, lambda: text, access, _pages(), levers=options.levers, sources=sources)
    server = Server(parts)
    runner = _Runner(config_of(server.application()), server)
    if leash:
        _watch_leash(asyncio.get_running_loop(), runner)
    threading.Thread(target=text.warm, name="tokenizer", daemon=True).start()
    server.on_failed_start = runner.leave_soon
    server.on_engine_started = lambda: _step_back(own_cores)
    await runner.serve([listener])
    if server.broker.failure and server.broker.facts is None:
        raise Failure(server.broker.failure)
    return 1 if server.broker.failure else 0


class _Runner(uvicorn.Server):
    """uvicorn that tells running requests at once that the end has come, instead of waiting for them."""

    def __init__(self, config: uvicorn.Config, server: Server) -> None:
        super().__init__(config)
        self._server = server

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.leave)
        yield

    def leave_soon(self) -> None:
        """The engine did not start: leave when the clients have heard of it."""
        asyncio.get_running_loop().call_later(TELL_S, self.leave)

    def leave(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
        self._server.drain()


def _engine_options(options: ServeOptions, cores: Sequence[int]) -> bytes:
    return msgspec.json.encode(
        EngineOptions(
            model=str(options.model),
            levers=dict(options.levers),
            sources={name: str(source) for name, source in options.sources.items()},
            dtype=options.dtype,
            backend=options.backend,
            threads=options.threads,
            cpus=tuple(cores),
        )
    )


def _pages() -> Sequence[Any]:
    from dashboards.app import routes

    return routes()


def _step_back(cores: Sequence[int]) -> None:
    """After the engine was started: leave the cores to it."""
    with contextlib.suppress(OSError):
        if cores:
            os.sched_setaffinity(0, cores)
        else:
            os.nice(NICENESS)


def _watch_leash(loop: asyncio.AbstractEventLoop, runner: _Runner) -> None:
    """Leave when standard input closes: whoever started this server is gone."""

    def watch() -> None:
        while sys.stdin.buffer.read(4096):
            pass
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(runner.leave)

    threading.Thread(target=watch, name="leash", daemon=True).start()


@contextlib.contextmanager
def _owning(options: ServeOptions, port: int) -> Iterator[None]:
    owner = places.Owner(f"http://{reachable(options.host)}:{port}", os.getpid(), options.token)
    places.note_owner(options.database, owner)
    try:
        yield
    finally:
        places.forget_owner(options.database, os.getpid())


class _Text:
    """The tokenizer of a model file, read when first needed; safe from any thread."""

    def __init__(self, model: Path | None) -> None:
        self._model = model
        self._guard = threading.Lock()

    @cached_property
    def _text(self) -> Any:
        from engine.text import load_text

        if self._model is None:
            raise NotReadyError("No model is loaded here.")
        return load_text(self._model)

    def _loaded(self) -> Any:
        with self._guard:
            return self._text

    def warm(self) -> None:
        with contextlib.suppress(Exception):  # the engine reads the same file and says what is wrong with it
            self._loaded().chat_template.render([{"role": "user", "content": "warm"}])

    @property
    def renders_tools(self) -> bool:
        return bool(self._loaded().chat_template.mentions_tools)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._loaded().encode(text, add_bos=True))

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> EncodedPrompt:
        from engine.chat_template import ChatTemplateError

        text = self._loaded()
        try:
            prompt = text.render_chat(messages, tools=list(tools) or None)
        except ChatTemplateError as error:
            sentence = str(error)
            raise PromptError(sentence[:1].upper() + sentence[1:]) from None
        opened = prompt.rfind("<think>") > prompt.rfind("</think>")
        return EncodedPrompt(tuple(text.encode(prompt)), thinking_open=opened and prompt.rstrip().endswith("<think>"))

    def token_bytes(self, token: int) -> bytes:
        pieces = self._loaded().token_bytes
        return bytes(pieces[token]) if 0 <= token < len(pieces) else b""


class _Telemetry:
    """The store as the server sees it."""

    def __init__(self, database: Path, otlp: str) -> None:
        from telemetry.setup import Telemetry

        self._telemetry = Telemetry(database, otlp)

    @property
    def hub(self) -> Hub:
        return self._telemetry.hub

    @property
    def trouble(self) -> str:
        return self._telemetry.trouble

    def ingest(self, payload: bytes, lost: int) -> Sequence[Batch]:
        return self._telemetry.ingest(payload, lost)

    def query(self, sql: str, max_rows: int, run: int = 0) -> QueryAnswer:
        from telemetry.database import StoreError
        from telemetry.formats import plain_rows
        from telemetry.queries import Limits, QueryError

        try:
            result = self._telemetry.query(sql, Limits(max_rows=max_rows, run=run or None))
        except (QueryError, StoreError) as error:
            raise QueryRefusedError(str(error)) from None
        return QueryAnswer(result.columns, result.types, plain_rows(result), result.truncated, result.seconds)

    def prometheus(self) -> str:
        return self._telemetry.prometheus()

    def announce(self, submit: Submit) -> None:
        self._telemetry.announce(submit.request_id, len(submit.prompt), submit.conversation_id, submit.trace.trace_id)

    def forget(self, request_id: str) -> None:
        self._telemetry.hub.forget(request_id)

    def record_content(self, request_id: str, prompt: str, reply: str) -> None:
        self._telemetry.record_content(request_id, prompt, reply)

    def replay(self, run: str) -> Recorded:
        from telemetry.database import StoreError
        from telemetry.replay import Replay
        from telemetry.report import NoSuchRunError, find_run

        try:
            cursor = self._telemetry.store.cursor()
            return Replay(cursor, find_run(cursor, None if run in ("", "last") else run))
        except (NoSuchRunError, StoreError) as error:
            raise QueryRefusedError(str(error)) from None

    def export(self, run: int, directory: Path) -> None:
        from telemetry.database import StoreError
        from telemetry.transfer import TransferError, export

        self._telemetry.store.flush()
        try:
            export(self._telemetry.store.cursor(), directory, run or None)
        except (TransferError, StoreError) as error:
            raise QueryRefusedError(str(error)) from None

    def end_run(self, reason: str) -> None:
        self._telemetry.end_run(reason)

    def close(self) -> None:
        self._telemetry.close()
