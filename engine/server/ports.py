"""What the server is given from outside: an engine to speak to, a tokenizer, and a telemetry store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.protocol.commands import Command
from engine.protocol.events import Event


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    tokens: tuple[int, ...]
    thinking_open: bool = False
    """The template itself opened a thinking block at the end of the prompt."""


class PromptError(ValueError):
    """Messages that the chat template cannot render; one sentence."""


class Text(Protocol):
    """Tokenizer and chat template of the loaded model; safe to call from worker threads."""

    def encode(self, text: str) -> tuple[int, ...]: ...

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> EncodedPrompt:
        """The prompt up to the assistant's turn. Raises `PromptError`."""
        ...

    def token_bytes(self, token: int) -> bytes: ...

    @property
    def renders_tools(self) -> bool:
        """Whether the chat template has a place for tools."""
        ...


class EngineLink(Protocol):
    """A running engine; events arrive on the server's event loop, in order."""

    async def start(self, on_event: Callable[[Event], None], on_death: Callable[[str], None]) -> None:
        """Start the engine; `on_death` is called once, with one sentence, when it ends unasked."""
        ...

    def send(self, command: Command) -> None: ...

    async def stop(self) -> None:
        """Ask the engine to leave and wait until it has."""
        ...


@dataclass(frozen=True, slots=True)
class QueryAnswer:
    columns: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    rows: tuple[tuple[Any, ...], ...] = ()
    truncated: bool = False
    seconds: float = 0.0


class QueryRefusedError(ValueError):
    """SQL that was not run or did not finish; one sentence."""


@dataclass(frozen=True, slots=True)
class StepSample:
    """What the guard needs of one lane step."""

    seconds: float
    tokens: int
    width: int


@dataclass(frozen=True, slots=True)
class LaneTotals:
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0
    drafted_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Spread:
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    count: int = 0


@dataclass(frozen=True, slots=True)
class Window:
    """Aggregates since the cursor that was passed, and totals of the run."""

    cursor: int = 0
    seconds: float = 0.0
    tokens_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    lanes: Mapping[str, LaneTotals] = field(default_factory=dict)
    ttft: Spread = field(default_factory=Spread)
    tpot: Spread = field(default_factory=Spread)
    total_tokens: int = 0
    total_requests: int = 0
    lost: Mapping[str, int] = field(default_factory=dict)
    telemetry_cost: float = 0.0
    database: str = "ok"
    plain_tokens_per_s: float | None = None
    gate: Any = None
    """The last gate decision as a `telemetry.record.GateRecord`, or None."""
