"""Errors as a user sees them: one sentence each, and two exit codes."""

from __future__ import annotations

from engine.levers.spec import LeverError

EXIT_FAILURE = 1
EXIT_USAGE = 2

OURS = ("engine.", "telemetry.", "tui.", "dashboards.")


class Failure(Exception):  # noqa: N818 - what a command ends with, in the user's words
    """A command could not do what it was asked; the text is one sentence for the user."""


def sentence_of(error: BaseException) -> str:
    """What to tell a user of an exception: its own sentence if it is one of ours, else what it is."""
    text = " ".join(str(error).split())
    if type(error).__module__.startswith(OURS) and text:
        begins = text if "_" in text.split(" ")[0] or isinstance(error, LeverError) else text[:1].upper() + text[1:]
        return begins + ("" if text.endswith((".", "!", "?")) else ".")
    if isinstance(error, OSError) and error.strerror:
        where = f" {error.filename}" if error.filename else ""
        return f"{error.strerror}{where}."
    return f"{type(error).__name__}: {text or 'no more is known'}; run again with --debug to see where."
