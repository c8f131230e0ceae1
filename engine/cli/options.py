"""Options that several commands share, and the lever flags, derived from the registry."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from engine.cli import places
from engine.cli.errors import Failure
from engine.levers.catalog import LEVERS
from engine.levers.presets import Presets
from engine.levers.resolve import Source, resolve
from engine.levers.spec import Lever, LeverError, Value
from engine.protocol.address import Address

F = TypeVar("F", bound=Callable[..., Any])
DEFAULT_PORT = 8080
DEFAULT_MODEL = "smollm2"


def url_option(function: F) -> F:
    return click.option(
        "--url", envvar="METRALE_URL", metavar="URL", help="The running engine; else the one that owns the database."
    )(click.option("--token", envvar="METRALE_TOKEN", metavar="TOKEN", help="Its token, if it asks for one.")(function))


def db_option(function: F) -> F:
    return click.option(
        "--db",
        "database",
        envvar="METRALE_DB",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Telemetry database; default: the one in the user's state directory.",
    )(function)


def json_option(function: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


def lever_options(function: F) -> F:
    """A flag for every lever, and `--preset`."""
    for lever in reversed(LEVERS.values()):
        function = click.option(
            lever.flag, f"lever_{lever.name}", metavar=_metavar(lever), help=_help(lever), callback=_parse(lever)
        )(function)
    return click.option("--preset", metavar="NAME", help="A saved set of lever values; flags go before it.")(function)


def lever_values(options: dict[str, Any], preset: str | None) -> tuple[dict[str, Value], dict[str, Source]]:
    """Start-up values from preset, environment and flags, and where each came from."""
    flags = {
        name.removeprefix("lever_"): value
        for name, value in options.items()
        if name.startswith("lever_") and value is not None
    }
    try:
        chosen = Presets(places.config_dir() / "presets").load(preset) if preset else None
        return resolve(flags, os.environ, chosen)
    except LeverError as error:
        raise click.UsageError(str(error)) from None


def database_of(database: Path | None) -> Path:
    return (database or places.default_database()).absolute()


def address_of(url: str | None, token: str | None, database: Path | None = None) -> Address:
    """The engine meant by the options. Raises `Failure` when none is named and none is running."""
    found = find_address(url, token, database)
    if found is None:
        raise Failure("No engine is running here; start one with `metrale serve`, or name one with --url.")
    return found


def find_address(url: str | None, token: str | None, database: Path | None = None) -> Address | None:
    """The engine named by `url`, else the living owner of the database, else None."""
    if url:
        try:
            return Address.parse(url, token or "")
        except ValueError as error:
            raise click.UsageError(str(error)) from None
    owner = places.live_owner(database_of(database))
    return Address.parse(owner.url, token or owner.token) if owner else None


def _parse(lever: Lever) -> Callable[[click.Context, click.Parameter, str | None], Value | None]:
    def parse(ctx: click.Context, param: click.Parameter, raw: str | None) -> Value | None:
        if raw is None:
            return None
        try:
            return lever.parse(raw)
        except LeverError as error:
            raise click.UsageError(str(error), ctx) from None

    return parse


def _metavar(lever: Lever) -> str:
    if lever.choices:
        return "|".join(lever.choices)
    return {"bool": "on|off", "int": "N", "float": "X"}.get(str(lever.kind), "TEXT")


def _help(lever: Lever) -> str:
    lossy = "" if lever.lossless else " LOSSY: may change what the model says."
    return f"{lever.help}{lossy} [{lever.env}; default: {lever.show(lever.default)}]"
