"""`metrale bench spec`: what each drafter accepts by task and position, and what it delivers against plain decoding.

Every contestant is one engine that lives through all prompts, so that gates and arbiter learn as they would in service;
the contestants take each prompt in turn, and everything is paid for: bootstraps, drafts and probes.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.bench.local import LocalEngine, Prompt, by_task, load_prompts, open_text
from engine.bench.result import BenchResult
from engine.core.device import Device
from engine.core.vocabulary import Vocabulary
from engine.lanes.emit import is_looping
from engine.model.open import open_device
from telemetry.record import StepRecord

Progress = Callable[[str], None]
SPEC_LANES = frozenset({"ngram", "self_spec", "mtp", "dflash"})


@dataclass(frozen=True, slots=True)
class SpecOptions:
    model: Path
    prompts: Path
    limit: int = 48
    new_tokens: int = 256
    drafters: tuple[str, ...] = ()
    """Empty: all that are loaded, each forced, and `auto`."""
    num_drafts: int = 3
    threads: int = 0


@dataclass(slots=True)
class Tally:
    """Sums of one contestant over one task."""

    tokens: int = 0
    decode_ns: int = 0
    spec_steps: int = 0
    steps: int = 0
    drafted: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    loops: int = 0
    replies: int = 0
    ratios: list[float] = field(default_factory=list)
    """Per prompt: tokens per second over those of plain decoding of the same prompt."""

    @property
    def rate(self) -> float:
        return self.tokens * 1e9 / self.decode_ns if self.decode_ns else 0.0

    def note_step(self, record: StepRecord) -> None:
        self.steps += 1
        if record.lane in SPEC_LANES and record.drafted:
            self.spec_steps += 1
            for at, count in enumerate(record.drafted_at):
                self.drafted[at] += count
            for at, count in enumerate(record.accepted_at):
                self.accepted[at] += count

    def mean_accepted(self) -> float:
        """Accepted drafts per decode step, steps without a draft included."""
        return sum(self.accepted.values()) / self.steps if self.steps else 0.0

    def by_position(self) -> str:
        """Accepted over drafted given that all before were accepted, by position."""
        reached = [self.drafted[0], *(self.accepted[at] for at in range(len(self.drafted) - 1))]
        rates = [
            f"{self.accepted[at] / min(before, self.drafted[at]):.2f}"
            for at, before in enumerate(reached[:7])
            if before and self.drafted[at]
        ]
        return " ".join(rates)


class Contestant:
    """One engine with its levers, and what it has done by task."""

    def __init__(self, name: str, device: Device, vocabulary: Vocabulary, **levers: object) -> None:
        self.name = name
        self._engine = LocalEngine(device, vocabulary, batch=1, prefix_cache="off", **levers)
        self.tallies: dict[str, Tally] = {}
        self._asked = 0

    def reply(self, prompt: Prompt, new_tokens: int) -> float:
        """Decode one prompt; returns tokens per second after the first token."""
        out, name = self._engine.out, f"{prompt.name}.{self._asked}"
        self._asked += 1
        out.records.clear()
        out.emitted_at.clear()
        self._engine.submit(name, prompt.ids, new_tokens)
        self._engine.run()
        reply, tally = out.replies.pop(name), self.tallies.setdefault(prompt.task, Tally())
        if reply.finished is None or reply.finished.error:
            raise RuntimeError(f"{self.name}: prompt {prompt.name} ended with {reply.finished}")
        for record in out.steps:
            if record.lane != "prefill":
                tally.note_step(record)
        spent = out.emitted_at[-1][1] - out.emitted_at[0][1]
        after_first = len(reply.tokens) - out.emitted_at[0][2]
        tally.tokens += after_first
        tally.decode_ns += spent
        tally.replies += 1
        tally.loops += is_looping(reply.ids)
        return after_first * 1e9 / spent if spent else 0.0


def bench_spec(options: SpecOptions, progress: Progress = print) -> BenchResult:
    text, vocabulary = open_text(options.model)
    prompts = load_prompts(options.prompts, text, most_tokens=4096 - options.new_tokens, limit=options.limit)
    device = open_device(options.model, kv_tokens=16_384, max_batch_size=1, threads=options.threads or None)
    contestants = _contestants(options, device, vocabulary)
    for at, prompt in enumerate(prompts):
        progress(f"prompt {at + 1}/{len(prompts)} ({prompt.task})")
        _round(contestants if at % 2 else contestants[::-1], prompt, options.new_tokens)
    return _result(options, device, contestants, prompts)


def _contestants(options: SpecOptions, device: Device, vocabulary: Vocabulary) -> list[Contestant]:
    heads = sorted(drafter.value for drafter in device.facts.drafters)
    loaded = ("ngram", *heads, *(["combined"] if "mtp" in heads else []), "auto")
    found = [Contestant("plain", device, vocabulary, drafter="off")]
    for name in options.drafters or loaded:
        levers: dict[str, object] = {"drafter": name, "num_drafts": options.num_drafts, "k_ladder": "64:15"}
        if name != "auto":
            levers["mtp_gate"] = "force"
        found.append(Contestant(name, device, vocabulary, **levers))
    return found


def _round(contestants: Sequence[Contestant], prompt: Prompt, new_tokens: int) -> None:
    rates = {who.name: who.reply(prompt, new_tokens) for who in contestants}
    for who in contestants:
        if rates["plain"] and rates[who.name]:
            who.tallies[prompt.task].ratios.append(rates[who.name] / rates["plain"])


def _result(
    options: SpecOptions, device: Device, contestants: Sequence[Contestant], prompts: Sequence[Prompt]
) -> BenchResult:
    result = BenchResult(f"spec: {device.facts.model}, {device.facts.name}, at most {options.new_tokens} tokens")
    plain = contestants[0]
    for task in by_task(prompts):
        for who in contestants:
            tally = who.tallies[task]
            result.rows.append(
                {
                    "task": task,
                    "drafter": who.name,
                    "tok/s": tally.rate,
                    "speed-up": tally.rate / plain.tallies[task].rate,
                    "median of prompts": statistics.median(tally.ratios) if tally.ratios else 0.0,
                    "mean accepted": tally.mean_accepted(),
                    "by position": tally.by_position(),
                    "loops": f"{tally.loops}/{tally.replies}",
                    "tokens": tally.tokens,
                }
            )
    for who in contestants[1:]:
        speedups = [who.tallies[task].rate / plain.tallies[task].rate for task in plain.tallies]
        result.figures[f"{who.name} speed-up, mean of tasks"] = statistics.mean(speedups)
        result.figures[f"{who.name} speed-up, worst task"] = min(speedups)
        accepted = [tally.mean_accepted() for tally in who.tallies.values()]
        result.figures[f"{who.name} mean accepted, mean of tasks"] = statistics.mean(accepted)
        result.ratios[f"plain ({who.name})"] = statistics.mean(speedups)
    return result
