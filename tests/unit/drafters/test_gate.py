"""Every line of the gate's table and rules (scheduler.md, section 4), one named test each."""

from __future__ import annotations

import pytest

from engine.core.device import DrafterName
from engine.drafters.evidence import Estimate, Window, is_other_depth, width_bucket
from engine.drafters.gate import Arm, Decision, Gate, GateSettings, PinFacts, pin
from engine.levers.resolve import LeverState
from telemetry.names import GateReason
from telemetry.ring import composed
from tests.fakes.explained import explained

MS = 1_000_000


class Bench:
    """A gate on a machine whose two arms have a known price: nanoseconds a step, tokens a verify."""

    def __init__(self, plain_ms: float = 10, verify_ms: float = 10, emitted: int = 1, **settings: float) -> None:
        self.gate = Gate(GateSettings(**settings))  # type: ignore[arg-type]
        self.plain_ms, self.verify_ms, self.emitted = plain_ms, verify_ms, emitted
        self.depth, self.width = 100, 1
        self.ran: list[Arm] = []

    def step(self, steps: int = 1) -> list[Arm]:
        """Run steps; the arms that ran."""
        for _ in range(steps):
            self.gate.maybe_remeasure(self.depth, self.width)
            self.gate.note_depth(self.depth)
            arm = self.gate.next_step()
            if arm is Arm.PLAIN:
                self.gate.record_decode(int(self.plain_ms * MS), self.width)
            else:
                self.gate.record_verify_step(int(self.verify_ms * MS), self.emitted * self.width, self.width)
            self.ran.append(arm)
        return self.ran[-steps:]

    def until(self, arm: Arm, most: int = 5000) -> int:
        """Steps that ran before the first one of `arm`."""
        for count in range(most):
            if self.step() == [arm]:
                return count
        raise AssertionError(f"{arm} did not run in {most} steps")

    def rate(self, arm: Arm) -> float:
        return next(row[1] for row in explained(self.gate).arms if row[0] == arm.value)

    def is_stale(self, arm: Arm) -> bool:
        return next(row[4] for row in explained(self.gate).arms if row[0] == arm.value)


def settled_in_verify(**settings: float) -> Bench:
    """Verify delivers 200 tokens/s, plain 100; both measured."""
    bench = Bench(plain_ms=10, verify_ms=10, emitted=2, **settings)
    bench.step(40)
    assert bench.gate.mode is Arm.VERIFY
    return bench


def settled_in_plain(verify_ms: float = 10.8, **settings: float) -> Bench:
    """Plain delivers 100 tokens/s, verify a little less; switched for good."""
    bench = Bench(plain_ms=10, verify_ms=verify_ms, emitted=1, **settings)
    bench.step(120)
    assert bench.gate.mode is Arm.PLAIN
    return bench


def test_the_defaults_are_those_of_the_levers() -> None:
    assert GateSettings.of(LeverState.of()) == GateSettings(16, 2, 0.05, 256, 1024)


def test_it_starts_by_speculating() -> None:
    bench = Bench()
    assert bench.step() == [Arm.VERIFY]
    assert explained(bench.gate).reason == GateReason.COLD


def test_it_never_switches_before_both_arms_were_measured() -> None:
    bench = Bench(plain_ms=1, verify_ms=100)
    while bench.rate(Arm.PLAIN) < 0:
        assert bench.gate.mode is Arm.VERIFY
        bench.step()


def test_a_window_of_16_steps_makes_an_estimate() -> None:
    bench = settled_in_verify()
    bench.step(-len(bench.ran) % 16)
    before = bench.rate(Arm.VERIFY)
    bench.verify_ms = 5
    changed = next(count for count in range(1, 33) if bench.step() and bench.rate(Arm.VERIFY) != before)
    bench.verify_ms = 4
    held = bench.rate(Arm.VERIFY)
    assert changed <= 16
    assert [bench.rate(Arm.VERIFY) == held for _ in range(16) if bench.step()] == [True] * 15 + [False]


def test_two_confirmed_losses_switch_and_one_does_not() -> None:
    bench = Bench(plain_ms=10, verify_ms=15)
    modes = []
    for _ in range(200):
        bench.step()
        modes.append((bench.gate.losses, bench.gate.mode))
    assert (1, Arm.VERIFY) in modes
    assert (2, Arm.VERIFY) not in modes
    assert modes[-1] == (0, Arm.PLAIN)


def test_dwell_sets_how_many_losses_it_takes() -> None:
    losses = set()
    bench = Bench(plain_ms=10, verify_ms=15, dwell=4)
    while bench.gate.mode is Arm.VERIFY:
        bench.step()
        losses.add(bench.gate.losses)
    assert losses == {0, 1, 2, 3}


def test_a_new_window_weighs_three_tenths_in_estimate_and_deviation() -> None:
    estimate = Estimate("plain", rate=100.0, deviation=10.0)
    estimate.fold(200.0, replace=False)
    assert estimate.rate == pytest.approx(130.0)
    assert estimate.deviation == pytest.approx(0.7 * 10 + 0.3 * 70)


@pytest.mark.parametrize(("stale", "replace"), [(True, False), (False, True)])
def test_a_probes_or_a_stale_arms_window_replaces_and_halves_the_deviation(stale: bool, replace: bool) -> None:
    estimate = Estimate("plain", rate=100.0, deviation=10.0, stale=stale)
    estimate.fold(200.0, replace=replace)
    assert (estimate.rate, estimate.deviation, estimate.stale) == (200.0, 5.0, False)


def test_the_first_window_replaces() -> None:
    estimate = Estimate("plain")
    estimate.fold(200.0, replace=False)
    assert (estimate.rate, estimate.deviation) == (200.0, 0.0)


@pytest.mark.parametrize(("verify_ms", "mode"), [(10.4, Arm.VERIFY), (10.7, Arm.PLAIN)])
def test_the_other_arm_must_be_five_percent_ahead(verify_ms: float, mode: Arm) -> None:
    bench = Bench(plain_ms=10, verify_ms=verify_ms)
    bench.step(600)
    assert bench.gate.mode is mode


def test_noise_widens_the_margin_to_half_the_deviations() -> None:
    bench = settled_in_verify()
    assert bench.gate._margin() == pytest.approx(0.05 * bench.rate(Arm.VERIFY))
    for arm, deviation in ((Arm.PLAIN, 30.0), (Arm.VERIFY, 50.0)):
        bench.gate._arms[arm].deviation = deviation
    assert bench.gate._margin() == pytest.approx(40.0)


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [(0, 1023, False), (100, 1024, True), (600, 1199, False), (600, 1200, True), (2000, 1000, True), (900, 10, False)],
)
def test_a_depth_regime_ends_at_twice_or_half_floored_at_512(before: int, after: int, changed: bool) -> None:
    assert is_other_depth(before, after) is changed


def test_in_plain_mode_speculation_is_probed_after_256_tokens() -> None:
    bench = settled_in_plain()
    bench.until(Arm.VERIFY)
    bench.until(Arm.PLAIN)
    assert bench.until(Arm.VERIFY) == 256 - 1


def test_when_speculating_plain_is_refreshed_after_1024_tokens() -> None:
    bench = settled_in_verify()
    bench.until(Arm.PLAIN)
    bench.until(Arm.VERIFY)
    assert bench.until(Arm.PLAIN) == pytest.approx(1024 / bench.emitted, abs=1)


def test_the_refresh_waits_longer_for_a_wider_batch() -> None:
    bench = Bench(emitted=2)
    bench.width = 3
    bench.until(Arm.PLAIN)
    bench.until(Arm.VERIFY)
    assert bench.until(Arm.PLAIN) * bench.emitted * 3 == pytest.approx(4 * 1024, abs=6)


def test_a_probe_is_one_window_after_its_bootstrap() -> None:
    bench = settled_in_plain()
    bench.until(Arm.VERIFY)
    bench.verify_ms = 9.8
    assert bench.until(Arm.PLAIN) == 16


@pytest.mark.parametrize("bootstrap_ms", [10, 18])
def test_what_it_takes_to_speculate_again_is_paid_for_and_says_nothing_of_the_arm(bootstrap_ms: float) -> None:
    bench = settled_in_plain()
    bench.verify_ms = bootstrap_ms
    bench.until(Arm.VERIFY)
    bench.verify_ms = 9.8
    before = bench.gate.budget.saved_ns
    bench.until(Arm.PLAIN)
    assert bench.rate(Arm.VERIFY) == pytest.approx(1000 / 9.8, rel=0.02)
    assert before - bench.gate.budget.saved_ns == pytest.approx(max(0, bootstrap_ms - 10 - 16 * 0.2) * MS, abs=0.3 * MS)


def test_a_probe_that_clearly_loses_ends_at_the_shortest_window() -> None:
    bench = settled_in_plain()
    bench.until(Arm.VERIFY)
    bench.verify_ms = 13
    assert bench.until(Arm.PLAIN) < 15
    assert bench.rate(Arm.VERIFY) < 95


@pytest.mark.parametrize(("width", "bucket"), [(0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (32, 32), (33, 64)])
def test_the_width_bucket_is_the_next_power_of_two(width: int, bucket: int) -> None:
    assert width_bucket(width) == bucket


def test_sixteen_steps_after_a_width_change_are_ignored() -> None:
    bench = settled_in_verify()
    bench.width, bench.verify_ms = 2, 1000
    bench.step(16)
    bench.verify_ms = 10
    bench.step(16)
    assert bench.rate(Arm.VERIFY) == pytest.approx(400)


def test_a_width_change_within_its_bucket_disturbs_nothing() -> None:
    bench = Bench(emitted=2)
    bench.width = 3
    bench.step(60)
    bench.width = 4
    bench.step()
    assert explained(bench.gate).reason == GateReason.HOLD


@pytest.mark.parametrize(("steps", "counts"), [(7, False), (8, True)])
def test_a_partial_window_counts_from_eight_steps(steps: int, counts: bool) -> None:
    bench = settled_in_verify()
    gate = bench.gate
    gate._window = Window()
    before = bench.rate(Arm.VERIFY)
    bench.verify_ms = 5
    bench.step(steps)
    gate._probe_due = True
    assert bench.step() == [Arm.PLAIN]
    assert (bench.rate(Arm.VERIFY) != before) is counts


def test_a_plain_step_is_charged_its_width_and_at_least_one_token() -> None:
    bench = Bench(plain_ms=10, window=8)
    bench.step(16)
    assert bench.rate(Arm.PLAIN) == pytest.approx(100)
    for width, tokens in ((0, 1), (4, 4)):
        gate = Gate(GateSettings(window=1))
        gate.record_verify_step(MS, 1, width)
        gate.next_step()
        gate.record_decode(MS, width)
        assert explained(gate).arms[0][1] == pytest.approx(tokens * 1000)


def test_a_verify_step_is_charged_what_it_emitted_and_at_least_one_token() -> None:
    for emitted, tokens in ((0, 1), (7, 7)):
        gate = Gate(GateSettings(window=1))
        gate.record_verify_step(MS, emitted, 1)
        assert explained(gate).arms[1][1] == pytest.approx(tokens * 1000)


def test_a_step_without_wall_time_is_ignored() -> None:
    gate = Gate(GateSettings(window=1))
    gate.record_verify_step(0, 4, 1)
    assert explained(gate).arms[1][1] == -1


def test_two_losses_never_count_against_one_probe() -> None:
    bench = Bench(plain_ms=10, verify_ms=15)
    bench.until(Arm.PLAIN)
    while bench.gate.losses == 0:
        bench.step()
    bench.gate._probe_due = False
    bench.gate._arms[Arm.PLAIN].age_tokens = 0
    bench.step(64)
    assert bench.gate.losses == 1
    assert bench.gate.mode is Arm.VERIFY


def test_a_first_loss_makes_a_confirming_probe_due_at_once() -> None:
    bench = Bench(plain_ms=10, verify_ms=15)
    while bench.gate.losses == 0:
        bench.step()
    assert bench.step() == [Arm.PLAIN]


def test_a_window_that_does_not_lose_resets_the_losses() -> None:
    bench = Bench(plain_ms=10, verify_ms=15)
    while bench.gate.losses == 0:
        bench.step()
    bench.plain_ms = 15
    bench.step(20)
    assert bench.gate.losses == 0
    assert bench.gate.mode is Arm.VERIFY


@pytest.mark.parametrize("change", ["width", "depth"])
def test_a_change_of_regime_makes_both_arms_stale_and_a_probe_due(change: str) -> None:
    bench = settled_in_verify()
    setattr(bench, change, {"width": 4, "depth": 1200}[change])
    bench.gate.maybe_remeasure(bench.depth, bench.width)
    assert bench.is_stale(Arm.PLAIN)
    assert bench.is_stale(Arm.VERIFY)
    assert bench.until(Arm.PLAIN) < 40


def test_a_stale_running_arm_finishes_a_full_window_before_the_probe() -> None:
    bench = settled_in_verify()
    bench.depth = 1200
    assert bench.until(Arm.PLAIN) == 16


def test_a_stale_arm_cannot_steal_the_mode() -> None:
    bench = settled_in_verify()
    bench.gate._arms[Arm.PLAIN].rate = 10_000.0
    bench.gate._arms[Arm.PLAIN].stale = True
    bench.gate._other_measured_since_loss = True
    assert {bench.gate.losses for _ in range(40) if bench.step()} == {0}
    assert bench.gate.mode is Arm.VERIFY


def test_it_switches_back_when_speculation_pays_again() -> None:
    bench = settled_in_plain()
    bench.verify_ms = 6
    bench.step(400)
    assert bench.gate.mode is Arm.VERIFY


def test_a_switch_is_handed_over_once() -> None:
    bench = Bench(plain_ms=10, verify_ms=15)
    decisions = []
    for _ in range(200):
        bench.step()
        decisions.append(bench.gate.take_fresh_decision())
    assert [decision for decision in decisions if decision] == [Decision.DISABLE_MTP]


def test_an_arm_that_the_gate_did_not_ask_for_is_not_recorded() -> None:
    gate = Gate(GateSettings(window=1))
    gate.next_step()
    gate.record_decode(MS, 1)
    assert [row[1] for row in explained(gate).arms] == [-1, -1]


def test_settings_change_while_it_runs() -> None:
    bench = settled_in_plain()
    bench.until(Arm.VERIFY)
    bench.until(Arm.PLAIN)
    bench.gate.settings = GateSettings(reprobe_tokens=64)
    assert bench.until(Arm.VERIFY) == 64 - 1


def test_an_arm_that_is_dear_to_probe_is_probed_less_often() -> None:
    def share(verify_ms: float) -> float:
        bench = settled_in_plain(verify_ms)
        return bench.step(4000).count(Arm.VERIFY) / 4000

    assert share(40) < share(10.8) / 3


def test_the_running_arms_loss_of_pace_brings_the_refresh_forward() -> None:
    bench = settled_in_verify()
    bench.verify_ms = 19
    assert bench.until(Arm.PLAIN) < 64


FACTS = PinFacts("auto", DrafterName.MTP, width=1, least_answer_tokens=8, entry_pin_tokens=8, dflash_pin_c2=True)


@pytest.mark.parametrize(
    ("facts", "arm", "reason"),
    [
        (PinFacts("force", DrafterName.MTP, 4, 100, 8, True), Arm.VERIFY, GateReason.FORCE),
        (PinFacts("off", DrafterName.DFLASH, 1, 0, 8, True), Arm.PLAIN, GateReason.FORCE),
        (PinFacts("auto", DrafterName.DFLASH, 2, 100, 8, True), Arm.VERIFY, GateReason.DFLASH_PIN),
        (PinFacts("auto", DrafterName.MTP, 4, 7, 8, True), Arm.VERIFY, GateReason.ENTRY_PIN),
    ],
)
def test_a_pin_says_which_arm_and_why(facts: PinFacts, arm: Arm, reason: GateReason) -> None:
    found = pin(facts)
    assert found is not None
    assert (found.arm, found.reason) == (arm, reason)


@pytest.mark.parametrize(
    "facts",
    [
        FACTS,
        PinFacts("auto", DrafterName.DFLASH, 3, 8, 8, True),
        PinFacts("auto", DrafterName.DFLASH, 1, 8, 8, False),
        PinFacts("auto", DrafterName.MTP, 1, 0, 0, True),
    ],
)
def test_the_gate_decides_where_nothing_pins(facts: PinFacts) -> None:
    assert pin(facts) is None


def test_a_pinned_step_is_explained_and_changes_nothing() -> None:
    bench = settled_in_plain()
    before = explained(bench.gate)
    entry = pin(PinFacts("auto", DrafterName.MTP, 1, 0, 8, True))
    shown = composed(bench.gate.explain(pinned=entry))
    assert (shown.mode, shown.arm, shown.reason, shown.pinned) == ("plain", "verify", GateReason.ENTRY_PIN, True)
    assert explained(bench.gate) == before


def test_an_explanation_becomes_a_record_with_all_it_says() -> None:
    bench = settled_in_verify()
    record = composed(bench.gate.explain(step_id=7, time_ns=9))
    assert (record.step_id, record.time_ns, record.mode, record.arm) == (7, 9, "verify", "verify")
    assert record.reason == "hold"
    assert [row[0] for row in record.arms] == ["plain", "verify"]
    assert record.arms[0][1] == pytest.approx(100)
    assert record.tokens_until_probe > 0
    assert (record.depth, record.width_bucket, record.pinned) == (100, 1, False)


def test_every_reason_of_the_gate_itself_is_seen() -> None:
    bench = Bench(plain_ms=10, verify_ms=15)
    seen = set()
    for step in range(3000):
        bench.width = 1 if step < 1000 else 2
        bench.verify_ms = 15 if step < 600 else 5
        bench.step()
        seen.add(explained(bench.gate).reason)
    named = {GateReason.COLD, GateReason.HOLD, GateReason.PROBE, GateReason.REFRESH, GateReason.SWITCH}
    assert seen == named | {GateReason.SETTLE}
