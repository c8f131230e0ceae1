"""`metrale completion`: prints the script that completes commands in a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from engine.cli.errors import Failure


@click.command(epilog='Example: eval "$(metrale completion bash)"')
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of SHELL; evaluate it in the shell's start-up file."""
    kind = get_completion_class(shell)
    if kind is None:
        raise Failure(f"Completion for {shell} is not available.")
    from engine.cli.main import cli

    click.echo(kind(cli, {}, "metrale", "_METRALE_COMPLETE").source())
