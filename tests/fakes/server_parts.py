"""Stand-ins for what a server is given: an engine that says its script, a tokenizer of letters, a store in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.levers.resolve import resolve
from engine.protocol.commands import Cancel, ChangeLever, Command, Submit, Value
from engine.protocol.events import (
    Accepted,
    Delta,
    Event,
    Facts,
    Finished,
    LeverChanged,
    Loading,
    Ready,
    Token,
    Usage,
)
from engine.server.ports import EncodedPrompt, QueryAnswer, QueryRefusedError
from telemetry.batch import Batch, decode
from telemetry.hub import Hub

FACTS = Facts(
    run_id="run-1",
    model="letters",
    device="scripted",
    dtype="float32",
    vocab_size=256,
    max_context=64,
    kv_tokens=256,
    block_size=4,
    max_batch_size=4,
    drafters=("ngram",),
    aliases=("abc",),
)


@dataclass
class FakeEngine:
    """Answers every request with the letters of `reply`, one token each, at the pace that the test sets."""

    reply: str = "hello"
    loads: bool = True
    """Whether it becomes ready at start."""
    holds: bool = False
    """Whether requests wait until `release`."""
    refuses: str = ""
    facts: Facts = FACTS
    levers: dict[str, Value] = field(default_factory=lambda: resolve()[0])
    commands: list[Command] = field(default_factory=list)
    held: list[Submit] = field(default_factory=list)
    tick: int = 0
    stopped: bool = False

    async def start(self, on_event: Callable[[Event], None], on_death: Callable[[str], None]) -> None:
        self.emit, self.die = on_event, on_death
        self.emit(Loading(stage="weights", done=1, total=2))
        if self.loads:
            self.become_ready()

    def become_ready(self) -> None:
        self.emit(Ready(facts=self.facts, levers=self.levers, sources=dict.fromkeys(self.levers, "default")))

    def send(self, command: Command) -> None:
        self.commands.append(command)
        asyncio.get_running_loop().call_soon(self._answer, command)

    async def stop(self) -> None:
        self.stopped = True

    def of_kind(self, kind: type) -> list[Any]:
        return [command for command in self.commands if isinstance(command, kind)]

    def release(self) -> None:
        """Answer what was held."""
        held, self.held = self.held, []
        for submit in held:
            self._speak(submit)

    def say(self, request_id: str, text: str) -> None:
        tokens = tuple(Token(id=ord(letter), lane="plain", draft=0, step=1, text=letter) for letter in text)
        self.emit(Delta(request_id=request_id, tokens=tokens))

    def finish(self, request_id: str, reason: str = "stop", output: int = 0, error: str = "") -> None:
        usage = Usage(prompt_tokens=3, output_tokens=output, ttft_us=1000, tokens_by_lane={"plain": output})
        self.emit(Finished(request_id=request_id, reason=reason, usage=usage, error=error))

    def _answer(self, command: Command) -> None:
        match command:
            case Submit() if self.refuses:
                self.finish(command.request_id, "refused", error=self.refuses)
            case Submit():
                self.emit(Accepted(request_id=command.request_id))
                if self.holds:
                    self.held.append(command)
                else:
                    self._speak(command)
            case Cancel():
                self.held = [submit for submit in self.held if submit.request_id != command.request_id]
                self.finish(command.request_id, "cancelled")
            case ChangeLever():
                self._change(command)

    def _change(self, change: ChangeLever) -> None:
        self.tick += 1
        old = self.levers[change.name]
        stale = change.expected is not None and change.expected != old
        if not stale:
            self.levers[change.name] = change.value
        self.emit(
            LeverChanged(
                change_id=change.change_id,
                name=change.name,
                old=old,
                new=change.value,
                tick=self.tick,
                origin=change.origin,
                actor=change.actor,
                reason=change.reason,
                error=f"{change.name} is {old} by now, not {change.expected}; look again." if stale else "",
                time_ns=1_700_000_000_000_000_000,
            )
        )

    def _speak(self, submit: Submit) -> None:
        for index, letter in enumerate(self.reply):
            wants = submit.sampling.logprobs >= 0
            top = tuple((97 + rank, -0.5 - rank) for rank in range(max(0, submit.sampling.logprobs)))
            token = Token(
                id=ord(letter),
                lane="plain",
                draft=0,
                step=index,
                text=letter,
                logprob=-0.5 if wants else None,
                top=top,
            )
            self.emit(Delta(request_id=submit.request_id, tokens=(token,)))
        self.finish(submit.request_id, "stop", len(self.reply))


@dataclass
class FakeText:
    """One token per byte; a chat is its contents, one after the other."""

    renders_tools: bool = True
    seen: list[Sequence[Mapping[str, Any]]] = field(default_factory=list)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> EncodedPrompt:
        self.seen.append(messages)
        return EncodedPrompt(self.encode("".join(str(message.get("content") or "") for message in messages)))

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])


@dataclass
class FakeTelemetry:
    """A real hub and no database."""

    hub: Hub = field(default_factory=Hub)
    trouble: str = ""
    ended: list[str] = field(default_factory=list)
    contents: list[tuple[str, str, str]] = field(default_factory=list)
    closed: bool = False
    recorded: Any = None

    def ingest(self, payload: bytes, lost: int) -> Sequence[Batch]:
        batches = decode(payload)
        self.hub.update(batches)
        return batches

    def query(self, sql: str, max_rows: int, run: int = 0) -> QueryAnswer:
        if not sql.lower().startswith("select"):
            raise QueryRefusedError("Only SELECT is allowed.")
        return QueryAnswer(("one",), ("INTEGER",), ((1,),)[:max_rows])

    def prometheus(self) -> str:
        return "# TYPE up gauge\nup 1\n"

    def announce(self, submit: Submit) -> None:
        self.hub.announce(submit.request_id, len(submit.prompt), submit.conversation_id)

    def forget(self, request_id: str) -> None:
        self.hub.forget(request_id)

    def record_content(self, request_id: str, prompt: str, reply: str) -> None:
        self.contents.append((request_id, prompt, reply))

    def replay(self, run: str) -> Any:
        if self.recorded is None:
            raise QueryRefusedError(f"There is no run {run!r}.")
        return self.recorded

    def export(self, run: int, directory: Path) -> None:
        if run > 1:
            raise QueryRefusedError(f"There is no run {run}.")
        (directory / "runs.parquet").write_bytes(b"rows")

    def end_run(self, reason: str) -> None:
        self.ended.append(reason)

    def close(self) -> None:
        self.closed = True
