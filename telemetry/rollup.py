"""Sums of a batch by second, lane and so on: the small tables that keep the named views fast."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa

from telemetry.batch import Array, Batch, places
from telemetry.rows import StepColumns, codes, constant, dictionary, enum, timestamps
from telemetry.schema import GATE_CODES, GATE_REASONS, LANES

_SECOND = 1_000_000
_SUMS = (
    "rows", "prefill_tokens", "cached_tokens", "drafted", "accepted", "bonus", "emitted",
    "draft_us", "device_us", "commit_us",
)  # fmt: skip
_BUCKETS_PER_OCTAVE = 8


def width_bucket(width: int) -> int:
    """The next power of two, as the gate counts widths."""
    return 1 << max(0, width - 1).bit_length()


def steps(run: int, batch: StepColumns) -> pa.Table:
    second = batch.start_us // _SECOND
    octave = _octaves(batch.ints["width"])
    keys, inverse = _group(second, batch.lane, octave)
    count = len(keys[0])
    sums = {name: _sum(inverse, batch.ints[name], count) for name in _SUMS}
    return pa.table(
        {
            "run": constant(run, count),
            "second": timestamps(keys[0] * _SECOND),
            "lane": enum(keys[1].astype(np.uint8), LANES),
            "width_bucket": pa.array((1 << keys[2]).astype(np.uint16)),
            "steps": pa.array(np.bincount(inverse, minlength=count).astype(np.uint32)),
            "width_sum": pa.array(_sum(inverse, batch.ints["width"], count)),
            **{name: pa.array(sums[name]) for name in _SUMS[:7]},
            "busy_us": pa.array(_sum(inverse, batch.dur_us, count)),
            **{name: pa.array(sums[name]) for name in _SUMS[7:]},
            **{
                f"{name}{suffix}": pa.array(_max(inverse, batch.ints[name], count))
                for name, suffix in (("kv_used", "_max"), ("kv_total", ""), ("depth", "_max"))
            },
        }
    )


def positions(run: int, batch: StepColumns) -> pa.Table:
    """Only steps that drafted; the accepted list may be shorter than the drafted one."""
    drafted = _by_position(batch, batch.ints["drafted_at"], batch.drafted_at)
    accepted = _by_position(batch, batch.ints["accepted_at"], batch.accepted_at)
    keys = list(dict.fromkeys((*drafted, *accepted)))
    second, lane, position = (np.array(column, np.int64) for column in (zip(*keys, strict=True) if keys else ((),) * 3))
    return pa.table(
        {
            "run": constant(run, len(keys)),
            "second": timestamps(second * _SECOND),
            "lane": enum(lane.astype(np.uint8), LANES),
            "position": pa.array(position.astype(np.uint8)),
            "drafted": pa.array(np.array([drafted.get(key, 0) for key in keys], np.uint64)),
            "accepted": pa.array(np.array([accepted.get(key, 0) for key in keys], np.uint64)),
        }
    )


def _by_position(batch: StepColumns, lengths: Array, values: Array) -> dict[tuple[int, ...], int]:
    if not len(values):
        return {}
    second = np.repeat(batch.start_us // _SECOND, lengths)
    keys, inverse = _group(second, np.repeat(batch.lane, lengths), places(lengths) + 1)
    sums = _sum(inverse, values, len(keys[0]))
    return {key: int(total) for *key_parts, total in zip(*keys, sums, strict=True) if (key := tuple(key_parts))}


def refusals(run: int, batch: StepColumns) -> pa.Table:
    second = batch.start_us // _SECOND
    keys, inverse = _group(second, batch.lane, batch.ints["refusals"])
    counts = np.bincount(inverse, minlength=len(keys[0]))
    rows = [
        (int(at), int(taken), lane, reason, int(steps))
        for at, taken, code, steps in zip(*keys, counts, strict=True)
        for lane, reason in batch.refusal_sets[int(code)]
    ]
    at, taken, lanes, reasons, number = zip(*rows, strict=True) if rows else ((), (), (), (), ())
    return pa.table(
        {
            "run": constant(run, len(rows)),
            "second": timestamps(np.array(at, np.int64) * _SECOND),
            "taken": enum(np.array(taken, np.uint8), LANES),
            "lane": pa.array(lanes, pa.string()),
            "reason": pa.array(reasons, pa.string()),
            "steps": pa.array(np.array(number, np.uint32)),
        }
    )


def step_times(run: int, batch: StepColumns) -> pa.Table:
    bucket = (np.log2(np.maximum(batch.dur_us, 1)) * _BUCKETS_PER_OCTAVE).astype(np.int64)
    keys, inverse = _group(batch.start_us // (60 * _SECOND), batch.lane, bucket)
    return pa.table(
        {
            "run": constant(run, len(keys[0])),
            "minute": timestamps(keys[0] * 60 * _SECOND),
            "lane": enum(keys[1].astype(np.uint8), LANES),
            "bucket": pa.array(keys[2].astype(np.uint16)),
            "steps": pa.array(np.bincount(inverse, minlength=len(keys[0])).astype(np.uint32)),
        }
    )


def gates(run: int, batch: Batch, offset_us: int) -> pa.Table:
    gates = batch.table("gates")
    second = (gates["time_ns"] // 1000 + offset_us) // _SECOND
    keys, inverse = _group(second, gates["mode"], gates["arm"], gates["reason"])
    return pa.table(
        {
            "run": constant(run, len(keys[0])),
            "second": timestamps(keys[0] * _SECOND),
            "mode": dictionary(keys[1], batch.words),
            "arm": dictionary(keys[2], batch.words),
            "reason": enum(codes(batch.words, GATE_CODES)[keys[3]], GATE_REASONS),
            "decisions": pa.array(np.bincount(inverse, minlength=len(keys[0])).astype(np.uint32)),
        }
    )


def _octaves(widths: Array) -> Array:
    return np.ceil(np.log2(np.maximum(widths, 1))).astype(np.int64)


def _group(*columns: Array) -> tuple[list[Array], Array]:
    """The distinct combinations of the columns, and the index of its combination for every row."""
    lows = [int(column.min()) for column in columns]
    key = np.zeros(len(columns[0]), np.int64)
    spans = []
    for column, low in zip(columns, lows, strict=True):
        spans.append(int(column.max()) - low + 1)
        key = key * spans[-1] + (column.astype(np.int64) - low)
    if math.prod(spans) >= 2**62:
        raise OverflowError("the times or values of one batch lie too far apart to be grouped")
    distinct, inverse = np.unique(key, return_inverse=True)
    parts: list[Array] = []
    for span, low in zip(reversed(spans), reversed(lows), strict=True):
        parts.append(distinct % span + low)
        distinct = distinct // span
    return parts[::-1], inverse


def _sum(inverse: Array, values: Array, groups: int) -> Array:
    # float64 sums are exact below 2**53, far above any batch
    return np.bincount(inverse, weights=values, minlength=groups).astype(np.uint64)


def _max(inverse: Array, values: Array, groups: int) -> Array:
    result = np.zeros(groups, np.uint32)
    np.maximum.at(result, inverse, values)
    return result
