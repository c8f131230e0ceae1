"""One tick of the engine, top to bottom: plan, prefill, decode, end. Policy lives in the lanes.

plan -> StartPrefills -> ContinuePrefills -> Decode -> end_tick. A lane that says `SKIP_REST` drops the lanes after it;
planning, deadlines, cancellation and retirement are never skipped.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.core.context import Context
from engine.core.state import EngineState, Flow
from engine.lanes.decode import Decode
from engine.lanes.eligibility import HEADS, wanted_drafters
from engine.lanes.end import end_tick
from engine.lanes.plan import plan
from engine.lanes.prefill import continue_prefills, start_prefills

Lane = Callable[[EngineState], Flow]


class Scheduler:
    """Drives one device. All of it runs on the thread that calls `tick`."""

    def __init__(self, ctx: Context) -> None:
        self.engine = EngineState.of(ctx)
        self.lanes: tuple[Lane, ...] = (start_prefills, continue_prefills, Decode())

    def tick(self) -> bool:
        """Do one step of work for everyone; False when there was nothing to do and the caller may sleep."""
        engine = self.engine
        engine.tick += 1
        plan(engine)
        engine.saves_hidden = wanted_drafters(engine) & engine.ctx.device.facts.drafters & HEADS
        for lane in self.lanes:
            if lane(engine) is Flow.SKIP_REST:
                break
        end_tick(engine)
        return not engine.queues.is_idle
