"""What a lever is: its type, bounds and promise, with the parsing and validation that every face shares."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

Value = bool | int | float | str
"""What a lever holds. A lever that may be unset (`think_budget`) holds -1 for "none"."""


class Applies(StrEnum):
    TICK = "tick"
    """At the next tick boundary."""
    REQUEST = "request"
    """For requests admitted from now on."""
    RESTART = "restart"


class Kind(StrEnum):
    BOOL = "bool"
    INT = "int"
    FLOAT = "float"
    CHOICE = "choice"
    TEXT = "text"


class LeverError(ValueError):
    """A lever name or value that cannot be taken; the message names the range and the nearest right name."""


@dataclass(frozen=True, slots=True)
class Lever:
    """One named setting that an operator may change."""

    name: str
    env: str
    kind: Kind
    default: Value
    help: str
    group: str
    unit: str = ""
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    pattern: str = ""
    """For `TEXT`: what a value must match in full; `check` may say more."""
    check: Callable[[str], None] | None = None
    none_word: str = ""
    """The word shown and accepted for -1, e.g. `none` or `auto`."""
    applies: Applies = Applies.TICK
    lossless: bool = True

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def bounds(self) -> str:
        """The values allowed, in words that fit a sentence."""
        match self.kind:
            case Kind.BOOL:
                return "on or off"
            case Kind.CHOICE:
                return ", ".join(self.choices)
            case Kind.TEXT:
                return f"text like {self.default!r}"
            case _:
                span = f"{_number(self.minimum)} to {_number(self.maximum)}"
                unit = f" {self.unit}" if self.unit else ""
                return f"{span}{unit} or {self.none_word}" if self.none_word else span + unit

    def parse(self, raw: object) -> Value:
        """The value that `raw` (text from a flag, or a JSON value) stands for.

        Raises `LeverError` with the value and the range."""
        try:
            value = self._convert(raw)
        except (TypeError, ValueError):
            raise self._refusal(raw) from None
        self._bound(value, raw)
        return value

    def show(self, value: Value) -> str:
        if self.kind is Kind.BOOL:
            return "on" if value else "off"
        if self.none_word and value == -1:
            return self.none_word
        return f"{value:g}" if isinstance(value, float) else str(value)

    def _convert(self, raw: object) -> Value:
        text = str(raw).strip().lower() if not isinstance(raw, bool) else ""
        if self.kind is Kind.BOOL:
            return raw if isinstance(raw, bool) else _BOOLS[text] if text in _BOOLS else _raise()
        if isinstance(raw, bool):
            _raise()
        if self.none_word and text in (self.none_word, "-1"):
            return -1
        if self.kind is Kind.INT:
            number = float(text)
            return int(number) if number.is_integer() else _raise()
        if self.kind is Kind.FLOAT:
            return float(text)
        return text

    def _bound(self, value: Value, raw: object) -> None:
        if self.kind is Kind.CHOICE and value not in self.choices:
            raise self._refusal(raw, _nearest(str(value), self.choices))
        if self.kind in (Kind.INT, Kind.FLOAT) and not (self.none_word and value == -1):
            number = float(value)
            low, high = self.minimum, self.maximum
            if number != number or (low is not None and number < low) or (high is not None and number > high):
                raise self._refusal(raw)
        if self.kind is Kind.TEXT:
            if not re.fullmatch(self.pattern, str(value)):
                raise self._refusal(raw)
            if self.check is not None:
                self.check(str(value))

    def _refusal(self, raw: object, hint: str = "") -> LeverError:
        return LeverError(f"{self.name} cannot be {str(raw)[:80]!r}: it takes {self.bounds}.{hint}")


def unknown_lever(name: str, names: Iterable[str]) -> LeverError:
    hint = _nearest(name, names) or " `metrale levers list` shows them all."
    return LeverError(f"There is no lever {name[:80]!r}.{hint}")


def _nearest(word: str, words: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(words), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def _number(value: float | None) -> str:
    if value is None:
        return "any"
    return f"{int(value)}" if float(value).is_integer() else f"{value:g}"


def _raise() -> Value:
    raise ValueError


_BOOLS = {
    "on": True,
    "true": True,
    "yes": True,
    "1": True,
    "off": False,
    "false": False,
    "no": False,
    "0": False,
}
