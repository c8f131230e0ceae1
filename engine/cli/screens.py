"""`metrale top` and `metrale replay`: the operator screens on a running engine."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from engine.cli.errors import Failure
from engine.cli.options import address_of, database_of, db_option, find_address, url_option


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
    if find_address(url, token, database) is not None:
        _show(url, token, database, "replay", run)
        return
    _need_terminal()
    from engine.cli.child import ChildServer
    from tui.app import run as show

    with ChildServer(["--no-engine", "--db", str(database_of(database))]) as child:
        show(child.screen_url, mode="replay", replay_run="" if run == "last" else run, alive=child.obituary)


def _show(url: str | None, token: str | None, database: Path | None, mode: str, run: str) -> None:
    _need_terminal()
    address = address_of(url, token, database)
    from tui.app import run as show

    show(
        f"{address.base}#{address.token}" if address.token else address.base,
        mode=mode,
        replay_run="" if run == "last" else run,
    )


def _need_terminal() -> None:
    if not sys.stdout.isatty():
        raise Failure("The screen needs a terminal; `metrale query` and `metrale report` work without one.")
