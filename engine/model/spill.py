"""Where spilled sequences wait: host memory first, then files that vanish with the process, within one budget."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

_DISK_RESERVE_BYTES = 1 << 30
"""Never fill the last GiB of a disk with spilled KV."""


class SpillStore:
    """Keeps one bundle of tensors per sequence, byte for byte; `limit_bytes` bounds memory and disk together."""

    def __init__(
        self, limit_bytes: int, memory_bytes: int | None = None, disk_reserve_bytes: int = _DISK_RESERVE_BYTES
    ) -> None:
        """At most `memory_bytes` of the limit stay in memory (None: half), the rest goes to disk; 0 keeps nothing."""
        self._free = limit_bytes
        self._memory_free = limit_bytes // 2 if memory_bytes is None else memory_bytes
        self._reserve = disk_reserve_bytes
        self._memory: dict[int, tuple[int, Any]] = {}
        self._files: dict[int, tuple[int, Path]] = {}
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def put(self, seq: int, bundle: dict[str, Any]) -> bool:
        """Keep `bundle` (tensors, numbers, lists and dicts of them) for `seq`; False when there is no room."""
        self.drop(seq)
        nbytes = _nbytes(bundle)
        if nbytes > self._free:
            return False
        if nbytes <= self._memory_free:
            self._memory_free -= nbytes
            self._memory[seq] = (nbytes, bundle)
        elif not self._write(seq, bundle, nbytes):
            return False
        self._free -= nbytes
        return True

    def take(self, seq: int) -> dict[str, Any]:
        """Return and forget the bundle of `seq`. Raises `KeyError` where nothing was put."""
        if seq in self._memory:
            nbytes, bundle = self._memory.pop(seq)
            self._free += nbytes
            self._memory_free += nbytes
            return dict(bundle)
        nbytes, path = self._files.pop(seq)
        self._free += nbytes
        try:
            return dict(torch.load(path, weights_only=True))
        finally:
            path.unlink(missing_ok=True)

    def drop(self, seq: int) -> None:
        """Forget the bundle of `seq`, if any."""
        if seq in self._memory:
            nbytes, _ = self._memory.pop(seq)
            self._free += nbytes
            self._memory_free += nbytes
        if seq in self._files:
            nbytes, path = self._files.pop(seq)
            self._free += nbytes
            path.unlink(missing_ok=True)

    def close(self) -> None:
        self._memory.clear()
        self._files.clear()
        if self._directory is not None:
            self._directory.cleanup()

    def _write(self, seq: int, bundle: dict[str, Any], nbytes: int) -> bool:
        if self._directory is None:
            self._directory = tempfile.TemporaryDirectory(prefix="metrale-spill-")
        directory = Path(self._directory.name)
        if shutil.disk_usage(directory).free - nbytes < self._reserve:
            return False
        path = directory / f"{seq}.pt"
        try:
            torch.save(bundle, path)
        except (OSError, RuntimeError):
            path.unlink(missing_ok=True)
            return False
        self._files[seq] = (nbytes, path)
        return True


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(_nbytes(item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(_nbytes(item) for item in value)
    return 8
