"""Which drafters may run on this batch, and the reason for each that may not (scheduler.md, 3 and 3.1)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import cache

from engine.core.device import DrafterName
from engine.core.sequence import Sequence
from engine.core.state import EngineState
from engine.drafters.ladder import is_past_resume_guard
from telemetry.names import Lane, Refusal

LANE_OF = {
    DrafterName.NGRAM: Lane.NGRAM,
    DrafterName.SELF: Lane.SELF_SPEC,
    DrafterName.MTP: Lane.MTP,
    DrafterName.DFLASH: Lane.DFLASH,
}
HEADS = frozenset({DrafterName.MTP, DrafterName.DFLASH})
"""Drafters that need hidden rows of the target and may draft for several sequences at once."""


def wanted_drafters(engine: EngineState) -> frozenset[DrafterName]:
    """The drafters that the levers ask for, loaded or not; empty when speculation is off."""
    levers, facts = engine.ctx.levers, engine.ctx.device.facts
    if levers.text("mtp_gate") == "off":
        return frozenset()
    return _named(levers.text("drafter"), facts.drafters, facts.named_only)


@cache
def _named(lever: str, loaded: frozenset[DrafterName], named_only: frozenset[DrafterName]) -> frozenset[DrafterName]:
    match lever:
        case "off":
            return frozenset()
        case "auto":
            return loaded - named_only | {DrafterName.NGRAM}
        case "combined":
            return frozenset({DrafterName.NGRAM, DrafterName.MTP})
        case _:
            return frozenset({DrafterName(lever)})


def refusal(
    engine: EngineState, drafter: DrafterName, seqs: Seq[Sequence], wanted: frozenset[DrafterName]
) -> Refusal | None:
    """Why `drafter` may not run on `seqs`, or None when it may. `wanted` is what the levers ask for."""
    if drafter not in wanted:
        is_left_out = engine.ctx.levers.text("drafter") == "auto" and drafter in engine.ctx.device.facts.named_only
        return Refusal.NOT_CHOSEN if is_left_out else Refusal.LEVER_OFF
    if drafter is not DrafterName.NGRAM and drafter not in engine.ctx.device.facts.drafters:
        return Refusal.NO_DRAFTER
    widest = engine.ctx.levers.int("mtp_max_seqs") if drafter in HEADS else 1
    if len(seqs) > widest:
        return Refusal.WIDTH
    if any(seq.slot >= engine.ctx.spec_slot_cap for seq in seqs):
        return Refusal.SLOT
    if drafter not in HEADS and seqs[0].state.grammar is not None:
        return Refusal.GRAMMAR
    reasons = (_ineligible(engine, seq, drafter) for seq in seqs)
    return next((reason for reason in reasons if reason is not None), None)


def _ineligible(engine: EngineState, seq: Sequence, drafter: DrafterName) -> Refusal | None:
    """`spec_dispatch_eligible` of one sequence."""
    levers, switches, state = engine.ctx.levers, seq.request.switches, seq.state
    if not switches.speculate:
        return Refusal.DISABLED_BY_REQUEST
    if drafter not in HEADS:
        return None
    if switches.suppress_tools and state.markers.tool_open is not None:
        return Refusal.DISABLED_BY_REQUEST
    if state.thinking and not levers.flag("dflash_spec_think"):
        return Refusal.THINKING
    guard = levers.int("dflash_resume_guard")
    open_ = is_past_resume_guard(state.emitted, state.post_think, is_thinking=state.thinking, guard=guard)
    return None if open_ else Refusal.RESUME_GUARD
