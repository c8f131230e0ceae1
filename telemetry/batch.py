"""The records of one flush as columns: packed beside the tick thread, sent, kept in the journal, put into the database.

Steps and decisions of the gate come by the thousand and are columns of numbers; what they name (words, refusals,
requests) stands once in a lookup of the batch. Every other kind is rare and stays a record. Of few records columns cost
more than they save: a loose batch holds them all as records until it is merged with others.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, groupby, islice
from operator import attrgetter
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec.structs import astuple

from telemetry.record import AnyRecord, GateRecord, RunRecord, SeqShare, StepRecord

Array = np.ndarray[Any, Any]
Pair = tuple[str, str]
Key = TypeVar("Key")

TABLES: dict[str, dict[str, str]] = {
    "steps": {
        "step_id": "q", "tick": "q", "lane": "H", "start_ns": "q", "end_ns": "q", "width": "H", "rows": "I",
        "prefill_tokens": "I", "drafted": "H", "accepted": "H", "bonus": "H", "emitted": "H", "drafted_at": "B",
        "accepted_at": "B", "k": "B", "k_reason": "H", "refusals": "H", "kv_used": "I", "kv_total": "I", "depth": "I",
        "draft_us": "I", "device_us": "I", "commit_us": "I", "cached_tokens": "I", "shares": "H",
    },
    "drafted_at": {"count": "H"},
    "accepted_at": {"count": "H"},
    "shares": {"request": "I", "drafted": "B", "accepted": "B", "emitted": "B", "prefill_tokens": "I"},
    "gates": {
        "step_id": "q", "time_ns": "q", "mode": "H", "arm": "H", "reason": "H", "arms": "B", "margin": "f",
        "losses": "B", "depth": "I", "width_bucket": "H", "tokens_until_probe": "i", "pinned": "B",
    },
    "arms": {"name": "H", "tokens_per_s": "f", "deviation": "f", "age": "i", "stale": "B"},
}  # fmt: skip
"""Columns by table, with the type codes of `array`; a list in a record is its length here and a table of its own."""

LISTS = {
    "drafted_at": ("steps", "drafted_at"), "accepted_at": ("steps", "accepted_at"), "shares": ("steps", "shares"),
    "arms": ("gates", "arms"),
}  # fmt: skip
"""Where the lengths of the parts of a table stand."""
LOOKUPS = {
    ("steps", "lane"): "words", ("steps", "k_reason"): "words", ("steps", "refusals"): "refusal_sets",
    ("shares", "request"): "requests", ("gates", "mode"): "words", ("gates", "arm"): "words",
    ("gates", "reason"): "words", ("arms", "name"): "words",
}  # fmt: skip
"""Columns that hold a place in a lookup."""
FEW = 256
"""Fewer records than these are sent loose."""
LATEST_NS = 1 << 62
"""Beyond it a time on the engine's clock is none; its sum with Unix time must stay one."""


class Batch(msgspec.Struct, array_like=True, dict=True):
    """What happened in one stretch of a run, by kind; each kind in the order in which it happened."""

    run: RunRecord | None = None
    """The record of the run that begins with this batch."""
    words: Sequence[str] = ()
    refusal_sets: Sequence[tuple[Pair, ...]] = ()
    requests: Sequence[str] = ()
    tables: dict[str, dict[str, bytes]] = {}
    """Little-endian numbers by table and column; a table without rows is left out."""
    others: list[AnyRecord] = []
    """Those of rare kinds; in a loose batch all."""
    malformed: dict[str, int] = {}
    """Records that no column can hold, by kind."""

    @cached_property
    def _read(self) -> dict[str, dict[str, Array]]:
        """Tables that somebody asked for already: of a small batch, making them costs most."""
        return {}

    def table(self, name: str) -> dict[str, Array]:
        """The columns of one of `TABLES`, [rows] each."""
        if name not in self._read:
            found = self.tables.get(name, {})
            self._read[name] = {
                column: np.frombuffer(found.get(column, b""), kind) for column, kind in _KINDS[name].items()
            }
        return self._read[name]

    @property
    def is_loose(self) -> bool:
        """Nothing in it is a column yet."""
        return not self.tables and bool(self.others)

    def rows(self, name: str) -> int:
        """Of one of `TABLES`; of a loose batch none."""
        columns = self.tables.get(name)
        if not columns:
            return 0
        column, kind = next(iter(_KINDS[name].items()))
        return len(columns.get(column, b"")) // kind.itemsize

    def __len__(self) -> int:
        """Records."""
        return self.rows("steps") + self.rows("gates") + len(self.others) + (self.run is not None)

    def kinds(self) -> Counter[str]:
        """How many records of each kind."""
        counts = Counter(type(record).__name__ for record in self.others)
        counts[RunRecord.__name__] += self.run is not None
        counts[StepRecord.__name__] += self.rows("steps")
        counts[GateRecord.__name__] += self.rows("gates")
        return +counts

    def records(self) -> Iterator[AnyRecord]:
        """The records again: run, steps, decisions, the rest."""
        if self.run is not None:
            yield self.run
        yield from self._step_records()
        yield from self.gate_records()
        yield from self.others

    def _step_records(self) -> Iterator[StepRecord]:
        drafted, accepted, requests, *numbers = (
            iter(self.table(table)[column].tolist())
            for table, column in (
                ("drafted_at", "count"), ("accepted_at", "count"), *(("shares", name) for name in TABLES["shares"]),
            )
        )  # fmt: skip
        shares = map(SeqShare, map(self.requests.__getitem__, requests), *numbers)
        for row in self._rows("steps"):
            for name in ("lane", "k_reason"):
                row[name] = self.words[row[name]]
            row["refusals"] = self.refusal_sets[row["refusals"]]
            for name, parts in (("drafted_at", drafted), ("accepted_at", accepted), ("shares", shares)):
                row[name] = tuple(islice(parts, row[name]))
            yield StepRecord(**row)

    def gate_records(self, last: int | None = None) -> Iterator[GateRecord]:
        """Decisions of the gate, or only the `last` ones."""
        lengths = self.table("gates")["arms"]
        first = 0 if last is None else max(0, len(lengths) - last)
        arms = self._rows("arms", int(lengths[:first].sum()))
        for row in self._rows("gates", first):
            for name in ("mode", "arm", "reason"):
                row[name] = self.words[row[name]]
            row["pinned"] = bool(row["pinned"])
            row["arms"] = tuple(
                (self.words[arm["name"]], arm["tokens_per_s"], arm["deviation"], arm["age"], bool(arm["stale"]))
                for arm in islice(arms, row["arms"])
            )
            yield GateRecord(**row)

    def _rows(self, name: str, first: int = 0) -> Iterator[dict[str, Any]]:
        columns = {column: values[first:].tolist() for column, values in self.table(name).items()}
        return (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))

    def halves(self) -> tuple[Batch, Batch] | None:
        """The same in two parts, the columns apart from the records; None where one kind or record is left."""
        if self.tables and self.others:
            return msgspec.structs.replace(self, others=[]), Batch(others=self.others)
        middle = len(self.others) // 2
        if not middle:
            return None
        return msgspec.structs.replace(self, others=self.others[:middle]), Batch(others=self.others[middle:])


_NUMPY = {"q": "<i8", "I": "<u4", "i": "<i4", "H": "<u2", "B": "<u1", "f": "<f4"}
_KINDS = {
    table: {column: np.dtype(_NUMPY[code]) for column, code in columns.items()} for table, columns in TABLES.items()
}


class Numbering(dict[Key, int]):
    """Numbers for what was asked for, in the order of asking."""

    def __missing__(self, key: Key) -> int:
        number = self[key] = len(self)
        return number


class _Lookups:
    """What the columns of a batch name, while it is made."""

    def __init__(self) -> None:
        self.words: Numbering[str] = Numbering()
        self.refusal_sets: Numbering[tuple[Pair, ...]] = Numbering()
        self.requests: Numbering[str] = Numbering()

    def of(self, table: str, column: str) -> Numbering[Any]:
        found: Numbering[Any] = getattr(self, LOOKUPS[table, column])
        return found

    def batch(self, tables: dict[str, dict[str, bytes]], others: list[AnyRecord], malformed: Counter[str]) -> Batch:
        return Batch(
            None, tuple(self.words), tuple(self.refusal_sets), tuple(self.requests),
            {name: columns for name, columns in tables.items() if any(columns.values())}, others, dict(malformed),
        )  # fmt: skip


def message(records: Sequence[AnyRecord]) -> bytes:
    """What the engine sends of one flush; `decode` reads it."""
    if len(records) < FEW:
        try:
            return encode([Batch(run, others=others) for run, others in _by_run(records)])
        except (OverflowError, TypeError):
            pass  # something in it cannot be sent; columns know what
    return encode(pack(records))


def pack(records: Iterable[AnyRecord]) -> list[Batch]:
    """The records as batches of columns: one, and another for every run that begins among them."""
    return [_packed(run, others) for run, others in _by_run(records)]


def _by_run(records: Iterable[AnyRecord]) -> Iterator[tuple[RunRecord | None, list[AnyRecord]]]:
    """The records of each run after the one with which it begins; nothing of nothing."""
    run: RunRecord | None = None
    waiting: list[AnyRecord] = []
    for record in records:
        if type(record) is RunRecord:
            if run is not None or waiting:
                yield run, waiting
            run, waiting = record, []
        else:
            waiting.append(record)
    if run is not None or waiting:
        yield run, waiting


def _packed(run: RunRecord | None, records: list[AnyRecord]) -> Batch:
    """Where a value fits no column, the halves are tried, down to the culprit."""
    try:
        batch = _pack(records)
    except (OverflowError, TypeError, ValueError):
        middle = len(records) // 2
        if not middle:
            batch = Batch(malformed={type(records[0]).__name__: 1})
        else:
            halves = [_packed(None, part) for part in (records[:middle], records[middle:])]
            batch = merge(halves)
            batch.malformed = dict(sum((Counter(half.malformed) for half in halves), Counter()))
    batch.run = run
    return batch


def _pack(records: list[AnyRecord]) -> Batch:
    lookups = _Lookups()
    steps = [record for record in records if type(record) is StepRecord]
    gates = [record for record in records if type(record) is GateRecord]
    others = [record for record in records if type(record) is not StepRecord and type(record) is not GateRecord]
    tables = {**_step_tables(steps, lookups), **_gate_tables(gates, lookups)}
    return lookups.batch(tables, others, Counter())


def _step_tables(steps: list[StepRecord], lookups: _Lookups) -> dict[str, dict[str, bytes]]:
    if not steps:
        return {}
    columns: dict[str, Any] = dict(
        zip(StepRecord.__struct_fields__, zip(*map(astuple, steps), strict=True), strict=True)
    )
    if min(columns["start_ns"]) < 0 or max(columns["start_ns"]) >= LATEST_NS or max(columns["end_ns"]) >= LATEST_NS:
        raise OverflowError("a time that is none")
    drafted, accepted, shares = (columns[name] for name in ("drafted_at", "accepted_at", "shares"))
    columns |= {"drafted_at": map(len, drafted), "accepted_at": map(len, accepted), "shares": map(len, shares)}
    parts = zip(*map(astuple, chain.from_iterable(shares)), strict=True)
    return {
        "steps": _columns("steps", columns, lookups),
        "drafted_at": _columns("drafted_at", {"count": chain.from_iterable(drafted)}, lookups),
        "accepted_at": _columns("accepted_at", {"count": chain.from_iterable(accepted)}, lookups),
        "shares": _columns("shares", dict(zip(TABLES["shares"], parts, strict=False)), lookups),
    }


def _gate_tables(gates: list[GateRecord], lookups: _Lookups) -> dict[str, dict[str, bytes]]:
    if not gates:
        return {}
    columns: dict[str, Any] = dict(
        zip(GateRecord.__struct_fields__, zip(*map(astuple, gates), strict=True), strict=True)
    )
    if min(columns["time_ns"]) < 0 or max(columns["time_ns"]) >= LATEST_NS:
        raise OverflowError("a time that is none")
    arms = columns["arms"]
    parts = zip(*chain.from_iterable(arms), strict=True)
    return {
        "gates": _columns("gates", {**columns, "arms": map(len, arms)}, lookups),
        "arms": _columns("arms", dict(zip(TABLES["arms"], parts, strict=False)), lookups),
    }


def _columns(table: str, values: Mapping[str, Iterable[Any]], lookups: _Lookups) -> dict[str, bytes]:
    """Raises `OverflowError` or `TypeError` for a value that its column cannot hold."""
    found = {}
    for name, code in TABLES[table].items():
        column = values.get(name, ())
        if (table, name) in LOOKUPS:
            column = map(lookups.of(table, name).__getitem__, column)
        found[name] = array(code, column).tobytes()
    return found


def merge(batches: Sequence[Batch]) -> Batch:
    """One batch of columns of all; they must belong to one run. Its `malformed` is what was found in loose ones."""
    batches, malformed = _tightened(batches)
    if len(batches) == 1:
        return msgspec.structs.replace(batches[0], malformed=dict(malformed))
    lookups = _Lookups()
    parts: dict[str, dict[str, list[bytes]]] = {name: {column: [] for column in TABLES[name]} for name in TABLES}
    for batch in batches:
        for name, columns in batch.tables.items():
            for column, data in columns.items():
                if (name, column) in LOOKUPS:
                    data = _renumbered(batch, name, column, lookups)
                parts[name][column].append(data)
    tables = {name: {column: b"".join(data) for column, data in columns.items()} for name, columns in parts.items()}
    merged = lookups.batch(tables, list(chain.from_iterable(batch.others for batch in batches)), malformed)
    merged.run = batches[0].run
    return merged


def _tightened(batches: Sequence[Batch]) -> tuple[list[Batch], Counter[str]]:
    """The batches with loose neighbours packed together, and what no column of these can hold."""
    tight, malformed = [], Counter[str]()
    for is_loose, group in groupby(batches, attrgetter("is_loose")):
        if is_loose:
            loose = list(group)
            packed = _packed(loose[0].run, list(chain.from_iterable(batch.others for batch in loose)))
            malformed.update(packed.malformed)
            tight.append(packed)
        else:
            tight += group
    return tight, malformed


def _renumbered(batch: Batch, table: str, column: str, lookups: _Lookups) -> bytes:
    """The column with the places that its values have in other lookups. Raises `OverflowError` for too many."""
    known: Sequence[Any] = getattr(batch, LOOKUPS[table, column])
    code, kind = TABLES[table][column], _KINDS[table][column]
    new = np.frombuffer(array(code, map(lookups.of(table, column).__getitem__, known)), kind)
    return bytes(new[np.frombuffer(batch.tables[table][column], kind)])


def places(lengths: Array) -> Array:
    """The place of every part within its list, from the lengths of the lists."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Batch])


class BatchError(ValueError):
    """Bytes that are no batches of records."""


def encode(batches: Sequence[Batch]) -> bytes:
    return _encoder.encode(batches)


def decode(payload: bytes) -> list[Batch]:
    """The batches of one message. Raises `BatchError`."""
    try:
        batches = _decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise BatchError(f"A batch of telemetry could not be read: {error}") from None
    if not all(map(_is_whole, batches)):
        raise BatchError("A batch of telemetry could not be read: its columns do not fit together.")
    return batches


def _is_whole(batch: Batch) -> bool:
    """Columns of a table are as long as each other, lists have all their parts, and places are in their lookups."""
    if not batch.tables:
        return True
    try:
        tables = {name: batch.table(name) for name in TABLES}
    except ValueError:
        return False
    return (
        all(len(set(map(len, columns.values()))) == 1 for columns in tables.values())
        and all(int(tables[of][name].sum()) == batch.rows(table) for table, (of, name) in LISTS.items())
        and all(
            int(tables[table][column].max(initial=0)) < len(getattr(batch, lookup))
            for (table, column), lookup in LOOKUPS.items()
            if batch.rows(table)
        )
    )
