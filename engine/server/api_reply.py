"""Replies in the shapes of the OpenAI API: whole objects, stream chunks, usage, probabilities and our own metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.protocol.events import Delta, Finished, Token, Usage
from engine.server.tool_calls import ToolCall, ToolCallFinder

REASONS = {"stop": "stop", "length": "length", "deadline": "length", "loop": "stop"}
"""Ends that a client sees as such; every other one is an error."""

TokenBytes = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class Style:
    """How one endpoint spells its replies."""

    is_chat: bool
    wants_logprobs: bool
    token_bytes: TokenBytes

    @property
    def kind(self) -> str:
        return "chat.completion" if self.is_chat else "text_completion"

    @property
    def chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"


@dataclass(slots=True)
class ChoiceState:
    """One reply as it grows."""

    index: int
    finder: ToolCallFinder | None = None
    text: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    finished: Finished | None = None
    offset: int = 0
    """Characters of the text that came before the next token."""

    def take(self, delta: Delta) -> list[str | ToolCall]:
        self.tokens.extend(delta.tokens)
        return self._pieces("".join(token.text for token in delta.tokens))

    def end(self, finished: Finished) -> list[str | ToolCall]:
        self.finished = finished
        pieces = self._pieces(finished.tail)
        return pieces + self._keep(self.finder.flush()) if self.finder else pieces

    @property
    def finish_reason(self) -> str | None:
        if self.finished is None:
            return None
        return "tool_calls" if self.calls else REASONS.get(self.finished.reason, "stop")

    def _pieces(self, text: str) -> list[str | ToolCall]:
        if not text:
            return []
        return self._keep(self.finder.push(text) if self.finder else [text])

    def _keep(self, pieces: list[str | ToolCall]) -> list[str | ToolCall]:
        for piece in pieces:
            if isinstance(piece, str):
                self.text.append(piece)
            else:
                self.calls.append(piece)
        return pieces


def usage_of(usages: Sequence[Usage]) -> dict[str, Any]:
    """Summed over choices; a shared prompt counts once."""
    prompt = max((usage.prompt_tokens for usage in usages), default=0)
    output = sum(usage.output_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": max((usage.cached_tokens for usage in usages), default=0)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": sum(usage.accepted for usage in usages),
            "rejected_prediction_tokens": sum(usage.drafted - usage.accepted for usage in usages),
        },
    }


def metrics_of(usage: Usage) -> dict[str, Any]:
    """What the standard has no place for."""
    return {
        "ttft_ms": usage.ttft_us / 1000,
        "queue_ms": usage.queue_us / 1000,
        "prefill_ms": usage.prefill_us / 1000,
        "decode_ms": usage.decode_us / 1000,
        "drafted": usage.drafted,
        "accepted": usage.accepted,
        "tokens_by_lane": usage.tokens_by_lane,
        "steps_by_lane": usage.steps_by_lane,
        "preemptions": usage.preemptions,
        "seed": usage.seed,
    }


def chat_logprobs(style: Style, tokens: Sequence[Token]) -> dict[str, Any]:
    return {
        "content": [
            {
                **_named(style, token.id, token.logprob),
                "top_logprobs": [_named(style, other, logprob) for other, logprob in token.top],
            }
            for token in tokens
        ]
    }


def text_logprobs(style: Style, tokens: Sequence[Token], offset: int) -> dict[str, Any]:
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [_word(style, token.id) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{_word(style, other): logprob for other, logprob in token.top} for token in tokens],
        "text_offset": offsets,
    }


def logprobs_of(style: Style, choice: ChoiceState, tokens: Sequence[Token]) -> dict[str, Any] | None:
    """Probabilities of `tokens`, the next ones of the choice; None when they were not asked for."""
    if not style.wants_logprobs:
        return None
    if style.is_chat:
        return chat_logprobs(style, tokens)
    found = text_logprobs(style, tokens, choice.offset)
    choice.offset += sum(len(token.text) for token in tokens)
    return found


def whole_choice(style: Style, choice: ChoiceState) -> dict[str, Any]:
    common = {
        "index": choice.index,
        "finish_reason": choice.finish_reason,
        "logprobs": logprobs_of(style, choice, choice.tokens),
    }
    text = "".join(choice.text)
    if not style.is_chat:
        return {**common, "text": text}
    message: dict[str, Any] = {"role": "assistant", "content": text or (None if choice.calls else ""), "refusal": None}
    if choice.calls:
        message["tool_calls"] = [_call(call) for call in choice.calls]
    return {**common, "message": message}


def whole(head: dict[str, Any], style: Style, choices: Sequence[ChoiceState]) -> dict[str, Any]:
    usages = [choice.finished.usage for choice in choices if choice.finished]
    return {
        **head,
        "object": style.kind,
        "choices": [whole_choice(style, choice) for choice in choices],
        "usage": usage_of(usages),
        "metrics": metrics_of(usages[0]) if len(usages) == 1 else [metrics_of(usage) for usage in usages],
    }


class Stream:
    """Spells the chunks of one streamed reply."""

    def __init__(self, head: dict[str, Any], style: Style, includes_usage: bool) -> None:
        self._head = {**head, "object": style.chunk_kind}
        self._style = style
        self._includes_usage = includes_usage

    def opening(self, choice: ChoiceState) -> list[bytes]:
        """The role, before any text."""
        if not self._style.is_chat:
            return []
        return [self._chunk(choice, {"role": "assistant", "content": ""})]

    def pieces(self, choice: ChoiceState, pieces: Sequence[str | ToolCall], tokens: Sequence[Token]) -> list[bytes]:
        """Chunks for new text and calls; the probabilities of the new tokens go with the first."""
        logprobs = logprobs_of(self._style, choice, tokens) if tokens else None
        chunks = []
        for piece in pieces or ([""] if logprobs else []):
            delta = {"content": piece} if isinstance(piece, str) else {"tool_calls": [self._streamed(choice, piece)]}
            chunks.append(self._chunk(choice, delta, logprobs))
            logprobs = None
        return chunks

    def closing(self, choice: ChoiceState) -> list[bytes]:
        extra = {"metrics": metrics_of(choice.finished.usage)} if choice.finished else {}
        return [self._chunk(choice, {}, None, choice.finish_reason, extra)]

    def usage(self, usages: Sequence[Usage]) -> list[bytes]:
        if not self._includes_usage:
            return []
        return [event({**self._head, "choices": [], "usage": usage_of(usages)})]

    def _chunk(
        self,
        choice: ChoiceState,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        extra: dict[str, Any] | None = None,
    ) -> bytes:
        body = {"delta": delta} if self._style.is_chat else {"text": delta.get("content", "")}
        one = {"index": choice.index, **body, "logprobs": logprobs, "finish_reason": finish_reason}
        usage = {"usage": None} if self._includes_usage else {}
        return event({**self._head, "choices": [one], **usage, **(extra or {})})

    def _streamed(self, choice: ChoiceState, call: ToolCall) -> dict[str, Any]:
        return {"index": choice.calls.index(call), **_call(call)}


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _word(style: Style, token: int) -> str:
    return style.token_bytes(token).decode("utf-8", "replace")


def _named(style: Style, token: int, logprob: float | None) -> dict[str, Any]:
    raw = style.token_bytes(token)
    return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}
