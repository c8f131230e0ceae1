"""`metrale bench scheduler`: what sharing costs: a chat beside a long prompt, a tight pool, a long queue."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.bench.local import LocalEngine, open_text
from engine.bench.result import BenchResult
from engine.bench.speed import SEED_TEXT
from engine.core.device import Device, Step, StepResult
from engine.core.vocabulary import Vocabulary
from engine.model.open import open_device

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SchedulingOptions:
    model: Path
    rounds: int = 3
    prompt_tokens: int = 4000
    requests: int = 16
    queued: int = 2000
    threads: int = 0


def bench_scheduler(options: SchedulingOptions, progress: Progress = print) -> BenchResult:
    text, vocabulary = open_text(options.model)
    device = open_device(
        options.model, kv_tokens=65_536, max_batch_size=options.requests, threads=options.threads or None
    )
    words = text.encode(SEED_TEXT)
    result = BenchResult(f"scheduler: {device.facts.model}, {device.facts.name}")
    _long_prompt(options, device, vocabulary, words, result, progress)
    _queue(options, device, vocabulary, words, result, progress)
    need = options.requests * (128 + 128)

    def tight_pool() -> Device:
        return open_device(
            options.model,
            kv_tokens=need // 4,
            max_batch_size=options.requests,
            threads=options.threads or None,
        )

    _tight_pool(options, device, tight_pool(), vocabulary, words, result, progress)
    return result


def _prompt(words: Sequence[int], count: int, salt: int) -> list[int]:
    """`count` tokens that share no prefix with those of another salt."""
    return [words[salt % len(words)], *(list(words) * (count // len(words) + 1))][:count]


def _long_prompt(
    options: SchedulingOptions,
    device: Device,
    vocabulary: Vocabulary,
    words: Sequence[int],
    result: BenchResult,
    progress: Progress,
) -> None:
    """A running chat while a long prompt comes in: time between its tokens, and what the prompt loses."""
    idle_p99, busy_p99, alone, shared = [], [], [], []
    for at in range(options.rounds):
        progress(f"long prompt, round {at + 1}/{options.rounds}")
        engine = LocalEngine(device, vocabulary, batch=4, prefix_cache="off", drafter="off")
        engine.submit("alone", _prompt(words, options.prompt_tokens, at), 1)
        started = time.perf_counter()
        engine.run()
        alone.append(options.prompt_tokens / (time.perf_counter() - started))
        gaps, rate = _chat_beside(engine, words, options.prompt_tokens, at)
        idle_p99.append(_quantile(gaps[False], 0.99))
        busy_p99.append(_quantile(gaps[True], 0.99))
        shared.append(rate)
    result.add("time between tokens idle, p99 ms", idle_p99)
    result.add("time between tokens beside a prompt, p99 ms", busy_p99)
    result.add("prefill alone, tokens/s", alone)
    result.add("prefill beside a chat, tokens/s", shared)
    result.figures["p99 between tokens, beside over idle (bar: below 3)"] = _median_ratio(busy_p99, idle_p99)
    result.figures["prefill beside over alone (bar: above 0.8)"] = _median_ratio(shared, alone)


def _chat_beside(
    engine: LocalEngine, words: Sequence[int], prompt_tokens: int, salt: int
) -> tuple[dict[bool, list[float]], float]:
    """Gaps in ms between the tokens of a chat, without and with a long prompt beside it, and the prompt's rate."""
    engine.out.emitted_at.clear()
    engine.submit("chat", _prompt(words, 64, salt), 4000, ignore_eos=True)
    ticks = 0
    submitted = 0.0
    while engine.out.replies.get("long") is None or not engine.out.replies["long"].tokens:
        engine.scheduler.tick()
        ticks += 1
        if ticks == 150:
            engine.submit("long", _prompt(words, prompt_tokens, salt + 7), 1)
            submitted = time.perf_counter()
    rate = prompt_tokens / (time.perf_counter() - submitted)
    stamps = [at for name, at, _ in engine.out.emitted_at if name == "chat"]
    gaps: dict[bool, list[float]] = {False: [], True: []}
    for earlier, later in itertools.pairwise(stamps[20:]):
        gaps[later / 1e9 > submitted].append((later - earlier) / 1e6)
    return gaps, rate


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
    """Host time of a tick as a share of its step, with an empty and with a long queue."""
    for queued in (0, options.queued):
        progress(f"{queued} queued requests")
        timed = _Timed(device)
        engine = LocalEngine(timed, vocabulary, batch=8, drafter="off", pipelined_decode="off")  # type: ignore[arg-type]
        for index in range(8 + queued):
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
        result.add(f"tick beside the device, {queued} queued, us", host_us)
        result.add(f"tick beside the device, {queued} queued, % of step", shares)


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def _median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    ratios = sorted(a / b for a, b in zip(over, under, strict=True))
    return ratios[len(ratios) // 2]
