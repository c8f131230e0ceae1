"""A plain file beside the database that takes every record within a flush interval and survives `kill -9`.

A transaction costs DuckDB some milliseconds, too much for four a second beside an engine on two cores; appending the
encoded records costs microseconds. What is in the journal and not yet in the database is put there at the next open.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from telemetry.batch import Batch, BatchError, decode, encode

_FRAME = struct.Struct("<4sQII")
_MAGIC = b"MTRJ"
MOST_BYTES = 64 * 1024 * 1024


def path_of(database: Path) -> Path:
    return database.with_name(database.name + ".journal")


class Journal:
    """Frames of records, numbered; the database knows the number of the last one that it has."""

    def __init__(self, database: Path) -> None:
        self._path = path_of(database)
        self._file: IO[bytes] | None = None

    @property
    def is_full(self) -> bool:
        """The database is far behind; what comes now is safe only when it gets there."""
        return self._file is not None and self._file.tell() > MOST_BYTES

    def append(self, number: int, batches: list[Batch]) -> None:
        """Raises `OSError`."""
        if self._file is None:
            self._file = self._path.open("wb", buffering=0)
        payload = encode(batches)
        end = self._file.tell()
        frame = _FRAME.pack(_MAGIC, number, len(payload), zlib.crc32(payload)) + payload
        if self._file.write(frame) != len(frame):
            self._file.truncate(end)
            self._file.seek(end)
            raise OSError("the journal was written in part only")

    def clear(self) -> None:
        """Everything is in the database. Raises `OSError`."""
        if self._file is not None:
            self._file.seek(0)
            self._file.truncate(0)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._path.unlink(missing_ok=True)


def read(database: Path, after: int) -> Iterator[list[Batch]]:
    """The batches of an owner that did not close which were not committed; ends at the first damaged frame."""
    try:
        data = path_of(database).read_bytes()
    except OSError:
        return
    at = 0
    while at + _FRAME.size <= len(data):
        magic, number, length, checksum = _FRAME.unpack_from(data, at)
        payload = data[at + _FRAME.size : at + _FRAME.size + length]
        if magic != _MAGIC or len(payload) != length or zlib.crc32(payload) != checksum:
            return
        at += _FRAME.size + length
        if number > after:
            try:
                yield decode(payload)
            except BatchError:
                return
