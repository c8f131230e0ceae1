"""A running chat while a long prompt comes in: the gaps that its client sees, and what the prompt loses."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from engine.bench.local import LocalEngine
from engine.bench.result import BenchResult
from engine.core.device import Device
from engine.core.vocabulary import Vocabulary
from engine.text import Text

QUESTIONS = (
    "How does a compiler turn source code into a program? Explain each step.",
    "Write a letter to a friend about a week of hiking in the mountains.",
    "What should I know before I plant a vegetable garden? Give me a plan for the first year.",
    "Tell me the story of a lighthouse keeper who finds a message in a bottle.",
    "Explain how vaccines work to someone who has never studied biology.",
)
WARM_UP, IDLE = 20, 250
"""Tokens of the chat that are not measured, and those measured before the long prompt arrives."""


@dataclass(slots=True)
class Gaps:
    """ms between the tokens that a client got; tokens of one delivery come 0 ms after each other."""

    idle: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)


def measure_long_prompt(
    device: Device,
    text: Text,
    vocabulary: Vocabulary,
    prompt: Callable[[int, int], Sequence[int]],
    tokens: int,
    rounds: int,
    result: BenchResult,
    progress: Callable[[str], None],
) -> None:
    """One row of the result per drafter lever, and the two ratios of the default one as figures.

    `prompt(count, salt)` makes a prompt that shares no prefix with those of other salts."""
    for drafter in ("auto", "off"):
        idle, beside, alone, shared = [], [], [], []
        for at in range(rounds):
            progress(f"long prompt, drafter {drafter}, round {at + 1}/{rounds}")
            engine = LocalEngine(device, vocabulary, batch=4, drafter=drafter, loop_watchdog="off")
            alone.append(_alone(engine, prompt(tokens, 2 * at), tokens))
            question = text.encode_chat([{"role": "user", "content": QUESTIONS[at % len(QUESTIONS)]}])
            gaps, rate = _beside(engine, question, prompt(tokens, 2 * at + 1), seed=at)
            idle.append(gaps.idle)
            beside.append(gaps.beside)
            shared.append(rate)
        late, usual = [_quantile(gaps, 0.99) for gaps in beside], [_quantile(gaps, 0.99) for gaps in idle]
        slowed, kept = list(_ratios(late, usual)), list(_ratios(shared, alone))
        result.rows.append(
            {
                "drafter": drafter,
                "idle p50/p99 ms": f"{_median_of(idle, 0.5):.1f}/{statistics.median(usual):.1f}",
                "beside p50/p99 ms": f"{_median_of(beside, 0.5):.1f}/{statistics.median(late):.1f}",
                "p99 ratio": _spread(slowed),
                "prompt alone tokens/s": statistics.median(alone),
                "beside": statistics.median(shared),
                "kept": _spread(kept),
            }
        )
        if drafter == "auto":
            result.figures["p99 between tokens, beside over idle (bar: below 3)"] = statistics.median(slowed)
            result.figures["prefill beside over alone (bar: above 0.8)"] = statistics.median(kept)


def _alone(engine: LocalEngine, prompt: Sequence[int], tokens: int) -> float:
    """Prompt tokens per second with nobody else there."""
    engine.submit("alone", prompt, 1)
    started = time.perf_counter()
    engine.run()
    return tokens / (time.perf_counter() - started)


def _beside(engine: LocalEngine, question: Sequence[int], prompt: Sequence[int], seed: int) -> tuple[Gaps, float]:
    """The chat's gaps without and with the prompt beside it, and the prompt's tokens per second."""
    engine.out.emitted_at.clear()
    engine.submit("chat", question, 8000, temperature=0.7, seed=seed, ignore_eos=True)
    chat = engine.out.replies["chat"]
    while len(chat.tokens) < WARM_UP + IDLE:
        engine.scheduler.tick()
    engine.submit("long", prompt, 1)
    submitted = time.perf_counter_ns()
    while not engine.out.replies["long"].tokens:
        engine.scheduler.tick()
    rate = len(prompt) / (time.perf_counter_ns() - submitted) * 1e9
    gaps = Gaps()
    for at, gap in _gaps(engine, "chat"):
        (gaps.beside if at > submitted else gaps.idle).append(gap)
    return gaps, rate


def _gaps(engine: LocalEngine, name: str) -> Iterator[tuple[int, float]]:
    """(clock in ns, ms since the token before) of every token of a reply after its warm-up."""
    seen, earlier = 0, 0
    for request, at, count in engine.out.emitted_at:
        if request != name:
            continue
        if seen >= WARM_UP:
            yield at, (at - earlier) / 1e6
            yield from ((at, 0.0) for _ in range(count - 1))
        seen, earlier = seen + count, at


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def _median_of(rounds: Sequence[Sequence[float]], share: float) -> float:
    return statistics.median(_quantile(gaps, share) for gaps in rounds)


def _ratios(over: Sequence[float], under: Sequence[float]) -> Iterator[float]:
    return (a / b for a, b in zip(over, under, strict=True))


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
