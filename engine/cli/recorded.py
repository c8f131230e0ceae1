"""Recorded runs for commands that need more than one query: the database file, or a copy from its running owner."""

from __future__ import annotations

import contextlib
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.cli.asking import Question, ask
from engine.cli.errors import Failure
from engine.cli.options import database_of, find_address
from engine.protocol.address import Address

TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Where:
    """Which engine or file is meant, from the options."""

    url: str | None
    token: str | None
    database: Path | None


@contextlib.contextmanager
def recorded(where: Where) -> Iterator[Any]:
    """A DuckDB connection with all runs, for reading."""
    from telemetry.database import open_for_reading

    address = find_address(where.url, where.token, where.database)
    if address is None:
        connection = open_for_reading(database_of(where.database))
        try:
            yield connection
        finally:
            connection.close()
        return
    with tempfile.TemporaryDirectory(prefix="metrale-copy-") as folder:
        connection = _copied(address, Path(folder))
        try:
            yield connection
        finally:
            connection.close()


def export_live(address: Address, directory: Path, run: int = 0) -> None:
    """Fetch the Parquet files of one run (0: all) from the owner of the database into a directory."""
    request = urllib.request.Request(f"{address.base}/telemetry/export?run={run}")
    if address.token:
        request.add_header("Authorization", f"Bearer {address.token}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with opener.open(request, timeout=TIMEOUT_S) as answer, tarfile.open(fileobj=answer, mode="r|") as archive:
            archive.extractall(directory, filter="data")
    except urllib.error.HTTPError as error:
        raise Failure(_sentence(error)) from None
    except (OSError, tarfile.TarError) as error:
        raise Failure(f"The telemetry of {address.base} could not be fetched: {error}.") from None


def number_of(run: str, where: Where) -> int:
    """The number of a run given by number, id or beginning of the id in the database that `where` means."""
    rows = ask(Question("SELECT run, run_id FROM runs ORDER BY run DESC"), where.url, where.token, where.database).rows
    found = [number for number, run_id in rows if run in (str(number), run_id) or (run and run_id.startswith(run))]
    if run in ("", "last") and rows:
        return int(rows[0][0])
    if len(found) != 1:
        known = ", ".join(f"{number} ({run_id[:8]})" for number, run_id in rows[:8]) or "none"
        raise Failure(f"{'Several runs match' if found else 'There is no run'} {run!r}; there are: {known}.")
    return int(found[0])


def id_of(run: str, where: Where) -> str:
    """The id of a run, the same in every copy of it."""
    number = number_of(run, where)
    sql = f"SELECT run_id FROM runs WHERE run = {number}"
    return str(ask(Question(sql), where.url, where.token, where.database).rows[0][0])


def _copied(address: Address, folder: Path) -> Any:
    from telemetry.database import open_for_reading, open_owned
    from telemetry.transfer import import_
    from telemetry.views import create_views

    export_live(address, folder / "files")
    copy = folder / "copy.duckdb"
    connection = open_owned(copy)
    import_(connection, folder / "files")
    create_views(connection)
    connection.execute("UPDATE runs SET state = 'live' WHERE state = 'running'")  # it goes on; only the copy ends
    connection.close()
    return open_for_reading(copy)


def _sentence(error: urllib.error.HTTPError) -> str:
    import json

    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"The server answered {error.code}."
