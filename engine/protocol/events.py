"""What the engine process reports up the link, batched once per flush."""

from __future__ import annotations

from engine.protocol.commands import Message, Value


class Token(Message, frozen=True, kw_only=True, tag=False, array_like=True):
    """One emitted token and where it came from."""

    id: int
    lane: str
    draft: int
    """0: the model's own token; k: the k-th draft of its step, accepted."""
    step: int
    text: str = ""
    """Text that became final with this token: held back while it might be part of a stop string or character."""
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    rejected: tuple[int, ...] = ()
    """What was drafted at and after this position and refused (only on a correction)."""


class Usage(Message, frozen=True, kw_only=True, tag=False):
    """What a request was given and what it cost. Drafts never count as output."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    queue_us: int = 0
    prefill_us: int = 0
    decode_us: int = 0
    ttft_us: int = 0
    tokens_by_lane: dict[str, int] = {}
    steps_by_lane: dict[str, int] = {}
    preemptions: int = 0
    seed: int = 0


class Loading(Message, frozen=True, kw_only=True, tag="loading"):
    stage: str
    done: int
    total: int
    unit: str = "bytes"


class Facts(Message, frozen=True, kw_only=True, tag=False):
    """What never changes while this engine runs."""

    run_id: str
    model: str
    device: str
    dtype: str
    vocab_size: int
    max_context: int
    kv_tokens: int
    block_size: int
    max_batch_size: int
    drafters: tuple[str, ...]
    versions: dict[str, str] = {}
    aliases: tuple[str, ...] = ()
    """Other names that requests may call the model by, besides `default`."""


class Ready(Message, frozen=True, kw_only=True, tag="ready"):
    facts: Facts
    levers: dict[str, Value]
    sources: dict[str, str]


class Accepted(Message, frozen=True, kw_only=True, tag="accepted"):
    """The request is in the queue."""

    request_id: str


class Delta(Message, frozen=True, kw_only=True, tag="delta"):
    request_id: str
    tokens: tuple[Token, ...]


class Finished(Message, frozen=True, kw_only=True, tag="finished"):
    """The end of a request, exactly once."""

    request_id: str
    reason: str
    """stop, length, cancelled, deadline, loop, stalled, error, refused, shutdown."""
    usage: Usage
    error: str = ""
    tail: str = ""
    """Held-back text that turned out not to be part of a stop string."""


class LeverChanged(Message, frozen=True, kw_only=True, tag="lever_changed"):
    """A change took effect (or was refused, when `error` says why) at a tick boundary."""

    change_id: str
    name: str
    old: Value
    new: Value
    tick: int
    origin: str
    actor: str = ""
    reason: str = ""
    error: str = ""
    time_ns: int = 0
    """Unix time."""


class Snapshot(Message, frozen=True, kw_only=True, tag="snapshot"):
    """The state after a tick; published at most once per flush."""

    tick: int
    waiting: int
    prefilling: int
    active: int
    swapped: int
    preempted: int
    kv_used_blocks: int
    kv_total_blocks: int
    cached_blocks: int
    lane: str
    """Lane of the last decode step."""
    refusals: dict[str, str] = {}
    """Why each faster lane was not taken at the last decode step."""
    records_lost: int = 0


class Records(Message, frozen=True, kw_only=True, tag="records"):
    """A batch of telemetry records, encoded by `telemetry.record`."""

    payload: bytes
    lost: int = 0
    """Records that the ring dropped since the last batch."""


class Fatal(Message, frozen=True, kw_only=True, tag="fatal"):
    """The engine cannot go on; one sentence."""

    message: str


Event = Loading | Ready | Accepted | Delta | Finished | LeverChanged | Snapshot | Records | Fatal
