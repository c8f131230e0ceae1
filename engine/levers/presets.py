"""Presets: named sets of lever values, one JSON file each in the user's configuration directory."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.levers.resolve import find
from engine.levers.spec import LeverError, Value

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class PresetError(LeverError):
    """A preset that cannot be read or written; one sentence."""


@dataclass(frozen=True, slots=True)
class Difference:
    name: str
    left: Value
    right: Value


class Presets:
    """The presets of one directory; it is made when the first one is saved."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def names(self) -> list[str]:
        return sorted(path.stem for path in self._directory.glob("*.json"))

    def load(self, name: str) -> dict[str, Value]:
        """The values of a preset, each checked. Raises `PresetError` or `LeverError`."""
        path = self._path(name)
        try:
            data = json.loads(path.read_text())
        except FileNotFoundError:
            known = ", ".join(self.names()) or "none"
            raise PresetError(f"There is no preset {name!r}; saved are: {known}.") from None
        except (OSError, ValueError) as error:
            raise PresetError(f"The preset {path} cannot be read: {error}.") from None
        if not isinstance(data, dict):
            raise PresetError(f"The preset {path} must hold one JSON object of lever names and values.")
        return {find(key).name: find(key).parse(value) for key, value in data.items()}

    def save(self, name: str, values: Mapping[str, Value]) -> Path:
        """Write a preset, replacing one of that name as a whole or not at all."""
        path = self._path(name)
        scratch = path.with_suffix(".new")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            scratch.write_text(json.dumps(dict(sorted(values.items())), indent=2) + "\n")
            os.replace(scratch, path)
        except OSError as error:
            raise PresetError(f"The preset {path} cannot be written: {error.strerror}.") from None
        return path

    def delete(self, name: str) -> None:
        try:
            self._path(name).unlink()
        except FileNotFoundError:
            raise PresetError(f"There is no preset {name!r}.") from None

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise PresetError(f"A preset cannot be called {name[:80]!r}: use letters, digits, '-' and '_'.")
        return self._directory / f"{name}.json"


def difference(left: Mapping[str, Value], right: Mapping[str, Value]) -> list[Difference]:
    """Levers that both sides name and that differ."""
    return [
        Difference(name, left[name], right[name])
        for name in sorted(left.keys() & right.keys())
        if left[name] != right[name]
    ]
