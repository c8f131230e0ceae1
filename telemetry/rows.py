"""Pure encoders from records to Arrow columns, one function per table; no database, no clock."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import pyarrow as pa

from telemetry.record import (
    GateRecord,
    HealthRecord,
    LeverRecord,
    LoadRecord,
    RequestRecord,
    RungRecord,
    RunRecord,
    ShadowRecord,
    StepRecord,
    TokenRecord,
)
from telemetry.schema import GATE_CODES, GATE_REASONS, K_CODES, K_REASONS, LANE_CODES, LANES, OTHER

Array = np.ndarray[Any, Any]
Number = Callable[[str], int]
"""The number of a request id within the file."""
BatchNumber = Callable[[tuple[str, ...]], int]
"""The number of a set of requests that ran together."""

PLAIN_ARM = "plain"
_TIMESTAMP = pa.timestamp("us")
_STEP_INTS: tuple[tuple[str, type], ...] = (
    ("step_id", np.int64), ("tick", np.int64), ("start_ns", np.int64), ("end_ns", np.int64), ("width", np.uint16),
    ("rows", np.uint32), ("prefill_tokens", np.uint32), ("drafted", np.uint16), ("accepted", np.uint16),
    ("bonus", np.uint16), ("emitted", np.uint16), ("k", np.uint8), ("kv_used", np.uint32), ("kv_total", np.uint32),
    ("depth", np.uint32), ("draft_us", np.uint32), ("device_us", np.uint32), ("commit_us", np.uint32),
    ("cached_tokens", np.uint32),
)  # fmt: skip
_SHARE_INTS: tuple[tuple[str, type], ...] = (
    ("drafted", np.uint8), ("accepted", np.uint8), ("emitted", np.uint8), ("prefill_tokens", np.uint32),
)  # fmt: skip
_GATE_INTS: tuple[tuple[str, type], ...] = (
    ("step_id", np.int64), ("time_ns", np.int64), ("losses", np.uint8), ("depth", np.uint32),
    ("width_bucket", np.uint16), ("tokens_until_probe", np.int32), ("pinned", np.bool_),
)  # fmt: skip
_request_of = attrgetter("request_id")
_arm_numbers = itemgetter(1, 2, 3, 4)


def trace_id_of_run(run_id: str) -> str:
    """32 hex digits, the same for the same run everywhere."""
    return hashlib.sha256(f"run/{run_id}".encode()).hexdigest()[:32]


def span_base_of_run(run_id: str) -> str:
    """The first six hex digits of every span id in the engine run's trace."""
    return hashlib.sha256(f"run/{run_id}".encode()).hexdigest()[32:38]


def derived_ids(run_id: str, request_id: str) -> tuple[str, str]:
    """(trace id, span id) of a request whose caller sent no trace."""
    digest = hashlib.sha256(f"request/{run_id}/{request_id}".encode()).hexdigest()
    return digest[:32], digest[32:48]


def request_ids(run_id: str, request: RequestRecord) -> tuple[str, str]:
    """(trace id, span id) of a request: the caller's trace where there is one, else derived."""
    trace_id, span_id = derived_ids(run_id, request.request_id)
    return request.trace_id or trace_id, span_id


def refusal_text(refusals: tuple[tuple[str, str], ...]) -> str:
    """`ngram:no_match mtp:gate`"""
    return " ".join(f"{lane}:{reason}" for lane, reason in refusals)


class StepColumns:
    """The columns of a batch of steps, as an Arrow table and as the arrays that the rollups sum."""

    def __init__(self, run: int, records: Sequence[StepRecord], offset_us: int, batch: BatchNumber) -> None:
        ints = integers(records, _STEP_INTS)
        self.ints = ints
        self.lane = codes(list(map(attrgetter("lane"), records)), LANE_CODES)
        k_reason = codes(list(map(attrgetter("k_reason"), records)), K_CODES)
        drafted_at, accepted_at, refusals, shares = (
            list(map(attrgetter(name), records)) for name in ("drafted_at", "accepted_at", "refusals", "shares")
        )
        start_us = ints["start_ns"] // 1000
        self.dur_us = (ints["end_ns"] // 1000 - start_us).clip(0).astype(np.uint32)
        self.start_us = start_us + offset_us
        self.drafted_at = _Lists(drafted_at)
        self.accepted_at = _Lists(accepted_at)
        texts: dict[tuple[tuple[str, str], ...], int] = {}
        self.refusal_code = np.array([texts.setdefault(pairs, len(texts)) for pairs in refusals], np.int32)
        self.refusal_sets = list(texts)
        self.table = pa.table(
            {
                "run": constant(run, len(records)),
                "step_id": pa.array(ints["step_id"]),
                "tick": pa.array(ints["tick"]),
                "lane": enum(self.lane, LANES),
                "start": timestamps(self.start_us),
                "dur_us": pa.array(self.dur_us),
                **{name: pa.array(ints[name]) for name in ("width", "rows", "prefill_tokens", "drafted", "accepted")},
                "bonus": pa.array(ints["bonus"]),
                "emitted": pa.array(ints["emitted"]),
                "drafted_at": self.drafted_at.arrow(),
                "accepted_at": self.accepted_at.arrow(),
                "k": pa.array(ints["k"]),
                "k_reason": enum(k_reason, K_REASONS),
                "refusals": pa.DictionaryArray.from_arrays(
                    pa.array(self.refusal_code), pa.array([refusal_text(pairs) for pairs in texts], pa.string())
                ),
                **{name: pa.array(ints[name]) for name in ("kv_used", "kv_total", "depth", "draft_us", "device_us")},
                "commit_us": pa.array(ints["commit_us"]),
                "cached_tokens": pa.array(ints["cached_tokens"]),
                "batch_no": _batches(shares, batch),
                "shares": _shares(shares),
            }
        )


class _Lists:
    """A column of short integer tuples as flat values and offsets."""

    def __init__(self, lists: Sequence[tuple[int, ...]]) -> None:
        self.lengths = np.fromiter(map(len, lists), np.int32, len(lists))
        self.values = np.fromiter(chain.from_iterable(lists), np.uint16, int(self.lengths.sum()))

    def arrow(self) -> pa.Array:
        return pa.ListArray.from_arrays(_offsets(self.lengths), pa.array(self.values))


def _batches(shares: Sequence[tuple[Any, ...]], batch: BatchNumber) -> pa.Array:
    """The number of every step's set of requests; most steps have the set of the one before."""
    ids = list(map(_request_of, chain.from_iterable(shares)))
    numbers, at, last, number = [], 0, None, 0
    for length in map(len, shares):
        part = ids[at : at + length]
        at += length
        if part != last:
            last, number = part, batch(tuple(part))
        numbers.append(number)
    return pa.array(np.array(numbers, np.uint32))


def _shares(shares: Sequence[tuple[Any, ...]]) -> pa.Array:
    lengths = np.fromiter(map(len, shares), np.int32, len(shares))
    ints = integers(list(chain.from_iterable(shares)), _SHARE_INTS)
    values = pa.StructArray.from_arrays([pa.array(values) for values in ints.values()], list(ints))
    return pa.ListArray.from_arrays(_offsets(lengths), values)


gate_state: Callable[[GateRecord], tuple[str, str, str]] = attrgetter("mode", "arm", "reason")
"""What is one stretch of the gate's timeline while it stays the same."""


def gates(run: int, records: Sequence[GateRecord], offset_us: int, before: tuple[str, str, str] | None) -> pa.Table:
    """`before`: mode, arm and reason of the decision before these; a row that differs from its last is a change."""
    lists = list(map(attrgetter("arms"), records))
    lengths = np.fromiter(map(len, lists), np.int32, len(lists))
    flat = list(chain.from_iterable(lists))
    numbers = np.fromiter(chain.from_iterable(map(_arm_numbers, flat)), np.float64, len(flat) * 4).reshape(-1, 4)
    speed, deviation = (numbers[:, at].astype(np.float32) for at in (0, 1))
    age, stale = numbers[:, 2].astype(np.int32), numbers[:, 3] != 0
    ints = integers(records, _GATE_INTS)
    names = words(list(map(itemgetter(0), flat)))
    plain, spec = _best_arms(names, speed, lengths)
    mode, arm, reason = (list(map(attrgetter(name), records)) for name in ("mode", "arm", "reason"))
    arms = pa.StructArray.from_arrays(
        [
            dictionary(names), pa.array(speed, mask=speed < 0), pa.array(deviation, mask=deviation < 0),
            pa.array(age), pa.array(stale),
        ],
        ["name", "tokens_per_s", "deviation", "age", "stale"],
    )  # fmt: skip
    return pa.table(
        {
            "run": constant(run, len(records)),
            "step_id": pa.array(ints["step_id"]),
            "time": timestamps(ints["time_ns"] // 1000 + offset_us),
            "mode": dictionary(words(mode)),
            "arm": dictionary(words(arm)),
            "reason": enum(codes(reason, GATE_CODES), GATE_REASONS),
            "arms": pa.ListArray.from_arrays(_offsets(lengths), arms),
            "margin": pa.array(column(records, "margin", np.float32)),
            "losses": pa.array(ints["losses"]),
            "depth": pa.array(ints["depth"]),
            "width_bucket": pa.array(ints["width_bucket"]),
            "tokens_until_probe": pa.array(ints["tokens_until_probe"]),
            "pinned": pa.array(ints["pinned"]),
            "plain_tokens_per_s": pa.array(plain, mask=plain < 0),
            "spec_tokens_per_s": pa.array(spec, mask=spec < 0),
            "is_change": pa.array(_changes((mode, arm, reason), before)),
        }
    )


def _changes(states: tuple[list[str], list[str], list[str]], before: tuple[str, str, str] | None) -> Array:
    """Where mode, arm or reason differ from the decision before."""
    changed = np.zeros(len(states[0]), np.bool_)
    for values in states:
        index, _ = words(values)
        changed[1:] |= index[1:] != index[:-1]
    changed[0] = before != tuple(values[0] for values in states)
    return changed


def _best_arms(names: tuple[Array, list[str]], speed: Array, lengths: Array) -> tuple[Array, Array]:
    """Speed of the plain arm and of the fastest other one, per decision; -1 where it is not known."""
    decision = np.repeat(np.arange(len(lengths)), lengths)
    index, known = names
    is_plain = np.array([name == PLAIN_ARM for name in known], np.bool_)[index]
    plain, spec = np.full((2, len(lengths)), -1, np.float32)
    plain[decision[is_plain]] = speed[is_plain]
    np.maximum.at(spec, decision[~is_plain], speed[~is_plain])
    return plain, spec


def requests(run: int, run_id: str, records: Sequence[RequestRecord], offset_us: int, number: Number) -> pa.Table:
    rows = []
    for record in records:
        trace_id, span_id = request_ids(run_id, record)
        rows.append(
            {
                "run": run, "request_no": number(record.request_id), "request_id": record.request_id,
                "operation": record.operation, "conversation_id": record.conversation_id,
                "trace_id": trace_id, "span_id": span_id, "parent_span_id": record.parent_span_id,
                "sampled": record.sampled, "reason": record.reason, "error": record.error,
                **{name: getattr(record, name) for name in _REQUEST_COUNTS},
                **_moments(record, offset_us), **phases_ms(record),
                "temperature": record.temperature, "top_p": record.top_p, "top_k": record.top_k,
                "max_tokens": record.max_tokens, "seed": record.seed, "stream": record.stream,
            }
        )  # fmt: skip
    return pa.Table.from_pylist(rows, _REQUEST_SCHEMA)


_REQUEST_COUNTS = (
    "prompt_tokens", "cached_tokens", "output_tokens", "drafted", "accepted", "prefill_chunks", "preemptions",
)  # fmt: skip
_MOMENTS = ("arrived", "admitted", "prefill_end", "first_token", "finished")
_PHASES = ("queue_ms", "prefill_ms", "decode_ms", "total_ms", "ttft_ms", "tpot_ms")
_REQUEST_SCHEMA = pa.schema(
    [("run", pa.int32()), ("request_no", pa.uint32())]
    + [(name, pa.string()) for name in ("request_id", "operation", "conversation_id", "trace_id", "span_id")]
    + [("parent_span_id", pa.string()), ("sampled", pa.bool_())]
    + [(name, _TIMESTAMP) for name in _MOMENTS]
    + [("reason", pa.string()), ("error", pa.string())]
    + [(name, pa.uint32()) for name in _REQUEST_COUNTS]
    + [(name, pa.float64()) for name in _PHASES]
    + [("temperature", pa.float32()), ("top_p", pa.float32()), ("top_k", pa.int32()), ("max_tokens", pa.int32())]
    + [("seed", pa.int64()), ("stream", pa.bool_())]
)


def _moments(record: RequestRecord, offset_us: int) -> dict[str, int | None]:
    moments = ((name, getattr(record, f"{name}_ns")) for name in _MOMENTS)
    return {name: ns // 1000 + offset_us if ns else None for name, ns in moments}


def phases_ms(record: RequestRecord) -> dict[str, float | None]:
    """Milliseconds by phase; None for a phase that the request never finished or entered."""
    arrived, finished, first = record.arrived_ns, record.finished_ns, record.first_token_ns
    admitted, prefilled = record.admitted_ns, record.prefill_end_ns or record.first_token_ns
    more = record.output_tokens - 1
    return {
        "queue_ms": ((admitted or finished) - arrived) / 1e6,
        "prefill_ms": ((prefilled or finished) - admitted) / 1e6 if admitted else None,
        "decode_ms": (finished - prefilled) / 1e6 if prefilled else None,
        "total_ms": (finished - arrived) / 1e6,
        "ttft_ms": (first - arrived) / 1e6 if first else None,
        "tpot_ms": (finished - first) / 1e6 / more if first and more > 0 else None,
    }


def request_keys(run: int, keys: Sequence[tuple[int, str]]) -> pa.Table:
    return pa.table(
        {
            "request_no": pa.array([number for number, _ in keys], pa.uint32()),
            "run": constant(run, len(keys)),
            "request_id": pa.array([request_id for _, request_id in keys], pa.string()),
        }
    )


_LINKS = pa.list_(pa.struct([("trace", pa.string()), ("span", pa.uint64())]))


def batches(run: int, sets: Sequence[tuple[int, list[int], list[tuple[str, str]]]]) -> pa.Table:
    """Sets of requests: number, numbers of the requests, (trace id, span id) of each."""
    links = [[{"trace": trace, "span": int(span, 16)} for trace, span in spans] for _, _, spans in sets]
    return pa.table(
        {
            "batch_no": pa.array([number for number, _, _ in sets], pa.uint32()),
            "run": constant(run, len(sets)),
            "requests": pa.array([requests for _, requests, _ in sets], pa.list_(pa.uint32())),
            "links": pa.array(links, _LINKS),
        }
    )


def request_lanes(run: int, records: Sequence[RequestRecord], number: Number) -> pa.Table:
    rows = [
        (number(record.request_id), lane, record.steps_by_lane.get(lane, 0), record.tokens_by_lane.get(lane, 0))
        for record in records
        for lane in dict.fromkeys((*record.steps_by_lane, *record.tokens_by_lane))
    ]
    numbers, lanes, steps, tokens = zip(*rows, strict=True) if rows else ((), (), (), ())
    return pa.table(
        {
            "run": constant(run, len(rows)),
            "request_no": pa.array(np.array(numbers, np.uint32)),
            "lane": enum(codes(lanes, LANE_CODES), LANES),
            "steps": pa.array(np.array(steps, np.uint32)),
            "tokens": pa.array(np.array(tokens, np.uint32)),
        }
    )


def tokens(run: int, records: Sequence[TokenRecord], offset_us: int, number: Number) -> pa.Table:
    return pa.table(
        {
            "run": constant(run, len(records)),
            "request_no": pa.array(np.array([number(record.request_id) for record in records], np.uint32)),
            "index": pa.array(np.array([record.index for record in records], np.uint32)),
            "time": times((record.time_ns for record in records), offset_us),
            "step_id": pa.array([record.step_id for record in records], pa.int64()),
            "token_id": pa.array([record.token_id for record in records], pa.int32()),
            "lane": enum(codes(list(map(attrgetter("lane"), records)), LANE_CODES), LANES),
            "draft": pa.array(np.array([record.draft for record in records], np.uint8)),
            "logprob": pa.array([record.logprob for record in records], pa.float32()),
        }
    )


def run_row(run: int, record: RunRecord) -> dict[str, Any]:
    """The row of a run that has just begun."""
    return {
        "run": run, "run_id": record.run_id, "state": "running", "end_reason": "",
        "started": record.unix_ns // 1000, "model": record.model, "device": record.device, "dtype": record.dtype,
        "levers": json.dumps(record.levers), "versions": json.dumps(record.versions),
        "kv_tokens": record.kv_tokens, "block_size": record.block_size,
        "clock_ns": record.clock_ns, "unix_ns": record.unix_ns,
        "trace_id": trace_id_of_run(record.run_id), "span_base": span_base_of_run(record.run_id),
    }  # fmt: skip


def lever_row(run: int, record: LeverRecord, offset_us: int) -> tuple[Any, ...]:
    old, new = (value if isinstance(value, str) else json.dumps(value) for value in (record.old, record.new))
    time = record.time_ns // 1000 + offset_us
    return (
        run, record.change_id, time, record.tick, record.name, old, new,
        record.origin, record.actor, record.reason, record.error,
    )  # fmt: skip


def load_row(run: int, record: LoadRecord, offset_us: int) -> tuple[Any, ...]:
    start = record.start_ns // 1000 + offset_us
    return run, record.stage, start, max(0, record.end_ns - record.start_ns) // 1000, record.what, record.bytes


def rung_row(run: int, record: RungRecord, offset_us: int) -> tuple[Any, ...]:
    time = record.time_ns // 1000 + offset_us
    return run, time, record.tick, record.width, record.max_width, record.speculates


def shadow_row(run: int, record: ShadowRecord, offset_us: int) -> tuple[Any, ...]:
    return run, record.step_id, record.time_ns // 1000 + offset_us, record.rows, record.differing


def health_row(run: int, record: HealthRecord, offset_us: int) -> tuple[Any, ...]:
    return (
        run, record.time_ns // 1000 + offset_us, record.tick_ns // 1000, record.recording_ns // 1000,
        record.records, record.lost, record.resident_bytes,
    )  # fmt: skip


def words(values: Sequence[str]) -> tuple[Array, list[str]]:
    """Text that repeats itself, as indices and the words that they mean."""
    known = {word: index for index, word in enumerate(dict.fromkeys(values))}
    return np.fromiter(map(known.__getitem__, values), np.int32, len(values)), list(known)


def dictionary(indexed: tuple[Array, list[str]]) -> pa.Array:
    index, known = indexed
    return pa.DictionaryArray.from_arrays(pa.array(index), pa.array(known, pa.string()))


def integers(records: Sequence[Any], fields: Sequence[tuple[str, type]]) -> dict[str, Array]:
    """Integer attributes of all records as columns; a value that its type cannot hold raises `OverflowError`."""
    read = attrgetter(*(name for name, _ in fields))
    flat = np.fromiter(chain.from_iterable(map(read, records)), np.int64, len(records) * len(fields))
    table = flat.reshape(-1, len(fields))
    return {name: _fitting(table[:, at], kind) for at, (name, kind) in enumerate(fields)}


def _fitting(values: Array, kind: type) -> Array:
    if kind not in (np.int64, np.bool_) and len(values):
        bounds = np.iinfo(kind)
        if values.min() < bounds.min or values.max() > bounds.max:
            raise OverflowError(f"a value of the batch does not fit {kind.__name__}")
    return values.astype(kind)


def column(records: Sequence[Any], name: str, dtype: type) -> Array:
    """One attribute of all records; a value that the type cannot hold raises `OverflowError`."""
    return np.fromiter(map(attrgetter(name), records), dtype, len(records))


def codes(values: Sequence[str], known: dict[str, int]) -> Array:
    """The code of every word; `other` for one that is not known."""
    return np.fromiter(map(known.get, values, repeat(known[OTHER])), np.uint8, len(values))


def spans(run: int, recorded: Sequence[tuple[Any, ...]]) -> pa.Table:
    """Spans of the SDK as `exporters.span_row` gives them."""
    columns = list(zip(*recorded, strict=True))
    arrays = [pa.array(values, kind) for values, (_, kind) in zip(columns, _SPAN_COLUMNS, strict=True)]
    return pa.table([constant(run, len(recorded)), *arrays], ["run", *(name for name, _ in _SPAN_COLUMNS)])


_SPAN_COLUMNS: tuple[tuple[str, pa.DataType], ...] = (
    *((name, pa.string()) for name in ("trace_id", "span_id", "parent_span_id", "name", "kind")),
    ("start", _TIMESTAMP), ("dur_us", pa.uint64()),
    *((name, pa.string()) for name in ("status", "attributes", "events")),
    ("links", pa.list_(pa.struct([("trace_id", pa.string()), ("span_id", pa.string())]))),
)  # fmt: skip


def metrics(run: int, samples: Sequence[tuple[Any, ...]]) -> pa.Table:
    """Samples as (Unix microseconds, name, labels, value)."""
    times_us, names, labels, values = zip(*samples, strict=True)
    return pa.table(
        {
            "run": constant(run, len(samples)),
            "time": pa.array(times_us, _TIMESTAMP),
            "name": pa.array(names, pa.string()),
            "labels": pa.array(labels, pa.string()),
            "value": pa.array(values, pa.float64()),
        }
    )


def contents(run: int, said: Sequence[tuple[Any, ...]]) -> pa.Table:
    """What was said, as (Unix microseconds, request id, prompt as JSON, reply)."""
    times_us, ids, prompts, replies = zip(*said, strict=True)
    return pa.table(
        {
            "run": constant(run, len(said)),
            "time": pa.array(times_us, _TIMESTAMP),
            "request_id": pa.array(ids, pa.string()),
            "prompt": pa.array(prompts, pa.string()),
            "reply": pa.array(replies, pa.string()),
        }
    )


def enum(array: Array, words: Sequence[str]) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(array), pa.array(words))


def constant(value: int, length: int) -> pa.Array:
    return pa.array(np.full(length, value, np.int32))


def timestamps(microseconds: Array) -> pa.Array:
    return pa.array(microseconds.astype("datetime64[us]"))


def times(nanoseconds: Iterable[int], offset_us: int) -> pa.Array:
    return timestamps(np.array([ns // 1000 for ns in nanoseconds], np.int64) + offset_us)


def _offsets(lengths: Array) -> pa.Array:
    return pa.array(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
