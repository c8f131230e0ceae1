"""What trouble with the database or the collector does to decoding: healthy and troubled replies in turn.

The trouble is real: a full file system, a file that may not be written, a file replaced under the recorder, a
collector that is gone or answers late. Some of it needs the rights of root and is left out without them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from engine.bench.result import BenchResult, Spread
from engine.bench.telemetry_recorder import Recorder, Speaker
from telemetry.database import open_for_reading

LEVEL, TOKENS = 2, 512
SEEN_S = 20.0
"""Time in which trouble must be said, and in which its end must be noticed."""
DISK_MB = 64
SLOW_S = 6.0
"""Longer than an export waits for its answer."""

Progress = Callable[[str], None]
Trouble = Callable[[], AbstractContextManager[None]]


class TroubleError(RuntimeError):
    """Trouble was not noticed, or its end was not."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    said: str
    """A word of the sentence that must be seen."""
    database: Path
    trouble: Trouble
    collector: str = ""


def measure(
    model: Path, directory: Path, result: BenchResult, pairs: int, kinds: Sequence[str], progress: Progress
) -> None:
    """Add a row for every kind of trouble: the throughput in trouble over the healthy one, what was said and lost."""
    speaker = Speaker(model, TOKENS)
    for kind in kinds:
        progress(f"trouble: {kind}")
        with contextlib.ExitStack() as stack:
            try:
                case = _case(kind, directory, stack)
            except (OSError, subprocess.CalledProcessError):
                result.notes.append(f"trouble: {kind} was left out, it needs the rights of root")
                continue
            result.rows.append(_row(case, speaker, pairs))


def _case(kind: str, directory: Path, stack: contextlib.ExitStack) -> Case:
    """Raises `OSError` or `CalledProcessError` where this user may not make the trouble."""
    database = directory / f"{kind}.duckdb"
    match kind:
        case "disk full":
            disk = stack.enter_context(_small_disk(directory / "disk"))
            return Case(kind, "full", disk / database.name, lambda: _full(disk))
        case "file read-only":
            with _immutable(directory):
                pass
            return Case(kind, "written", database, lambda: _immutable(directory))
        case "file replaced":
            return Case(kind, "opened", database, lambda: _replaced(database))
    collector = _Collector()
    stack.callback(collector.stop)
    disturbed = _disturbance(collector, SLOW_S if kind == "collector slow" else None)
    return Case(kind, "collector", database, disturbed, f"http://127.0.0.1:{collector.port}")


def _row(case: Case, speaker: Speaker, pairs: int) -> dict[str, object]:
    ratios, sentence = [], ""
    with Recorder(case.database, case.collector) as recorder:
        speaker.tokens_per_s(recorder, LEVEL)
        for at in range(pairs):
            speed: dict[bool, float] = {}
            for troubled in (True, False) if at % 2 else (False, True):
                if troubled:
                    with case.trouble():
                        speed[troubled] = speaker.tokens_per_s(recorder, LEVEL)
                        sentence = _until(lambda: case.said in recorder.trouble, recorder, case.name)
                    _until(lambda: not recorder.trouble, recorder, case.name)
                else:
                    speed[troubled] = speaker.tokens_per_s(recorder, LEVEL)
            ratios.append(speed[True] / speed[False])
        lost = dict(recorder.lost)
    spread = Spread.of(ratios)
    with contextlib.closing(open_for_reading(case.database)) as reader:
        ((steps,),) = reader.execute("SELECT count(*) FROM lane_steps").fetchall()
    if not steps:
        raise TroubleError(f"{case.name}: nothing was recorded after it")
    return {
        "trouble": case.name, "pairs": spread.count, "ratio_median": spread.median, "ratio_low": spread.low,
        "ratio_high": spread.high, "lost": sum(lost.values()), "said": sentence,
    }  # fmt: skip


def _until(claim: Callable[[], bool], recorder: Recorder, name: str) -> str:
    """Wait for a claim about what the recorder says; returns what it says then. Raises `TroubleError`."""
    deadline = time.monotonic() + SEEN_S
    while not claim():
        if time.monotonic() > deadline:
            raise TroubleError(f"{name}: after {SEEN_S:g} s the recorder says {recorder.trouble!r}")
        time.sleep(0.02)
    return recorder.trouble


# ---- kinds of trouble -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _small_disk(at: Path) -> Iterator[Path]:
    at.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(at)], check=True, capture_output=True
    )
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=False)


@contextlib.contextmanager
def _full(disk: Path) -> Iterator[None]:
    ballast = disk / "ballast"
    with contextlib.suppress(OSError):  # the recorder writes at the same time and may take the last of it
        ballast.write_bytes(bytes(shutil.disk_usage(disk).free))
    try:
        yield
    finally:
        ballast.unlink()


@contextlib.contextmanager
def _immutable(directory: Path) -> Iterator[None]:
    """Not even root may write; a write permission taken away would not disturb a process that has the file open."""
    files = [str(path) for path in (directory, *directory.iterdir())]
    subprocess.run(["chattr", "+i", *files], check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", *files], check=True, capture_output=True)


@contextlib.contextmanager
def _replaced(database: Path) -> Iterator[None]:
    """By something that is no database, which goes away again."""
    letter = database.with_name("letter")
    letter.write_bytes(b"Dear reader, " * 1000)
    os.replace(letter, database)
    try:
        yield
    finally:
        database.unlink(missing_ok=True)


class _Collector:
    """A process that takes spans and forgets them."""

    def __init__(self) -> None:
        self.port = 0
        self.start(0.0)

    def start(self, delay_s: float) -> None:
        command = [sys.executable, "-m", "engine.bench.telemetry_trouble", str(self.port), str(delay_s)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        self.port = int(self._process.stdout.readline()) if self._process.stdout else 0

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


def _disturbance(collector: _Collector, delay_s: float | None) -> Trouble:
    """The collector gone, or late."""

    @contextlib.contextmanager
    def disturbed() -> Iterator[None]:
        collector.stop()
        if delay_s is not None:
            collector.start(delay_s)
        try:
            yield
        finally:
            if delay_s is not None:
                collector.stop()
            collector.start(0.0)

    return disturbed


def collect(port: int, delay_s: float) -> None:
    """The process of a collector: answer everything after a delay."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            time.sleep(delay_s)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    collect(int(sys.argv[1]), float(sys.argv[2]))
