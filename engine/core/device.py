"""The seam between scheduler and model: what a device is asked to run, as plain data without torch.

One call covers everything that a tick may do. A `Step` holds one `Segment` per sequence; a segment feeds
`tokens` at positions `start..start+len(tokens)-1` and samples its last `len(rows)` rows. A prompt chunk
has no planned row, a plain decode step one token and one row, a verify step K+1 of both, and a mixed step
is merely a step whose segments are of several kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from engine.core.value import StepValue


class DrafterName(StrEnum):
    """Where drafts come from; the values are those of the lever `drafter`."""

    NGRAM = "ngram"
    SELF = "self"
    MTP = "mtp"
    DFLASH = "dflash"


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What never changes while a model is loaded."""

    name: str
    """Human-readable, e.g. `CPU, 2 threads, AVX-512 VNNI`."""
    kind: str
    """`cpu`, `cuda` or `scripted`."""
    model: str
    architecture: str
    vocab_size: int
    max_context: int
    """Tokens that one sequence may hold, prompt and reply together."""
    block_size: int
    """Tokens per KV block."""
    num_blocks: int
    bytes_per_block: int
    max_rows: int
    """Rows (tokens) that one step may feed at most."""
    runs_ahead: bool
    """Whether `launch` returns before the step is done, so that a pipelined lane pays."""
    drafters: frozenset[DrafterName] = frozenset()
    """Drafters that this device can run (`ngram` needs none and is never listed)."""
    named_only: frozenset[DrafterName] = frozenset()
    """Loaded drafters that have no kernels of their own here: they run when the lever names them, and `auto` does not
    try them, since one probe of such a drafter costs more than all probes may."""
    dtype: str = "float32"
    row_invariant: bool = False
    """Whether a row's result is bitwise the same however many rows run with it."""


class LogitEdits(StepValue, frozen=True):
    """What the processor chain decided for one row, applied in the order of the fields."""

    only: tuple[int, ...] = ()
    """Non-empty: every other token is masked (forced close, forced token, required tool call)."""
    banned: tuple[int, ...] = ()
    mask: bytes = b""
    """Grammar bitmask, bit `i % 8` of byte `i // 8` set where token `i` is legal; empty: no grammar."""
    repetition: float = 1.0
    repeated: tuple[int, ...] = ()
    """Distinct ids that the repetition penalty touches (positive logits divided, negative multiplied)."""
    added: tuple[tuple[int, float], ...] = ()
    """Logit bias less presence and frequency penalties, summed per token id."""


class RowPlan(StepValue, frozen=True):
    """How one row's token is chosen. A temperature of 0 is the argmax after the edits."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    uniform: float = 0.0
    """The draw in [0, 1) that belongs to this request and position; the token is the inverse of the CDF
    over tokens sorted by falling probability, so that a replayed row always draws the same token."""
    edits: LogitEdits | None = None
    top_logprobs: int = -1
    """-1: no probability is computed; 0: that of the token; n: also the n most likely tokens."""


GREEDY = RowPlan()


class Segment(StepValue, frozen=True):
    """The rows of one sequence in one step."""

    seq: int
    slot: int
    start: int
    tokens: tuple[int, ...]
    blocks: Sequence[int]
    """Block table; covers at least `start + len(tokens)` positions."""
    rows: tuple[RowPlan, ...] = ()
    from_previous: bool = False
    """`tokens[0]` is a placeholder: the device feeds the token that it sampled last for this sequence."""
    save_hidden: frozenset[DrafterName] = frozenset()
    """Draft heads that want this segment's hidden rows (`DraftItem` consumes them)."""


class StepKind(StrEnum):
    PREFILL = "prefill"
    MIXED = "mixed"
    DECODE = "decode"
    VERIFY = "verify"


class Step(StepValue, frozen=True):
    step_id: int
    kind: StepKind
    segments: tuple[Segment, ...]

    @property
    def rows(self) -> int:
        return sum(len(segment.tokens) for segment in self.segments)


class Sampled(StepValue, frozen=True):
    """The token that the target model emits at one row."""

    token: int
    logprob: float | None = None
    """Natural log, of the distribution after edits and before temperature; None unless asked for."""
    top: tuple[tuple[int, float], ...] = ()


class StepResult(StepValue, frozen=True):
    sampled: tuple[tuple[Sampled, ...], ...]
    """One entry per segment, one item per planned row."""
    device_us: int = 0
    """Time on the device where it reports one, else 0."""


class DraftItem(StepValue, frozen=True):
    """One sequence that wants drafts after `last_token`, which sits at position `seq_len`."""

    seq: int
    slot: int
    seq_len: int
    last_token: int
    recent: tuple[int, ...]
    """The last fed tokens, which end at position `seq_len - 1`; they reach back at least to position
    `saved_hidden(seq) + 1`, so that every saved row finds the token that followed it."""
    blocks: Sequence[int]
    count: int


class Draft(StepValue, frozen=True):
    tokens: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()
    """Probability that the drafter gave each token; empty when it states none."""


class DeviceError(RuntimeError):
    """A step failed; its requests end with this sentence, never with a normal stop."""


class Device(Protocol):
    """A loaded model with its paged KV cache. All calls come from the tick thread, in order.

    Steps take effect in the order in which they were asked for. A stream of its own for prompts would gain little: an
    H200 ends a prompt slice of 512 tokens and 8 decode steps after 7.95 ms on one stream and 7.58 on two."""

    @property
    def facts(self) -> DeviceFacts: ...

    def forward(self, step: Step) -> StepResult:
        """Run a step and wait for its tokens."""
        ...

    def launch(self, step: Step) -> None:
        """Start a step; at most two may be in flight. `collect` returns results in launch order."""
        ...

    def collect(self) -> StepResult: ...

    def draft(self, drafter: DrafterName, items: Sequence[DraftItem], conf_min: float) -> list[Draft]:
        """Draft up to `count` tokens per item; a chain stops below `conf_min`. Never touches KV rows
        below `seq_len`; rows written above it are overwritten by the verify that follows. A head that has no
        saved row for position `seq_len - 1` returns an empty draft: the sequence bootstraps in this step."""
        ...

    def saved_hidden(self, seq: int) -> int:
        """Position of the oldest hidden row saved for `seq` that the draft head has not consumed, or -1."""
        ...

    def release(self, seq: int) -> None:
        """Forget all device-side state of a sequence that is not in KV blocks."""
        ...

    def spill(self, seq: int, blocks: Sequence[int]) -> bool:
        """Copy blocks (and drafter state) to the spill store; False when it has no room."""
        ...

    def restore(self, seq: int, blocks: Sequence[int]) -> None:
        """Copy what was spilled into (other) blocks and forget the spilled copy."""
        ...

    def sync_secondary(self) -> None:
        """Make the default stream wait for commits and checkpoints on the secondary one. No-op on a CPU."""
        ...

    def close(self) -> None: ...
