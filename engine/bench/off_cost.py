"""`metrale bench off`: what speculation costs while it is off, against an engine that has no draft heads at all.

The engines take turns every few steps, on the same weights, the same cache and the same positions of the same text, so
that neither the machine's moods nor where memory happens to lie can tell them apart. A third engine, without heads as
the first, is measured alike: what it seems to cost is what the measurement cannot resolve.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.bench.local import LocalEngine, open_text
from engine.bench.result import BenchResult
from engine.lanes.pipeline import settle
from engine.model.backend import BackendRequest
from engine.model.heads import open_heads
from engine.model.load import open_source
from engine.model.open import BLOCK_SIZE, MAX_ROWS, open_backend, usable_cores
from engine.model.torch_device import TorchDevice

PROMPT = "Write a story about a lighthouse keeper and the sea."
REFERENCE, SAME, OFF = "without heads", "without heads, again", "with heads, off"
REPLY_TOKENS = 512
DRAWS = 2000
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class OffOptions:
    model: Path
    pairs: int = 1600
    """Turns of every engine."""
    new_tokens: int = 8
    """Steps of a turn."""
    threads: int = 0


def bench_off(options: OffOptions, progress: Progress = print) -> BenchResult:
    """Median over turns of the time a token takes over that of the engine without heads, less one, in percent."""
    text, vocabulary = open_text(options.model)
    prompt = text.encode_chat([{"role": "user", "content": PROMPT}])
    kv_tokens = len(prompt) + max(REPLY_TOKENS, options.new_tokens) + 2 * options.new_tokens + 64
    turns = {
        name: Turns(LocalEngine(device, vocabulary, batch=1, prefix_cache="off", drafter="off"), prompt)
        for name, device in open_devices(options, kv_tokens).items()
    }
    taken: dict[str, list[float]] = {name: [] for name in turns}
    for at in range(-1, options.pairs):
        order = list(turns)[at % 3 :] + list(turns)[: at % 3]
        for name in order[:: 1 if at % 2 else -1]:
            spent = turns[name].take(options.new_tokens)
            if at >= 0:  # the first turn warms up
                taken[name].append(spent)
        if at % 200 == 199:
            progress(f"turn {at + 1}/{options.pairs}")
    return _result(options, taken)


def open_devices(options: OffOptions, kv_tokens: int) -> dict[str, TorchDevice]:
    """Three devices on one backend, one of them with the draft heads. They write the same keys and values to the same
    places, and must not run at the same time."""
    source, threads = open_source(options.model), options.threads or usable_cores()
    request = BackendRequest(options.model, source.config, kv_tokens, BLOCK_SIZE, 1, MAX_ROWS, "auto", threads, None)
    source.close()
    backend = open_backend("auto", request)
    heads = {REFERENCE: [], SAME: [], OFF: open_heads(backend)}
    return {name: TorchDevice(backend, name=name, max_rows=MAX_ROWS, heads=own) for name, own in heads.items()}


class Turns:
    """One engine that decodes a text some steps at a time; the same text again when it has come to its end."""

    def __init__(self, engine: LocalEngine, prompt: Sequence[int]) -> None:
        self._engine, self._prompt = engine, prompt
        self._left = self._replies = 0

    def take(self, steps: int) -> float:
        """Nanoseconds a token over so many steps. Nothing is in flight before or after."""
        engine, out = self._engine, self._engine.out
        if self._left <= steps:
            self._begin(max(REPLY_TOKENS, steps), steps)
        out.emitted_at.clear()
        out.records.clear()
        started = time.perf_counter_ns()
        for _ in range(steps):
            engine.scheduler.tick()
        settle(engine.scheduler.engine)
        spent = time.perf_counter_ns() - started
        tokens = sum(count for _, _, count in out.emitted_at)
        self._left -= tokens
        return spent / tokens

    def _begin(self, tokens: int, steps: int) -> None:
        """End the running reply, and feed the prompt of the next; no turn comes to its very end."""
        self._engine.run()
        self._replies += 1
        self._engine.submit(str(self._replies), self._prompt, tokens + 2 * steps + 2, ignore_eos=True)
        self._engine.scheduler.tick()
        settle(self._engine.scheduler.engine)
        self._left = tokens + steps


def _result(options: OffOptions, taken: dict[str, list[float]]) -> BenchResult:
    steps = options.pairs * options.new_tokens
    result = BenchResult(f"off: {options.pairs} turns of {options.new_tokens} steps ({steps:,} steps an engine)")
    for name, values in taken.items():
        result.add(f"{name}, us/token", [value / 1000 for value in values])
    for name in (SAME, OFF):
        costs = [100 * (own / bare - 1) for own, bare in zip(taken[name], taken[REFERENCE], strict=True)]
        low, high = interval(costs)
        result.figures[f"cost of {name}, %"] = statistics.median(costs)
        result.figures[f"cost of {name}, %, 95 % interval from"] = low
        result.figures[f"cost of {name}, %, 95 % interval to"] = high
    return result


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Where 95 % of the medians of resampled `values` lie (bootstrap)."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(DRAWS))
    return medians[DRAWS // 40], medians[-1 - DRAWS // 40]
