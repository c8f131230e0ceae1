"""Drawing in the native library: the tokens of the contract at every level of instructions, and of any batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.device import LogitEdits, RowPlan
from engine.model.native.library import NativeError
from engine.model.native_backend import NativeBackend
from engine.model.sampling import sample_rows
from tests.unit.model.reference_draw import reference_draw
from tests.unit.native.models import Shape, open_native, write_model

VOCAB = 3001


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("draw") / "m.gguf", Shape(vocab=VOCAB))


@pytest.fixture(scope="module")
def backend(file: Path) -> NativeBackend:
    return open_native(file, threads=2)


def _row(spread: float, seed: int) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def _draw(backend: NativeBackend, rows: Sequence[torch.Tensor], plans: Sequence[RowPlan]) -> list[int]:
    logits = torch.stack(list(rows))
    return sample_rows(logits, logits.argmax(-1), plans, backend.draw).tokens.tolist()


@settings(max_examples=200, deadline=None)
@given(
    temperature=st.floats(0.1, 3.0),
    top_k=st.sampled_from([0, 1, 5, 40, 255, 300, 3001, 5000]),
    top_p=st.sampled_from([1.0, 0.99, 0.9, 0.5, 0.01, 0.0]),
    min_p=st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0]),
    uniform=st.floats(0.0, 0.99),
    seed=st.integers(0, 50),
)
def test_draws_are_those_of_the_numpy_reference(
    backend: NativeBackend, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float, seed: int
) -> None:
    row = _row(1.0 + seed % 4, seed)
    plan = RowPlan(temperature, top_k, max(top_p, 1e-9), min_p, uniform)
    assert _draw(backend, [row], [plan]) == [reference_draw(row.numpy(), plan)]


def test_every_variant_draws_the_same(variant: str, file: Path, backend: NativeBackend) -> None:
    plans = [RowPlan(0.3 + i / 50, (i * 13) % 90, 1 - i / 200, i / 1000, i / 100) for i in range(100)]
    rows = [_row(3.0, seed) for seed in range(100)]
    assert _draw(open_native(file, variant=variant), rows, plans) == _draw(backend, rows, plans)


def test_a_row_draws_the_same_token_alone_and_beside_others(backend: NativeBackend) -> None:
    plans = [RowPlan(0.5 + i / 8, i * 7, 1 - i / 40, 0.0, i / 16) for i in range(16)]
    rows = [_row(3.0, seed) for seed in range(16)]
    assert _draw(backend, rows, plans) == [_draw(backend, rows[i : i + 1], plans[i : i + 1])[0] for i in range(16)]


def test_flat_and_equal_logits_look_at_the_whole_vocabulary(backend: NativeBackend) -> None:
    for uniform in (0.0, 0.05, 0.5, 0.95, 0.999):
        plan = RowPlan(1.0, uniform=uniform)
        assert _draw(backend, [_row(0.01, 1)], [plan]) == [reference_draw(_row(0.01, 1).numpy(), plan)]
    for token in (0, 1, 255, 256, VOCAB - 1):
        assert _draw(backend, [torch.zeros(VOCAB)], [RowPlan(1.0, uniform=(token + 0.5) / VOCAB)]) == [token]


def test_a_tail_far_below_the_likeliest_token_is_reached(backend: NativeBackend) -> None:
    row = torch.full((VOCAB,), -12.0)
    row[17] = 0.0
    tail = (VOCAB - 1) * math.exp(-12.0)
    plan = RowPlan(1.0, uniform=(1 + tail * (1234 + 0.5) / (VOCAB - 1)) / (1 + tail))
    assert _draw(backend, [row], [plan]) == [1235]


def test_masked_tokens_are_never_drawn(backend: NativeBackend) -> None:
    for uniform in (0.0, 0.5, 1 - 2**-53):
        plan = RowPlan(1.0, uniform=uniform, edits=LogitEdits(only=(7, 8, 3000)))
        assert _draw(backend, [_row(0.1, 0)], [plan])[0] in (7, 8, 3000)


def test_greedy_and_drawn_rows_mix(backend: NativeBackend) -> None:
    rows = [_row(3.0, seed) for seed in range(3)]
    drawn = RowPlan(1.0, uniform=0.7)
    wanted = [int(rows[0].argmax()), reference_draw(rows[1].numpy(), drawn), int(rows[2].argmax())]
    assert _draw(backend, rows, [RowPlan(), drawn, RowPlan()]) == wanted


def test_the_drawn_distribution_passes_a_chi_square_test(backend: NativeBackend) -> None:
    row = torch.full((VOCAB,), -math.inf)
    row[:12] = _row(1.5, 3)[:12]
    uniforms = np.random.default_rng(4).random(20_000)
    tokens = backend.draw([row] * len(uniforms), [RowPlan(0.8, uniform=u) for u in uniforms])
    counts = np.bincount(tokens.numpy(), minlength=12)
    expected = torch.softmax(row[:12].double() / 0.8, -1).numpy() * len(uniforms)
    assert len(counts) == 12
    assert float(((counts - expected) ** 2 / expected).sum()) < 31.3  # 99.9 % quantile of 11 degrees of freedom


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_row_without_a_number_is_refused(backend: NativeBackend, value: float) -> None:
    with pytest.raises(NativeError, match="row 1 holds no logit"):
        backend.draw([_row(1.0, 0), torch.full((VOCAB,), value)], [RowPlan(1.0), RowPlan(1.0)])


def test_rows_of_another_shape_or_type_and_plans_without_temperature_are_refused(backend: NativeBackend) -> None:
    with pytest.raises(NativeError, match="float32"):
        backend.draw([torch.zeros(VOCAB - 1)], [RowPlan(1.0)])
    with pytest.raises(NativeError, match="float32"):
        backend.draw([torch.zeros(VOCAB, dtype=torch.float64)], [RowPlan(1.0)])
    with pytest.raises(NativeError, match="no temperature"):
        backend.draw([torch.zeros(VOCAB)], [RowPlan()])
