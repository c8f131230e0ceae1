"""Real processes for the end-to-end tests: started as a user would, watched by process id, never left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from engine.cli import places

START_S = 300.0
"""Also enough to compile the kernels, should their sources have changed."""


def wait_for(condition: Callable[[], object], seconds: float = 15.0, what: str = "") -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what or condition}"
        time.sleep(0.05)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def family_of(pid: int) -> list[int]:
    """Every process that descends from `pid`."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def heed_signals() -> None:
    """In a child: the signals of a terminal, which whoever started the tests in the background may have had ignored."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@dataclass
class Home:
    """A user's directories, all below one temporary one; models come from the real cache."""

    root: Path
    database: Path = field(init=False)

    def __post_init__(self) -> None:
        self.database = self.root / "telemetry.duckdb"

    def environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("METRALE_") or "CACHE" in key}
        return {
            **kept,
            "METRALE_STATE": str(self.root / "state"),
            "METRALE_CONFIG": str(self.root / "config"),
            "METRALE_DB": str(self.database),
            "NO_COLOR": "1",
            "PYTHONUNBUFFERED": "1",
        }

    def start(self, *arguments: str, **more: object) -> subprocess.Popen[str]:
        return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
            [sys.executable, "-m", "engine.cli", *arguments],
            env=self.environment(),
            stdin=more.pop("stdin", subprocess.DEVNULL),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=heed_signals,
            **more,
        )

    def run(self, *arguments: str, text: str = "", seconds: float = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "engine.cli", *arguments],
            env=self.environment(),
            input=text,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )


@dataclass
class Serving:
    """`metrale serve` and its engine."""

    home: Home
    process: subprocess.Popen[str]
    url: str

    @property
    def engine_pid(self) -> int:
        (pid,) = [pid for pid in family_of(self.process.pid) if "engine.runtime" in _command(pid)]
        return pid


@contextlib.contextmanager
def serving(home: Home, *arguments: str) -> Iterator[Serving]:
    """A server with a loaded model, ended at the end of the block."""
    process = home.start("serve", "--no-tui", "--port", "0", *arguments)
    try:
        wait_for(lambda: places.read_owner(home.database) or process.poll() is not None, START_S, "the server's note")
        owner = places.read_owner(home.database)
        assert owner is not None, process.communicate()[1]
        wait_for(lambda: _is_ready(owner.url) or process.poll() is not None, START_S, "a loaded model")
        yield Serving(home, process, owner.url)
    finally:
        family = family_of(process.pid)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
        for pid in (process.pid, *family):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def _is_ready(url: str) -> bool:
    import httpx

    try:
        answer = httpx.get(f"{url}/readyz", trust_env=False, timeout=5)
    except httpx.HTTPError:
        return False
    assert answer.json()["status"] != "failed", answer.text
    return answer.status_code == 200


def _command(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.NoSuchProcess:
        return ""
