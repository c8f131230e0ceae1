"""`metrale serve`: the server, with the operator screen when there is a terminal."""

from __future__ import annotations

import logging
import socket
import sys
from pathlib import Path
from typing import Any

import click

from engine.cli.errors import Failure
from engine.cli.options import DEFAULT_MODEL, DEFAULT_PORT, database_of, db_option, lever_options, lever_values


def engine_options(function: Any) -> Any:
    """How the model is run."""
    for option in (
        click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16"]), default="auto", help="Arithmetic."),
        click.option(
            "--backend", type=click.Choice(["auto", "native", "cuda", "reference"]), default="auto", help="Kernels."
        ),
        click.option("--threads", type=click.IntRange(0, 1024), default=0, help="Threads of the engine; 0: all cores."),
        click.option(
            "--otlp", envvar="METRALE_OTLP", metavar="URL", default="", help="Also send spans to a collector."
        ),
    ):
        function = option(function)
    return function


@click.command(epilog="Example: metrale serve smollm2 --port 8080 --drafter ngram --no-tui")
@click.argument("model", default=DEFAULT_MODEL)
@click.option("--host", default="127.0.0.1", help="Address to listen on; any but loopback needs a token.")
@click.option("--port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, help="0 takes a free one.")
@click.option("--host-name", "names", multiple=True, help="A further name of this server or of its proxy.")
@click.option("--token", envvar="METRALE_TOKEN", default="", help="Token that allows everything.")
@click.option("--read-token", envvar="METRALE_READ_TOKEN", default="", help="Token that allows looking only.")
@click.option("--no-tui", is_flag=True, help="A plain log instead of the operator screen.")
@click.option("--leash", is_flag=True, hidden=True, help="Leave when standard input closes.")
@click.option("--no-engine", is_flag=True, hidden=True, help="Recorded runs only.")
@click.option("--fd", type=int, default=-1, hidden=True, help="A listening socket that was inherited.")
@db_option
@engine_options
@lever_options
def serve(
    model: str, host: str, port: int, no_tui: bool, leash: bool, no_engine: bool, fd: int, database: Path | None,
    preset: str | None, **options: Any,
) -> int:  # fmt: skip
    """Serve API, page and wire on one port. MODEL is a known name, a GGUF file or a Hugging Face directory."""
    from engine.server.sockets import bind, bracketed

    levers, sources = lever_values(options, preset)
    if sys.stdout.isatty() and sys.stdin.isatty() and not no_tui and fd < 0:
        return _with_screen(model, host, port, database, options, preset)
    file = None if no_engine else find_model(model)
    from engine.cli.compose import ServeOptions
    from engine.cli.compose import serve as run

    listener = socket.socket(fileno=fd) if fd >= 0 else bind(host, port)
    chosen = ServeOptions(
        model=file,
        database=database_of(database),
        levers=levers,
        sources=sources,
        host=host,
        **{name: options[name] for name in ("names", "token", "read_token", "dtype", "backend", "threads", "otlp")},
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        address, number = listener.getsockname()[:2]
        logging.getLogger("metrale").info("Serving on http://%s:%d", bracketed(address), number)
        return run(chosen, listener, leash)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def find_model(name: str) -> Path:
    """The model file, fetched first with a progress bar if it is a known one that is not here."""
    from engine.cli.progress import bar
    from engine.fetch import resolve_model

    if name == "default":
        name = DEFAULT_MODEL
    with bar("Fetching") as progress:
        return resolve_model(name, progress=progress)


def _with_screen(
    model: str, host: str, port: int, database: Path | None, options: dict[str, Any], preset: str | None
) -> int:
    """The server in a process of its own, the operator screen in this one."""
    from engine.cli.child import ChildServer, arguments_of

    find_model(model)
    arguments = arguments_of(click.get_current_context())
    with ChildServer(arguments, host, port, options["token"]) as child:
        try:
            from tui.app import run
        except ImportError as error:
            raise Failure(f"The screen is not installed: {error}.") from None
        run(child.screen_url, mode="top", alive=child.obituary)
    return 0
