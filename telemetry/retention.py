"""Keeping the file small: rows that are too old or too many go, and a file with much free space is rewritten."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import duckdb

from telemetry.database import Connection
from telemetry.migrations import scalar

_TIME_COLUMN = {
    "lane_steps": "start", "gate_decisions": "time", "requests": "finished", "tokens": "time",
    "lever_changes": "time", "loads": "start", "rungs": "time", "shadow_checks": "time", "health": "time",
    "metrics": "time", "losses": "time", "flushes": "time", "spans_recorded": "start", "step_rollup": "second",
    "position_rollup": "second", "refusal_rollup": "second", "gate_rollup": "second", "step_time_rollup": "minute",
    "contents": "time",
}  # fmt: skip
_SHARE_PER_ROUND = 0.2
_MOST_ROUNDS = 8
_WORTH_COMPACTING_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Retention:
    """What is kept; 0 keeps everything."""

    days: float = 90.0
    bytes: int = 8 * 1024**3


@dataclass(frozen=True, slots=True)
class Size:
    file_bytes: int
    used_bytes: int


def size_of(connection: Connection) -> Size:
    """Bytes of the file, and of the blocks in it that hold something."""
    rows = connection.execute("SELECT block_size, total_blocks, used_blocks FROM pragma_database_size()").fetchall()
    block, total, used = rows[0]
    return Size(block * total, block * used)


def expire(connection: Connection, keep: Retention, now: datetime) -> int:
    """Delete what is older than `keep.days`, then the oldest until the rest fits; returns how many steps went."""
    before = _count(connection)
    if keep.days > 0:
        _delete_before(connection, now - timedelta(days=keep.days))
    for _ in range(_MOST_ROUNDS):
        if not keep.bytes or size_of(connection).used_bytes <= keep.bytes:
            break
        cutoff = _oldest(connection, _SHARE_PER_ROUND)
        if cutoff is None:
            break
        _delete_before(connection, cutoff)
        connection.execute("CHECKPOINT")
    return before - _count(connection)


def _count(connection: Connection) -> int:
    return int(scalar(connection, "SELECT count(*) FROM lane_steps"))


def _oldest(connection: Connection, share: float) -> datetime | None:
    """The time before which `share` of all steps lie; None without steps."""
    found: datetime | None = scalar(
        connection,
        "SELECT min(second) FROM (SELECT second, sum(sum(steps)) OVER (ORDER BY second) AS seen,"
        " sum(sum(steps)) OVER () AS total FROM step_rollup GROUP BY second) WHERE seen > total * ?",
        [share],
    )
    return found


def _delete_before(connection: Connection, cutoff: datetime) -> None:
    """One transaction; a run goes when nothing of it is left, numbers of requests go with their run or batch."""
    connection.execute("BEGIN")
    try:
        connection.execute(
            "DELETE FROM request_lanes WHERE request_no IN (SELECT request_no FROM requests WHERE finished < ?)",
            [cutoff],
        )
        for table, column in _TIME_COLUMN.items():
            connection.execute(f"DELETE FROM {table} WHERE {column} < ?", [cutoff])
        connection.execute(
            "DELETE FROM runs WHERE state <> 'running' AND greatest(ended, last_record, heartbeat, started) < ?",
            [cutoff],
        )
        connection.execute("DELETE FROM batches WHERE batch_no < (SELECT coalesce(min(batch_no), 0) FROM lane_steps)")
        connection.execute(
            "DELETE FROM request_keys WHERE request_no < (SELECT coalesce(min(no), 0) FROM"
            " (SELECT min(request_no) AS no FROM requests"
            " UNION ALL SELECT min(list_min(requests)) FROM batches))"
        )
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def compact(path: Path) -> int:
    """Rewrite a file that nobody has open without its free blocks; returns the bytes gained. Raises `duckdb.Error`."""
    fresh = path.with_name(path.name + ".compact")
    fresh.unlink(missing_ok=True)
    before = path.stat().st_size
    connection = duckdb.connect(":memory:")
    try:
        connection.execute(f"ATTACH '{_quoted(path)}' AS old")
        connection.execute("CHECKPOINT old")
        connection.execute(f"ATTACH '{_quoted(fresh)}' AS fresh")
        connection.execute("COPY FROM DATABASE old TO fresh")
        connection.execute("CHECKPOINT fresh")
    finally:
        connection.close()
    os.replace(fresh, path)
    path.with_name(path.name + ".wal").unlink(missing_ok=True)
    return before - path.stat().st_size


def is_worth_compacting(size: Size) -> bool:
    """More than half of a file that is not small is free."""
    free = size.file_bytes - size.used_bytes
    return free > _WORTH_COMPACTING_BYTES and free * 2 > size.file_bytes


def _quoted(path: Path) -> str:
    return str(path).replace("'", "''")
