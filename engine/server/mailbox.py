"""What one client still has to get: in order, merged where it lags, bounded, and never in the engine's way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterable

from engine.protocol.events import Token
from engine.protocol.wire import Delta, Done, ServerMessage

MAX_MESSAGES = 2000
MAX_TOKENS = 200_000
DELTA = "delta "

Build = Callable[[int], ServerMessage | None]
"""Makes a periodic frame when the client is ready for it, from the number of frames it did not get."""


class LaggingError(RuntimeError):
    """The client has not read for so long that its connection is given up."""


class Mailbox:
    """One reader (`next`), many writers, all on the event loop."""

    def __init__(self, spell: Callable[[int], str]) -> None:
        """`spell` gives the text of a token id."""
        self._spell = spell
        self._entries: dict[Hashable, ServerMessage | list[Token] | Build] = {}
        self._skipped: dict[Hashable, int] = {}
        self._serial = 0
        self._tokens = 0
        self._ready = asyncio.Event()
        self.overflowed = False

    def put(self, message: ServerMessage) -> None:
        """Queue a message; the deltas of a request that still wait become one."""
        if isinstance(message, Delta):
            self._merge(message.request_id, message.tokens)
            return
        self._serial += 1
        self._entries[self._serial] = message
        self._check()

    def put_due(self, kind: str, build: Build) -> None:
        """A periodic frame is due; if the last one of its kind still waits, it is counted as skipped."""
        if kind in self._entries:
            self._skipped[kind] = self._skipped.get(kind, 0) + 1
            return
        self._entries[kind] = build
        self._ready.set()

    async def next(self) -> ServerMessage:
        """The next message. Raises `LaggingError` once the client lagged beyond the bounds."""
        while True:
            if self.overflowed:
                raise LaggingError
            if message := self._pop():
                return message
            self._ready.clear()
            await self._ready.wait()

    def rest(self) -> list[ServerMessage]:
        """What waits besides deltas, their ends and periodic frames: those are sent afresh on a resumed connection."""
        return [
            entry for entry in self._entries.values() if not isinstance(entry, (list, Done)) and not callable(entry)
        ]

    def _pop(self) -> ServerMessage | None:
        while self._entries:
            key = next(iter(self._entries))
            entry = self._entries.pop(key)
            if isinstance(entry, list):
                self._tokens -= len(entry)
                return Delta(
                    request_id=str(key).removeprefix(DELTA),
                    text="".join(token.text for token in entry),
                    tokens=tuple(entry),
                    spelled={token: self._spell(token) for token in _bare_ids(entry)},
                )
            if not callable(entry):
                return entry
            if message := entry(self._skipped.pop(key, 0)):
                return message
        return None

    def _merge(self, request_id: str, tokens: tuple[Token, ...]) -> None:
        entry = self._entries.setdefault(DELTA + request_id, [])
        if isinstance(entry, list):
            entry.extend(tokens)
        self._tokens += len(tokens)
        self._check()

    def _check(self) -> None:
        self.overflowed = self.overflowed or len(self._entries) > MAX_MESSAGES or self._tokens > MAX_TOKENS
        self._ready.set()


def _bare_ids(tokens: Iterable[Token]) -> set[int]:
    """Ids that come without their text."""
    return {number for token in tokens for number in (*token.rejected, *(number for number, _ in token.top))}
