"""`metrale chat`: the terminal chat, or one answer on standard output."""

from __future__ import annotations

import asyncio
import select
import sys
import unicodedata
from pathlib import Path
from typing import Any

import click

from engine.cli.child import ChildServer, arguments_of, with_token
from engine.cli.errors import Failure
from engine.cli.options import DEFAULT_MODEL, db_option, lever_options, lever_values
from engine.cli.serve import engine_options, find_model

PIPE_S = 1.0
"""Time that a pipe beside `-p` has to bring its first byte."""


@click.command(epilog='Example: metrale chat -p "Why is the sky blue?"   or   cat notes.txt | metrale chat')
@click.argument("model", default=DEFAULT_MODEL)
@click.option("-p", "--prompt", help="Answer this on standard output and leave.")
@click.option("--system", help="System prompt, with -p or a pipe.")
@click.option("--max-tokens", type=click.IntRange(1), help="Longest answer, with -p or a pipe.")
@click.option("--temperature", type=click.FloatRange(0, 2), help="0 is greedy; 0.7 unless given, with -p or a pipe.")
@click.option("--conversation", default="", metavar="NAME", help="A saved conversation to go on with.")
@click.option("--no-mouse", is_flag=True, help="Leave the mouse to the terminal.")
@click.option("--url", envvar="METRALE_URL", metavar="URL", help="A running engine; else one is started.")
@click.option("--token", envvar="METRALE_TOKEN", default="", metavar="TOKEN", help="Its token, if it asks for one.")
@click.option("--json", "as_json", is_flag=True, help="With -p or a pipe: print the answer and its figures as JSON.")
@db_option
@engine_options
@lever_options
def chat(
    model: str, prompt: str | None, system: str | None, max_tokens: int | None, temperature: float | None,
    conversation: str, no_mouse: bool, url: str | None, token: str, as_json: bool, database: Path | None,
    preset: str | None, **options: Any,
) -> int:  # fmt: skip
    """Chat with MODEL (a known name, a GGUF file or a Hugging Face directory)."""
    lever_values(options, preset)
    question = _question(prompt)
    if question is None and conversation:
        _check_saved(conversation)
    if question is None and not sys.stdout.isatty():
        raise click.UsageError("The screen needs a terminal; give a prompt with -p or through a pipe.")
    if url:
        return _talk(url, token, question, conversation, not no_mouse, _once(system, max_tokens, temperature, as_json))
    find_model(model)
    with ChildServer(arguments_of(click.get_current_context()), token=token) as child:
        once = _once(system, max_tokens, temperature, as_json)
        return _talk(child.url, token, question, conversation, not no_mouse, once, child)


def _once(system: str | None, max_tokens: int | None, temperature: float | None, as_json: bool) -> dict[str, Any]:
    return {"system": system, "max_tokens": max_tokens, "temperature": temperature, "as_json": as_json}


def _check_saved(name: str) -> None:
    """Before anything is started. Raises `Failure` for a conversation that is not there."""
    from tui.sessions import SessionError, Store

    store = Store()
    try:
        store.read(name)
    except SessionError:
        known = ", ".join(repr(saved.title or saved.id) for saved in store.saved()[:8])
        there = f"there are: {known}" if known else "none is saved yet"
        raise Failure(f"There is no saved conversation {name!r}; {there}.") from None


def _question(prompt: str | None) -> str | None:
    """What is asked without a screen: the option, what comes through the pipe, or both."""
    piped = _piped(None if prompt is None else PIPE_S)
    if prompt is None and not piped.strip():
        return None
    return "\n\n".join(part for part in (prompt, piped.strip()) if part)


def _piped(patience_s: float | None) -> str:
    """What a pipe brings; an inherited one that stays silent for `patience_s` is taken for empty."""
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    try:
        spoke = patience_s is None or select.select([sys.stdin], [], [], patience_s)[0]
    except (OSError, ValueError):
        spoke = True  # no descriptor to wait on, so reading does not block
    return sys.stdin.read() if spoke else ""


def _talk(
    url: str, token: str, question: str | None, conversation: str, mouse: bool, once: dict[str, Any],
    child: ChildServer | None = None,
) -> int:  # fmt: skip
    if question is not None:
        return asyncio.run(_answer(url, token, question, once, child))
    from tui.app import run

    run(with_token(url, token), alive=child.obituary if child else lambda: "", conversation=conversation, mouse=mouse)
    return 0


async def _answer(url: str, token: str, question: str, once: dict[str, Any], child: ChildServer | None) -> int:
    """One reply on standard output."""
    from engine.protocol.client import Address, WireClient

    async with WireClient(Address.parse(url, token), retry_s=60 if child else 5) as client:
        ready = asyncio.ensure_future(client.ready())
        while not ready.done():
            await asyncio.wait({ready}, timeout=0.2)
            if child and (sentence := child.obituary()):
                ready.cancel()
                raise Failure(sentence)
        ready.result()
        return await _print_reply(client, question, once)


def _harmless(text: str) -> str:
    """Text that cannot steer the terminal: control characters beside line breaks and tabs are dropped."""
    return "".join(letter for letter in text if letter in "\n\t" or unicodedata.category(letter) != "Cc")


async def _print_reply(client: Any, question: str, once: dict[str, Any]) -> int:
    import msgspec

    from engine.protocol.commands import CHAT_SAMPLING, Limits
    from engine.protocol.wire import ChatTurn, Delta, Done

    turns = [ChatTurn(role="system", content=once["system"])] if once["system"] else []
    turns.append(ChatTurn(role="user", content=question))
    sampling = CHAT_SAMPLING
    if once["temperature"] is not None:
        sampling = msgspec.structs.replace(sampling, temperature=once["temperature"])
    pieces: list[str] = []
    async for message in client.chat(turns, sampling, Limits(max_tokens=once["max_tokens"] or 0)):
        piece = message.text if isinstance(message, Delta | Done) else ""
        pieces.append(piece)
        if not once["as_json"]:
            click.echo(_harmless(piece) if sys.stdout.isatty() else piece, nl=False)
        if isinstance(message, Done):
            if once["as_json"]:
                figures = msgspec.to_builtins(message.usage)
                click.echo(msgspec.json.encode({"text": "".join(pieces), "reason": message.reason, "usage": figures}))
            else:
                click.echo()
            if message.error:
                raise Failure(message.error)
    return 0
