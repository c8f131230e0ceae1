"""A tiny mapped file beside the database that survives `kill -9`: how many records were received, and when last."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

_LAYOUT = struct.Struct("<8sqqqq")
_RECEIVED = struct.Struct("<8sqqq")
_SAFE = struct.Struct("<q")
_MAGIC = b"METRALE1"


@dataclass(frozen=True, slots=True)
class Pulse:
    session: int
    """Unix microseconds at which the owner opened the database."""
    accepted: int
    """Records put into the queue in this session."""
    time_us: int
    """Unix microseconds of the last of them."""
    journal_us: int
    """Unix microseconds up to which records were safe, in the journal or in the database."""


def path_of(database: Path) -> Path:
    return database.with_name(database.name + ".beat")


def read(database: Path) -> Pulse | None:
    """The last pulse of an owner that did not close; None where there is none."""
    try:
        magic, session, accepted, time_us, journal_us = _LAYOUT.unpack(path_of(database).read_bytes()[: _LAYOUT.size])
    except (OSError, struct.error):
        return None
    return Pulse(session, accepted, time_us, journal_us) if magic == _MAGIC else None


class Beat:
    """Written at every put, for less than a microsecond; without a file it does nothing."""

    def __init__(self, database: Path, session: int) -> None:
        self._path = path_of(database)
        self._session = session
        self._map: mmap.mmap | None = None
        try:
            with self._path.open("w+b") as file:
                file.truncate(_LAYOUT.size)
                self._map = mmap.mmap(file.fileno(), _LAYOUT.size)
        except OSError:
            return
        self.write(0, session)
        self.safe(session)

    def write(self, accepted: int, time_us: int) -> None:
        """Records were received."""
        if self._map is not None:
            _RECEIVED.pack_into(self._map, 0, _MAGIC, self._session, accepted, time_us)

    def safe(self, time_us: int) -> None:
        """What was received up to `time_us` will be there after a kill."""
        if self._map is not None:
            _SAFE.pack_into(self._map, _RECEIVED.size, time_us)

    def close(self) -> None:
        """The owner ended in order: nothing is missing, so the file goes."""
        if self._map is not None:
            self._map.close()
            self._map = None
            self._path.unlink(missing_ok=True)
