"""A scheduler on a real device in this very thread: what the benchmarks and the lossless proof drive."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.core.clock import MonotonicClock
from engine.core.context import Context, QueueInbox
from engine.core.device import Device
from engine.core.vocabulary import Vocabulary
from engine.levers.resolve import LeverState
from engine.protocol.commands import ChangeLever, Limits, Sampling, Submit
from engine.protocol.events import Delta, Event, Finished, Token
from engine.runtime.build import vocabulary_of
from engine.scheduler import Scheduler
from engine.text import Text, load_text
from telemetry.record import AnyRecord, GateRecord, StepRecord
from telemetry.ring import Ring


@dataclass(slots=True)
class Reply:
    """What one request got."""

    tokens: list[Token] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]


@dataclass(slots=True)
class Collector:
    """Outbox and record ring in one: keeps replies and records."""

    replies: dict[str, Reply] = field(default_factory=dict)
    ring: Ring = field(default_factory=Ring)
    """Nobody trims it: it holds what was not asked for yet."""
    emitted_at: list[tuple[str, int, int]] = field(default_factory=list)
    """(request, clock in ns, tokens) of every delta."""
    _composed: list[AnyRecord] = field(default_factory=list)

    def send(self, event: Event) -> None:
        if isinstance(event, Delta):
            self.replies[event.request_id].tokens.extend(event.tokens)
            self.emitted_at.append((event.request_id, time.perf_counter_ns(), len(event.tokens)))
        elif isinstance(event, Finished):
            self.replies[event.request_id].finished = event

    @property
    def records(self) -> list[AnyRecord]:
        """All so far; the list may be cleared."""
        self._composed += self.ring.drain()
        return self._composed

    @property
    def steps(self) -> list[StepRecord]:
        return [record for record in self.records if isinstance(record, StepRecord)]

    @property
    def decisions(self) -> list[GateRecord]:
        return [record for record in self.records if isinstance(record, GateRecord)]


class LocalEngine:
    """One device, a fresh scheduler for every lever set, replies as they are asked for."""

    def __init__(self, device: Device, vocabulary: Vocabulary, batch: int = 16, **levers: object) -> None:
        self.out = Collector()
        self.inbox = QueueInbox()
        self.device = device
        self.ctx = Context(
            device=device,
            clock=MonotonicClock(),
            levers=LeverState.of(**levers),
            inbox=self.inbox,
            outbox=self.out,
            vocabulary=vocabulary,
            telemetry=self.out.ring,
            max_batch_size=batch,
            unix_ns=time.time_ns,
        )
        self.scheduler = Scheduler(self.ctx)

    def submit(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int,
        temperature: float = 0.0,
        seed: int = 1,
        ignore_eos: bool = False,
        logprobs: int = -1,
    ) -> None:
        self.out.replies[name] = Reply()
        self.inbox.put(
            Submit(
                request_id=name,
                prompt=tuple(prompt),
                sampling=Sampling(temperature=temperature, seed=seed, logprobs=logprobs),
                limits=Limits(max_tokens=max_tokens, ignore_eos=ignore_eos),
            )
        )

    def set(self, name: str, value: bool | int | float | str) -> None:
        self.inbox.put(ChangeLever(change_id="bench", name=name, value=value, origin="experiment"))

    def run(self, each_tick: Callable[[int], None] | None = None) -> Collector:
        """Tick until nothing is left; `each_tick` is told how many ticks there were."""
        ticks = 0
        while self.scheduler.tick():
            ticks += 1
            if each_tick is not None:
                each_tick(ticks)
        return self.out


@dataclass(frozen=True, slots=True)
class Prompt:
    name: str
    task: str
    ids: tuple[int, ...]


def load_prompts(path: Path, text: Text, most_tokens: int, limit: int = 0) -> list[Prompt]:
    """First turns of a prompt file (JSON lines with `id`, `task`, `turns`) through the chat template, those of at most
    `most_tokens` tokens; `limit` > 0 takes that many, spread evenly over the file."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    prompts = [_prompt(row, text) for row in rows]
    fitting = [prompt for prompt in prompts if len(prompt.ids) <= most_tokens]
    if not limit or limit >= len(fitting):
        return fitting
    return [fitting[at * len(fitting) // limit] for at in range(limit)]


def _prompt(row: Mapping[str, object], text: Text) -> Prompt:
    turns = row["turns"]
    if not isinstance(turns, list):
        raise ValueError(f"Prompt {row.get('id')} has no list of turns.")
    ids = text.encode_chat([{"role": "user", "content": str(turns[0])}])
    return Prompt(str(row["id"]), str(row["task"]), tuple(ids))


def open_text(model: Path) -> tuple[Text, Vocabulary]:
    text = load_text(model)
    return text, vocabulary_of(text)


def by_task(prompts: Iterable[Prompt]) -> dict[str, list[Prompt]]:
    tasks: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        tasks.setdefault(prompt.task, []).append(prompt)
    return tasks
