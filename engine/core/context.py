"""Everything the scheduler is given from outside: device, clock, levers, inbox, outbox, telemetry, vocabulary."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from engine.core.clock import Clock
from engine.core.device import Device
from engine.core.vocabulary import Vocabulary
from engine.levers.resolve import LeverState
from engine.protocol.commands import Command
from engine.protocol.events import Event
from telemetry.ring import NullSink, Sink


class Inbox(Protocol):
    def drain(self) -> list[Command]:
        """All commands that have arrived, in order; never waits."""
        ...


class Outbox(Protocol):
    def send(self, event: Event) -> None:
        """Hand an event over; never waits and never fails."""
        ...


class Grammar(Protocol):
    """State of one request's grammar; `engine.grammar` wraps a library, tests script one."""

    def mask(self) -> bytes:
        """Legal next tokens as a bitmask of `vocab_size` bits, lowest bit of byte 0 first."""
        ...

    def advance(self, token: int) -> bool:
        """Take a token; False (and no change) when the grammar refuses it."""
        ...

    def is_done(self) -> bool: ...

    def copy(self) -> Grammar:
        """An independent state at the same place, for verify rows and preemption."""
        ...


GrammarFactory = Callable[[str], Grammar]
"""Makes a grammar from a JSON schema. Raises `ValueError` with a sentence."""


@dataclass(slots=True)
class QueueInbox:
    """An inbox for one process: a plain deque, safe to append to from any thread."""

    commands: deque[Command] = field(default_factory=deque)

    def put(self, command: Command) -> None:
        self.commands.append(command)

    def drain(self) -> list[Command]:
        return [self.commands.popleft() for _ in range(len(self.commands))]


@dataclass(slots=True)
class ListOutbox:
    """An outbox that keeps what it was sent, for tests and in-process use."""

    events: list[Event] = field(default_factory=list)

    def send(self, event: Event) -> None:
        self.events.append(event)


@dataclass(slots=True)
class Context:
    """The injected world of one scheduler."""

    device: Device
    clock: Clock
    levers: LeverState
    inbox: Inbox
    outbox: Outbox
    vocabulary: Vocabulary
    telemetry: Sink = field(default_factory=NullSink)
    grammars: GrammarFactory | None = None
    max_batch_size: int = 8
    spec_slot_cap: int = 256
    """Slots below this one may speculate."""
    draw_seed: Callable[[], int] = lambda: 0
    """Seeds for requests that name none."""
    unix_ns: Callable[[], int] = lambda: 0
    """Wall time for events shown to people; the policy never reads it."""
