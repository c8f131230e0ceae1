"""A tiny file beside the database that survives `kill -9`: how many records were received, and when last.

It is written, not mapped: on a full disk or a file that became read-only a store into a mapping ends the process.
"""

from __future__ import annotations

import contextlib
import os
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
    """Written at every put, for about a microsecond; where that fails it does nothing."""

    def __init__(self, database: Path, session: int) -> None:
        self._path = path_of(database)
        self._session = session
        self._file: int | None = None
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        except OSError:
            return
        self.write(0, session)
        self.safe(session)

    def write(self, accepted: int, time_us: int) -> None:
        """Records were received."""
        self._put(_RECEIVED.pack(_MAGIC, self._session, accepted, time_us), 0)

    def safe(self, time_us: int) -> None:
        """What was received up to `time_us` will be there after a kill."""
        self._put(_SAFE.pack(time_us), _RECEIVED.size)

    def close(self) -> None:
        """The owner ended in order: nothing is missing, so the file goes."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _put(self, data: bytes, at: int) -> None:
        if self._file is not None:
            try:
                os.pwrite(self._file, data, at)
            except OSError:
                pass  # the journal and the database meet the same trouble, and say it
