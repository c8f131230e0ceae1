"""The base of plain values that every step makes anew."""

from __future__ import annotations

import msgspec


class StepValue(msgspec.Struct, frozen=True, gc=False):
    """Immutable fields without behaviour of their own. Made in 0.15 us, where a frozen dataclass of eight fields takes
    3.6 us, and a step of eight sequences makes about forty of them. Never part of a cycle, so never tracked."""
