"""A device without a model: its KV holds the fed tokens, and the next token is a hash of what it reads there.

Because a row's token depends on every position of its context *as read through the block table*, a wrong block, a
stale row or a lost spill changes the output. Time is a cost model on the manual clock; every call is noted.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.core.clock import ManualClock
from engine.core.device import (
    DeviceError,
    DeviceFacts,
    Draft,
    DrafterName,
    DraftItem,
    RowPlan,
    Sampled,
    Segment,
    Step,
    StepResult,
)
from engine.core.vocabulary import Vocabulary

LETTERS = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ.,!\n"
EOS = len(LETTERS)
SPECIAL = {"<eos>": EOS}
THINKING_SPECIAL = {
    "<eos>": EOS,
    "<think>": EOS + 1,
    "</think>": EOS + 2,
    "<tool_call>": EOS + 3,
    "</tool_call>": EOS + 4,
}
UNWRITTEN = -1
HEADS = frozenset({DrafterName.MTP, DrafterName.DFLASH})

NextToken = Callable[[tuple[int, ...]], int]


def vocabulary(special: dict[str, int] | None = None) -> Vocabulary:
    special = SPECIAL if special is None else special
    pieces = tuple(letter.encode() for letter in LETTERS) + (b"",) * len(special)
    return Vocabulary(token_bytes=pieces, eos_ids=frozenset({EOS}), special=special)


def encode(text: str) -> tuple[int, ...]:
    return tuple(LETTERS.index(letter) for letter in text)


def hashed_next(context: tuple[int, ...]) -> int:
    """A letter that depends on the whole context; never a special token."""
    digest = hashlib.blake2b(repr(context).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % len(LETTERS)


def cyclic_next(context: tuple[int, ...]) -> int:
    """Repeats the alphabet after the last token: what an n-gram drafter likes."""
    return (context[-1] + 1) % 26


@dataclass
class Costs:
    """Microseconds on the manual clock."""

    step: float = 1000.0
    row: float = 10.0
    draft: float = 50.0


@dataclass
class ScriptedDevice:
    clock: ManualClock = field(default_factory=ManualClock)
    next_token: NextToken = hashed_next
    num_blocks: int = 64
    block_size: int = 4
    max_context: int = 128
    max_rows: int = 512
    runs_ahead: bool = False
    drafters: frozenset[DrafterName] = frozenset()
    spill_blocks: int = 0
    """Room of the spill store; 0: nothing can be spilled."""
    accuracy: Callable[[int, int], bool] = lambda position, at: True
    """Whether the draft at `position` (the `at`-th of its chain) is right."""
    costs: Costs = field(default_factory=Costs)
    fail_at: int = -1
    """Step id that raises a `DeviceError`."""
    vocab_size: int = EOS + len(THINKING_SPECIAL)
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kv = [[UNWRITTEN] * self.block_size for _ in range(self.num_blocks)]
        self._hidden: dict[tuple[DrafterName, int], list[int]] = {}
        self._last: dict[int, int] = {}
        self._spilled: dict[int, list[list[int]]] = {}
        self._flights: deque[StepResult | DeviceError] = deque()

    @property
    def facts(self) -> DeviceFacts:
        return DeviceFacts(
            name="scripted",
            kind="scripted",
            model="alphabet",
            architecture="none",
            vocab_size=self.vocab_size,
            max_context=self.max_context,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            bytes_per_block=self.block_size,
            max_rows=self.max_rows,
            runs_ahead=self.runs_ahead,
            drafters=self.drafters,
        )

    def forward(self, step: Step) -> StepResult:
        self._note("forward", step)
        return self._run(step)

    def launch(self, step: Step) -> None:
        self._note("launch", step)
        if len(self._flights) >= 2:
            raise AssertionError("more than two steps in flight")
        if self._flights and isinstance(self._flights[-1], DeviceError):
            self._flights.append(self._flights[-1])
            return
        try:
            self._flights.append(self._run(step))
        except DeviceError as error:
            self._flights.append(error)

    def collect(self) -> StepResult:
        self.calls.append("collect")
        result = self._flights.popleft()
        if isinstance(result, DeviceError):
            raise result
        return result

    def draft(self, drafter: DrafterName, items: Sequence[DraftItem], conf_min: float) -> list[Draft]:
        self.calls.append(f"draft {drafter} " + " ".join(f"s{i.seq}@{i.seq_len}x{i.count}" for i in items))
        self.clock.advance_us(self.costs.draft)
        return [self._draft(drafter, item) for item in items]

    def saved_hidden(self, seq: int) -> int:
        oldest = [rows[0] for (_, owner), rows in self._hidden.items() if owner == seq and rows]
        return min(oldest, default=-1)

    def release(self, seq: int) -> None:
        for head in HEADS:
            self._hidden.pop((head, seq), None)
        self._last.pop(seq, None)
        self._spilled.pop(seq, None)

    def spill(self, seq: int, blocks: Sequence[int]) -> bool:
        room = self.spill_blocks - sum(len(held) for held in self._spilled.values())
        self.calls.append(f"spill s{seq} {len(blocks)} blocks{'' if len(blocks) <= room else ' refused'}")
        if len(blocks) > room:
            return False
        self._spilled[seq] = [list(self.kv[block]) for block in blocks]
        return True

    def restore(self, seq: int, blocks: Sequence[int]) -> None:
        self.calls.append(f"restore s{seq} {len(blocks)} blocks")
        for block, content in zip(blocks, self._spilled.pop(seq), strict=True):
            self.kv[block] = content

    def sync_secondary(self) -> None:
        self.calls.append("sync_secondary")

    def close(self) -> None:
        self.calls.append("close")

    def _run(self, step: Step) -> StepResult:
        self.clock.advance_us(self.costs.step + self.costs.row * step.rows)
        if step.step_id == self.fail_at:
            raise DeviceError("The scripted device was told to fail.")
        if step.rows > self.max_rows:
            raise AssertionError(f"{step.rows} rows in one step")
        for segment in step.segments:
            self._write(segment)
        return StepResult(tuple(self._sample(segment) for segment in step.segments))

    def _write(self, segment: Segment) -> None:
        tokens = list(segment.tokens)
        if segment.from_previous:
            tokens[0] = self._last[segment.seq]
        for at, token in enumerate(tokens, segment.start):
            self.kv[segment.blocks[at // self.block_size]][at % self.block_size] = token
        for head in self.drafters & HEADS if segment.save_hidden else ():
            rows = [row for row in self._hidden.get((head, segment.seq), []) if row < segment.start]
            self._hidden[head, segment.seq] = rows + list(range(segment.start, segment.start + len(tokens)))

    def _read(self, blocks: Sequence[int], length: int) -> tuple[int, ...]:
        context = tuple(self.kv[blocks[at // self.block_size]][at % self.block_size] for at in range(length))
        if UNWRITTEN in context:
            raise AssertionError("a row was read before it was written")
        return context

    def _sample(self, segment: Segment) -> tuple[Sampled, ...]:
        end = segment.start + len(segment.tokens)
        first = end - len(segment.rows)
        chosen = []
        for at, plan in enumerate(segment.rows):
            token = self._choose(self._read(segment.blocks, first + at + 1), plan)
            chosen.append(Sampled(token))
            self._last[segment.seq] = token
        return tuple(chosen)

    def _choose(self, context: tuple[int, ...], plan: RowPlan) -> int:
        token = self.next_token(context)
        if plan.temperature:
            token = (token + int(plan.uniform * 3)) % len(LETTERS)
        edits = plan.edits
        if edits is None:
            return token
        if edits.only:
            return token if token in edits.only else min(edits.only)
        legal = [t for t in range(self.vocab_size) if not edits.mask or edits.mask[t // 8] >> t % 8 & 1]
        legal = [t for t in legal if t not in edits.banned]
        return token if token in legal else min(legal, key=lambda t: (t - token) % self.vocab_size)

    def _draft(self, drafter: DrafterName, item: DraftItem) -> Draft:
        if drafter in HEADS:
            rows = self._hidden.get((drafter, item.seq))
            if not rows or item.seq_len - 1 not in rows:
                return Draft()
            if len(item.recent) < item.seq_len - 1 - rows[0]:
                raise AssertionError("the tokens do not reach back to the oldest saved row")
            self._hidden[drafter, item.seq] = []
        context = (*self._read(item.blocks, item.seq_len), item.last_token)
        tokens: list[int] = []
        for at in range(item.count):
            token = self.next_token((*context, *tokens))
            right = self.accuracy(len(context) + at, at)
            tokens.append(token if right else (token + 1) % len(LETTERS))
        return Draft(tuple(tokens), tuple(1.0 for _ in tokens))

    def _note(self, verb: str, step: Step) -> None:
        segments = " ".join(_describe(segment) for segment in step.segments)
        self.calls.append(f"{verb} {step.kind} {segments}")


def _describe(segment: Segment) -> str:
    """`s1[4:7]>2`: sequence 1 feeds positions 4 to 6 and samples two rows; `^` takes the device's own token."""
    ahead = "^" if segment.from_previous else ""
    samples = f">{len(segment.rows)}" if segment.rows else ""
    return f"s{segment.seq}[{segment.start}:{segment.start + len(segment.tokens)}]{ahead}{samples}"
