"""Running a step: segments from sequences, and what a failing device means for those in it."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.core.device import DeviceError, RowPlan, Segment, Step, StepKind, StepResult
from engine.core.sequence import Sequence
from engine.core.state import EngineState
from engine.lanes.chain import plan_rows
from engine.lanes.finish import finish
from telemetry.names import Finish

STALL_NS = 120 * 10**9
"""A step that took longer ends its requests as `stalled`."""


def decode_segment(engine: EngineState, seq: Sequence, drafts: Seq[int] = ()) -> Segment:
    """The rows that feed the last token and `drafts` of an active sequence."""
    newest = seq.last_token
    if newest is None:
        raise DeviceError(f"Sequence {seq.number} has no token to feed; this is a defect of the scheduler.")
    return Segment(
        seq=seq.number,
        slot=seq.slot,
        start=seq.seq_len,
        tokens=(newest, *drafts),
        blocks=seq.blocks,
        rows=plan_rows(seq, engine.ctx.vocabulary, drafts),
        save_hidden=engine.saves_hidden,
    )


def prompt_segment(engine: EngineState, seq: Sequence, count: int) -> Segment:
    """The next `count` tokens of a prompt; its last row is sampled when the prompt ends and nothing was emitted."""
    start = seq.seq_len
    samples = count == seq.unfed and seq.last_token is None
    rows: tuple[RowPlan, ...] = plan_rows(seq, engine.ctx.vocabulary) if samples else ()
    return Segment(
        seq=seq.number,
        slot=seq.slot,
        start=start,
        tokens=seq.feed[start : start + count],
        blocks=seq.blocks,
        rows=rows,
        save_hidden=engine.saves_hidden,
    )


def run(
    engine: EngineState, step: int, kind: StepKind, segments: Seq[Segment], seqs: Seq[Sequence]
) -> StepResult | None:
    """Run a step and wait; None when the device failed, and then every sequence in it has ended with the error."""
    started = engine.ctx.clock.now_ns()
    try:
        result = engine.ctx.device.forward(Step(step, kind, tuple(segments)))
    except DeviceError as error:
        fail(engine, seqs, str(error))
        return None
    return None if stalled(engine, seqs, started) else result


def fail(engine: EngineState, seqs: Seq[Sequence], error: str) -> None:
    for seq in seqs:
        finish(engine, seq, Finish.ERROR, error)


def stalled(engine: EngineState, seqs: Seq[Sequence], started_ns: int) -> bool:
    """End the step's requests when the device took longer than any step may."""
    seconds = (engine.ctx.clock.now_ns() - started_ns) // 10**9
    if seconds * 10**9 < STALL_NS:
        return False
    for seq in seqs:
        finish(engine, seq, Finish.STALLED, f"A step took {seconds} s; the device is stalled.")
    return True
