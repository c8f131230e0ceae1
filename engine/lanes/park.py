"""Making room in the KV pool: whose blocks are taken, where they go, and how their owner comes back.

A parked sequence keeps everything but its KV, so it goes on exactly as if nothing had happened: same next
token, draws (which depend on seed and position only), grammar, thinking and tool state, and nothing is sent twice.
"""

from __future__ import annotations

from engine.core.device import DeviceError
from engine.core.sequence import Sequence, Status
from engine.core.state import EngineState
from engine.lanes.admission import RESUME_HEADROOM, fits, seat, seats_free
from engine.lanes.finish import remember_prefix
from engine.lanes.trace import record_park
from telemetry.names import Lane

PROTECTED_TOKENS = 64
"""A sequence is not parked again within so many tokens of its last resume, unless all are."""


def make_room(engine: EngineState, seq: Sequence, length: int) -> bool:
    """Give `seq` blocks for `length` tokens, parking others if need be; False when `seq` itself was parked."""
    need = engine.pool.blocks_for(length) - len(seq.blocks)
    while need > 0 and not engine.pool.can_allocate(need):
        victim = choose_victim(engine, seq)
        park(engine, victim)
        if victim is seq:
            return False
    if need > 0:
        seq.blocks.extend(engine.pool.allocate(need))
    return True


def reserve(engine: EngineState, seq: Sequence, length: int) -> None:
    """Give `seq` blocks for `length` tokens where the pool has them: nobody is parked for drafts."""
    need = engine.pool.blocks_for(length) - len(seq.blocks)
    if need > 0 and engine.pool.can_allocate(need):
        seq.blocks.extend(engine.pool.allocate(need))


def trim(engine: EngineState, seq: Sequence) -> None:
    """Give back the blocks that lie wholly beyond what was fed."""
    keep = engine.pool.blocks_for(seq.seq_len)
    if len(seq.blocks) > keep:
        engine.pool.release(seq.blocks[keep:])
        del seq.blocks[keep:]


def choose_victim(engine: EngineState, seq: Sequence) -> Sequence:
    """Fewest generated tokens, ties to the lower slot; a sequence just resumed only when all are. When nobody
    decodes, the youngest other prompt, and at last the asking sequence itself."""
    active = [other for other in engine.queues.active if not other.is_finished and other.blocks]
    exposed = [s for s in active if len(s.emitted) - s.emitted_at_resume >= PROTECTED_TOKENS]
    if active:
        return min(exposed or active, key=lambda s: (len(s.emitted), s.slot))
    others = [other for other in engine.queues.prefilling if other is not seq and other.blocks]
    return max(others, key=lambda s: s.number) if others else seq


def park(engine: EngineState, seq: Sequence) -> None:
    """Take a sequence's blocks: spill them where there is a store, else prefill again later."""
    started = engine.ctx.clock.now_ns()
    queues = engine.queues
    was_active = seq.status is Status.ACTIVE
    (queues.active if was_active else queues.prefilling).remove(seq)
    trim(engine, seq)
    freed = len(seq.blocks)
    spilled = was_active and _spill(engine, seq)
    remember_prefix(engine, seq)
    engine.pool.release(seq.blocks)
    seq.blocks = []
    seq.slot = -1
    if spilled:
        seq.status = Status.SWAPPED
        queues.swapped.append(seq)
    else:
        _requeue(engine, seq)
    seq.account.preemptions += 1
    record_park(engine, seq, Lane.SWAP if spilled else Lane.PREEMPT, started, freed)


def resume(engine: EngineState) -> None:
    """Bring parked sequences back while they fit: spilled ones first, then the preempted, fewest blocks first."""
    queues = engine.queues
    for seq in sorted(queues.swapped, key=lambda s: s.number):
        if not _may_resume(engine, seq):
            return
        queues.swapped.remove(seq)
        _swap_in(engine, seq)
    for seq in sorted(queues.preempted, key=lambda s: (len(s.feed), s.number)):
        if not _may_resume(engine, seq):
            return
        queues.preempted.remove(seq)
        seq.emitted_at_resume = len(seq.emitted)
        seat(engine, seq)


def _may_resume(engine: EngineState, seq: Sequence) -> bool:
    now = max(len(seq.feed), seq.seq_len) + 1
    return (
        seats_free(engine) > 0
        and engine.pool.can_allocate(engine.pool.blocks_for(now))
        and fits(engine, seq, at_least=RESUME_HEADROOM)
    )


def _requeue(engine: EngineState, seq: Sequence) -> None:
    """Nothing is left of its KV: it will be prefilled again from its own tokens."""
    engine.ctx.device.release(seq.number)
    seq.requeue()
    seq.status = Status.PREEMPTED
    engine.queues.preempted.append(seq)


def _spill(engine: EngineState, seq: Sequence) -> bool:
    """Whether the spill store took the blocks; a store that fails is a store without room."""
    try:
        return engine.ctx.device.spill(seq.number, seq.blocks)
    except DeviceError:
        return False


def _swap_in(engine: EngineState, seq: Sequence) -> None:
    """Restore what was spilled; where that fails the sequence is prefilled again from its own tokens."""
    started = engine.ctx.clock.now_ns()
    seq.blocks = engine.pool.allocate(engine.pool.blocks_for(seq.seq_len))
    seq.remembered = (0, b"")
    try:
        engine.ctx.device.restore(seq.number, seq.blocks)
    except DeviceError:
        engine.pool.release(seq.blocks)
        seq.blocks = []
        _requeue(engine, seq)
        return
    seq.emitted_at_resume = len(seq.emitted)
    seat(engine, seq)
    engine.queues.prefilling.remove(seq)
    seq.status = Status.ACTIVE
    engine.queues.active.append(seq)
    record_park(engine, seq, Lane.SWAP, started, len(seq.blocks))
