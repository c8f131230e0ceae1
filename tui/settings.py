"""How this chat asks: sampling, limits and speculation, as `/set` changes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.protocol.commands import CHAT_SAMPLING, Limits, Sampling
from tui.actions import SETTINGS

_INT = {"top_k", "max_tokens", "logprobs"}
_BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0, 5),
    "top_k": (0, 1_000_000),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 10),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "max_tokens": (0, 10_000_000),
    "logprobs": (-1, 20),
}


class SettingError(ValueError):
    """A sampling setting that cannot be taken; the message has the range."""


@dataclass(frozen=True, slots=True)
class Settings:
    sampling: Sampling = CHAT_SAMPLING
    limits: Limits = field(default_factory=Limits)
    speculate: bool = True

    def summary(self) -> str:
        seed = f" seed {self.sampling.seed}" if self.sampling.seed is not None else ""
        off = "" if self.speculate else " no speculation"
        return f"temp {self.sampling.temperature:g}{seed}{off}"

    def value(self, name: str) -> object:
        if name == "speculate":
            return self.speculate
        return self.limits.max_tokens if name == "max_tokens" else getattr(self.sampling, name)

    def with_value(self, name: str, typed: str) -> Settings:
        """These settings with one changed. Raises `SettingError`."""
        if name == "speculate":
            if typed not in ("on", "off"):
                raise SettingError(f"speculate cannot be {typed!r}: it takes on or off.")
            return Settings(self.sampling, self.limits, typed == "on")
        value = _parse(name, typed)
        if name == "max_tokens":
            return Settings(self.sampling, msgspec.structs.replace(self.limits, max_tokens=value), self.speculate)
        return Settings(msgspec.structs.replace(self.sampling, **{name: value}), self.limits, self.speculate)


def _parse(name: str, typed: str) -> Any:
    if name == "seed":
        if typed in ("none", "") or typed.isdigit():
            return int(typed) if typed.isdigit() else None
        raise SettingError(f"seed cannot be {typed!r}: it takes a number from 0, or none.")
    low, high = _BOUNDS[name]
    try:
        value = int(typed) if name in _INT else float(typed)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise SettingError(f"{name} cannot be {typed!r}: it takes {low:g} to {high:g} ({SETTINGS[name]}).")
    return value
