"""`metrale top` and `metrale replay`: the operator screens on a running engine."""

from __future__ import annotations

from pathlib import Path

import click

from engine.cli.errors import Failure
from engine.cli.options import address_of, db_option, url_option


@click.command(epilog="Example: metrale top --url http://127.0.0.1:8080")
@url_option
@db_option
def top(url: str | None, token: str | None, database: Path | None) -> None:
    """Operator screen on a running engine, local or remote."""
    _show(url, token, database, "top", "")


@click.command(epilog="Example: metrale replay 12")
@click.argument("run", default="last")
@url_option
@db_option
def replay(run: str, url: str | None, token: str | None, database: Path | None) -> None:
    """A recorded RUN in the same screens as live, with pause, speed and scrubbing."""
    _show(url, token, database, "replay", run)


def _show(url: str | None, token: str | None, database: Path | None, mode: str, run: str) -> None:
    import sys

    if not sys.stdout.isatty():
        raise Failure("The screen needs a terminal; `metrale query` and `metrale report` work without one.")
    address = address_of(url, token, database)
    from tui.app import run as show

    show(f"{address.base}#{address.token}" if address.token else address.base, mode=mode, replay_run=run)
