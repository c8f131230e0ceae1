"""The tick loop: runs while there is work, sleeps while there is none, and ends with a sentence, never silently."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.core.clock import Clock
from engine.core.context import QueueInbox
from engine.protocol.commands import Command, Shutdown
from engine.protocol.events import Fatal
from engine.runtime.outbox import BatchOutbox
from telemetry.record import HealthRecord
from telemetry.ring import Ring

log = logging.getLogger("metrale.engine")

HEALTH_NS = 1_000_000_000
IDLE_WAIT_S = 1.0
SHUTDOWN_TICKS = 64
"""Ticks that a shutdown may take to tell every client."""


class Tick(Protocol):
    """What the loop knows of the scheduler."""

    def tick(self) -> bool:
        """One tick; True while there is work."""
        ...


class WakingInbox(QueueInbox):
    """The inbox of the loop: what is put here wakes a sleeping engine."""

    __slots__ = ("bell",)

    def __init__(self) -> None:
        super().__init__()
        self.bell = threading.Event()

    def put(self, command: Command) -> None:
        super().put(command)
        self.bell.set()


@dataclass(slots=True)
class Health:
    """Accounting of the last second."""

    since_ns: int
    tick_ns: int = 0
    recording_ns: int = 0
    records: int = 0
    lost: int = 0


class EngineLoop:
    """Drives a scheduler until it is told to stop. `run` belongs to one thread, the rest may be called from any."""

    def __init__(
        self,
        scheduler: Tick,
        inbox: WakingInbox,
        outbox: BatchOutbox,
        ring: Ring,
        clock: Clock,
        resident_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self._scheduler = scheduler
        self._inbox = inbox
        self._outbox = outbox
        self._ring = ring
        self._clock = clock
        self._resident_bytes = resident_bytes
        self._stopping = threading.Event()
        self._health = Health(clock.now_ns())

    def put(self, command: Command) -> None:
        self._inbox.put(command)
        if isinstance(command, Shutdown):
            self._stopping.set()
            self._inbox.bell.set()

    def stop(self) -> None:
        """Tell every client and leave; safe in a signal handler."""
        if not self._stopping.is_set():
            self.put(Shutdown())

    def run(self) -> bool:
        """Tick until stopped. False when the engine could not go on; `Fatal` was sent then."""
        try:
            while not self._stopping.is_set():
                self._inbox.bell.clear()
                if not self._tick() and not self._inbox.commands and not self._stopping.is_set():
                    self._inbox.bell.wait(IDLE_WAIT_S)
                    self._observe(0)
            for _ in range(SHUTDOWN_TICKS):
                if not self._tick():
                    break
        except Exception as error:
            log.exception("The tick loop failed")
            self._outbox.send(Fatal(message=f"The engine stopped: {sentence_of(error)}"))
            return False
        return True

    def _tick(self) -> bool:
        start = self._clock.now_ns()
        busy = self._scheduler.tick()
        self._observe(self._clock.now_ns() - start)
        return busy

    def _observe(self, tick_ns: int) -> None:
        health, ring = self._health, self._ring
        if len(ring.entries) > ring.capacity:
            ring.trim()
        health.tick_ns += tick_ns
        now = self._clock.now_ns()
        if now - health.since_ns < HEALTH_NS:
            return
        recording, records, lost = ring.recording_ns + ring.composing_ns, ring.records, ring.lost
        ring.append(
            HealthRecord(
                time_ns=now,
                tick_ns=health.tick_ns,
                recording_ns=recording - health.recording_ns,
                records=records - health.records,
                lost=lost - health.lost,
                resident_bytes=self._resident_bytes(),
            )
        )
        self._health = Health(now, 0, recording, records, lost)


def sentence_of(error: BaseException) -> str:
    """What an exception says, as one line; its type when it says nothing."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 500 else text[:497] + "..."
