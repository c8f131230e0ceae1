"""Where a lever's value came from and what it is now; the only reader of the environment for levers.

Precedence: default < preset < environment < flag < operator. `LeverState` belongs to the tick thread:
values change in `apply`, which the plan of a tick calls and nothing else does.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from engine.levers.catalog import LEVERS, parse_ladder
from engine.levers.spec import Lever, LeverError, Value, unknown_lever


class Source(StrEnum):
    DEFAULT = "default"
    PRESET = "preset"
    ENVIRONMENT = "environment"
    FLAG = "flag"
    OPERATOR = "operator"


def find(name: str) -> Lever:
    """The lever called `name`. Raises `LeverError` with the nearest name."""
    lever = LEVERS.get(name.strip().lower().replace("-", "_"))
    if lever is None:
        raise unknown_lever(name, LEVERS)
    return lever


def resolve(
    flags: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
    preset: Mapping[str, object] | None = None,
) -> tuple[dict[str, Value], dict[str, Source]]:
    """Start-up values of all levers and where each came from. Raises `LeverError`, naming the variable."""
    values: dict[str, Value] = {name: lever.default for name, lever in LEVERS.items()}
    sources = dict.fromkeys(LEVERS, Source.DEFAULT)
    layers: list[tuple[Source, dict[str, object]]] = [
        (Source.PRESET, dict(preset or {})),
        (Source.ENVIRONMENT, _from_environment(environment or {})),
        (Source.FLAG, dict(flags or {})),
    ]
    for source, layer in layers:
        for name, raw in layer.items():
            lever = find(name)
            values[lever.name] = lever.parse(raw)
            sources[lever.name] = source
    return values, sources


def _from_environment(environment: Mapping[str, str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, lever in LEVERS.items():
        raw = environment.get(lever.env)
        if raw is None:
            continue
        if name == "mtp_gate" and raw.strip() in ("0", "1"):
            raw = "force" if raw.strip() == "1" else "auto"
        try:
            found[name] = lever.parse(raw)
        except LeverError as error:
            raise LeverError(f"{lever.env}: {error}") from None
    return found


class LeverState:
    """The live values, read by attribute-like getters on the tick thread."""

    def __init__(self, values: Mapping[str, Value], sources: Mapping[str, Source] | None = None) -> None:
        self._values = dict(values)
        self.sources = dict(sources or dict.fromkeys(values, Source.DEFAULT))
        self.version = 0
        """Raised by one with every change, so that a stale write can be told."""
        self.ladder = parse_ladder(str(self._values["k_ladder"]))
        self.trace_level = self.int("trace_level")

    @classmethod
    def of(cls, **overrides: object) -> LeverState:
        """The defaults with some values set, for tests and in-process use."""
        return cls(*resolve(flags=overrides))

    def flag(self, name: str) -> bool:
        return self._values[name] is True

    def int(self, name: str) -> int:
        return int(self._values[name])

    def float(self, name: str) -> float:
        return float(self._values[name])

    def text(self, name: str) -> str:
        return str(self._values[name])

    def get(self, name: str) -> Value:
        return self._values[name]

    def snapshot(self) -> dict[str, Value]:
        return dict(self._values)

    def apply(self, name: str, value: Value) -> Value:
        """Set an already parsed value and return the old one."""
        old = self._values[name]
        self._values[name] = value
        self.sources[name] = Source.OPERATOR
        self.version += 1
        if name == "k_ladder":
            self.ladder = parse_ladder(str(value))
        elif name == "trace_level":
            self.trace_level = int(value)
        return old
