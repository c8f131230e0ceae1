"""A lever change as it is typed after `/set NAME`: a value, and how it may take itself back."""

from __future__ import annotations

import re
from dataclasses import dataclass

from engine.levers.spec import LeverError

_FOR = re.compile(r"\s+(?:--)?for\s+(\d+(?:\.\d+)?)\s*(s|min|m)?\b", re.IGNORECASE)
_GUARD = re.compile(r"\s+(?:--)?guard\s+(\d+(?:\.\d+)?)\s*%?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Change:
    value: str
    for_seconds: float = 0.0
    """Above 0: reverts by itself."""
    guard: float = 0.0
    """Above 0: reverts when the engine gets slower by more than this share."""


def parse_change(typed: str) -> Change:
    """`6`, `6 for 60s`, `6 guard 5%` or both. Raises `LeverError` when the guard is no share."""
    text = f" {typed}"
    lasting, guarded = _FOR.search(text), _GUARD.search(text)
    value = _GUARD.sub("", _FOR.sub("", text)).strip()
    minutes = lasting is not None and (lasting[2] or "s").startswith("m")
    share = float(guarded[1]) / 100 if guarded else 0.0
    if share >= 1:
        raise LeverError(f"A guard of {share:.0%} guards nothing: it takes a share below 100 %.")
    return Change(value, float(lasting[1]) * (60 if minutes else 1) if lasting else 0.0, share)
