"""The start of a tick: take what has arrived, change levers here and only here, admit."""

from __future__ import annotations

from collections import Counter

from engine.core.device import RowPlan
from engine.core.reply import ReplyText
from engine.core.sequence import Sequence, Times
from engine.core.state import EngineState
from engine.core.token_state import TokenState
from engine.lanes.admission import admit
from engine.lanes.finish import finish
from engine.lanes.pipeline import settle
from engine.levers.resolve import find
from engine.levers.spec import LeverError
from engine.protocol.commands import Cancel, ChangeLever, Command, Shutdown, Submit
from engine.protocol.events import Accepted, Finished, LeverChanged, Usage
from telemetry.names import Finish
from telemetry.record import LeverRecord


def plan(engine: EngineState) -> None:
    commands = engine.ctx.inbox.drain()
    if commands:
        settle(engine)
        for command in commands:
            _take(engine, command)
    admit(engine)


def _take(engine: EngineState, command: Command) -> None:
    match command:
        case Submit():
            _submit(engine, command)
        case Cancel():
            _cancel(engine, command)
        case ChangeLever():
            change_lever(engine, command)
        case Shutdown():
            for seq in list(engine.queues.by_id.values()):
                finish(engine, seq, Finish.SHUTDOWN, "The engine was shut down before this reply was complete.")


def _submit(engine: EngineState, request: Submit) -> None:
    refusal = _refusal(engine, request)
    if refusal:
        engine.ctx.outbox.send(
            Finished(request_id=request.request_id, reason=Finish.REFUSED, usage=Usage(), error=refusal)
        )
        return
    try:
        seq = _sequence(engine, request)
    except ValueError as error:
        engine.ctx.outbox.send(
            Finished(request_id=request.request_id, reason=Finish.REFUSED, usage=Usage(), error=str(error))
        )
        return
    deadline_ms = request.limits.deadline_ms
    engine.queues.enter(seq, seq.times.arrived + deadline_ms * 1_000_000 if deadline_ms else 0)
    engine.ctx.outbox.send(Accepted(request_id=request.request_id))


def _refusal(engine: EngineState, request: Submit) -> str:
    """Why a request can never run, or an empty string."""
    length, vocab = len(request.prompt), engine.ctx.device.facts.vocab_size
    if request.request_id in engine.queues.by_id:
        return f"A request with the id {request.request_id!r} is already running; use another id."
    if not length:
        return "The prompt is empty; send at least one token."
    if length >= engine.context_limit:
        return (
            f"The prompt has {length} tokens and the context holds {engine.context_limit}, "
            "one of which the reply needs; shorten the prompt."
        )
    if not all(0 <= token < vocab for token in request.prompt):
        return f"The prompt holds a token outside the vocabulary of {vocab} ids."
    if request.switches.grammar and engine.ctx.grammars is None:
        return "This engine has no grammar library; install metrale[grammar] to use response formats."
    return ""


def _sequence(engine: EngineState, request: Submit) -> Sequence:
    ctx, sampling, limits = engine.ctx, request.sampling, request.limits
    greedy = ctx.levers.flag("force_temp_zero")
    room = engine.context_limit - len(request.prompt)
    penalised = sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty
    grammar = ctx.grammars(request.switches.grammar) if ctx.grammars and request.switches.grammar else None
    state = TokenState(
        markers=engine.markers,
        budget=ctx.levers.int("think_budget"),
        counts=Counter() if penalised else None,
        grammar=grammar,
        thinking=request.switches.thinking_open,
    )
    engine.sequences += 1
    return Sequence(
        number=engine.sequences,
        request=request,
        feed=request.prompt,
        max_tokens=min(limits.max_tokens or room, room),
        seed=sampling.seed if sampling.seed is not None else ctx.draw_seed(),
        state=state,
        text=ReplyText(limits.stop),
        times=Times(ctx.clock.now_ns()),
        greedy=greedy,
        sharpen=ctx.levers.flag("adaptive_sampling"),
        base_plan=RowPlan(
            temperature=0.0 if greedy else sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            top_logprobs=sampling.logprobs,
        ),
    )


def _cancel(engine: EngineState, command: Cancel) -> None:
    seq = engine.queues.by_id.get(command.request_id)
    if seq is not None:
        finish(engine, seq, Finish.CANCELLED)


def change_lever(engine: EngineState, change: ChangeLever) -> None:
    """Apply one change at this tick boundary, or refuse it; either way it is recorded before it is told."""
    ctx = engine.ctx
    error = ""
    try:
        lever = find(change.name)
        old, new = ctx.levers.get(lever.name), lever.parse(change.value)
        if change.expected is not None and change.expected != old:
            error = f"{lever.name} is {lever.show(old)} by now, not {lever.show(change.expected)}; look again."
        elif ctx.levers.flag("read_only"):
            error = "This engine was started read-only; no lever can be changed."
        elif lever.applies == "restart":
            error = f"{lever.name} takes effect at a restart only; start with {lever.flag} {lever.show(new)}."
        else:
            ctx.levers.apply(lever.name, new)
    except LeverError as refusal:
        old, new, error = change.value, change.value, str(refusal)
    ctx.telemetry.append(
        LeverRecord(
            change.change_id,
            ctx.clock.now_ns(),
            engine.tick,
            change.name,
            old,
            new,
            change.origin,
            change.actor,
            change.reason,
            error,
        )
    )
    ctx.outbox.send(
        LeverChanged(
            change_id=change.change_id,
            name=change.name,
            old=old,
            new=new,
            tick=engine.tick,
            origin=change.origin,
            actor=change.actor,
            reason=change.reason,
            error=error,
            time_ns=ctx.unix_ns(),
        )
    )
