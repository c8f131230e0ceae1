"""What recording costs a chat: the same decode with trace level 2 and 0 in turn, a server process taking it all in."""

from __future__ import annotations

import statistics
from pathlib import Path

from engine.bench.result import BenchResult
from engine.bench.telemetry_recorder import Recorder, Speaker

LEVEL = 2


def measure(model: Path, directory: Path, result: BenchResult, pairs: int = 20, tokens: int = 128) -> None:
    """Add the paired cost, as a share of the throughput at level 0, to the result."""
    speaker = Speaker(model, tokens)
    with Recorder(directory / "cost.duckdb") as recorder:
        costs = [_pair(speaker, recorder, at % 2 == 0) for at in range(pairs + 1)][1:]
    result.add("level_2_cost_percent_of_decode", [cost * 100 for cost in costs])
    middle = sorted(costs)[len(costs) // 4 : -(len(costs) // 4) or None]
    result.figures["level_2_cost_percent_mean_of_middle_half"] = statistics.mean(middle) * 100


def _pair(speaker: Speaker, recorder: Recorder, level_first: bool) -> float:
    order = (LEVEL, 0) if level_first else (0, LEVEL)
    speed = {level: speaker.tokens_per_s(recorder, level) for level in order}
    return 1 - speed[LEVEL] / speed[0]
