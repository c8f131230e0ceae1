"""What a step leaves behind: one record with its width, its tokens, and why it was not another lane."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.core.blocks import BlockPool
from engine.core.sequence import Sequence
from engine.core.state import EngineState
from engine.core.value import StepValue
from engine.lanes.emit import Committed
from telemetry.record import SeqShare, StepRecord

STEP_LEVEL = 2
SAMPLE_EVERY = 61
"""One step in this many is timed, to tell what recording costs. A prime, so that nothing regular is always missed."""


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
    depth: int
    """Tokens that were fed of the sequence, after the step."""
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
    """Append what becomes the record of one lane step; returns the clock at its end in ns, observation left out.

    `work` must not change any more."""
    ctx = engine.ctx
    ended = ctx.clock.now_ns() - timing.observed_ns
    if decoded:
        engine.lane = lane
    if ctx.levers.trace_level < STEP_LEVEL:
        return ended
    pool = engine.pool
    engine.record((
        step_record, step, engine.tick, lane, timing, ended, work, width, rows, k, k_reason,
        engine.refusals if decoded else (), pool, pool.used, cached_tokens,
    ))  # fmt: skip
    if not step % SAMPLE_EVERY:
        ctx.telemetry.note_cost((ctx.clock.now_ns() - timing.observed_ns - ended) * SAMPLE_EVERY)
    return ended


def step_record(
    step: int, tick: int, lane: str, timing: Timing, ended: int, work: Seq[Work], width: int, rows: int, k: int,
    k_reason: str, refusals: tuple[tuple[str, str], ...], pool: BlockPool, kv_used: int, cached_tokens: int,
) -> StepRecord:  # fmt: skip
    """The record of what the tick thread kept of a step; called when the ring is drained."""
    drafted = accepted = emitted = prefilled = depth = 0
    shares = []
    for part in work:
        committed = part.committed
        drafted += committed.drafted
        accepted += committed.accepted
        emitted += committed.emitted
        prefilled += part.prefill_tokens
        depth = max(depth, part.depth)
        shares.append(committed.share(part.seq, part.prefill_tokens))
    drafted_at = _at_position([part.committed.drafted for part in work]) if drafted else ()
    accepted_at = _at_position([part.committed.accepted for part in work]) if accepted else ()
    draft_us = (timing.drafted - timing.started) // 1000
    device_us = timing.device_us or (timing.returned - timing.drafted) // 1000
    commit_us = (ended - timing.returned) // 1000
    return StepRecord(
        step, tick, lane, timing.started, ended, width, rows, prefilled, drafted, accepted, emitted - accepted,
        emitted, drafted_at, accepted_at, k, k_reason, refusals, kv_used, pool.num_blocks, depth, draft_us, device_us,
        commit_us, cached_tokens, tuple(shares),
    )  # fmt: skip


def record_park(engine: EngineState, seq: Sequence, lane: str, started: int, blocks: int) -> None:
    """A sequence was spilled, brought back or preempted; `blocks` moved or were freed."""
    if engine.ctx.levers.trace_level < STEP_LEVEL:
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
