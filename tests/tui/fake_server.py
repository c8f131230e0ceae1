"""A small server that speaks the real wire: enough of an engine to see, test and time the terminal against.

`python -m tests.tui.fake_server [PORT]` runs it by hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from dataclasses import dataclass, field

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from engine.levers.catalog import LEVERS
from engine.levers.spec import LeverError
from engine.protocol import wire
from tests.tui import scenes


@dataclass
class FakeServer:
    """Welcomes, loads for `load_s`, answers chats with `answer`, sends stats, takes levers and queries."""

    load_s: float = 0.0
    answer: str = scenes.ANSWER
    tokens_per_s: float = 60.0
    role: str = "control"
    lever_delay_s: float = 0.02
    refuse: str = ""
    heard: list[wire.ClientMessage] = field(default_factory=list)
    sockets: list[ServerConnection] = field(default_factory=list)
    hold_levers: bool = False
    port: int = 0
    _server: Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _running: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def start(self, port: int = 0) -> str:
        self._server = await serve(self._serve, "127.0.0.1", port, compression=None)
        self.port = next(iter(self._server.sockets)).getsockname()[1]
        self._born = time.monotonic()
        self._values = {name: lever.default for name, lever in LEVERS.items()}
        self._changes: list[wire.LeverEvent] = []
        return f"http://127.0.0.1:{self.port}"

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def drop(self) -> None:
        """Cuts every connection as a crash would."""
        for socket in self.sockets:
            socket.transport.abort()

    def said(self, kind: type) -> list[wire.ClientMessage]:
        return [message for message in self.heard if isinstance(message, kind)]

    # ---- one connection

    async def _serve(self, socket: ServerConnection) -> None:
        self.sockets.append(socket)
        with contextlib.suppress(ConnectionClosed, asyncio.CancelledError):
            hello = wire.decode_client(await socket.recv())
            self.heard.append(hello)
            if self.refuse:
                await self._send(socket, wire.Refused(message=self.refuse))
                return
            ready = time.monotonic() - self._born >= self.load_s
            await self._send(socket, scenes.welcome("ready" if ready else "loading", self.role))
            self._spawn(self._pulse(socket, ready))
            async for text in socket:
                message = wire.decode_client(text)
                self.heard.append(message)
                await self._take(socket, message)
        self.sockets.remove(socket)

    async def _take(self, socket: ServerConnection, message: wire.ClientMessage) -> None:
        match message:
            case wire.Chat():
                self._running[message.request_id] = self._spawn(self._reply(socket, message))
            case wire.Stop(request_id=request_id) if request_id in self._running:
                self._running.pop(request_id).cancel()
                await self._send(socket, scenes.done(request_id, scenes.tokens()[:4], "cancelled", None))
            case wire.SetLever() | wire.UndoLever():
                self._spawn(self._lever(socket, message))
            case wire.Query(query_id=query_id, sql=sql):
                await self._send(socket, _result(query_id, sql))
            case wire.Ping(nonce=nonce):
                await self._send(socket, wire.Pong(nonce=nonce))
            case _:
                pass

    async def _reply(self, socket: ServerConnection, chat: wire.Chat) -> None:
        said = scenes.tokens(self.answer)
        await self._send(socket, wire.Queued(request_id=chat.request_id, prompt_tokens=38, max_context=2048))
        for start in range(0, len(said), 3):
            part = said[start : start + 3]
            await asyncio.sleep(len(part) / self.tokens_per_s)
            await self._send(socket, scenes.delta(chat.request_id, part))
        self._running.pop(chat.request_id, None)
        await self._send(socket, scenes.done(chat.request_id, said))

    async def _lever(self, socket: ServerConnection, message: wire.SetLever | wire.UndoLever) -> None:
        await asyncio.sleep(self.lever_delay_s)
        while self.hold_levers:
            await asyncio.sleep(0.01)
        if isinstance(message, wire.UndoLever):
            name, value = self._changes[-1].name, self._changes[-1].old
        else:
            name, value = message.name, message.value
        try:
            new = LEVERS[name].parse(value)
        except LeverError as error:
            await self._send(
                socket,
                wire.LeverRefused(
                    change_id=message.change_id, name=name, message=str(error), current=self._values[name]
                ),
            )
            return
        event = scenes.lever_event(name, self._values[name], new, time.time(), message.change_id)
        self._values[name] = new
        self._changes.append(event)
        await self._send(socket, event)

    async def _pulse(self, socket: ServerConnection, ready: bool) -> None:
        """Loading, then four frames a second."""
        with contextlib.suppress(ConnectionClosed):
            while not ready:
                share = min(1.0, (time.monotonic() - self._born) / self.load_s)
                ready = share >= 1
                await self._send(
                    socket,
                    wire.Load(
                        state="ready" if ready else "loading",
                        stage="reading weights",
                        done=int(98e6 * share),
                        total=98_000_000,
                        facts=scenes.FACTS if ready else None,
                    ),
                )
                await asyncio.sleep(0.1)
            frame = 0
            while True:
                frame += 1
                await self._send(socket, scenes.stats(frame, busy=bool(self._running), time=time.time()))
                if frame % 4 == 1:
                    await self._send(socket, scenes.gate())
                    await self._send(socket, scenes.requests())
                await asyncio.sleep(0.25)

    def _spawn(self, work: object) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @staticmethod
    async def _send(socket: ServerConnection, message: wire.ServerMessage) -> None:
        await socket.send(wire.encode(message))


def _result(query_id: str, sql: str) -> wire.QueryResult:
    if "boom" in sql:
        return wire.QueryResult(query_id=query_id, error="There is no table called boom.")
    if "epoch" in sql:
        return wire.QueryResult(query_id=query_id, columns=("seconds",), rows=((120.0,),))
    if "lane_steps" in sql:
        names = ("lane", "width", "k", "k_reason", "refusals", "drafted", "accepted", "dur_us", "mode", "arm", "reason")
        step = ("ngram", 1, 3, "gate", "mtp:not_chosen dflash:not_chosen", 3, 2, 36308, "plain", "ngram:3", "probe")
        return wire.QueryResult(query_id=query_id, columns=names, rows=(step,))
    if "duckdb_views" in sql:
        return wire.QueryResult(
            query_id=query_id, columns=("view_name",), types=("VARCHAR",), rows=(("lane_throughput",), ("latency",))
        )
    rows = tuple((f"lane{i}", i * 11, i / 7) for i in range(30))
    return wire.QueryResult(
        query_id=query_id,
        columns=("lane", "tokens", "share"),
        types=("VARCHAR", "BIGINT", "DOUBLE"),
        rows=rows,
        seconds=0.004,
    )


async def main(port: int) -> None:
    server = FakeServer(load_s=3.0)
    print(await server.start(port), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 8123))
