"""`metrale`: the table of commands, each loaded when it is called, and one sentence for every error."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import click

from engine import __version__
from engine.cli.errors import EXIT_FAILURE, EXIT_USAGE, sentence_of
from engine.levers.spec import LeverError

COMMANDS: dict[str, tuple[str, str]] = {
    "chat": ("engine.cli.chat:chat", "Chat with a model in the terminal; -p or a pipe answers once."),
    "serve": ("engine.cli.serve:serve", "Serve API, page and wire; on a terminal with the operator screen."),
    "top": ("engine.cli.screens:top", "Operator screen on a running engine."),
    "levers": ("engine.cli.levers:levers", "List, read, change and undo levers; presets."),
    "query": ("engine.cli.query:query", "Ask telemetry in SQL, live or afterwards."),
    "views": ("engine.cli.query:views", "The named views of telemetry, each with a sentence."),
    "report": ("engine.cli.runs:report", "What happened in a run, as text or as one page."),
    "replay": ("engine.cli.screens:replay", "A recorded run in the same screens as live."),
    "compare": ("engine.cli.runs:compare", "Two runs side by side."),
    "whatif": ("engine.cli.runs:whatif", "What a run would have delivered with other gate constants."),
    "export": ("engine.cli.runs:export", "Telemetry to Parquet files."),
    "import": ("engine.cli.runs:import_", "Telemetry back from Parquet files."),
    "bench": ("engine.cli.bench:bench", "Benchmarks, ours and peers in alternating runs."),
    "verify-lossless": ("engine.cli.bench:verify_lossless", "Every lane against plain decoding, token for token."),
    "train": ("engine.cli.train:train", "Train a draft head for a model from its own output."),
    "models": ("engine.cli.models:models", "The models that are here and those that can be fetched."),
    "pull": ("engine.cli.models:pull", "Fetch a model, resumable and checked."),
    "doctor": (
        "engine.cli.doctor:doctor",
        "Device, memory, versions, ports, database: what is missing and how to fix it.",
    ),
    "completion": ("engine.cli.completion:completion", "Shell completion for bash, zsh or fish."),
}
"""Name: where the command is, and its line in the help."""


class CommandTable(click.Group):
    """A group that imports a command when it is called, not when help lists it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            from difflib import get_close_matches

            close = get_close_matches(args[0], COMMANDS, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise click.UsageError(f"There is no command {args[0]!r}.{hint}", ctx) from None


@click.group(
    cls=CommandTable,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog='Example: metrale chat -p "Why is the sky blue?"',
)
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.version_option(__version__, prog_name="metrale")
def cli(debug: bool) -> None:
    """An observable, interactive LLM engine: every step traced, every lever live."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 0, 1 for a failure or 2 for wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments[:1] or "--debug" in arguments
    if debug:
        arguments = ["--debug", *(argument for argument in arguments if argument != "--debug")]
    try:
        colour: dict[str, Any] = {"color": False} if os.environ.get("NO_COLOR") else {}
        result = cli.main(arguments, prog_name="metrale", standalone_mode=False, **colour)
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as end:
        return end.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("Stopped.", err=True)
        return 130
    except click.UsageError as error:
        where = f" See {error.ctx.command_path} --help." if error.ctx else ""
        click.echo(f"Error: {error.format_message()}{where}", err=True)
        return EXIT_USAGE
    except BrokenPipeError:
        sys.stderr.close()
        return EXIT_FAILURE
    except Exception as error:
        if type(error) is LeverError:
            click.echo(f"Error: {error}", err=True)
            return EXIT_USAGE
        if debug:
            traceback.print_exc()
        click.echo(f"Error: {sentence_of(error)}", err=True)
        return EXIT_FAILURE
