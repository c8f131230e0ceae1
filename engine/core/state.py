"""The one mutable state of the scheduler, which the tick passes from lane to lane."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from engine.core.blocks import BlockPool
from engine.core.context import Context
from engine.core.device import DrafterName, Step
from engine.core.pacing import Pacer
from engine.core.queues import Queues
from engine.core.sequence import Sequence
from engine.core.token_state import Markers
from engine.core.value import StepValue
from telemetry.ring import Entry


class Flow(Enum):
    """What a lane says about the lanes after it."""

    PROCEED = auto()
    SKIP_REST = auto()


class Flight(StepValue, frozen=True):
    """A pipelined step that was launched and not yet read."""

    step: Step
    seqs: tuple[Sequence, ...]
    launched_ns: int


@dataclass(slots=True)
class EngineState:
    ctx: Context
    queues: Queues
    pool: BlockPool
    markers: Markers
    tick: int = 0
    step: int = 0
    """Id of the last device step."""
    sequences: int = 0
    flight: Flight | None = None
    last_read_ns: int = 0
    """When the last pipelined step was read; the next one's time begins no earlier."""
    saves_hidden: frozenset[DrafterName] = frozenset()
    """Draft heads in use: every step keeps its hidden rows for them (the catch-up ring)."""
    pacer: Pacer = field(default_factory=Pacer)
    lane: str = ""
    """Lane of the last decode step, and why the faster ones were not taken."""
    refusals: tuple[tuple[str, str], ...] = ()
    record: Callable[[Entry], None] = field(init=False)
    """The sink's `append`, at hand: every hop to it misses the caches between two steps."""
    row_limit: int = field(init=False)
    context_limit: int = field(init=False)
    """Tokens that one sequence may hold: the model's context or the whole pool, whichever is less."""

    def __post_init__(self) -> None:
        self.record = self.ctx.telemetry.append
        facts = self.ctx.device.facts
        self.row_limit = facts.max_rows
        self.context_limit = min(facts.max_context, facts.num_blocks * facts.block_size)

    @classmethod
    def of(cls, ctx: Context) -> EngineState:
        facts = ctx.device.facts
        pool = BlockPool(facts.num_blocks, facts.block_size)
        return cls(ctx=ctx, queues=Queues(), pool=pool, markers=Markers.of(ctx.vocabulary))

    def next_step(self) -> int:
        self.step += 1
        return self.step
