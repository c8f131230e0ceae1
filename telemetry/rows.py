"""Pure encoders from batches and records to Arrow columns, one function per table; no database, no clock."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa
from msgspec.structs import astuple

from telemetry.batch import Array, Batch
from telemetry.names import DELIVERED
from telemetry.record import (
    HealthRecord,
    LeverRecord,
    LoadRecord,
    RequestRecord,
    RungRecord,
    RunRecord,
    ShadowRecord,
    TokenRecord,
)
from telemetry.schema import GATE_CODES, GATE_REASONS, K_CODES, K_REASONS, LANE_CODES, LANES, OTHER

Number = Callable[[str], int]
"""The number of a request id within the file."""
BatchNumber = Callable[[tuple[str, ...]], int]
"""The number of a set of requests that ran together."""

PLAIN_ARM = "plain"
_LONGEST_US = 2**32 - 1
_TIMESTAMP = pa.timestamp("us")
_STEP_NUMBERS = (
    "step_id", "tick", "width", "rows", "prefill_tokens", "drafted", "accepted", "bonus", "emitted", "k", "kv_used",
    "kv_total", "depth", "draft_us", "device_us", "commit_us", "cached_tokens",
)  # fmt: skip
_SHARE_NUMBERS = ("drafted", "accepted", "emitted", "prefill_tokens")


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

    def __init__(self, run: int, batch: Batch, offset_us: int, number: BatchNumber) -> None:
        steps = batch.table("steps")
        self.ints = steps
        self.lane = codes(batch.words, LANE_CODES)[steps["lane"]]
        k_reason = codes(batch.words, K_CODES)[steps["k_reason"]]
        start_us = steps["start_ns"] // 1000
        self.dur_us = (steps["end_ns"] // 1000 - start_us).clip(0, _LONGEST_US).astype(np.uint32)
        self.start_us = start_us + offset_us
        self.drafted_at, self.accepted_at = (batch.table(name)["count"] for name in ("drafted_at", "accepted_at"))
        self.refusal_sets = batch.refusal_sets
        shares = batch.table("shares")
        share = pa.StructArray.from_arrays([pa.array(shares[name]) for name in _SHARE_NUMBERS], list(_SHARE_NUMBERS))
        self.table = pa.table(
            {
                "run": constant(run, len(self.lane)),
                **{name: pa.array(steps[name]) for name in _STEP_NUMBERS},
                "lane": enum(self.lane, LANES),
                "start": timestamps(self.start_us),
                "dur_us": pa.array(self.dur_us),
                "drafted_at": _lists(steps["drafted_at"], pa.array(self.drafted_at)),
                "accepted_at": _lists(steps["accepted_at"], pa.array(self.accepted_at)),
                "k_reason": enum(k_reason, K_REASONS),
                "refusals": dictionary(steps["refusals"], [refusal_text(pairs) for pairs in batch.refusal_sets]),
                "batch_no": pa.array(_batches(steps["shares"], shares["request"], batch.requests, number)),
                "shares": _lists(steps["shares"], share),
            }
        )


def _batches(lengths: Array, requests: Array, ids: Sequence[str], number: BatchNumber) -> Array:
    """The number of every step's set of requests; most steps have the set of the one before."""
    lengths = lengths.astype(np.int64)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    before = np.arange(len(requests)) - lengths[owner]
    differs = requests != requests[before.clip(0)]
    is_new = np.ones(len(lengths), np.bool_)
    is_new[1:] = lengths[1:] != lengths[:-1]
    is_new[owner[differs]] = True
    starts = np.cumsum(lengths) - lengths
    sets = (requests[starts[at] : starts[at] + lengths[at]] for at in np.flatnonzero(is_new))
    numbers = np.array([number(tuple(ids[request] for request in chosen)) for chosen in sets], np.uint32)
    found: Array = numbers[np.cumsum(is_new) - 1]
    return found


GateState = tuple[str, str, str]
"""Mode, arm and reason: one stretch of the gate's timeline while they stay the same."""


def last_gate_state(batch: Batch) -> GateState:
    """Of a batch that has decisions."""
    gates = batch.table("gates")
    mode, arm, reason = (batch.words[gates[name][-1]] for name in ("mode", "arm", "reason"))
    return mode, arm, reason


def gates(run: int, batch: Batch, offset_us: int, before: GateState | None) -> pa.Table:
    """`before`: the state of the decision before these; a row that differs from its last is a change."""
    gates, arms = batch.table("gates"), batch.table("arms")
    lengths, speed, deviation = gates["arms"], arms["tokens_per_s"], arms["deviation"]
    plain, spec = _best_arms(arms["name"], batch.words, speed, lengths)
    arm = pa.StructArray.from_arrays(
        [
            dictionary(arms["name"], batch.words), pa.array(speed, mask=speed < 0),
            pa.array(deviation, mask=deviation < 0), pa.array(arms["age"]), pa.array(arms["stale"] != 0),
        ],
        ["name", "tokens_per_s", "deviation", "age", "stale"],
    )  # fmt: skip
    return pa.table(
        {
            "run": constant(run, len(lengths)),
            **{name: pa.array(gates[name]) for name in _GATE_NUMBERS},
            "time": timestamps(gates["time_ns"] // 1000 + offset_us),
            "mode": dictionary(gates["mode"], batch.words),
            "arm": dictionary(gates["arm"], batch.words),
            "reason": enum(codes(batch.words, GATE_CODES)[gates["reason"]], GATE_REASONS),
            "arms": _lists(lengths, arm),
            "pinned": pa.array(gates["pinned"] != 0),
            "plain_tokens_per_s": pa.array(plain, mask=plain < 0),
            "spec_tokens_per_s": pa.array(spec, mask=spec < 0),
            "is_change": pa.array(_changes(batch, before)),
        }
    )


_GATE_NUMBERS = ("step_id", "margin", "losses", "depth", "width_bucket", "tokens_until_probe")


def _changes(batch: Batch, before: GateState | None) -> Array:
    """Where mode, arm or reason differ from the decision before."""
    gates = batch.table("gates")
    changed = np.zeros(len(gates["mode"]), np.bool_)
    for name in ("mode", "arm", "reason"):
        changed[1:] |= gates[name][1:] != gates[name][:-1]
    changed[0] = before != tuple(batch.words[gates[name][0]] for name in ("mode", "arm", "reason"))
    return changed


def _best_arms(names: Array, words: Sequence[str], speed: Array, lengths: Array) -> tuple[Array, Array]:
    """Speed of the plain arm and of the fastest one that speculates, per decision; -1 where it is not known."""
    decision = np.repeat(np.arange(len(lengths)), lengths)
    is_plain = np.array([word == PLAIN_ARM for word in words], np.bool_)[names]
    speculates = np.array([word not in (PLAIN_ARM, DELIVERED) for word in words], np.bool_)[names]
    plain, spec = np.full((2, len(lengths)), -1, np.float32)
    plain[decision[is_plain]] = speed[is_plain]
    np.maximum.at(spec, decision[speculates], speed[speculates])
    return plain, spec


def requests(run: int, run_id: str, records: Sequence[RequestRecord], offset_us: int, number: Number) -> pa.Table:
    fields = dict(zip(RequestRecord.__struct_fields__, zip(*map(astuple, records), strict=True), strict=True))
    traces, spans = zip(*(request_ids(run_id, record) for record in records), strict=True)
    ns = {name: np.array(fields[f"{name}_ns"], np.int64) for name in _MOMENTS}
    more = np.array(fields["output_tokens"], np.int64) - 1
    columns: dict[str, Any] = {
        **{name: fields[name] for name in _REQUEST_SCHEMA.names if name in fields},
        "run": np.full(len(records), run, np.int32),
        "request_no": list(map(number, fields["request_id"])),
        "trace_id": traces,
        "span_id": spans,
        **_phases_ms(ns, more),
    }
    arrays = {name: pa.array(values, _REQUEST_SCHEMA.field(name).type) for name, values in columns.items()}
    for name, times in ns.items():
        never = (times == 0) & (name not in ("arrived", "finished"))
        arrays[name] = pa.array((times // 1000 + offset_us).astype("datetime64[us]"), mask=never)
    return pa.table([arrays[name] for name in _REQUEST_SCHEMA.names], _REQUEST_SCHEMA)


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


def _phases_ms(ns: dict[str, Array], more: Array) -> dict[str, pa.Array]:
    """Milliseconds by phase; null for a phase that the request never finished or entered. `more`: tokens but one."""
    arrived, admitted, finished, first = (ns[name] for name in ("arrived", "admitted", "finished", "first_token"))
    prefilled = np.where(ns["prefill_end"] != 0, ns["prefill_end"], first)

    def lasted(start: Array, end: Array, known: Array | bool) -> pa.Array:
        return pa.array((end - start) / 1e6, mask=np.broadcast_to(np.logical_not(known), start.shape))

    return {
        "queue_ms": lasted(arrived, np.where(admitted != 0, admitted, finished), True),
        "prefill_ms": lasted(admitted, np.where(prefilled != 0, prefilled, finished), admitted != 0),
        "decode_ms": lasted(prefilled, finished, prefilled != 0),
        "total_ms": lasted(arrived, finished, True),
        "ttft_ms": lasted(arrived, first, first != 0),
        "tpot_ms": pa.array((finished - first) / 1e6 / np.maximum(more, 1), mask=(first == 0) | (more < 1)),
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


def dictionary(index: Array, known: Sequence[str]) -> pa.Array:
    """A column of text that repeats itself, as places in a list of words."""
    return pa.DictionaryArray.from_arrays(pa.array(index.astype(np.int32)), pa.array(known, pa.string()))


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


def _lists(lengths: Array, values: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)), values)
