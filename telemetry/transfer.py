"""Out to Parquet and back: one file a table, and a manifest that says which schema they have."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from telemetry.database import Connection
from telemetry.migrations import scalar
from telemetry.schema import SCHEMA_VERSION, TABLES

MANIFEST = "manifest.json"
_ROWS_AT_ONCE = 122_880
_EXPORTED = tuple(table for table in TABLES if table != "schema_version")
_NUMBERED = {"request_no": "request_keys", "batch_no": "batches"}


class TransferError(ValueError):
    """An export cannot be written, or an import cannot be read; one sentence."""


@dataclass(frozen=True, slots=True)
class Transferred:
    runs: tuple[str, ...]
    rows: dict[str, int]
    """By table."""


def export(cursor: Connection, directory: Path, run: int | None = None) -> Transferred:
    """Write every table as Parquet, of one run or of all. Raises `TransferError`."""
    chosen = _runs(cursor, run)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        rows = {table: _write(cursor, table, run, directory / f"{table}.parquet") for table in _EXPORTED}
        manifest = {"schema": SCHEMA_VERSION, "runs": chosen, "rows": rows}
        (directory / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    except OSError as error:
        raise TransferError(f"{directory} cannot be written: {error.strerror}.") from None
    return Transferred(tuple(chosen), rows)


def import_(connection: Connection, directory: Path) -> Transferred:
    """Add the runs of an export that this file does not have yet; numbers are given anew. Raises `TransferError`."""
    manifest = _manifest(directory)
    known = {run_id for (run_id,) in connection.execute("SELECT run_id FROM runs").fetchall()}
    runs = _read(directory, "runs")
    arriving = [
        (old, run_id)
        for old, run_id in zip(runs["run"].to_pylist(), runs["run_id"].to_pylist(), strict=True)
        if run_id not in known
    ]
    connection.execute("BEGIN")
    try:
        numbers = _new_numbers(connection, [old for old, _ in arriving])
        rows = {table: _add(connection, table, _read(directory, table), numbers) for table in manifest["rows"]}
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    return Transferred(tuple(run_id for _, run_id in arriving), rows)


@dataclass(frozen=True, slots=True)
class _Numbers:
    runs: pa.Table
    """old, new"""
    offsets: dict[str, int]


def _runs(cursor: Connection, run: int | None) -> list[str]:
    found = cursor.execute("SELECT run, run_id FROM runs ORDER BY run").fetchall()
    chosen = [run_id for number, run_id in found if run in (None, number)]
    if run is not None and not chosen:
        raise TransferError(f"There is no run {run} in this database: `metrale query 'FROM run_list'` lists them.")
    return chosen


def _write(cursor: Connection, table: str, run: int | None, path: Path) -> int:
    where = f" WHERE run = {int(run)}" if run is not None else ""
    reader = cursor.sql(f"SELECT * FROM {table}{where}").to_arrow_reader(_ROWS_AT_ONCE)
    rows = 0
    with pq.ParquetWriter(path, reader.schema, compression="zstd") as writer:
        for batch in reader:
            writer.write_batch(batch)
            rows += batch.num_rows
    return rows


def _manifest(directory: Path) -> dict[str, dict[str, int]]:
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        version, tables = int(manifest["schema"]), dict(manifest["rows"])
    except (OSError, ValueError, KeyError, TypeError):
        raise TransferError(f"{directory} holds no export: its {MANIFEST} is missing or damaged.") from None
    if version > SCHEMA_VERSION:
        raise TransferError(f"The export has schema {version}, this program knows up to {SCHEMA_VERSION}.")
    unknown = sorted(set(tables) - set(_EXPORTED))
    if unknown:
        raise TransferError(f"The export has a table that this program does not know: {unknown[0]}.")
    return {"rows": tables}


def _read(directory: Path, table: str) -> pa.Table:
    path = directory / f"{table}.parquet"
    try:
        return pq.read_table(path)
    except (OSError, pa.ArrowException):
        raise TransferError(f"{path} is missing or damaged.") from None


def _new_numbers(connection: Connection, old_runs: list[int]) -> _Numbers:
    first = _highest(connection, "run", "runs") + 1
    runs = pa.table(
        {"old": pa.array(old_runs, pa.int32()), "new": pa.array(range(first, first + len(old_runs)), pa.int32())}
    )
    return _Numbers(runs, {column: _highest(connection, column, table) for column, table in _NUMBERED.items()})


def _highest(connection: Connection, column: str, table: str) -> int:
    return int(scalar(connection, f"SELECT coalesce(max({column}), 0) FROM {table}"))


def _add(connection: Connection, table: str, rows: pa.Table, numbers: _Numbers) -> int:
    shifts = [
        f"{column} + {numbers.offsets[column]} AS {column}" for column in _NUMBERED if column in rows.column_names
    ]
    if table == "batches":
        shifts.append(f"list_transform(requests, lambda no: no + {numbers.offsets['request_no']}) AS requests")
    replaced = ", ".join(["numbers.new AS run", *shifts])
    connection.register("arriving", rows)
    connection.register("numbers", numbers.runs)
    try:
        added = connection.execute(
            f"INSERT INTO {table} BY NAME SELECT arriving.* REPLACE ({replaced})"
            " FROM arriving JOIN numbers ON numbers.old = arriving.run"
        ).fetchall()
    finally:
        connection.unregister("arriving")
        connection.unregister("numbers")
    return int(added[0][0]) if added else 0
