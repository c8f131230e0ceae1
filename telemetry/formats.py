"""How a query result leaves: table, json, csv, parquet, and values that JSON can carry."""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table
from rich.text import Text

from telemetry.queries import Result

_FEW = 20


def plain(value: Any) -> Any:
    """The same value in the types of JSON: times in ISO 8601, decimals as numbers, NaN and infinity as null."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, (datetime, date)):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, dict):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return value.hex() if isinstance(value, (bytes, bytearray)) else str(value)


def plain_rows(result: Result) -> tuple[tuple[Any, ...], ...]:
    return tuple(tuple(plain(value) for value in row) for row in result.rows)


def to_json(result: Result) -> str:
    """A list of objects, one a row."""
    rows = [dict(zip(result.columns, row, strict=True)) for row in plain_rows(result)]
    return json.dumps(rows, ensure_ascii=False, indent=2)


def to_csv(result: Result) -> str:
    """A header line, then one line a row; nested values as JSON."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(result.columns)
    for row in plain_rows(result):
        writer.writerow([json.dumps(cell) if isinstance(cell, (list, dict)) else cell for cell in row])
    return out.getvalue()


def to_table(result: Result, width: int | None = None) -> str:
    """A table for the terminal (a column of fields where it would be too wide), then how many rows in what time."""
    cells = [[_cell(value) for value in row] for row in plain_rows(result)]
    natural = sum(max(map(len, column)) + 3 for column in zip(result.columns, *cells, strict=True))
    room = width or Console().width
    body = (
        _upright(result, cells) if natural > room and len(cells) <= _FEW else _grid(result, cells, max(natural, room))
    )
    more = " (there are more)" if result.truncated else ""
    rows = "row" if len(cells) == 1 else "rows"
    return f"{body}{len(cells)} {rows}{more} in {result.seconds:.3f} s\n"


def _grid(result: Result, cells: list[list[str]], width: int) -> str:
    table = Table(show_edge=False, header_style="bold")
    for column, kind in zip(result.columns, result.types, strict=True):
        table.add_column(Text(column), justify="right" if _is_number(kind) else "left", no_wrap=True)
    for row in cells:
        table.add_row(*map(Text, row))
    console = Console(width=width + 2, file=io.StringIO(), record=True)
    console.print(table)
    return console.export_text()


def _upright(result: Result, cells: list[list[str]]) -> str:
    longest = max(map(len, result.columns))
    blocks = (
        "\n".join(f"{name:>{longest}}  {cell}" for name, cell in zip(result.columns, row, strict=True)) for row in cells
    )
    return "\n\n".join(blocks) + "\n\n"


def _cell(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def to_parquet(result: Result, path: Path) -> None:
    columns = zip(*result.rows, strict=True) if result.rows else ((),) * len(result.columns)
    arrays = [_array(column) for column in columns]
    pq.write_table(pa.table(arrays, names=list(_distinct(result.columns))), path)


def _array(column: tuple[Any, ...]) -> pa.Array:
    try:
        return pa.array(column)
    except pa.ArrowException:
        return pa.array([None if value is None else json.dumps(plain(value)) for value in column])


def _distinct(names: tuple[str, ...]) -> Iterator[str]:
    seen: Counter[str] = Counter()
    for name in names:
        seen[name] += 1
        yield name if seen[name] == 1 else f"{name}_{seen[name]}"


def _is_number(kind: str) -> bool:
    return any(word in kind for word in ("INT", "FLOAT", "DOUBLE", "DECIMAL"))


TEXT_FORMATS: dict[str, Callable[[Result], str]] = {"table": to_table, "json": to_json, "csv": to_csv}
