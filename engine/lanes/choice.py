"""Which drafter feeds this step, or none: the levers, the table of the contract, and the measured gate."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cache

from engine.core.device import Draft, DrafterName
from engine.core.sequence import Sequence
from engine.core.state import EngineState
from engine.core.value import StepValue
from engine.drafters.arbiter import Arbiter, ArbiterSettings
from engine.drafters.arms import ArmKey, Offer, arm_of
from engine.drafters.combine import longer_draft
from engine.drafters.gate import Arm, Decision, Gate, GateSettings, Pin, PinFacts, pin
from engine.drafters.ladder import draft_count
from engine.drafters.promise import Promises
from engine.lanes.draft import Drafting, capacity
from engine.lanes.eligibility import HEADS, LANE_OF, refusal, wanted_drafters
from engine.lanes.emit import Committed
from engine.lanes.trace import SAMPLE_EVERY, STEP_LEVEL
from engine.levers.resolve import LeverState
from telemetry.names import GateReason, Lane, Refusal
from telemetry.record import RungRecord
from telemetry.ring import Entry

Refusals = tuple[tuple[str, str], ...]
COPY_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
MOST_COUNTED = COPY_COUNTS[-1]
"""Room beyond this changes no draft count."""
OFFERS_KEPT = 256
OfferKey = tuple[int, tuple[DrafterName, ...], int, int, bool]
ORDER = (DrafterName.NGRAM, DrafterName.SELF, DrafterName.MTP, DrafterName.DFLASH)


class Choice(StepValue, frozen=True):
    """What the next decode step does."""

    drafter: DrafterName | None
    most: int = 0
    """Drafts at most."""
    refusals: tuple[tuple[str, str], ...] = ()
    may_run_ahead: bool = False
    """No speculation is configured for this batch, or it decodes plainly for now."""
    gated: str = ""
    """The value of the lever `drafter` whose gate decided, also when it said no."""
    pinned: Pin | None = None
    arm: ArmKey | None = None
    """What the arbiter chose (`drafter=auto`)."""
    is_exact: bool = False
    """`most` was chosen by evidence, so an n-gram copy is that long whatever its own window says."""

    @property
    def is_measured(self) -> bool:
        """Whether anybody wants to know what the step cost and delivered."""
        return self.arm is not None or bool(self.gated)


class Outcome(StepValue, frozen=True):
    """What a decode step cost and delivered, for whoever decided it."""

    step: int
    ended: int
    """Clock reading in ns."""
    wall_ns: int
    draft_ns: int
    emitted: int
    work: Seq[Committed]
    confidences: Seq[tuple[float, ...]]
    """Of the drafts that were verified, per sequence; empty tuples where the drafter states none."""


class Router:
    """The gates of the drafters, what is known of their acceptance, the arbiter over all, and the width decision."""

    def __init__(self, drafting: Drafting) -> None:
        self._drafting = drafting
        self._gates: dict[str, Gate] = {}
        self._promises = Promises()
        self._arbiter = Arbiter(ArbiterSettings(), self._promises)
        self._drafting.observer = self._promises.matches
        self._speculates_width: bool | None = None
        self._offers: dict[OfferKey, Offer] = {}
        self._settings: tuple[int, GateSettings] | None = None

    def choose(self, engine: EngineState, seqs: Seq[Sequence]) -> Choice:
        wanted = wanted_drafters(engine)
        reasons = tuple(refusal(engine, drafter, seqs, wanted) for drafter in ORDER)
        refusals = _refusals(reasons)
        if not wanted:
            return Choice(None, refusals=refusals, may_run_ahead=True)
        self._note_rung(engine, len(seqs))
        able = [drafter for drafter, reason in zip(ORDER, reasons, strict=True) if reason is None]
        if not able:
            return Choice(None, refusals=(*refusals, (Lane.PIPELINED, Refusal.SPECULATION)))
        if engine.ctx.levers.text("drafter") == "auto":
            return self._ask_arbiter(engine, able, seqs, refusals)
        return self._ask_gate(engine, able, seqs, refusals)

    def trim(self, choice: Choice, draft: Draft) -> Draft:
        """The part of a draft that is worth verifying, by its confidences; all of it where the arbiter has no say."""
        if choice.arm is None or choice.drafter is None or len(draft.confidences) < 2:
            return draft
        keep = self._arbiter.trim(choice.drafter, draft.confidences)
        return Draft(draft.tokens[:keep], draft.confidences[:keep])

    def record(self, engine: EngineState, choice: Choice, outcome: Outcome) -> None:
        """Tell who decided what the step delivered, and record the decision."""
        if choice.arm is not None:
            self._record_arm(engine, choice, choice.arm, outcome)
        elif choice.gated:
            self._record_gate(engine, choice, self._gates[choice.gated], outcome)

    # drafter=auto

    def _ask_arbiter(
        self, engine: EngineState, able: Seq[DrafterName], seqs: Seq[Sequence], refusals: Refusals
    ) -> Choice:
        arbiter = self._arbiter
        arbiter.settings = self._gate_settings(engine)
        pinned = self._pinned(engine, seqs)
        offer = self._offer(engine, able, seqs, pinned)
        match_len = self._drafting.match_len(engine, seqs[0]) if DrafterName.NGRAM in offer else 0
        arm = arbiter.choose(offer, max(seq.seq_len for seq in seqs), len(seqs), match_len, pinned)
        ahead = arm.drafter is None and engine.ctx.device.facts.runs_ahead
        refusals = (*refusals, *_not_chosen(tuple(able), arm.drafter, ahead))
        return Choice(arm.drafter, arm.drafts, refusals, may_run_ahead=ahead, arm=arm, is_exact=True)

    def _offer(
        self, engine: EngineState, able: Seq[DrafterName], seqs: Seq[Sequence], pinned: GateReason | None
    ) -> Offer:
        """Draft counts of every drafter, laid out once for as long as nothing changes that they depend on."""
        levers = engine.ctx.levers
        room = min(MOST_COUNTED, *(capacity(engine, seq) for seq in seqs))
        key = (levers.version, tuple(able), len(seqs), room, pinned is None)
        offer = self._offers.get(key)
        if offer is None:
            if len(self._offers) >= OFFERS_KEPT:
                self._offers.clear()
            offer = self._offers[key] = _offer(levers, *key[1:])
        return offer

    def _gate_settings(self, engine: EngineState) -> GateSettings:
        """The levers' settings, made anew only when a lever has changed."""
        levers = engine.ctx.levers
        if self._settings is None or self._settings[0] != levers.version:
            self._settings = (levers.version, GateSettings.of(levers))
        return self._settings[1]

    def _pinned(self, engine: EngineState, seqs: Seq[Sequence]) -> GateReason | None:
        """Why plain decoding is not on offer."""
        if engine.ctx.levers.text("mtp_gate") == "force":
            return GateReason.FORCE
        is_entry = min(seq.state.post_think for seq in seqs) < entry_pin_tokens(engine)
        return GateReason.ENTRY_PIN if is_entry else None

    def _record_arm(self, engine: EngineState, choice: Choice, arm: ArmKey, outcome: Outcome) -> None:
        arbiter = self._arbiter
        if engine.ctx.levers.trace_level >= STEP_LEVEL:
            _record_decision(engine, outcome, arbiter.explain)
        outcomes = [(part.drafted, part.accepted) for part in outcome.work]
        verified = max((drafted for drafted, _ in outcomes), default=0)
        ran = arm_of(arm.drafter, verified) if arm.drafter is not None and verified else arm
        arbiter.record(ran, outcome.wall_ns, outcome.emitted, len(outcome.work), outcomes, outcome.draft_ns)
        if arm.drafter is not None:
            for part, confidences in zip(outcome.work, outcome.confidences, strict=True):
                if confidences:
                    arbiter.record_confidences(arm.drafter, confidences, part.accepted)

    # one drafter, or two combined, behind their gate

    def _ask_gate(self, engine: EngineState, able: Seq[DrafterName], seqs: Seq[Sequence], refusals: Refusals) -> Choice:
        levers, width = engine.ctx.levers, len(seqs)
        name = levers.text("drafter")
        gate = self._gates.setdefault(name, Gate(self._gate_settings(engine)))
        gate.settings = self._gate_settings(engine)
        depth = max(seq.seq_len for seq in seqs)
        gate.maybe_remeasure(depth, width)
        gate.note_depth(depth)
        pinned = pin(
            PinFacts(
                gate=levers.text("mtp_gate"),
                drafter=able[0],
                width=width,
                least_answer_tokens=min(seq.state.post_think for seq in seqs),
                entry_pin_tokens=entry_pin_tokens(engine),
                dflash_pin_c2=levers.flag("dflash_gate_pin_c2"),
            )
        )
        arm = pinned.arm if pinned else gate.next_step()
        if gate.take_fresh_decision() is Decision.DISABLE_MTP:
            engine.ctx.device.sync_secondary()
        if arm is Arm.PLAIN:
            ahead = engine.ctx.device.facts.runs_ahead
            refusals = (*refusals, *_not_chosen(tuple(able), None, ahead))
            return Choice(None, refusals=refusals, may_run_ahead=ahead, gated=name, pinned=pinned)
        if len(able) == 1:
            return Choice(able[0], levers.int("num_drafts"), refusals, gated=name, pinned=pinned)
        longer = self._longer_draft(engine, seqs[0])
        refusals = (*refusals, *_not_chosen(tuple(able), longer.drafter))
        return Choice(longer.drafter, longer.drafts, refusals, gated=name, pinned=pinned, is_exact=True)

    def _longer_draft(self, engine: EngineState, seq: Sequence) -> ArmKey:
        """A copy or the head's draft for the one active sequence (`drafter=combined`)."""
        levers, room = engine.ctx.levers, capacity(engine, seq)
        guesses, _ = draft_count(levers.int("num_drafts"), levers.ladder, 1, None, (room,))
        longest = min(room, levers.int("ngram_copy_max"))
        return longer_draft(self._promises, DrafterName.MTP, guesses, self._drafting.match_len(engine, seq), longest)

    def _record_gate(self, engine: EngineState, choice: Choice, gate: Gate, outcome: Outcome) -> None:
        if engine.ctx.levers.trace_level >= STEP_LEVEL:
            _record_decision(engine, outcome, gate.explain, choice.pinned)
        if choice.drafter in HEADS:
            for part in outcome.work:
                self._promises.accepts(choice.drafter).add(part.drafted, part.accepted)
        if choice.pinned is not None:
            return
        if choice.drafter is None:
            gate.record_decode(outcome.wall_ns, len(outcome.work))
        else:
            gate.record_verify_step(outcome.wall_ns, outcome.emitted, len(outcome.work))

    def _note_rung(self, engine: EngineState, width: int) -> None:
        """Record each flip of the width decision."""
        most = engine.ctx.levers.int("mtp_max_seqs")
        speculates = width <= most
        if self._speculates_width not in (None, speculates):
            engine.ctx.telemetry.append(RungRecord(engine.ctx.clock.now_ns(), engine.tick, width, most, speculates))
        self._speculates_width = speculates


def _offer(levers: LeverState, able: tuple[DrafterName, ...], width: int, room: int, offers_plain: bool) -> Offer:
    """Every draft count up to the bound for heads, a few spread ones for copies; plain also where no head runs."""
    heads = [drafter for drafter in able if drafter is not DrafterName.NGRAM] if room >= 1 else []
    offer: dict[DrafterName | None, Seq[int]] = {None: (0,)} if offers_plain or not heads else {}
    most, _ = draft_count(levers.int("num_drafts"), levers.ladder, width, None, (room,))
    offer.update(dict.fromkeys(heads, range(1, most + 1)))
    longest = min(room, levers.int("ngram_copy_max"))
    if DrafterName.NGRAM in able and longest >= 1:
        offer[DrafterName.NGRAM] = tuple(count for count in COPY_COUNTS if count <= longest)
    return offer


@cache
def _refusals(reasons: tuple[Refusal | None, ...]) -> Refusals:
    """(lane, reason) of the drafters in `ORDER` that were refused."""
    return tuple(
        (LANE_OF[drafter].value, reason.value) for drafter, reason in zip(ORDER, reasons, strict=True) if reason
    )


@cache
def _not_chosen(able: tuple[DrafterName, ...], chosen: DrafterName | None, runs_ahead: bool = False) -> Refusals:
    """Why the lanes of the others, and the pipelined one where it cannot, do not run."""
    reason = Refusal.GATE if chosen is None else Refusal.NOT_CHOSEN
    rest = tuple((LANE_OF[drafter].value, reason.value) for drafter in able if drafter is not chosen)
    return rest if chosen or runs_ahead else (*rest, (Lane.PIPELINED.value, Refusal.SPECULATION.value))


def entry_pin_tokens(engine: EngineState) -> int:
    """Answer tokens that must speculate; none where verify and plain rows agree bitwise, since an answer then cannot
    depend on which of them opened it."""
    levers = engine.ctx.levers
    agrees = engine.ctx.device.facts.row_invariant and levers.flag("row_invariant")
    return 0 if agrees else levers.int("spec_entry_pin_tokens")


def _record_decision(engine: EngineState, outcome: Outcome, explain: Callable[..., Entry], *pinned: Pin | None) -> None:
    """Append what explains the step, before what it delivered is taken in; one in so many is timed."""
    if outcome.step % SAMPLE_EVERY:
        engine.record(explain(outcome.step, outcome.ended, *pinned))
        return
    clock = engine.ctx.clock
    started = clock.now_ns()
    engine.record(explain(outcome.step, outcome.ended, *pinned))
    engine.ctx.telemetry.note_cost((clock.now_ns() - started) * SAMPLE_EVERY)
