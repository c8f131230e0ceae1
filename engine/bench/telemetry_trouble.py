"""What trouble with the database or the collector does to decoding: health and trouble in turn, every half second.

The trouble is real: a full file system, a file that may not be written, a file replaced under the recorder, a
collector that is gone or answers late. Some of it needs the rights of root and is left out without them. The kind
`none` is no trouble at all, and says how finely the others can be told.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path

import numpy as np

from engine.bench.collector import DOWN, Collector
from engine.bench.result import BenchResult
from engine.bench.telemetry_recorder import Recorder, Speaker
from telemetry.database import open_for_reading

LEVEL, TOKENS = 2, 256
SPELL_S = 0.5
"""Of trouble that was noticed, and of health between two troubles."""
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
        case "none":
            return Case(kind, "", database, contextlib.nullcontext)
        case "disk full":
            disk = stack.enter_context(_small_disk(directory / "disk"))
            return Case(kind, "full", disk / database.name, lambda: _full(disk))
        case "file read-only":
            with _immutable(directory):
                pass
            return Case(kind, "written", database, lambda: _immutable(directory))
        case "file replaced":
            return Case(kind, "opened", database, lambda: _replaced(database))
    collector = Collector()
    stack.callback(collector.stop)
    delay_s = SLOW_S if kind == "collector slow" else DOWN
    return Case(
        kind, "collector", database, lambda: _answering(collector, delay_s), f"http://127.0.0.1:{collector.port}"
    )


def _row(case: Case, speaker: Speaker, cycles: int) -> dict[str, object]:
    with Recorder(case.database, case.collector) as recorder:
        cycle = Cycle(case, recorder, cycles)
        stamps: list[list[int]] = []
        speaker.speak(recorder, LEVEL)
        thread = threading.Thread(target=cycle.run)
        thread.start()
        while thread.is_alive():
            stamps.append(speaker.speak(recorder, LEVEL))
        thread.join()
        lost = dict(recorder.lost)
    if cycle.error is not None:
        raise cycle.error
    with contextlib.closing(open_for_reading(case.database)) as reader:
        ((steps,),) = reader.execute("SELECT count(*) FROM lane_steps").fetchall()
    if not steps:
        raise TroubleError(f"{case.name}: nothing was recorded after it")
    return {
        "trouble": case.name, "cycles": cycles, **_ratios(cycle.spells, stamps), "said_after_s": cycle.said_after_s,
        **cycle.recorder_percent(), "lost": sum(lost.values()), "said": cycle.said,
    }  # fmt: skip


class State(StrEnum):
    """Of the recorder, as the benchmark makes it."""

    HEALTHY = "healthy"
    NOTICING = "noticing"
    TROUBLED = "troubled"
    RECOVERING = "recovering"


@dataclass(frozen=True, slots=True)
class Spell:
    """A stretch of one state."""

    state: State
    begun_ns: int
    recorder_cpu_s: float
    """Processor time that the recorder had used by then."""


class Cycle:
    """Healthy, in trouble, recovering, again and again on a thread of its own, while the engine speaks."""

    def __init__(self, case: Case, recorder: Recorder, cycles: int) -> None:
        self._case = case
        self._recorder = recorder
        self._cycles = cycles
        self.spells: list[Spell] = []
        self.said = ""
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            for _ in range(self._cycles):
                self._once()
            self._begin(State.HEALTHY)
            time.sleep(SPELL_S)
            self._begin(State.HEALTHY)
        except Exception as error:  # told by the thread that waits for this one
            self.error = error

    def _once(self) -> None:
        case, recorder = self._case, self._recorder
        self._begin(State.HEALTHY)
        time.sleep(SPELL_S)
        self._begin(State.NOTICING)
        with case.trouble():
            self.said = _until(lambda: case.said in recorder.trouble, recorder, case.name)
            self._begin(State.TROUBLED)
            time.sleep(SPELL_S)
        self._begin(State.RECOVERING)
        _until(lambda: not recorder.trouble, recorder, case.name)

    def _begin(self, state: State) -> None:
        self.spells.append(Spell(state, time.perf_counter_ns(), self._recorder.cpu_s))

    @property
    def said_after_s(self) -> float:
        """Median time until the recorder said what is wrong."""
        return statistics.median(
            (after.begun_ns - before.begun_ns) / 1e9
            for before, after in pairwise(self.spells)
            if before.state is State.NOTICING
        )

    def recorder_percent(self) -> dict[str, float]:
        """Processor time of the recorder in percent of a core, by state."""
        used, lasted = Counter[State](), Counter[State]()
        for before, after in pairwise(self.spells):
            used[before.state] += round((after.recorder_cpu_s - before.recorder_cpu_s) * 1e9)
            lasted[before.state] += after.begun_ns - before.begun_ns
        return {f"recorder_percent_{state}": round(used[state] / lasted[state] * 100, 2) for state in lasted}


def _ratios(spells: Sequence[Spell], stamps: Sequence[Sequence[int]]) -> dict[str, float]:
    """Speed in trouble over the healthy speed before and after it: of the trouble itself, and from its beginning until
    the recorder is well again.

    A token later in a reply takes longer, so each is counted with the median time of its place. The interval holds the
    mean of 95 in 100 samples of cycles, drawn with replacement."""
    shortest = min(map(len, stamps))
    usual = np.median([np.diff(reply[:shortest]) for reply in stamps], axis=0)
    ends = np.concatenate([np.asarray(reply[1:shortest]) for reply in stamps])
    taken = np.concatenate([np.diff(reply[:shortest]) for reply in stamps])
    usual = np.tile(usual, len(stamps))

    def speed(first: int, beyond: int) -> float:
        """Against the usual one, from one spell up to another."""
        there = (ends >= spells[first].begun_ns) & (ends < spells[beyond].begun_ns)
        return float(usual[there].sum() / taken[there].sum())

    rng = np.random.default_rng(3)
    found: dict[str, float] = {}
    for name, first, beyond in (("ratio", 2, 3), ("ratio_until_well", 1, 4)):
        ratios = np.array(
            [
                speed(at + first, at + beyond) * 2 / (speed(at, at + 1) + speed(at + 4, at + 5))
                for at in range(0, len(spells) - 5, 4)
            ]
        )
        means = np.sort(rng.choice(ratios, (2000, len(ratios))).mean(axis=1))
        found |= {
            f"{name}_mean": float(ratios.mean()), f"{name}_median": float(np.median(ratios)),
            f"{name}_from": float(means[50]), f"{name}_to": float(means[-50]),
        }  # fmt: skip
    return found


def _until(claim: Callable[[], bool], recorder: Recorder, name: str) -> str:
    """Wait for a claim about what the recorder says; returns what it says then. Raises `TroubleError`."""
    deadline = time.monotonic() + SEEN_S
    while not claim():
        if time.monotonic() > deadline:
            raise TroubleError(f"{name}: after {SEEN_S:g} s the recorder says {recorder.trouble!r}")
        time.sleep(0.05)
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
    """Full, and full again where the recorder gave something back."""
    ballast, done = disk / "ballast", threading.Event()

    def fill() -> None:
        with open(ballast, "wb") as file:
            while not done.wait(0.05):
                with contextlib.suppress(OSError):  # the recorder may take the last of it meanwhile
                    if free := shutil.disk_usage(disk).free:
                        os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), free)

    thread = threading.Thread(target=fill)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
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


@contextlib.contextmanager
def _answering(collector: Collector, delay_s: float) -> Iterator[None]:
    collector.answer_after(delay_s)
    try:
        yield
    finally:
        collector.answer_after(0.0)
