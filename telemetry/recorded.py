"""Records read back from the database in the order in which they happened, with the times of the engine's clock."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from telemetry.database import Connection
from telemetry.record import AnyRecord, GateRecord, LeverRecord, RequestRecord, SeqShare, StepRecord
from telemetry.recovery import context_of
from telemetry.writer import RunContext

_CHUNK = 8192
_EPOCH = datetime(1970, 1, 1)


@dataclass(frozen=True, slots=True)
class Period:
    """A stretch of a run, in microseconds of Unix time; None is open."""

    start_us: int | None = None
    end_us: int | None = None

    def where(self, column: str) -> str:
        bounds = ((">=", self.start_us), ("<", self.end_us))
        parts = (f" AND {column} {sign} make_timestamp({int(at)})" for sign, at in bounds if at is not None)
        return "".join(parts)


WHOLE = Period()


def recorded_steps(cursor: Connection, run: int, period: Period = WHOLE) -> Iterator[StepRecord]:
    """The lane steps of a run; `shares` hold what every request drafted and how long its accepted prefix was."""
    context = context_of(cursor, run)
    keys = dict(cursor.execute("SELECT request_no, request_id FROM request_keys WHERE run = ?", [run]).fetchall())
    columns = ", ".join(f"s.{name}" for name in _STEP_COLUMNS)
    sql = (
        f"SELECT {columns}, b.requests FROM lane_steps s LEFT JOIN batches b USING (batch_no)"
        f" WHERE s.run = ?{period.where('s.start')} ORDER BY s.step_id"
    )
    for row in _rows(cursor, sql, run):
        yield _step(dict(zip((*_STEP_COLUMNS, "requests"), row, strict=True)), context, keys)


_STEP_COLUMNS = (
    "step_id", "tick", "lane", "start", "dur_us", "width", "rows", "prefill_tokens", "drafted", "accepted", "bonus",
    "emitted", "drafted_at", "accepted_at", "k", "k_reason", "refusals", "kv_used", "kv_total", "depth", "draft_us",
    "device_us", "commit_us", "cached_tokens", "shares",
)  # fmt: skip


def _step(row: dict[str, Any], context: RunContext, keys: dict[int, str]) -> StepRecord:
    start_ns = clock_ns(row.pop("start"), context)
    requests = row.pop("requests") or []
    shares = tuple(
        SeqShare(keys.get(number, ""), **share) for number, share in zip(requests, row.pop("shares"), strict=True)
    )
    refusals = tuple(tuple(pair.split(":", 1)) for pair in row.pop("refusals").split())
    lists = {name: tuple(row.pop(name)) for name in ("drafted_at", "accepted_at")}
    end_ns = start_ns + row.pop("dur_us") * 1000
    return StepRecord(**row, **lists, start_ns=start_ns, end_ns=end_ns, refusals=refusals, shares=shares)  # type: ignore[arg-type]


def recorded_gates(cursor: Connection, run: int, period: Period = WHOLE) -> Iterator[GateRecord]:
    """The decisions of the gate."""
    context = context_of(cursor, run)
    sql = (
        "SELECT step_id, time, mode, arm, reason::VARCHAR, arms, margin, losses, depth, width_bucket,"
        f" tokens_until_probe, pinned FROM gate_decisions WHERE run = ?{period.where('time')} ORDER BY step_id"
    )
    for step_id, time, mode, arm, reason, arms, *rest in _rows(cursor, sql, run):
        known = tuple(
            (a["name"], _or_unknown(a["tokens_per_s"]), _or_unknown(a["deviation"]), a["age"], a["stale"]) for a in arms
        )
        yield GateRecord(step_id, clock_ns(time, context), mode, arm, reason, known, *rest)


def recorded_requests(cursor: Connection, run: int, period: Period = WHOLE) -> Iterator[RequestRecord]:
    """Requests in the order in which they ended."""
    context = context_of(cursor, run)
    lanes: dict[int, tuple[dict[str, int], dict[str, int]]] = {}
    sql = "SELECT request_no, lane::VARCHAR, tokens, steps FROM request_lanes WHERE run = ?"
    for number, lane, tokens, steps in _rows(cursor, sql, run):
        by_lane = lanes.setdefault(number, ({}, {}))
        by_lane[0][lane], by_lane[1][lane] = tokens, steps
    columns = ", ".join((*_REQUEST_COLUMNS, *_MOMENTS))
    sql = f"SELECT request_no, {columns} FROM requests WHERE run = ?{period.where('finished')} ORDER BY finished"
    for number, *row in _rows(cursor, sql, run):
        values: dict[str, Any] = dict(zip(_REQUEST_COLUMNS, row, strict=False))
        moments = zip(_MOMENTS, row[len(_REQUEST_COLUMNS) :], strict=True)
        times: dict[str, Any] = {f"{name}_ns": clock_ns(time, context) if time else 0 for name, time in moments}
        tokens, steps = lanes.get(number, ({}, {}))
        yield RequestRecord(**values, **times, tokens_by_lane=tokens, steps_by_lane=steps)


_MOMENTS = ("arrived", "admitted", "prefill_end", "first_token", "finished")
_REQUEST_COLUMNS = (
    "request_id", "operation", "conversation_id", "trace_id", "parent_span_id", "sampled", "reason", "error",
    "prompt_tokens", "cached_tokens", "output_tokens", "drafted", "accepted", "prefill_chunks", "preemptions",
    "temperature", "top_p", "top_k", "max_tokens", "seed", "stream",
)  # fmt: skip


def recorded_levers(cursor: Connection, run: int, period: Period = WHOLE) -> Iterator[LeverRecord]:
    """Changes of levers, refused ones too."""
    context = context_of(cursor, run)
    sql = (
        "SELECT change_id, time, tick, name, old, new, origin, actor, reason, error FROM lever_changes"
        f" WHERE run = ?{period.where('time')} ORDER BY time"
    )
    for change_id, time, tick, name, old, new, *rest in _rows(cursor, sql, run):
        yield LeverRecord(change_id, clock_ns(time, context), tick, name, _value(old), _value(new), *rest)


def records(cursor: Connection, run: int, period: Period = WHOLE) -> list[AnyRecord]:
    """Steps, gate decisions, requests and lever changes of a period, merged by the time at which they were made."""
    merged: list[tuple[int, AnyRecord]] = []
    merged += ((record.end_ns, record) for record in recorded_steps(cursor, run, period))
    merged += ((record.time_ns, record) for record in recorded_gates(cursor, run, period))
    merged += ((record.finished_ns, record) for record in recorded_requests(cursor, run, period))
    merged += ((record.time_ns, record) for record in recorded_levers(cursor, run, period))
    merged.sort(key=lambda pair: pair[0])
    return [record for _, record in merged]


def clock_ns(time: datetime, context: RunContext) -> int:
    """A time of the database on the engine's clock."""
    return (unix_us(time) - context.offset_us) * 1000


def unix_us(time: datetime) -> int:
    return (time - _EPOCH) // timedelta(microseconds=1)


def _rows(cursor: Connection, sql: str, run: int) -> Iterator[tuple[Any, ...]]:
    own = cursor.cursor()
    try:
        own.execute(sql, [run])
        while rows := own.fetchmany(_CHUNK):
            yield from rows
    finally:
        own.close()


def _or_unknown(value: float | None) -> float:
    return -1.0 if value is None else value


def _value(text: str) -> bool | int | float | str:
    """A lever's value as it was before it became a column of text."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, (bool, int, float, str)) else text
