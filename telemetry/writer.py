"""Turns batches of records into one committed transaction: run context, request numbers, inserts by table."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import duckdb
import pyarrow as pa

from telemetry import rollup, rows
from telemetry.batch import Batch, merge
from telemetry.migrations import Connection, scalar
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

_KEYS_KEPT = 16_384
_MERGED = 65_536
"""Records that are encoded together: enough to make the cost of an insert small, few enough to keep memory small."""


@dataclass(slots=True)
class RunContext:
    """What the rows of a run need to know."""

    run: int
    record: RunRecord
    offset_us: int
    """Unix time minus the engine's clock."""


@dataclass(slots=True)
class Flush:
    """What one transaction takes into the database."""

    batches: list[Batch]
    rows: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    """Ready rows of the small tables, without the run number."""
    losses: dict[str, int] = field(default_factory=dict)
    queued: int = 0
    seq: int = 0
    """Number of the last chunk in it."""

    @property
    def records(self) -> int:
        return sum(map(len, self.batches))

    def halves(self) -> tuple[Flush, Flush] | None:
        """The same in two parts; None where it cannot be parted any more."""
        if len(self.batches) > 1:
            middle = len(self.batches) // 2
            return self._parted(self.batches[:middle], self.batches[middle:])
        if self.batches and self.rows:
            return self._parted(self.batches, [])
        if self.batches:
            parts = self.batches[0].halves()
            return self._parted([parts[0]], [parts[1]]) if parts else None
        middle = len(self.rows) // 2
        if not middle:
            return None
        rest = Flush([], self.rows[middle:], self.losses, self.queued, self.seq)
        return Flush([], self.rows[:middle], seq=self.seq), rest

    def _parted(self, first: list[Batch], rest: list[Batch]) -> tuple[Flush, Flush]:
        return Flush(first, seq=self.seq), Flush(rest, self.rows, self.losses, self.queued, self.seq)

    def kinds(self) -> dict[str, int]:
        """What is in it, by kind."""
        kinds = Counter(name for name, _ in self.rows)
        for batch in self.batches:
            kinds += batch.kinds()
        return dict(kinds) or {"losses": 1}


_TIME_COLUMNS = {
    "lever_changes": {2}, "loads": {2}, "rungs": {1}, "shadow_checks": {2}, "health": {1},
    "losses": {1}, "flushes": {3},
}  # fmt: skip
_COLUMN_ENCODERS = {"spans_recorded": rows.spans, "metrics": rows.metrics, "contents": rows.contents}
_ROW_ENCODERS: dict[type, tuple[str, Callable[[int, Any, int], tuple[Any, ...]]]] = {
    LeverRecord: ("lever_changes", rows.lever_row),
    LoadRecord: ("loads", rows.load_row),
    RungRecord: ("rungs", rows.rung_row),
    ShadowRecord: ("shadow_checks", rows.shadow_row),
    HealthRecord: ("health", rows.health_row),
}


class Writer:
    """Owns what must survive from one transaction to the next; a failed one leaves it as it was."""

    def __init__(self, connection: Connection, session: int, previous: RunContext | None = None) -> None:
        self._connection = connection
        self.session = session
        self._next_run = _next(connection, "run", "runs")
        self._next_request = _next(connection, "request_no", "request_keys")
        self._next_seq = _next(connection, "seq", "flushes")
        self._next_batch = _next(connection, "batch_no", "batches")
        self._keys: dict[str, int] = {}
        self._batches: dict[tuple[str, ...], int] = {}
        self._added_batches: list[tuple[str, ...]] = []
        self._added_keys: list[str] = []
        self.context: RunContext | None = None
        self._resume = previous
        self._gate_state: rows.GateState | None = None
        self.announced: dict[str, str] = {}
        """Trace ids of callers, by request; the owner fills it."""
        self.malformed: dict[str, int] = {}

    def commit(self, flush: Flush, now_us: int) -> None:
        """Write all of it or nothing. Raises `duckdb.Error`."""
        counters = self._next_run, self._next_request, self._next_batch
        saved = self.context, self._keys, self._batches, self._gate_state
        self._added_keys, self._added_batches = [], []
        self.malformed = {}
        begun = time.perf_counter()
        self._connection.execute("BEGIN")
        try:
            self._write(flush, now_us, begun)
            self._connection.execute("COMMIT")
        except BaseException:
            self._next_run, self._next_request, self._next_batch = counters
            self.context, self._keys, self._batches, self._gate_state = saved
            self._forget_added()
            try:
                self._connection.execute("ROLLBACK")
            except duckdb.Error:
                pass  # the failed commit has ended the transaction already
            raise
        self._resume = None
        self._next_seq = max(self._next_seq, flush.seq + 1)
        self._forget_keys()

    @property
    def next_seq(self) -> int:
        """Above every chunk number that the file has."""
        return self._next_seq

    def adopt(self, context: RunContext) -> None:
        """Go on with a run that the file already has."""
        self.context = context
        self._resume = None
        known = self._connection.execute(
            "SELECT request_id, request_no FROM request_keys WHERE run = ? ORDER BY request_no", [context.run]
        ).fetchall()
        self._keys = {request_id: int(number) for request_id, number in known[-_KEYS_KEPT:]}

    def end_run(self, reason: str, now_us: int) -> None:
        """State that the run ended in order."""
        if self.context is not None:
            self._end(self.context.run, "ended", reason, now_us)
            self.context = None

    def _end(self, run: int, state: str, reason: str, now_us: int) -> None:
        self._connection.execute(
            "UPDATE runs SET state = ?, end_reason = ?, ended = make_timestamp(?), heartbeat = make_timestamp(?),"
            " gap_ms = 0, missing = 0, records = (SELECT coalesce(sum(records), 0) FROM flushes WHERE run = ?),"
            " last_record = (SELECT max(start + to_microseconds(dur_us)) FROM lane_steps WHERE run = ?) WHERE run = ?",
            [state, reason, now_us, now_us, run, run, run],
        )

    def _write(self, flush: Flush, now_us: int, begun: float) -> None:
        if self._resume is not None:
            self._take_up(self._resume.record, now_us)
        encoded = 0.0
        for batch in _merged(flush.batches):
            self._count_malformed(batch.malformed)
            if batch.run is not None:
                self._begin(batch.run, now_us)
            elif self.context is None:
                self._begin(_nameless(batch, now_us), now_us)
            first_key, first_batch = len(self._added_keys), len(self._added_batches)
            encoded += self._write_batch(batch)
            self._insert_keys(self._added_keys[first_key:], self._added_batches[first_batch:])
        run = self.context.run if self.context else 0
        self._insert_columns(run, flush.rows)
        losses = {**flush.losses, **self.malformed}
        self._insert_rows([("losses", (run, now_us, kind, lost)) for kind, lost in losses.items()])
        write_us = int((time.perf_counter() - begun - encoded) * 1e6)
        row = (run, self.session, flush.seq, now_us, flush.records, flush.queued, int(encoded * 1e6))
        self._insert_rows([("flushes", (*row, write_us))])

    def _take_up(self, record: RunRecord, now_us: int) -> None:
        """The run that was being recorded when the file went out of reach, in this file or in another one."""
        run = scalar(self._connection, "SELECT max(run) FROM runs WHERE run_id = ?", [record.run_id])
        if run is None:
            self._begin(record, now_us)
            return
        self.adopt(RunContext(run, record, (record.unix_ns - record.clock_ns) // 1000))
        self._connection.execute(
            "UPDATE runs SET state = 'running', missing = NULL, gap_ms = NULL WHERE run = ?", [run]
        )

    def _begin(self, record: RunRecord, now_us: int) -> None:
        if self.context is not None:
            self._end(self.context.run, "ended", "replaced by a new run", now_us)
        run = self._next_run
        self._next_run += 1
        row = rows.run_row(run, record)
        places = ", ".join("make_timestamp(?)" if name == "started" else "?" for name in row)
        self._connection.execute(f"INSERT INTO runs ({', '.join(row)}) VALUES ({places})", list(row.values()))
        self.context = RunContext(run, record, (record.unix_ns - record.clock_ns) // 1000)
        self._keys, self._batches = {}, {}

    def _write_batch(self, batch: Batch) -> float:
        """Insert the records of one run; returns the seconds spent on encoding them."""
        context = self.context
        if context is None:
            raise RuntimeError("records were written before a run was begun")
        kinds: defaultdict[type, list[Any]] = defaultdict(list)
        for record in batch.others:
            kinds[type(record)].append(record)
        begun = time.perf_counter()
        tables = [*self._steps(batch, context), *self._gates(batch, context)]
        for kind, group in kinds.items():
            tables += self._encode(kind, group, context)
        encoded = time.perf_counter() - begun
        for name, table in tables:
            self._insert(name, table)
        return encoded

    def _steps(self, batch: Batch, context: RunContext) -> list[tuple[str, pa.Table]]:
        if not batch.rows("steps"):
            return []
        run, steps = context.run, rows.StepColumns(context.run, batch, context.offset_us, self._batch)
        return [
            ("lane_steps", steps.table),
            ("step_rollup", rollup.steps(run, steps)),
            ("position_rollup", rollup.positions(run, steps)),
            ("refusal_rollup", rollup.refusals(run, steps)),
            ("step_time_rollup", rollup.step_times(run, steps)),
        ]

    def _gates(self, batch: Batch, context: RunContext) -> list[tuple[str, pa.Table]]:
        if not batch.rows("gates"):
            return []
        decisions = rows.gates(context.run, batch, context.offset_us, self._gate_state)
        self._gate_state = rows.last_gate_state(batch)
        return [("gate_decisions", decisions), ("gate_rollup", rollup.gates(context.run, batch, context.offset_us))]

    def _encode(self, kind: type, group: list[Any], context: RunContext) -> list[tuple[str, pa.Table]]:
        """Columns of one rare kind; a record that no column can hold is counted, the others are kept."""
        try:
            return self._columns(kind, group, context)
        except (OverflowError, ValueError, TypeError, pa.ArrowException):
            if len(group) == 1:
                self._count_malformed({kind.__name__: 1})
                return []
            middle = len(group) // 2
            return self._encode(kind, group[:middle], context) + self._encode(kind, group[middle:], context)

    def _count_malformed(self, kinds: Mapping[str, int]) -> None:
        for kind, count in kinds.items():
            name = f"malformed {kind}"
            self.malformed[name] = self.malformed.get(name, 0) + count

    def _columns(self, kind: type, group: list[Any], context: RunContext) -> list[tuple[str, pa.Table]]:
        run, offset = context.run, context.offset_us
        if kind is RequestRecord:
            table = rows.requests(run, context.record.run_id, group, offset, self._number)
            return [("requests", table), ("request_lanes", rows.request_lanes(run, group, self._number))]
        if kind is TokenRecord:
            return [("tokens", rows.tokens(run, group, offset, self._number))]
        name, encoder = _ROW_ENCODERS[kind]
        self._insert_rows([(name, encoder(run, record, offset)) for record in group])
        return []

    def _number(self, request_id: str) -> int:
        known = self._keys.get(request_id)
        if known is not None:
            return known
        number = self._keys[request_id] = self._next_request
        self._next_request += 1
        self._added_keys.append(request_id)
        return number

    def _batch(self, ids: tuple[str, ...]) -> int:
        known = self._batches.get(ids)
        if known is not None:
            return known
        for request_id in ids:
            self._number(request_id)
        number = self._batches[ids] = self._next_batch
        self._next_batch += 1
        self._added_batches.append(ids)
        return number

    def _insert_keys(self, ids: list[str], batches: list[tuple[str, ...]]) -> None:
        """The numbers that were given out while the records of one run were encoded."""
        if self.context is None:
            return
        run, run_id = self.context.run, self.context.record.run_id
        if ids:
            self._insert("request_keys", rows.request_keys(run, [(self._keys[key], key) for key in ids]))
        if batches:
            sets = [
                (self._batches[batch], [self._keys[key] for key in batch], [self._span(run_id, key) for key in batch])
                for batch in batches
            ]
            self._insert("batches", rows.batches(run, sets))

    def _span(self, run_id: str, request_id: str) -> tuple[str, str]:
        """(trace id, span id): the caller's trace where it was announced."""
        trace_id, span_id = rows.derived_ids(run_id, request_id)
        return self.announced.get(request_id, trace_id), span_id

    def _forget_added(self) -> None:
        for request_id in self._added_keys:
            self._keys.pop(request_id, None)
        for batch in self._added_batches:
            self._batches.pop(batch, None)

    def _forget_keys(self) -> None:
        """Numbers of long ended requests; a dictionary keeps the order in which they came."""
        for request_id in list(self._keys)[: max(0, len(self._keys) - _KEYS_KEPT)]:
            del self._keys[request_id]
        if len(self._batches) > _KEYS_KEPT:
            self._batches.clear()

    def _insert(self, name: str, table: pa.Table) -> None:
        if table.num_rows:
            self._connection.register("arriving", table)
            try:
                self._connection.execute(f"INSERT INTO {name} BY NAME SELECT * FROM arriving")
            finally:
                self._connection.unregister("arriving")

    def _insert_columns(self, run: int, named: Iterable[tuple[str, tuple[Any, ...]]]) -> None:
        groups: defaultdict[str, list[tuple[Any, ...]]] = defaultdict(list)
        for name, row in named:
            groups[name].append(row)
        for name, group in groups.items():
            self._insert(name, _COLUMN_ENCODERS[name](run, group))

    def _insert_rows(self, named: Iterable[tuple[str, tuple[Any, ...]]]) -> None:
        groups: defaultdict[str, list[tuple[Any, ...]]] = defaultdict(list)
        for name, row in named:
            groups[name].append(row)
        for name, group in groups.items():
            at = _TIME_COLUMNS[name]
            places = ", ".join("make_timestamp(?)" if i in at else "?" for i in range(len(group[0])))
            values = ", ".join(f"({places})" for _ in group)
            self._connection.execute(f"INSERT INTO {name} VALUES {values}", [value for row in group for value in row])


def _merged(batches: list[Batch]) -> Iterator[Batch]:
    """Few batches of many records, each of one run."""
    waiting: list[Batch] = []
    records = 0
    for batch in batches:
        if waiting and (batch.run is not None or records >= _MERGED):
            yield merge(waiting)
            waiting, records = [], 0
        waiting.append(batch)
        records += len(batch)
    if waiting:
        yield merge(waiting)


def _nameless(batch: Batch, now_us: int) -> RunRecord:
    """A run whose first record was lost: its clock is set so that the newest record happens now."""
    names = ("time_ns", "finished_ns", "end_ns")
    rare = max((getattr(record, name, 0) for record in batch.others for name in names), default=0)
    columns = (batch.table("steps")["end_ns"], batch.table("gates")["time_ns"])
    newest = max(rare, *(int(times.max(initial=0)) for times in columns))
    return RunRecord(
        run_id=f"unknown-{now_us}", clock_ns=newest, unix_ns=now_us * 1000,
        model="", device="", dtype="", levers={}, versions={},
    )  # fmt: skip


def _next(connection: Connection, column: str, table: str) -> int:
    return int(scalar(connection, f"SELECT coalesce(max({column}), 0) + 1 FROM {table}"))
