"""Starts the engine process and carries messages to and from it over a local socket."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine.protocol.commands import Command, Shutdown
from engine.protocol.events import Event, Fatal
from engine.protocol.link import HEADER, LinkError, body_length, pack, unpack_events

log = logging.getLogger("metrale.server")

STOP_S = 10.0
"""Time that the engine has to leave by itself; then it is killed."""
CONNECT_S = 60.0

RUNTIME = (sys.executable, "-m", "engine.runtime")


class ProcessLink:
    """An engine in a process of its own, in a session of its own so that Ctrl-C reaches the server alone."""

    def __init__(self, options: bytes, command: Sequence[str] = RUNTIME) -> None:
        self._options = options
        self._command = tuple(command)
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._stopping = False
        self._backlog: list[Command] = []

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self, on_event: Callable[[Event], None], on_death: Callable[[str], None]) -> None:
        with tempfile.TemporaryDirectory(prefix="metrale-") as folder:  # mode 0700: nobody else can connect
            path = Path(folder) / "engine.sock"
            connected: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = (
                asyncio.get_running_loop().create_future()
            )

            def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                if connected.done():
                    writer.close()
                else:
                    connected.set_result((reader, writer))

            listener = await asyncio.start_unix_server(accept, path)
            try:
                self._process = await self._spawn(path)
                ended = asyncio.ensure_future(self._process.wait())
                waits: set[asyncio.Future[Any]] = {connected, ended}
                await asyncio.wait(waits, timeout=CONNECT_S, return_when=asyncio.FIRST_COMPLETED)
            finally:
                listener.close()
        if not connected.done():
            connected.cancel()
            on_death(await self._obituary())
            return
        reader, self._writer = connected.result()
        for command in self._backlog:
            self.send(command)
        self._backlog.clear()
        self._reading = asyncio.create_task(self._read(reader, on_event, on_death))

    async def _spawn(self, path: Path) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *self._command, "--socket", str(path), stdin=asyncio.subprocess.PIPE, start_new_session=True
        )
        if process.stdin is not None:
            try:
                process.stdin.write(self._options)
                await process.stdin.drain()
                process.stdin.close()
            except OSError:
                pass  # it ended at once; the caller sees that
        return process

    def send(self, command: Command) -> None:
        if self._writer is None:
            self._backlog.append(command)
        elif not self._writer.is_closing():
            self._writer.write(pack([command]))

    async def stop(self) -> None:
        self._stopping = True
        if self._process is None:
            return
        self.send(Shutdown())
        try:
            await asyncio.wait_for(self._process.wait(), STOP_S)
        except TimeoutError:
            log.warning("The engine did not leave within %.0f s and was killed.", STOP_S)
            self._process.kill()
            await self._process.wait()
        if self._reading is not None:
            await asyncio.wait({self._reading}, timeout=2)
        if self._writer is not None:
            self._writer.close()

    async def _read(
        self, reader: asyncio.StreamReader, on_event: Callable[[Event], None], on_death: Callable[[str], None]
    ) -> None:
        fatal = ""
        try:
            while True:
                body = await reader.readexactly(body_length(await reader.readexactly(HEADER.size)))
                for event in unpack_events(body):
                    if isinstance(event, Fatal):
                        fatal = event.message
                    else:
                        _deliver(on_event, event)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except LinkError as error:
            fatal = str(error)
        if not self._stopping:
            on_death(fatal or await self._obituary())

    async def _obituary(self) -> str:
        """One sentence on how the engine ended; kills what does not end."""
        if self._process is None:
            return "The engine was never started."
        try:
            code = await asyncio.wait_for(self._process.wait(), STOP_S)
        except TimeoutError:
            self._process.kill()
            code = await self._process.wait()
            return "The engine did not answer and was killed; start it again."
        if code < 0:
            return f"The engine process was ended by {_signal_name(-code)}; start it again."
        return f"The engine process ended with exit code {code}; its log says why."


def _deliver(on_event: Callable[[Event], None], event: Event) -> None:
    try:
        on_event(event)
    except Exception:  # one bad event must not cut every client off
        log.exception("An event of type %s could not be handled.", type(event).__name__)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def split_cores() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Cores for the engine and for everything else; with fewer than four both share all of them."""
    if not hasattr(os, "sched_getaffinity"):
        return (), ()
    cores = tuple(sorted(os.sched_getaffinity(0)))
    if len(cores) < 4:
        return (), ()
    kept = max(1, len(cores) // 8)
    return cores[:-kept], cores[-kept:]
