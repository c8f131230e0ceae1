"""The gate: step by step, plain decoding or speculation, whichever has delivered more tokens per second lately.

Rules and constants are those of scheduler.md, section 4. Beyond them, a probe is paid from a budget
(`test_probes_never_lose_more_than_their_budget`): one that loses clearly stops at the shortest window that counts,
and an arm that is expensive to probe is probed less often.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from engine.core.device import DrafterName
from engine.drafters.evidence import (
    DEVIATION_SHARE,
    SHOWN_NS,
    Budget,
    Estimate,
    Evidence,
    Urgency,
    Usual,
    Window,
    gate_record,
    is_other_depth,
    width_bucket,
)
from engine.levers.resolve import LeverState
from telemetry.names import GateReason
from telemetry.record import GateRecord
from telemetry.ring import Entry

SETTLE_STEPS: Final = 16
SHORTEST_WINDOW: Final = 8
PROBE_SHARE: Final = 0.006
"""Share of wall time that probes may lose."""
PROBE_CAP_TOKENS: Final = 16.0
SUSPECT: Final = 0.9
RIVAL: Final = 0.75
TELLING_STEPS: Final = 4
"""An unfinished probe of fewer steps says nothing about what the next one will lose."""


class Arm(StrEnum):
    PLAIN = "plain"
    VERIFY = "verify"

    @property
    def other(self) -> Arm:
        return Arm.VERIFY if self is Arm.PLAIN else Arm.PLAIN


class Decision(StrEnum):
    """A switch, handed over once."""

    DISABLE_MTP = "disable_mtp"
    ENABLE_MTP = "enable_mtp"


@dataclass(frozen=True, slots=True)
class GateSettings:
    window: int = 16
    dwell: int = 2
    margin: float = 0.05
    reprobe_tokens: int = 256
    refresh_tokens: int = 1024

    @classmethod
    def of(cls, levers: LeverState) -> GateSettings:
        return cls(
            window=levers.int("gate_window"),
            dwell=levers.int("gate_dwell"),
            margin=levers.float("gate_margin"),
            reprobe_tokens=levers.int("gate_reprobe_tokens"),
            refresh_tokens=levers.int("gate_refresh_tokens"),
        )


@dataclass(frozen=True, slots=True)
class Pin:
    """An arm that runs whatever the gate believes. The step is not recorded in the gate."""

    arm: Arm
    reason: GateReason


@dataclass(frozen=True, slots=True)
class PinFacts:
    """What decides a pin; all of it is known before the step."""

    gate: str
    """Lever `mtp_gate`: auto, force or off."""
    drafter: DrafterName
    width: int
    least_answer_tokens: int
    """Answer tokens emitted so far by the active sequence that has emitted the fewest."""
    entry_pin_tokens: int
    dflash_pin_c2: bool


def pin(facts: PinFacts) -> Pin | None:
    """The first rule that pins this step, or None where the gate decides."""
    dflash_pinned = facts.drafter is DrafterName.DFLASH and facts.dflash_pin_c2 and facts.width <= 2
    rules = (
        (facts.gate == "off", Arm.PLAIN, GateReason.FORCE),
        (facts.gate == "force", Arm.VERIFY, GateReason.FORCE),
        (dflash_pinned, Arm.VERIFY, GateReason.DFLASH_PIN),
        (facts.least_answer_tokens < facts.entry_pin_tokens, Arm.VERIFY, GateReason.ENTRY_PIN),
    )  # fmt: skip
    return next((Pin(arm, reason) for applies, arm, reason in rules if applies), None)


class Gate:
    """Two arms, one mode. Call order of a step: `maybe_remeasure`, `note_depth`, `next_step`, then one `record_*`."""

    def __init__(self, settings: GateSettings) -> None:
        self.settings = settings
        """May be replaced between steps."""
        self.mode = Arm.VERIFY
        self.losses = 0
        self.budget = Budget(PROBE_SHARE, PROBE_CAP_TOKENS)
        self._arms = {arm: Estimate(arm.value) for arm in Arm}
        self._usual = {arm: Usual() for arm in Arm}
        self._window = Window()
        self._windows_since_probe = 1
        self._is_probing = False
        self._probe_due = True
        self._other_measured_since_loss = True
        self._settle_left = 0
        self._depth = self._depth_anchor = -1
        self._bucket = 0
        self._last = Arm.VERIFY
        """The arm of the last step that was recorded."""
        self._reason = GateReason.COLD
        self._decision: Decision | None = None
        self._evidence: Evidence | None = None
        """As it was laid out last; none after something changed that it tells."""
        self._shown_until = 0
        self._probe_lost_ns = 0.0
        self._rate_at_probe = 0.0
        self._other_share = 1.0
        """Rate of the other arm over that of the running one when both were last known."""
        self._unfinished = Window()
        """Steps of probes that ran out of budget before they could count."""

    # Before the step

    def maybe_remeasure(self, depth: int, width: int) -> None:
        """Make both arms stale where the batch width's bucket or the depth regime has changed."""
        bucket = width_bucket(width)
        if self._bucket and bucket != self._bucket:
            self._settle_left = SETTLE_STEPS
            self._start_over(depth)
        elif self._depth_anchor >= 0 and is_other_depth(self._depth_anchor, depth):
            self._start_over(depth)
        self._bucket = bucket

    def note_depth(self, depth: int) -> None:
        """`depth` is the longest active sequence's, so that re-sorted rows cannot look like a new regime."""
        self._depth = depth
        if self._depth_anchor < 0:
            self._depth_anchor = depth

    def next_step(self) -> Arm:
        """The arm to run now: the mode, or the other arm while it is probed."""
        if self._settle_left:
            self._reason = GateReason.SETTLE
        elif self._is_probing or self._may_probe():
            self._begin_probe()
            self._reason = GateReason.REFRESH if self.mode is Arm.VERIFY else GateReason.PROBE
        elif self._reason is not GateReason.SWITCH or self._window.steps:
            self._reason = GateReason.HOLD if self._current.is_fresh else GateReason.COLD
        return self._running

    # After the step

    def record_decode(self, wall_ns: int, width: int) -> None:
        self._record(Arm.PLAIN, wall_ns, max(width, 1), width)

    def record_verify_step(self, wall_ns: int, emitted: int, width: int) -> None:
        """`wall_ns` includes drafting and bootstraps; `emitted` counts the whole batch."""
        self._record(Arm.VERIFY, wall_ns, max(emitted, 1), width)

    def take_fresh_decision(self) -> Decision | None:
        """The switch since the last call, once. On `DISABLE_MTP` drop drafts and sync the secondary stream."""
        decision, self._decision = self._decision, None
        return decision

    def explain(self, step_id: int = 0, time_ns: int = 0, pinned: Pin | None = None) -> Entry:
        """What becomes the `GateRecord` of the step. Its evidence is of at most `SHOWN_NS` ago."""
        evidence = self._evidence
        if evidence is None or time_ns >= self._shown_until:
            evidence = self._lay_out(time_ns)
        return (
            _gate_record, step_id, time_ns, self.mode, self._is_probing, self._reason,
            evidence, self._depth, self._bucket, pinned,
        )  # fmt: skip

    def _lay_out(self, time_ns: int) -> Evidence:
        self._shown_until = time_ns + SHOWN_NS
        rows = tuple(self._arms[arm].row() for arm in Arm)
        self._evidence = Evidence(rows, self._margin(), self.losses, self._tokens_until_probe())
        return self._evidence

    # Evidence

    @property
    def _current(self) -> Estimate:
        return self._arms[self.mode]

    @property
    def _other(self) -> Estimate:
        return self._arms[self.mode.other]

    @property
    def _running(self) -> Arm:
        return self.mode.other if self._is_probing else self.mode

    def _record(self, arm: Arm, wall_ns: int, tokens: int, width: int) -> None:
        if wall_ns <= 0 or arm is not self._running:
            return
        self.maybe_remeasure(max(self._depth, 0), width)
        for estimate in self._arms.values():
            estimate.age_tokens += tokens
        if self._settle_left:
            self._settle_left -= 1
            return
        wall_ns = self._usual[arm].without_hiccup(wall_ns)
        bootstraps, self._last = arm is Arm.VERIFY and self._last is Arm.PLAIN, arm
        if bootstraps:
            self._pay_bootstrap(wall_ns, tokens)
            return
        self._window.add(wall_ns, tokens)
        self._pay(wall_ns, tokens)
        if self._is_window_done():
            self._close_window()

    def _pay_bootstrap(self, wall_ns: int, tokens: int) -> None:
        """Charge the first speculative step after a plain one, which bootstraps or catches up, to the probe that caused
        it. In a window of eight it would pass for a lasting loss of a tenth and more."""
        if not self._current.rate:
            return
        lost_ns = self.budget.charge(wall_ns - tokens * 1e9 / self._current.rate)
        if self._is_probing:
            self._probe_lost_ns += lost_ns
        else:
            self.budget.spend(lost_ns)

    def _pay(self, wall_ns: int, tokens: int) -> None:
        """Charge a probe's step for what it lost; save from any other step."""
        if self._is_probing and self._current.rate:
            self._probe_lost_ns += self.budget.charge(wall_ns - tokens * 1e9 / self._current.rate)
        elif not self._is_probing:
            token_ns = 1e9 / self._current.rate if self._current.rate and self._current.is_fresh else wall_ns / tokens
            self.budget.accrue(wall_ns, token_ns * self._bucket)

    def _is_window_done(self) -> bool:
        window, settings = self._window, self.settings
        if window.steps >= settings.window:
            return True
        enough = window.steps >= min(SHORTEST_WINDOW, settings.window)
        if not self._is_probing:
            return enough and self._current.rate is None
        if self._current.rate and self._probe_lost_ns >= self.budget.limit_ns(self._urgency):
            return enough or self._other.rate is not None
        return enough and window.rate < (self._current.rate or 0.0) * (1 - settings.margin)

    def _close_window(self) -> None:
        """Fold what was measured, end a probe, arbitrate."""
        estimate = self._arms[self._running]
        if self._is_probing or not self._current.is_fresh:
            self._evidence = None
        if self._is_probing:
            self._end_probe(estimate)
        elif self._window.steps >= min(SHORTEST_WINDOW, self.settings.window):
            estimate.take(self._window, replace=False)
            self._windows_since_probe += 1
            self._suspect()
        self._window.clear()
        self._arbitrate()

    def _suspect(self) -> None:
        """Measure the other arm anew when the running one has lost or gained pace since they were compared.

        The machine changed for both or the text for this arm; only a probe can tell."""
        current, other, before = self._current.rate, self._other.rate, self._rate_at_probe
        if not current or not other or not before:
            return
        has_slowed = current < SUSPECT * before and other > RIVAL * current
        has_sped_up = current > before / SUSPECT and self._other_share > RIVAL
        self._probe_due = self._probe_due or has_slowed or has_sped_up

    def _end_probe(self, estimate: Estimate) -> None:
        """Pay, and take the window in; one cut short is added to until it is long enough to count."""
        self.budget.spend(self._probe_lost_ns)
        self._is_probing = self._probe_due = False
        self._windows_since_probe = 0
        self._unfinished.merge(self._window)
        if self._unfinished.steps >= min(SHORTEST_WINDOW, self.settings.window):
            estimate.take(self._unfinished, replace=True)
            self._unfinished.clear()
            self._other_measured_since_loss = True
            # Ahead, but by less than the margin: to measure again costs next to nothing, not to know costs for ever.
            self._probe_due = (estimate.rate or 0.0) > (self._current.rate or 0.0)
            self._rate_at_probe = self._current.rate or 0.0
            self._other_share = (estimate.rate or 0.0) / self._rate_at_probe if self._rate_at_probe else 1.0
        estimate.age_tokens = 0

    def _arbitrate(self) -> None:
        current, other = self._current, self._other
        if current.rate is None or not other.is_fresh or other.rate is None:
            return
        if other.rate <= current.rate + self._margin():
            self.losses = 0
        elif self._other_measured_since_loss:
            self.losses += 1
            self._other_measured_since_loss = False
            self._probe_due = True
            if self.losses >= self.settings.dwell:
                self._switch()

    def _switch(self) -> None:
        self.mode = self.mode.other
        self._decision = Decision.ENABLE_MTP if self.mode is Arm.VERIFY else Decision.DISABLE_MTP
        self._reason = GateReason.SWITCH
        self._evidence = None
        self.losses = 0
        self._probe_due = False
        self._other_measured_since_loss = False
        self._rate_at_probe = self._current.rate or 0.0
        self._other_share = 1 / self._other_share if self._other_share else 1.0
        self._unfinished.clear()

    def _margin(self) -> float:
        """Tokens per second by which the other arm must be ahead."""
        current, other = self._current, self._other
        deviation = DEVIATION_SHARE * (current.deviation + other.deviation)
        return max(self.settings.margin * (current.rate or 0.0), deviation)

    def _start_over(self, depth: int) -> None:
        for estimate in self._arms.values():
            estimate.stale = estimate.rate is not None
        self._evidence = None
        self._depth_anchor = depth
        self._is_probing = False
        self._probe_due = True
        self.losses = 0
        self._window.clear()
        self._unfinished.clear()

    # Probes

    def _interval(self) -> int:
        if self.mode is Arm.PLAIN:
            return self.settings.reprobe_tokens
        return self.settings.refresh_tokens * max(self._bucket, 1)

    def _may_probe(self) -> bool:
        """A stale or unmeasured running arm finishes a window first, and any does after a probe that it did not lose;
        a probe must be due and paid for."""
        if not self._current.is_fresh or not (self._windows_since_probe or self.losses):
            return False
        return (self._probe_due or self._other.age_tokens >= self._interval()) and self._missing_ns() <= 0

    def _expected_loss_ns(self) -> float:
        """What the shortest probe would lose if the other arm still ran as last measured, against this one."""
        current, other = self._current.rate, self._other.rate
        if not current or not other:
            return 0.0
        if self._other.stale:
            # Rates of another regime are of another scale; how the arms compared is the better guess.
            other = current * self._other_share
        if self._unfinished.steps >= TELLING_STEPS:
            other = min(other, self._unfinished.rate)
        step_ns = max(self._bucket, 1) * 1e9 / other
        return max(0.0, SHORTEST_WINDOW * step_ns * (1 - other / current))

    def _missing_ns(self) -> float:
        """What has yet to be saved before a probe may begin; a first measurement does not wait."""
        if self._other.rate is None:
            return 0.0
        return self.budget.missing_ns(self._expected_loss_ns(), self._urgency)

    @property
    def _urgency(self) -> Urgency:
        if self.losses:
            return Urgency.CONFIRMS
        return Urgency.CHANGED if self._probe_due else Urgency.ROUTINE

    def _tokens_until_probe(self) -> int:
        if self._is_probing:
            return 0
        due = 0 if self._probe_due else max(0, self._interval() - self._other.age_tokens)
        wait_ns = max(0.0, self._missing_ns()) / self.budget.share
        return max(due, math.ceil(wait_ns * (self._current.rate or 0.0) / 1e9))

    def _begin_probe(self) -> None:
        if self._is_probing:
            return
        if self._window.steps >= SHORTEST_WINDOW:
            self._current.take(self._window, replace=False)
        self._window.clear()
        self._is_probing = True
        self._evidence = None
        self._probe_lost_ns = 0.0


def _gate_record(
    step_id: int, time_ns: int, mode: Arm, is_probing: bool, reason: GateReason, evidence: Evidence, depth: int,
    width_bucket: int, pinned: Pin | None,
) -> GateRecord:  # fmt: skip
    arm = mode.other if is_probing else mode
    if pinned:
        arm, reason = pinned.arm, pinned.reason
    return gate_record(step_id, time_ns, mode, arm, reason, evidence, depth, width_bucket, pinned is not None)
