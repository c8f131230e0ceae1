"""Rules of a live lever change."""

from __future__ import annotations

import random

import pytest

from engine.levers.changes import Change, ChangeRefusedError, Guard, History, Proposal, RateLimit, Step, judge
from engine.levers.resolve import resolve

VALUES = resolve()[0]


def change(number: int, name: str, old: object, new: object) -> Change:
    return Change(f"c{number}", name, old, new, number, float(number), "cli")  # type: ignore[arg-type]


def steps(rate: float, count: int, width: int = 1, noise: float = 0.1, seed: int = 1, emitted: int = 1) -> list[Step]:
    """Steps of `width` sequences at `rate` tokens per second with relative noise."""
    chance = random.Random(seed)
    return [
        Step(width * emitted / rate * max(0.05, chance.gauss(1, noise)), width * emitted, width) for _ in range(count)
    ]


def test_a_proposal_is_parsed_and_its_name_understood_in_both_spellings() -> None:
    assert judge(Proposal("num-drafts", "5"), VALUES) == ("num_drafts", 5, None)
    assert judge(Proposal("pipelined_decode", "off"), VALUES) == ("pipelined_decode", False, None)


def test_an_expected_value_that_no_longer_holds_is_refused_with_the_current_one() -> None:
    with pytest.raises(ChangeRefusedError, match="is 3 by now") as refused:
        judge(Proposal("num_drafts", 5, expected=4), VALUES)
    assert refused.value.current == 3


def test_an_expected_false_is_not_an_expected_zero() -> None:
    with pytest.raises(ChangeRefusedError):
        judge(Proposal("draft_conf_min", 0.5, expected=1.0), VALUES)
    assert judge(Proposal("draft_conf_min", 0.5, expected=0), VALUES) == ("draft_conf_min", 0.5, 0.0)


def test_an_expected_value_that_can_never_be_is_refused_with_what_can() -> None:
    with pytest.raises(ChangeRefusedError, match="1 to 15"):
        judge(Proposal("num_drafts", 5, expected="many"), VALUES)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("num_draft", 3, "num_drafts"),
        ("num_drafts", 16, "1 to 15"),
        ("num_drafts", "three", "1 to 15"),
        ("kv_tokens", 4096, "--kv-tokens"),
        ("drafter", "ngrm", "ngram"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(name: str, value: object, says: str) -> None:
    with pytest.raises(ChangeRefusedError, match=says):
        judge(Proposal(name, value), VALUES)


def test_read_only_refuses_everything() -> None:
    with pytest.raises(ChangeRefusedError, match="read_only"):
        judge(Proposal("num_drafts", 5), {**VALUES, "read_only": True})


def test_a_burst_is_allowed_and_then_the_rate_holds() -> None:
    limit = RateLimit(per_second=2, burst=3)
    assert [limit.take(0.0) for _ in range(4)] == [True, True, True, False]
    assert [limit.take(0.5), limit.take(0.5)] == [True, False]
    assert [limit.take(100.0) for _ in range(4)] == [True, True, True, False]


def test_undo_finds_the_last_change_that_still_holds() -> None:
    history = History()
    history.add(change(1, "num_drafts", 3, 5))
    history.add(change(2, "gate_dwell", 2, 4))
    assert history.undo_of("", {"num_drafts": 5, "gate_dwell": 4}).change_id == "c2"
    assert history.undo_of("", {"num_drafts": 5, "gate_dwell": 2}).change_id == "c1"
    assert history.undo_of("c1", {"num_drafts": 5}).old == 3
    with pytest.raises(ChangeRefusedError, match="again since"):
        history.undo_of("c1", {"num_drafts": 7})
    with pytest.raises(ChangeRefusedError, match="nothing to undo"):
        History().undo_of("", {})


def test_the_history_is_bounded() -> None:
    history = History(limit=3)
    for number in range(5):
        history.add(change(number, "num_drafts", number, number + 1))
    assert [one.change_id for one in history] == ["c2", "c3", "c4"]


def test_a_guard_reverts_a_slowdown_beyond_its_share_and_says_how_much() -> None:
    verdict = Guard(0.1, steps(100, 200)).verdict(steps(70, 200, seed=2))
    assert verdict.revert
    assert verdict.sentence in ("throughput fell by 29 %", "throughput fell by 30 %")


def test_a_guard_leaves_a_slowdown_within_its_share_alone() -> None:
    guard = Guard(0.2, steps(100, 400))
    assert not guard.verdict(steps(92, 400, seed=2)).revert
    assert not guard.verdict(steps(130, 400, seed=3)).revert


def test_a_guard_says_nothing_before_it_has_seen_enough() -> None:
    assert not Guard(0.1, steps(100, 200)).verdict(steps(30, 10)).revert
    assert not Guard(0.1, steps(100, 5)).verdict(steps(30, 200)).revert


def test_a_guard_compares_like_with_like_when_the_load_changes() -> None:
    before = steps(100, 200, width=1) + steps(400, 200, width=8)
    assert not Guard(0.1, before).verdict(steps(100, 300, width=1, seed=5)).revert
    assert not Guard(0.1, steps(400, 200, width=8)).verdict(steps(100, 300, width=1, seed=5)).revert


def test_a_guard_sees_a_longer_tail_that_the_mean_hides() -> None:
    before = steps(100, 400, noise=0.02)
    tail = [Step(0.02, 1, 1) if index % 5 == 0 else Step(0.0074, 1, 1) for index in range(400)]
    verdict = Guard(0.1, before).verdict(tail)
    assert verdict.revert
    assert "p95" in verdict.sentence


def test_a_guard_seldom_reverts_what_changed_nothing() -> None:
    wrong = sum(
        Guard(0.05, steps(100, 300, noise=0.2, seed=seed)).verdict(steps(100, 300, noise=0.2, seed=seed + 999)).revert
        for seed in range(300)
    )
    assert wrong <= 2
