"""One request on its way through the engine, and the arithmetic that it knows of itself.

State convention (scheduler.md, 1): `tokens` holds what was fed to the model, `last_token` the newest emitted
token, which is fed with the next forward. A forward over r rows appends r tokens.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from engine.core.device import RowPlan
from engine.core.reply import ReplyText
from engine.core.token_state import TokenState
from engine.protocol.commands import Submit
from telemetry.names import Finish


class Status(StrEnum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    ACTIVE = "active"
    SWAPPED = "swapped"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True)
class Account:
    """What was spent on a sequence and what came of it; every emit path writes here through `lanes.emit`."""

    tokens_by_lane: Counter[str] = field(default_factory=Counter)
    steps_by_lane: Counter[str] = field(default_factory=Counter)
    drafted: int = 0
    accepted: int = 0
    serial_steps: int = 0
    speculative_steps: int = 0
    first_draft_accepted: int = 0
    reprobes: int = 0
    prefill_chunks: int = 0
    cached_tokens: int = 0
    preemptions: int = 0


@dataclass(slots=True)
class Times:
    """Clock readings in ns; 0 where the sequence never got so far."""

    arrived: int
    admitted: int = 0
    prefilled: int = 0
    first_token: int = 0
    last_token: int = 0
    finished: int = 0


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    number: int
    request: Submit
    feed: tuple[int, ...]
    """What prefill must feed: the prompt, or after a preemption everything that had been fed."""
    max_tokens: int
    seed: int
    state: TokenState
    text: ReplyText
    times: Times
    greedy: bool
    """Raw argmax, whatever the request said (`force_temp_zero`)."""
    sharpen: bool
    """`adaptive_sampling` was on at admission."""
    base_plan: RowPlan
    """The request's sampling without draw and edits."""
    status: Status = Status.WAITING
    tokens: list[int] = field(default_factory=list)
    last_token: int | None = None
    emitted: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    slot: int = -1
    emitted_at_resume: int = -(10**9)
    remembered: tuple[int, bytes] = (0, b"")
    """Whole blocks whose content the prefix cache knows, and the digest of the last of them."""
    account: Account = field(default_factory=Account)
    finish: Finish | None = None
    error: str = ""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def seq_len(self) -> int:
        return len(self.tokens)

    @property
    def unfed(self) -> int:
        """Tokens that prefill still has to feed."""
        return len(self.feed) - len(self.tokens)

    @property
    def owed(self) -> int:
        """Tokens that the reply may still take."""
        return self.max_tokens - len(self.emitted)

    @property
    def history_len(self) -> int:
        """Tokens that the KV must hold before the next decode step can run."""
        return max(len(self.feed), len(self.tokens)) + 1

    @property
    def is_finished(self) -> bool:
        return self.finish is not None

    def requeue(self) -> None:
        """Forget the KV: everything fed so far will be fed again, and the reply goes on where it stood."""
        self.feed, self.tokens = tuple(self.tokens) if self.unfed <= 0 else self.feed, []
        self.remembered = (0, b"")
