"""SQL for people: one read-only statement, on a cursor of its own, with limits on time, rows and memory."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import duckdb
import psutil  # type: ignore[import-untyped]

from telemetry.database import Connection

MAX_ROWS = 10_000
MAX_SECONDS = 10.0
MAX_MEMORY_MB = 512
"""By which the process may grow while a query runs."""
MAX_SQL = 65_536
_TABLE_FUNCTIONS = frozenset(
    {
        "range", "generate_series", "unnest", "pragma_table_info", "duckdb_tables", "duckdb_columns", "duckdb_views",
        "duckdb_types", "duckdb_functions", "duckdb_keywords",
    }
)  # fmt: skip
_GREEDY_FUNCTIONS = frozenset(
    {
        "repeat", "lpad", "rpad", "list_resize", "array_resize", "range", "generate_series", "bar", "format", "printf",
        "bitstring", "reduce", "list_reduce", "array_reduce",
    }
)  # fmt: skip
"""One call can allocate gigabytes that no limit sees and no interrupt ends."""
_GROWING_FUNCTIONS = frozenset({"||", "concat", "concat_ws", "list_concat", "list_cat", "array_concat", "array_cat"})
_MOST_GROWING = 12
"""Each can double its argument, and a chain of them is computed in one go: 64 kB at most become 256 MB."""
_REPLACING_FUNCTIONS = frozenset({"replace", "regexp_replace", "translate"})
"""With a long replacement one call squares its argument, so pattern and replacement must stand in the query."""
_LONGEST_REPLACEMENT = 64
_WATCH_S = 0.02
_EXPLAIN = re.compile(r"\s*explain\s+(analyze\s+)?", re.IGNORECASE)


class QueryError(ValueError):
    """The query was refused or failed; one sentence."""


@dataclass(frozen=True, slots=True)
class Limits:
    max_rows: int = MAX_ROWS
    seconds: float = MAX_SECONDS
    run: int | None = None
    """Show only this run in every table and view."""


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Result:
    columns: tuple[str, ...]
    types: tuple[str, ...]
    """DuckDB's names."""
    rows: tuple[tuple[Any, ...], ...]
    truncated: bool
    """More rows exist than were asked for."""
    seconds: float


def run_query(cursor: Connection, sql: str, limits: Limits = DEFAULT_LIMITS) -> Result:
    """Run one read-only statement and close the cursor.

    The connection must be locked down (`database.lock_down`): that closes files, network and settings; here the
    statement is parsed and only a SELECT without functions that act on the database goes through. Raises `QueryError`.
    """
    try:
        statement = check(sql)
        if not 0 < limits.max_rows <= 10_000_000:
            raise QueryError(f"max_rows is {limits.max_rows}; it must lie between 1 and 10000000.")
        with _Watch(cursor, limits.seconds) as watch:
            try:
                return _execute(cursor, statement, limits, time.perf_counter())
            except duckdb.Error as error:
                raise QueryError(watch.sentence or _sentence(error)) from None
    finally:
        cursor.close()


def _execute(cursor: Connection, statement: Statement, limits: Limits, begun: float) -> Result:
    cursor.execute("BEGIN TRANSACTION READ ONLY")
    hidden = _narrowed(cursor, statement.tables, limits.run) if limits.run is not None else ""
    text = statement.text
    wrapped = f"{hidden}SELECT * FROM (\n{text}\n) LIMIT {limits.max_rows + 1}"
    cursor.execute(text if statement.explains else wrapped)
    described = cursor.description or []
    rows = cursor.fetchmany(limits.max_rows + 1)
    return Result(
        tuple(str(column[0]) for column in described),
        tuple(str(column[1]) for column in described),
        tuple(rows[: limits.max_rows]),
        len(rows) > limits.max_rows,
        time.perf_counter() - begun,
    )


class _Watch:
    """Interrupts a query that takes too long, or with which the process grows too much: strings that are built up and
    lists that are collected lie outside the memory limit of the database."""

    def __init__(self, cursor: Connection, seconds: float) -> None:
        self.sentence = ""
        self._cursor = cursor
        self._seconds = seconds
        self._process = psutil.Process()
        self._most_bytes = self._process.memory_info().rss + MAX_MEMORY_MB * 1_000_000
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="query-watch", daemon=True)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        deadline = time.monotonic() + self._seconds
        while not self._done.wait(_WATCH_S):
            if time.monotonic() > deadline:
                self.sentence = (
                    f"The query ran longer than {self._seconds:g} s and was stopped: narrow it by run or by time."
                )
            elif self._process.memory_info().rss > self._most_bytes:
                self.sentence = _TOO_MUCH_MEMORY
            if self.sentence:
                try:
                    self._cursor.interrupt()
                except duckdb.Error:
                    return  # it ended at the same moment


def _narrowed(cursor: Connection, tables: frozenset[str], run: int) -> str:
    """Common table expressions that hide the rows of all other runs behind the names of the tables themselves."""
    with_run = cursor.execute(
        "SELECT DISTINCT table_name FROM information_schema.columns WHERE table_schema = 'main' AND column_name = 'run'"
    ).fetchall()
    names = sorted(tables & {str(name) for (name,) in with_run})
    parts = (f"{name} AS (SELECT * FROM main.{name} WHERE run = {int(run)})" for name in names)
    return f"WITH {', '.join(parts)} " if names else ""


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement that was parsed and only reads."""

    text: str
    tables: frozenset[str]
    explains: bool


def check(sql: str) -> Statement:
    """The one statement of the text, if it only reads. Raises `QueryError`."""
    if len(sql) > MAX_SQL:
        raise QueryError(f"The query has {len(sql)} characters; at most {MAX_SQL} are taken.")
    with _parser_guard:
        try:
            statements = _parser.extract_statements(sql)
        except duckdb.Error as error:
            raise QueryError(_tidy(error)) from None
        if len(statements) != 1:
            raise QueryError(f"One statement at a time, please: the text holds {len(statements)}.")
        text = statements[0].query.strip().rstrip(";").rstrip()
        explained = _EXPLAIN.match(text)
        inner = text[explained.end() :] if explained else text
        tree = _tree(inner)
        for name in sorted(_closed_functions(tree)):
            raise QueryError(f"The function {name}() is closed to queries, which only read tables and views.")
        _check_growth(tree)
    tables = frozenset(str(part.get("table_name", "")).lower() for part in _parts(tree) if _is_table(part))
    return Statement(text, tables, explained is not None)


def _is_table(part: dict[str, Any]) -> bool:
    return part.get("type") == "BASE_TABLE"


def _tree(text: str) -> dict[str, Any]:
    row = _parser.execute("SELECT json_serialize_sql(?)", [text]).fetchone()
    tree: dict[str, Any] = json.loads(row[0]) if row else {"error": True}
    if tree.get("error"):
        word = (text.split(None, 1) or ["nothing"])[0].upper()
        raise QueryError(f"Only reading is allowed here (SELECT, WITH, FROM, DESCRIBE, SHOW), not {word[:20]}.")
    return tree


def _closed_functions(tree: dict[str, Any]) -> set[str]:
    """Table functions beyond the few that read the catalog, and functions that allocate without bound."""
    closed, as_tables = set(), set()
    for part in _parts(tree):
        function = part.get("function")
        if part.get("type") == "TABLE_FUNCTION" and isinstance(function, dict):
            as_tables.add(id(function))
            if _name(function) not in _TABLE_FUNCTIONS:
                closed.add(_name(function))
        elif _name(part) in _GREEDY_FUNCTIONS and id(part) not in as_tables:
            closed.add(_name(part))
    return closed


def _check_growth(tree: dict[str, Any]) -> None:
    """Refuse what can make gigabytes of a short text in one step that nothing interrupts. Raises `QueryError`."""
    growing = 0
    for part in _parts(tree):
        arguments = [argument["expression"] for argument in part.get("arguments", ())]
        growing += max(0, len(arguments) - 1) if _name(part) in _GROWING_FUNCTIONS else 0
        if _name(part) in _REPLACING_FUNCTIONS and not all(map(_is_short_text, arguments[1:])):
            raise QueryError(
                f"{_name(part)}() takes its pattern and replacement as texts of at most {_LONGEST_REPLACEMENT} "
                "characters here, not as columns."
            )
    if growing > _MOST_GROWING:
        raise QueryError(f"The query joins texts or lists {growing} times; at most {_MOST_GROWING} are taken.")


def _is_short_text(node: dict[str, Any]) -> bool:
    text = str(node.get("literal", {}).get("text", ""))
    return node.get("class") == "CONSTANT" and len(text) <= _LONGEST_REPLACEMENT


def _name(function: dict[str, Any]) -> str:
    return str(function.get("function_name", "")).lower()


def _parts(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        yield node
        for value in node.values():
            yield from _parts(value)
    elif isinstance(node, list):
        for value in node:
            yield from _parts(value)


_TOO_MUCH_MEMORY = "The query needed more memory than it may use: narrow it by run or by time."


def _sentence(error: duckdb.Error) -> str:
    if isinstance(error, duckdb.OutOfMemoryException):
        return _TOO_MUCH_MEMORY
    if isinstance(error, duckdb.PermissionException):
        return "Files, network and extensions are closed to queries, which only read tables and views."
    return _tidy(error)


def _tidy(error: duckdb.Error) -> str:
    """DuckDB's own words on one line, without the excerpt of the query."""
    text = str(error).split("\n\nLINE ")[0]
    text = " ".join(text.split())
    _, _, rest = text.partition("Error: ")
    sentence = rest or text
    return sentence if sentence.endswith((".", "?", "!")) else sentence + "."


_parser = duckdb.connect(":memory:")
_parser.execute("SET enable_external_access = false")
_parser_guard = threading.Lock()
