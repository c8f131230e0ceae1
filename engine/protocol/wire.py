"""The versioned wire between server and every client: JSON text frames, one tagged message each.

A client says `Hello`, the server answers `Welcome` (or `Refused`), and from then on both may speak at any time.
`schema()` is the published description. Times are Unix seconds unless a name says otherwise.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine.protocol.commands import Limits, Message, Sampling, Value
from engine.protocol.events import Facts, Token, Usage

WIRE_VERSION = 1
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
WIRE_PATH = "/wire"

TOPICS = ("stats", "requests", "levers", "gate", "log", "tokens")
"""`tokens`: deltas of every request, not only of this client's own."""


# ---- client -> server -------------------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    version: int
    client: str
    """tui, web, cli, test or another word."""
    token: str = ""
    resume: str = ""
    """Session id of a dropped connection: its running requests go on streaming here."""
    received: dict[str, int] = {}
    """With `resume`: tokens of each running request that this client has; those after it are sent again."""


class Subscribe(Message, frozen=True, kw_only=True, tag="subscribe"):
    topics: tuple[str, ...]
    rate_hz: float = 4.0
    """Frames per second at most for the periodic topics, 0.1 to 30."""


class ChatTurn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    role: str
    content: str


class Chat(Message, frozen=True, kw_only=True, tag="chat"):
    """Start a reply; its frames carry `request_id`, which the client chose (unique within its session)."""

    request_id: str
    messages: tuple[ChatTurn, ...]
    sampling: Sampling = Sampling()
    limits: Limits = Limits()
    speculate: bool = True
    conversation_id: str = ""


class Stop(Message, frozen=True, kw_only=True, tag="stop"):
    """Cancel a request; what was said stays said."""

    request_id: str


class SetLever(Message, frozen=True, kw_only=True, tag="set_lever"):
    change_id: str
    name: str
    value: Value
    expected: Value | None = None
    reason: str = ""
    for_seconds: float = 0.0
    """Above 0: reverts by itself."""
    guard: float = 0.0
    """Above 0: reverts when throughput or p95 time per token gets worse by more than this share."""


class UndoLever(Message, frozen=True, kw_only=True, tag="undo_lever"):
    """Put the value before `of` (a change id; empty: the last change) back."""

    change_id: str
    of: str = ""


class Query(Message, frozen=True, kw_only=True, tag="query"):
    query_id: str
    sql: str
    max_rows: int = 1000
    run: int = 0
    """Above 0: every table and view shows only this run."""


class Ping(Message, frozen=True, kw_only=True, tag="ping"):
    nonce: str = ""


class Replay(Message, frozen=True, kw_only=True, tag="replay"):
    """Control a replay: the server then sends `Stats` of the past, marked with `replay_run`."""

    run: str = ""
    """Run id; empty with action `stop`."""
    action: str = "start"
    """start, pause, resume, seek, stop."""
    speed: float = 1.0
    position: float = 0.0
    """Seconds from the start of the run, for `seek` and `start`."""


ClientMessage = Hello | Subscribe | Chat | Stop | SetLever | UndoLever | Query | Ping | Replay


# ---- server -> client -------------------------------------------------------------------------------------


class LeverView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything that a face needs to show and edit a lever."""

    name: str
    group: str
    kind: str
    value: Value
    default: Value
    help: str
    source: str
    applies: str
    lossless: bool
    bounds: str
    unit: str = ""
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    none_word: str = ""
    env: str = ""


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    version: int
    session: str
    state: str
    """loading, ready or failed."""
    role: str
    """control or read."""
    facts: Facts | None
    levers: tuple[LeverView, ...]
    flush_ms: int = 50


class Refused(Message, frozen=True, kw_only=True, tag="refused"):
    """The connection ends after this."""

    message: str


class Load(Message, frozen=True, kw_only=True, tag="load"):
    state: str
    """loading, ready or failed."""
    stage: str = ""
    done: int = 0
    total: int = 0
    unit: str = "bytes"
    message: str = ""
    facts: Facts | None = None


class Queued(Message, frozen=True, kw_only=True, tag="queued"):
    """The prompt was accepted; `prompt_tokens` of `max_context` are used."""

    request_id: str
    prompt_tokens: int
    max_context: int


class Delta(Message, frozen=True, kw_only=True, tag="delta"):
    request_id: str
    text: str
    tokens: tuple[Token, ...]
    spelled: dict[int, str] = {}
    """Texts of the ids in `top` and `rejected`: a client has no tokenizer."""


class Done(Message, frozen=True, kw_only=True, tag="done"):
    request_id: str
    reason: str
    usage: Usage
    text: str = ""
    """Text that was still held back."""
    error: str = ""
    speedup: float | None = None
    """Delivered tokens per second over measured plain decoding; may be below 1; None while unmeasured."""


class LaneStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One lane over the window."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0
    drafted_at: tuple[int, ...] = ()
    """Drafts made at position 1, 2, ..."""
    accepted_at: tuple[int, ...] = ()


class Quantiles(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Milliseconds; None where the window holds no sample."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    count: int = 0


class Stats(Message, frozen=True, kw_only=True, tag="stats"):
    """Aggregates of the steps since the last `Stats` of this connection, and the state now."""

    time: float
    window_s: float
    tick: int
    tokens_per_s: float
    prefill_tokens_per_s: float
    lanes: dict[str, LaneStats]
    ttft: Quantiles
    tpot: Quantiles
    """Of the last 60 s."""
    waiting: int
    prefilling: int
    active: int
    swapped: int
    preempted: int
    kv_used_tokens: int
    kv_total_tokens: int
    cached_tokens: int
    lane: str
    refusals: dict[str, str]
    total_tokens: int
    total_requests: int
    lost: dict[str, int]
    """Dropped, by kind, since the run began."""
    telemetry_cost: float
    """Share of tick time that recording took, measured."""
    database: str
    """`ok`, or one sentence of what is wrong."""
    skipped: int = 0
    """Frames that this slow client did not get since the last one."""
    plain_tokens_per_s: float | None = None
    """Measured plain decoding, the base of every speed-up."""
    replay_run: str = ""
    replay_position: float = 0.0


class ArmView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the gate knows of one arm."""

    name: str
    tokens_per_s: float | None = None
    deviation: float | None = None
    age_tokens: int = 0
    stale: bool = False


class GateView(Message, frozen=True, kw_only=True, tag="gate"):
    """The gate's last decision."""

    time: float
    mode: str
    arm: str
    reason: str
    arms: tuple[ArmView, ...]
    margin: float
    losses: int
    depth: int
    width_bucket: int
    tokens_until_probe: int
    switches: int = 0


class RequestView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    request_id: str
    state: str
    """waiting, prefilling, active, swapped, preempted, finished."""
    age_s: float
    prompt_tokens: int
    output_tokens: int
    tokens_per_s: float = 0.0
    ttft_ms: float | None = None
    drafted: int = 0
    accepted: int = 0
    lane: str = ""
    reason: str = ""
    conversation_id: str = ""


class Requests(Message, frozen=True, kw_only=True, tag="requests"):
    """Running requests, and the last ones that ended."""

    time: float
    rows: tuple[RequestView, ...]


class LeverEvent(Message, frozen=True, kw_only=True, tag="lever_event"):
    """A change took effect."""

    change_id: str
    name: str
    old: Value
    new: Value
    tick: int
    time: float
    origin: str
    actor: str = ""
    reason: str = ""
    expires: float = 0.0


class LeverRefused(Message, frozen=True, kw_only=True, tag="lever_refused"):
    change_id: str
    name: str
    message: str
    current: Value | None = None


class QueryResult(Message, frozen=True, kw_only=True, tag="query_result"):
    query_id: str
    columns: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    rows: tuple[tuple[Any, ...], ...] = ()
    truncated: bool = False
    seconds: float = 0.0
    error: str = ""


class Log(Message, frozen=True, kw_only=True, tag="log"):
    time: float
    level: str
    """info, warning or error."""
    message: str


class Pong(Message, frozen=True, kw_only=True, tag="pong"):
    nonce: str = ""


class Problem(Message, frozen=True, kw_only=True, tag="problem"):
    """A message could not be taken; nothing was changed."""

    message: str
    request_id: str = ""


ServerMessage = (
    Welcome | Refused | Load | Queued | Delta | Done | Stats | GateView | Requests | LeverEvent | LeverRefused
    | QueryResult | Log | Pong | Problem
)  # fmt: skip


class WireError(ValueError):
    """A frame that is not a known message; the text says what was wrong with it."""


_encoder = msgspec.json.Encoder()
_client_decoder = msgspec.json.Decoder(ClientMessage)
_server_decoder = msgspec.json.Decoder(ServerMessage)


def encode(message: ClientMessage | ServerMessage) -> str:
    return _encoder.encode(message).decode()


def decode_client(text: str | bytes) -> ClientMessage:
    """A message from a client. Raises `WireError`."""
    try:
        return _client_decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"This is not a message of wire version {WIRE_VERSION}: {error}.") from None


def decode_server(text: str | bytes) -> ServerMessage:
    """A message from the server. Raises `WireError`."""
    try:
        return _server_decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"The server sent what wire version {WIRE_VERSION} does not know: {error}.") from None


def schema() -> dict[str, Any]:
    """JSON Schema of both directions."""
    (client, server), components = msgspec.json.schema_components((ClientMessage, ServerMessage))
    return {"version": WIRE_VERSION, "client": client, "server": server, "$defs": components}
