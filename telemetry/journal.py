"""A plain file beside the database that takes every record within a flush interval and survives `kill -9`.

A transaction costs DuckDB some milliseconds, too much for four a second beside an engine on two cores; appending the
encoded records costs microseconds. What is in the journal and not yet in the database is put there at the next open.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import IO, Any

import msgspec

from telemetry.batch import Batch, BatchError, decode, encode

Row = tuple[str, tuple[Any, ...]]
"""A table and a ready row of it, without the run number."""

_FRAME = struct.Struct("<4sQII")
_MAGIC = b"MTRJ"
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[bytes, list[Row]])
MOST_BYTES = 64 * 1024 * 1024
"""Of one of the two files."""


def paths_of(database: Path) -> tuple[Path, Path]:
    """The two files that take turns."""
    return database.with_name(database.name + ".journal"), database.with_name(database.name + ".journal2")


class Journal:
    """Frames of batches, numbered; the database knows the number of the last one that it has.

    There are two files: while the database takes in what one of them holds, new frames go to the other.
    """

    def __init__(self, database: Path) -> None:
        self._writing, self._resting = (_File(path) for path in paths_of(database))

    @property
    def is_full(self) -> bool:
        """The database is far behind; what comes now is safe only when it gets there."""
        return self._writing.size > MOST_BYTES

    def append(self, number: int, batches: list[Batch], rows: Sequence[Row] = ()) -> None:
        """Raises `OSError`."""
        payload = _encoder.encode((encode(batches), rows))
        self._writing.append(number, _FRAME.pack(_MAGIC, number, len(payload), zlib.crc32(payload)) + payload)

    def turn(self) -> None:
        """What was appended so far is about to be committed; what comes now goes to the other file if that is empty."""
        if self._writing.size and not self._resting.size:
            self._writing, self._resting = self._resting, self._writing

    def clear(self, through: int) -> None:
        """Frames up to this number are in the database. Raises `OSError`."""
        for file in (self._writing, self._resting):
            if file.size and file.last <= through:
                file.clear()

    def close(self) -> None:
        for file in (self._writing, self._resting):
            file.close()


class _File:
    """One of the two, made when first needed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self.size = 0
        self.last = 0
        """Number of its last frame."""

    def append(self, number: int, frame: bytes) -> None:
        if self._file is None:
            self._file = self._path.open("wb", buffering=0)
        if self._file.write(frame) != len(frame):
            self._file.truncate(self.size)
            self._file.seek(self.size)
            raise OSError("the journal was written in part only")
        self.size += len(frame)
        self.last = number

    def clear(self) -> None:
        if self._file is not None:
            self._file.seek(0)
            self._file.truncate(0)
        self.size = 0

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._path.unlink(missing_ok=True)


def read(database: Path, after: int) -> dict[int, tuple[list[Batch], list[Row]]]:
    """Batches and rows, by number and in order, of an owner that did not close, which were not committed."""
    return dict(sorted(chain.from_iterable(_frames(path, after) for path in paths_of(database))))


def _frames(path: Path, after: int) -> Iterator[tuple[int, tuple[list[Batch], list[Row]]]]:
    """Ends at the first damaged frame."""
    try:
        data = path.read_bytes()
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
                batches, rows = _decoder.decode(payload)
                yield number, (decode(batches), rows)
            except (BatchError, msgspec.DecodeError):
                return
