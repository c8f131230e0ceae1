"""What the server is given from outside: an engine to speak to, a tokenizer, and a telemetry store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from engine.protocol.commands import Command, Submit
from engine.protocol.events import Event
from telemetry.batch import Batch
from telemetry.hub import Hub

if TYPE_CHECKING:
    from engine.server.replay import Recorded


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


class Telemetry(Protocol):
    """The store and its live aggregates."""

    @property
    def hub(self) -> Hub: ...

    @property
    def trouble(self) -> str:
        """One sentence of what is wrong with the database; empty when nothing is."""
        ...

    def ingest(self, payload: bytes, lost: int) -> Sequence[Batch]:
        """Take a message of the engine and return its batches; never waits and never fails."""
        ...

    def query(self, sql: str, max_rows: int, run: int = 0) -> QueryAnswer:
        """Run read-only SQL within limits (`run` above 0: on one run), on a worker thread.

        Raises `QueryRefusedError`."""
        ...

    def prometheus(self) -> str: ...

    def announce(self, submit: Submit) -> None:
        """A request was sent to the engine."""
        ...

    def forget(self, request_id: str) -> None:
        """A request ended of which no record will come."""
        ...

    def record_content(self, request_id: str, prompt: str, reply: str) -> None:
        """Prompt (JSON) and reply of a request that ended while `record_content` was on for it."""
        ...

    def replay(self, run: str) -> Recorded:
        """A recorded run by its id or number; empty or `last`: the newest. Raises `QueryRefusedError`."""
        ...

    def export(self, run: int, directory: Path) -> None:
        """Parquet files of one run (0: all) into a directory. Raises `QueryRefusedError`."""
        ...

    def end_run(self, reason: str) -> None:
        """The engine is gone; called on a worker thread."""
        ...

    def close(self) -> None: ...
