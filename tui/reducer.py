"""The pure function that moves the state on: a message of the wire or a local event, and when it arrived."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from engine.protocol import wire
from engine.protocol.commands import Value
from tui.conversation import Reply, Turn, abandon
from tui.conversation import fold as fold_reply
from tui.state import (
    Dropped,
    Event,
    Link,
    Loading,
    LogLine,
    Opened,
    Pending,
    Phase,
    QueryRun,
    Refusal,
    Retold,
    Said,
    Sent,
    State,
    Told,
)

HISTORY_FRAMES = 2400
"""Ten minutes of `Stats` at 4 Hz."""
EVENT_LIMIT = 500
LOG_LIMIT = 2000
QUERY_LIMIT = 200


def reduce(state: State, event: Event, now: float) -> State:
    """The state after `event`, which arrived at `now`."""
    return _HANDLERS[type(event)](state, event, now)


# ---- connection and loading ----------------------------------------------------------------------------------


def _welcome(state: State, event: wire.Welcome, now: float) -> State:
    again = bool(state.session)
    if again and event.session != state.session:
        state = _lost(state)
    state = replace(
        state,
        link=replace(state.link, phase=Phase.OPEN, since=now, reason=""),
        loading=Loading(state=event.state),
        session=event.session,
        role=event.role,
        facts=event.facts or state.facts,
        levers={lever.name: lever for lever in event.levers} or state.levers,
        pending={},
        refusals={},
    )
    return _logged(state, now, "info", "Connected again." if again else f"Connected as {event.role}.")


def _lost(state: State) -> State:
    """The server does not know this session any more, nor the reply that ran in it."""
    conversation = abandon(state.conversation, "The reply was lost with its connection; ask again.")
    return replace(state, conversation=conversation)


def _refused(state: State, event: wire.Refused, now: float) -> State:
    link = replace(state.link, phase=Phase.REFUSED, since=now, reason=event.message)
    return _logged(replace(state, link=link), now, "error", event.message)


def _dropped(state: State, event: Dropped, now: float) -> State:
    if state.link.phase is Phase.REFUSED:
        return state
    if state.link.phase is not Phase.OPEN and not event.final:
        return replace(state, link=replace(state.link, reason=event.reason))
    phase = Phase.REFUSED if event.final else Phase.DOWN
    link = Link(phase, now, event.reason, state.link.drops + 1)
    return _logged(replace(state, link=link, pending={}), now, "error", event.reason)


def _load(state: State, event: wire.Load, now: float) -> State:
    loading = Loading(event.state, event.stage, event.done, event.total, event.unit, event.message)
    state = replace(state, loading=loading, facts=event.facts or state.facts)
    if event.state == "failed":
        return _logged(state, now, "error", event.message or "The model could not be loaded.")
    return state


# ---- levers --------------------------------------------------------------------------------------------------


def _sent(state: State, event: Sent, now: float) -> State:
    match event.message:
        case wire.SetLever(change_id=change_id, name=name, value=value):
            pending = {**state.pending, name: Pending(change_id, name, value, now)}
            return replace(state, pending=pending, refusals=_without(state.refusals, name))
        case wire.UndoLever(change_id=change_id, of=of):
            name = next((past.name for past in reversed(state.changes) if not of or past.change_id == of), "")
            if not name:
                return state
            return replace(state, pending={**state.pending, name: Pending(change_id, name, None, now)})
        case wire.Query(query_id=query_id, sql=sql):
            kept = {name: run for name, run in list(state.queries.items())[-QUERY_LIMIT + 1 :] if name != query_id}
            return replace(state, queries={**kept, query_id: QueryRun(query_id, sql, now)})
        case wire.Stop(request_id=request_id):
            return _folded(state, event.message, request_id, now)
        case _:
            return state


def _lever_event(state: State, event: wire.LeverEvent, now: float) -> State:
    view = state.levers.get(event.name)
    levers = state.levers
    if view is not None:
        levers = {**levers, event.name: _with_value(view, event.new, "operator")}
    line = f"{event.name}: {event.old} -> {event.new} ({event.origin}, tick {event.tick})" + (
        f", {event.reason}" if event.reason else ""
    )
    return _logged(
        replace(
            state,
            levers=levers,
            pending=_without(state.pending, event.name),
            refusals=_without(state.refusals, event.name),
            changes=(*state.changes, event)[-EVENT_LIMIT:],
        ),
        event.time,
        "info",
        line,
    )


def _lever_refused(state: State, event: wire.LeverRefused, now: float) -> State:
    name = event.name or next((p.name for p in state.pending.values() if p.change_id == event.change_id), "")
    view = state.levers.get(name)
    levers = state.levers
    if view is not None and event.current is not None:
        levers = {**levers, name: _with_value(view, event.current, view.source)}
    refused = {**state.refusals, name: Refusal(event.message, now)}
    pending = _without(state.pending, name)
    return _logged(replace(state, levers=levers, refusals=refused, pending=pending), now, "warning", event.message)


def _with_value(view: wire.LeverView, value: Value, source: str) -> wire.LeverView:
    fields = {name: getattr(view, name) for name in view.__struct_fields__}
    return wire.LeverView(**(fields | {"value": value, "source": source}))


def _without(mapping: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return {key: value for key, value in mapping.items() if key != name}


# ---- what is measured ----------------------------------------------------------------------------------------


def _stats(state: State, event: wire.Stats, now: float) -> State:
    kept = state.stats
    if kept and (event.replay_run != kept[-1].replay_run or event.time < kept[-1].time):
        kept = ()
    return replace(
        state,
        stats=(*kept[-HISTORY_FRAMES + 1 :], event),
        stats_at=now,
        since=state.since or now,
        skipped=state.skipped + event.skipped,
    )


def _gate(state: State, event: wire.GateView, now: float) -> State:
    decisions = state.decisions
    if not decisions or (decisions[-1].arm, decisions[-1].reason) != (event.arm, event.reason):
        decisions = (*decisions, event)[-EVENT_LIMIT:]
    return replace(state, gate=event, gate_at=now, decisions=decisions)


def _requests(state: State, event: wire.Requests, now: float) -> State:
    return replace(state, requests=event, requests_at=now)


def _query_result(state: State, event: wire.QueryResult, now: float) -> State:
    run = state.queries.get(event.query_id)
    if run is None:
        return state
    return replace(state, queries={**state.queries, event.query_id: replace(run, result=event)})


# ---- the conversation ----------------------------------------------------------------------------------------


def _said(state: State, event: Said, now: float) -> State:
    turns = (*state.conversation.turns, Turn("user", event.text), _awaited(state, event.request_id, now))
    return replace(state, conversation=replace(state.conversation, turns=turns, updated=now))


def _retold(state: State, event: Retold, now: float) -> State:
    turns = state.conversation.turns
    while turns and turns[-1].role == "assistant":
        turns = turns[:-1]
    turns = (*turns, _awaited(state, event.request_id, now))
    return replace(state, conversation=replace(state.conversation, turns=turns, updated=now))


def _awaited(state: State, request_id: str, now: float) -> Turn:
    run = state.facts.run_id if state.facts else ""
    return Turn("assistant", "", Reply(request_id=request_id, run=run, asked=now))


def _opened(state: State, event: Opened, now: float) -> State:
    return replace(state, conversation=event.conversation)


def _reply_message(state: State, event: wire.Queued | wire.Delta | wire.Done, now: float) -> State:
    return _folded(state, event, event.request_id, now)


def _delta(state: State, event: wire.Delta, now: float) -> State:
    if not event.spelled.keys() <= state.spelled.keys():
        state = replace(state, spelled={**state.spelled, **event.spelled})
    return _reply_message(state, event, now)


def _folded(state: State, event: wire.ClientMessage | wire.ServerMessage, request_id: str, now: float) -> State:
    conversation = fold_reply(state.conversation, event, request_id, now, state.gate)
    return state if conversation is state.conversation else replace(state, conversation=conversation)


# ---- log -----------------------------------------------------------------------------------------------------


def _problem(state: State, event: wire.Problem, now: float) -> State:
    if event.request_id:
        state = _folded(state, event, event.request_id, now)
    return _logged(state, now, "error", event.message)


def _log(state: State, event: wire.Log, now: float) -> State:
    return _logged(state, event.time, event.level, event.message)


def _told(state: State, event: Told, now: float) -> State:
    return _logged(state, now, event.level, event.message)


def _logged(state: State, time: float, level: str, message: str) -> State:
    return replace(state, log=(*state.log, LogLine(time, level, message))[-LOG_LIMIT:])


def _pong(state: State, event: wire.Pong, now: float) -> State:
    return state


_HANDLERS: dict[type, Callable[[State, Any, float], State]] = {
    wire.Welcome: _welcome,
    wire.Refused: _refused,
    wire.Load: _load,
    wire.Queued: _reply_message,
    wire.Delta: _delta,
    wire.Done: _reply_message,
    wire.Stats: _stats,
    wire.GateView: _gate,
    wire.Requests: _requests,
    wire.LeverEvent: _lever_event,
    wire.LeverRefused: _lever_refused,
    wire.QueryResult: _query_result,
    wire.Log: _log,
    wire.Pong: _pong,
    wire.Problem: _problem,
    Dropped: _dropped,
    Sent: _sent,
    Said: _said,
    Retold: _retold,
    Opened: _opened,
    Told: _told,
}
