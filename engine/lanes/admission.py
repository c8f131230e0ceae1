"""Who gets a seat: first come, first served, when the pool can hold what everyone seated may still need."""

from __future__ import annotations

from engine.core.sequence import Sequence, Status
from engine.core.state import EngineState

RESUME_HEADROOM = 64
"""Tokens that a parked sequence must find room for before it resumes, so that it does not park at once."""


def admit(engine: EngineState) -> None:
    """Seat waiting requests; nobody overtakes one that was parked."""
    queues = engine.queues
    while queues.waiting_count and not queues.parked and seats_free(engine):
        seq = _next(engine)
        if seq is None or not fits(engine, seq):
            return
        queues.leave_waiting(seq)
        seat(engine, seq)


def seats_free(engine: EngineState) -> int:
    return engine.ctx.max_batch_size - len(engine.queues.prefilling) - len(engine.queues.active)


def seat(engine: EngineState, seq: Sequence) -> None:
    seq.slot = _lowest_free_slot(engine)
    seq.status = Status.PREFILLING
    seq.times.admitted = seq.times.admitted or engine.ctx.clock.now_ns()
    engine.queues.prefilling.append(seq)


def fits(engine: EngineState, seq: Sequence, at_least: int = 0) -> bool:
    """Whether the pool covers every seated sequence and this one: what each holds now and the tokens it may
    still emit, up to the watermark (or `at_least`). Alone, a sequence always fits: liveness."""
    committed = engine.queues.committed
    if not committed:
        return True
    watermark = engine.ctx.levers.int("admit_watermark")
    reserve = max(watermark if watermark > 0 else engine.context_limit, at_least)
    need = sum(_reservation(engine, other, reserve) for other in committed)
    return need + _reservation(engine, seq, reserve) <= engine.pool.num_blocks


def _reservation(engine: EngineState, seq: Sequence, reserve: int) -> int:
    return engine.pool.blocks_for(max(len(seq.feed), seq.seq_len) + min(seq.owed, reserve))


def _next(engine: EngineState) -> Sequence | None:
    """The head of the queue; with `slai` only the first seat is the head's, the others go to short prompts."""
    queues = engine.queues
    head = queues.head()
    if head is None or engine.ctx.levers.text("policy") != "slai" or not queues.prefilling:
        return head
    return min((seq for seq in queues.waiting if not seq.is_finished), key=lambda seq: (seq.unfed, seq.number))


def _lowest_free_slot(engine: EngineState) -> int:
    taken = {seq.slot for seq in engine.queues.committed}
    return next(slot for slot in range(len(taken) + 1) if slot not in taken)
