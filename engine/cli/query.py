"""`metrale query` and `metrale views`: telemetry in SQL."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from engine.cli import places
from engine.cli.asking import MAX_ROWS, Question, ask
from engine.cli.errors import Failure, sentence_of
from engine.cli.options import db_option, json_option, url_option
from telemetry.formats import to_csv, to_json, to_parquet, to_table
from telemetry.queries import Result

CATALOG = "SELECT table_name, column_name FROM information_schema.columns ORDER BY ALL"


@click.command(epilog='Example: metrale query "SELECT * FROM throughput LIMIT 5" --format csv')
@click.argument("sql", default="")
@click.option(
    "--format", "form", type=click.Choice(["table", "json", "csv", "parquet"]), default=None, help="Of the output."
)
@click.option("--output", "-o", type=click.Path(dir_okay=False, path_type=Path), help="Write to this file.")
@click.option(
    "--run", type=click.IntRange(1), default=None, metavar="ID", help="Only this run in every table and view."
)
@click.option("--limit", type=click.IntRange(1, 1_000_000), default=MAX_ROWS, help="Rows at most.")
@json_option
@url_option
@db_option
def query(
    sql: str, form: str | None, output: Path | None, run: int | None, limit: int, as_json: bool, url: str | None,
    token: str | None, database: Path | None,
) -> None:  # fmt: skip
    """Ask telemetry in SQL, of the running engine or of a file; without SQL a prompt opens."""
    form = form or ("json" if as_json else "table")
    if not sql and not sys.stdin.isatty():
        sql = sys.stdin.read()
    if sql.strip():
        show(ask(Question(sql, limit, run or 0), url, token, database), form, output)
        return
    if not sys.stdin.isatty():
        raise click.UsageError("There is no SQL to run.")
    _prompt(form, run or 0, limit, url, token, database)


@click.command(epilog="Example: metrale views")
@json_option
def views(as_json: bool) -> None:
    """The named views, each with what it shows."""
    import json

    from telemetry.views import VIEWS

    if as_json:
        click.echo(json.dumps([{"name": view.name, "sentence": view.sentence} for view in VIEWS], indent=2))
        return
    width = max(len(view.name) for view in VIEWS)
    for view in VIEWS:
        click.echo(f"{view.name:{width}}  {view.sentence}")


def show(result: Result, form: str, output: Path | None) -> None:
    """Print a result, or write it to a file."""
    if form == "parquet":
        if output is None:
            raise click.UsageError("Parquet needs a file: add --output FILE.")
        to_parquet(result, output)
        click.echo(f"Wrote {len(result.rows)} rows to {output}.", err=True)
        return
    text = {"json": to_json, "csv": to_csv, "table": to_table}[form](result)
    if output is not None:
        output.write_text(text)
        click.echo(f"Wrote {len(result.rows)} rows to {output}.", err=True)
        return
    click.echo(text, nl=not text.endswith("\n"))
    if result.truncated and form != "table":
        click.echo(f"There are more than {len(result.rows)} rows; raise --limit to see them.", err=True)


def _prompt(form: str, run: int, limit: int, url: str | None, token: str | None, database: Path | None) -> None:
    """Lines with history and completion until end of input; an error shows and the prompt goes on."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory

    catalog = ask(Question(CATALOG, MAX_ROWS), url, token, database)
    words = sorted({str(word) for row in catalog.rows for word in row} | set(_KEYWORDS))
    history = places.state_dir() / "query_history"
    history.parent.mkdir(parents=True, exist_ok=True)
    session: PromptSession[str] = PromptSession(
        history=FileHistory(str(history)), completer=WordCompleter(words, ignore_case=True)
    )
    click.echo("SQL over telemetry; `metrale views` names the views, Ctrl-D leaves.")
    while True:
        try:
            sql = session.prompt("metrale> ").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            continue
        if sql in ("exit", "quit", r"\q"):
            return
        if not sql:
            continue
        try:
            show(ask(Question(sql, limit, run), url, token, database), form, None)
        except (Failure, ValueError, RuntimeError, OSError) as error:
            click.echo(f"Error: {sentence_of(error)}", err=True)


_KEYWORDS = (
    "SELECT", "FROM", "WHERE", "GROUP BY", "ORDER BY", "LIMIT", "JOIN", "USING", "ON", "AS", "AND", "OR", "NOT", "IN",
    "BETWEEN", "LIKE", "DESC", "COUNT(*)", "SUM(", "AVG(", "MAX(", "MIN(", "QUANTILE_CONT(", "DISTINCT", "HAVING",
    "WITH", "DESCRIBE",
)  # fmt: skip
