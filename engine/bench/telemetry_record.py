"""What a record costs the tick thread in the midst of decoding, where the caches are cold.

The time from a device call's return to the next one is compared between steps that are recorded and steps that are not,
chosen at random within the same reply, so that both meet the same machine.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.bench.local import LocalEngine, open_text
from engine.bench.result import BenchResult
from engine.bench.telemetry_recorder import PROMPT
from engine.core.device import Device, Draft, DrafterName, DraftItem, Step, StepResult
from engine.levers.resolve import LeverState
from engine.model.open import open_device

LEVEL, TOKENS = 2, 512
DRAFTERS = ("off", "mtp", "auto")
CUT = 0.1
"""Share of the shortest and longest times that is left out at either end."""


class Watched:
    """A device that notes how long its caller was busy between two calls, by the level of the step before."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._rng = random.Random(7)
        self._returned = 0
        self.levers: LeverState | None = None
        self.host_ns: dict[int, list[int]] = {0: [], LEVEL: []}
        self.level = LEVEL

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def forward(self, step: Step) -> StepResult:
        self._called()
        return self._returns(self._device.forward(step))

    def launch(self, step: Step) -> None:
        self._called()
        self._device.launch(step)

    def collect(self) -> StepResult:
        return self._returns(self._device.collect())

    def draft(self, drafter: DrafterName, items: Sequence[DraftItem], conf_min: float) -> list[Draft]:
        self._called()
        return self._device.draft(drafter, items, conf_min)

    def _called(self) -> None:
        if self._returned:
            self.host_ns[self.level].append(time.perf_counter_ns() - self._returned)
            self._returned = 0

    def _returns(self, result: StepResult) -> StepResult:
        if self.levers is not None:
            self.level = self.levers.trace_level = self._rng.choice((0, LEVEL))
        self._returned = time.perf_counter_ns()
        return result


def measure(model: Path, result: BenchResult, rounds: int) -> None:
    """Add microseconds a record: of replies without speculation, behind the gate and behind the arbiter, and what the
    engine itself says of them."""
    text, vocabulary = open_text(model)
    device = Watched(open_device(model, kv_tokens=4096, max_batch_size=1))
    prompt = tuple(text.encode_chat([{"role": "user", "content": PROMPT}]))
    for drafter in DRAFTERS:
        engine = LocalEngine(device, vocabulary, batch=1, drafter=drafter, prefix_cache="off", trace_level=LEVEL)
        device.levers = engine.ctx.levers
        ring, costs, said = engine.out.ring, [], []
        for number in range(rounds + 1):
            device.host_ns = {0: [], LEVEL: []}
            records, recording_ns = ring.records, ring.recording_ns
            engine.submit(f"{drafter} {number}", prompt, TOKENS, ignore_eos=True)
            engine.run()
            count = ring.records - records
            of_a_step = (_mean(device.host_ns[LEVEL]) - _mean(device.host_ns[0])) / 1e3
            if number:  # the first one warms up
                costs.append(of_a_step * len(device.host_ns[LEVEL]) / count)
                said.append((ring.recording_ns - recording_ns) / count / 1e3)
            ring.drain()
        result.add(f"record_in_decoding_us_{drafter}", costs)
        result.figures |= {
            f"record_in_decoding_us_{drafter}_mean": statistics.mean(costs),
            f"record_in_decoding_us_{drafter}_standard_error": statistics.stdev(costs) / len(costs) ** 0.5,
            f"record_as_the_engine_says_us_{drafter}": statistics.mean(said),
        }


def _mean(times: Sequence[int]) -> float:
    """Of the middle ones."""
    times = sorted(times)
    cut = round(len(times) * CUT)
    return statistics.mean(times[cut : len(times) - cut])
