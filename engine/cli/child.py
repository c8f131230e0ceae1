"""A server as a child of a screen: started at once, told to leave, and never left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.parse
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import click

from engine.cli import places
from engine.cli.errors import Failure
from engine.server.sockets import bind, reachable

LEAVE_S = 15.0


class ChildServer:
    """`metrale serve --no-tui` in a process group of its own, so that Ctrl-C reaches the screen alone.

    The socket is bound here and handed down: its address is known before the child runs, and clients may
    connect while it starts. The child leaves when its standard input, the leash, is closed.
    """

    def __init__(self, arguments: Sequence[str], host: str = "127.0.0.1", port: int = 0, token: str = "") -> None:
        self._arguments = tuple(arguments)
        self._listener: socket.socket | None = bind(host, port)
        self._token = token
        number = self._listener.getsockname()[1]
        self.url = f"http://{reachable(host)}:{number}"
        self._process: subprocess.Popen[bytes] | None = None
        self.log = places.log_file()

    @property
    def screen_url(self) -> str:
        """With the token in the fragment, where there is one."""
        return with_token(self.url, self._token)

    def __enter__(self) -> Self:
        listener, self._listener = self._listener, None
        if listener is None:
            raise Failure("This server was started already.")
        descriptor = listener.fileno()
        command = [sys.executable, "-m", "engine.cli", "serve", *self._arguments]
        with self.log.open("wb") as log, listener:
            self._process = subprocess.Popen(
                [*command, "--no-tui", "--leash", "--fd", str(descriptor)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(descriptor,),
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def obituary(self) -> str:
        """One sentence once the server has ended, empty before."""
        if self._process is None or self._process.poll() is None:
            return ""
        last = _last_line(self.log)
        return f"The server has ended: {last}" if last else f"The server has ended; its log is {self.log}."

    def stop(self) -> None:
        """Let it leave in order, then make sure."""
        process = self._process
        if process is None:
            return
        if process.stdin:
            process.stdin.close()
        try:
            process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise


def with_token(url: str, token: str) -> str:
    """The URL for a screen; a token travels in the fragment, which is never sent to a server."""
    return f"{url.partition('#')[0]}#token={urllib.parse.quote(token, safe='')}" if token else url


def arguments_of(context: click.Context) -> list[str]:
    """The options that this command was given, spelled again for the child; tokens travel by environment."""
    arguments: list[str] = []
    model = context.params.get("model")
    if model:
        arguments.append(str(model))
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if not isinstance(parameter, click.Option) or source is not click.core.ParameterSource.COMMANDLINE:
            continue
        if parameter.name in ("no_tui", "leash", "fd", "host", "port", "token", "read_token", *_OF_THE_SCREEN):
            continue
        arguments += _spelled(parameter, context.params[parameter.name or ""])
    if host := context.params.get("host"):
        arguments += ["--host", host]
    for name in ("token", "read_token"):
        if value := context.params.get(name):
            os.environ[f"METRALE_{name.upper()}"] = value
    return arguments


_OF_THE_SCREEN = ("prompt", "system", "conversation", "url", "max_tokens", "temperature", "as_json", "no_mouse")


def _spelled(option: click.Option, value: object) -> list[str]:
    flag = option.opts[0]
    if option.is_flag:
        return [flag] if value else []
    values = value if isinstance(value, tuple) else (value,)
    return [word for one in values for word in (flag, _word(one))]


def _word(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _last_line(path: os.PathLike[str]) -> str:
    try:
        with open(path, errors="replace") as file:
            lines = [line.strip() for line in file if line.strip()]
    except OSError:
        return ""
    return lines[-1].removeprefix("Error: ")[:300] if lines else ""
