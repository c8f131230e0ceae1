"""The process around the loop: the socket to the server, signals, and an end that leaves nothing behind."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engine.core.clock import Clock, MonotonicClock
from engine.core.context import Context
from engine.protocol.commands import Command, Shutdown
from engine.protocol.events import Event, Facts, Fatal, Loading, Ready
from engine.protocol.link import HEADER, LinkError, body_length, frames, unpack_commands
from engine.runtime.loop import EngineLoop, Tick, WakingInbox, sentence_of
from engine.runtime.outbox import BatchOutbox, Flusher
from telemetry.ring import Ring

log = logging.getLogger("metrale.engine")

LEAVE_S = 10.0
"""Time that a device call may take to return after the server is gone."""


class Progress(Protocol):
    def __call__(self, done: int, total: int, stage: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Built:
    """A loaded engine, ready to tick."""

    context: Context
    scheduler: Tick
    facts: Facts


class Builder(Protocol):
    """Loads the model and puts the scheduler together; raises with one sentence."""

    def __call__(
        self, inbox: WakingInbox, outbox: BatchOutbox, ring: Ring, clock: Clock, progress: Progress
    ) -> Built: ...


class Process:
    """One engine on one connected socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._clock = MonotonicClock()
        self._inbox = WakingInbox()
        self._outbox = BatchOutbox()
        self._ring = Ring()
        self._loop: EngineLoop | None = None
        self._flusher = Flusher(self._outbox, self._ring, self._write, self._server_gone)

    def run(self, build: Builder) -> int:
        """Load, tick, leave; the exit code."""
        self._flusher.start()
        threading.Thread(target=self._read, name="commands", daemon=True).start()
        try:
            built = build(self._inbox, self._outbox, self._ring, self._clock, self._progress)
        except Exception as error:
            if not type(error).__module__.startswith("engine."):
                log.exception("Loading failed")  # no sentence of ours: where it came from is worth having
            self._outbox.send(Fatal(message=sentence_of(error)))
            self._flusher.close()
            return 1
        ran = self._tick_until_told(built)
        self._flusher.close()
        built.context.device.close()
        return 0 if ran else 1

    def _tick_until_told(self, built: Built) -> bool:
        loop = EngineLoop(built.scheduler, self._inbox, self._outbox, self._ring, self._clock, resident_bytes)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: loop.stop())
        self._loop = loop
        if any(isinstance(command, Shutdown) for command in self._inbox.commands):
            loop.stop()
        levers = built.context.levers
        sources = {name: str(source) for name, source in levers.sources.items()}
        self._outbox.send(Ready(facts=built.facts, levers=levers.snapshot(), sources=sources))
        gc.collect()
        gc.freeze()  # the model and its tables never become garbage; a full collection must not walk them
        gc.set_threshold(50_000, 20, 50)
        return loop.run()

    def _progress(self, done: int, total: int, stage: str) -> None:
        self._outbox.send(Loading(stage=stage, done=done, total=total, unit="bytes" if stage == "weights" else stage))

    def _write(self, events: list[Event]) -> None:
        for frame in frames(events):
            self._connection.sendall(frame)

    def _read(self) -> None:
        try:
            while (header := self._exactly(HEADER.size)) and (body := self._exactly(body_length(header))):
                for command in unpack_commands(body):
                    self._take(command)
        except LinkError as error:
            self._outbox.send(Fatal(message=str(error)))
        except OSError:
            pass
        self._server_gone()

    def _take(self, command: Command) -> None:
        if self._loop is not None:
            self._loop.put(command)
        elif isinstance(command, Shutdown):
            os._exit(0)  # still loading: nothing to tell, nothing to save
        else:
            self._inbox.put(command)

    def _exactly(self, count: int) -> bytes:
        chunks = bytearray()
        while len(chunks) < count:
            chunk = self._connection.recv(count - len(chunks))
            if not chunk:
                return b""
            chunks += chunk
        return bytes(chunks)

    def _server_gone(self) -> None:
        """Nobody is left to serve; leave, at once while loading and in order while ticking."""
        if self._loop is None:
            os._exit(0)
        self._loop.stop()
        threading.Timer(LEAVE_S, os._exit, (1,)).start()


def run(socket_path: Path, build: Builder) -> int:
    """Connect to the server that waits on `socket_path` and serve it until it ends."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s engine %(levelname)s %(message)s")
    _die_with_parent()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(socket_path))
    except OSError as error:
        log.error("The engine found no server on %s: %s.", socket_path, error.strerror)
        return 1
    code = Process(connection).run(build)
    sys.stderr.flush()
    os._exit(code)  # native thread pools must not hold up the end


def resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _die_with_parent() -> None:
    """On Linux the kernel ends this process with its parent; elsewhere the closed socket does."""
    if sys.platform != "linux":
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGTERM)
