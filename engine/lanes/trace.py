"""What a step leaves behind: one record with its width, its tokens, and why it was not another lane."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.core.sequence import Sequence
from engine.core.state import EngineState
from engine.core.value import StepValue
from engine.lanes.emit import Committed
from telemetry.record import SeqShare, StepRecord

STEP_LEVEL = 2


class Timing(StepValue, frozen=True):
    """Clock readings of one step in ns, and what the device reported."""

    started: int
    drafted: int
    returned: int
    device_us: int = 0
    observed_ns: int = 0
    """Time that `shadow_check` took inside the step; it is not the step's."""


class Work(StepValue, frozen=True):
    """One sequence's part in a step."""

    seq: Sequence
    committed: Committed
    prefill_tokens: int = 0


NOTHING = Committed(0, 0, 0)


def record_step(
    engine: EngineState,
    lane: str,
    step: int,
    timing: Timing,
    work: Seq[Work],
    *,
    rows: int,
    width: int,
    k: int = 0,
    k_reason: str = "",
    cached_tokens: int = 0,
    decoded: bool = True,
) -> int:
    """Append the record of one lane step; returns the clock at its end in ns, observation left out."""
    ended = engine.ctx.clock.now_ns() - timing.observed_ns
    if decoded:
        engine.lane = lane
    if engine.ctx.levers.int("trace_level") < STEP_LEVEL:
        return ended
    drafted = accepted = emitted = prefilled = depth = 0
    shares = []
    for part in work:
        committed, seq = part.committed, part.seq
        drafted += committed.drafted
        accepted += committed.accepted
        emitted += committed.emitted
        prefilled += part.prefill_tokens
        depth = max(depth, len(seq.tokens))
        shares.append(committed.share(seq, part.prefill_tokens))
    drafted_at = _at_position([part.committed.drafted for part in work]) if drafted else ()
    accepted_at = _at_position([part.committed.accepted for part in work]) if accepted else ()
    refusals = engine.refusals if decoded else ()
    draft_us = (timing.drafted - timing.started) // 1000
    device_us = timing.device_us or (timing.returned - timing.drafted) // 1000
    commit_us = (ended - timing.returned) // 1000
    # by position: with names, making the record takes 0.84 us and not 0.09, and four times that between two steps
    engine.ctx.telemetry.append(
        StepRecord(
            step, engine.tick, lane, timing.started, ended, width, rows, prefilled, drafted, accepted,
            emitted - accepted, emitted, drafted_at, accepted_at, k, k_reason, refusals,
            engine.pool.used, engine.pool.num_blocks, depth, draft_us, device_us, commit_us, cached_tokens,
            tuple(shares),
        )
    )  # fmt: skip
    return ended


def record_park(engine: EngineState, seq: Sequence, lane: str, started: int, blocks: int) -> None:
    """A sequence was spilled, brought back or preempted; `blocks` moved or were freed."""
    if engine.ctx.levers.int("trace_level") < STEP_LEVEL:
        return
    engine.ctx.telemetry.append(
        StepRecord(
            step_id=engine.next_step(),
            tick=engine.tick,
            lane=lane,
            start_ns=started,
            end_ns=engine.ctx.clock.now_ns(),
            width=len(engine.queues.active),
            rows=blocks * engine.pool.block_size,
            kv_used=engine.pool.used,
            kv_total=engine.pool.num_blocks,
            depth=seq.seq_len,
            shares=(SeqShare(seq.request_id),),
        )
    )


def _at_position(counts: Seq[int]) -> tuple[int, ...]:
    """How many of `counts` reach position 1, 2, ...; their sum is the sum of `counts`."""
    return tuple(sum(count > at for count in counts) for at in range(max(counts)))
