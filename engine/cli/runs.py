"""Commands on recorded runs: report, compare, whatif, export and import."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import click

from engine.cli.errors import Failure
from engine.cli.options import database_of, db_option, find_address, json_option, url_option
from engine.cli.recorded import Where, export_live, id_of, number_of, recorded
from engine.levers.resolve import find


@click.command(epilog="Example: metrale report --html run.html")
@click.argument("run", default="last")
@click.option(
    "--html", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write one page with pictures."
)
@json_option
@url_option
@db_option
def report(
    run: str, html: Path | None, as_json: bool, url: str | None, token: str | None, database: Path | None
) -> None:
    """What happened in RUN (number or id; default: the last): throughput, lanes, gate, levers, losses, overhead."""
    from telemetry import report as reporting
    from telemetry import report_html, report_text

    where = Where(url, token, database)
    run_id = id_of(run, where)
    with recorded(where) as connection:
        made = reporting.report(connection, reporting.find_run(connection, run_id))
    if html is not None:
        html.write_text(report_html.render(made))
        click.echo(f"Wrote {html}.", err=True)
    elif as_json:
        click.echo(_json(made))
    else:
        click.echo(report_text.to_text(made, _width()), nl=False)


@click.command(epilog="Example: metrale compare 11 12")
@click.argument("first")
@click.argument("second", default="last")
@json_option
@url_option
@db_option
def compare(first: str, second: str, as_json: bool, url: str | None, token: str | None, database: Path | None) -> None:
    """Two runs side by side, and whether they differ by more than chance."""
    from rich.console import Console

    from telemetry import compare as comparing
    from telemetry.report import find_run

    where = Where(url, token, database)
    ids = [id_of(run, where) for run in (first, second)]
    with recorded(where) as connection:
        runs = [find_run(connection, run_id) for run_id in ids]
        made = comparing.compare(connection, *runs)
    if as_json:
        click.echo(_json(made))
    else:
        Console(highlight=False).print(comparing.render(made))


@click.command(epilog="Example: metrale whatif --set gate_margin=0.1 --run 12")
@click.option("--set", "settings", multiple=True, metavar="LEVER=VALUE", help="A gate constant or draft count.")
@click.option("--run", default="last", metavar="ID", help="The recorded run to walk.")
@json_option
@url_option
@db_option
def whatif(
    settings: tuple[str, ...], run: str, as_json: bool, url: str | None, token: str | None, database: Path | None
) -> None:
    """What a recorded run would have delivered with other gate constants and draft counts."""
    from engine.bench.whatif import policy_of, to_text, what_if
    from telemetry.record import StepRecord
    from telemetry.recorded import Period, records
    from telemetry.recovery import context_of
    from telemetry.report import find_run

    asked = dict(_setting(text) for text in settings)
    if not asked:
        raise click.UsageError("Say what to change, e.g. --set gate_margin=0.1.")
    where = Where(url, token, database)
    run_id = id_of(run, where)
    with recorded(where) as connection:
        number = find_run(connection, run_id)
        levers = context_of(connection, number).record.levers
        steps = [one for one in records(connection, number, Period()) if isinstance(one, StepRecord)]
    answer = what_if(steps, policy_of(levers), policy_of(levers, asked))
    click.echo(_json(answer) if as_json else to_text(answer))


@click.command(epilog="Example: metrale export telemetry-parquet --run 12")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option("--run", default="", metavar="ID", help="Only this run; default: all.")
@url_option
@db_option
def export(directory: Path, run: str, url: str | None, token: str | None, database: Path | None) -> None:
    """Telemetry to Parquet files in DIRECTORY, one per table."""
    from telemetry import transfer

    where = Where(url, token, database)
    number = number_of(run, where) if run else 0
    address = find_address(url, token, database)
    if address is not None:
        export_live(address, directory, number)
    else:
        with recorded(where) as connection:
            transfer.export(connection, directory, number or None)
    click.echo(f"Wrote {len(list(directory.glob('*.parquet')))} tables to {directory}.", err=True)


@click.command("import", epilog="Example: metrale import telemetry-parquet --db other.duckdb")
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@db_option
def import_(directory: Path, database: Path | None) -> None:
    """The runs of an export that the database does not have yet."""
    from telemetry import transfer
    from telemetry.database import open_owned

    if find_address(None, None, database) is not None:
        raise Failure("A running engine owns this database; stop it first, or import into another file with --db.")
    connection = open_owned(database_of(database))
    try:
        found = transfer.import_(connection, directory)
    finally:
        connection.close()
    click.echo(f"Added {len(found.runs)} run{'' if len(found.runs) == 1 else 's'}.", err=True)


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise click.UsageError(f"{text!r} is no setting; write LEVER=VALUE.")
    lever = find(name)
    return lever.name, lever.parse(value)


def _width() -> int:
    import shutil

    return max(80, shutil.get_terminal_size((120, 24)).columns)


def _json(made: Any) -> str:
    return json.dumps(dataclasses.asdict(made), indent=2, default=str, ensure_ascii=False)
