"""Everything that the screens show, as one immutable value, and the events of this program itself.

`tui.reducer` moves it on. No screen keeps a number of its own: pausing is holding on to an old `State`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from engine.protocol import wire
from engine.protocol.commands import Value
from engine.protocol.events import Facts
from tui.conversation import Conversation, Reply


class Phase(StrEnum):
    CONNECTING = "connecting"
    OPEN = "open"
    DOWN = "down"
    REFUSED = "refused"


# ---- local events: what the terminal itself did or noticed ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class Dropped:
    """The connection ended or could not be made; it is tried again unless `final`."""

    reason: str
    final: bool = False


@dataclass(frozen=True, slots=True)
class Sent:
    """A message went out."""

    message: wire.ClientMessage


@dataclass(frozen=True, slots=True)
class Said:
    """The user's turn was added and a reply asked for under `request_id`."""

    text: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Retold:
    """The last reply is asked for again; the old one is dropped."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Opened:
    """Another conversation takes the place of the present one."""

    conversation: Conversation


@dataclass(frozen=True, slots=True)
class Told:
    """A line for the log that this program wrote."""

    level: str
    message: str


LocalEvent = Dropped | Sent | Said | Retold | Opened | Told
Event = wire.ServerMessage | LocalEvent


# ---- the state -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Link:
    phase: Phase = Phase.CONNECTING
    since: float = 0.0
    reason: str = ""
    drops: int = 0


@dataclass(frozen=True, slots=True)
class Loading:
    """How far the model is; `state` is loading, ready or failed ("" until the server spoke)."""

    state: str = ""
    stage: str = ""
    done: int = 0
    total: int = 0
    unit: str = "bytes"
    message: str = ""


@dataclass(frozen=True, slots=True)
class Pending:
    """A lever change that was sent and not yet answered."""

    change_id: str
    name: str
    value: Value | None
    since: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """The last answer to a lever change that was not taken."""

    message: str
    at: float


@dataclass(frozen=True, slots=True)
class LogLine:
    time: float
    level: str
    message: str


@dataclass(frozen=True, slots=True)
class QueryRun:
    query_id: str
    sql: str
    since: float
    result: wire.QueryResult | None = None


@dataclass(frozen=True, slots=True)
class State:
    link: Link = Link()
    loading: Loading = Loading()
    session: str = ""
    role: str = ""
    facts: Facts | None = None
    levers: Mapping[str, wire.LeverView] = field(default_factory=dict)
    pending: Mapping[str, Pending] = field(default_factory=dict)
    """By lever name."""
    refusals: Mapping[str, Refusal] = field(default_factory=dict)
    """By lever name; gone with the next change."""
    changes: tuple[wire.LeverEvent, ...] = ()
    stats: tuple[wire.Stats, ...] = ()
    """Frames of the last minutes, oldest first."""
    stats_at: float = 0.0
    since: float = 0.0
    """When the first frame arrived: the start of everything called lifetime here."""
    skipped: int = 0
    gate: wire.GateView | None = None
    gate_at: float = 0.0
    decisions: tuple[wire.GateView, ...] = ()
    requests: wire.Requests | None = None
    requests_at: float = 0.0
    log: tuple[LogLine, ...] = ()
    queries: Mapping[str, QueryRun] = field(default_factory=dict)
    conversation: Conversation = field(default_factory=Conversation)
    spelled: Mapping[int, str] = field(default_factory=dict)
    """Texts of token ids that were refused or less likely."""

    @property
    def latest(self) -> wire.Stats | None:
        return self.stats[-1] if self.stats else None

    @property
    def ready(self) -> bool:
        return self.link.phase is Phase.OPEN and self.loading.state == "ready"

    @property
    def may_change(self) -> bool:
        return self.link.phase is Phase.OPEN and self.role == "control"

    @property
    def reply(self) -> Reply | None:
        """The reply that is running or was the last to run."""
        return self.conversation.last_reply
