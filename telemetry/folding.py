"""Sums of one batch for the live view: by lane and by request, in a fixed number of passes over its columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from telemetry.batch import Array, Batch, places
from telemetry.live import LaneTotals


def lane_totals(batch: Batch) -> dict[str, LaneTotals]:
    """What every lane did in this batch."""
    steps = batch.table("steps")
    lane, size = steps["lane"], len(batch.words)
    spent = steps["end_ns"] - steps["start_ns"]
    sums = [
        np.bincount(lane, weights=values, minlength=size).astype(np.int64).tolist()
        for values in (None, steps["emitted"], steps["prefill_tokens"], spent, steps["drafted"], steps["accepted"])
    ]
    drafted, accepted = (_positions(batch, name, lane) for name in ("drafted_at", "accepted_at"))
    rows = list(zip(*sums, drafted, accepted, strict=True))
    return {batch.words[code]: LaneTotals(*rows[code]) for code in np.unique(lane).tolist()}


def _positions(batch: Batch, name: str, lane: Array) -> list[list[int]]:
    """Sums by lane and draft position; the lists of lanes without drafts are empty."""
    lengths, counts = batch.table("steps")[name], batch.table(name)["count"]
    if not len(counts):
        return [[] for _ in batch.words]
    longest = int(lengths.max())
    cell = np.repeat(lane.astype(np.int64), lengths) * longest + places(lengths)
    sums = np.bincount(cell, weights=counts, minlength=len(batch.words) * longest).astype(np.int64)
    reached = np.zeros(len(batch.words), np.int64)
    np.maximum.at(reached, lane, lengths)
    rows = sums.reshape(-1, longest)
    return [row[:end].tolist() for row, end in zip(rows, reached, strict=True)]


@dataclass(frozen=True, slots=True)
class RequestPart:
    """What one request got from the steps of a batch; times in nanoseconds of the engine's clock."""

    request_id: str
    started: int
    """Of its first step."""
    ended: int
    """Of its last step."""
    prefilled: int
    drafted: int
    accepted: int
    emitted: int
    first_token: int
    """End of the first step that emitted; 0 without one."""
    lane: str
    """Of the last step that emitted."""
    decode_ns: float
    """Steps that emitted and whose plain time is known."""
    plain_ns: float
    """What the same tokens would have taken in plain decoding."""


def request_parts(batch: Batch, plain_ns: Array) -> Iterator[RequestPart]:
    """`plain_ns`: [steps] a token of plain decoding there, 0 where that is unknown or the step did not decode."""
    steps, shares = batch.table("steps"), batch.table("shares")
    request, size = shares["request"], len(batch.requests)
    step = np.repeat(np.arange(len(plain_ns)), steps["shares"])
    emitted, end = shares["emitted"], steps["end_ns"]
    spoke = np.flatnonzero(emitted)
    known = spoke[plain_ns[step[spoke]] > 0]
    spent = (end - steps["start_ns"])[step[known]]

    def summed(values: Array, chosen: Array | slice = slice(None)) -> Array:
        return np.bincount(request[chosen], weights=values, minlength=size)

    def last(values: Array, chosen: Array) -> list[int]:
        """Of every request; of two assignments to one place the later one stays."""
        found = np.zeros(size, np.int64)
        found[request[chosen]] = values[step[chosen]]
        places: list[int] = found.tolist()
        return places

    every = np.arange(len(request))
    counts = (
        summed(shares[name]).astype(np.int64).tolist() for name in ("prefill_tokens", "drafted", "accepted", "emitted")
    )
    lanes = [batch.words[code] for code in last(steps["lane"], spoke)]
    return map(
        RequestPart, batch.requests, last(steps["start_ns"], every[::-1]), last(end, every), *counts,
        last(end, spoke[::-1]), lanes, summed(spent, known).tolist(),
        summed(plain_ns[step[known]] * emitted[known], known).tolist(),
    )  # fmt: skip
