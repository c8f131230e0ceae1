"""Measured plain decoding by width bucket: what every speed-up is compared with."""

from __future__ import annotations

from dataclasses import dataclass

from telemetry.record import GateRecord, StepRecord

_DECAY = 0.99
"""Per step: about the last hundred plain steps count."""
_ENOUGH = 8
_EVERY = 8
_PLAIN = ("plain", "pipelined")


@dataclass(slots=True)
class _Bucket:
    tokens: float = 0.0
    ns: float = 0.0
    steps: int = 0
    gate: float | None = None
    """The gate's own estimate, used until enough steps were seen here."""


class PlainBaseline:
    """Decayed sums of plain steps; the gate's plain arm stands in where none ran yet."""

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}
        self._previous_end_ns = 0
        self._decisions = 0

    def step(self, record: StepRecord) -> float:
        """Take a decode step; returns the nanoseconds that one token of one sequence takes plainly at this width, or 0.

        A pipelined step overlaps the one before it, so only the time since that one ended counts.
        """
        bucket = self._bucket(record.width)
        if record.lane in _PLAIN and not record.prefill_tokens and record.width:
            start = max(record.start_ns, self._previous_end_ns) if record.lane == "pipelined" else record.start_ns
            bucket.tokens = bucket.tokens * _DECAY + record.emitted
            bucket.ns = bucket.ns * _DECAY + max(0, record.end_ns - start)
            bucket.steps += 1
        self._previous_end_ns = record.end_ns
        speed = _speed(bucket)
        return 1e9 * record.width / speed if speed else 0.0

    def gate(self, record: GateRecord) -> None:
        """An estimate changes once a window at most, so every eighth decision is enough to follow it."""
        self._decisions += 1
        if self._decisions % _EVERY != 1:
            return
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
        key = 1 << max(0, width - 1).bit_length()
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket()
        return bucket


def _speed(bucket: _Bucket) -> float | None:
    if bucket.steps >= _ENOUGH and bucket.ns > 0:
        return bucket.tokens / bucket.ns * 1e9
    return bucket.gate
