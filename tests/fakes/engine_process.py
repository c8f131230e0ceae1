"""A real engine process without a model: `python -m tests.fakes.engine_process MODE --socket PATH`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from engine.core.clock import Clock
from engine.core.context import Context
from engine.levers.resolve import LeverState
from engine.protocol.events import Facts
from engine.runtime.loop import WakingInbox
from engine.runtime.outbox import BatchOutbox
from engine.runtime.process import Built, Progress, run
from engine.scheduler import Scheduler
from telemetry.record import RunRecord
from telemetry.ring import Ring
from tests.fakes.scripted_device import ScriptedDevice, vocabulary

STEP_S = 0.002


class PacedDevice(ScriptedDevice):
    """Takes real time, so that a reply lasts long enough to be watched; `fails` raises what no lane expects."""

    fails = False

    def forward(self, step):  # type: ignore[no-untyped-def]
        time.sleep(STEP_S)
        if self.fails:
            raise RuntimeError("the scripted device fell over")
        return super().forward(step)


class Build:
    """Loads in three steps; `mode` says what goes wrong."""

    def __init__(self, mode: str) -> None:
        self._mode = mode

    def __call__(self, inbox: WakingInbox, outbox: BatchOutbox, ring: Ring, clock: Clock, progress: Progress) -> Built:
        for part in range(3):
            progress(part + 1, 3, "weights")
        if self._mode == "bad-model":
            raise ValueError("The model file is truncated at byte 17.")
        if self._mode == "slow-load":
            time.sleep(60)
        device = PacedDevice(num_blocks=4096, max_context=8192)
        device.fails = self._mode == "fails"
        levers = LeverState.of(drafter="off", pipelined_decode="off", trace_level=2)
        context = Context(device, clock, levers, inbox, outbox, vocabulary(), ring, unix_ns=time.time_ns)
        facts = Facts(
            run_id="run-scripted", model="scripted", device="scripted", dtype="none", vocab_size=64,
            max_context=8192, kv_tokens=16384, block_size=4, max_batch_size=8, drafters=(),
        )  # fmt: skip
        ring.append(RunRecord("run-scripted", clock.now_ns(), time.time_ns(), "scripted", "scripted", "none", {}, {}))
        return Built(context, Scheduler(context), facts)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    sys.exit(run(Path(sys.argv[3]), Build(sys.argv[1])))
