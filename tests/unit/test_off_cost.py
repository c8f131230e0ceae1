"""`metrale bench off` in small: the comparison itself, not its figure."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.bench.off_cost import OFF, REFERENCE, SAME, OffOptions, bench_off, interval, open_devices


@pytest.mark.model
def test_every_engine_takes_every_turn_and_what_it_costs_comes_with_its_error(default_model: Path) -> None:
    result = bench_off(OffOptions(default_model, pairs=3, new_tokens=4), lambda _: None)
    assert {name: spread.count for name, spread in result.spread.items()} == {
        f"{name}, us/token": 3 for name in (REFERENCE, SAME, OFF)
    }
    for name in (SAME, OFF):
        low, high = (result.figures[f"cost of {name}, %, 95 % interval {end}"] for end in ("from", "to"))
        assert low <= result.figures[f"cost of {name}, %"] <= high


@pytest.mark.model
def test_only_the_engine_that_is_off_has_heads(default_model: Path) -> None:
    devices = open_devices(OffOptions(default_model), kv_tokens=256)
    assert {name for name, device in devices.items() if {"mtp", "dflash"} & device.facts.drafters} == {OFF}
    devices[OFF].close()


def test_the_interval_holds_the_median_and_narrows_with_more_values() -> None:
    few, many = interval([0.0, 1.0, 2.0, 3.0, 4.0]), interval([0.0, 1.0, 2.0, 3.0, 4.0] * 40)
    assert few[0] <= 2.0 <= few[1]
    assert many[1] - many[0] < few[1] - few[0]
