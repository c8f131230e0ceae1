"""Fixed-size records of what the engine did: what the tick thread appends and the server turns into spans and rows.

Times are nanoseconds of the engine's own clock; a `RunRecord` ties that clock to Unix time. Ids of requests
are strings, everything else is a number, a short word of `telemetry.names`, or a tuple of those.
"""

from __future__ import annotations

import msgspec


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=True):
    """Base of all records; on the link each is a list that begins with its class name."""


class RunRecord(Record, frozen=True):
    """The first record of a run."""

    run_id: str
    clock_ns: int
    unix_ns: int
    model: str
    device: str
    dtype: str
    levers: dict[str, bool | int | float | str]
    versions: dict[str, str]
    kv_tokens: int = 0
    block_size: int = 0


class LoadRecord(Record, frozen=True):
    """One stage of start-up: `load`, `warmup` or `capture`."""

    stage: str
    start_ns: int
    end_ns: int
    what: str
    bytes: int = 0


class SeqShare(Record, frozen=True):
    """What one request gave to and got from one step."""

    request_id: str
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    prefill_tokens: int = 0


class StepRecord(Record, frozen=True):
    """One lane step; `emitted == accepted + bonus` always holds."""

    step_id: int
    tick: int
    lane: str
    """prefill, mixed, ngram, self_spec, mtp, dflash, plain, pipelined, swap or preempt."""
    start_ns: int
    end_ns: int
    width: int
    """Sequences in decode."""
    rows: int
    """Rows that the forward fed."""
    prefill_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    bonus: int = 0
    """Tokens of the target model itself that were emitted."""
    emitted: int = 0
    drafted_at: tuple[int, ...] = ()
    """Sequences that drafted at position 1, 2, ..."""
    accepted_at: tuple[int, ...] = ()
    k: int = 0
    k_reason: str = ""
    """What bounded K: num_drafts, ladder, adaptive, capacity, confidence, match, grammar or gate."""
    refusals: tuple[tuple[str, str], ...] = ()
    """(lane, reason) for every lane above the one taken."""
    kv_used: int = 0
    """Blocks."""
    kv_total: int = 0
    depth: int = 0
    """Tokens of the longest active sequence."""
    draft_us: int = 0
    device_us: int = 0
    """Around the forward: host time on a CPU, device time where the device reports it."""
    commit_us: int = 0
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    shares: tuple[SeqShare, ...] = ()


class GateRecord(Record, frozen=True):
    """One decision of the gate, also when it said no (scheduler.md, section 4)."""

    step_id: int
    time_ns: int
    mode: str
    arm: str
    reason: str
    """hold, probe, refresh, switch, entry_pin, dflash_pin, force, settle or cold."""
    arms: tuple[tuple[str, float, float, int, bool], ...]
    """(name, tokens/s or -1, deviation or -1, age in tokens, stale) of every arm."""
    margin: float
    """tokens/s"""
    losses: int
    depth: int
    width_bucket: int
    tokens_until_probe: int
    pinned: bool = False


class RungRecord(Record, frozen=True):
    """The width decision flipped."""

    time_ns: int
    tick: int
    width: int
    max_width: int
    speculates: bool


class LeverRecord(Record, frozen=True):
    change_id: str
    time_ns: int
    tick: int
    name: str
    old: bool | int | float | str
    new: bool | int | float | str
    origin: str
    actor: str
    reason: str
    error: str = ""


class RequestRecord(Record, frozen=True):
    """A request that ended; phases are 0 where it never got so far."""

    request_id: str
    operation: str
    conversation_id: str
    trace_id: str
    parent_span_id: str
    arrived_ns: int
    admitted_ns: int
    first_token_ns: int
    finished_ns: int
    reason: str
    error: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    drafted: int
    accepted: int
    prefill_chunks: int
    preemptions: int
    tokens_by_lane: dict[str, int]
    steps_by_lane: dict[str, int]
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    seed: int
    stream: bool = True
    sampled: bool = True
    """The caller's trace flag; an unsampled request still gets its row."""
    prefill_end_ns: int = 0


class TokenRecord(Record, frozen=True):
    """One emitted token (trace level 3)."""

    request_id: str
    index: int
    time_ns: int
    step_id: int
    token_id: int
    lane: str
    draft: int
    logprob: float | None = None


class ShadowRecord(Record, frozen=True):
    """A verify step re-run row by row (`shadow_check`)."""

    step_id: int
    time_ns: int
    rows: int
    differing: int


class HealthRecord(Record, frozen=True):
    """The engine's own accounting, once a second."""

    time_ns: int
    tick_ns: int
    """Time spent in ticks since the last one."""
    recording_ns: int
    """What recording took: appending, of it (sampled), and making and packing records beside it."""
    records: int
    lost: int
    resident_bytes: int


AnyRecord = (
    RunRecord
    | LoadRecord
    | StepRecord
    | GateRecord
    | RungRecord
    | LeverRecord
    | RequestRecord
    | TokenRecord
    | ShadowRecord
    | HealthRecord
)
