"""Measured plain decoding by width bucket: what every speed-up is compared with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from telemetry.batch import Array, Batch
from telemetry.record import GateRecord

_DECAY = 0.99
"""Per step: about the last hundred plain steps count."""
_ENOUGH = 8
_PIPELINED = "pipelined"
_PLAIN = ("plain", _PIPELINED)


@dataclass(slots=True)
class _Bucket:
    tokens: float = 0.0
    ns: float = 0.0
    steps: int = 0
    gate: float | None = None
    """The gate's own estimate, used until enough steps were seen here."""

    def take(self, tokens: Array, ns: Array) -> None:
        """Plain steps, oldest first."""
        weights = _DECAY ** np.arange(len(tokens) - 1, -1, -1)
        decay = _DECAY ** len(tokens)
        self.tokens = self.tokens * decay + float((weights * tokens).sum())
        self.ns = self.ns * decay + float((weights * ns).sum())
        self.steps += len(tokens)


class PlainBaseline:
    """Decayed sums of plain steps; the gate's plain arm stands in where none ran yet."""

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}
        self._previous_end_ns = 0

    def steps(self, batch: Batch, decoded: Array) -> Array:
        """Take the steps of a batch, of which those `decoded` are a mask.

        Returns [steps] the nanoseconds that one token of one sequence takes plainly at that width; 0 where that is
        unknown. A pipelined step overlaps the one before it, so only the time since that one ended counts.
        """
        steps = batch.table("steps")
        width, end, start = (steps[name].astype(np.int64) for name in ("width", "end_ns", "start_ns"))
        at = np.flatnonzero(decoded)
        before = np.concatenate(([self._previous_end_ns], end[at]))
        self._previous_end_ns = int(before[-1])
        lane = steps["lane"][at]
        overlaps = np.array([word == _PIPELINED for word in batch.words], np.bool_)[lane]
        spent = (end[at] - np.where(overlaps, np.maximum(start[at], before[:-1]), start[at])).clip(0)
        is_plain = np.array([word in _PLAIN for word in batch.words], np.bool_)[lane]
        is_plain &= (steps["prefill_tokens"][at] == 0) & (width[at] > 0)
        bucket_of = width_buckets(width)
        plain_ns = np.zeros(len(width))
        for key in np.unique(bucket_of[at]).tolist():
            bucket = self._bucket(key)
            mine = bucket_of[at] == key
            bucket.take(steps["emitted"][at][mine & is_plain], spent[mine & is_plain])
            speed = _speed(bucket)
            if speed:
                plain_ns[at[mine]] = 1e9 * width[at[mine]] / speed
        return plain_ns

    def gate(self, record: GateRecord) -> None:
        """Take the gate's own estimate of plain decoding."""
        for name, speed, *_ in record.arms:
            if name == "plain" and speed > 0:
                self._bucket(record.width_bucket).gate = speed

    def tokens_per_s(self, width: int) -> float | None:
        """Plain tokens per second of the whole batch at this width; None while unmeasured."""
        return _speed(self._bucket(width))

    def by_width(self) -> dict[int, float]:
        """Every measured width bucket."""
        speeds = ((width, _speed(bucket)) for width, bucket in sorted(self._buckets.items()))
        return {width: speed for width, speed in speeds if speed}

    def _bucket(self, width: int) -> _Bucket:
        key = int(width_buckets(np.array([width]))[0])
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket()
        return bucket


def width_buckets(widths: Array) -> Array:
    """The next power of two, as the gate counts widths."""
    return 1 << np.ceil(np.log2(np.maximum(widths, 1))).astype(np.int64)


def _speed(bucket: _Bucket) -> float | None:
    if bucket.steps >= _ENOUGH and bucket.ns > 0:
        return bucket.tokens / bucket.ns * 1e9
    return bucket.gate
