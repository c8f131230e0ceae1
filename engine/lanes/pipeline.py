"""Pipelined decode: step t+1 is launched on the device's own token of step t before the host has read t.

What the host then finds out about t can make rows of t+1 over-run (their sequence ended at t): they are dropped
and the block reserved for them goes back. Output is byte-identical to the plain lane.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.core.device import DeviceError, Segment, Step, StepKind
from engine.core.sequence import Sequence
from engine.core.state import EngineState, Flight
from engine.core.value import StepValue
from engine.lanes.chain import needs_chain, plan_ahead
from engine.lanes.emit import commit
from engine.lanes.run import decode_segment, fail, stalled
from engine.lanes.trace import Timing, Work, record_step
from telemetry.names import Lane, Refusal


def refuses(engine: EngineState) -> Refusal | None:
    """Why this batch cannot run ahead, or None."""
    if not engine.ctx.levers.flag("pipelined_decode"):
        return Refusal.LEVER_OFF
    if not engine.ctx.device.facts.runs_ahead:
        return Refusal.NOT_CHOSEN
    if any(needs_chain(seq) for seq in engine.queues.active):
        return Refusal.HOST_SAMPLING
    return None


class Landed(StepValue, frozen=True):
    """A step that was read: what it cost, and what each sequence got."""

    step: int
    ended: int
    """Clock reading in ns."""
    wall_ns: int
    work: Seq[Work]


def pipelined(engine: EngineState, seqs: list[Sequence]) -> Landed | None:
    """Launch the step after the one in flight, then read that one and emit its tokens. `seqs` have room for one.

    None when the device failed."""
    flight = engine.flight or _launch(engine, [(seq, decode_segment(engine, seq)) for seq in seqs])
    if flight is None:
        return None
    engine.flight = None
    ahead = _launch(engine, _segments_ahead(engine, flight))
    landed = _read(engine, flight)
    engine.flight = ahead
    return landed


def settle(engine: EngineState) -> None:
    """Read the step in flight, if any, so that everything that was fed is also known."""
    flight, engine.flight = engine.flight, None
    if flight is not None:
        _read(engine, flight)


def settle_if_overrun(engine: EngineState) -> None:
    """Settle when a sequence of the step in flight has ended meanwhile."""
    if engine.flight is not None and any(seq.is_finished for seq in engine.flight.seqs):
        settle(engine)


def _segments_ahead(engine: EngineState, flight: Flight) -> list[tuple[Sequence, Segment]]:
    """Rows that follow the flight's; none when a sequence is known to end or the pool has no room to reserve."""
    pool = engine.pool
    going_on = [seq for seq in flight.seqs if not seq.is_finished and seq.owed > 1]
    needs = {seq.number: pool.blocks_for(seq.seq_len + 2) - len(seq.blocks) for seq in going_on}
    if not pool.can_allocate(sum(max(need, 0) for need in needs.values())):
        return []
    ahead = []
    for seq in going_on:
        if needs[seq.number] > 0:
            seq.blocks.extend(pool.allocate(needs[seq.number]))
        segment = Segment(
            seq=seq.number,
            slot=seq.slot,
            start=seq.seq_len + 1,
            tokens=(0,),
            blocks=seq.blocks,
            rows=plan_ahead(seq),
            from_previous=True,
            save_hidden=engine.saves_hidden,
        )
        ahead.append((seq, segment))
    return ahead


def _launch(engine: EngineState, rows: list[tuple[Sequence, Segment]]) -> Flight | None:
    if not rows:
        return None
    seqs = tuple(seq for seq, _ in rows)
    step = Step(engine.next_step(), StepKind.DECODE, tuple(segment for _, segment in rows))
    try:
        engine.ctx.device.launch(step)
    except DeviceError as error:
        fail(engine, seqs, str(error))
        return None
    return Flight(step, seqs, engine.ctx.clock.now_ns())


def _read(engine: EngineState, flight: Flight) -> Landed | None:
    """Collect a flight and emit the tokens of those still there; rows of ended sequences are over-run."""
    started = max(flight.launched_ns, engine.last_read_ns)
    try:
        result = engine.ctx.device.collect()
    except DeviceError as error:
        fail(engine, flight.seqs, str(error))
        return None
    returned = engine.last_read_ns = engine.ctx.clock.now_ns()
    if stalled(engine, flight.seqs, flight.launched_ns):
        return None
    work = [
        Work(seq, commit(engine, seq, sampled, Lane.PIPELINED, flight.step.step_id), len(seq.tokens))
        for seq, sampled in zip(flight.seqs, result.sampled, strict=True)
        if not seq.is_finished
    ]
    engine.pacer.note_decode(returned - started, returned - started)
    timing = Timing(started, started, returned, result.device_us)
    step_id, rows = flight.step.step_id, flight.step.rows
    ended = record_step(engine, Lane.PIPELINED, step_id, timing, work, rows=rows, width=len(work))
    return Landed(step_id, ended, returned - started, work)
