"""`metrale bench decode`, `prefill` and `serve`: ours against peers on the same file, in alternating runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.bench.local import open_text
from engine.bench.peers import PEERS, Contestant, Ours
from engine.bench.result import BenchResult, alternate
from engine.core.device import Device
from engine.model.open import open_device, usable_cores

Progress = Callable[[str], None]
SEED_TEXT = (
    "The harbour was quiet in the early morning. Fishermen carried their nets to the boats and talked about the "
    "weather, the price of fuel and the storm that had passed two days ago. "
)


@dataclass(frozen=True, slots=True)
class SpeedOptions:
    model: Path
    versus: tuple[str, ...] = ()
    rounds: int = 5
    prompt_tokens: int = 64
    new_tokens: int = 128
    chats: int = 8
    threads: int = 0


def bench_decode(options: SpeedOptions, progress: Progress = print) -> BenchResult:
    """Greedy tokens per second of one sequence, the lane and the floor beside them."""
    prompt, count = options.prompt_tokens, options.new_tokens
    return _bench("decode", options, lambda who, text: who.decode(text(prompt), count), progress)


def bench_prefill(options: SpeedOptions, progress: Progress = print) -> BenchResult:
    """Prompt tokens per second until the first token."""
    return _bench("prefill", options, lambda who, text: who.prefill(text(options.prompt_tokens)), progress)


def bench_serve(options: SpeedOptions, progress: Progress = print) -> BenchResult:
    """Tokens per second of several chats together, prompts included."""

    def run(who: Contestant, text: Callable[[int], list[int]]) -> float:
        prompts = [text(options.prompt_tokens)[at:] for at in range(options.chats)]
        return who.together(prompts, options.new_tokens)

    return _bench("serve", options, run, progress)


Measure = Callable[[Contestant, Callable[[int], list[int]]], float]


def _bench(name: str, options: SpeedOptions, measure: Measure, progress: Progress) -> BenchResult:
    threads = options.threads or usable_cores()
    text, vocabulary = open_text(options.model)
    device = open_device(options.model, kv_tokens=32_768, max_batch_size=max(options.chats, 1), threads=threads)
    ours = Ours(device, vocabulary, drafter="off")
    contestants: list[Contestant] = [ours]
    for peer in options.versus:
        progress(f"opening {peer}")
        contestants += PEERS[peer](options.model, threads)
    by_name = {who.name: who for who in contestants}

    def prompt(count: int) -> list[int]:
        return (text.encode(SEED_TEXT) * (count // 8 + 1))[:count]

    runs = {label: (lambda who=who: measure(who, prompt)) for label, who in by_name.items()}
    got = alternate(options.rounds, runs, progress)
    result = BenchResult(f"{name}: {device.facts.model}, {threads} threads, {device.facts.name}")
    for label, values in got.items():
        result.add(f"{label} tokens/s", values)
    for peer in options.versus:
        _compare(result, peer, got[ours.name], [got[who.name] for who in contestants if peer in who.name])
    if name == "decode":
        _floor(result, options.model, device, got[ours.name])
    return result


def _compare(result: BenchResult, peer: str, ours: Sequence[float], settings: Sequence[Sequence[float]]) -> None:
    """Against the peer's best setting of this session."""
    best = max(settings, key=lambda values: sorted(values)[len(values) // 2])
    result.compare(peer, ours, best)


def _floor(result: BenchResult, model: Path, device: Device, rates: Sequence[float]) -> None:
    """The least time that a step can take: every weight byte read once at the bandwidth of a copy."""
    if model.is_file():
        bandwidth = copy_bandwidth()
        floor_ms = model.stat().st_size / bandwidth * 1e3
        step_ms = 1e3 / sorted(rates)[len(rates) // 2]
        result.figures.update({"copy GB/s": bandwidth / 1e9, "floor ms/step": floor_ms, "ours ms/step": step_ms})
        result.notes.append(f"A step takes {step_ms / floor_ms:.2f} times the floor of reading the file once.")


def copy_bandwidth(size: int = 256 << 20, repeats: int = 5) -> float:
    """Bytes per second read by a large copy, the best of several (read plus written, halved)."""
    import torch

    source = torch.ones(size // 4, dtype=torch.float32)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(repeats):
        started = time.perf_counter()
        target.copy_(source)
        best = max(best, 2 * size / (time.perf_counter() - started))
    return best
