"""Where one step of the native CPU path spends its time, by part, beside what its bytes would take at memory speed."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from engine.bench.result import BenchResult
from engine.model.backend import Backend, BackendRequest, Batch
from engine.model.load import open_source
from engine.model.native import open_backend
from engine.model.native.cores import physical_cores
from engine.model.native_backend import NativeBackend

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of step: `sequences` of `rows` rows each, all at position `start`."""

    name: str
    rows: int
    start: int
    sequences: int = 1


CASES = (
    Case("decode", 1, 128),
    Case("decode at 1,024", 1, 1024),
    Case("verify of 4", 4, 128),
    Case("verify of 8", 8, 128),
    Case("8 chats", 1, 128, 8),
    Case("prefill 512", 512, 0),
)


def profile_cpu(
    model: Path, threads: int | None = None, repeats: int = 15, progress: Callable[[str], None] = print
) -> BenchResult:
    """Median ms of every part of every kind of step; raises `BackendUnavailable` where the native path cannot run."""
    backend = _open(model, threads or physical_cores())
    result = BenchResult("cpu step profile")
    columns = {case.name: _measure(backend, case, repeats, progress) for case in CASES}
    parts = next(iter(columns.values()))
    for part in parts:
        result.rows.append({"part": part, **{name: round(column[part], 3) for name, column in columns.items()}})
    _floor(result, backend, columns["decode"]["whole step"])
    for name in ("verify of 4", "verify of 8", "8 chats"):
        result.figures[f"{name} over decode"] = columns[name]["whole step"] / columns["decode"]["whole step"]
    result.notes.append("ms on the calling thread; wait: for chunks that other threads had taken")
    backend.close()
    return result


def _open(model: Path, threads: int) -> NativeBackend:
    source = open_source(model)
    config = source.config
    source.close()
    opened: Backend = open_backend(BackendRequest(model, config, 16384, BLOCK_SIZE, 8, 1024, "auto", threads))
    if not isinstance(opened, NativeBackend):
        raise TypeError(f"{opened.name} is not the native backend")
    return opened


def _measure(backend: NativeBackend, case: Case, repeats: int, progress: Callable[[str], None]) -> dict[str, float]:
    """Median ms by part and of the whole step."""
    progress(case.name)
    batch = _batch(backend, case)
    got: list[dict[str, float]] = []
    for _ in range(repeats + 1):
        backend.profile(True)
        began = time.perf_counter()
        backend.run(batch)
        whole = time.perf_counter() - began
        got.append({**backend.part_seconds(), "whole step": whole})
    backend.profile(False)
    return {part: statistics.median(run[part] for run in got[1:]) * 1e3 for part in got[0]}


def _batch(backend: NativeBackend, case: Case) -> Batch:
    rng = np.random.default_rng(case.rows)
    count = case.rows * case.sequences
    width = -(-(case.start + case.rows) // BLOCK_SIZE)
    return Batch(
        tokens=torch.from_numpy(rng.integers(0, backend.config.vocab_size, count)),
        positions=torch.arange(case.start, case.start + case.rows).repeat(case.sequences),
        row_offsets=tuple(range(0, count + 1, case.rows)),
        starts=(case.start,) * case.sequences,
        block_tables=torch.arange(width * case.sequences, dtype=torch.int32).view(case.sequences, width),
        logit_rows=(count - 1,) if case.rows > 8 else tuple(range(count)),
        greedy=True,
    )


def _floor(result: BenchResult, backend: NativeBackend, decode_ms: float) -> None:
    """Bytes that a decode step must read over the bandwidth that its own threads reach."""
    weights = backend.weight_bytes
    rate = read_bandwidth(backend.model.shape.threads)
    result.figures["weights MB"] = weights / 1e6
    result.figures["read bandwidth GB/s"] = rate / 1e9
    result.figures["floor of a decode step ms"] = weights / rate * 1e3
    result.figures["decode over floor"] = decode_ms / (weights / rate * 1e3)


def read_bandwidth(threads: int, size: int = 256 << 20, repeats: int = 5) -> float:
    """Bytes per second of summing memory far larger than the caches on `threads` threads, the best of `repeats`."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    data = torch.ones(size // 8, dtype=torch.int64)
    best = min(_seconds(data.sum) for _ in range(repeats))
    torch.set_num_threads(before)
    return size / best


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main(arguments: Sequence[str]) -> None:
    print(profile_cpu(Path(arguments[0])).text())


if __name__ == "__main__":
    main(sys.argv[1:])
