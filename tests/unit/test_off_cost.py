"""`metrale bench off` in small: the comparison itself, not its figure."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.bench.off_cost import OffOptions, bench_off
from engine.model.open import open_device


@pytest.mark.model
def test_both_engines_decode_every_pair_and_only_one_has_heads(default_model: Path) -> None:
    result = bench_off(OffOptions(default_model, pairs=2, new_tokens=4), lambda _: None)
    assert {name: spread.count for name, spread in result.spread.items()} == {
        "without heads, tok/s": 2,
        "with heads, off, tok/s": 2,
        "cost of off, %": 2,
    }
    headless = open_device(default_model, kv_tokens=256, max_batch_size=1, heads=False)
    assert not {"mtp", "dflash"} & headless.facts.drafters
    headless.close()
