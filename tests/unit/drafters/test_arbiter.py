"""`drafter=auto`: it finds the best drafter and draft count by evidence, and pays for finding out from a budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest

from engine.core.device import DrafterName
from engine.drafters.acceptance import Calibration, MatchAcceptance, PositionAcceptance
from engine.drafters.arbiter import Arbiter, ArbiterSettings
from engine.drafters.arms import PLAIN, ArmKey, Offer
from engine.drafters.costs import HICCUP, Cost, CostTable
from engine.levers.resolve import LeverState
from telemetry.names import GateReason
from telemetry.ring import composed
from tests.fakes.explained import explained

MS = 1_000_000
MTP, NGRAM, DFLASH = DrafterName.MTP, DrafterName.NGRAM, DrafterName.DFLASH


def up_to(drafts: int) -> range:
    return range(1, drafts + 1)


ONLY_PLAIN: Offer = {None: (0,)}


class Machine:
    """Plain steps of 10 ms; a verify costs by its rows, a draft by the draft; drafts are right in a fixed rhythm."""

    def __init__(self, row_ms: float = 1.0, draft_ms: float = 0.3, right: int = 3) -> None:
        self.arbiter = Arbiter(ArbiterSettings())
        self.row_ms, self.draft_ms = row_ms, draft_ms
        self.right: Callable[[int], int] = lambda step: right
        self.copied = 0
        self.match_len = 0
        self.depth, self.width = 100, 1
        self.offer: Offer = {None: (0,), MTP: up_to(5)}
        self.wall_ns = self.lost_ns = 0
        self.ran: list[ArmKey] = []

    def step(self, steps: int = 1) -> list[ArmKey]:
        for _ in range(steps):
            arm = self.arbiter.choose(self.offer, self.depth, self.width, self.match_len)
            right = self.copied if arm.drafter is NGRAM else self.right(len(self.ran))
            accepted = min(arm.drafts, right)
            drafting = 0 if arm.drafter in (None, NGRAM) else int(arm.drafts * self.draft_ms * MS)
            wall = int((10 + self.row_ms * arm.drafts) * MS) + drafting
            outcomes = [(arm.drafts, accepted)] * self.width if arm.drafter else ()
            self.arbiter.record(arm, wall, (1 + accepted) * self.width, self.width, outcomes, drafting)
            self.wall_ns += wall
            self.ran.append(arm)
        return self.ran[-steps:]

    def favourite(self, steps: int = 200) -> ArmKey:
        return Counter(self.step(steps)).most_common(1)[0][0]


def test_settings_come_from_the_levers_of_the_gate() -> None:
    assert ArbiterSettings.of(LeverState.of(gate_dwell=3)).dwell == 3


def test_a_cold_start_runs_the_best_guess_until_plain_can_be_measured() -> None:
    ran = Machine().step(40)
    first_plain = ran.index(PLAIN)
    assert {arm.drafter for arm in ran[:first_plain]} == {MTP}
    assert ran[first_plain : first_plain + 4] == [PLAIN] * 4


def test_it_speculates_where_that_delivers_more() -> None:
    assert Machine(right=3).favourite().drafter is MTP


def test_it_decodes_plainly_where_drafts_are_wrong() -> None:
    machine = Machine(right=0)
    machine.step(100)
    assert machine.favourite() == PLAIN


def test_it_decodes_plainly_where_rows_are_dear() -> None:
    machine = Machine(row_ms=38, right=2)
    machine.step(100)
    assert machine.favourite() == PLAIN


@pytest.mark.parametrize("right", [1, 2, 3, 5])
def test_it_finds_the_draft_count_that_pays(right: int) -> None:
    machine = Machine(right=right)
    machine.step(300)
    assert machine.favourite() == ArmKey(MTP, right)


def test_a_jump_in_cost_between_draft_counts_is_found() -> None:
    """int4 kernels jump between 4 and 5 rows: 3 drafts may be right although 5 are accepted."""
    machine = Machine(right=5, row_ms=0)
    jump = {drafts: 10 if drafts <= 3 else 18 for drafts in range(6)}

    def step() -> ArmKey:
        arm = machine.arbiter.choose(machine.offer, 100, 1)
        machine.arbiter.record(arm, jump[arm.drafts] * MS, 1 + arm.drafts, 1, [(arm.drafts, arm.drafts)])
        return arm

    ran = [step() for _ in range(400)]
    assert Counter(ran[200:]).most_common(1)[0][0] == ArmKey(MTP, 3)


def test_it_returns_to_speculation_when_acceptance_comes_back() -> None:
    machine = Machine()
    machine.right = lambda step: 0 if step < 300 else 3
    machine.step(300)
    assert machine.arbiter.base is None
    machine.step(900)
    assert machine.arbiter.base is MTP


def test_the_base_changes_only_after_as_many_fresh_wins_as_dwell() -> None:
    machine = Machine(right=0)
    machine.step(200)
    assert machine.arbiter.base is None
    machine.right = lambda step: 3
    losses = []
    while machine.arbiter.base is None:
        machine.step()
        losses.append(explained(machine.arbiter).losses)
    assert set(losses) == {0, 1}


def test_every_drafter_that_is_loaded_gets_its_trial_and_the_better_one_runs() -> None:
    machine = Machine()
    machine.offer = {None: (0,), MTP: up_to(5), DFLASH: up_to(7)}
    right = {MTP: 1, DFLASH: 6}

    def step() -> ArmKey:
        arm = machine.arbiter.choose(machine.offer, 100, 1)
        accepted = min(arm.drafts, right[arm.drafter]) if arm.drafter else 0
        machine.arbiter.record(arm, (10 + arm.drafts) * MS, 1 + accepted, 1, [(arm.drafts, accepted)])
        return arm

    ran = [step() for _ in range(500)]
    assert {arm.drafter for arm in ran} == {None, MTP, DFLASH}
    assert sum(arm.drafter is DFLASH for arm in ran[100:]) > 380


def test_a_long_match_is_copied_and_a_weak_one_left_to_the_head() -> None:
    machine = Machine(right=2)
    machine.offer = {None: (0,), MTP: up_to(5), NGRAM: up_to(16)}
    for match_len, hit in ((16, True), (2, False)) * 100:
        machine.arbiter.matches.observe_match(match_len, hit=hit)
    machine.step(200)
    machine.match_len, machine.copied = 16, 12
    assert machine.favourite(40).drafter is NGRAM
    machine.match_len, machine.copied = 2, 0
    assert machine.favourite(40).drafter is MTP


def test_hiccups_of_the_machine_do_not_pass_for_broken_promises_of_copies() -> None:
    machine = Machine(right=0)
    machine.offer = {None: (0,), NGRAM: up_to(16)}
    machine.copied = 3
    for at in range(600):
        machine.match_len = 0 if at < 300 or at % 4 else 5
        for length in (5, 6, 7, 8):
            machine.arbiter.matches.observe_match(length, hit=True)
        arm = machine.arbiter.choose(machine.offer, machine.depth, 1, machine.match_len)
        accepted = min(arm.drafts, machine.copied)
        hiccup = 6.0 if at % 16 == 3 else 1.0
        machine.arbiter.record(arm, int((10 + arm.drafts) * MS * hiccup), 1 + accepted, 1)
        machine.ran.append(arm)
    assert Counter(arm.drafter for arm in machine.ran[300:])[NGRAM] > 70


def test_without_a_match_nothing_is_copied() -> None:
    machine = Machine(right=0)
    machine.offer = {None: (0,), NGRAM: up_to(16)}
    machine.copied = 8
    assert set(machine.step(100)) == {PLAIN}


def test_a_head_drafts_at_the_pace_of_text_that_must_be_guessed_however_fast_copies_are() -> None:
    """At the price of what is delivered with copies, one draft would seem best, which is slower than plain decoding."""
    machine = Machine(row_ms=1.5, draft_ms=0.0, right=2)
    machine.arbiter = Arbiter(ArbiterSettings())
    machine.offer = {None: (0,), MTP: up_to(3), NGRAM: (1, 2, 4, 8, 16)}
    machine.right = lambda step: (2, 0)[step % 2]
    machine.copied = 16
    for step in range(400):
        machine.match_len = 16 if step % 2 else 0
        machine.arbiter.matches.observe_match(16, hit=True)
        machine.step()
    guesses = Counter(arm for arm in machine.ran[200:] if arm.drafter is not NGRAM)
    assert guesses.most_common(1)[0][0] == ArmKey(MTP, 2)


def test_a_drafter_that_would_lose_with_every_draft_accepted_is_measured_at_half_the_usual_pace() -> None:
    def probes(draft_ms: float) -> int:
        machine = Machine(right=3, draft_ms=draft_ms)
        machine.offer = {None: (0,), MTP: (3,)}
        machine.step(100)
        assert machine.favourite(100) == PLAIN
        ran = machine.step(6000)
        return sum(arm.drafter is MTP and before == PLAIN for before, arm in pairwise(ran))

    assert probes(10.0) > 1.5 * probes(60.0) > 0


def test_only_what_is_available_is_chosen() -> None:
    machine = Machine()
    machine.step(200)
    machine.offer = ONLY_PLAIN
    assert machine.step(3) == [PLAIN] * 3
    machine.offer = {MTP: (2,)}
    assert machine.step(3) == [ArmKey(MTP, 2)] * 3
    machine.offer = {}
    assert machine.step() == [PLAIN]


def test_a_bootstrap_is_paid_for_but_teaches_no_cost() -> None:
    arbiter = Arbiter(ArbiterSettings())
    arbiter.choose({None: (0,), MTP: (3,)}, 100, 1)
    arbiter.record(ArmKey(MTP, 3), 10 * MS, 1, 1, [(0, 0)])
    assert 3 not in arbiter._promises.costs.verify
    assert arbiter._promises.accepts(MTP).at[0].trials == 0


def test_a_step_without_wall_time_is_ignored() -> None:
    arbiter = Arbiter(ArbiterSettings())
    arbiter.choose(ONLY_PLAIN, 100, 1)
    arbiter.record(PLAIN, 0, 1, 1)
    assert not arbiter._promises.costs.verify


def test_a_change_of_depth_makes_the_other_base_stale_and_measures_it_again() -> None:
    machine = Machine()
    machine.step(200)
    machine.depth = 2000
    machine.step()
    assert next(row for row in explained(machine.arbiter).arms if row[0] == "plain")[4]
    assert PLAIN in machine.step(40)


def test_a_change_of_width_learns_costs_anew_and_keeps_acceptance() -> None:
    machine = Machine()
    machine.step(200)
    known = machine.arbiter._promises.accepts(MTP).at[0].trials
    machine.width = 8
    machine.step()
    assert explained(machine.arbiter).reason == GateReason.SETTLE
    assert not machine.arbiter._promises.costs.verify
    assert machine.arbiter._promises.accepts(MTP).at[0].trials >= known


def test_a_wide_batch_speculates_where_it_pays() -> None:
    machine = Machine()
    machine.width = 8
    machine.step(200)
    assert machine.favourite().drafter is MTP


@pytest.mark.parametrize("row_ms", [2.0, 20.0])
def test_probes_of_a_losing_drafter_cost_little(row_ms: float) -> None:
    machine = Machine(row_ms=row_ms, right=0)
    machine.step(3000)
    assert machine.wall_ns / (3000 * 10 * MS) < 1.025


def test_the_explanation_names_every_arm_with_its_evidence() -> None:
    machine = Machine()
    machine.step(300)
    record = composed(machine.arbiter.explain(1, 2))
    names = [row[0] for row in record.arms]
    assert names == ["plain", "mtp:3", "delivered"]
    rates = {row[0]: row[1] for row in record.arms}
    assert rates["plain"] == pytest.approx(100, rel=0.02)
    assert rates["mtp:3"] == pytest.approx(4 / 0.0139, rel=0.05)
    assert rates["delivered"] == pytest.approx(4 / 0.0139, rel=0.05)
    assert (record.mode, record.reason, record.width_bucket) == ("mtp", "hold", 1)
    assert record.tokens_until_probe > 0


def test_copies_that_promise_more_than_they_deliver_are_given_up() -> None:
    machine = Machine(right=0)
    machine.offer = {None: (0,), NGRAM: up_to(16)}
    machine.match_len, machine.copied = 16, 0
    for _ in range(300):
        machine.arbiter.matches.observe_match(16, hit=True)
        machine.step()
    assert NGRAM in {arm.drafter for arm in machine.ran[:60]}
    assert set(machine.ran[120:280]) == {PLAIN}


def test_a_stretch_without_its_drafter_does_not_unseat_the_base() -> None:
    machine = Machine()
    machine.step(200)
    everything = machine.offer
    machine.offer = ONLY_PLAIN
    machine.step(100)
    assert machine.arbiter.base is MTP
    machine.offer = everything
    assert machine.step(1)[0].drafter is MTP


def test_a_pinned_step_says_why_it_speculates() -> None:
    machine = Machine(right=0)
    machine.step(100)
    arm = machine.arbiter.choose({MTP: up_to(3)}, 100, 1, pinned=GateReason.ENTRY_PIN)
    shown = explained(machine.arbiter)
    assert arm.drafter is MTP
    assert (shown.mode, shown.reason, shown.pinned) == ("plain", GateReason.ENTRY_PIN, True)


# What it learns from


def test_acceptance_of_a_smaller_count_follows_exactly_from_that_of_a_larger() -> None:
    accepts = PositionAcceptance()
    for accepted in (0, 1, 2, 3, 3, 1) * 200:
        accepts.add(3, accepted)
    assert accepts.expected(3)[1:] == pytest.approx([5 / 6, 8 / 6, 10 / 6], abs=0.1)


def test_a_draft_that_was_never_reached_counts_neither_way() -> None:
    accepts = PositionAcceptance()
    accepts.add(3, 0)
    assert [share.trials for share in accepts.at] == [1]


def test_a_position_that_is_no_longer_drafted_is_believed_to_be_like_the_one_before() -> None:
    """Else a count that was given up on hard text would stay given up when the text turns easy."""
    accepts = PositionAcceptance()
    for _ in range(100):
        accepts.add(3, 1)
    assert accepts.expected(3)[3] - accepts.expected(3)[2] < 0.05
    for _ in range(600):
        accepts.add(1, 1)
    assert accepts.expected(3)[3] - accepts.expected(3)[2] > 0.7


def test_a_match_grows_longer_and_surer_with_every_right_copy() -> None:
    matches = MatchAcceptance()
    assert matches.expected(2, 4)[4] < matches.expected(8, 4)[4] < matches.expected(16, 4)[4]
    assert matches.expected(16, 200)[200] < 200


def test_confidences_are_calibrated_by_what_became_of_them() -> None:
    calibration = Calibration()
    for _ in range(200):
        calibration.add((0.95, 0.95), accepted=0)
    assert calibration.value(0.95) < 0.1
    assert calibration.value(1.0) < 0.1


def test_unsure_drafts_are_not_verified() -> None:
    machine = Machine(row_ms=4)
    machine.step(300)
    assert machine.arbiter.trim(MTP, (0.95, 0.95, 0.05, 0.05)) == 2
    assert machine.arbiter.trim(MTP, (0.05, 0.05)) == 1


def test_a_hiccup_moves_a_cost_little_and_a_lasting_change_all_the_way() -> None:
    cost = Cost()
    for step in range(50):
        cost.add(10.0, step)
    cost.add(500.0, 50)
    assert cost.value < 10 * (1 + 0.1 * HICCUP)
    for step in range(51, 60):
        cost.add(40.0, step)
    assert cost.value == pytest.approx(40, rel=0.05)


def test_a_slower_machine_makes_all_arms_dearer() -> None:
    table = CostTable()
    for step in range(100):
        table.add(ArmKey(NGRAM, 3) if step % 2 else PLAIN, 3 * (step % 2), (10, 14)[step % 2] * MS, 0, step)
    before = table.step_ns(None, 0)
    for step in range(100, 200):
        table.add(ArmKey(NGRAM, 3), 3, 21 * MS, 0, step)
    after = table.step_ns(None, 0)
    assert before is not None
    assert after is not None
    assert after > 1.2 * before


def test_a_cost_between_two_measured_counts_lies_on_their_line_and_beyond_them_never_falls() -> None:
    table = CostTable()
    for drafts, wall in ((0, 10), (4, 18), (6, 17)):
        table.add(ArmKey(NGRAM, drafts), drafts, wall * MS, 0, 1)
    assert table.step_ns(None, 2) == pytest.approx(14 * MS)
    assert (table.step_ns(None, 9) or 0) > 17 * MS


def test_drafts_that_confidence_trimmed_are_charged_as_drafted() -> None:
    table = CostTable()
    table.add(ArmKey(MTP, 1), 4, 14 * MS, 4 * MS, 1)
    assert (table.step_ns(MTP, 1) or 0) - (table.step_ns(NGRAM, 1) or 0) == pytest.approx(MS)


def test_drafting_is_charged_by_the_draft_and_verifying_shared_by_all_drafters() -> None:
    table = CostTable()
    table.add(ArmKey(MTP, 4), 4, 18 * MS, 4 * MS, 1)
    assert table.step_ns(NGRAM, 4) == pytest.approx(14 * MS)
    assert table.step_ns(MTP, 2) == pytest.approx((table.step_ns(NGRAM, 2) or 0) + 2 * MS)


def test_the_first_draft_of_a_reply_says_nothing_of_what_drafts_cost() -> None:
    """On a GPU a first draft took 600 us where later ones take 70: three drafts were never tried again."""
    machine = Machine(row_ms=0.01, draft_ms=0.05, right=3)
    wall, usual = machine.step, machine.draft_ms
    machine.draft_ms = 20.0
    assert wall(1) == [ArmKey(MTP, 3)]
    machine.draft_ms = usual
    wall(20)
    assert machine.favourite(50).drafts >= 3
    machine.depth, machine.draft_ms = 10, 20.0
    wall(1)
    machine.draft_ms = usual
    costs = machine.arbiter._promises.costs.drafting[MTP]
    assert all(cost.value < 5 * MS for cost in costs.values())
