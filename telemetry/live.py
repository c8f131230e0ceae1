"""The shapes of the live view: totals of a lane, a window, percentiles, the state of the gate, a running request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace


@dataclass(slots=True)
class LaneTotals:
    """What a lane did; tokens are those emitted, prefill tokens those fed."""

    steps: int = 0
    tokens: int = 0
    prefill_tokens: int = 0
    ns: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.ns / 1e9

    def since(self, before: LaneTotals) -> LaneTotals:
        return LaneTotals(
            self.steps - before.steps,
            self.tokens - before.tokens,
            self.prefill_tokens - before.prefill_tokens,
            self.ns - before.ns,
            self.drafted - before.drafted,
            self.accepted - before.accepted,
            _minus(self.drafted_at, before.drafted_at),
            _minus(self.accepted_at, before.accepted_at),
        )

    def add(self, more: LaneTotals) -> None:
        self.steps += more.steps
        self.tokens += more.tokens
        self.prefill_tokens += more.prefill_tokens
        self.ns += more.ns
        self.drafted += more.drafted
        self.accepted += more.accepted
        _add(self.drafted_at, more.drafted_at)
        _add(self.accepted_at, more.accepted_at)

    def copy(self) -> LaneTotals:
        return replace(self, drafted_at=self.drafted_at.copy(), accepted_at=self.accepted_at.copy())


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Milliseconds; None where the window holds no sample."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    count: int = 0


@dataclass(frozen=True, slots=True)
class Window:
    """What happened since this subscriber asked last, and the totals of the run."""

    time: float
    """Unix seconds."""
    window_s: float
    tick: int
    lanes: dict[str, LaneTotals]
    """Only lanes that ran in the window."""
    tokens_per_s: float
    prefill_tokens_per_s: float
    ttft: Percentiles
    tpot: Percentiles
    """Of requests that ended in the last 60 s."""
    lane: str
    """Lane of the last decode step."""
    refusals: dict[str, str]
    kv_used: int
    kv_total: int
    """Blocks."""
    cached_tokens: int
    """Prompt tokens from the prefix cache since the run began."""
    total_tokens: int
    total_requests: int
    lost: dict[str, int]
    telemetry_cost: float
    """Share of tick time that recording took in the last minute."""
    plain_tokens_per_s: float | None
    width_bucket: int


@dataclass(frozen=True, slots=True)
class Arm:
    name: str
    tokens_per_s: float | None
    deviation: float | None
    age_tokens: int
    stale: bool


@dataclass(frozen=True, slots=True)
class GateState:
    """The last decision of the gate."""

    time: float
    mode: str
    arm: str
    reason: str
    arms: tuple[Arm, ...]
    margin: float
    losses: int
    depth: int
    width_bucket: int
    tokens_until_probe: int
    pinned: bool
    switches: int


@dataclass(slots=True)
class LiveRequest:
    """A request as the records show it; the server may announce it before its first step."""

    request_id: str
    arrived: float
    """Unix seconds."""
    prompt_tokens: int = 0
    conversation_id: str = ""
    state: str = "waiting"
    """waiting, prefilling, active or finished."""
    prefilled: int = 0
    output_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    lane: str = ""
    ttft_ms: float | None = None
    first_token_ns: int = 0
    last_ns: int = 0
    reason: str = ""
    decode_ns: int = 0
    plain_ns: float = 0.0
    """What the same tokens would have taken in plain decoding, where that was measured."""

    @property
    def tokens_per_s(self) -> float:
        elapsed = self.last_ns - self.first_token_ns
        return (self.output_tokens - 1) / elapsed * 1e9 if elapsed > 0 and self.output_tokens > 1 else 0.0

    @property
    def speedup(self) -> float | None:
        """Plain time over the time really taken; below 1 when speculation lost; None while plain is unmeasured."""
        return self.plain_ns / self.decode_ns if self.plain_ns and self.decode_ns else None


def percentiles(values: Sequence[float | None]) -> Percentiles:
    """p50, p95, p99 by the nearest rank."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return Percentiles()
    p50, p95, p99 = (known[min(len(known) - 1, int(share * len(known)))] for share in (0.5, 0.95, 0.99))
    return Percentiles(p50, p95, p99, len(known))


def _add(totals: list[int], counts: list[int]) -> None:
    if len(totals) < len(counts):
        totals.extend([0] * (len(counts) - len(totals)))
    for position, count in enumerate(counts):
        totals[position] += count


def _minus(after: list[int], before: list[int]) -> list[int]:
    return [total - (before[at] if at < len(before) else 0) for at, total in enumerate(after)]
