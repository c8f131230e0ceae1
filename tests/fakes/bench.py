"""A scheduler on a workbench: scripted device, manual clock, and helpers that read like a scenario."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.core.context import Context, ListOutbox, QueueInbox
from engine.core.vocabulary import Vocabulary
from engine.levers.resolve import LeverState
from engine.protocol.commands import Cancel, ChangeLever, Limits, Sampling, Submit, Switches
from engine.protocol.events import Delta, Finished, Token
from engine.scheduler import Scheduler
from telemetry.record import AnyRecord, StepRecord
from telemetry.ring import Entry, composed
from tests.fakes.scripted_device import ScriptedDevice, encode, vocabulary

MAX_TICKS = 20_000


@dataclass
class ListSink:
    records: list[AnyRecord] = field(default_factory=list)
    """Composed as soon as they came."""
    entries: list[Entry] = field(default_factory=list)

    def append(self, entry: Entry) -> None:
        self.entries.append(entry)
        self.records.append(composed(entry))

    def note_cost(self, ns: int) -> None:
        pass

    def steps(self, *lanes: str) -> list[StepRecord]:
        return [r for r in self.records if isinstance(r, StepRecord) and (not lanes or r.lane in lanes)]


class Workbench:
    """`Workbench(device, drafter="off")` takes lever values as keywords."""

    def __init__(
        self,
        device: ScriptedDevice | None = None,
        *,
        batch: int = 8,
        words: Vocabulary | None = None,
        grammars: object = None,
        **levers: object,
    ) -> None:
        self.device = device or ScriptedDevice()
        self.inbox, self.outbox, self.sink = QueueInbox(), ListOutbox(), ListSink()
        levers.setdefault("drafter", "off")
        self.ctx = Context(
            device=self.device,
            clock=self.device.clock,
            levers=LeverState.of(**levers),
            inbox=self.inbox,
            outbox=self.outbox,
            vocabulary=words or vocabulary(),
            telemetry=self.sink,
            grammars=grammars,  # type: ignore[arg-type]
            max_batch_size=batch,
        )
        self.scheduler = Scheduler(self.ctx)
        self.engine = self.scheduler.engine

    def submit(
        self,
        name: str,
        prompt: str | Sequence[int] = "hello",
        *,
        max_tokens: int = 8,
        temperature: float = 0.0,
        sampling: Sampling | None = None,
        switches: Switches | None = None,
        **limits: object,
    ) -> None:
        tokens = encode(prompt) if isinstance(prompt, str) else tuple(prompt)
        self.inbox.put(
            Submit(
                request_id=name,
                prompt=tokens,
                sampling=sampling or Sampling(temperature=temperature, seed=7),
                limits=Limits(max_tokens=max_tokens, **limits),  # type: ignore[arg-type]
                switches=switches or Switches(),
            )
        )

    def cancel(self, name: str) -> None:
        self.inbox.put(Cancel(request_id=name))

    def set(self, name: str, value: bool | int | float | str, **more: object) -> None:
        self.inbox.put(ChangeLever(change_id=f"c{name}", name=name, value=value, origin="test", **more))  # type: ignore[arg-type]

    def tick(self, count: int = 1) -> None:
        for _ in range(count):
            self.scheduler.tick()

    def run(self) -> Workbench:
        """Tick until nothing is left to do."""
        for _ in range(MAX_TICKS):
            if not self.scheduler.tick():
                return self
        raise AssertionError(f"still busy after {MAX_TICKS} ticks")

    def tokens(self, name: str) -> list[Token]:
        deltas = [e for e in self.outbox.events if isinstance(e, Delta) and e.request_id == name]
        return [token for delta in deltas for token in delta.tokens]

    def ids(self, name: str) -> list[int]:
        return [token.id for token in self.tokens(name)]

    def text(self, name: str) -> str:
        """Every character that the client got, held-back text included."""
        tail = "".join(e.tail for e in self.finishes(name))
        return "".join(token.text for token in self.tokens(name)) + tail

    def finishes(self, name: str) -> list[Finished]:
        return [e for e in self.outbox.events if isinstance(e, Finished) and e.request_id == name]

    def finish(self, name: str) -> Finished:
        (only,) = self.finishes(name)
        return only

    def check_pool(self) -> None:
        """No block leaks once nothing runs: all are free or idle."""
        pool = self.engine.pool
        assert pool.used == 0, f"{pool.used} blocks leaked"
        assert pool.available == pool.num_blocks
