"""`metrale levers`: the levers from a script."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from engine.cli import places
from engine.cli.errors import Failure
from engine.cli.options import address_of, db_option, find_address, json_option, url_option
from engine.levers.catalog import LEVERS
from engine.levers.presets import Presets, difference
from engine.levers.resolve import find, resolve
from engine.levers.spec import Value
from engine.protocol.address import Address
from engine.protocol.client import WireClient
from engine.protocol.wire import LeverEvent, LeverRefused, LeverView

T = TypeVar("T")


@click.group(invoke_without_command=True, epilog="Example: metrale levers set num_drafts 5 --for 60s")
@click.pass_context
def levers(ctx: click.Context) -> None:
    """List, read, change and undo levers of a running engine; without one, what a start here would use."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_)


@levers.command("list", epilog="Example: metrale levers list --json")
@url_option
@db_option
@json_option
def list_(url: str | None, token: str | None, database: Path | None, as_json: bool) -> None:
    """All levers with value, source, bounds and meaning."""
    shown = _values(url, token, database)
    if as_json:
        click.echo(json.dumps([_described(name, value, source) for name, (value, source) in shown.items()], indent=2))
        return
    width = max(map(len, shown))
    group = ""
    for name, (value, source) in shown.items():
        lever = LEVERS[name]
        if lever.group != group:
            group = lever.group
            click.secho(group, bold=True)
        lossy = "" if lever.lossless else "  LOSSY"
        changed = f" ({source})" if source != "default" else ""
        click.echo(f"  {name:{width}}  {lever.show(value)}{changed}{lossy}")
        click.secho(f"  {'':{width}}  {lever.help} [{lever.bounds}; {_when(str(lever.applies))}]", dim=True)


@levers.command(epilog="Example: metrale levers get num_drafts")
@click.argument("name")
@url_option
@db_option
@json_option
def get(name: str, url: str | None, token: str | None, database: Path | None, as_json: bool) -> None:
    """The value of one lever."""
    lever = find(name)
    value, source = _values(url, token, database)[lever.name]
    click.echo(json.dumps(_described(lever.name, value, source)) if as_json else lever.show(value))


@levers.command("set", epilog="Example: metrale levers set drafter off --for 60s --reason 'is plain faster?'")
@click.argument("name")
@click.argument("value")
@click.option("--for", "duration", default="", metavar="TIME", help="Take it back after, e.g. 90s, 5m.")
@click.option(
    "--guard", type=click.FloatRange(0, 0.99), default=0.0, metavar="SHARE", help="Take it back if it costs more."
)
@click.option("--expect", default=None, metavar="VALUE", help="Only if the value is this one now.")
@click.option("--reason", default="", help="Why; recorded with the change.")
@url_option
@db_option
@json_option
def set_(
    name: str, value: str, duration: str, guard: float, expect: str | None, reason: str, url: str | None,
    token: str | None, database: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Change a lever of a running engine at its next tick."""
    lever = find(name)
    parsed = lever.parse(value)
    expected = None if expect is None else lever.parse(expect)
    seconds = _seconds(duration)

    async def change(client: WireClient) -> LeverEvent | LeverRefused:
        return await client.set_lever(lever.name, parsed, expected, reason=reason, for_seconds=seconds, guard=guard)

    _tell(_live(address_of(url, token, database), change), as_json)


@levers.command(epilog="Example: metrale levers undo")
@click.argument("change", default="")
@url_option
@db_option
@json_option
def undo(change: str, url: str | None, token: str | None, database: Path | None, as_json: bool) -> None:
    """Put back what CHANGE (an id of the history; default: the last one) replaced."""
    _tell(_live(address_of(url, token, database), lambda client: client.undo_lever(change)), as_json)


@levers.command(epilog="Example: metrale levers history")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, help="Changes shown, newest first.")
@url_option
@db_option
@json_option
def history(limit: int, url: str | None, token: str | None, database: Path | None, as_json: bool) -> None:
    """The last lever changes: when, who, from where, old and new."""
    from engine.cli.asking import Question, ask
    from telemetry.formats import to_json, to_table

    sql = f"SELECT * FROM lever_changes ORDER BY time DESC LIMIT {limit}"
    result = ask(Question(sql, limit), url, token, database)
    click.echo(to_json(result) if as_json else to_table(result))


@levers.command(epilog="Example: metrale levers diff fast")
@click.argument("left")
@click.argument("right", default="")
@url_option
@db_option
@json_option
def diff(left: str, right: str, url: str | None, token: str | None, database: Path | None, as_json: bool) -> None:
    """Levers in which preset LEFT differs from preset RIGHT (default: the values that hold now)."""
    store = _presets()
    now = {name: value for name, (value, _) in _values(url, token, database).items()}
    found = difference(store.load(left), store.load(right) if right else now)
    if as_json:
        click.echo(json.dumps([{"name": one.name, "left": one.left, "right": one.right} for one in found]))
        return
    for one in found:
        lever = LEVERS[one.name]
        click.echo(f"{one.name}: {lever.show(one.left)} | {lever.show(one.right)}")
    if not found:
        click.echo("No difference.")


@levers.group("preset", epilog="Example: metrale levers preset save fast")
def preset() -> None:
    """Named sets of lever values."""


@preset.command("list", epilog="Example: metrale levers preset list")
@json_option
def preset_list(as_json: bool) -> None:
    """The saved presets."""
    names = _presets().names()
    click.echo(json.dumps(names) if as_json else "\n".join(names) or "No presets are saved.")


@preset.command("show", epilog="Example: metrale levers preset show fast")
@click.argument("name")
@json_option
def preset_show(name: str, as_json: bool) -> None:
    """The values of a preset."""
    values = _presets().load(name)
    lines = "\n".join(f"{lever}: {LEVERS[lever].show(value)}" for lever, value in values.items())
    click.echo(json.dumps(values) if as_json else lines)


@preset.command("save", epilog="Example: metrale levers preset save fast --all")
@click.argument("name")
@click.option("--all", "everything", is_flag=True, help="Also the levers that are at their default.")
@url_option
@db_option
def preset_save(name: str, everything: bool, url: str | None, token: str | None, database: Path | None) -> None:
    """Save the values that hold now as preset NAME."""
    values = {
        lever: value
        for lever, (value, _) in _values(url, token, database).items()
        if everything or value != LEVERS[lever].default
    }
    path = _presets().save(name, values)
    click.echo(f"Saved {len(values)} levers to {path}.")


@preset.command("apply", epilog="Example: metrale levers preset apply fast")
@click.argument("name")
@url_option
@db_option
@json_option
def preset_apply(name: str, url: str | None, token: str | None, database: Path | None, as_json: bool) -> int:
    """Set every lever of preset NAME that differs on a running engine."""
    wanted = _presets().load(name)
    address = address_of(url, token, database)
    now = {lever: value for lever, (value, _) in _values(url, token, database).items()}
    changes = difference(wanted, now)

    async def apply(client: WireClient) -> list[LeverEvent | LeverRefused]:
        return [await client.set_lever(one.name, one.left, one.right, reason=f"preset {name}") for one in changes]

    answers = _live(address, apply)
    refused = [answer for answer in answers if isinstance(answer, LeverRefused)]
    if as_json:
        click.echo(json.dumps([_answer(answer) for answer in answers]))
    else:
        for answer in answers:
            click.echo(_line(answer), err=isinstance(answer, LeverRefused))
        if not changes:
            click.echo("Nothing differs.")
    return 1 if refused else 0


@preset.command("delete", epilog="Example: metrale levers preset delete fast")
@click.argument("name")
def preset_delete(name: str) -> None:
    """Forget preset NAME."""
    _presets().delete(name)


def _presets() -> Presets:
    return Presets(places.config_dir() / "presets")


def _values(url: str | None, token: str | None, database: Path | None) -> dict[str, tuple[Value, str]]:
    """Value and source of every lever: of the running engine, else what a start here would use."""
    address = find_address(url, token, database)
    if address is None:
        values, sources = resolve(environment=os.environ)
        return {name: (values[name], str(sources[name])) for name in LEVERS}

    async def read(client: WireClient) -> tuple[LeverView, ...]:
        return client.welcome.levers if client.welcome else ()

    return {view.name: (view.value, view.source) for view in _live(address, read)}


def _live(address: Address, act: Callable[[WireClient], Awaitable[T]]) -> T:
    async def connected() -> T:
        async with WireClient(address, retry_s=3) as client:
            return await act(client)

    return asyncio.run(connected())


def _tell(answer: LeverEvent | LeverRefused, as_json: bool) -> None:
    if isinstance(answer, LeverRefused) and not as_json:
        raise Failure(answer.message)
    click.echo(json.dumps(_answer(answer)) if as_json else _line(answer))
    if isinstance(answer, LeverRefused):
        raise click.exceptions.Exit(1)


def _answer(answer: LeverEvent | LeverRefused) -> dict[str, Any]:
    import msgspec

    found: dict[str, Any] = msgspec.to_builtins(answer)
    return found


def _line(answer: LeverEvent | LeverRefused) -> str:
    if isinstance(answer, LeverRefused):
        return answer.message
    lever = LEVERS[answer.name]
    change = f"{lever.show(answer.old)} -> {lever.show(answer.new)}"
    return f"{answer.name}: {change} at tick {answer.tick} ({answer.change_id})"


def _described(name: str, value: Value, source: str) -> dict[str, Any]:
    lever = LEVERS[name]
    return {
        "name": name,
        "value": value,
        "default": lever.default,
        "source": source,
        "kind": str(lever.kind),
        "group": lever.group,
        "bounds": lever.bounds,
        "applies": str(lever.applies),
        "lossless": lever.lossless,
        "env": lever.env,
        "flag": lever.flag,
        "help": lever.help,
    }


def _when(applies: str) -> str:
    return {"tick": "at once", "request": "for new requests", "restart": "at start"}[applies]


def _seconds(text: str) -> float:
    if not text:
        return 0.0
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h)?", text.strip())
    if match is None:
        raise click.UsageError(f"{text!r} is no time; write 90s, 5m or 1h.")
    return float(match[1]) * {"ms": 0.001, "s": 1, "m": 60, "h": 3600}[match[2] or "s"]
