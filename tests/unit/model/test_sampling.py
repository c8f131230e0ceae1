"""A row's token follows its plan: against a plain numpy reading of the contract, and against chance."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.device import DeviceError, LogitEdits, RowPlan
from engine.model.sampling import draw, edit_logits, sample_rows
from tests.unit.model.reference_draw import reference_draw

_VOCAB = 3000


def _logits(rows: int, vocab: int = _VOCAB, spread: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def _sample(logits: torch.Tensor, *plans: RowPlan) -> list[int]:
    return sample_rows(logits, logits.argmax(-1), plans).tokens.tolist()


@settings(max_examples=150, deadline=None)
@given(
    temperature=st.floats(0.1, 3.0),
    top_k=st.sampled_from([0, 1, 5, 40, 255, 256, 300, 5000]),
    top_p=st.sampled_from([1.0, 0.99, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.001, 0.05, 0.5]),
    uniform=st.floats(0.0, 0.99),
    seed=st.integers(0, 50),
)
def test_draws_are_those_of_the_numpy_reference(
    temperature: float, top_k: int, top_p: float, min_p: float, uniform: float, seed: int
) -> None:
    logits = _logits(1, spread=1.0 + seed % 4, seed=seed)
    plan = RowPlan(temperature, top_k, top_p, min_p, uniform)
    assert _sample(logits, plan) == [reference_draw(logits[0].numpy(), plan)]


def test_flat_logits_need_the_full_sort_and_draw_the_same() -> None:
    logits = _logits(1, spread=0.01)
    for uniform in (0.0, 0.05, 0.5, 0.95, 0.999):
        plan = RowPlan(1.0, uniform=uniform)
        assert _sample(logits, plan) == [reference_draw(logits[0].numpy(), plan)]


def test_equal_logits_are_ordered_by_id() -> None:
    logits = torch.zeros(1, _VOCAB)
    for index in (0, 1, 255, 256, 2999):
        assert _sample(logits, RowPlan(1.0, uniform=(index + 0.5) / _VOCAB)) == [index]
    assert _sample(logits, RowPlan()) == [0]


def test_a_row_draws_the_same_token_in_any_batch() -> None:
    logits = _logits(16)
    plans = [RowPlan(0.5 + i / 8, i * 7, 1 - i / 40, 0.0, i / 16) for i in range(16)]
    together = _sample(logits, *plans)
    assert together == [_sample(logits[i : i + 1], plans[i])[0] for i in range(16)]


def test_greedy_and_drawn_rows_mix() -> None:
    logits = _logits(3)
    tokens = _sample(logits, RowPlan(), RowPlan(1.0, uniform=0.7), RowPlan())
    assert tokens[0] == int(logits[0].argmax())
    assert tokens[2] == int(logits[2].argmax())
    assert tokens[1] == reference_draw(logits[1].numpy(), RowPlan(1.0, uniform=0.7))


def test_the_drawn_distribution_passes_a_chi_square_test() -> None:
    row = _logits(1, vocab=12, spread=1.5)
    plan_at = [RowPlan(0.8, uniform=u) for u in np.random.default_rng(4).random(20_000)]
    counts = np.bincount(draw(row.expand(len(plan_at), -1), plan_at).numpy(), minlength=12)
    expected = torch.softmax(row[0].double() / 0.8, -1).numpy() * len(plan_at)
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert statistic < 31.3  # 99.9 % quantile of 11 degrees of freedom


def test_edits_apply_in_the_order_of_their_fields() -> None:
    row = torch.tensor([1.0, -1.0, 2.0, 3.0, 0.5])
    edits = LogitEdits(
        only=(0, 1, 2, 4), banned=(4,), mask=bytes([0b00001111]), repetition=2.0, repeated=(0, 1, 3), added=((1, 9.0),)
    )
    assert edit_logits(row, edits).tolist() == [0.5, 7.0, 2.0, -math.inf, -math.inf]
    assert row.tolist() == [1.0, -1.0, 2.0, 3.0, 0.5]


def test_ids_beyond_a_short_mask_are_illegal() -> None:
    assert _sample(torch.arange(20.0).unsqueeze(0), RowPlan(edits=LogitEdits(mask=b"\xff"))) == [7]


def test_masks_that_leave_nothing_are_an_error_and_not_token_zero() -> None:
    with pytest.raises(DeviceError, match="no legal token"):
        _sample(torch.zeros(1, 8), RowPlan(edits=LogitEdits(only=(3,), banned=(3,))))


def test_masked_tokens_are_never_drawn() -> None:
    logits = _logits(1, vocab=400, spread=0.1)
    for uniform in (0.0, 0.5, 1 - 2**-53):
        plan = RowPlan(1.0, uniform=uniform, edits=LogitEdits(only=(7, 8, 9)))
        assert _sample(logits, plan)[0] in (7, 8, 9)


def test_log_probabilities_are_those_after_edits_and_before_temperature() -> None:
    logits = _logits(2, vocab=50)
    plan = RowPlan(2.0, uniform=0.4, edits=LogitEdits(banned=(int(logits[0].argmax()),)), top_logprobs=3)
    rows = sample_rows(logits, logits.argmax(-1), (plan, RowPlan(top_logprobs=0)))
    first, second = rows.to_host(rows.tokens.tolist())
    banned = logits[0].clone()
    banned[logits[0].argmax()] = -math.inf
    expected = torch.log_softmax(banned, -1)
    assert first.logprob == pytest.approx(float(expected[first.token]))
    assert [token for token, _ in first.top] == expected.topk(3).indices.tolist()
    assert second.logprob == pytest.approx(float(torch.log_softmax(logits[1], -1).max()))
    assert second.top == ()
