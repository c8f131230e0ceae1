"""The lever desk: takes changes from every face to the engine, and takes them back when told or when time is up."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from itertools import chain

from engine.levers.changes import Change, ChangeRefusedError, Guard, History, Proposal, RateLimit, Step, judge
from engine.levers.spec import LeverError
from engine.protocol.commands import ChangeLever, Value
from engine.protocol.events import LeverChanged
from engine.protocol.wire import LeverEvent, LeverRefused
from engine.server.broker import Broker, EngineState

ACK_S = 30.0
"""Time that a change may take to reach a tick."""
GUARD_LOOK_S = 0.5
GUARD_WATCH_S = 120.0
GUARD_BEFORE = 2048
"""Steps before a change that its guard compares with."""
_WAITING_BATCHES = 16


@dataclass(frozen=True, slots=True)
class Operator:
    """Who changes a lever and from where."""

    origin: str
    actor: str
    control: bool = True


@dataclass(frozen=True, slots=True)
class Terms:
    """How long a change holds and what takes it back."""

    reason: str = ""
    for_seconds: float = 0.0
    guard: float = 0.0


class Steps:
    """The newest steps, for guards; fed by telemetry."""

    def __init__(self) -> None:
        self._steps: deque[Step] = deque(maxlen=GUARD_BEFORE)
        self._taken = 0
        self._waiting: list[Iterable[Step]] = []

    def add(self, steps: Iterable[Step]) -> None:
        """Steps are made when a guard asks, or a few batches wait: guards are rare and batches come ten a second."""
        self._waiting.append(steps)
        if len(self._waiting) >= _WAITING_BATCHES:
            self._take()

    def _take(self) -> None:
        waiting, self._waiting = self._waiting, []
        for step in chain.from_iterable(waiting):
            self._steps.append(step)
            self._taken += 1

    @property
    def mark(self) -> int:
        self._take()
        return self._taken

    def all(self) -> list[Step]:
        self._take()
        return list(self._steps)

    def since(self, mark: int) -> list[Step]:
        self._take()
        count = min(self._taken - mark, len(self._steps))
        return list(self._steps)[len(self._steps) - count :] if count > 0 else []


class LeverDesk:
    """The only door to the levers of a running engine."""

    def __init__(
        self,
        broker: Broker,
        send: Callable[[ChangeLever], None],
        steps: Steps,
        wall: Callable[[], float] = time.time,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._broker = broker
        self._send = send
        self._steps = steps
        self._wall = wall
        self._now = now
        self._limit = RateLimit()
        self._waiting: dict[str, asyncio.Future[LeverChanged]] = {}
        self._expires: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.history = History()
        self.watchers: list[Callable[[LeverEvent], None]] = []
        broker.watchers.levers.append(self._on_changed)

    async def change(
        self, change_id: str, proposal: Proposal, operator: Operator, terms: Terms
    ) -> LeverEvent | LeverRefused:
        """Make a change and wait until it took effect; the answer is for the one who asked."""
        try:
            self._admit(operator)
            name, value, expected = judge(proposal, self._broker.levers)
            event = await self._apply(change_id, name, value, expected, operator, terms)
        except ChangeRefusedError as error:
            return LeverRefused(change_id=change_id, name=proposal.name, message=str(error), current=error.current)
        except LeverError as error:
            return LeverRefused(change_id=change_id, name=proposal.name, message=str(error))
        return event

    async def undo(self, change_id: str, of: str, operator: Operator) -> LeverEvent | LeverRefused:
        """Put the value before a change back."""
        try:
            change = self.history.undo_of(of, self._broker.levers)
        except ChangeRefusedError as error:
            return LeverRefused(change_id=change_id, name="", message=str(error), current=error.current)
        as_undo = Operator("undo", operator.actor, operator.control)
        terms = Terms(reason=f"undo of {change.change_id}")
        return await self.change(change_id, Proposal(change.name, change.old, change.new), as_undo, terms)

    async def close(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _admit(self, operator: Operator) -> None:
        if not operator.control:
            raise ChangeRefusedError("This connection may read only; connect with the control token to change levers.")
        if self._broker.state is not EngineState.READY:
            raise ChangeRefusedError(
                self._broker.failure or "The model is still loading; levers can be changed when it is ready."
            )
        if not self._limit.take(self._now()):
            raise ChangeRefusedError("Levers change too fast; wait a second and repeat.")

    async def _apply(
        self, change_id: str, name: str, value: Value, expected: Value | None, operator: Operator, terms: Terms
    ) -> LeverEvent:
        """Send a change down and wait for its tick, which refuses it where another came first."""
        key = change_id or uuid.uuid4().hex[:12]
        if key in self._waiting:
            raise ChangeRefusedError(f"A change {key!r} is on its way already.")
        mark, before = self._steps.mark, self._steps.all()
        if terms.for_seconds > 0:
            self._expires[key] = self._wall() + terms.for_seconds
        changed = await self._round_trip(
            ChangeLever(
                change_id=key,
                name=name,
                value=value,
                origin=operator.origin,
                actor=operator.actor,
                reason=terms.reason,
                expected=expected,
            )
        )
        event = self._event(changed)
        if terms.for_seconds > 0:
            self._spawn(self._revert_later(changed, terms.for_seconds))
        if terms.guard > 0:
            self._spawn(self._watch(changed, Guard(terms.guard, before), mark))
        return event

    async def _round_trip(self, command: ChangeLever) -> LeverChanged:
        future: asyncio.Future[LeverChanged] = asyncio.get_running_loop().create_future()
        self._waiting[command.change_id] = future
        try:
            self._send(command)
            changed = await asyncio.wait_for(future, ACK_S)
        except TimeoutError:
            raise ChangeRefusedError(
                f"The engine did not take the change of {command.name} in {ACK_S:.0f} s."
            ) from None
        finally:
            self._waiting.pop(command.change_id, None)
        if changed.error:
            raise ChangeRefusedError(changed.error, self._broker.levers.get(command.name))
        return changed

    def _on_changed(self, changed: LeverChanged) -> None:
        if not changed.error:
            event = self._event(changed)
            self.history.add(
                Change(
                    changed.change_id, changed.name, changed.old, changed.new, changed.tick, event.time,
                    changed.origin, changed.actor, changed.reason,
                )
            )  # fmt: skip
            for watch in tuple(self.watchers):
                watch(event)
        future = self._waiting.get(changed.change_id)
        if future is not None and not future.done():
            future.set_result(changed)

    def _event(self, changed: LeverChanged) -> LeverEvent:
        return LeverEvent(
            change_id=changed.change_id,
            name=changed.name,
            old=changed.old,
            new=changed.new,
            tick=changed.tick,
            time=changed.time_ns / 1e9 if changed.time_ns else self._wall(),
            origin=changed.origin,
            actor=changed.actor,
            reason=changed.reason,
            expires=self._expires.get(changed.change_id, 0.0),
        )

    # -- changes that take themselves back -----------------------------------------------------------------

    async def _revert_later(self, changed: LeverChanged, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self._revert(changed, "ttl", f"{seconds:g} s are over")

    async def _watch(self, changed: LeverChanged, guard: Guard, mark: int) -> None:
        end = self._now() + GUARD_WATCH_S
        while self._now() < end:
            await asyncio.sleep(GUARD_LOOK_S)
            if self._broker.levers.get(changed.name) != changed.new:
                return
            verdict = guard.verdict(self._steps.since(mark))
            if verdict.revert:
                await self._revert(changed, "guard", verdict.sentence)
                return

    async def _revert(self, changed: LeverChanged, origin: str, reason: str) -> None:
        if self._broker.levers.get(changed.name) != changed.new or self._broker.state is not EngineState.READY:
            return
        key = uuid.uuid4().hex[:12]
        try:
            operator = Operator(origin, changed.actor)
            await self._apply(key, changed.name, changed.old, changed.new, operator, Terms(reason=reason))
        except LeverError:
            pass  # somebody else changed it, or the engine left; both are told to everyone already

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
