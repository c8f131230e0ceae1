"""What a benchmark says: figures with spread, ratios against peers, and where and with what they were measured."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

import engine

PACKAGES = ("torch", "transformers", "llama-cpp-python", "duckdb", "textual", "opentelemetry-sdk")


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, extremes and count of repeated measurements."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values), len(values))

    def show(self) -> str:
        return f"{self.median:,.4g} ({self.low:,.4g} to {self.high:,.4g}, n={self.count})"


@dataclass(slots=True)
class BenchResult:
    """One benchmark; `figures` are medians, `spread` the whole of each, `ratios` ours over theirs by peer."""

    name: str
    figures: dict[str, float] = field(default_factory=dict)
    spread: dict[str, Spread] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    rows: list[dict[str, object]] = field(default_factory=list)
    """A table, where the benchmark has more to say than single figures."""

    def add(self, name: str, values: Sequence[float]) -> None:
        self.spread[name] = Spread.of(values)
        self.figures[name] = self.spread[name].median

    def compare(self, peer: str, ours: Sequence[float], theirs: Sequence[float]) -> None:
        """The median of the ratios of runs that alternated, ours over theirs."""
        self.ratios[peer] = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode({**self._fields(), **provenance()}))

    def _fields(self) -> dict[str, object]:
        names = ("name", "figures", "spread", "ratios", "notes", "rows")
        return {name: getattr(self, name) for name in names}

    def text(self) -> str:
        lines = [self.name, *(f"  {name:<34} {spread.show()}" for name, spread in self.spread.items())]
        lines += [f"  {name:<34} {value:,.4g}" for name, value in self.figures.items() if name not in self.spread]
        lines += [f"  {'ratio to ' + peer:<34} {ratio:.3f}" for peer, ratio in self.ratios.items()]
        if self.rows:
            lines += ["", *_table(self.rows)]
        lines += [f"  {note}" for note in self.notes]
        where = provenance()
        lines.append(f"  {where['machine']} | {where['versions']} | commit {where['commit']}")
        return "\n".join(lines)


def provenance() -> dict[str, object]:
    """Machine, versions and commit, as every result page wants them."""
    return {"machine": machine(), "versions": versions(), "commit": commit()}


def machine() -> str:
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return f"{model}, {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores"


def versions() -> dict[str, str]:
    found = {"metrale": engine.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def alternate(
    rounds: int, contestants: Mapping[str, Callable[[], float]], progress: Callable[[str], None] = lambda _: None
) -> dict[str, list[float]]:
    """Run each contestant once a round, in turn, the order reversed every other round; one warm-up round is dropped."""
    got: dict[str, list[float]] = {name: [] for name in contestants}
    for at in range(rounds + 1):
        order = list(contestants) if at % 2 else list(contestants)[::-1]
        for name in order:
            progress(f"round {at}/{rounds}: {name}")
            value = contestants[name]()
            if at:
                got[name].append(value)
    return got


def _table(rows: Sequence[Mapping[str, object]]) -> list[str]:
    heads = list(rows[0])
    cells = [[_cell(row.get(head, "")) for head in heads] for row in rows]
    widths = [max(len(head), *(len(line[at]) for line in cells)) for at, head in enumerate(heads)]
    lines = ["  " + "  ".join(head.ljust(width) for head, width in zip(heads, widths, strict=True))]
    lines += ["  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    return lines


def _cell(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
