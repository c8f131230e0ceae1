"""`metrale bench off`: what speculation costs while it is off, against an engine that has no draft heads at all.

Both engines decode the same text in turn, in the same process and on the same cores; only one of them has heads loaded
and all drafters at hand, switched off by the lever. Each pair is one reply of either, the first one alternating.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.bench.local import LocalEngine, open_text
from engine.bench.result import BenchResult
from engine.model.open import open_device

PROMPT = "Write a story about a lighthouse keeper and the sea."
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class OffOptions:
    model: Path
    pairs: int = 20
    new_tokens: int = 128
    threads: int = 0


def bench_off(options: OffOptions, progress: Progress = print) -> BenchResult:
    """The median over pairs of the time with heads over the time without, less one, in percent."""
    text, vocabulary = open_text(options.model)
    prompt = text.encode_chat([{"role": "user", "content": PROMPT}])
    engines = {}
    for name, heads in (("without heads", False), ("with heads, off", True)):
        device = open_device(
            options.model, kv_tokens=4096, max_batch_size=1, threads=options.threads or None, heads=heads
        )
        engines[name] = LocalEngine(device, vocabulary, batch=1, prefix_cache="off", drafter="off")

    def decode(name: str, at: int) -> float:
        """Tokens per second after the first token."""
        engine, out = engines[name], engines[name].out
        out.emitted_at.clear()
        out.records.clear()
        engine.submit(f"{name} {at}", prompt, options.new_tokens, ignore_eos=True)
        engine.run()
        (_, first, counted), *_, (_, last, _) = out.emitted_at
        return (options.new_tokens - counted) * 1e9 / (last - first)

    rates: dict[str, list[float]] = {name: [] for name in engines}
    for at in range(-1, options.pairs):
        for name in list(engines)[:: 1 if at % 2 else -1]:
            rate = decode(name, at)
            if at >= 0:  # the first pair warms up
                rates[name].append(rate)
        progress(f"pair {at + 1}/{options.pairs}")
    without, off = rates.values()
    costs = sorted(100 * (a / b - 1) for a, b in zip(without, off, strict=True))
    result = BenchResult(f"off: {options.pairs} alternating pairs of {options.new_tokens} tokens")
    for name, values in rates.items():
        result.add(f"{name}, tok/s", values)
    result.add("cost of off, %", costs)
    quarter = len(costs) // 4
    result.figures["cost of off, %, mean of the middle half"] = statistics.mean(costs[quarter : len(costs) - quarter])
    return result
