"""The text of a reply as it becomes final: whole characters only, and never the start of a stop string.

Stop strings are searched in the text, so they are found across token borders and inside an accepted draft.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class ReplyText:
    """Folds token bytes into text; `push` returns what may be sent and `stopped` says that a stop string came."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(text for text in stop if text)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_mid_character = False
        self._held = ""
        self.stopped = False

    def push(self, data: bytes) -> str:
        text = self._decode(data)
        if not self._stop:
            return text
        self._held += text
        cut = min((at for at in (self._held.find(stop) for stop in self._stop) if at >= 0), default=-1)
        if cut >= 0:
            self.stopped = True
            final, self._held = self._held[:cut], ""
            return final
        keep = max(_overlap(self._held, stop) for stop in self._stop)
        final, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return final

    def _decode(self, data: bytes) -> str:
        """Whole characters; most tokens are ASCII, which needs no state."""
        if data.isascii() and not self._is_mid_character:
            return data.decode("ascii")
        text = self._decoder.decode(data)
        self._is_mid_character = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        """What was held back and is text after all; empty when a stop string ended the reply."""
        if self.stopped:
            return ""
        text, self._held = self._held + self._decoder.decode(b"", final=True), ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
