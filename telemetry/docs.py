"""The reference of tables and views, from their definitions: `python -m telemetry.docs > telemetry/TABLES.md`."""

from __future__ import annotations

import duckdb

from telemetry.migrations import migrate
from telemetry.schema import SCHEMA_VERSION, TABLES
from telemetry.views import STRUCTURE, VIEWS, create_views


def markdown() -> str:
    """Every table with its columns and types, every view with its sentence and columns."""
    connection = duckdb.connect(":memory:")
    migrate(connection)
    create_views(connection)
    lines = [
        "# Tables and views of telemetry",
        "",
        f"Schema {SCHEMA_VERSION}. Times are UTC, without a zone; `_us` are microseconds, `_ms` milliseconds, `kv_`",
        "blocks. Requests, lane steps and gate decisions are stored once, in typed columns; the view `spans` composes",
        "their OpenTelemetry spans (times to a microsecond) when it is asked.",
        "",
        "This page is generated (`python -m telemetry.docs > telemetry/TABLES.md`), a test keeps it true.",
        "",
        "## Views",
        "",
        "| view | shows | columns |",
        "|---|---|---|",
        *(f"| `{view.name}` | {view.sentence} | {_columns(connection, view.name)} |" for view in (*VIEWS, *STRUCTURE)),
        "",
        "## Tables",
        "",
        "| table | holds | columns |",
        "|---|---|---|",
        *(f"| `{name}` | {sentence} | {_columns(connection, name)} |" for name, sentence in TABLES.items()),
        "",
    ]
    return "\n".join(lines)


def _columns(connection: duckdb.DuckDBPyConnection, name: str) -> str:
    rows = connection.execute(f"DESCRIBE {name}").fetchall()
    return ", ".join(f"{column} {_short(kind)}" for column, kind, *_ in rows)


def _short(kind: str) -> str:
    """Enums by the word ENUM, everything else as it is."""
    return "ENUM" if kind.startswith("ENUM(") else kind.replace("|", "\\|")


if __name__ == "__main__":
    print(markdown(), end="")
