"""Asks telemetry in SQL: the running owner of the database if there is one, else the file itself."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from engine.cli.options import database_of, find_address
from engine.protocol.address import Address
from engine.protocol.client import WireClient
from telemetry.queries import Limits, QueryError, Result, run_query

MAX_ROWS = 10_000


@dataclass(frozen=True, slots=True)
class Question:
    sql: str
    max_rows: int = MAX_ROWS
    run: int = 0
    """Above 0: only this run."""


def ask(question: Question, url: str | None, token: str | None, database: Path | None) -> Result:
    """The answer. Raises `QueryError`, `StoreError` or `WireClosedError`, each with a sentence."""
    address = find_address(url, token, database)
    if address is not None:
        return asyncio.run(ask_live(question, address))
    return ask_file(question, database_of(database))


async def ask_live(question: Question, address: Address) -> Result:
    async with WireClient(address, retry_s=3) as client:
        answer = await client.query(question.sql, question.max_rows, question.run)
    if answer.error:
        raise QueryError(answer.error)
    return Result(answer.columns, answer.types, answer.rows, answer.truncated, answer.seconds)


def ask_file(question: Question, database: Path) -> Result:
    from telemetry.database import open_for_reading

    connection = open_for_reading(database)
    try:
        return run_query(connection.cursor(), question.sql, Limits(question.max_rows, 60.0, question.run or None))
    finally:
        connection.close()
