"""The same loop without a process: for tests, benchmarks and scripts."""

from __future__ import annotations

import threading
from collections.abc import Callable

from engine.core.clock import Clock, MonotonicClock
from engine.core.context import Context
from engine.protocol.commands import Command
from engine.protocol.events import Event, Facts, Ready
from engine.runtime.loop import EngineLoop, Tick, WakingInbox
from engine.runtime.outbox import BatchOutbox, Flusher
from telemetry.ring import Ring


class InProcessEngine:
    """Runs a scheduler on a thread of this process and hands event batches to `write`, called on another thread.

    `build` gets inbox, outbox and record sink and returns the context and its scheduler.
    """

    def __init__(
        self,
        build: Callable[[WakingInbox, BatchOutbox, Ring], tuple[Context, Tick]],
        facts: Facts,
        write: Callable[[list[Event]], None],
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or MonotonicClock()
        self.inbox = WakingInbox()
        self.outbox = BatchOutbox()
        self.ring = Ring()
        self.context, scheduler = build(self.inbox, self.outbox, self.ring)
        self._facts = facts
        self.loop = EngineLoop(scheduler, self.inbox, self.outbox, self.ring, self._clock)
        self._flusher = Flusher(self.outbox, self.ring, write, self.loop.stop)
        self._thread = threading.Thread(target=self.loop.run, name="tick", daemon=True)

    def start(self) -> None:
        levers = self.context.levers
        sources = {name: str(source) for name, source in levers.sources.items()}
        self.outbox.send(Ready(facts=self._facts, levers=levers.snapshot(), sources=sources))
        self._flusher.start()
        self._thread.start()

    def send(self, command: Command) -> None:
        self.loop.put(command)

    def stop(self, timeout: float = 5.0) -> None:
        self.loop.stop()
        self._thread.join(timeout)
        self._flusher.close()
