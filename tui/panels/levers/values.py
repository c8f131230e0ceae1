"""Lever values as people read, type and step them."""

from __future__ import annotations

from engine.levers.catalog import LEVERS
from engine.levers.spec import Value
from engine.protocol.wire import LeverView


def show_value(lever: LeverView, value: Value) -> str:
    if lever.kind == "bool":
        return "on" if value else "off"
    if lever.none_word and value == -1:
        return lever.none_word
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{text} {lever.unit}" if lever.unit else text


def parse_value(lever: LeverView, typed: str) -> Value:
    """The value that was typed for `lever`. Raises `LeverError` with the range."""
    known = LEVERS.get(lever.name)
    if known is not None:
        return known.parse(typed)
    if lever.kind == "int":
        return int(typed)
    return float(typed) if lever.kind == "float" else typed


def stepped(lever: LeverView, by: int) -> Value | None:
    """The neighbouring value: the other switch position, the next choice, a step of sensible size."""
    if lever.kind == "bool":
        return not lever.value
    if lever.kind == "choice" and lever.choices:
        at = lever.choices.index(str(lever.value)) if lever.value in lever.choices else 0
        return lever.choices[(at + by) % len(lever.choices)]
    low = lever.minimum if lever.minimum is not None else float("-inf")
    high = lever.maximum if lever.maximum is not None else float("inf")
    if lever.kind == "int":
        value = int(lever.value)
        step = max(1, 10 ** (len(str(abs(value))) - 2)) if value > 20 else 1
        return int(max(low, min(high, value + by * step)))
    if lever.kind == "float":
        step_f = 0.05 if high <= 1 else 0.5
        return round(max(low, min(high, float(lever.value) + by * step_f)), 6)
    return None
