"""GGUF files as untrusted input: a bounds-checked header, raw quantised blocks, float32 on request. No torch."""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from engine.model.config import ModelConfig, ModelFileError, config_from_gguf

SUPPORTED_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
"""Tensor types that load, by their names in the GGUF specification."""

_MAX_ENTRIES = 1 << 16
_MAX_DEPTH = 3
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies and how it is stored."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    """Row-major, outermost first: a linear layer is `(out, in)`."""
    offset: int
    """Bytes from the start of the file."""
    nbytes: int


class GGUFFile:
    """An open GGUF file; the header is parsed and checked, tensor data stays on disk until asked for."""

    def __init__(self, path: Path | str) -> None:
        """Raises `ModelFileError` for anything that is not a complete file of supported tensor types."""
        self.path = Path(path)
        self._map = _map_file(self.path)
        header = _Header(self._map, self.path)
        self.metadata: dict[str, Any] = header.metadata
        self.tensors: dict[str, TensorInfo] = header.tensors

    def config(self) -> ModelConfig:
        """The decoder's shape, cross-checked against the embedding tensor."""
        config = config_from_gguf(self.metadata, self.tensors.keys(), self.path.stem)
        embedding = self.tensors.get("token_embd.weight")
        if embedding is None or embedding.shape != (config.vocab_size, config.hidden_size):
            found = "missing" if embedding is None else f"of shape {embedding.shape}"
            raise ModelFileError(
                f"{self.path.name}: the token embedding is {found} instead of "
                f"{(config.vocab_size, config.hidden_size)}: the file is damaged; fetch it again"
            )
        return config

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """Stored blocks of a tensor as a read-only view `[*outer dims, bytes per row]` on the mapped file."""
        info = self.info(name)
        flat = np.frombuffer(self._map, dtype=np.uint8, count=info.nbytes, offset=info.offset)
        return flat.reshape(*info.shape[:-1], -1)

    def dequantize(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor as a float32 array of `info(name).shape`, always a copy."""
        from gguf.quants import dequantize

        info = self.info(name)
        values = dequantize(self.raw(name), GGMLQuantizationType[info.type_name])
        return np.array(values, dtype=np.float32).reshape(info.shape)

    def info(self, name: str) -> TensorInfo:
        try:
            return self.tensors[name]
        except KeyError:
            raise ModelFileError(
                f"{self.path.name} has no tensor {name!r}: the file is incomplete; fetch it again"
            ) from None


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24:
                raise ModelFileError(f"{path} is only {size} bytes long and no GGUF file: fetch it again")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelFileError(f"{path} does not exist: check the path or pull a known model") from None
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read ({error.strerror}): check the path and its rights") from None


class _Header:
    """A cursor over the header; every read is checked against the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._at = 0
        self._size = len(data)
        self._magic()
        tensor_count = self._count("tensors")
        entries = self._count("metadata entries")
        self.metadata = self._read_metadata(entries)
        raw_infos = [self._read_tensor() for _ in range(tensor_count)]
        base = self._data_start()
        self.tensors: dict[str, TensorInfo] = {}
        for name, type_id, dims, offset in raw_infos:
            if name in self.tensors:
                raise self._damaged(f"tensor {name!r} appears twice")
            self.tensors[name] = self._place(name, type_id, dims, base + offset)

    def _magic(self) -> None:
        magic = self._take(4)
        if magic != b"GGUF":
            raise ModelFileError(f"{self._path} is no GGUF file (it starts with {magic!r}): give a .gguf file")
        version = self._number("<I")
        if version & 0xFFFF == 0:
            raise ModelFileError(f"{self._path} is big-endian, which is not supported: use a little-endian file")
        if version not in (2, 3):
            raise ModelFileError(
                f"{self._path} is GGUF version {version}, supported are 2 and 3: convert or fetch it again"
            )

    def _count(self, what: str) -> int:
        count = int(self._number("<Q"))
        if count > _MAX_ENTRIES:
            raise self._damaged(f"it claims {count} {what}, more than {_MAX_ENTRIES}")
        return count

    def _read_metadata(self, entries: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self._string()
            if key in metadata:
                raise self._damaged(f"key {key[:60]!r} appears twice")
            metadata[key] = self._value(int(self._number("<I")), 0)
        return metadata

    def _value(self, kind: int, depth: int) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or depth >= _MAX_DEPTH:
            raise self._damaged(f"metadata type {kind} at depth {depth} is unknown")
        item, length = int(self._number("<I")), int(self._number("<Q"))
        if item in _SCALARS:
            code = _SCALARS[item]
            width = struct.calcsize(code)
            return list(struct.unpack(f"<{length}{code[1]}", self._take(length * width)))
        smallest = 8 if item == _STRING else 12
        if length * smallest > self._size - self._at:
            raise self._damaged(f"an array claims {length} items, more than the file can hold")
        if item == _STRING:
            return self._strings(length)
        return [self._value(item, depth + 1) for _ in range(length)]

    def _strings(self, length: int) -> list[str]:
        """The hot loop of opening a file: a vocabulary and its merges are 100,000 to 500,000 strings."""
        data, at, size = self._data, self._at, self._size
        unpack = struct.Struct("<Q").unpack_from
        strings: list[str] = []
        for _ in range(length):
            if at + 8 > size:
                raise self._truncated()
            (count,) = unpack(data, at)
            at += 8
            if count > size - at:
                raise self._truncated()
            strings.append(data[at : at + count].decode("utf-8", "replace"))
            at += count
        self._at = at
        return strings

    def _read_tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._string()
        rank = int(self._number("<I"))
        if not 1 <= rank <= 4:
            raise self._damaged(f"tensor {name[:60]!r} has {rank} dimensions")
        dims = struct.unpack(f"<{rank}Q", self._take(rank * 8))
        return name, int(self._number("<I")), dims, int(self._number("<Q"))

    def _data_start(self) -> int:
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self._damaged(f"alignment {str(alignment)[:40]} is not a power of two")
        return -(-self._at // alignment) * alignment

    def _place(self, name: str, type_id: int, dims: tuple[int, ...], offset: int) -> TensorInfo:
        try:
            kind = GGMLQuantizationType(type_id)
        except ValueError:
            kind = None
        if kind is None or kind.name not in SUPPORTED_TYPES:
            stated = f"type number {type_id}" if kind is None else kind.name
            raise ModelFileError(
                f"{self._path.name}: tensor {name[:60]!r} is quantised as {stated}, which is not supported: "
                f"use a file of {', '.join(SUPPORTED_TYPES)}"
            )
        per_block, block_bytes = GGML_QUANT_SIZES[kind]
        elements = 1
        for dim in dims:
            elements *= dim
        if elements == 0 or dims[0] % per_block:
            raise self._damaged(f"tensor {name[:60]!r} of shape {dims} does not divide into blocks of {per_block}")
        nbytes = elements // per_block * block_bytes
        if offset + nbytes > self._size:
            raise self._truncated()
        return TensorInfo(name, kind.name, tuple(reversed(dims)), offset, nbytes)

    def _string(self) -> str:
        length = int(self._number("<Q"))
        return self._take(length).decode("utf-8", "replace")

    def _number(self, code: str) -> Any:
        return struct.unpack(code, self._take(struct.calcsize(code)))[0]

    def _take(self, count: int) -> bytes:
        if count > self._size - self._at:
            raise self._truncated()
        taken = self._data[self._at : self._at + count]
        self._at += count
        return taken

    def _truncated(self) -> ModelFileError:
        return ModelFileError(
            f"{self._path} ends before its contents do ({self._size} bytes): it is truncated; fetch it again"
        )

    def _damaged(self, why: str) -> ModelFileError:
        return ModelFileError(f"{self._path} is damaged ({why}): fetch it again")
