"""How much of a prompt may ride on a decode step before those who are chatting feel it.

With `mixed_slice_tokens` at `auto` the fused chunk is as long as keeps the step within `STRETCH` times a plain
decode step, from measured costs: time between tokens stays bounded, and a long prompt pays for it with its own time.
"""

from __future__ import annotations

from dataclasses import dataclass

STRETCH = 2.2
"""The bar is 3 (p99); the rest is for the jitter of the machine and for rows that grow dearer with the context."""
LEAST_SLICE = 4
FIRST_SLICE = 32
WEIGHT = 0.25


@dataclass(slots=True)
class Pacer:
    """Costs as exponentially weighted means; 0 while unmeasured."""

    decode_ns: float = 0.0
    """A step that only decodes one token per sequence, at the present width."""
    row_ns: float = 0.0
    """What one more prompt row adds."""
    width: int = 0

    def note_decode(self, wall_ns: int, width: int) -> None:
        if width != self.width:
            self.decode_ns, self.width = float(wall_ns), width
        else:
            self.decode_ns += WEIGHT * (wall_ns - self.decode_ns)

    def note_prefill(self, wall_ns: int, rows: int, decoding: int) -> None:
        """Take in a step that fed `rows` prompt rows beside `decoding` decode rows."""
        base = self.decode_ns if decoding else 0.0
        if rows and wall_ns > base:
            per_row = (wall_ns - base) / rows
            self.row_ns = per_row if not self.row_ns else self.row_ns + WEIGHT * (per_row - self.row_ns)

    def slice(self, cap: int) -> int:
        """Prompt rows that the next mixed step may carry, at most `cap`."""
        if not self.row_ns or not self.decode_ns:
            return min(FIRST_SLICE, cap)
        rows = int((STRETCH - 1) * self.decode_ns / self.row_ns)
        return min(max(rows, LEAST_SLICE), cap)
