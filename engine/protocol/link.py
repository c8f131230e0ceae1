"""Framing of the local socket between server and engine: a 4-byte length, then a msgpack list of messages."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from engine.protocol.commands import Command
from engine.protocol.events import Event

T = TypeVar("T")

MAX_FRAME_BYTES = 64 * 1024 * 1024
HEADER = struct.Struct("<I")

_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(list[Command])
_events = msgspec.msgpack.Decoder(list[Event])


class LinkError(ValueError):
    """A frame that the other side cannot have meant."""


def pack(messages: Sequence[Command | Event]) -> bytes:
    body = _encoder.encode(messages)
    return HEADER.pack(len(body)) + body


def body_length(header: bytes) -> int:
    """Length in bytes of the body that follows `header`. Raises `LinkError` above `MAX_FRAME_BYTES`."""
    (length,) = HEADER.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise LinkError(f"The link announced a frame of {length} bytes; at most {MAX_FRAME_BYTES} are allowed.")
    return int(length)


def unpack_commands(body: bytes) -> list[Command]:
    return _decode(_commands, body)


def unpack_events(body: bytes) -> list[Event]:
    return _decode(_events, body)


def _decode(decoder: msgspec.msgpack.Decoder[list[T]], body: bytes) -> list[T]:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise LinkError(f"The link carried a frame that is not a list of known messages: {error}") from None


def frames(messages: Iterable[Command | Event], limit: int = 4096) -> Iterable[bytes]:
    """Frames of at most `limit` messages each."""
    batch = list(messages)
    for start in range(0, len(batch), limit):
        yield pack(batch[start : start + limit])
