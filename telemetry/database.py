"""Opening the database: default path, typed errors, settings that no query can undo, and runs that were cut off."""

from __future__ import annotations

import logging
import os
import struct
import sys
from pathlib import Path

import duckdb
import platformdirs

from telemetry.migrations import SchemaTooNewError, migrate, scalar, version_of
from telemetry.recovery import is_unsettled, settle
from telemetry.schema import SCHEMA_VERSION
from telemetry.views import create_views, has_views

log = logging.getLogger("metrale.telemetry")
Connection = duckdb.DuckDBPyConnection
MEMORY_MB = 1024


class StoreError(RuntimeError):
    """The database cannot be used; one sentence says why and what to do."""


class DatabaseLockedError(StoreError):
    """Another program has the file open."""

    def __init__(self, path: Path, pid: int | None) -> None:
        self.path, self.pid = path, pid
        who = f"process {pid}" if pid else "another program"
        super().__init__(f"{path} is in use by {who}: stop it, ask it instead, or choose another file with --db.")


class DatabaseUnreadableError(StoreError):
    """The file is no database of ours, or cannot be opened."""


def default_path() -> Path:
    """`METRALE_DB`, else the file in the user's state directory."""
    chosen = os.environ.get("METRALE_DB")
    return Path(chosen) if chosen else platformdirs.user_state_path("metrale", appauthor=False) / "metrale.duckdb"


def open_owned(path: Path, memory_mb: int = MEMORY_MB) -> Connection:
    """The one writing connection: migrated, cut-off runs settled, locked down.

    Raises `StoreError`.
    """
    connection = _connect(path, read_only=False)
    try:
        migrate(connection)
        settle(connection, path)
        if not has_views(connection):
            create_views(connection)
        connection.execute("PRAGMA disable_checkpoint_on_shutdown")
        # a checkpoint stalls the writer; at 100,000 records a second the default of 16 MB means one every second
        connection.execute("SET wal_autocheckpoint = '64MB'")
        # a failed query must not be able to fill the disk, and spilling is never needed for our own writes
        # what a large transaction needed goes back to the system, or it counts as ours for ever
        connection.execute("SET allocator_flush_threshold = '16MB'")
        connection.execute(f"SET memory_limit = '{memory_mb}MB'")
        connection.execute(f"SET threads = {max(1, min(4, os.cpu_count() or 1))}")
        lock_down(connection)
    except (duckdb.Error, SchemaTooNewError) as error:
        connection.close()
        if isinstance(error, SchemaTooNewError):
            raise DatabaseUnreadableError(str(error)) from None
        raise unreadable(path, error) from error
    except BaseException:
        connection.close()
        raise
    return connection


def open_for_reading(path: Path) -> Connection:
    """A connection for queries on a file that nobody owns now; an older schema is migrated first.

    Raises `StoreError`.
    """
    if not path.exists():
        raise DatabaseUnreadableError(
            f"There is no database at {path}: start the engine once, or name a file with --db."
        )
    connection = _connect(path, read_only=True)
    try:
        if version_of(connection) < SCHEMA_VERSION or is_unsettled(connection, path) or not has_views(connection):
            connection.close()
            open_owned(path).close()
            connection = _connect(path, read_only=True)
        lock_down(connection)
    except duckdb.Error as error:
        connection.close()
        raise unreadable(path, error) from error
    return connection


def lock_down(connection: Connection) -> None:
    """No files, no network, no extensions, and no way back. A second connection of a process finds it done."""
    if scalar(connection, "SELECT current_setting('lock_configuration')"):
        return
    connection.execute("SET max_temp_directory_size = '0B'")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET python_enable_replacements = false")
    connection.execute("SET lock_configuration = true")


def _connect(path: Path, read_only: bool) -> Connection:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return duckdb.connect(str(path), read_only=read_only)
    except (duckdb.Error, OSError) as error:
        pid = lock_holder(path)
        if pid is not None:
            raise DatabaseLockedError(path, pid) from error
        if isinstance(error, duckdb.ConnectionException):
            raise DatabaseLockedError(path, os.getpid()) from error
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> DatabaseUnreadableError:
    """DuckDB's own words stay in the cause of the error and in the log: they do not say what to do."""
    log.debug("%s: %s", path, error)
    return DatabaseUnreadableError(f"{path} cannot be opened as the database: {_explain(path, error)}")


def fits_no_table(error: Exception) -> bool:
    """A table or column that this version expects is not there."""
    return isinstance(error, duckdb.BinderException | duckdb.CatalogException | duckdb.ParserException)


def _explain(path: Path, error: Exception) -> str:
    if path.is_dir():
        return "it is a directory; name a file."
    if path.exists() and not os.access(path, os.R_OK | os.W_OK):
        return "this user may not read and write it; change its owner or choose another file with --db."
    if not path.exists() and not os.access(path.parent, os.W_OK):
        return "this user may not write in its directory; choose another file with --db."
    if fits_no_table(error):
        what = "its tables are not those of this version, an unfinished or foreign program made them"
    elif "version number" in str(error):
        what = "another version of DuckDB wrote it"
    elif isinstance(error, OSError):
        what = (error.strerror or type(error).__name__).lower()
    else:
        what = "it is no DuckDB file, or damaged"
    return f"{what}; move it away or choose another file with --db."


def first_line(error: BaseException) -> str:
    """The first line of an error's text, without the full stop."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def lock_holder(path: Path) -> int | None:
    """The process that holds a lock on the file, where the system can tell.

    Never call it for a file that this process itself has open: closing the probe would drop our own lock.
    """
    if not sys.platform.startswith("linux"):
        return None
    import fcntl

    probe = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        with path.open("rb") as file:
            answer = struct.unpack("hhqqi4x", fcntl.fcntl(file, fcntl.F_GETLK, probe))
    except OSError:
        return None
    kind, pid = answer[0], answer[4]
    return pid if kind != fcntl.F_UNLCK and pid > 0 else None
