"""On the real model every lane, width, lever flip and preemption gives the greedy tokens of plain decoding."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.bench.lossless import Way, compare, prepare, ways
from engine.cli.bench import shipped_prompts
from engine.core.device import Device
from engine.model.backend import BackendUnavailable
from engine.model.open import open_device

pytestmark = pytest.mark.model
SHORT = 120
"""Prompt tokens at most, to keep the suite short."""


def open_pool(path: Path, backend: str, tokens: int) -> Device:
    try:
        dtype = "float32" if backend == "reference" else "auto"
        return open_device(path, backend=backend, dtype=dtype, kv_tokens=tokens, max_batch_size=8)
    except BackendUnavailable as missing:
        pytest.skip(str(missing))


def differing(path: Path, backend: str, chosen: list[Way], prompts: int, new_tokens: int) -> dict[str, str]:
    vocabulary, all_prompts = prepare(path, shipped_prompts(), 0)
    some = [prompt for prompt in all_prompts if len(prompt.ids) < SHORT][:: 150 // prompts][:prompts]
    device = open_pool(path, backend, 4096)
    findings = compare(device, vocabulary, some, new_tokens, chosen, lambda tokens: open_pool(path, backend, tokens))
    assert all(finding.replies == len(some) for finding in findings)
    return {finding.way: finding.first for finding in findings if finding.differing}


def test_every_way_on_the_compiled_kernels_gives_plain_replies(default_model: Path) -> None:
    chosen = list(ways(("ngram", "self", "mtp", "dflash"), (1, 4)))
    assert differing(default_model, "native", chosen, prompts=4, new_tokens=20) == {}


def test_the_lanes_of_the_scheduler_give_plain_replies_in_float32(default_model: Path) -> None:
    lanes = ("plain b4", "pipelined b4", "mixed b4", "prefix-cached b4", "parked b4", "mtp x3 b1")
    chosen = [way for way in ways(("mtp",), (1, 4)) if way.name in lanes]
    assert len(chosen) == len(lanes)
    assert differing(default_model, "reference", chosen, prompts=4, new_tokens=8) == {}
