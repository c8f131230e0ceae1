"""Which drafter feeds this step, or none: the levers, the table of the contract, and the measured gate."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.core.device import DrafterName
from engine.core.sequence import Sequence
from engine.core.state import EngineState
from engine.drafters.gate import Arm, Decision, Gate, GateSettings, Pin, PinFacts, pin
from engine.lanes.draft import Drafting
from engine.lanes.eligibility import LANE_OF, refusal, wanted_drafters
from engine.lanes.emit import Committed
from telemetry.names import Lane, Refusal
from telemetry.record import RungRecord

ORDER = (DrafterName.NGRAM, DrafterName.SELF, DrafterName.MTP, DrafterName.DFLASH)


@dataclass(frozen=True, slots=True)
class Choice:
    """What the next decode step does."""

    drafter: DrafterName | None
    most: int = 0
    """Drafts at most."""
    refusals: tuple[tuple[str, str], ...] = ()
    may_run_ahead: bool = False
    """No speculation is configured for this batch."""
    gated: DrafterName | None = None
    """The drafter whose gate decided, also when it said no."""
    pinned: Pin | None = None


class Router:
    """The gates of the drafters, one each, and the width decision."""

    def __init__(self, drafting: Drafting) -> None:
        self._drafting = drafting
        self._gates: dict[DrafterName, Gate] = {}
        self._speculates_width: bool | None = None

    def choose(self, engine: EngineState, seqs: Seq[Sequence]) -> Choice:
        wanted = wanted_drafters(engine)
        reasons = {drafter: refusal(engine, drafter, seqs) for drafter in ORDER}
        refusals = tuple((LANE_OF[drafter].value, reason.value) for drafter, reason in reasons.items() if reason)
        if not wanted:
            return Choice(None, refusals=refusals, may_run_ahead=True)
        self._note_rung(engine, len(seqs))
        able = [drafter for drafter in ORDER if reasons[drafter] is None]
        if not able:
            return Choice(None, refusals=(*refusals, (Lane.PIPELINED, Refusal.SPECULATION)))
        return self._ask_gate(engine, able[0], seqs, refusals)

    def record(
        self, engine: EngineState, choice: Choice, step: int, wall_ns: int, emitted: int, work: Seq[Committed]
    ) -> None:
        """Tell the gate that decided what its arm delivered, and record the decision."""
        if choice.gated is None:
            return
        gate = self._gates[choice.gated]
        if engine.ctx.levers.int("trace_level") >= 2:
            explanation = gate.explain(choice.pinned)
            engine.ctx.telemetry.append(explanation.record(step, engine.ctx.clock.now_ns()))
        if choice.pinned is not None:
            return
        if choice.drafter is None:
            gate.record_decode(wall_ns, len(work))
        else:
            gate.record_verify_step(wall_ns, emitted, len(work))

    def _ask_gate(
        self, engine: EngineState, drafter: DrafterName, seqs: Seq[Sequence], refusals: tuple[tuple[str, str], ...]
    ) -> Choice:
        levers, width = engine.ctx.levers, len(seqs)
        gate = self._gates.setdefault(drafter, Gate(GateSettings.of(levers)))
        gate.settings = GateSettings.of(levers)
        depth = max(seq.seq_len for seq in seqs)
        gate.maybe_remeasure(depth, width)
        gate.note_depth(depth)
        pinned = pin(
            PinFacts(
                gate=levers.text("mtp_gate"),
                drafter=drafter,
                width=width,
                least_answer_tokens=min(seq.state.post_think for seq in seqs),
                entry_pin_tokens=levers.int("spec_entry_pin_tokens"),
                dflash_pin_c2=levers.flag("dflash_gate_pin_c2"),
            )
        )
        arm = pinned.arm if pinned else gate.next_step()
        if gate.take_fresh_decision() is Decision.DISABLE_MTP:
            engine.ctx.device.sync_secondary()
        if arm is Arm.PLAIN:
            refusals = (*refusals, (LANE_OF[drafter], Refusal.GATE), (Lane.PIPELINED, Refusal.SPECULATION))
            return Choice(None, refusals=refusals, gated=drafter, pinned=pinned)
        return Choice(drafter, levers.int("num_drafts"), refusals, gated=drafter, pinned=pinned)

    def _note_rung(self, engine: EngineState, width: int) -> None:
        """Record each flip of the width decision."""
        most = engine.ctx.levers.int("mtp_max_seqs")
        speculates = width <= most
        if self._speculates_width not in (None, speculates):
            engine.ctx.telemetry.append(RungRecord(engine.ctx.clock.now_ns(), engine.tick, width, most, speculates))
        self._speculates_width = speculates
