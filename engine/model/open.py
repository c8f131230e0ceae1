"""Opens a model file as a device: picks the backend, sizes the cache, names the machine."""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
from pathlib import Path

import torch

from engine.core.device import Device
from engine.model.backend import Backend, BackendRequest, BackendUnavailable, Progress
from engine.model.heads import open_heads
from engine.model.load import open_source
from engine.model.torch_device import TorchDevice

BLOCK_SIZE = 16
MAX_ROWS = 4096

_BACKENDS = {
    "cuda": "engine.model.cuda_backend",
    "native": "engine.model.native_backend",
    "reference": "engine.model.reference",
}
"""Name and module of each backend, best first; a module exposes `open_backend(request)`."""


def open_device(
    path: Path | str,
    *,
    kv_tokens: int | None = None,
    max_batch_size: int = 8,
    dtype: str = "auto",
    backend: str = "auto",
    threads: int | None = None,
    swap_gb: float = 4.0,
    heads: bool = True,
    progress: Progress | None = None,
) -> Device:
    """Load a GGUF file or a Hugging Face directory.

    `kv_tokens` None sizes the pool from free memory; `backend` is `auto`, `cuda`, `native` or `reference`; `dtype` is
    `auto`, `float32` or `bfloat16`; `threads` None takes every core; without `heads` no draft head is loaded.
    Raises `ModelFileError` for an unusable file, `BackendUnavailable` for a named backend that cannot run here.
    """
    path = Path(path)
    source = open_source(path)
    config = source.config
    source.close()
    count = threads or usable_cores()
    torch.set_num_threads(count)
    request = BackendRequest(path, config, kv_tokens, BLOCK_SIZE, max_batch_size, MAX_ROWS, dtype, count, progress)
    opened = open_backend(backend, request)
    found = open_heads(opened) if heads else []
    device = TorchDevice(
        opened, name=device_name(opened, count), max_rows=MAX_ROWS, spill_bytes=int(swap_gb * (1 << 30)), heads=found
    )
    _return_freed_memory()
    return device


def _return_freed_memory() -> None:
    """What loading used and freed goes back to the system, 61 MB with the default model; only glibc keeps it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def open_backend(name: str, request: BackendRequest) -> Backend:
    """The named backend, or with `auto` the first that can run here."""
    if name != "auto":
        if name not in _BACKENDS:
            *most, last = _BACKENDS
            raise BackendUnavailable(f"backend {name!r} is unknown: use auto, {', '.join(most)} or {last}")
        return _open(name, request)
    reasons = []
    gpu = torch.cuda.is_available()
    for candidate in (name for name in _BACKENDS if name != ("native" if gpu else "cuda")):
        try:
            return _open(candidate, request)
        except BackendUnavailable as error:
            reasons.append(str(error))
    raise BackendUnavailable("; ".join(reasons))


def _open(name: str, request: BackendRequest) -> Backend:
    module = importlib.import_module(_BACKENDS[name])
    opener = getattr(module, "open_backend", None)
    if opener is None:
        raise BackendUnavailable(f"the {name} backend is not part of this build: use reference")
    backend: Backend = opener(request)
    return backend


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def device_name(backend: Backend, threads: int) -> str:
    """Human-readable machine, e.g. `CPU, 2 threads, AVX512`."""
    if backend.device.type == "cuda":
        return torch.cuda.get_device_name(backend.device)
    capability = torch.backends.cpu.get_cpu_capability()
    known = capability if capability not in ("DEFAULT", "NO AVX") else platform.machine()
    return f"CPU, {threads} thread{'s' if threads != 1 else ''}, {known}"
