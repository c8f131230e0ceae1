"""`drafter=auto`: at every step the drafter and draft count that promise the most tokens per second, by measurement.

A step of an arm emits 1 + (expected accepted) tokens per sequence and takes (drafting + verify) time; both factors are
learned from steps that ran, so all draft counts of a drafter share one acceptance record and all drafters one verify
cost (`promise.py`). The *base* is plain or one drafter that guesses; it changes only on measured evidence, as the
gate's mode does. Copies of the history are taken step by step, wherever a match is worth more than the base, because
how often they are right is known from every emitted token without drafting. Probes are paid from a budget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from engine.core.device import DrafterName
from engine.drafters.acceptance import MatchAcceptance
from engine.drafters.arms import PLAIN, ArmKey, Offer
from engine.drafters.evidence import (
    DEVIATION_SHARE,
    SHOWN_NS,
    Budget,
    Evidence,
    Urgency,
    gate_record,
    is_other_depth,
    width_bucket,
)
from engine.drafters.gate import GateSettings
from engine.drafters.promise import Promises
from engine.drafters.standing import Base, Delivered, Probe, Standing
from telemetry.names import DELIVERED, GateReason
from telemetry.ring import Entry

SETTLE_STEPS: Final = 4
PLAIN_PROBE_STEPS: Final = 4
"""What a plain step emits is known, so a few steps tell its rate; a drafter's acceptance takes more."""
DRAFTER_PROBE_STEPS: Final = 8
PROBE_SHARE: Final = 0.01
PROBE_CAP_TOKENS: Final = 16.0
LEAST_MARGIN: Final = 0.01
SUSPECT_STEPS: Final = 8
SHORTEST_WAIT: Final = 0.25
"""Of the usual interval between probes, for a rival that evidence hardly tells from the running base."""
TELLING: Final = 1.0
"""A lead of so many standard errors (of both rates, added) is waited out for the whole interval."""
SAFE_AFTER: Final = 64
"""Tokens of each sequence after which plain decoding that seems to be ahead is measured on credit."""
HOPELESS_WAIT: Final = 2.0
"""Of a rival that would be slower if all its drafts were accepted."""
VALID_WINDOWS: Final = 4


MOST_A_STEP: Final = 65
"""Tokens that a step can emit; a depth further away is another reply's."""

FIRST_BASES: Final = (DrafterName.MTP, DrafterName.DFLASH)
"""Where an arbiter that knows nothing begins, as the gate begins in MTP mode."""


ArbiterSettings = GateSettings
"""The arbiter goes by the gate's levers."""


class Arbiter:
    """Call order of a step: `choose`, the step, `record`. Emitted tokens reach `matches` by `NgramIndex.append`."""

    def __init__(self, settings: ArbiterSettings, promises: Promises | None = None) -> None:
        self.settings = settings
        """May be replaced between steps."""
        self.base: Base = None
        self.budget = Budget(PROBE_SHARE, PROBE_CAP_TOKENS)
        self._promises = promises or Promises()
        self._standings: dict[Base, Standing] = {}
        self._offered: Offer = {}
        self._offer: Offer = {}
        """What is on offer but for copies."""
        self._delivered = Delivered()
        self._probe: Probe | None = None
        self._shortfalls = 0
        self._copies_paused_tokens = 0
        self._settle_left = 0
        self._depth = self._depth_anchor = 0
        self._is_new = True
        self._catches_up = True
        """Another reply runs than before, and no head has drafted for it yet: its first draft takes the prompt in."""
        self._arm = PLAIN
        self._reason = GateReason.COLD
        self._pinned: GateReason | None = None
        self._step = 0
        self._price = self._base_price = 0.0
        self._evidence: Evidence | None = None
        """As it was laid out last; none after something changed that it tells."""
        self._laid: dict[Base, tuple[ArmKey, float]] = {}
        """Best draft count and rate by base, while evidence is laid out."""
        self._shown_until = 0
        self._shown_reason = self._reason

    @property
    def matches(self) -> MatchAcceptance:
        """Give this to every `NgramIndex` as its observer."""
        return self._promises.matches

    # Before the step

    def choose(
        self,
        offer: Offer,
        depth: int,
        width: int,
        match_len: int = 0,
        pinned: GateReason | None = None,
    ) -> ArmKey:
        """The arm of this step, one of the `offer` (plain where that is empty).

        `match_len` is `NgramIndex.match_len`; without it no n-gram arm is taken. `pinned` says why plain is not on
        offer although it could run (`entry_pin`, `force`); it only shows in the explanation."""
        self._pinned = pinned
        self._note(depth, width, match_len)
        self._set_price()
        if offer is not self._offered:
            self._offered = offer
            self._offer = {base: counts for base, counts in offer.items() if base is not DrafterName.NGRAM}
        copies = offer.get(DrafterName.NGRAM)
        if not self._standings:
            self.base = next((base for base in FIRST_BASES if base in self._offer), None)
        self._arm, self._base_price = self._pick_base() if self._offer else (PLAIN, 0.0)
        if copies and match_len and self._may_copy():
            copy, worth = self._promises.best(DrafterName.NGRAM, copies, self._price)
            if not self._offer or worth > self._promises.worth(self._arm, self._price):
                self._arm = copy
        return self._arm

    def trim(self, drafter: DrafterName, confidences: Sequence[float]) -> int:
        """How many of the drafts just made to verify, 1 to `len(confidences)`, by their calibrated confidences."""
        return self._promises.best_prefix(drafter, confidences, self._base_price)

    # After the step

    def record(
        self,
        arm: ArmKey,
        wall_ns: int,
        emitted: int,
        width: int,
        outcomes: Sequence[tuple[int, int]] = (),
        draft_ns: int = 0,
    ) -> None:
        """Take in a step: `wall_ns` of all of it, of which `draft_ns` went into drafting.

        `outcomes` are (drafted, accepted) of every sequence, needed where several run or a reply ended in the step;
        an arm with a drafter whose outcomes are all (0, 0) was a bootstrap, and the first draft of a reply takes its
        prompt in: both are paid for, but say nothing of what such a step costs."""
        if wall_ns <= 0:
            return
        emitted = max(emitted, 1)
        if arm.drafter and not outcomes and width == 1:
            outcomes = ((arm.drafts, min(arm.drafts, emitted - 1)),)
        self._step += 1
        self._age(emitted)
        if arm.drafter and arm.drafter is not DrafterName.NGRAM:
            for drafted, accepted in outcomes:
                self._promises.accepts(arm.drafter).add(drafted, accepted)
        if self._settle_left:
            self._settle_left -= 1
            return
        if self._catches_up and arm.drafter not in (None, DrafterName.NGRAM):
            self._catches_up = False
        elif arm.drafter is None or any(drafted for drafted, _ in outcomes):
            self._promises.costs.add(arm, self._planned(arm), wall_ns, draft_ns, self._step)
        self._account(arm, wall_ns, emitted)

    def record_confidences(self, drafter: DrafterName, confidences: Sequence[float], accepted: int) -> None:
        """Learn what stated confidences were worth; `confidences` are those of the drafts that were verified."""
        self._promises.calibrated(drafter).add(confidences, accepted)

    def explain(self, step_id: int = 0, time_ns: int = 0) -> Entry:
        """What becomes the `GateRecord` of the step: the last choice, and evidence of at most `SHOWN_NS` ago."""
        evidence, reason, pinned = self._evidence, self._reason, self._pinned
        is_news = reason is not self._shown_reason and self._probe is None
        if evidence is None or is_news or time_ns >= self._shown_until:
            evidence = self._lay_out(time_ns)
        return (
            gate_record, step_id, time_ns, self.base or "plain", self._arm.name, pinned or reason, evidence,
            self._depth, self._promises.bucket, pinned is not None,
        )  # fmt: skip

    def _lay_out(self, time_ns: int) -> Evidence:
        self._shown_until, self._shown_reason = time_ns + SHOWN_NS, self._reason
        self._laid = {base: (self._best(base), self._base_rate(base)) for base in {*self._offer, self.base}}
        self._evidence = Evidence(
            arms=self._rows(),
            margin=self._margin(self._rival()) * 1e9,
            losses=max((standing.wins for standing in self._standings.values()), default=0),
            tokens_until_probe=self._tokens_until_probe(),
        )
        self._laid = {}
        return self._evidence

    # Choosing

    def _set_price(self) -> None:
        """Tokens that a nanosecond is worth: what the best known way of late delivers."""
        plain_ns = self._promises.costs.step_ns(None, 0)
        self._price = max(self._promises.width / plain_ns if plain_ns else 0.0, self._delivered.rate)

    def _pick_base(self) -> tuple[ArmKey, float]:
        """The arm of the base or probe, and the tokens per nanosecond that it promises.

        Its drafts are counted at its own rate: text that has to be guessed takes as long as guessing takes, however
        fast copies get over the rest."""
        if self._probe and self._probe.base not in self._offer:
            self._probe = None
        if not self._settle_left and not self._probe:
            self._begin_due_probe()
        if self._settle_left:
            self._reason = GateReason.SETTLE
        elif self._probe:
            self._reason = GateReason.PROBE if self.base is None else GateReason.REFRESH
            return self._promises.fastest(self._probe.base, self._offer[self._probe.base])
        elif self._reason is GateReason.SWITCH and not self._delivered.steps:
            pass
        else:
            self._reason = GateReason.HOLD if self._standing(self.base).is_measured else GateReason.COLD
        bases = [self.base] if self.base in self._offer else list(self._offer)
        return max((self._promises.fastest(base, self._offer[base]) for base in bases), key=lambda best: best[1])

    def _may_copy(self) -> bool:
        """Not while something is measured: a probe, a change of width, or the base's own first steps."""
        is_measuring = self.base in self._offer and not self._standing(self.base).is_measured
        return not (is_measuring or self._probe or self._settle_left or self._copies_paused_tokens)

    def _planned(self, arm: ArmKey) -> int:
        """Drafts that were made; fewer are verified where confidence trimmed them."""
        chosen = self._arm
        return max(chosen.drafts, arm.drafts) if chosen.drafter is arm.drafter else arm.drafts

    # Regimes

    def _note(self, depth: int, width: int, match_len: int) -> None:
        promises, bucket = self._promises, width_bucket(width)
        if self._is_new or not 0 <= depth - self._depth <= MOST_A_STEP:
            self._catches_up = True
        if self._is_new:
            self._depth_anchor, self._is_new = depth, False
        elif bucket != promises.bucket:
            self._settle_left = SETTLE_STEPS
            self._start_over(depth)
        elif is_other_depth(self._depth_anchor, depth):
            promises.costs.note_return()
            self._start_over(depth)
        self._depth = depth
        promises.note(bucket, width, match_len)

    def _start_over(self, depth: int) -> None:
        self._depth_anchor = depth
        self._probe = self._evidence = None
        self._delivered = Delivered()
        for standing in self._standings.values():
            standing.is_stale = standing.is_measured
            standing.wins = 0

    def _age(self, tokens: int) -> None:
        if self._copies_paused_tokens:
            self._copies_paused_tokens = max(0, self._copies_paused_tokens - tokens)
            self._delivered = self._delivered if self._copies_paused_tokens else Delivered()
        for standing in self._standings.values():
            standing.age_tokens += tokens

    # Evidence

    def _standing(self, base: Base) -> Standing:
        found = self._standings.get(base)
        if found is None:
            found = self._standings[base] = Standing()
        return found

    def _best(self, base: Base) -> ArmKey:
        laid = self._laid.get(base)
        return laid[0] if laid else self._promises.fastest(base, self._offer.get(base, (0,)))[0]

    def _base_rate(self, base: Base) -> float:
        """Tokens per nanosecond that a base promises at its best draft count."""
        laid = self._laid.get(base)
        if laid:
            return laid[1]
        return self._promises.rate(self._best(base)) if self._offer.get(base) else 0.0

    def _account(self, arm: ArmKey, wall_ns: int, emitted: int) -> None:
        probe = self._probe
        if probe is None or probe.base is not arm.drafter:
            self._delivered.add(emitted, wall_ns)
            self.budget.accrue(wall_ns, self._promises.width / self._price if self._price else wall_ns / emitted)
            self._note_running(arm)
            if self._step % SUSPECT_STEPS == 0:
                self._suspect()
            if self._step % self.settings.window == 0:
                self._validate()
            return
        probe.steps_left -= 1
        probe.lost_ns += self.budget.charge(wall_ns - emitted / (self._price or 1.0))
        if probe.steps_left <= 0 or probe.lost_ns >= self.budget.limit_ns(self._urgency(probe.base)):
            self._end_probe(probe)

    def _note_running(self, arm: ArmKey) -> None:
        """The running base is measured once its own steps tell its cost."""
        if arm.drafter is not self.base:
            return
        cost = self._promises.costs.verify.get(arm.drafts)
        if cost and cost.samples >= PLAIN_PROBE_STEPS:
            standing = self._standing(self.base)
            standing.note_measured()

    def _end_probe(self, probe: Probe) -> None:
        self.budget.spend(probe.lost_ns)
        self._probe = self._evidence = None
        standing = self._standing(probe.base)
        standing.note_measured()
        standing.is_confirming = False
        self._arbitrate(probe.base, standing)

    def _arbitrate(self, rival: Base, standing: Standing) -> None:
        """One new measurement of `rival` is one win or none; `dwell` wins in a row make it the base."""
        if self.base not in self._offer:
            return
        ahead = self._base_rate(rival) - self._base_rate(self.base)
        if ahead <= self._margin(rival):
            standing.wins = 0
            # Too close to call costs almost nothing to measure again, and not to know it costs for ever.
            standing.is_confirming = ahead > 0
            return
        standing.wins += 1
        standing.is_confirming = True
        if standing.wins >= self.settings.dwell:
            self._switch(rival)
            self._suspect()

    def _switch(self, base: Base) -> None:
        self.base = base
        self._reason = GateReason.SWITCH
        self._evidence = None
        self._delivered = Delivered()
        for standing in self._standings.values():
            standing.wins, standing.is_confirming = 0, False

    def _validate(self) -> None:
        """Promises must be kept: where less than plain decoding is delivered, whatever was promised, decode plainly.

        The evidence is the delivered throughput of all steps of late and a plain step measured within it."""
        plain, window = self._standing(None), self.settings.window
        plain_rate, spread = self._promises.rate(PLAIN), self._promises.costs.spread
        if None not in self._offer or not plain.is_measured or plain.is_stale or self._delivered.steps < 2 * window:
            return
        # Costs leave hiccups out and deliveries do not: on an unsteady machine even plain decoding keeps no promise.
        if self._copies_paused_tokens or self._delivered.rate >= plain_rate * (1 - self.settings.margin - spread):
            self._shortfalls = 0
        elif plain.age_tokens > VALID_WINDOWS * window * self._promises.width:
            # Copies may have kept a plain base from running at all.
            self._probe = Probe(None, PLAIN_PROBE_STEPS)
        else:
            self._shortfalls += 1
            if self._shortfalls >= self.settings.dwell:
                self._shortfalls = 0
                self._copies_paused_tokens = self.settings.reprobe_tokens
                self._switch(None)

    def _suspect(self) -> None:
        """Measure anew, at once, whoever seems to be ahead of the running base by now, and the sooner the closer."""
        if self.base not in self._offer:
            return
        for rival in self._offer:
            standing = self._standing(rival)
            if rival is self.base or not standing.is_measured:
                continue
            ahead = self._base_rate(rival) - self._base_rate(self.base)
            standing.is_confirming = standing.is_confirming or ahead > self._margin(rival)
            standing.wait = self._wait(rival, -ahead)

    def _wait(self, rival: Base, behind: float) -> float:
        """Share of the usual interval after which a rival that is so far behind is measured again.

        Budget bounds what probes cost; within it, time goes to those whose next probe may change the base."""
        current = self._base_rate(self.base)
        if self._promises.bound(rival, self._offer[rival]) < current and rival is not None:
            return HOPELESS_WAIT
        error = self._uncertain(rival) * current
        return min(max(behind / (TELLING * error), SHORTEST_WAIT), 1.0) if error else 1.0

    def _uncertain(self, rival: Base) -> float:
        """Relative standard errors of both rates, added."""
        return sum(self._promises.uncertainty(base, self._best(base).drafts) for base in (self.base, rival))

    def _margin(self, rival: Base) -> float:
        """Tokens per nanosecond by which a rival must be ahead: as much as is uncertain, at most the lever's share."""
        share = max(LEAST_MARGIN, DEVIATION_SHARE * self._uncertain(rival))
        return min(share, max(self.settings.margin, LEAST_MARGIN)) * self._base_rate(self.base)

    # Probes

    def _begin_due_probe(self) -> None:
        running = self._standing(self.base)
        if self.base not in self._offer or running.is_stale or not running.is_measured:
            return
        due = [base for base in self._offer if base is not self.base and self._is_due(base)]
        affordable = [base for base in due if self._missing_ns(base) <= 0]
        if affordable:
            base = max(affordable, key=lambda base: self._standing(base).age_tokens)
            self._probe = Probe(base, PLAIN_PROBE_STEPS if base is None else DRAFTER_PROBE_STEPS)
            if base is None:
                self._promises.costs.restart_plain()

    def _interval(self, base: Base) -> int:
        """Tokens between two probes of `base`."""
        usual = self.settings.reprobe_tokens if self.base is None else self.settings.refresh_tokens
        return math.ceil(usual * self._standing(base).wait) * self._promises.bucket

    def _is_due(self, base: Base) -> bool:
        standing = self._standing(base)
        if not standing.is_measured or standing.is_stale or standing.is_confirming:
            return True
        return standing.age_tokens >= self._interval(base)

    def _expected_loss_ns(self, base: Base) -> float:
        rate, current = self._base_rate(base), self._base_rate(self.base)
        if not rate or not current or not self._standing(base).is_measured:
            return 0.0
        arm = self._best(base)
        steps = PLAIN_PROBE_STEPS if base is None else DRAFTER_PROBE_STEPS
        return steps * (self._promises.costs.step_ns(base, arm.drafts) or 0.0) * max(0.0, 1 - rate / current)

    def _missing_ns(self, base: Base) -> float:
        """What has yet to be saved before a probe may begin. A first measurement does not wait, nor does plain decoding
        that has seemed to be ahead for a while: what its steps emit is known."""
        standing = self._standing(base)
        is_safe = base is None and standing.is_confirming and standing.age_tokens >= SAFE_AFTER * self._promises.bucket
        if not standing.is_measured or is_safe:
            return 0.0
        return self.budget.missing_ns(self._expected_loss_ns(base), self._urgency(base))

    def _urgency(self, base: Base) -> Urgency:
        standing = self._standing(base)
        if standing.wins:
            return Urgency.CONFIRMS
        return Urgency.CHANGED if standing.is_stale or standing.is_confirming else Urgency.ROUTINE

    # Showing

    def _rival(self) -> Base:
        others = [base for base in self._offer if base is not self.base]
        return max(others, key=self._base_rate, default=self.base)

    def _rows(self) -> tuple[tuple[str, float, float, int, bool], ...]:
        rows = []
        for base in self._offer:
            arm = self._best(base)
            standing, rate = self._standing(base), self._base_rate(base) * 1e9
            known = standing.is_measured and rate > 0
            deviation = rate * self._promises.uncertainty(base, arm.drafts)
            rows.append(
                (
                    arm.name,
                    rate if known else -1.0,
                    deviation if known else -1.0,
                    standing.age_tokens,
                    standing.is_stale,
                )
            )
        rows.append((DELIVERED, self._delivered.rate * 1e9, -1.0, 0, not self._delivered.steps))
        return tuple(rows)

    def _tokens_until_probe(self) -> int:
        waits = [self._tokens_until(base) for base in self._offer if base is not self.base]
        return 0 if self._probe else min(waits, default=-1)

    def _tokens_until(self, base: Base) -> int:
        standing = self._standing(base)
        due = 0 if self._is_due(base) else self._interval(base) - standing.age_tokens
        wait_ns = max(0.0, self._missing_ns(base)) / self.budget.share
        return max(due, math.ceil(wait_ns * self._price))
