"""A conversation as a value: turns, replies with the origin of every token, and how a message moves a reply on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.protocol import wire
from engine.protocol.events import Token, Usage
from tui.words import harmless


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of the model, while it streams and after."""

    request_id: str
    run: str = ""
    """Id of the engine's run, to which the step numbers of the tokens belong."""
    asked: float = 0.0
    """Unix seconds, this machine's clock, like the two below."""
    first_at: float = 0.0
    last_at: float = 0.0
    status: str = "sent"
    """sent, queued, streaming, stopping or done."""
    tokens: tuple[Token, ...] = ()
    decisions: tuple[tuple[int, wire.GateView], ...] = ()
    """Index of the first token under each gate decision."""
    prompt_tokens: int = 0
    max_context: int = 0
    reason: str = ""
    usage: Usage | None = None
    speedup: float | None = None
    error: str = ""

    @property
    def running(self) -> bool:
        return self.status in ("sent", "queued", "streaming")

    @property
    def tokens_per_s(self) -> float | None:
        """Of the engine's own time when it is done, of arrivals here before."""
        if self.usage is not None and self.usage.decode_us > 0 and self.usage.output_tokens > 1:
            return (self.usage.output_tokens - 1) / (self.usage.decode_us / 1e6)
        span = self.last_at - self.first_at
        return (len(self.tokens) - 1) / span if span > 0 and len(self.tokens) > 1 else None

    @property
    def ttft_ms(self) -> float | None:
        if self.usage is not None:
            return self.usage.ttft_us / 1000 if self.usage.output_tokens else None
        return (self.first_at - self.asked) * 1000 if self.first_at else None

    def decision_at(self, index: int) -> wire.GateView | None:
        """The gate decision known when token `index` arrived."""
        return next((gate for first, gate in reversed(self.decisions) if first <= index), None)


@dataclass(frozen=True, slots=True)
class Turn:
    role: str
    """user or assistant."""
    content: str
    reply: Reply | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    id: str = ""
    title: str = ""
    system: str = ""
    turns: tuple[Turn, ...] = ()
    created: float = 0.0
    updated: float = 0.0

    @property
    def last_reply(self) -> Reply | None:
        return next((turn.reply for turn in reversed(self.turns) if turn.reply is not None), None)

    @property
    def last_answer(self) -> str:
        return next((turn.content for turn in reversed(self.turns) if turn.role == "assistant"), "")

    @property
    def name(self) -> str:
        """The title, or the first words that were said."""
        first = next((turn.content for turn in self.turns if turn.role == "user"), "")
        return self.title or " ".join(first.split())[:48] or "new conversation"

    def messages(self) -> tuple[wire.ChatTurn, ...]:
        """What the model is given: everything up to the reply that is awaited."""
        system = (wire.ChatTurn(role="system", content=self.system),) if self.system else ()
        said = tuple(wire.ChatTurn(role=turn.role, content=turn.content) for turn in self.turns if turn.content)
        return system + said

    def markdown(self) -> str:
        """The whole conversation as a Markdown document."""
        parts = [f"# {self.name}"]
        if self.system:
            parts.append(f"> {self.system}")
        parts += [f"## {'You' if turn.role == 'user' else 'Model'}\n\n{turn.content}" for turn in self.turns]
        return "\n\n".join(parts) + "\n"


def fold(
    conversation: Conversation,
    event: wire.ClientMessage | wire.ServerMessage,
    request_id: str,
    now: float,
    gate: wire.GateView | None,
) -> Conversation:
    """The conversation after a message about one of its replies; the same object if it is about none."""
    turns = conversation.turns
    for index in range(len(turns) - 1, -1, -1):
        reply = turns[index].reply
        if reply is not None and reply.request_id == request_id:
            turn = _move(turns[index], reply, event, now, gate)
            if turn is turns[index]:
                return conversation
            return replace(conversation, turns=(*turns[:index], turn, *turns[index + 1 :]), updated=now)
    return conversation


def abandon(conversation: Conversation, why: str) -> Conversation:
    """The conversation with every reply that still ran ended for the reason `why`."""

    def ended(turn: Turn) -> Turn:
        if turn.reply is None or turn.reply.status == "done":
            return turn
        return replace(turn, reply=replace(turn.reply, status="done", reason="error", error=why))

    return replace(conversation, turns=tuple(ended(turn) for turn in conversation.turns))


def _move(
    turn: Turn, reply: Reply, event: wire.ClientMessage | wire.ServerMessage, now: float, gate: wire.GateView | None
) -> Turn:
    match event:
        case wire.Queued() if reply.status == "sent":
            moved = replace(reply, status="queued", prompt_tokens=event.prompt_tokens, max_context=event.max_context)
            return replace(turn, reply=moved)
        case wire.Delta() if reply.running:
            moved = _streamed(reply, event, now, gate)
            return Turn(turn.role, turn.content + harmless(event.text), moved)
        case wire.Stop() if reply.running:
            return replace(turn, reply=replace(reply, status="stopping", reason="cancelled"))
        case wire.Done() if reply.status != "done":
            tail = harmless(event.text) if reply.running else ""
            return Turn(turn.role, turn.content + tail, _finished(reply, event))
        case wire.Problem() if reply.status != "done":
            return replace(turn, reply=replace(reply, status="done", reason="error", error=event.message))
        case _:
            return turn


def _streamed(reply: Reply, event: wire.Delta, now: float, gate: wire.GateView | None) -> Reply:
    decisions = reply.decisions
    if gate is not None and (not decisions or decisions[-1][1] is not gate):
        decisions = (*decisions, (len(reply.tokens), gate))
    return replace(
        reply,
        status="streaming",
        tokens=reply.tokens + event.tokens,
        decisions=decisions,
        first_at=reply.first_at or now,
        last_at=now,
    )


def _finished(reply: Reply, event: wire.Done) -> Reply:
    return replace(
        reply,
        status="done",
        reason=event.reason,
        usage=event.usage,
        speedup=event.speedup,
        error=event.error,
        prompt_tokens=event.usage.prompt_tokens or reply.prompt_tokens,
    )
