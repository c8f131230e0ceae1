"""The store: a bounded queue, a thread that owns the database, and a sentence when something is wrong with it."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from telemetry.batch import Batch
from telemetry.beat import Beat
from telemetry.database import Connection, StoreError, first_line, fits_no_table, open_owned, unreadable
from telemetry.journal import Journal, Row
from telemetry.migrations import scalar
from telemetry.retention import Retention, compact, expire, is_worth_compacting, size_of
from telemetry.writer import Flush, RunContext, Writer

FLUSH_S = 0.12
"""How often records go into the journal. They come every 100 ms, so `kill -9` costs at most 250 ms."""
COMMIT_S = 10.0
"""How often the journal goes into the database; a query that asks for the newest does not wait for it."""
LOOK_S = 1.0
"""How often the file is looked at, whether it is still the one at the path."""
CAPACITY = 1_048_576
"""Records that wait at most, about 100 MB of columns: 17 minutes at 1,000 a second, ten seconds at 100,000."""
_BATCH = 262_144
"""Records of a transaction: more than a row group (122,880 steps) go past DuckDB's log, at a third of the cost."""
_ROWS_CAPACITY = 65_536
_RETRY_S = (0.25, 0.5, 1.0, 2.0, 5.0)
_ANNOUNCED = 65_536
_ROOM_BYTES = 8 * 1024 * 1024
_FREED_BYTES = 65_536
_BLOCKED_RETRY_S = 30.0
"""How often a transaction is tried although what stopped the last one is seen to be still there."""

_MAINTAIN_EVERY_S = 3600.0
KEEP = Retention()

log = logging.getLogger("metrale.telemetry")
Clock = Callable[[], int]

_REFUSED = (
    duckdb.DataError, duckdb.IntegrityError, duckdb.InvalidInputException, duckdb.TypeMismatchException,
    pa.ArrowException, ValueError, TypeError, OverflowError, LookupError,
)  # fmt: skip
"""What is wrong with a record, not with the file."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Batches and rows that are one frame of the journal; numbers only grow, the database knows its last."""

    number: int
    batches: list[Batch]
    records: int
    rows: list[Row]


class Store:
    """The only owner of a database file while it lives.

    `put` never blocks and never raises for what happens to the file: `trouble` says in one sentence what is wrong,
    `losses` counts what did not fit, and both end up in the database when it works again.
    """

    def __init__(
        self,
        path: Path,
        flush_s: float = FLUSH_S,
        capacity: int = CAPACITY,
        clock_ns: Clock = time.time_ns,
        retention: Retention = KEEP,
        commit_s: float = COMMIT_S,
    ) -> None:
        """Open or create the file. Raises `StoreError`."""
        self.path = path
        self.trouble = ""
        self.losses: Counter[str] = Counter()
        """Dropped since the store was opened, by kind."""
        self._flush_s = flush_s
        self._commit_s = commit_s
        self._retention = retention
        self._maintain_at = 0.0
        self._capacity = capacity
        self._clock_ns = clock_ns
        self._guard = threading.Lock()
        self._journal_guard = threading.Lock()
        """Taken before `_guard`: what is staged and what is in the journal change together."""
        self._closing = threading.Event()
        self._arrived: list[Batch] = []
        self._arrived_count = 0
        self._arrived_rows: list[Row] = []
        self._rows_waiting = 0
        self._unwritten: Counter[str] = Counter()
        self._announced: dict[str, str] = {}
        self._staged: list[Chunk] = []
        self._staged_count = 0
        self._chunk = 0
        self._staged_us = 0
        self._committed_at = time.monotonic()
        self._wanted = False
        self._context: RunContext | None = None
        self._accepted = 0
        self._settled = 0
        self._wake = threading.Event()
        """Of the writer: there is something to commit at once."""
        self._arrival = threading.Event()
        """Of the keeper: there is something for the journal."""
        self._idle = threading.Condition()
        self._end: str | None = None
        self._failures = 0
        self._is_replaced = False
        self._retry_at = 0.0
        self._obstacle: Callable[[], bool] | None = None
        """Tells cheaply whether what stopped the last transaction is still there."""
        self._blocked_at = 0.0
        self._database_guard = threading.Lock()
        self._connection: Connection | None = None
        self._open()
        self._compact()
        self._thread = threading.Thread(target=self._run, name="telemetry-writer", daemon=True)
        self._thread.start()
        # a commit may take longer than a flush interval; the journal must not wait for it
        self._keeper = threading.Thread(target=self._keep, name="telemetry-journal", daemon=True)
        self._keeper.start()

    # ---- callers ----------------------------------------------------------------------------------------------

    def put(self, batches: Sequence[Batch], lost: int = 0) -> None:
        """Queue batches; one that does not fit is dropped and counted. `lost`: dropped before they came here."""
        with self._guard:
            for batch in batches:
                for kind, count in batch.malformed.items():
                    self._lose(f"malformed {kind}", count)
                if self.queued + len(batch) > self._capacity:
                    for kind, count in batch.kinds().items():
                        self._lose(kind, count)
                    continue
                self._arrived.append(batch)
                self._arrived_count += len(batch)
                self._accepted += len(batch)
            self._beat.write(self._accepted, self._clock_ns() // 1000)
            if lost:
                self._lose("ring", lost)
        self._arrival.set()

    def put_rows(self, table: str, table_rows: Sequence[tuple[Any, ...]]) -> None:
        """Queue ready rows (without the run number) of one of the small tables."""
        with self._guard:
            for row in table_rows:
                if self._rows_waiting == _ROWS_CAPACITY:
                    self._lose(table, 1)
                else:
                    self._arrived_rows.append((table, row))
                    self._rows_waiting += 1
        self._arrival.set()

    def lose(self, kind: str, count: int) -> None:
        """Count what was dropped elsewhere."""
        if count > 0:
            with self._guard:
                self._lose(kind, count)

    def announce(self, request_id: str, trace_id: str) -> None:
        """The caller's trace of a request that was just accepted: its steps link to it."""
        with self._guard:
            self._announced[request_id] = trace_id
            if len(self._announced) > _ANNOUNCED:
                del self._announced[next(iter(self._announced))]

    @property
    def queued(self) -> int:
        return self._arrived_count + self._staged_count

    @property
    def run(self) -> int:
        """Number of the run that is being recorded; 0 before its first record was committed."""
        return self._context.run if self._context else 0

    def cursor(self) -> Connection:
        """A cursor of its own for one query. Raises `StoreError` while the database is out of reach."""
        with self._database_guard:
            if self._connection is None:
                raise StoreError(self.trouble or "The database is closed.")
            return self._connection.cursor()

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until everything put so far is committed; False if it was not within the time."""
        with self._guard:
            target = self._accepted
        deadline = time.monotonic() + timeout_s
        with self._idle:
            while self._settled < target or self._rows_waiting or self._unwritten:
                left = deadline - time.monotonic()
                if left <= 0 or not self._thread.is_alive():
                    return False
                self._wanted = True
                self._wake.set()
                self._idle.wait(min(left, 0.05))
        return True

    def freshen(self, age_s: float = 0.5) -> None:
        """Before a query: bring in what is older than `age_s`, without waiting for a database in trouble."""
        if (self.queued or self._rows_waiting) and time.monotonic() - self._committed_at > age_s and not self.trouble:
            self.flush(2.0)

    def end_run(self, reason: str) -> None:
        """The engine is gone: what comes next belongs to another run."""
        self.flush(1.0)
        with self._database_guard:
            if self._connection is not None and self._context is not None:
                try:
                    self._writer.end_run(reason, self._clock_ns() // 1000)
                    self._context = None
                except duckdb.Error as error:
                    self._fail(error)

    def close(self, reason: str = "closed", timeout_s: float = 10.0) -> None:
        """Write what is queued, state the end of the run, and let go of the file."""
        self._end = reason
        self._closing.set()
        self._arrival.set()
        self._wake.set()
        self._thread.join(timeout_s)

    # ---- the writer thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._end is None:
            self._wake.wait(self._pause_s())
            self._wake.clear()
            self._tick()
        self._keeper.join(self._flush_s + 1.0)
        self._retry_at = 0.0
        self._tick()
        self._close(self._end)

    def _pause_s(self) -> float:
        """Until the next commit, look or attempt."""
        retry_s = self._retry_at - time.monotonic()
        return retry_s if retry_s > 0 else min(LOOK_S, max(self._flush_s, self._commit_s))

    def _tick(self) -> None:
        self._stage()
        if time.monotonic() >= self._retry_at and not self._is_blocked():
            try:
                self._reach()
                while self._is_due():
                    self._commit()
                    self._stage()
                self._maintain()
            except (duckdb.Error, OSError, StoreError) as error:
                self._fail(error)
        with self._idle:
            self._idle.notify_all()

    def _is_blocked(self) -> bool:
        """A transaction that fails costs as much as one that does not."""
        if self._obstacle is None or self._end is not None:
            return False
        return self._obstacle() and time.monotonic() - self._blocked_at < _BLOCKED_RETRY_S

    def _block(self, obstacle: Callable[[], bool]) -> None:
        if self._obstacle is None:
            self._blocked_at = time.monotonic()
        self._obstacle = obstacle

    def _keep(self) -> None:
        """Journal what arrives at once, and during a flush interval after that no more; sleep while nothing comes."""
        while not self._closing.is_set():
            self._arrival.wait()
            self._arrival.clear()
            self._stage()
            if self._is_much():
                self._wake.set()
            self._closing.wait(self._flush_s)

    def _stage(self) -> None:
        """Move what was put into numbered chunks and the journal, where it is safe from a kill."""
        with self._journal_guard:
            self._stage_guarded()

    def _stage_guarded(self) -> None:
        with self._guard:
            batches, self._arrived = self._arrived, []
            rows, self._arrived_rows = self._arrived_rows, []
            chunks = []
            if batches or rows:
                self._chunk += 1
                chunks = [Chunk(self._chunk, batches, self._arrived_count, rows)]
            self._staged += chunks
            self._staged_count += self._arrived_count
            self._arrived_count = 0
            self._staged_us = self._clock_ns() // 1000
        if self._journaled(chunks):
            self._beat.safe(self._staged_us)

    def _journaled(self, chunks: list[Chunk]) -> bool:
        if self._journal.is_full:
            return False
        try:
            for chunk in chunks:
                self._journal.append(chunk.number, chunk.batches, chunk.rows)
        except OSError as error:
            self.trouble = self._sentence(error)
            self._wake.set()
            return False  # they stay in memory, and the commit may still succeed
        return True

    def _is_due(self) -> bool:
        waiting = bool(self._staged or self._unwritten)
        late = time.monotonic() - self._committed_at >= self._commit_s or bool(self.trouble)
        return waiting and (late or self._wanted or self._end is not None or self._is_much())

    def _is_much(self) -> bool:
        return self._staged_count >= _BATCH or self._rows_waiting >= _ROWS_CAPACITY // 4

    def _commit(self) -> None:
        """Write the oldest chunks, as many as make a good transaction."""
        with self._journal_guard, self._guard:
            chunks, count = 0, 0
            while chunks < len(self._staged) and count < _BATCH:
                count += self._staged[chunks].records
                chunks += 1
            taken = self._staged[:chunks]
            batches = [batch for chunk in taken for batch in chunk.batches]
            number = taken[-1].number if taken else self._writer.next_seq - 1
            rows = [row for chunk in taken for row in chunk.rows]
            flush = Flush(batches, rows, dict(self._unwritten), self.queued - count, number)
            self._journal.turn()
        self._write(flush)
        with self._guard:
            self._settled += count
            self._staged_count -= count
            del self._staged[:chunks]
            self._rows_waiting -= len(rows)
            for kind, lost in flush.losses.items():
                self._unwritten[kind] -= lost
            self._unwritten = +self._unwritten
        with self._journal_guard:
            self._journal.clear(number)
            if not self._staged:
                self._beat.safe(self._staged_us)
                self._wanted = False
        self._context = self._writer.context
        self._committed_at = time.monotonic()
        self._failures = 0
        self._obstacle = None
        self.trouble = ""

    def _write(self, flush: Flush) -> None:
        """One transaction; where the database refuses what is in it, the halves are tried, down to the culprit."""
        try:
            with self._database_guard:
                self._writer.commit(flush, self._clock_ns() // 1000)
        except _REFUSED:
            halves = flush.halves()
            if halves is None:
                for kind, count in flush.kinds().items():
                    self.lose(f"malformed {kind}", count)
                return
            for half in halves:
                self._write(half)
            return
        with self._guard:
            self.losses.update(self._writer.malformed)

    def _reach(self) -> None:
        """Have the file open, and have it be the one at the path."""
        if self._connection is None:
            self._reopen()
        self._check_file()

    def _maintain(self) -> None:
        """Once an hour, when nothing waits: let go of what is older or more than is kept."""
        if time.monotonic() < self._maintain_at or self._arrived or self._end is not None or self._connection is None:
            return
        self._maintain_at = time.monotonic() + _MAINTAIN_EVERY_S
        with self._database_guard:
            now = datetime.fromtimestamp(self._clock_ns() / 1e9, UTC).replace(tzinfo=None)
            expire(self._connection, self._retention, now)

    def _open(self) -> None:
        self._connection = open_owned(self.path)
        try:
            session = self._clock_ns() // 1000
            self._writer = Writer(self._connection, session, self._context)
            self._writer.announced = self._announced
            self._chunk = self._writer.next_seq - 1
            self._journal = Journal(self.path)
            self._beat = Beat(self.path, session)
            self._identity = _identity(self.path)
        except duckdb.Error as error:
            self._drop_connection()
            raise unreadable(self.path, error) from error
        except BaseException:
            self._drop_connection()
            raise

    def _compact(self) -> None:
        """A file that is mostly free space is rewritten before the run begins."""
        if self._connection is not None and is_worth_compacting(size_of(self._connection)):
            self._drop_connection()
            try:
                compact(self.path)
            except (duckdb.Error, OSError):
                pass  # it stays as large as it was
            self._open()

    def _reopen(self) -> None:
        """Raises `StoreError`. The journal begins again with what the new file does not have."""
        with self._journal_guard:
            self._reopen_guarded()

    def _reopen_guarded(self) -> None:
        self._journal.close()  # or the open would take both for those of a killed owner
        self._beat.close()
        with self._database_guard:
            try:
                self._open()
            except StoreError:
                if not self._set_aside_wal():
                    raise
                self._open()
        with self._guard:
            self._accepted = self.queued
            self._settled = 0
            self._staged = [replace(chunk, number=self._chunk + at) for at, chunk in enumerate(self._staged, start=1)]
            self._chunk += len(self._staged)
        self._journaled(self._staged)

    def _set_aside_wal(self) -> bool:
        """The write-ahead log of a file that was replaced under us fits no other; it is kept under another name."""
        wal = self.path.with_name(self.path.name + ".wal")
        if not self._is_replaced or not wal.exists():
            return False
        self._is_replaced = False
        os.replace(wal, wal.with_name(wal.name + ".replaced"))
        return True

    def _check_file(self) -> None:
        """A file that was deleted or replaced takes our writes silently; notice it, and begin anew at the path."""
        now = _identity(self.path)
        if now == self._identity:
            return
        what = "deleted" if now is None else "replaced"
        self._is_replaced = True
        gone = self._committed()
        self._drop_connection()
        self.lose(f"database {what}", gone)
        raise StoreError(f"The database {self.path} was {what} while in use: recording begins again in a new file.")

    def _committed(self) -> int:
        if self._connection is None:
            return 0
        try:
            sql = "SELECT coalesce(sum(records), 0) FROM flushes WHERE session = ?"
            return int(scalar(self._connection, sql, [self._writer.session]))
        except duckdb.Error:
            return 0

    def _fail(self, error: Exception) -> None:
        self._obstacle = None
        self.trouble = error.args[0] if isinstance(error, StoreError) else self._sentence(error)
        if self._failures or isinstance(error, duckdb.FatalException):
            self._drop_connection()
        wait = 0.0 if self._connection is None and not self._failures else _RETRY_S[min(self._failures, 4)]
        self._failures += 1
        self._retry_at = time.monotonic() + wait

    def _sentence(self, error: Exception) -> str:
        directory = self.path.parent
        free = _free_bytes(directory)
        if free is None:
            return f"The directory {directory} of the database is gone: create it, recording resumes by itself."
        if free < _ROOM_BYTES:
            self._block(lambda: (_free_bytes(directory) or 0) < free + _FREED_BYTES)
            return f"The disk of {self.path} is full: free some space, recording resumes by itself."
        if not self._is_writable():
            self._block(lambda: self.path.exists() and not self._is_writable())
            return f"The database {self.path} may not be written: make it writable, recording resumes by itself."
        log.debug("%s: %s", self.path, error)
        if fits_no_table(error):
            return (
                f"The tables of {self.path} are not those of this version: move the file away, recording begins again "
                "in a new one."
            )
        if isinstance(error, OSError):
            return f"The database {self.path} cannot be written, recording is retried: {first_line(error)}."
        return f"The database {self.path} cannot be written: recording is retried; if it goes on, move the file away."

    def _is_writable(self) -> bool:
        return os.access(self.path.parent, os.W_OK) and os.access(self.path, os.W_OK)

    def _drop_connection(self) -> None:
        with self._database_guard:
            connection, self._connection = self._connection, None
            if connection is not None:
                try:
                    connection.close()
                except duckdb.Error:
                    pass  # a broken database may refuse to close; it is dropped all the same

    def _close(self, reason: str) -> None:
        with self._database_guard:
            connection = self._connection
            if connection is None:
                return
            try:
                self._writer.end_run(reason, self._clock_ns() // 1000)
                connection.execute("CHECKPOINT")
                if not self.trouble:
                    self._journal.close()
                    self._beat.close()
                connection.close()
            except duckdb.Error as error:
                self.trouble = self._sentence(error)
            self._connection = None

    def _lose(self, kind: str, count: int) -> None:
        self.losses[kind] += count
        self._unwritten[kind] += count


def _free_bytes(directory: Path) -> int | None:
    """None where the directory is gone."""
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return None


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
