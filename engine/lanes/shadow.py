"""`shadow_check`: a share of verify steps is run again row by row and compared, as evidence of losslessness."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from msgspec.structs import replace

from engine.core.device import Segment, Step, StepKind, StepResult
from engine.core.state import EngineState
from telemetry.record import ShadowRecord


class Shadow:
    """Checks every n-th verify step so that the share comes out; no randomness is needed."""

    def __init__(self) -> None:
        self._due = 0.0

    def check(self, engine: EngineState, step: int, segments: Seq[Segment], result: StepResult) -> int:
        """Re-run each row of `segments` alone (it rewrites the same KV) and record how many tokens differ.

        Returns the ns that it took, which nobody but the observer pays for. Raises `DeviceError`."""
        share = engine.ctx.levers.float("shadow_check")
        self._due += share
        if not share or self._due < 1:
            return 0
        self._due -= 1
        started = engine.ctx.clock.now_ns()
        rows = differing = 0
        for segment, sampled in zip(segments, result.sampled, strict=True):
            for at, choice in enumerate(sampled):
                alone = replace(
                    segment,
                    start=segment.start + at,
                    tokens=segment.tokens[at : at + 1],
                    rows=segment.rows[at : at + 1],
                    save_hidden=frozenset(),
                )
                again = engine.ctx.device.forward(Step(step, StepKind.DECODE, (alone,)))
                rows += 1
                differing += again.sampled[0][0].token != choice.token
        ended = engine.ctx.clock.now_ns()
        engine.ctx.telemetry.append(ShadowRecord(step, ended, rows, differing))
        return ended - started
