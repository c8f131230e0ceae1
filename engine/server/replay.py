"""Plays a recorded run to one session: pause, speed and seeking; the frames are those of a live run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from engine.protocol import wire
from engine.protocol.commands import Value
from engine.server.ports import QueryRefusedError
from engine.server.stats import gate_of, state_of, stats_of
from telemetry.hub import Hub

PERIOD_S = 0.25
SPEEDS = (0.1, 100.0)


class Recorded(Protocol):
    """A recorded run that moves when it is told to; calls may block and come from worker threads, one at a time."""

    run_id: str
    hub: Hub
    position_s: float
    duration_s: float

    @property
    def levers(self) -> Mapping[str, Value]:
        """Values at the position."""
        ...

    def seek(self, position_s: float) -> None: ...

    def advance(self, seconds: float) -> bool:
        """False at the end of the run."""
        ...


class Player:
    """One replay; lives on the event loop, reads on worker threads.

    `levers` are the values that the session shows when the replay begins.
    """

    def __init__(
        self,
        recorded: Recorded,
        out: Callable[[wire.ServerMessage], None],
        levers: Mapping[str, Value],
        speed: float = 1.0,
    ) -> None:
        self._recorded = recorded
        self._out = out
        self._levers = dict(levers)
        self._speed = _checked(speed)
        self._paused = False
        self._reading = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._subscription = recorded.hub.subscribe()

    def start(self) -> None:
        self._task = asyncio.create_task(self._play())

    def stop(self) -> None:
        if self._task:
            self._task.cancel()

    def show_levers(self, values: Mapping[str, Value]) -> None:
        """Tell the session of every lever that it shows with another value; levers unknown to it are left out."""
        for name, shown in self._levers.items():
            value = values.get(name, shown)
            if value != shown:
                self._levers[name] = value
                self._out(_recorded_change(self._recorded.hub, name, value) or self._difference(name, shown, value))

    def _difference(self, name: str, shown: Value, value: Value) -> wire.LeverEvent:
        now = self._recorded.hub.now_s
        return wire.LeverEvent(
            change_id=f"replay-{name}", name=name, old=shown, new=value, tick=0, time=now, origin="replay"
        )

    async def seek(self, position: float) -> None:
        async with self._reading:
            await asyncio.to_thread(self._recorded.seek, max(0.0, position))
            self._subscription = self._recorded.hub.subscribe()
        self._show()

    async def steer(self, message: wire.Replay) -> None:
        """Pause, go on or jump. Raises `QueryRefusedError` for an action that there is not."""
        self._speed = _checked(message.speed)
        match message.action:
            case "pause":
                self._paused = True
            case "resume":
                self._paused = False
            case "seek":
                await self.seek(message.position)
            case _:
                raise QueryRefusedError("A replay can start, pause, resume, seek and stop.")

    async def _play(self) -> None:
        clock = asyncio.get_running_loop().time
        last, more = clock(), True
        while True:
            await asyncio.sleep(PERIOD_S)
            passed, last = clock() - last, clock()
            if self._paused or not (more or self._recorded.position_s < self._recorded.duration_s):
                continue
            async with self._reading:
                more = await asyncio.to_thread(self._recorded.advance, passed * self._speed)
            self._show()

    def _show(self) -> None:
        recorded, hub = self._recorded, self._recorded.hub
        window = self._subscription.read()
        block = hub.run.block_size if hub.run else 0
        self._out(
            stats_of(window, state_of(window, hub), block_size=block, run=recorded.run_id, position=recorded.position_s)
        )
        if gate := gate_of(hub):
            self._out(gate)
        self.show_levers(recorded.levers)


def _recorded_change(hub: Hub, name: str, value: Value) -> wire.LeverEvent | None:
    """The change that gave the lever this value, where the replay came by it just now."""
    last = next((change for change in reversed(hub.levers) if change.name == name and not change.error), None)
    if last is None or last.new != value:
        return None
    return wire.LeverEvent(
        change_id=last.change_id, name=name, old=last.old, new=last.new, tick=last.tick, time=hub.unix_s(last.time_ns),
        origin=last.origin, actor=last.actor, reason=last.reason,
    )  # fmt: skip


def _checked(speed: float) -> float:
    if not SPEEDS[0] <= speed <= SPEEDS[1]:
        raise QueryRefusedError(f"A replay runs at {SPEEDS[0]:g} to {SPEEDS[1]:g} times the speed, not {speed:g}.")
    return speed
