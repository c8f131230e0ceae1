"""Tool calls in a reply's text: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`, found while it streams."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str
    """JSON text."""


class ToolCallFinder:
    """Takes text piece by piece; gives content that cannot be part of a call, and calls that are complete."""

    def __init__(self) -> None:
        self._held = ""
        self._inside = False
        self.found = 0

    def push(self, text: str) -> list[str | ToolCall]:
        self._held += text
        out: list[str | ToolCall] = []
        while True:
            mark = CLOSE if self._inside else OPEN
            before, seen, after = self._held.partition(mark)
            if not seen:
                break
            self._held = after
            piece = self._call(before) if self._inside else before
            if piece:
                out.append(piece)
            self._inside = not self._inside
        if not self._inside and (ready := self._ready()):
            out.append(self._held[:ready])
            self._held = self._held[ready:]
        return out

    def flush(self) -> list[str | ToolCall]:
        """What was held back, once the reply has ended; an unclosed call counts if it is complete."""
        rest, self._held = self._held, ""
        if not rest:
            return []
        return [self._call(rest) if self._inside else rest]

    def _ready(self) -> int:
        """How much of the held text cannot be the beginning of a mark."""
        for size in range(min(len(OPEN) - 1, len(self._held)), 0, -1):
            if OPEN.startswith(self._held[-size:]):
                return len(self._held) - size
        return len(self._held)

    def _call(self, body: str) -> str | ToolCall:
        try:
            call = json.loads(body)
            name, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"{OPEN}{body}{CLOSE}"
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        self.found += 1
        return ToolCall(f"call_{uuid.uuid4().hex[:24]}", str(name), text)
