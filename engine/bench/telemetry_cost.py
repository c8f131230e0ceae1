"""What recording costs a chat: the same decode with trace level 2 and 0 in turn, a server process taking it all in."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from engine.bench.result import BenchResult
from engine.bench.telemetry_recorder import Recorder, Speaker

LEVEL = 2


def measure(model: Path, directory: Path, result: BenchResult, pairs: int = 20, tokens: int = 512) -> None:
    """Add the paired cost, as a share of the throughput at level 0, and what the recorder used, to the result.

    A commit may fall into the reply of level 0 that follows; the recorder's own use says how much that can hide.
    """
    speaker = Speaker(model, tokens)
    used = {level: Use() for level in (LEVEL, 0)}
    with Recorder(directory / "cost.duckdb") as recorder:
        _pair(speaker, recorder, True, {level: Use() for level in used})
        costs = [_pair(speaker, recorder, at % 2 == 0, used) for at in range(pairs)]
    result.add("level_2_cost_percent_of_decode", [cost * 100 for cost in costs])
    middle = sorted(costs)[len(costs) // 4 : -(len(costs) // 4) or None]
    result.figures["level_2_cost_percent_mean_of_middle_half"] = statistics.mean(middle) * 100
    result.figures["level_2_cost_percent_mean"] = statistics.mean(costs) * 100
    for level, use in used.items():
        result.figures[f"recorder_percent_of_a_core_at_level_{level}"] = use.cpu_s / use.wall_s * 100


@dataclass(slots=True)
class Use:
    """Processor time of the recorder during replies of one level."""

    cpu_s: float = 0.0
    wall_s: float = 0.0


def _pair(speaker: Speaker, recorder: Recorder, level_first: bool, used: dict[int, Use]) -> float:
    order = (LEVEL, 0) if level_first else (0, LEVEL)
    speed = {}
    for level in order:
        cpu_s, begun = recorder.cpu_s, time.perf_counter()
        speed[level] = speaker.tokens_per_s(recorder, level)
        used[level].cpu_s += recorder.cpu_s - cpu_s
        used[level].wall_s += time.perf_counter() - begun
    return 1 - speed[LEVEL] / speed[0]
