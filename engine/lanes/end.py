"""The end of a tick, never skipped: deadlines, the step in flight, retirement, those who come back, the snapshot."""

from __future__ import annotations

from engine.core.state import EngineState
from engine.lanes.finish import finish, retire
from engine.lanes.park import resume
from engine.lanes.pipeline import settle, settle_if_overrun
from engine.protocol.events import Snapshot
from telemetry.names import Finish


def end_tick(engine: EngineState) -> None:
    for seq in engine.queues.overdue(engine.ctx.clock.now_ns()):
        finish(engine, seq, Finish.DEADLINE)
    settle_if_overrun(engine)
    retire(engine)
    if engine.queues.parked:
        settle(engine)
        retire(engine)
        resume(engine)
    publish(engine)


def publish(engine: EngineState) -> None:
    queues, pool = engine.queues, engine.pool
    engine.ctx.outbox.send(
        Snapshot(
            tick=engine.tick,
            waiting=queues.waiting_count,
            prefilling=len(queues.prefilling),
            active=len(queues.active),
            swapped=len(queues.swapped),
            preempted=len(queues.preempted),
            kv_used_blocks=pool.used,
            kv_total_blocks=pool.num_blocks,
            cached_blocks=pool.idle,
            lane=engine.lane,
            refusals=dict(engine.refusals),
        )
    )
