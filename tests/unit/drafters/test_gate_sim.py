"""Regret over random traces, in small: the full run is `metrale bench gate`."""

from __future__ import annotations

import numpy as np
import pytest

from engine.bench.gate_sim import arbiter_time, bench_gate, gate_time, time_of
from engine.bench.gate_trace import Trace, random_trace
from engine.core.device import DrafterName
from engine.drafters.arbiter import Arbiter, ArbiterSettings
from engine.drafters.arms import PLAIN, ArmKey
from engine.drafters.gate import Gate, GateSettings


def traces(count: int, first_seed: int) -> list[tuple[Trace, ArmKey]]:
    found = []
    for seed in range(first_seed, first_seed + count):
        rng = np.random.default_rng(seed)
        found.append((random_trace(rng, least=2000, most=2100), ArmKey(DrafterName.MTP, int(rng.integers(1, 6)))))
    return found


def test_the_gate_loses_at_most_three_percent_on_average_over_200_traces() -> None:
    regrets = np.array(
        [
            gate_time(trace, Gate(GateSettings()), arm) / min(time_of(trace, PLAIN), time_of(trace, arm)) - 1
            for trace, arm in traces(200, 50_000)
        ]
    )
    assert regrets.mean() <= 0.015
    assert np.percentile(regrets, 90) <= 0.03
    assert np.percentile(regrets, 99) <= 0.08


def test_the_arbiter_loses_at_most_three_percent_on_average_to_the_better_of_two() -> None:
    three = ArmKey(DrafterName.MTP, 3)
    regrets = np.array(
        [
            arbiter_time(trace, Arbiter(ArbiterSettings())) / min(time_of(trace, PLAIN), time_of(trace, three)) - 1
            for trace, _ in traces(20, 60_000)
        ]
    )
    assert regrets.mean() <= 0.0
    assert np.percentile(regrets, 90) <= 0.04


@pytest.mark.parametrize("arm", [PLAIN, ArmKey(DrafterName.MTP, 3), ArmKey(DrafterName.NGRAM, 4)])
def test_a_fixed_choice_that_never_probes_has_no_regret_against_itself(arm: ArmKey) -> None:
    trace = random_trace(np.random.default_rng(1))
    assert time_of(trace, arm) == time_of(trace, arm) > 0


def test_a_gate_that_may_not_choose_loses_all_that_choosing_is_worth() -> None:
    """The yardstick can fail: a gate pinned to the worse arm shows as regret."""

    class Stuck(Gate):
        def _switch(self) -> None:
            self.losses = 0

    worst = 0.0
    for trace, arm in traces(12, 70_000):
        worst = max(worst, gate_time(trace, Stuck(GateSettings()), arm) / time_of(trace, PLAIN) - 1)
    assert worst > 0.2


def test_the_benchmark_names_what_was_compared() -> None:
    result = bench_gate(traces=2, progress=lambda _: None)
    assert [row["policy"] for row in result.rows] == [
        "gate, to the better of plain and MTP:K",
        "auto, to the better of plain and MTP:3",
        "auto, to the best of 11 fixed arms",
    ]
    assert set(result.rows[0]) == {"policy", "mean", "p50", "p90", "p99", "worst", "over 3 %"}
    assert "2 simulated traces" in result.text()
