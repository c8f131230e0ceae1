"""`metrale bench scheduler`: what sharing costs: a chat beside a long prompt, a tight pool, a long queue."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.bench.local import LocalEngine, open_text
from engine.bench.long_prompt import measure_long_prompt
from engine.bench.result import BenchResult
from engine.bench.speed import SEED_TEXT
from engine.core.device import Device, Step, StepResult
from engine.core.vocabulary import Vocabulary
from engine.model.open import open_device

Progress = Callable[[str], None]
PARTS = ("long", "queue", "pool")
QUEUE_WIDTHS = (1, 8, 32)


@dataclass(frozen=True, slots=True)
class SchedulingOptions:
    model: Path
    parts: tuple[str, ...] = ()
    """Of `PARTS`; empty: all."""
    rounds: int = 3
    prompt_tokens: int = 4000
    requests: int = 16
    queued: int = 2000
    threads: int = 0


def bench_scheduler(options: SchedulingOptions, progress: Progress = print) -> BenchResult:
    text, vocabulary = open_text(options.model)
    parts = options.parts or PARTS
    words = text.encode(SEED_TEXT)

    def opened(kv_tokens: int, batch: int = options.requests) -> Device:
        return open_device(options.model, kv_tokens=kv_tokens, max_batch_size=batch, threads=options.threads or None)

    device = opened(65_536, max(options.requests, *QUEUE_WIDTHS))
    result = BenchResult(f"scheduler: {device.facts.model}, {device.facts.name}")
    if "long" in parts:
        measure_long_prompt(
            device,
            text,
            vocabulary,
            lambda count, salt: _prompt(words, count, salt),
            options.prompt_tokens,
            options.rounds,
            result,
            progress,
        )
    if "queue" in parts:
        _queue(options, device, vocabulary, words, result, progress)
    if "pool" in parts:
        need = options.requests * (128 + 128)
        _tight_pool(options, device, opened(need // 4), vocabulary, words, result, progress)
    return result


def _prompt(words: Sequence[int], count: int, salt: int) -> list[int]:
    """`count` tokens that share no prefix with those of another salt."""
    return [words[salt % len(words)], *(list(words) * (count // len(words) + 1))][:count]


def _tight_pool(
    options: SchedulingOptions,
    wide: Device,
    tight: Device,
    vocabulary: Vocabulary,
    words: Sequence[int],
    result: BenchResult,
    progress: Progress,
) -> None:
    """The same requests with all the KV they need and with a quarter of it."""
    rates: dict[str, list[float]] = {"enough": [], "quarter": []}
    replies: dict[str, dict[str, list[int]]] = {}
    parked = 0
    for at in range(options.rounds):
        for name, device in (("enough", wide), ("quarter", tight)):
            progress(f"{name} KV, round {at + 1}/{options.rounds}")
            engine = LocalEngine(device, vocabulary, batch=options.requests, prefix_cache="off", drafter="off")
            for index in range(options.requests):
                engine.submit(f"r{index}", _prompt(words, 128, index), 128, ignore_eos=True)
            started = time.perf_counter()
            out = engine.run()
            tokens = sum(len(reply.tokens) for reply in out.replies.values())
            rates[name].append(tokens / (time.perf_counter() - started))
            replies[name] = {key: reply.ids for key, reply in out.replies.items()}
            parked += sum(r.finished.usage.preemptions for r in out.replies.values() if r.finished) if at == 0 else 0
    result.add("16 requests, enough KV, tokens/s", rates["enough"])
    result.add("16 requests, a quarter of the KV, tokens/s", rates["quarter"])
    result.figures["quarter over enough (bar: at least 0.7)"] = _median_ratio(rates["quarter"], rates["enough"])
    same = replies["enough"] == replies["quarter"]
    result.notes.append(f"Replies are {'equal' if same else 'DIFFERENT'}; {parked} sequences were parked in a round.")


class _Timed:
    """A device that adds up the time spent in it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.spent_ns = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._device, name)

    def forward(self, step: Step) -> StepResult:
        started = time.perf_counter_ns()
        result = self._device.forward(step)
        self.spent_ns += time.perf_counter_ns() - started
        return result


def _queue(
    options: SchedulingOptions,
    device: Device,
    vocabulary: Vocabulary,
    words: Sequence[int],
    result: BenchResult,
    progress: Progress,
) -> None:
    """Host time of a tick and its share of the step, by the width of the batch, and with a long queue behind it."""
    for width, queued in (*((width, 0) for width in QUEUE_WIDTHS), (8, options.queued)):
        progress(f"{width} sequences, {queued} queued requests")
        timed = _Timed(device)
        engine = LocalEngine(timed, vocabulary, batch=width, drafter="off", pipelined_decode="off")  # type: ignore[arg-type]
        for index in range(width + queued):
            engine.submit(f"r{index}", _prompt(words, 32, index), 400, ignore_eos=True)
        for _ in range(30):
            engine.scheduler.tick()
        shares, host_us = [], []
        for _ in range(options.rounds * 40):
            timed.spent_ns, started = 0, time.perf_counter_ns()
            engine.scheduler.tick()
            whole = time.perf_counter_ns() - started
            if timed.spent_ns:
                host_us.append((whole - timed.spent_ns) / 1000)
                shares.append(100 * (whole - timed.spent_ns) / timed.spent_ns)
        name = f"tick beside the device, {width} sequences, {queued} queued"
        result.add(f"{name}, us", host_us)
        result.add(f"{name}, % of step", shares)


def _median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(over, under, strict=True))
