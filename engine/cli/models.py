"""`metrale models` and `metrale pull`."""

from __future__ import annotations

import json

import click

from engine.cli.options import DEFAULT_MODEL, json_option
from engine.cli.progress import bar
from engine.fetch import cache_dir, list_models
from engine.fetch import pull as fetch


@click.command(epilog="Example: metrale models --json")
@json_option
def models(as_json: bool) -> None:
    """The models that are here, and the known ones that can be fetched."""
    entries = list_models()
    if as_json:
        plain = [
            {
                "name": entry.name,
                "path": str(entry.path) if entry.path else None,
                "bytes": entry.nbytes,
                "title": entry.title,
                "license": entry.license,
            }
            for entry in entries
        ]
        click.echo(json.dumps(plain, indent=2))
        return
    width = max((len(entry.name) for entry in entries), default=0)
    for entry in entries:
        where = str(entry.path) if entry.path else f"not here: metrale pull {entry.name}"
        details = " ".join(part for part in (entry.title, entry.license) if part)
        click.echo(f"{entry.name:{width}}  {entry.nbytes / 1e6:6.0f} MB  {details}  {where}")
    click.echo(f"Cached in {cache_dir()}.", err=True)


@click.command(epilog="Example: metrale pull smollm2")
@click.argument("name", default=DEFAULT_MODEL)
def pull(name: str) -> None:
    """Fetch the model NAME into the cache; an interrupted download goes on where it stopped."""
    with bar("Fetching") as progress:
        path = fetch(DEFAULT_MODEL if name == "default" else name, progress=progress)
    click.echo(str(path))
