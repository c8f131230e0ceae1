"""Every way in which a process may end: a clear message, a database that opens, and nothing left behind."""

from __future__ import annotations

import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.protocol.client import ChatError, WireClient, WireClosedError
from engine.protocol.commands import Limits
from engine.protocol.wire import ChatTurn, Delta, Done
from tests.e2e.processes import Home, Serving, family_of, heed_signals, is_gone, serving, wait_for

pytestmark = [pytest.mark.model, pytest.mark.timeout(420)]

STORY = [ChatTurn(role="user", content="Write a very long story about the sea.")]
LONG = Limits(max_tokens=1500, ignore_eos=True)


async def speaking(client: WireClient) -> object:
    messages = client.chat(STORY, limits=LONG)
    async for message in messages:
        if isinstance(message, Delta):
            return messages
    raise AssertionError("no token came")


async def test_a_killed_engine_leaves_a_message_and_a_database_that_opens(served: Serving) -> None:
    async with WireClient(served.url) as client:
        messages = await speaking(client)
        time.sleep(0.5)
        os.kill(served.engine_pid, signal.SIGKILL)
        last = [message async for message in messages][-1]  # type: ignore[attr-defined]
        assert isinstance(last, Done)
        assert "SIGKILL" in last.error
        with pytest.raises(ChatError, match="SIGKILL"):
            await anext(client.chat(STORY))
        assert (await client.query("SELECT sum(emitted) FROM lane_steps")).rows[0][0] > 0
    served.process.terminate()
    assert served.process.wait(20) == 1
    assert served.home.run("query", "SELECT count(*) AS n FROM runs", "--format", "csv").stdout == "n\n1\n"


async def test_a_killed_server_takes_its_engine_along_and_the_database_opens(served: Serving) -> None:
    engine = served.engine_pid
    async with WireClient(served.url, retry_s=0.5) as client:
        messages = await speaking(client)
        time.sleep(0.7)
        served.process.kill()
        with pytest.raises(WireClosedError, match="No server answers"):
            async for _ in messages:  # type: ignore[attr-defined]
                pass
    wait_for(lambda: is_gone(engine), 15, "the engine's end")
    found = served.home.run("query", "SELECT state, (SELECT sum(emitted) FROM lane_steps) AS emitted FROM runs")
    assert found.returncode == 0, found.stderr
    assert "interrupted" in found.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_the_server_in_order_while_a_reply_is_running(served: Serving, number: int) -> None:
    engine = served.engine_pid
    async with WireClient(served.url, retry_s=0.5) as client:
        messages = await speaking(client)
        served.process.send_signal(number)
        last = [message async for message in messages][-1]  # type: ignore[attr-defined]
        assert isinstance(last, Done)
        assert last.reason == "shutdown"
    assert served.process.wait(15) == 0
    assert is_gone(engine)
    state = served.home.run("query", "SELECT state FROM runs", "--format", "csv").stdout.split()
    assert state[1] != "running"


def test_an_answer_through_a_pipe_leaves_no_process(home: Home, model: Path) -> None:
    process = home.start("chat", "--max-tokens", "12", stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write("What is the sea?")
    process.stdin.close()
    process.stdin = None
    wait_for(lambda: len(family_of(process.pid)) >= 2, 60, "server and engine")
    family = family_of(process.pid)
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    assert len(out.strip()) > 3
    assert all(is_gone(pid) for pid in family)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_chat_that_is_interrupted_or_killed_leaves_no_process(home: Home, model: Path, number: int) -> None:
    process = home.start("chat", "-p", "Write a book.", "--max-tokens", "2000")
    wait_for(lambda: len(family_of(process.pid)) >= 2, 60, "server and engine")
    family = family_of(process.pid)
    time.sleep(1)
    process.send_signal(number)
    process.communicate(timeout=30)
    wait_for(lambda: all(is_gone(pid) for pid in family), 30, f"the end of {family}")


class Terminal:
    """A command on a pseudo-terminal of 100 x 30."""

    def __init__(self, home: Home, *arguments: str) -> None:
        import fcntl
        import struct
        import termios

        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        environment = {**home.environment(), "TERM": "xterm-256color"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "engine.cli", *arguments],
            stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True, preexec_fn=heed_signals,
        )  # fmt: skip
        os.close(slave)
        self.seen = b""

    def read(self, seconds: float = 0.2) -> bytes:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if select.select([self.master], [], [], 0.05)[0]:
                try:
                    self.seen += os.read(self.master, 65536)
                except OSError:
                    break
        return self.seen

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        os.close(self.master)
        self.process.wait()


def test_the_screen_of_a_chat_closes_with_its_terminal_and_leaves_no_process(home: Home, model: Path) -> None:
    terminal = Terminal(home, "chat")
    try:
        wait_for(lambda: terminal.read() and len(family_of(terminal.process.pid)) >= 2, 60, "server and engine")
        family = family_of(terminal.process.pid)
        terminal.process.send_signal(signal.SIGHUP)
        wait_for(lambda: terminal.read() and terminal.process.poll() is not None, 30, "the end of the screen")
        wait_for(lambda: all(is_gone(pid) for pid in family), 30, f"the end of {family}")
    finally:
        terminal.close()


def test_quitting_the_screen_of_a_chat_leaves_no_process(home: Home, model: Path) -> None:
    terminal = Terminal(home, "chat")
    try:
        wait_for(lambda: terminal.read() and len(family_of(terminal.process.pid)) >= 2, 60, "server and engine")
        family = family_of(terminal.process.pid)
        terminal.read(3)
        os.write(terminal.master, b"\x11")  # Ctrl-Q
        wait_for(lambda: terminal.read() and terminal.process.poll() is not None, 30, "the end of the screen")
        assert terminal.process.returncode == 0
        wait_for(lambda: all(is_gone(pid) for pid in family), 30, f"the end of {family}")
    finally:
        terminal.close()


def refused(home: Home, *arguments: str) -> str:
    """The one line of a command that fails with exit code 1."""
    found = home.run(*arguments)
    assert found.returncode == 1, (found.returncode, found.stderr)
    lines = [line for line in found.stderr.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1, found.stderr
    assert "Traceback" not in found.stderr
    return lines[0]


def test_what_a_server_cannot_start_with_is_one_sentence(home: Home, model: Path, tmp_path: Path) -> None:
    serve = ("serve", "--no-tui", "--port", "0")
    assert "nowhere.gguf" in refused(home, *serve, "nowhere.gguf")

    truncated = tmp_path / "truncated.gguf"
    truncated.write_bytes(model.read_bytes()[:5000])
    assert "truncated.gguf" in refused(home, *serve, str(truncated))

    magic = tmp_path / "magic.gguf"
    magic.write_bytes(b"not a model at all" * 100)
    assert "magic.gguf" in refused(home, *serve, str(magic))

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert str(port) in refused(home, "serve", "--no-tui", "--port", str(port))

    assert "--token" in home.run("serve", "--no-tui", "--host", "0.0.0.0", "--port", "0").stderr


def test_a_second_server_on_the_same_database_is_one_sentence_and_harms_nothing(home: Home, model: Path) -> None:
    with serving(home) as first:
        assert "in use" in refused(home, "serve", "--no-tui", "--port", "0")
        assert home.run("query", "SELECT 1 AS one", "--format", "csv").stdout == "one\n1\n"
        assert first.process.poll() is None
