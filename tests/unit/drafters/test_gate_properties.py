"""On any machine: estimates stay finite, evidence is never counted twice, and probes stay within their purse."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.core.device import DrafterName
from engine.drafters.arbiter import Arbiter, ArbiterSettings
from engine.drafters.arms import Offer
from engine.drafters.evidence import Budget
from engine.drafters.gate import Arm, Gate, GateSettings
from tests.fakes.explained import explained

MS = 1_000_000


@dataclass(frozen=True, slots=True)
class Stretch:
    """Some steps under the same conditions."""

    steps: int
    plain_ms: int
    verify_ms: int
    accepted: int
    width: int
    depth: int


STRETCHES = st.lists(
    st.builds(
        Stretch,
        steps=st.integers(1, 80),
        plain_ms=st.integers(0, 50),
        verify_ms=st.integers(0, 200),
        accepted=st.integers(0, 5),
        width=st.sampled_from([1, 1, 2, 3, 8, 32]),
        depth=st.sampled_from([0, 100, 600, 1300, 5000]),
    ),
    min_size=1,
    max_size=12,
)
SETTINGS = st.builds(
    GateSettings,
    window=st.integers(1, 32),
    dwell=st.integers(1, 4),
    margin=st.floats(0, 0.5),
    reprobe_tokens=st.integers(1, 600),
    refresh_tokens=st.integers(1, 3000),
)


class Watched(Gate):
    """A gate whose every switch, loss and fold is looked at when it happens."""

    measured_since_loss = True

    def _end_probe(self, estimate: object) -> None:
        super()._end_probe(estimate)  # type: ignore[arg-type]
        folded = self._unfinished.steps == 0
        self.measured_since_loss = self.measured_since_loss or folded

    def _arbitrate(self) -> None:
        losses, mode = self.losses, self.mode
        super()._arbitrate()
        switched = self.mode is not mode
        if self.losses > losses or switched:
            assert self.measured_since_loss, "two losses against one probe"
            self.measured_since_loss = False
        if switched:
            assert self._current.is_fresh
            assert self._other.rate is not None
            assert losses + 1 >= self.settings.dwell


def take_step(gate: Gate, stretch: Stretch) -> None:
    """The gate chooses, the machine of the stretch runs the step, the gate hears of it."""
    gate.maybe_remeasure(stretch.depth, stretch.width)
    gate.note_depth(stretch.depth)
    if gate.next_step() is Arm.PLAIN:
        gate.record_decode(stretch.plain_ms * MS, stretch.width)
    else:
        gate.record_verify_step(stretch.verify_ms * MS, (1 + stretch.accepted) * stretch.width, stretch.width)


@settings(max_examples=60, deadline=None)
@given(STRETCHES, SETTINGS)
def test_the_gate_keeps_its_promises_on_any_machine(stretches: list[Stretch], levers: GateSettings) -> None:
    gate = Watched(levers)
    for stretch in stretches:
        for _ in range(stretch.steps):
            take_step(gate, stretch)
            shown = explained(gate)
            assert all(math.isfinite(rate) and math.isfinite(dev) for _, rate, dev, _, _ in shown.arms)
            assert all(rate == -1 or rate > 0 for _, rate, _, _, _ in shown.arms)
            assert math.isfinite(shown.margin)
            assert shown.tokens_until_probe >= 0
            assert 0 <= gate.losses < max(levers.dwell, 1)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(5, 40), st.integers(5, 400), st.integers(0, 4)), min_size=1, max_size=8),
    st.integers(1, 600),
)
@example([(5, 16, 2), (6, 22, 0)], 1)
def test_probes_never_lose_more_than_their_budget(machines: list[tuple[int, int, int]], reprobe: int) -> None:
    """But for each arm's first measurement: what probes lost is at most the share of all time, one and a half caps,
    and the step that ran over."""
    gate = Gate(GateSettings(reprobe_tokens=reprobe, refresh_tokens=reprobe))
    first_lost = worst_overrun = most_cap = 0.0
    for plain_ms, verify_ms, accepted in machines:
        for _ in range(150):
            gate.maybe_remeasure(100, 1)
            gate.note_depth(100)
            was_first = min(row[1] for row in explained(gate).arms) < 0
            if gate.next_step() is Arm.PLAIN:
                gate.record_decode(plain_ms * MS, 1)
            else:
                gate.record_verify_step(verify_ms * MS, 1 + accepted, 1)
            if was_first:
                first_lost = max(first_lost, -gate.budget.saved_ns)
            worst_overrun = max(worst_overrun, max(plain_ms, verify_ms) * MS)
            most_cap = max(most_cap, gate.budget.cap_ns)
            assert gate.budget.saved_ns >= -(first_lost + most_cap / 2 + worst_overrun)


class Accounting(Gate):
    """A gate that keeps what every step took and what it was charged as part of a probe."""

    def __init__(self, levers: GateSettings) -> None:
        super().__init__(levers)
        self.steps: list[tuple[int, float]] = []
        self.most_cap = 0.0

    def _pay(self, wall_ns: int, tokens: int) -> None:
        is_first = self._other.rate is None
        before = self._probe_lost_ns if self._is_probing else 0.0
        super()._pay(wall_ns, tokens)
        charged = self._probe_lost_ns - before if self._is_probing and not is_first else 0.0
        self.steps.append((wall_ns, charged))
        self.most_cap = max(self.most_cap, self.budget.cap_ns)


@settings(max_examples=25, deadline=None)
@given(STRETCHES, SETTINGS)
def test_in_no_window_do_probes_cost_more_than_their_budget(stretches: list[Stretch], levers: GateSettings) -> None:
    """Over any stretch of steps: the share of its time, one and a half caps, and the step with which a probe ended."""
    gate = Accounting(levers)
    for stretch in stretches:
        for _ in range(stretch.steps):
            take_step(gate, stretch)
    dearest = max((charged for _, charged in gate.steps), default=0.0)
    owed = most_owed = 0.0
    for wall_ns, charged in gate.steps:
        # The largest sum of a stretch that ends here, as in the maximum-subarray problem.
        owed = max(0.0, owed + charged - gate.budget.share * wall_ns)
        most_owed = max(most_owed, owed)
    assert most_owed <= 1.5 * gate.most_cap + dearest + 1


@given(st.lists(st.tuples(st.integers(1, 10**9), st.floats(0, 1e9)), max_size=60))
def test_a_purse_never_holds_more_than_its_cap_and_never_grows_by_spending(moves: list[tuple[int, float]]) -> None:
    budget = Budget(share=0.01, cap_tokens=16)
    for wall_ns, lost_ns in moves:
        budget.accrue(wall_ns, 1e7)
        assert budget.saved_ns <= budget.cap_ns
        before = budget.saved_ns
        budget.spend(lost_ns)
        assert budget.saved_ns <= before


@settings(max_examples=30, deadline=None)
@given(STRETCHES)
def test_the_arbiter_chooses_what_is_offered_and_stays_finite(stretches: list[Stretch]) -> None:
    arbiter = Arbiter(ArbiterSettings())
    for at, stretch in enumerate(stretches):
        copies: Offer = {DrafterName.NGRAM: range(1, 9)} if stretch.width == 1 else {}
        offer: Offer = {None: (0,), DrafterName.MTP: range(1, 5), **copies}
        for step in range(stretch.steps):
            match_len = (at + step) % 17
            arm = arbiter.choose(offer, stretch.depth, stretch.width, match_len)
            assert arm.drafts in offer[arm.drafter]
            assert match_len or arm.drafter is not DrafterName.NGRAM
            accepted = min(arm.drafts, stretch.accepted)
            wall = (stretch.verify_ms if arm.drafts else stretch.plain_ms) * MS
            emitted = (1 + accepted) * stretch.width
            outcomes = [(arm.drafts, accepted)] * stretch.width
            arbiter.record(arm, wall, emitted, stretch.width, outcomes if arm.drafter else (), wall // 10)
            shown = explained(arbiter)
            assert all(math.isfinite(rate) and math.isfinite(dev) for _, rate, dev, _, _ in shown.arms)
            assert math.isfinite(shown.margin)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(5, 40), st.integers(5, 400), st.integers(0, 4)), min_size=1, max_size=6))
def test_the_arbiters_probes_never_lose_more_than_their_budget(machines: list[tuple[int, int, int]]) -> None:
    arbiter = Arbiter(ArbiterSettings())
    offer: Offer = {None: (0,), DrafterName.MTP: range(1, 5)}
    worst_step = most_cap = 0.0
    for plain_ms, verify_ms, accepted in machines:
        for _ in range(100):
            arm = arbiter.choose(offer, 100, 1)
            right = min(arm.drafts, accepted)
            wall = (verify_ms if arm.drafter else plain_ms) * MS
            arbiter.record(arm, wall, 1 + right, 1)
            worst_step = max(worst_step, wall)
            most_cap = max(most_cap, arbiter.budget.cap_ns)
            assert arbiter.budget.saved_ns >= -(most_cap / 2 + worst_step)
